"""PyTorch's optimizers, clipping and scaling on sharded parameters do what they do on the whole ones."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import zerofx
from tests.workers import Workers
from zerofx import ShardedTensor

EACH_GROUP = zerofx.Grouping(min_bytes=0)
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    ],
    "Adam": [{"weight_decay": 0.1}, {"amsgrad": True, "maximize": True}],
    "AdamW": [{}, {"weight_decay": 0.2, "amsgrad": True, "betas": (0.8, 0.9)}],
    "Adagrad": [{"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}],
    "RMSprop": [{"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
    "NAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adamax": [{"weight_decay": 0.1}],
    "ASGD": [{"weight_decay": 0.1, "t0": 2.0}],
    "Rprop": [{}],
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


class Net(nn.Module):
    """Nothing divides by 2 or 3; one parameter never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(()))
        self.layers = nn.ModuleList([nn.Linear(7, 11), nn.Linear(11, 13, dtype=torch.float64)])
        self.unused = nn.Parameter(torch.randn(5))


def pair() -> tuple[nn.Module, nn.Module]:
    return zerofx.shard(Net(), groups=EACH_GROUP), Net()


def set_gradients(module: nn.Module, plain: nn.Module, seed: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for (name, p), q in zip(module.named_parameters(), plain.parameters()):
        if name != "unused":
            q.grad = torch.randn(q.shape, generator=generator, dtype=q.dtype) * scale
            p.grad = q.grad.clone()


def check_alike(module: nn.Module, plain: nn.Module, what: str = "", gradients: bool = False) -> None:
    for (name, p), q in zip(module.named_parameters(), plain.named_parameters()):
        x, y = (p.grad, q[1].grad) if gradients else (p, q[1].detach())
        if y is None:
            assert x is None
            continue
        torch.testing.assert_close(x.full_tensor(), y, rtol=0, atol=1e-6, msg=f"{what} {name}: {{}}".format)


def train(module: nn.Module, plain: nn.Module, mine: Any, theirs: Any, what: str) -> None:
    for step in range(5):
        set_gradients(module, plain, seed=step)
        mine.step()
        theirs.step()
    check_alike(module, plain, what)


# -- every elementwise optimizer


def check_optimizer(name: str) -> None:
    make = getattr(torch.optim, name)
    implementations: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}]
    if name in FUSED:
        implementations.append({"fused": True})
    for options in VARIANTS[name]:
        for implementation in implementations:
            module, plain = pair()
            mine = make(module.parameters(), lr=0.05, **options, **implementation)
            theirs = make(plain.parameters(), lr=0.05, **options, **implementation)
            train(module, plain, mine, theirs, f"{name} {options} {implementation}")
            for p, q in zip(module.parameters(), plain.parameters()):
                assert mine.state[p].keys() == theirs.state[q].keys()
                for key, value in mine.state[p].items():
                    if isinstance(value, ShardedTensor):  # a slice, and no more than a slice
                        assert value.to_local().shape == p.to_local().shape, key
                        assert value.untyped_storage().nbytes() <= 8, key
                    elif isinstance(value, torch.Tensor):
                        assert value.numel() == 1, key


@pytest.mark.parametrize("name", VARIANTS)
def test_elementwise_optimizers_match_the_unsharded_run(workers2: Workers, name: str) -> None:
    workers2.run(check_optimizer, name)


