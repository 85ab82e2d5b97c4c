"""Scripts of Lightning's Fabric and Trainer with another strategy train as with DDP, save and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.launched import as_torchrun_would, close, converted, plain, run_script
from tests.slow import quick_if
from tests.workers import Workers

pytest.importorskip("lightning", reason="lightning is not installed: pip install zerofx[lightning]")

OPTIONS = 'state_dict_type="{kind}", zerofx={{"stage": {stage}, "executor": "eager"}}'
LINES = {
    "fabric": (
        'fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")',
        f'fabric = Fabric(accelerator="cpu", devices=2, strategy=zerofx.FabricStrategy({OPTIONS}))',
    ),
    "lightning_trainer": ('strategy="ddp",', f"strategy=zerofx.TrainerStrategy({OPTIONS}),"),
}
CHECKPOINT = {"fabric": "ten.ckpt", "lightning_trainer": "epoch=0.ckpt"}


def changed(name: str, stage: int, kind: str) -> str:
    """The script with the strategy's line changed; and the import that it needs."""
    old, new = LINES[name]
    text = converted(name, {old: new.format(kind=kind, stage=stage)})
    return f"import zerofx.integrations.lightning as zerofx\n{text}"


def results(text: str, folder: str, checkpoints: list[str]) -> list[Any]:
    """The script from the start, and from each checkpoint."""
    return [run_script(text, folder, *checkpoint) for checkpoint in [[], *([c] for c in checkpoints)]]


@pytest.fixture(scope="module")
def references(workers2: Workers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Any], Path]]:
    """What the scripts do as they are, and their folders."""
    found = {}
    for name in LINES:
        folder = tmp_path_factory.mktemp(name)
        found[name] = workers2.run(run_script, plain(name), str(folder), timeout=250), folder
    return found


CASES = [
    ("fabric", 3, "full"),
    ("fabric", 1, "sharded"),
    ("lightning_trainer", 3, "full"),
    ("lightning_trainer", 2, "sharded"),
    ("fabric", 2, "full"),
    ("fabric", 3, "sharded"),
    ("lightning_trainer", 1, "full"),
    ("lightning_trainer", 0, "full"),
    ("lightning_trainer", 3, "sharded"),
]


@quick_if(lambda name, stage: (name, stage) == ("fabric", 1))
@pytest.mark.parametrize(("name", "stage", "kind"), CASES)
def test_another_strategy_accumulates_clips_evaluates_saves_and_goes_on_as_with_ddp(
    workers2: Workers,
    references: dict[str, tuple[list[Any], Path]],
    name: str,
    stage: int,
    kind: str,
    tmp_path: Path,
) -> None:
    expected, folder = references[name]
    file = CHECKPOINT[name]
    checkpoints = [str(tmp_path / "first" / file), str(folder / file)]  # its own, and one of DDP
    found = workers2.run(results, changed(name, stage, kind), str(tmp_path / "first"), checkpoints, timeout=250)
    for (start, own, ddp), reference in zip(found, expected, strict=True):
        assert len(reference["losses"]) == 40  # 20 steps of two micro-batches
        close(start, reference)
        for resumed in (own, ddp):
            close(resumed["losses"], reference["losses"][20:])
            for what in ("norms", "evaluations"):
                close(resumed.get(what), reference[what][len(reference[what]) // 2 :] if what in reference else None)
    assert (tmp_path / "first" / file).is_dir() == (kind == "sharded")
    if kind == "full":
        ours, theirs = (torch.load(path / file, weights_only=True) for path in (tmp_path / "first", folder))
        weights = "model" if name == "fabric" else "state_dict"
        torch.testing.assert_close(ours[weights], theirs[weights], rtol=1e-4, atol=1e-5)


def check_refused(which: str) -> str:
    import lightning
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import TransformerEnginePrecision

    from zerofx.integrations.lightning import FabricStrategy, TrainerStrategy

    with as_torchrun_would(), pytest.raises(ValueError) as error:
        if which == "ddp":
            TrainerStrategy(find_unused_parameters=True)
        elif which == "kind":
            FabricStrategy(state_dict_type="whole")  # type: ignore[arg-type]
        elif which == "precision":
            FabricStrategy(precision=object.__new__(TransformerEnginePrecision))
        elif which == "batchnorm":
            module = lightning.LightningModule()
            module.layer, module.train_dataloader = nn.Linear(2, 2), lambda: []  # type: ignore[method-assign]
            module.training_step, module.configure_optimizers = lambda *_: None, lambda: None  # type: ignore
            strategy = TrainerStrategy()
            lightning.Trainer(
                accelerator="cpu", devices=2, strategy=strategy, sync_batchnorm=True, logger=False, max_epochs=1
            )
            strategy.setup(None)
        else:
            Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(zerofx={"stage": 7}))
    return str(error.value)


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("ddp", "TrainerStrategy(find_unused_parameters=True): expected none of DistributedDataParallel's arguments"),
        ("kind", "FabricStrategy(state_dict_type='whole'): expected 'full' or 'sharded'"),
        ("precision", "the precision plugin TransformerEnginePrecision with FabricStrategy: expected one that leaves"),
        ("batchnorm", "Trainer(sync_batchnorm=True) with TrainerStrategy: expected False"),
        ("stage", "FabricStrategy(zerofx=...): stage=7: expected 0, 1, 2 or 3"),
    ],
)
def test_what_does_not_go_together_with_zerofx_is_refused_by_name(workers2: Workers, which: str, text: str) -> None:
    assert text in workers2.run(check_refused, which)[0]
