"""``module.to(...)`` and its like: what changes nothing does nothing, in every stage; the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.workers import Workers
from zerofx import ShardedTensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("shift", torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(h := self.first(x)) + self.shift.to(h.dtype)).square().mean()


NOTHING: dict[str, Callable[[nn.Module], Any]] = {
    "to a device": lambda module: module.to("cpu"),
    "to a device with a number": lambda module: module.to(torch.device("cpu", 0)),
    "to a dtype": lambda module: module.to(torch.float32),
    "to both, while something else runs": lambda module: module.to("cpu", torch.float32, non_blocking=True),
    "to what another tensor is": lambda module: module.to(torch.empty(1)),
    "to a memory format": lambda module: module.to(memory_format=torch.channels_last),
    "cpu": lambda module: module.cpu(),
    "float": lambda module: module.float(),
    "type": lambda module: module.type(torch.float32),
    "_apply": lambda module: module._apply(lambda t: t.detach()),
    "of a part": lambda module: module.first.to(torch.device("cpu", 0)),
}

CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "bfloat16": lambda module: module.bfloat16(),
    "to a dtype": lambda module: module.to(torch.bfloat16),
    "to a device": lambda module: module.to("meta"),
    "to both": lambda module: module.to("meta", torch.float16),
    "type": lambda module: module.type(torch.float64),
    "to_empty": lambda module: module.to_empty(device="meta"),
    "of a part": lambda module: module.second.half(),
    "data": lambda module: setattr(module.first.weight, "data", module.first.weight.data.double()),
}

NEW_MEMORY: dict[str, Callable[[nn.Module], Any]] = {
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "share_memory": lambda module: module.share_memory(),
    "a copy": lambda module: module._apply(lambda t: t.clone()),
    "other values": lambda module: module._apply(lambda t: t * 2),
}


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x.detach().clone()


def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    module(x).backward()
    optimizer.step()
    optimizer.zero_grad()


def check_nothing(stage: int, dtype: torch.dtype | None) -> None:
    """Before the first step, with gradients, and after a step: training goes on as if nobody had asked."""
    torch.manual_seed(0)
    plain, module = Net(), Net()
    module.load_state_dict(plain.state_dict())
    precision = None if dtype is None else zerofx.MixedPrecision(dtype)
    zerofx.compile(module, stage=stage, executor="eager", mixed_precision=precision)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, module)]
    held = optimizers[1].param_groups[0]["params"]
    for i, (what, convert) in enumerate(NOTHING.items()):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(i))
        mine = x.chunk(dist.get_world_size())[dist.get_rank()]
        assert convert(module) in (module, module.first), what
        module(mine).backward()
        grads = [p.grad for p in held]
        convert(module)
        assert all(p is q for p, q in zip(held, module.parameters(), strict=True)), what
        assert all(p.grad is grad for p, grad in zip(held, grads)), what
        optimizers[1].step()
        optimizers[1].zero_grad()
        step(plain, optimizers[0], x)
        for (name, p), q in zip(module.named_parameters(), plain.parameters()):
            loose = {} if dtype is None else {"rtol": 0.1, "atol": 0.05}
            torch.testing.assert_close(full(p), q.detach(), msg=f"{what}, {name}: {{}}".format, **loose)
    (record,) = zerofx.graphs(module)
    assert record.backward is not None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_changes_nothing_does_nothing(workers2: Workers, stage: int, dtype: torch.dtype | None) -> None:
    workers2.run(check_nothing, stage, dtype)


def refusals(actions: str, stage: int) -> dict[str, str]:
    """What each of the ``actions``, by their table's name, raises; "" if it is let through.

    After an error all parameters and buffers are as they were: those too that come before what is refused, also of
    modules around that are not sharded.
    """

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.norm, self.first, self.second, self.inner = nn.BatchNorm1d(3), inner.first, inner.second, inner

    found = {}
    for what, action in globals()[actions].items():
        module = Around(zerofx.shard(Net(), stage=stage))
        before = [(p, p.dtype, p.device, full(p)) for p in module.parameters()]
        buffers = [(b, b.dtype, b.data_ptr(), b.is_shared(), b.clone()) for b in module.buffers()]
        assert len(buffers) == 4
        try:
            action(module)
            found[what] = ""
            continue
        except RuntimeError as error:
            found[what] = str(error)
        for q, (p, *facts, value) in zip(module.parameters(), before, strict=True):
            assert p is q and [q.dtype, q.device] == facts and torch.equal(full(q), value), what
        for c, (b, *memory, value) in zip(module.buffers(), buffers, strict=True):
            assert b is c and [c.dtype, c.data_ptr(), c.is_shared()] == memory and torch.equal(c, value), what
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_another_dtype_or_device_is_refused_with_what_to_do_instead(workers2: Workers, stage: int) -> None:
    for found in workers2.run(refusals, "CHANGES", stage):
        for what, message in found.items():
            name = "second.weight" if what == "of a part" else "first.weight"
            assert f"'{name}'" in message, f"{what}: {message}"
            assert "before zerofx.compile or zerofx.shard" in message, f"{what}: {message}"
        assert "from torch.float32 on cpu to torch.float16 on cpu" in found["half"]
        assert "mixed_precision=zerofx.MixedPrecision" in found["to a dtype"]


@pytest.mark.parametrize("stage", [2, 3])
def test_memory_of_its_own_for_a_slice_is_refused(workers2: Workers, stage: int) -> None:
    for found in workers2.run(refusals, "NEW_MEMORY", stage):
        assert all("'first.weight'" in message for message in found.values()), found
        assert "full_state_dict" in found["share_memory"]


def check_new_memory() -> None:
    for what, action in NEW_MEMORY.items():
        torch.manual_seed(0)
        plain, module = Net(), Net()
        module.load_state_dict(plain.state_dict())
        zerofx.compile(module, stage=0, executor="eager")
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, module)]
        for i in range(2):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(i))
            step(module, optimizers[1], x.chunk(dist.get_world_size())[dist.get_rank()])
            step(plain, optimizers[0], x)
            for m in (plain, module):
                action(m)
                if what == "to_empty":
                    m.load_state_dict({name: torch.full_like(t, 0.5) for name, t in m.state_dict().items()})
        for (name, p), q in zip(module.named_parameters(), plain.parameters()):
            torch.testing.assert_close(p.detach(), q.detach(), msg=f"{what}, {name}: {{}}".format)


def test_in_stage_0_a_parameter_may_get_other_memory_and_trains_on(workers2: Workers) -> None:
    workers2.run(check_new_memory)
