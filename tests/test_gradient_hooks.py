"""Hooks on gradients see the average over ranks, once a backward, as in one process that has the whole batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.counting import count_collectives
from tests.slow import quick_if, slow
from tests.test_parameters import full, mine
from tests.workers import Workers
from zerofx import ShardedTensor

EACH_GROUP = zerofx.Grouping(min_bytes=0)
ROWS, WIDTH = 12, 11
STAGES = [0, 1, 2, 3]


class Net(nn.Module):
    """One parameter of two graphs (``middle``), one of none (``lonely``), one that is frozen, one that is tied."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.lonely, self.frozen = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(self.middle(self.tied(self.frozen(x)))).square().mean()


def whole_mask() -> torch.Tensor:
    return (torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 3 > 0).float()


def rows_set_to_zero(g: Any) -> Any:
    g = g.clone()
    g[:2] = 0.0
    return g


def smaller(g: Any) -> Any:
    return None if bool(torch.isnan(g).any()) else g / (1.0 + 10.0 * g.norm())


def doubled(p: Any) -> None:
    p.grad.mul_(2.0)


HOOKS: dict[str, list[Callable[[Any], Any]]] = {
    "first.weight": [lambda g: g.clamp(-1e-3, 1e-3), lambda g: g * 3.0],  # in this order, on the sum of both uses
    "middle.weight": [lambda g: g.clamp(-2e-3, 2e-3), lambda g: None, lambda g: g * whole_mask()],
    "middle.bias": [smaller, lambda g: g + 0.1 * g[:1]],  # a norm; the whole
    "last.weight": [rows_set_to_zero, lambda g: whole_mask()[:, :1] * g],
    "last.bias": [lambda g: torch.where(g.abs() < 1e-3, g, g.sign() * 1e-3)],
    "tied.bias": [lambda g: torch.full(g.shape, 0.25)],  # a whole tensor
}


def twins(build: Callable[[], nn.Module] = Net, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = build()
    shard = zerofx.shard if options.pop("alone", False) else zerofx.compile
    return shard(copy.deepcopy(plain), **{"groups": EACH_GROUP, **options}), plain


def register(module: nn.Module, calls: list[str], hooks: dict[str, Any]) -> list[Any]:
    """The handles, and a hook in front that notes who is called."""
    handles = []
    for name, functions in hooks.items():
        p = module.get_parameter(name)
        handles.append(p.register_hook(lambda g, name=name: calls.append(name)))
        handles += [p.register_hook(function) for function in functions]
    return handles


def batch(seed: int) -> torch.Tensor:
    return 3.0 * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def same(module: nn.Module, plain: nn.Module, **tolerance: Any) -> None:
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-7}
    found = dict(module.named_parameters())
    for name, q in plain.named_parameters():
        p = found[name]
        assert (p.grad is None) == (q.grad is None), (name, p.grad, q.grad)
        if q.grad is not None:
            torch.testing.assert_close(full(p.grad), q.grad, msg=f"{name}: {{}}".format, **tolerance)
        torch.testing.assert_close(full(p).detach(), q.detach(), msg=f"{name}: {{}}".format, **tolerance)


def step(module: nn.Module, plain: nn.Module, optimizers: list[Any], seeds: tuple[int, ...]) -> None:
    """One step of as many backwards."""
    for seed in seeds:
        module(mine(batch(seed))).backward()
        plain(batch(seed)).backward()
    same(module, plain)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    same(module, plain)


def sgd(*modules: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in modules]


# -- in graphs


def check_hooks(stage: int, executor: str, breaks: bool) -> None:
    module, plain = twins(lambda: Net(breaks=breaks), stage=stage, executor=executor)
    optimizers, calls, wanted = sgd(module, plain), [], []  # type: ignore[var-annotated]
    step(module, plain, optimizers, (0,))  # compiled before there are hooks
    handles = [register(m, log, HOOKS) for m, log in ((module, calls), (plain, wanted))]
    for name in ("first.weight", "last.weight"):  # a hook that runs behind sees what the others made of it
        for m in (module, plain):
            m.get_parameter(name).register_post_accumulate_grad_hook(doubled)
    step(module, plain, optimizers, (1,))
    assert sorted(calls) == sorted(wanted) == sorted(HOOKS)  # once each, also where two graphs use it
    step(module, plain, optimizers, (2, 3))  # each backward's gradient, not their sum
    assert sorted(calls) == sorted(wanted) and len(calls) == 3 * len(HOOKS)
    for both in handles:
        for handle in both[::2]:
            handle.remove()
    step(module, plain, optimizers, (4,))
    for both in handles:
        for handle in both:
            handle.remove()
    calls.clear()
    step(module, plain, optimizers, (5,))
    assert not calls


