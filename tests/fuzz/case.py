"""Runs a recipe on ranks, and against one process that never heard of zerofx.

What one process computes: for every rank's rows the loss, the mean of these losses, one backward. What must be equal:
every loss, which gradients exist, every gradient before each step (or, where backward does the step, every parameter
after it), every parameter at the end. In float64 to 1e-9. And all ranks hold the same weights, bit for bit, after every
step.

Where weights and gradients travel in codes the numbers are others. Then all ranks must compute with the same bits after
every step (wires.py), and with finite ones.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.fuzz.net import Container, build, loss_of
from tests.fuzz.recipe import LENGTH, VOCAB, WIDTH, Recipe, kinds
from tests.fuzz.wires import check_coded, differing, in_codes, small_blocks, wire_of
from tests.workers import Workers

ROWS = 2
GROUPINGS: dict[str, Any] = {
    "merged": None,
    "each": zerofx.Grouping(min_bytes=0),
    "split": zerofx.Grouping(min_bytes=0, max_bytes=200),
    "linear": zerofx.Grouping(blocks=(nn.Linear, Container), min_bytes=0),
    "rule": zerofx.Grouping(blocks=lambda name, module: name in ("head", "layers.0"), min_bytes=300),
}
SCHEMES: dict[str, Any] = {
    "shard": None,
    "between": zerofx.Sharding(gradients="all", optimizer="all"),
    "near": zerofx.Sharding(weights="all", gradients="all", optimizer="all"),
    "all": zerofx.Sharding("all", "all", "all", "all"),
}
Values = dict[str, Any]


def check(recipe: Recipe) -> str:
    """On each rank: run the recipe both ways. Returns what differs, or raised; nothing where all is well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if in_codes(recipe):
                with small_blocks():
                    return check_coded(lambda behind: sharded(recipe, behind))
            apart: list[str] = []
            left = [*recipe.steps]

            def compare(net: nn.Module) -> None:
                left.pop()
                if recipe.seed % 2 or not left:  # it brings replicas up to date, which is the next forward's to do
                    apart.extend(differing(net))

            got, wanted = sharded(recipe, compare), alone(recipe)
        except torch._dynamo.exc.BackendCompilerFailed as e:
            # What one graph keeps gathered may leave too little for the next, which is not known then: refused by name.
            if recipe.budget == "some" and "beside the" in str(e) and "that other graphs keep" in str(e):
                return ""
            raise
    rtol, atol = tolerance(recipe)
    wrong = [*dict.fromkeys(apart)]
    if different := set(got) ^ set(wanted):
        wrong.append(f"rank {dist.get_rank()}: expected {different} on both sides")
    for name in wanted:
        if (problem := difference(got.get(name), wanted[name], rtol, atol)) is not None:
            wrong.append(f"rank {dist.get_rank()}: {name}: {problem}")
    return "\n".join(wrong)


def tolerance(recipe: Recipe) -> tuple[float, float]:
    if recipe.precision != "full" or "single" in kinds(recipe.layers) or wire_of(recipe) is not None:
        return 1e-4, 1e-5
    return 1e-9, 1e-11


def difference(got: Any, wanted: Any, rtol: float, atol: float) -> str | None:
    if got is None or wanted is None:
        return None if got is wanted else f"{'None' if got is None else 'a tensor'}, expected the other"
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{list(got.shape)} of {got.dtype}, expected {list(wanted.shape)} of {wanted.dtype}"
    if torch.allclose(got, wanted, rtol, atol):
        return None
    return f"differs by {(got - wanted).abs().max():.3g}, of {wanted.abs().max():.3g}"


def inputs(recipe: Recipe, step: int, call: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's rows for a call."""
    rows = ROWS + (call == "longer" or (call == "uneven" and rank == 0))
    generator = torch.Generator().manual_seed(1000 * recipe.seed + 100 * step + 10 * rank)
    x = torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randint(VOCAB, (rows, LENGTH), generator=generator)


def optimizer_of(recipe: Recipe, net: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad or recipe.thaw]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-3)


