"""Made tests/checkpoint/deepspeed, with DeepSpeed 0.19.8 on two gloo ranks; it need not run again.
Remove a folder to have it made anew.

    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu python tests/checkpoint/make_deepspeed.py

``expected.pt`` is what DeepSpeed itself says its weights and moments are.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

HERE = Path(__file__).resolve().parent
KEYS = ("exp_avg", "exp_avg_sq")


class Net(nn.Module):
    """Two parameter groups, a tied weight, a frozen one, a buffer; nothing divides by two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 11)
        self.second = nn.Linear(11, 7)
        self.tied = nn.Linear(7, 11, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.LayerNorm(11)
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.register_buffer("table", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.tied(self.second(torch.tanh(self.first(x))))) + self.frozen.mean()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]


def main(rank: int, stage: int, low: bool, out: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(29700 + 10 * stage + low)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed("gloo")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": low},
    }
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + rank)
        x = torch.randn(2, 7, generator=generator).to(torch.bfloat16 if low else torch.float32)
        engine.backward(engine(x).float().square().mean() + engine(x).float()[0, 0])
        engine.step()
    engine.save_checkpoint(str(out))
    if stage < 3:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected: dict[str, Any] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            expected[name] = safe_get_full_fp32_param(p).clone()
            for key in KEYS:
                expected[f"{key} of {name}"] = safe_get_full_optimizer_state(p, key).clone()
    if rank == 0:
        torch.save(expected, out / "expected.pt")
    dist.barrier()


if __name__ == "__main__":
    for stage in (1, 2, 3):
        for low in (False, True):
            out = HERE / "deepspeed" / f"{'bf16' if low else 'fp32'}-{stage}"
            if (out / "expected.pt").exists():
                continue
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            spawn: Any = torch.multiprocessing.spawn
            spawn(main, (stage, low, out), nprocs=2)
            for script in out.glob("*.py"):
                script.unlink()
    sys.exit(0)
