"""Arithmetic on sharded tensors: on slices where it can be, and always what the whole tensors would give."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import zerofx
from tests.counting import count_collectives
from tests.workers import Workers
from zerofx import ShardedTensor
from zerofx.runtime.eager.elementwise import ELEMENTWISE

WORLD_SIZES = [2, 3]
UNCALLABLE = {"cuda", "__setitem__", *(f"__{i}{op}__" for i in "ir" for op in "eq ne lt le gt ge".split())}
"""Needs a device; has a test of its own; there are no such operators."""


class Shapes(nn.Module):
    """Split over all ranks; on one rank alone; a scalar; nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(13, 11))
        self.small = nn.Parameter(torch.randn(3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.randn(0, 4))


def tensors_of(module: nn.Module) -> dict[str, ShardedTensor]:
    return {name: p.detach() for name, p in module.named_parameters()}  # type: ignore[misc]


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


def spread(like: ShardedTensor, whole: torch.Tensor) -> ShardedTensor:
    """``whole`` as a sharded tensor, cut where ``like`` is."""
    return torch.empty_like(like, dtype=whole.dtype).copy_(whole)  # type: ignore[return-value]


def functions(name: str) -> list[Callable[..., Any]]:
    """What is called ``name``, and what writes in place under that name."""
    names = [name] if name.startswith("__") else [name, name + "_"]
    found = [getattr(owner, n, None) for owner in (torch.Tensor, torch) for n in names]
    return [f for f in found if f is not None] or [getattr(torch.ops.aten, name)]


def arguments(shape: torch.Size) -> list[tuple[Any, ...]]:
    a, b, c = torch.randn(3, *shape).unbind()
    return [
        (a,), (a, b), (a, b, c), (a.abs() + 0.1,), (a, 0.5), (0.5, a), (a, b, 0.5), (a, -0.3, 0.4), (a > 0,),
        (a > 0, b > 0), (a > 0, b, c), (a, b > 0, 0.5), (a, torch.tensor(0.7)), (a, torch.float64), (a.abs(), b.abs()),
    ]  # fmt: skip


def attempt(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*(x.clone() if isinstance(x, torch.Tensor) else x for x in args))
    except (TypeError, RuntimeError, NotImplementedError, AttributeError):
        return NotImplemented


def check_call(name: str, function: Callable[..., Any], like: ShardedTensor, args: tuple[Any, ...]) -> bool:
    """Whether plain tensors can be called with so; then sharded ones, and mixtures of both, must agree."""
    expected = attempt(function, args)
    if not isinstance(expected, torch.Tensor) or expected.shape != like.shape:
        return False
    whole = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.shape == like.shape]
    for cut in (whole, whole[:1], whole[-1:]):  # all of them sharded, the first alone, the last alone
        mine = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        for i in cut:
            mine[i] = spread(like, mine[i])
        result = function(*mine)
        what = f"{function} of {[type(x).__name__ for x in mine]}"
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype), what
        assert isinstance(result, ShardedTensor) or cut is not whole, f"{what} gathered"
        if function.__name__.endswith("_") and not name.startswith("__"):
            assert result is mine[0], what
        if name != "empty_like":  # slice against slice: a rank that fails must not leave others in a collective
            if isinstance(result, ShardedTensor):
                result, expected_part = result.to_local(), spread(like, expected).to_local()
            else:
                expected_part = expected
            torch.testing.assert_close(result, expected_part, equal_nan=True, msg=f"{what}: {{}}".format)
    return True


def check_table() -> None:
    module, failures = zerofx.shard(Shapes()), []
    tensors = tensors_of(module)
    for name in sorted(ELEMENTWISE - UNCALLABLE):
        called = False
        for like, function in itertools.product((tensors["matrix"], tensors["small"]), functions(name)):
            for args in arguments(like.shape):
                try:
                    called |= check_call(name, function, like, args)
                except Exception as e:  # all ranks fail alike
                    failures.append(f"{name}: {str(e) or repr(e)}")
        if not called:
            failures.append(f"{name}: no way to call it, so why is it in the table?")
    assert not failures, "\n".join(dict.fromkeys(failures))