@quick_if(lambda stage, executor, breaks: breaks and stage in ((0, 2) if executor == "eager" else (3,)))
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("stage", STAGES)
def test_hooks_are_those_of_one_process(
    workers2: Workers, workers3: Workers, stage: int, executor: str, breaks: bool
) -> None:
    (workers3 if breaks else workers2).run(check_hooks, stage, executor, breaks, timeout=200)


def check_kinds_of_gradients(stage: int) -> None:
    module, _ = twins(stage=stage, executor="eager")
    seen: dict[str, Any] = {}
    for name in HOOKS:
        module.get_parameter(name).register_hook(lambda g, name=name: seen.update({name: g}))
    module(mine(batch(0))).backward()
    for name, g in seen.items():
        p = module.get_parameter(name)
        assert isinstance(g, ShardedTensor) == (stage > 0), name
        assert (g.shape, g.dtype, g.requires_grad) == (p.shape, p.dtype, False), name
    whole = whole_mask()
    with count_collectives() as log:
        for name in ("first.weight", "last.weight"):
            (seen[name] * whole).clamp(-1, 1).mul_(whole[:1]).masked_fill_(whole > 0, 2.0)
            rows_set_to_zero(seen[name])
    assert not log.calls  # slice by slice


def check_others(stage: int) -> None:
    """Hooks of before, copies, accumulation, frozen parameters, inputs=, a backward that fails."""
    torch.manual_seed(0)
    plain = Net()
    module, calls, wanted = copy.deepcopy(plain), [], []  # type: ignore[var-annotated]
    handles = [register(m, log, HOOKS) for m, log in ((module, calls), (plain, wanted))]
    zerofx.compile(module, stage=stage, executor="eager", groups=EACH_GROUP)
    optimizers = sgd(module, plain)
    step(module, plain, optimizers, (0,))
    assert sorted(calls) == sorted(wanted) == sorted(HOOKS)
    handles[0][2].remove(), handles[1][2].remove()  # of before, too
    step(module, plain, optimizers, (1,))
    twin, simple = copy.deepcopy(module), copy.deepcopy(plain)  # no hooks of parameters come along, as in PyTorch
    calls.clear(), wanted.clear()
    step(twin, simple, sgd(twin, simple), (2,))
    assert not calls and not wanted
    same(module, plain)

    def noisy(g: Any) -> Any:
        raise ZeroDivisionError

    for m in (module, plain):
        broken = m.get_parameter("middle.bias").register_hook(noisy)
        with pytest.raises(ZeroDivisionError):
            m(batch(3)).backward()  # what waits for other hooks is of this backward, and goes with it
        broken.remove()
        m.zero_grad()
        m(batch(3)).backward(inputs=[m.get_parameter("first.weight"), m.get_parameter("last.weight")])
    same(module, plain)
    for m in (module, plain):
        m.zero_grad()
        m.get_parameter("first.weight").requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"is frozen|doesn't require grad"):
            m.get_parameter("first.weight").register_hook(print)
    step(module, plain, optimizers, (4,))
    for m in (module, plain):
        m.get_parameter("first.weight").requires_grad_(True)
    step(module, plain, optimizers, (5,))


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_hooks_of_before_copies_frozen_parameters_and_failures(workers2: Workers, stage: int) -> None:
    workers2.run(check_kinds_of_gradients, stage)
    workers2.run(check_others, stage)


