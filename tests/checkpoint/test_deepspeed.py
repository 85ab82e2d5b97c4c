"""Checkpoints that DeepSpeed wrote (tests/checkpoint/make_deepspeed.py) are read as DeepSpeed reads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zerofx
from tests.checkpoint.make_deepspeed import KEYS, Net, groups
from tests.checkpoint.nets import EACH_GROUP, whole
from tests.workers import Workers

FOLDER = Path(__file__).resolve().parent / "deepspeed"
CASES = [f"{precision}-{stage}" for precision in ("fp32", "bf16") for stage in (1, 2, 3)]


def check(case: str, low: bool) -> None:
    folder = FOLDER / case
    expected = torch.load(folder / "expected.pt", weights_only=True)
    plain = Net()
    dtype = torch.bfloat16 if low else torch.float32
    model: Any = Net().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    zerofx.shard(model, groups=EACH_GROUP, stage=2)
    optimizer = zerofx.AdamW(groups(model), lr=0.5, weight_decay=0.9)
    zerofx.load(folder, model, optimizer)
    kept = torch.bfloat16 if low or case.startswith("bf16") else torch.float32
    assert torch.equal(whole(model.frozen), plain.frozen.to(kept).to(dtype))
    assert torch.equal(model.table, plain.table.to(dtype))  # DeepSpeed leaves buffers as they are
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        state = optimizer.state[p]
        assert torch.equal(whole(p), expected[name].to(dtype)), name
        assert torch.equal(whole(state["master"]) if low else whole(p), expected[name]), name
        for key in KEYS:
            assert torch.equal(whole(state[key]), expected[f"{key} of {name}"]), (key, name)
        assert float(state["step"]) == 3
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.01, 0.1), (0.01, 0.0)]


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_weights_masters_moments_steps_and_options_are_deepspeeds(workers3: Workers, case: str, low: bool) -> None:
    workers3.run(check, case, low)


def test_a_missing_rank_and_foreign_code_are_refused(tmp_path: Path) -> None:
    import os

    model = Net()
    shutil.copytree(FOLDER / "fp32-2", tmp_path / "less")
    next(tmp_path.glob("less/*/*rank_1*optim_states.pt")).unlink()
    with pytest.raises(zerofx.CheckpointError, match="written by 2 ranks"):
        zerofx.load(tmp_path / "less", model)
    shutil.copytree(FOLDER / "fp32-2", tmp_path / "forged")

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/executed",)

    torch.save({"optimizer_state_dict": Evil()}, next(tmp_path.glob("forged/*/*rank_1*optim_states.pt")))
    with pytest.raises(zerofx.CheckpointError, match="system"):
        zerofx.load(tmp_path / "forged", model)
    assert not (tmp_path / "executed").exists()