@pytest.mark.slow
def test_every_operation_of_the_table_agrees_with_plain_tensors(workers3: Workers) -> None:
    workers3.run(check_table)


def check_shapes_and_dtypes() -> None:
    module = zerofx.shard(Shapes())
    for p in tensors_of(module).values():
        whole = p.full_tensor()
        for result, expected in (
            (p + p * 2 - 1, whole + whole * 2 - 1),
            (2**p, 2**whole),
            (-p, -whole),
            (torch.where(p > 0, p, 0.0), torch.where(whole > 0, whole, 0.0)),
            (p.bfloat16() + p, whole.bfloat16() + whole),
            (p.to(torch.float64, copy=True), whole.double()),
            (torch.full_like(p, 3.0), torch.full_like(whole, 3.0)),
            (torch.zeros_like(p, dtype=torch.int32), torch.zeros_like(whole, dtype=torch.int32)),
            ((p > 0) & (p < 1), (whole > 0) & (whole < 1)),
            (p.clamp(min=-0.1, max=0.1), whole.clamp(min=-0.1, max=0.1)),
        ):
            assert isinstance(result, ShardedTensor)
            torch.testing.assert_close(full(result), expected)


def test_scalars_and_empty_tensors_compute_as_well(workers3: Workers) -> None:
    workers3.run(check_shapes_and_dtypes)


def check_masks_and_strangers() -> None:
    module = zerofx.shard(Shapes())
    tensors = tensors_of(module)
    p, whole = tensors["matrix"], tensors["matrix"].full_tensor()
    p[p > 0] = 0.5
    whole[whole > 0] = 0.5
    torch.testing.assert_close(full(p), whole)
    column, row = torch.randn(13, 1), torch.randn(11)
    for function in (
        lambda x, y: x + y,  # both sharded, but not alike
        lambda x, y: column * x - row,  # broadcast
        lambda x, y: x @ x.T,
        lambda x, y: x.sum(0),
        lambda x, y: x.mean(dim=1, keepdim=True),
        lambda x, y: torch.norm(x, dim=0),
        lambda x, y: x.argmax(),
        lambda x, y: x[2:5],
        lambda x, y: x.view(-1)[3],
        lambda x, y: torch.cat([x, x]),
        lambda x, y: torch.stack(list(x)),
        lambda x, y: torch.softmax(x, 1),
        lambda x, y: ~(x > 0),
        lambda x, y: torch.tensor(y.item() + float(y) + int(y)),
    ):
        torch.testing.assert_close(full(function(p, tensors["scalar"])), function(whole, full(tensors["scalar"])))


def test_masks_are_elementwise_and_everything_else_sees_the_whole(workers3: Workers) -> None:
    workers3.run(check_masks_and_strangers)


# -- reductions

REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(),
    "torch.sum": torch.sum,
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "any": lambda x: x.any(),
    "all": lambda x: x.all(),
    "count": lambda x: (x > 0).sum(),
    "finite": lambda x: x.isfinite().all(),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(1),
    "norm inf": lambda x: x.norm(math.inf),
    "norm -inf": lambda x: x.norm(-math.inf),
    "norm 0": lambda x: x.norm(0),
    "norm 3": lambda x: torch.norm(x, 3.0),
    "vector_norm": torch.linalg.vector_norm,
    "vector_norm inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "vector_norm double": lambda x: torch.linalg.vector_norm(x, 2.0, dtype=torch.float64),
    "std": lambda x: x.std(),
}