def check_no_sync(stage: int) -> None:
    """What `no_sync` keeps is seen with the rest, once: as one process that adds up losses."""
    module, plain = twins(stage=stage, executor="eager")
    optimizers, calls, wanted = sgd(module, plain), [], []  # type: ignore[var-annotated]
    register(module, calls, HOOKS), register(plain, wanted, HOOKS)
    for seed in (0, 2):
        with zerofx.no_sync(module):
            module(mine(batch(seed))).backward()
        assert not calls
        module(mine(batch(seed + 1))).backward()
        (plain(batch(seed)) + plain(batch(seed + 1))).backward()
        assert sorted(calls) == sorted(wanted)
        calls.clear(), wanted.clear()
        same(module, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with zerofx.no_sync(module):
        module(mine(batch(5))).backward()
    module.lonely(mine(batch(6))).sum().div(ROWS // dist.get_world_size()).backward()  # the rest is reduced at its end
    (plain(batch(5)) + plain.lonely(batch(6)).sum() / ROWS).backward()
    same(module, plain)


def check_step_in_backward(stage: int) -> None:
    for make in (lambda m: torch.optim.SGD(m.parameters(), lr=0.5), lambda m: zerofx.AdamW(m.parameters(), lr=1e-2)):
        module, plain = twins(lambda: Net(breaks=True), stage=stage, executor="eager")
        one = make(module)
        other = torch.optim.AdamW(plain.parameters(), lr=1e-2) if isinstance(one, zerofx.AdamW) else make(plain)
        for m in (module, plain):
            register(m, [], HOOKS)
        for seed in range(3):
            with zerofx.step_in_backward(one):
                module(mine(batch(seed))).backward()
            plain(batch(seed)).backward()
            other.step()
            other.zero_grad()
            same(module, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_with_no_sync_and_with_a_step_in_backward(workers2: Workers, workers3: Workers, stage: int) -> None:
    workers2.run(check_no_sync, stage)
    workers3.run(check_step_in_backward, stage)


# -- outside of graphs


class Reentrant(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: self.first(x).tanh(), x.requires_grad_(), use_reentrant=True)
        return checkpoint(lambda x: self.last(self.middle(x)), x, use_reentrant=False).square().mean()


class Product(torch.autograd.Function):
    """A function of the user's, to which the parameter is handed as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, g.t() @ x


class Mixed(Net):
    """``first.weight`` in a graph, and in code outside of any."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.middle(self.outside(x))).square().mean()

    @torch.compiler.disable
    def outside(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Product.apply(x, self.first.weight)) + self.tied(x)


def check_outside(stage: int, kind: str) -> None:
    options: dict[str, Any] = {"stage": stage}
    if kind != "shard alone":
        options["executor"] = "eager"
    options |= {"leaf": {"leaf_modules": ["middle", "last"]}, "shard alone": {"alone": True}}.get(kind, {})
    build = {"reentrant": Reentrant, "mixed": Mixed}.get(kind, Net)
    module, plain = twins(build, **options)
    optimizers, calls, wanted = sgd(module, plain), [], []  # type: ignore[var-annotated]
    register(module, calls, HOOKS), register(plain, wanted, HOOKS)
    for seed in range(2):
        step(module, plain, optimizers, (seed,))
        assert sorted(calls) == sorted(wanted), (calls, wanted)


@quick_if(lambda stage, kind: stage == 3 or (stage == 0 and kind == "mixed"))
@pytest.mark.parametrize("kind", ["shard alone", "leaf", "reentrant", "mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_outside_of_graphs(workers2: Workers, stage: int, kind: str) -> None:
    workers2.run(check_outside, stage, kind)


# -- ranks that use other parameters


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return (self.one(x) + (self.two(x) if which else self.three(x).tanh())).square().mean()


def check_branches(stage: int) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    module, plain = twins(Branches, stage=stage, executor="eager", **{"groups": zerofx.Grouping()})
    calls: list[str] = []
    for m in (module, plain):
        for name in ("one.weight", "two.weight", "two.bias", "three.weight"):
            m.get_parameter(name).register_hook(lambda g: g.clamp(-0.01, 0.01))
    for name, p in module.named_parameters():
        p.register_hook(lambda g, name=name: calls.append(name))
    for seed, chosen in enumerate(([0, 1, 1], [1, 1, 1], [0, 0, 1])):
        module(mine(batch(seed)), chosen[rank]).backward()
        parts = batch(seed).chunk(world)
        torch.stack([plain(parts[r], chosen[r]) for r in range(world)]).mean().backward()
        same(module, plain)
        used = [name for name, p in plain.named_parameters() if p.grad is not None]
        assert sorted(calls) == sorted(used)  # on every rank
        calls.clear()
        for m in (module, plain):
            m.zero_grad()
    message = ""
    for whole in (lambda g: g / g.norm(), lambda g: g[0] * g):  # asked for where this rank has no gradient of its own
        handle = module.two.weight.register_hook(lambda g, whole=whole: whole(g) if rank == 0 else g)
        try:
            module(mine(batch(0)), rank).backward()
        except RuntimeError as e:
            message = str(e)
        handle.remove()
        assert bool(message) == (rank == 0 and stage > 0)
    return message


@pytest.mark.parametrize("stage", [0, slow(2), 3])
def test_ranks_of_other_branches_run_the_same_hooks(workers2: Workers, stage: int) -> None:
    message = workers2.run(check_branches, stage)[0]
    assert not stage or "a hook on the gradient of 'two.weight' asks for the whole of a tensor, which every" in message


# -- options


def check_precision(stage: int) -> None:
    """Hooks see gradients of the float32 masters."""
    precision = zerofx.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    module, plain = twins(stage=stage, executor="eager", mixed_precision=precision)
    seen: list[torch.dtype] = []
    for m in (module, plain):
        m.middle.weight.register_hook(lambda g: g * whole_mask() * 0.5)
    module.middle.weight.register_hook(lambda g: seen.append(g.dtype))
    module(mine(batch(0))).backward()
    plain(batch(0)).backward()
    assert seen == [torch.float32]
    same(module, plain, rtol=0.05, atol=2e-3)
    assert not full(module.middle.weight.grad)[whole_mask() == 0].any()


def check_offload(stage: int, folder: str) -> None:
    scratch = Path(folder)
    options: dict[str, Any] = {"optimizer": scratch, "gradients": scratch}
    module, plain = twins(lambda: Net(breaks=True), stage=stage, executor="eager", offload=zerofx.Offload(**options))
    optimizers = [zerofx.AdamW(module.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)]
    for m in (module, plain):
        register(m, [], HOOKS)
    for seed in (0, 2, 4):
        for part in (seed, seed + 1):
            module(mine(batch(part))).backward()
            plain(batch(part)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(module, plain, rtol=1e-3, atol=1e-5)


def check_meta(stage: int) -> None:
    """A hook that a constructor registers is that of the parameter which takes the place of one on the meta device."""

    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.middle.weight.register_hook(lambda g: g * whole_mask().to(g.device))

    with torch.device("meta"):
        module = Masked()
    plain = Masked()
    zerofx.compile(module, stage=stage, executor="eager", groups=EACH_GROUP)
    plain.load_state_dict(zerofx.full_state_dict(module, rank0_only=False))
    step(module, plain, sgd(module, plain), (0,))


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_with_other_options(workers2: Workers, tmp_path: Path, stage: int) -> None:
    workers2.run(check_precision, stage)
    workers2.run(check_meta, stage)
    if stage:
        workers2.run(check_offload, stage, str(tmp_path))


@pytest.mark.parametrize("stage", [slow(0), 3])
def test_one_rank_alone(make_workers: Callable[[int], Workers], stage: int) -> None:
    make_workers(1).run(check_hooks, stage, "eager", True)


# -- refusals


@contextlib.contextmanager
def raises(match: str, error: type[Exception] = RuntimeError) -> Iterator[None]:
    with pytest.raises(error, match=match):
        yield


def check_refusals(stage: int) -> None:
    module, _ = twins(stage=stage, executor="eager")
    p = module.get_parameter("first.weight")
    for wrong, found in (
        (lambda g: 3, "returned a int: expected None, or a tensor"),
        (lambda g: g.sum(), r"returned a tensor of shape \[\] and torch.float32: expected None"),
        (lambda g: g.double(), r"returned a tensor .* and torch.float64: expected None, or .* and torch.float32"),
    ):
        handle = p.register_hook(wrong)
        with raises("the hook 'check_refusals.* on the gradient of 'first.weight' " + found):
            module(mine(batch(0))).backward()
        handle.remove()
        module.zero_grad()
    with raises(r"register_hook\(\) of 'frozen.weight', which is frozen: it gets no gradient"):
        module.get_parameter("frozen.weight").register_hook(print)
    apart = zerofx.compile(Net(), stage=stage, executor="eager", uneven=True)
    with raises(r"register_hook\(\) of 'first.weight', with uneven=True, where ranks add", ValueError):
        apart.get_parameter("first.weight").register_hook(print)
    hooked = Net()
    hooked.first.weight.register_hook(print)
    with raises(r"register_hook\(\) of 'first.weight', with uneven=True, where ranks add", ValueError):
        zerofx.compile(hooked, stage=stage, uneven=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_hook_must_not_do_is_said_so(workers2: Workers, stage: int) -> None:
    workers2.run(check_refusals, stage)
