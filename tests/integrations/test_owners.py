"""An optimizer that looks at whole matrices steps by owners under accelerate and Lightning as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import test_accelerate, test_lightning
from tests.integrations.launched import close, plain
from tests.workers import Workers

ADAMW, ADAFACTOR = "torch.optim.AdamW(", "torch.optim.Adafactor("


def scripts(package: str, stage: int) -> tuple[str, str]:
    """As it is, and with the lines changed that a guide says; both with Adafactor in the place of AdamW."""
    if package == "accelerator":
        pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zerofx[transformers]")
        texts = plain(package), test_accelerate.changed(stage)
    else:
        pytest.importorskip("lightning", reason="lightning is not installed: pip install zerofx[lightning]")
        texts = plain(package), test_lightning.changed(package, stage, "full")
    assert all(ADAMW in text for text in texts)
    one, other = (text.replace(ADAMW, ADAFACTOR) for text in texts)
    return one, other


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("package", ["accelerator", "fabric", "lightning_trainer"])
def test_trainers_step_by_owners_save_and_go_on_as_with_ddp(
    workers2: Workers, package: str, stage: int, tmp_path: Path
) -> None:
    file = {"accelerator": "ten", **test_lightning.CHECKPOINT}[package]
    theirs, ours = scripts(package, stage)
    checkpoints = {name: [str(tmp_path / name / file)] for name in ("ddp", "zerofx")}
    expected = workers2.run(test_lightning.results, theirs, str(tmp_path / "ddp"), checkpoints["ddp"], timeout=280)
    found = workers2.run(test_lightning.results, ours, str(tmp_path / "zerofx"), checkpoints["zerofx"], timeout=280)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