def check_reductions(broken: bool) -> None:
    module, failures = zerofx.shard(Shapes()), []
    for name, p in tensors_of(module).items():
        whole = p.full_tensor()
        on_one_rank = torch.zeros_like(whole)
        on_one_rank.view(-1)[-1:] = 2.0
        values = {"random": whole, "zeros": torch.zeros_like(whole), "zero but on one rank": on_one_rank}
        if broken:
            values = {}
            for kind, at in itertools.product((math.nan, math.inf, -math.inf), (0, -1) if name == "matrix" else ()):
                values[f"{kind} at {at}"] = value = whole.clone()  # on the first rank alone, on the last rank alone
                value.view(-1)[at] = kind
        for (kind, value), (reduction, function) in itertools.product(values.items(), REDUCTIONS.items()):
            expected = attempt(function, (value,))
            if expected is NotImplemented:
                continue  # the maximum of nothing
            result, what = function(spread(p, value)), f"{reduction} of {name}, {kind}"
            assert type(result) is torch.Tensor and result.dtype == expected.dtype, what
            if not torch.allclose(result.double(), expected.double(), rtol=1e-5, atol=1e-5, equal_nan=True):
                failures.append(f"{what}: expected {expected.item()}, got {result.item()}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reductions_and_norms_agree_with_the_whole_tensor(
    make_workers: Callable[[int], Workers], world_size: int
) -> None:
    make_workers(world_size).run(check_reductions, False)


def test_nan_or_inf_on_any_one_rank_shows_in_reductions_and_norms(workers3: Workers) -> None:
    workers3.run(check_reductions, True)


def count_reductions() -> dict[str, str]:
    module, counts = zerofx.shard(Shapes()), {}
    matrix = module.matrix.detach()
    for name, reduction in REDUCTIONS.items():
        with count_collectives() as log:
            reduction(matrix)
        counts[name] = " ".join(f"{n} {what}" for what, n in log.calls.items())
    return counts


def test_reductions_to_a_scalar_cost_one_all_reduce_of_a_scalar(workers2: Workers) -> None:
    counts = workers2.run(count_reductions)[0]
    for name in ("norm 0", "norm -inf", "std"):
        del counts[name]  # need not be quick
    assert counts == dict.fromkeys(counts, "1 all_reduce")


def check_lists() -> None:
    module = zerofx.shard(Shapes())
    tensors = list(tensors_of(module).values())
    whole = [full(t) for t in tensors]
    for order in (1.0, 2.0, math.inf):
        mixed = [*tensors, torch.arange(4.0)]  # a plain tensor in the list is its own norm
        for result, expected in zip(torch._foreach_norm(mixed, order), [*whole, torch.arange(4.0)]):
            norm = torch.linalg.vector_norm(expected, order) if expected.numel() else torch.zeros(())
            torch.testing.assert_close(full(result), norm)
    sums = torch._foreach_add(tensors, [torch.ones_like(t) for t in tensors], alpha=2)
    for result, expected in zip(sums, whole):
        assert isinstance(result, ShardedTensor)
        torch.testing.assert_close(full(result), expected + 2)
    torch._foreach_copy_(tensors, [torch.full_like(t, 7.0) for t in tensors])
    torch._foreach_lerp_(tensors, list(sums), 0.25)
    for t, expected in zip(tensors, whole):
        torch.testing.assert_close(full(t), torch.lerp(torch.full_like(expected, 7.0), expected + 2, 0.25))
    # Plain and whole next to sharded: cut, as for one tensor, or refused, but never element against element by chance.
    plain = [torch.ones(t.shape) for t in whole]
    before = [full(t) for t in tensors]
    try:
        torch._foreach_add_(tensors, plain)
    except (RuntimeError, TypeError):
        expected_after = before
    else:
        expected_after = [t + 1 for t in before]
    for t, expected in zip(tensors, expected_after):
        torch.testing.assert_close(full(t), expected)


def test_lists_of_tensors_compute_as_each_would(workers3: Workers) -> None:
    workers3.run(check_lists)