def train(
    recipe: Recipe,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int, str], torch.Tensor],
    no_sync: Callable[[], contextlib.AbstractContextManager],
    whole: Callable[[Any], torch.Tensor | None],
    collect: Callable[[], None] = lambda: None,
    behind: Callable[[], None] = lambda: None,
    stepping: Callable[[], contextlib.AbstractContextManager] | None = None,
    written: Callable[[], None] = lambda: None,
) -> Values:
    """The training loop of a recipe, the same for both sides.

    ``stepping``: around a backward that does the step. ``written``: called when weights were written between steps.
    """
    values: Values = {}
    frozen = [p for p in net.parameters() if not p.requires_grad]
    inside = recipe.inside and not recipe.clip
    for step, calls in enumerate(recipe.steps):
        for p in frozen:
            p.requires_grad_(recipe.thaw and step % 2 == 1)
        last = [call for call in calls if call not in ("eval", "dropped")][-1:]
        calls = (*calls, "plain") if last in (["keep"], ["fewer"]) else calls
        final = max((i for i, call in enumerate(calls) if call not in ("eval", "dropped")), default=len(calls))
        for i, call in enumerate(calls[: final + 1] if inside else calls):
            with no_sync() if call in ("keep", "fewer") else contextlib.nullcontext():
                if call == "eval":
                    with torch.no_grad():
                        parts = [loss(step, call)]
                elif call in ("two_forwards", "crossed"):
                    parts = [loss(step, call), loss(step + 50, call)]
                else:
                    parts = [loss(step, call)]
                values |= {f"loss {step}.{i}.{k} ({call})": part.detach().double() for k, part in enumerate(parts)}
                if call == "two_forwards":
                    parts = [parts[0] + parts[1]]
                if call not in ("eval", "dropped") and (call != "fewer" or parts[0].requires_grad):
                    for k in reversed(range(len(parts))):
                        with stepping() if stepping and inside and (i, k) == (final, 0) else contextlib.nullcontext():
                            parts[k].backward()
            del parts
        collect()
        for name, p in net.named_parameters() if not inside else ():
            values[f"gradient {step} of {name}"] = whole(p.grad)
        if recipe.clip:
            norm = nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 0.1)
            values[f"norm {step}"] = norm.detach().clone()
        if not (stepping and inside and final < len(calls)):
            optimizer.step()
        optimizer.zero_grad(set_to_none=recipe.zero or inside)
        write(recipe.writes, net)
        written()
        behind()
        for name, p in net.named_parameters() if inside else ():
            values[f"parameter {name} after step {step}"] = whole(p)
    for name, p in net.named_parameters():
        values[f"parameter {name}"] = whole(p)
    return values


@torch.no_grad()
def write(how: str, net: nn.Module) -> None:
    """In place, what is written into rows of weights as padding, pruning and new tokens are; see `WRITES`."""
    for p in net.parameters():
        if how == "none" or not p.dim() or not p.numel():
            continue
        rows = torch.tensor(sorted({0, p.shape[0] - 1}))
        if how == "rows":
            p[rows] = torch.full((len(rows), *p.shape[1:]), 0.25, dtype=p.dtype)
        elif how == "fill":
            p.index_fill_(0, rows, -0.5)
        elif how == "mask":
            p.mul_((torch.arange(p.numel()) % 3 != 1).view(p.shape))
        elif how == "zero":
            p[0].zero_()
        else:
            p[-1] = p[0].clone()


def reload(how: str, net: nn.Module, twin: Callable[[], nn.Module]) -> None:
    """Weights leave the module in a state dict and come back; see `RELOADS`."""
    if how == "own":
        net.load_state_dict(net.state_dict())
    elif how == "whole":
        net.load_state_dict(zerofx.full_state_dict(net, rank0_only=False))
    elif how == "twin":
        other = twin()
        other.load_state_dict(net.state_dict())
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0)
        net.load_state_dict(other.state_dict())


