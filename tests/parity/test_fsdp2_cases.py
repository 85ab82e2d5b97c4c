"""Cases of PyTorch's own FSDP2 tests, by their names, written anew: those that no other test here has.

docs/fsdp2-parity.md lists all of them and says where each is. Two ranks; what is compared with is one process on the
whole batch. What trains does so in every stage with both executors, in ``make test`` in stage 3, with Inductor where
layers are checkpointed. The others are of stage 3 and run with the eager executor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.agreement import assert_ranks_agree
from tests.pairwise import EXECUTORS, STAGES
from tests.slow import quick_if, slow

DIM, ROWS = 10, 3
EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear, nn.LayerNorm), min_bytes=0)


class MLP(nn.Module):
    """FSDP2's usual block."""

    def __init__(self, dim: int = DIM, inner: int = 17) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.outer(torch.relu(self.inner(x))))


def pair(build: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    """A module of each kind, compiled and plain, with the same weights."""
    torch.manual_seed(1)
    plain = build()
    options = {"stage": 3, "executor": "eager", "groups": EACH_LAYER, **options}
    return zerofx.compile(copy.deepcopy(plain), **options), plain


def rows(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows, and all."""
    x = torch.randn(dist.get_world_size(), ROWS, DIM, generator=torch.Generator().manual_seed(step))
    return x[dist.get_rank()], x.flatten(0, 1)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or a gradient with all its values: stage 0 has them, other stages gather them."""
    return tensor.full_tensor() if isinstance(tensor, zerofx.ShardedTensor) else tensor.detach()


def same_gradients(net: nn.Module, plain: nn.Module, zeros: bool = False) -> None:
    """``zeros``: where one process has no gradient there may be zeros."""
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        if zeros and p.grad is not None and q.grad is None:
            assert not whole(p.grad).any(), name
            continue
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-6, msg=f"{name}: {{}}".format)


def check_parity(
    build: Callable[[], nn.Module], loss: Callable[[Any, Any], Any], steps: int = 3, zeros: bool = False, **options: Any
) -> None:
    """Losses, gradients and weights of a few steps of Adam; ``zero_grad`` both ways."""
    net, plain = pair(build, **options)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-3) for m in (net, plain)]
    for step in range(steps):
        mine, every = rows(step)
        got, wanted = loss(net, mine), loss(plain, every)
        got.backward()
        wanted.backward()
        dist.all_reduce(mean := got.detach().clone())
        torch.testing.assert_close(mean / dist.get_world_size(), wanted.detach(), rtol=1e-5, atol=1e-6)
        same_gradients(net, plain, zeros)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert_ranks_agree(net)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach(), rtol=1e-4, atol=1e-5)


def mean_square(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


class NoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, DIM))

    def forward(self) -> torch.Tensor:
        return self.weight.square().sum()


class Shared(nn.Module):
    """One layer under two names, called twice, and a weight shared with a third; five rows go unevenly to two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.again, self.last = self.first, nn.Linear(DIM, DIM, bias=False)
        self.odd = nn.Linear(DIM, 5)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.last(torch.tanh(self.again(torch.tanh(self.first(x))))))


class Checkpointed(nn.Module):
    """Blocks of which each is computed again in backward, by either kind of checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem, self.blocks = nn.Linear(DIM, DIM), nn.ModuleList(MLP() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)  # type: ignore[operator]
        return x


class Two(nn.Module):
    """Two outputs, and a module that no call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = MLP(), MLP(), MLP()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


class Nontensor(nn.Module):
    """Hands on what is no tensor, in a container of its own."""

    @dataclass
    class Bundle:
        x: torch.Tensor
        scale: int
        notes: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bundle = self.Bundle(self.first(x), 3, ["kept"])
        return self.second(bundle.x * bundle.scale + len(bundle.notes))


def half_frozen() -> nn.Module:
    """In every block one layer is frozen and one is not; the last is frozen whole."""
    net = nn.Sequential(MLP(), MLP(), MLP())
    net[2].requires_grad_(False)
    for block in net:
        block.inner.requires_grad_(False)
    return net


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), MLP(), nn.LayerNorm(DIM), MLP())


def preferences(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two forwards and one backward, as in direct preference optimisation."""
    chosen, rejected = net(x), net(-x)
    return -nn.functional.logsigmoid(chosen - rejected).mean()