class Lion(torch.optim.Optimizer):
    """Written by hand, with operators, methods, aliases and scalars."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average = state["average"]
                update = (average * 0.9 + p.grad * 0.1).sign_()
                trust = torch.linalg.vector_norm(p) / (torch.linalg.vector_norm(update) + 1e-6)
                p.data.mul_(1 - group["lr"] * 0.1)
                p.add_(update * trust, alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)


def check_loaded(make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Three steps, then two more by an optimizer that has taken up the state: of the whole, and of other groups."""
    module, plain = pair()
    theirs, first = make(plain.parameters(), lr=0.05, **options), make(module.parameters(), lr=0.05, **options)
    for step in range(3):
        set_gradients(module, plain, seed=step)
        theirs.step()
        first.step()
    weights = [p.detach().clone() for p in plain.parameters()]
    states = {"whole": theirs.state_dict(), "of other groups": first.state_dict()}
    others = {what: zerofx.shard(Net(), stage=3) for what in states} | {"of stage 3": zerofx.shard(Net(), stage=0)}
    states["of stage 3"] = first.state_dict()
    others["whole"] = zerofx.shard(Net(), groups=EACH_GROUP)
    mine = {what: make(net.parameters(), lr=0.05, **options) for what, net in others.items()}
    for what, net in others.items():
        net.load_state_dict(dict(zip((name for name, _ in plain.named_parameters()), weights)))
        mine[what].load_state_dict(copy.deepcopy(states[what]))
    for step in range(3, 5):
        for what, net in others.items():
            set_gradients(net, plain, seed=step)
            mine[what].step()
        theirs.step()
    for what, net in others.items():
        for (name, p), q in zip(net.named_parameters(), plain.parameters()):
            now = p.full_tensor() if isinstance(p, ShardedTensor) else p.detach()
            torch.testing.assert_close(now, q.detach(), rtol=0, atol=1e-6, msg=f"{what}, {name}: {{}}".format)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
        (torch.optim.NAdam, {}),
        (torch.optim.ASGD, {"t0": 2.0}),
        (torch.optim.Adafactor, {}),
        (zerofx.AdamW, {}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_state_of_one_process_or_of_other_groups_is_taken_up(workers2: Workers, make: Any, options: Any) -> None:
    workers2.run(check_loaded, make, options)


def check_handwritten() -> None:
    module, plain = pair()
    train(module, plain, Lion(module.parameters(), 0.05), Lion(plain.parameters(), 0.05), "Lion")
    ema = [p.detach().clone() for p in module.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(module.parameters()), 1.0)
        torch._foreach_lerp_(ema, list(module.parameters()), 0.1)
    for mine, theirs in zip(ema, plain.parameters()):
        torch.testing.assert_close(mine.full_tensor(), theirs.detach() + 0.1)  # type: ignore[attr-defined]


def test_an_elementwise_optimizer_or_average_written_by_hand_matches(workers3: Workers) -> None:
    workers3.run(check_handwritten)


# -- what surrounds them


def check_groups_and_schedules() -> None:
    def build(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        first, *rest = module.parameters()
        optimizer = torch.optim.AdamW([{"params": [first]}], lr=torch.tensor(0.1))
        optimizer.add_param_group({"params": rest, "lr": 0.02, "weight_decay": 0.3})
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)

    module, plain = pair()
    (mine, my_schedule), (theirs, their_schedule) = build(module), build(plain)
    for step in range(5):
        set_gradients(module, plain, seed=step)
        for optimizer, schedule in ((mine, my_schedule), (theirs, their_schedule)):
            optimizer.step()
            schedule.step()
        if step == 2:  # what a restart in the same process does
            state = mine.state_dict()
            (mine, my_schedule), old = build(module), my_schedule
            mine.load_state_dict(state)
            my_schedule.load_state_dict(old.state_dict())
    check_alike(module, plain)

    for to_none in (False, True):
        set_gradients(module, plain)
        mine.zero_grad(set_to_none=to_none)
        for name, p in module.named_parameters():
            if to_none or name == "unused":
                assert p.grad is None
            else:
                assert isinstance(p.grad, ShardedTensor) and not p.grad.full_tensor().any()


def test_parameter_groups_schedulers_state_dicts_and_zero_grad_work(workers2: Workers) -> None:
    workers2.run(check_groups_and_schedules)


def check_clipping() -> None:
    for order in (2.0, 1.0, math.inf, 3.5):
        for foreach in (None, True, False):
            module, plain = pair()
            extra = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))  # plain, the same on every rank
            extra[0].grad, extra[1].grad = torch.arange(3.0), torch.arange(3.0)
            set_gradients(module, plain)
            mine = clip_grad_norm_([*module.parameters(), extra[0]], 0.7, order, foreach=foreach)
            theirs = clip_grad_norm_([*plain.parameters(), extra[1]], 0.7, order, foreach=foreach)
            assert type(mine) is torch.Tensor
            torch.testing.assert_close(mine, theirs, msg=f"norm {order}, foreach={foreach}: {{}}".format)
            check_alike(module, plain, f"norm {order}, foreach={foreach}", gradients=True)
            torch.testing.assert_close(extra[0].grad, extra[1].grad)
    for foreach in (None, True, False):
        module, plain = pair()
        set_gradients(module, plain)
        clip_grad_value_(module.parameters(), 0.3, foreach=foreach)
        clip_grad_value_(plain.parameters(), 0.3, foreach=foreach)
        check_alike(module, plain, "value", gradients=True)


def test_gradient_clipping_sees_the_whole_gradient(workers3: Workers) -> None:
    workers3.run(check_clipping)