def sharded(recipe: Recipe, behind: Callable[[nn.Module], None] = lambda net: None) -> Values:
    """``behind``: what to call behind each optimizer step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net = build(recipe, recipe.seed + rank)  # rank 0's weights must win
    early = optimizer_of(recipe, net) if recipe.optimizer == "before" else None
    nbytes = sum(p.nbytes + 256 for p in net.parameters())  # with padding
    some = nbytes if recipe.grouping in ("merged", "linear", "rule") else max(2 * nbytes // 3, 8192)
    uneven = any("uneven" in calls for calls in recipe.steps)
    lookups = recipe.lookups and recipe.stage == 3 and not uneven
    scheme = recipe.scheme_of_mesh
    mesh, sharding = mesh_of(recipe.rows) if scheme else None, SCHEMES[scheme or "shard"]
    one_copy = recipe.one_copy and recipe.stage == 3 and not lookups and sharding is None
    budgets: dict[str, Any] = {"none": None, "inf": math.inf, "some": some}
    options: dict[str, Any] = dict(
        stage=recipe.stage,
        executor=recipe.executor,
        groups=GROUPINGS[recipe.grouping],
        lookups=lookups,
        one_copy=one_copy,
        wire=wire_of(recipe, one_copy),
        mesh=mesh,
        sharding=sharding,
        memory_budget=budgets[recipe.budget],
        mixed_precision=precision_of(recipe),
        buckets=recipe.buckets if recipe.stage == 0 else "group",
        uneven=recipe.by_turns,
    )
    zerofx.compile(net, **options)

    def loss(step: int, call: str) -> torch.Tensor:
        if rank and call == "fewer" and recipe.by_turns:
            return torch.zeros(())
        return loss_of(net, recipe.penalty, net, *inputs(recipe, step, call, rank), recipe.uses_sometimes(call, rank))

    def whole(tensor: Any) -> torch.Tensor | None:
        if tensor is None:
            return None
        return tensor.full_tensor() if isinstance(tensor, zerofx.ShardedTensor) else tensor.detach().clone()

    optimizer = early or optimizer_of(recipe, net)
    values = train(
        recipe,
        net,
        optimizer,
        loss,
        lambda: zerofx.no_sync(net),
        whole,
        behind=lambda: behind(net),
        stepping=lambda: zerofx.step_in_backward(optimizer),
        written=lambda: reload(recipe.reload, net, lambda: zerofx.compile(build(recipe, 99), **options)),
    )
    for name, value in values.items():
        if name.startswith("loss"):
            dist.all_reduce(value)
            values[name] = value / world
    return values


def mesh_of(rows: int) -> Any:
    """The mesh of so many rows, made once for as long as the ranks are together."""
    if _meshes.get("world") is not dist.group.WORLD:
        _meshes.clear()
        _meshes["world"] = dist.group.WORLD
    if rows not in _meshes:
        _meshes[rows] = dist.init_device_mesh("cpu", (rows, dist.get_world_size() // rows))
    return _meshes[rows]


_meshes: dict[Any, Any] = {}


def precision_of(recipe: Recipe) -> zerofx.MixedPrecision | None:
    if recipe.precision == "full":
        return None
    low = torch.float32 if recipe.precision == "low" else None
    return zerofx.MixedPrecision(low, torch.float32)


def alone(recipe: Recipe) -> Values:
    """One process: rank by rank, then the mean. In float32 a second net computes, with a copy of the weights."""
    world = dist.get_world_size()
    net = build(recipe, recipe.seed)
    low = recipe.precision == "low"
    computing = build(recipe, recipe.seed).float() if low else net
    optimizer = optimizer_of(recipe, net)

    def loss(step: int, call: str) -> torch.Tensor:
        for p, q in zip(net.parameters(), computing.parameters(), strict=True):
            q.requires_grad_(p.requires_grad)
        total = torch.zeros((), dtype=torch.float64)
        before = {name: b.clone() for name, b in net.named_buffers()}
        for rank in range(1 if call == "fewer" and recipe.by_turns else world):
            for name, b in net.named_buffers():
                b.data = before[name].clone()  # a rank's own buffers count its own calls alone
            x, tokens = inputs(recipe, step, call, rank)
            args = (x.float() if low else x, tokens, recipe.uses_sometimes(call, rank))
            total = total + loss_of(computing, recipe.penalty, computing, *args) / world
        return total

    def hand_over_gradients() -> None:
        for p, q in zip(net.parameters(), computing.parameters(), strict=True):
            if q.grad is not None and q is not p:
                p.grad = q.grad.to(p.dtype) if p.grad is None else p.grad + q.grad
                q.grad = None

    def hand_over_weights(*_: Any) -> None:
        for p, q in zip(net.parameters(), computing.parameters(), strict=True):
            q.data.copy_(p.data)

    optimizer.register_step_post_hook(hand_over_weights)

    def whole(tensor: Any) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach().clone()

    return train(
        recipe, net, optimizer, loss, contextlib.nullcontext, whole, hand_over_gradients, written=hand_over_weights
    )


def fails(workers: Callable[[int], Workers], recipe: Recipe) -> str:
    """What is wrong with ``recipe`` on real ranks, and how to see it again; nothing where all is well."""
    timeout = 150 if recipe.executor == "eager" else 300  # a case takes a second or two, on a busy machine forty
    try:
        found = "\n".join(filter(None, workers(recipe.world).run(check, recipe, timeout=timeout)))
    except AssertionError as e:  # raised, hung, died
        found = str(e)
    return found and f"{found}\n\nreproduce with `make fuzz ARGS=case.txt`, where case.txt holds:\n{recipe!r}\n"