PARITY: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any], dict[str, Any]]] = {
    "root_no_forward_inputs": (NoInputs, lambda net, x: net(), {"groups": None}),
    "train_parity_single_group": (stack, mean_square, {"groups": None}),
    "train_parity_multi_group": (stack, mean_square, {}),
    "train_parity_with_shared_params": (Shared, mean_square, {}),
    "train_shared_params_uneven_shard": (Shared, mean_square, {"groups": None}),
    "train_parity_with_activation_checkpointing": (lambda: Checkpointed(False), mean_square, {}),
    "train_parity_with_reentrant_checkpointing": (lambda: Checkpointed(True), mean_square, {}),
    "double_forward_with_checkpoint": (lambda: Checkpointed(False), preferences, {}),
    "multi_forward_module": (lambda: MLP(), lambda net, x: net(net(x)).square().mean(), {}),
    # torch.compile itself makes zeros of the gradients that an unused output would bring.
    "unused_forward_output": (Two, lambda net, x: net(x)[0].square().mean(), {"zeros": True}),
    "unused_forward_module": (Two, lambda net, x: sum(net(x)).square().mean(), {}),
    "nontensor_activations": (Nontensor, mean_square, {}),
    "train_mixed_requires_grad_per_group": (half_frozen, mean_square, {"groups": None}),
    "multi_forward_mixed_requires_grad": (half_frozen, lambda net, x: net(x).square().mean() + net(2 * x).mean(), {}),
    "list_of_mlps": (lambda: nn.Sequential(*(MLP(DIM, 3 + i) for i in range(4))), mean_square, {"groups": [MLP]}),
}


def run_parity(name: str, stage: int, executor: str) -> None:
    build, loss, options = PARITY[name]
    check_parity(build, loss, stage=stage, executor=executor, **options)


@quick_if(lambda name, stage, executor: stage == 3 and (executor == "eager" or "checkpoint" in name))
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", list(PARITY))
def test_a_case_of_fsdp2_trains_as_one_process(workers2, name: str, stage: int, executor: str) -> None:
    workers2.run(run_parity, name, stage, executor, timeout=250)


def check_freezing(stage: int, executor: str) -> None:
    """The first block is trained, then not, then again; the last the other way round."""
    net, plain = pair(lambda: nn.Sequential(MLP(), MLP(), MLP()), stage=stage, executor=executor)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, plain)]
    for step in range(4):
        mine, every = rows(step)
        for module, x in ((net, mine), (plain, every)):
            module[0].requires_grad_(step % 2 == 0)
            module[2].requires_grad_(step % 2 == 1)
            mean_square(module, x).backward()
        same_gradients(net, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("executor", ["eager", slow("inductor")])
@pytest.mark.parametrize("stage", STAGES)
def test_train_mixed_requires_grad_across_groups(workers2, stage: int, executor: str) -> None:
    workers2.run(check_freezing, stage, executor, timeout=250)


def check_registration() -> None:
    net, _ = pair(stack)
    before = dict(net.named_parameters())
    loss = mean_square(net, rows()[0])
    for stage in (lambda: None, loss.backward):
        stage()
        after = dict(net.named_parameters())
        assert list(after) == list(before) and all(after[name] is before[name] for name in before)
        assert all(isinstance(p, zerofx.ShardedParameter) for p in after.values())
        assert all(p.untyped_storage().nbytes() == 0 for p in after.values())


def test_param_registration_after_forward_and_backward(workers2) -> None:
    workers2.run(check_registration)


def check_non_root(stage: int, executor: str) -> None:
    net, plain = pair(lambda: nn.ModuleDict({"a": MLP(), "b": MLP()}), stage=stage, executor=executor)
    mine, every = rows()
    for module, x in ((net, mine), (plain, every)):
        module["a"](x).square().mean().backward()
        assert all(p.grad is None for p in module["b"].parameters())
    same_gradients(net, plain)


@quick_if(lambda stage, executor: stage == 3 or executor == "eager")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("stage", STAGES)
def test_non_root_forward_backward(workers2, stage: int, executor: str) -> None:
    workers2.run(check_non_root, stage, executor, timeout=250)


def check_1f1b(stage: int, executor: str) -> None:
    """One forward ahead of the backwards, as pipelines do it; only the last backward reduces."""
    net, plain = pair(stack, stage=stage, executor=executor)
    batches = [rows(step) for step in range(4)]
    waiting = [mean_square(net, batches[0][0])]
    for i in range(4):
        if i + 1 < 4:
            waiting.append(mean_square(net, batches[i + 1][0]))
        if i + 1 < 4:
            with zerofx.no_sync(net):
                waiting.pop(0).backward()
            assert all(p.grad is None for p in net.parameters())
        else:
            waiting.pop(0).backward()
        mean_square(plain, batches[i][1]).backward()
    same_gradients(net, plain)


@pytest.mark.parametrize("executor", ["eager", slow("inductor")])
@pytest.mark.parametrize("stage", STAGES)
def test_1f1b_microbatching(workers2, stage: int, executor: str) -> None:
    workers2.run(check_1f1b, stage, executor, timeout=250)


def check_cached_state_dict() -> None:
    net, _ = pair(stack)
    cached = net.state_dict()
    for step in range(2):
        before = {name: value.full_tensor() for name, value in cached.items()}
        mean_square(net, rows(step)[0]).backward()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        optimizer.step()
        optimizer.zero_grad()
        now = net.state_dict()
        for name, value in cached.items():
            assert torch.equal(value.full_tensor(), now[name].full_tensor())
        assert not all(torch.equal(cached[name].full_tensor(), before[name]) for name in cached)


def test_cached_state_dict(workers2) -> None:
    workers2.run(check_cached_state_dict)


@dataclass
class Inputs:
    x: torch.Tensor
    scale: float


torch.utils._pytree.register_dataclass(Inputs)


class TakesInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, inputs: Inputs) -> torch.Tensor:
        return self.layer(inputs.x) * inputs.scale