def check_survivors() -> None:
    module = zerofx.shard(Shapes())
    state, gradient = module.state_dict(), torch.ones_like(module.matrix)
    whole = full(state["matrix"])
    del module
    gc.collect()
    torch.testing.assert_close(full(state["matrix"] * 2), whole * 2)
    torch.testing.assert_close(state["matrix"].norm(), whole.norm())
    torch.testing.assert_close(state["matrix"].sum(), whole.sum())
    torch.testing.assert_close(torch.nn.utils.get_total_norm([gradient]), torch.tensor(143.0).sqrt())
    assert "matrix" in repr(state["matrix"])


def test_what_was_taken_from_a_module_outlives_it(workers2: Workers) -> None:
    workers2.run(check_survivors)


def check_spellings() -> None:
    torch.manual_seed(0)
    plain = Shapes()
    module = Shapes()
    module.load_state_dict(plain.state_dict())
    zerofx.shard(module, stage=3)
    mine, whole = list(tensors_of(module).values()), [p.detach() for p in plain.parameters()]
    calls: list[Callable[[list[Any]], Any]] = [
        lambda x: torch.stack(list(torch._foreach_norm(x, ord=2))),
        lambda x: torch.stack(list(torch._foreach_norm(x, 1.0, dtype=torch.float64))),
        lambda x: torch.stack(list(torch._foreach_norm(self=x[:2], ord=math.inf))),
        lambda x: torch.linalg.vector_norm(x=x[0], ord=3),
        lambda x: torch.linalg.vector_norm(x[0], 2, None, True),
        lambda x: torch.norm(input=x[0], p=1),
        lambda x: x[0].norm(p=2, dtype=torch.float64),
        lambda x: torch.sum(input=x[0]),
        lambda x: torch.mul(input=x[0], other=2),
    ]
    for i, call in enumerate(calls):
        torch.testing.assert_close(full(call(mine)), full(call(whole)), msg=f"call {i}: {{}}".format)


def test_arguments_may_have_the_names_that_torch_has_for_them(workers2: Workers) -> None:
    workers2.run(check_spellings)


def test_a_write_that_would_lose_a_gradient_is_refused(fake_world: Any) -> None:
    fake_world(1)
    weight = zerofx.shard(nn.Linear(3, 2), stage=3).weight.detach().clone()
    delta = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"writing what requires grad by 'add_' of the sharded tensor 'weight'"):
        weight += delta
    (weight + delta).sum().backward()
    assert delta.grad is not None
    with torch.no_grad():
        weight += delta.to_sparse()


def test_a_write_to_data_takes_the_values_of_what_requires_grad(fake_world: Any) -> None:
    """As it does in PyTorch: peft merges its adapters so."""
    fake_world(1)
    weight = zerofx.shard(nn.Linear(3, 2), stage=3).weight
    expected = weight.full_tensor() + 1
    delta = torch.ones(2, 3, requires_grad=True)
    weight.data += delta
    assert torch.equal(weight.full_tensor(), expected)
    weight.data.sub_(delta * 2)
    assert torch.equal(weight.full_tensor(), expected - 2) and weight.requires_grad


def test_safetensors_is_told_how_to_save(fake_world: Any, tmp_path: Any) -> None:
    fake_world(1)
    model = zerofx.shard(nn.Linear(3, 2), stage=3)
    with pytest.raises(RuntimeError, match=r"safetensors' save_file.*of the sharded.*zerofx.full_state_dict"):
        safetensors.torch.save_file(model.state_dict(), tmp_path / "weights.safetensors")
    safetensors.torch.save_file(zerofx.full_state_dict(model), tmp_path / "weights.safetensors")
    assert model.weight.data_ptr() == 0  # others may ask


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.table, sparse=True).sum()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_sparse_gradient_is_refused_by_the_name_of_its_parameter(fake_world: Any, stage: int, compiled: bool) -> None:
    fake_world(1)
    options: dict[str, Any] = {"executor": "eager"} if compiled else {}
    model = (zerofx.compile if compiled else zerofx.shard)(Looked(), stage=stage, **options)
    with pytest.raises(RuntimeError, match="the gradient of 'table' has the layout"):
        model(torch.tensor([1, 2])).backward()