def check_fresh_norms() -> None:
    module, plain = pair()
    set_gradients(module, plain)

    def replace(gradients: list[Any]) -> None:
        owner = next(m for m in (module, plain) if m.scale.grad is gradients[0])
        owner.scale.grad = gradients[0] * 9

    def fill(gradients: list[Any]) -> None:
        for gradient in gradients:
            gradient.copy_(torch.arange(float(gradient.numel())).reshape(gradient.shape))

    writes: list[Callable[[list[Any]], Any]] = [
        lambda gradients: None,
        lambda gradients: gradients[0].mul_(3),
        lambda gradients: torch._foreach_mul_(gradients[1:3], 2.0),
        lambda gradients: gradients[-1].zero_(),
        lambda gradients: gradients[1].detach().add_(1.0),
        fill,
        replace,
    ]
    for i, write in enumerate(writes):
        for m in (module, plain):
            write([p.grad for p in m.parameters() if p.grad is not None])
        for order, (p, q) in itertools.product((2.0, math.inf, 2.0), zip(module.parameters(), plain.parameters())):
            if q.grad is not None:
                mine, theirs = (torch.linalg.vector_norm(x.grad, order) for x in (p, q))
                torch.testing.assert_close(mine, theirs, msg=f"after write {i}: {{}}".format)


def test_norms_asked_again_are_those_of_what_was_written_since(workers2: Workers) -> None:
    workers2.run(check_fresh_norms)


def poison(module: nn.Module, plain: nn.Module, rank: int, value: float) -> None:
    """Put ``value`` into one element of the first gradient of which ``rank`` holds a part."""
    set_gradients(module, plain)
    weight, gradient = module.layers[0].weight, plain.layers[0].weight.grad.clone()  # type: ignore
    gradient.view(-1)[0 if rank == 0 else -1] = value
    weight.grad = gradient  # type: ignore[union-attr]
    held = bool((~weight.grad.to_local().isfinite()).any())  # type: ignore
    assert held == (dist.get_rank() == rank), "meant to break one rank's slice alone"


def check_non_finite(order: float) -> None:
    for rank, value in itertools.product((0, 1), (math.inf, math.nan)):
        module, plain = pair()
        poison(module, plain, rank, value)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(module.parameters(), 1.0, order, error_if_nonfinite=True)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_a_non_finite_gradient_on_one_rank_is_noticed_by_clipping_on_all(workers2: Workers, order: float) -> None:
    workers2.run(check_non_finite, order)


def check_scaling() -> None:
    for rank, value in itertools.product((0, 1), (math.inf, math.nan)):
        module, plain = pair()
        poison(module, plain, rank, value)
        found = torch.zeros(1)
        gradients = [p.grad for p in module.layers[0].parameters()]  # type: ignore[union-attr]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.5))
        assert found.item() == 1.0, f"not seen on rank {dist.get_rank()}"
        bias = plain.layers[0].bias.grad  # type: ignore[union-attr]
        torch.testing.assert_close(gradients[1].full_tensor(), bias * 0.5)

    module, plain = pair()
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scaler.scale(torch.ones(()))
    for step, broken in enumerate((False, True, False)):
        if broken:
            poison(module, plain, 1, math.inf)
        else:
            set_gradients(module, plain, seed=step)
            for p in module.parameters():
                if p.grad is not None:
                    p.grad.mul_(scaler.get_scale())
            reference.step()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        check_alike(module, plain, f"step {step}")
    assert scaler.get_scale() == 4.0


def test_an_infinite_gradient_on_one_rank_is_seen_by_grad_scalers_on_all(workers2: Workers) -> None:
    workers2.run(check_scaling)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, zerofx.AdamW])
def test_updates_that_bfloat16_would_lose_are_warned_of_once(
    fake_world: Callable[[int], None], make: Any, recwarn: pytest.WarningsRecorder
) -> None:
    fake_world(2)
    for dtype, frozen in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
        net = zerofx.shard(nn.Linear(4, 4, dtype=dtype).requires_grad_(not frozen), stage=2)
        optimizer = make(net.parameters(), lr=0.1)
        for p in net.parameters():
            p.grad = None if frozen else p.like(torch.ones_like(p.to_local()))
        for _ in range(2):
            optimizer.step()
    said = [str(w.message) for w in recwarn if "get lost" in str(w.message)]
    assert len(said) == (make is not zerofx.AdamW)
    if said:
        assert said[0].startswith(f"{make.__name__} updates '") and "in torch.bfloat16: most updates" in said[0]