def dataclass_input() -> torch.dtype:
    net, _ = pair(TakesInputs, mixed_precision=zerofx.MixedPrecision(torch.bfloat16))
    out = net(Inputs(rows()[0], 2.0))
    out.float().mean().backward()
    assert net.layer.weight.grad is not None
    return out.dtype


def test_dataclass_input(workers2) -> None:
    assert workers2.run(dataclass_input) == [torch.bfloat16] * 2


def norm_modules(dtype: torch.dtype) -> torch.dtype:
    """A normalisation computes in low precision as well."""
    precision = zerofx.MixedPrecision(dtype)
    net, _ = pair(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM)), mixed_precision=precision)
    out = net(rows()[0])
    out.float().square().mean().backward()
    assert all(p.grad.to_local().isfinite().all() for p in net.parameters())
    return out.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_modules_bf16_and_fp16(workers2, dtype: torch.dtype) -> None:
    assert workers2.run(norm_modules, dtype, timeout=120) == [dtype] * 2


def check_exact_clip(order: float) -> None:
    net, plain = pair(stack)
    mine, whole = rows()
    mean_square(net, mine).backward()
    mean_square(plain, whole).backward()
    got, wanted = (nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type=order) for m in (net, plain))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-7)
    same_gradients(net, plain)


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_1d(workers2, order: float) -> None:
    workers2.run(check_exact_clip, order)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = MLP(), MLP(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


def check_between_replicas() -> None:
    torch.manual_seed(1)
    plain = Three()
    net = copy.deepcopy(plain)
    data_parallel = nn.parallel.DistributedDataParallel
    net.a, net.c = data_parallel(net.a), data_parallel(net.c)
    net.b = zerofx.compile(net.b, stage=3, executor="eager")
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-3) for m in (net, plain)]
    for step in range(3):
        mine, whole = rows(step)
        for m, x in ((net, mine), (plain, whole)):
            mean_square(m, x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        full = p.full_tensor() if isinstance(p, zerofx.ShardedTensor) else p.detach()
        torch.testing.assert_close(full, q.detach(), rtol=1e-4, atol=1e-5)


def test_ddp_a_fsdp_b_ddp_c(workers2) -> None:
    """A sharded module between two that DistributedDataParallel replicates."""
    workers2.run(check_between_replicas)


class Dtyped(nn.Module):
    """Says what it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(x)
        self.computed_in = y.dtype
        return y


def check_one_low_submodule() -> None:
    net, plain = (nn.Sequential(Dtyped(), Dtyped()) for _ in range(2))
    net.load_state_dict(plain.state_dict())
    precision = zerofx.MixedPrecision(torch.float16, torch.float32, output_dtype=torch.float32)
    zerofx.compile(net[0], stage=3, executor="eager", mixed_precision=precision)
    zerofx.compile(net[1], stage=3, executor="eager")
    mine, whole = rows()
    mean_square(net, mine).backward()
    mean_square(plain, whole).backward()
    assert [m.computed_in for m in net] == [torch.float16, torch.float32]
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == torch.float32, name
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-2, atol=1e-3, msg=f"{name}: {{}}".format)


def test_float16_on_one_submodule(workers2) -> None:
    workers2.run(check_one_low_submodule)


def two_linears() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(DIM, 17), nn.Linear(17, DIM)])


def layers_one_by_one(net: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return net[1](torch.tanh(net[0](x))).square().mean()


def test_fully_shard_unsupported_module_cls(workers2) -> None:
    """FSDP2 refuses a module without forward; here its layers, called one by one, gather on demand."""
    workers2.run(check_parity, two_linears, layers_one_by_one)
