"""Programs for DeepSpeed, and what docs/from-deepspeed.md makes of each: run by torchrun, one case after another.

    torchrun --standalone --nproc-per-node 2 tests/parity/deepspeed_programs.py deepspeed OUT.json [CASE ...]
    torchrun --standalone --nproc-per-node 2 tests/parity/deepspeed_programs.py zerofx OUT.json [CASE ...]

DeepSpeed changes PyTorch as it is imported, so each of the two runs in processes of its own.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

STEPS, ROWS, LR = 8, 2, 0.01
N, TOTAL = 3, 7  # steps of a warmup, and of a schedule


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 44), nn.Linear(44, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(67, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(16, 67, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1).float(), tokens.flatten())


def warmup(step: int) -> float:
    return math.log(max(step, 1)) / math.log(N)


def decayed(step: int) -> float:
    return warmup(step) if step <= N else max(0.0, (TOTAL + 1 - step) / (TOTAL - N))


def cosine(step: int, lowest: float = 1e-4) -> float:
    done = min(1.0, (step - N) / (TOTAL - N))
    return warmup(step) if step <= N else lowest + (1 - lowest) * (1 + math.cos(math.pi * done)) / 2


def one_cycle(step: int, lowest: float = 0.1) -> float:
    up, down = N, TOTAL - N
    done = step / up if step <= up else max(0.0, (up + down - step) / down)
    return lowest + (1 - lowest) * done


def zerofx_muon(model: Any) -> Any:
    import zerofx

    return zerofx.Muon(model, lr=0.02, adamw_lr=LR, adamw_betas=(0.9, 0.999), weight_decay=0.0)


CLIPS_UPDATES = {"gradient_clipping": 0.0}  # with Muon DeepSpeed clips what is orthogonalized, not gradients
MUON = {"ns_method": "standard", "torch_adam": True, "weight_decay": 0.0}


def scheduled(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


Make = Callable[[Any], Any]


@dataclass
class Case:
    """One row of the guide, or several.

    Attributes:
        config: DeepSpeed's keys, beside those that all cases have.
        stage, options: of `zerofx.compile`.
        prepare: what is done with the module first, for zerofx.
        optimizer, scheduler: made for zerofx.
        micro_batches: forwards of a step.
        clip: of all gradients' norm.
    """

    config: dict[str, Any]
    stage: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Make = lambda model: model
    optimizer: Make | None = None
    scheduler: Make | None = None
    micro_batches: int = 1
    clip: float = 1.0  # gradient_clipping's default


def adamw(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": LR, "torch_adam": True, **params}}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


CASES: dict[str, Case] = {
    **{f"stage {s}": Case({**zero(s), **adamw()}, stage=s) for s in range(4)},
    **{
        f"clipped, 3 micro-batches, stage {s}": Case(
            {**zero(s), **adamw(), "gradient_clipping": 0.5, "gradient_accumulation_steps": 3},
            stage=s,
            micro_batches=3,
            clip=0.5,
        )
        for s in range(4)
    },
    **{
        f"bf16, stage {s}": Case(
            {**zero(s), **adamw(), "bf16": {"enabled": True}},
            stage=s,
            prepare=lambda model: model.bfloat16(),
        )
        for s in (1, 2, 3)
    },
    "not clipped": Case({**zero(3), **adamw(), "gradient_clipping": 0.0}, clip=0.0),
    "Adam is AdamW": Case({**zero(2), **adamw("Adam")}, stage=2),
    "AdamW without adam_w_mode": Case({**zero(1), **adamw("AdamW", adam_w_mode=False)}, stage=1),
    "Adam without adam_w_mode": Case(
        {**zero(2), **adamw("Adam", weight_decay=0.1, adam_w_mode=False)},
        stage=2,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=LR, weight_decay=0.1),
    ),
    "WarmupLR": Case(
        {**zero(3), **adamw(), **scheduled("WarmupLR", warmup_max_lr=LR, warmup_num_steps=N)},
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, warmup(step))),
    ),
    "WarmupLR, linear": Case(
        {**zero(3), **adamw(), **scheduled("WarmupLR", warmup_max_lr=LR, warmup_num_steps=N, warmup_type="linear")},
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, max(step - 1, 0) / N)),
    ),
    "WarmupDecayLR": Case(
        {
            **zero(2),
            **adamw(),
            **scheduled("WarmupDecayLR", warmup_max_lr=LR, warmup_num_steps=N, total_num_steps=TOTAL),
        },
        stage=2,
        scheduler=lambda optimizer: LambdaLR(optimizer, decayed),
    ),
    "WarmupCosineLR": Case(
        {**zero(1), **adamw(), **scheduled("WarmupCosineLR", warmup_num_steps=N, total_num_steps=TOTAL)},
        stage=1,
        scheduler=lambda optimizer: LambdaLR(optimizer, cosine),
    ),
    "OneCycle": Case(
        {
            **zero(2),
            **adamw(),
            **scheduled(
                "OneCycle",
                cycle_min_lr=LR / 10,
                cycle_max_lr=LR,
                cycle_first_step_size=N,
                cycle_second_step_size=TOTAL - N,
                cycle_momentum=False,
            ),
        },
        stage=2,
        scheduler=lambda optimizer: LambdaLR(optimizer, one_cycle),
    ),
    **{
        f"Muon, stage {s}": Case(
            {
                **zero(s, reduce_scatter=False),
                "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": LR, **MUON}},
                **CLIPS_UPDATES,
            },
            stage=s,
            clip=0.0,
            optimizer=lambda model: zerofx_muon(model),
        )
        for s in (1, 2, 3)
    },
    "leaf modules": Case({**zero(3, leaf_module={"classes": ["Block"]}), **adamw()}, options={"leaf_modules": [Block]}),
    "small buckets": Case(
        {**zero(2, reduce_bucket_size=500, allgather_bucket_size=500), **adamw()},
        stage=2,
    ),
}


def batch(step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    return torch.randint(67, (ROWS, 6), generator=generator)


def by_deepspeed(case: Case) -> dict[str, Any]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    model = Net()
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 1, **case.config}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(case.micro_batches):
            loss = engine(batch(step, micro))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm() or 0.0) if case.clip else 0.0)
    whole = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    weights = {name: w.flatten().tolist() for name, w in whole.items() if w is not None}
    engine.destroy()
    return {"losses": losses, "norms": norms, "weights": weights}


def by_zerofx(case: Case) -> dict[str, Any]:
    import zerofx

    model = zerofx.compile(case.prepare(Net()), stage=case.stage, executor="eager", **case.options)
    make = case.optimizer or (lambda m: zerofx.AdamW(m.parameters(), lr=LR, max_grad_norm=case.clip or None))
    optimizer: Any = make(model)
    scheduler = case.scheduler(optimizer) if case.scheduler is not None else None
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(case.micro_batches):
            loss = model(batch(step, micro))
            (loss / case.micro_batches).backward()
            losses.append(loss.item())
        if case.optimizer is not None and case.clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        norms.append(float(optimizer.grad_norm if case.optimizer is None else norm) if case.clip else 0.0)
    weights = {}
    for name, p in model.named_parameters():
        found = optimizer.state[p].get("master", p)
        whole = found.full_tensor() if isinstance(found, zerofx.ShardedTensor) else found.detach()
        weights[name] = whole.float().flatten().tolist()
    return {"losses": losses, "norms": norms, "weights": weights}


def main() -> None:
    package, path, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    run = {"deepspeed": by_deepspeed, "zerofx": by_zerofx}[package]
    found = {}
    for name, case in CASES.items():
        if names and name not in names:
            continue
        torch._dynamo.reset()
        torch.manual_seed(0)
        found[name] = run(case)
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
