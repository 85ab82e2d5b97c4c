"""Frozen weights of any dtype: sharded and gathered as they are, dequantized by the model, recomputed by backward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests import quantized
from tests.counting import count_collectives
from tests.quantized import FORMS, WIDTH, adapters, build
from tests.slow import quick_if, slow
from tests.workers import Workers
from zerofx.model.layout import is_quantized
from zerofx.passes import edit

EACH_GROUP = zerofx.Grouping(min_bytes=0)


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], steps: int = 2) -> None:
    for step in range(steps):
        parts = [model(rows_of(10 * step + rank)).float().square().mean() for rank in ranks]
        torch.stack(parts).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_equal(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Outputs, and the adapters whole on every rank."""
    tolerance = tolerance or {"rtol": 1e-4, "atol": 2e-5}
    with torch.no_grad():
        torch.testing.assert_close(model(rows_of(99)), plain(rows_of(99)), **tolerance)
    whole = zerofx.full_state_dict(model, rank0_only=False)
    for name, p in plain.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(whole[name], p.detach(), **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def both(form: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Sharded and in one process, after two steps."""
    model, plain = zerofx.compile(build(form), **{"executor": "eager", "groups": EACH_GROUP, **options}), build(form)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), [dist.get_rank()])
    train(plain, torch.optim.AdamW(adapters(plain), lr=0.01), list(range(dist.get_world_size())))
    return model, plain


def check_training(forms: list[str], stages: list[int], executor: str) -> None:
    for form in forms:
        for stage in stages:
            model, plain = both(form, stage=stage, executor=executor)
            check_equal(model, plain)
            frozen = [p for p in model.parameters() if not p.requires_grad]
            assert all(p.grad is None for p in frozen)
            if stage == 3:
                assert all(p._local.dtype == p.dtype for p in frozen)
                held = sum(p._local.nbytes for p in frozen)
                whole = sum(p.numel() * p.dtype.itemsize for p in frozen)
                assert held <= whole / dist.get_world_size() + 512 * len(frozen)


@quick_if(lambda form: form in ("subclass", "int8"))
@pytest.mark.parametrize("form", FORMS)
def test_adapters_on_a_quantized_base_train_as_in_one_process(workers2: Workers, form: str) -> None:
    workers2.run(check_training, [form], [0, 1, 2, 3], "eager", timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_and_with_inductor(workers2: Workers, form: str) -> None:
    workers2.run(check_training, [form], [0, 3], "inductor", timeout=300)


@pytest.mark.slow
def test_and_on_three_ranks(workers3: Workers) -> None:
    workers3.run(check_training, list(FORMS), [0, 2, 3], "eager", timeout=300)
    workers3.run(check_training, list(FORMS), [1, 2, 3], "inductor", timeout=600)


def gathered(form: str) -> int:
    """Bytes that one forward gathers."""
    model = zerofx.compile(build(form), executor="eager", groups=EACH_GROUP)
    x = rows_of(dist.get_rank())
    with torch.no_grad():
        model(x)
        with count_collectives() as log:
            model(x)
    return sum(e.payload for e in log.events)


def check_bytes() -> None:
    weights = sum(p.numel() for name, p in build("int8").named_parameters() if name.endswith("codes"))
    packed, int8, int8_again = gathered("packed"), gathered("int8"), gathered("subclass")
    assert int8 - packed == weights / 2  # on two ranks both send half of a buffer
    assert weights < int8 < 1.6 * weights  # scales and adapters beside them
    assert int8_again == pytest.approx(int8, rel=0.05)


def test_codes_are_gathered_as_they_are(workers2: Workers) -> None:
    workers2.run(check_bytes)


def saved_nbytes(model: nn.Module, weight: int) -> int:
    """Of all graphs of ``model``: bytes of what forward saves and of the size of a dequantized ``weight``."""
    total = 0
    for record in zerofx.graphs(model):
        trace = record.traces()[0]
        outputs = edit.output_values(trace.before.graph)
        values = [outputs[i].meta["val"] for i in trace.context.saved if isinstance(outputs[i], torch.fx.Node)]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        total += sum(v.nbytes for v in tensors if v.numel() == weight and v.dtype.itemsize > 1)
    return total


def check_recomputed(form: str, executor: str, options: dict[str, Any]) -> None:
    model, plain = both(form, stage=2, executor=executor, **options)
    check_equal(model, plain)
    assert saved_nbytes(model, 2 * WIDTH * WIDTH) == 0


@pytest.mark.parametrize("form", ["float8", "packed", "subclass"])
@pytest.mark.parametrize("executor", ["eager", slow("inductor")])
def test_no_dequantized_weight_is_saved_for_backward(workers2: Workers, form: str, executor: str) -> None:
    workers2.run(check_recomputed, form, executor, {}, timeout=200)


BF16 = zerofx.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def by_hand(plain: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What bfloat16 is: floats are cast, and what is quantized is left as it is."""
    cast = {n: p if is_quantized(p.dtype) else p.to(torch.bfloat16) for n, p in plain.named_parameters()}
    out: torch.Tensor = torch.func.functional_call(plain, cast, (x.bfloat16(),))
    return out.float()


def check_bf16(stages: list[int]) -> None:
    x = rows_of(dist.get_rank())
    for form in ("int8", "float8", "packed", "subclass"):
        for stage in stages:
            model, plain = build(form), build(form)
            zerofx.compile(model, stage=stage, executor="eager", groups=EACH_GROUP, mixed_precision=BF16)
            found, wanted = model(x), by_hand(plain, x)
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
            found.square().mean().backward()
            wanted.square().mean().backward()
            frozen = [p._group.layout for p in model.parameters() if not p.requires_grad]
            assert all(layout.weight_dtype == layout.dtype for layout in frozen if is_quantized(layout.dtype))
            for p, q in zip(adapters(model), adapters(plain), strict=True):
                dist.all_reduce(q.grad, op=dist.ReduceOp.SUM)
                full = p.grad.full_tensor() if stage else p.grad
                mean = q.grad / dist.get_world_size()
                torch.testing.assert_close(full, mean, rtol=0.05, atol=0.02 * mean.abs().max().item())


@pytest.mark.slow
def test_mixed_precision_casts_adapters_and_leaves_codes_alone(workers2: Workers) -> None:
    workers2.run(check_bf16, [0, 2, 3], timeout=100)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"activation_budget": 0.5}, id="activation_budget"),
        pytest.param({"wire": zerofx.Wire(weights="int8", gradients="int8")}, id="wire", marks=pytest.mark.slow),
        pytest.param({"leaf_modules": ["2"]}, id="leaf"),
        pytest.param({"memory": 10**8}, id="memory", marks=pytest.mark.slow),
        pytest.param({"offload": "cpu"}, id="offload", marks=pytest.mark.slow),
        pytest.param({"uneven": True}, id="uneven", marks=pytest.mark.slow),
        pytest.param({"one_copy": True}, id="one_copy", marks=pytest.mark.slow),
    ],
)
def test_options_hold_for_quantized_weights(workers2: Workers, options: dict[str, Any]) -> None:
    workers2.run(check_option, options, timeout=100)


def check_option(options: dict[str, Any]) -> None:
    for form in ("packed", "subclass", "attribute"):
        tolerance = {"rtol": 0.05, "atol": 0.02} if "wire" in options else {}
        check_equal(*both(form, stage=3, **options), **tolerance)


def check_life(form: str, stage: int, folder: str) -> None:
    """Copied, whole for a while, read outside of any graph, saved and loaded."""
    model, plain = both(form, stage=stage)
    copied = copy.deepcopy(model)
    check_equal(copied, plain)
    with zerofx.unsharded(model, writeback=False):
        torch.testing.assert_close(model(rows_of(5)), plain(rows_of(5)))
        ordinary = copy.deepcopy(model)
    torch.testing.assert_close(ordinary(rows_of(5)), plain(rows_of(5)))
    kinds = {nn.Parameter, quantized.Codes} if form == "attribute" else {nn.Parameter}
    assert {type(p) for p in ordinary.parameters()} == kinds
    assert {name for name, _ in zerofx.full_parameters(model)} == {name for name, _ in model.named_parameters()}
    optimizer = zerofx.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, [dist.get_rank()], steps=1)
    zerofx.save(folder, model, optimizer)
    again = build(form)
    with torch.no_grad():
        for p in adapters(again):
            p.zero_()
    zerofx.compile(again, stage=3 - stage, executor="eager")
    zerofx.load(folder, again, zerofx.AdamW(again.parameters(), lr=0.01))
    with torch.no_grad():
        torch.testing.assert_close(again(rows_of(5)), model(rows_of(5)))


@pytest.mark.parametrize("form", ["packed", "subclass", "attribute"])
@pytest.mark.parametrize("stage", [3, slow(0)])
def test_quantized_models_are_copied_read_saved_and_loaded(
    workers2: Workers, form: str, stage: int, tmp_path: Path
) -> None:
    workers2.run(check_life, form, stage, str(tmp_path / "saved"), timeout=100)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (quantized.Subclass(torch.randn(WIDTH, WIDTH) / 8) for _ in range(2))
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x) * self.scale))


def check_tied() -> None:
    model, plain = Tied(), Tied()
    weight, order = model.first.weight, list(model.first._parameters)
    with pytest.raises(ValueError, match="memory_budget"):
        zerofx.compile(model, memory_budget=-1)
    other = Tied()
    other.scale.grad = torch.ones(WIDTH)
    kept = other.first.weight
    with pytest.raises(ValueError, match="has a gradient already"):
        zerofx.compile(other)
    assert other.first.weight is other.second.weight is kept and type(other.first) is quantized.Subclass
    assert list(other.first._parameters) == order and "parametrizations" not in dict(other.first.named_children())
    assert model.first.weight is weight
    zerofx.compile(model, executor="eager")
    assert len(list(model.parameters())) == 5  # codes, scale, two biases, the factor
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), [dist.get_rank()])
    train(plain, torch.optim.SGD([plain.scale], lr=0.1), list(range(dist.get_world_size())))
    check_equal(model, plain)
    x = rows_of(3)  # outside of any graph
    torch.testing.assert_close(x @ model.first.weight.t(), x @ plain.first.weight.t())


def test_a_tied_subclass_is_one_weight_and_a_refusal_leaves_it_as_it_was(workers2: Workers) -> None:
    workers2.run(check_tied)


def test_a_dry_run_shows_codes_and_leaves_the_module_alone() -> None:
    for form in FORMS:
        model = build(form)
        before = dict(model.named_parameters())
        record = zerofx.dry_run(model, rows_of(0), world_size=4, executor="eager")
        assert "all-gathers" in str(record)
        assert all(p is before[name] for name, p in model.named_parameters())
        torch.testing.assert_close(model(rows_of(0)), build(form)(rows_of(0)))


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(quantized.Scaled(*quantized.quantized(torch.randn(8, 8))))


def check_ignored() -> None:
    model, plain = build("subclass"), build("subclass")
    kept = model[0].base.weight
    zerofx.compile(model, executor="eager", ignored={"0.base.weight": "leave"})
    assert model[0].base.weight is kept and "2.base.parametrizations.weight.original0" in dict(model.named_parameters())
    train(model, torch.optim.SGD(adapters(model), lr=0.1), [dist.get_rank()])
    train(plain, torch.optim.SGD(adapters(plain), lr=0.1), list(range(dist.get_world_size())))
    check_equal(model, plain)


def test_an_ignored_subclass_stays_as_it_is(workers2: Workers) -> None:
    workers2.run(check_ignored)


def check_refused() -> None:
    with pytest.raises(ValueError, match=r"'weight' is a Scaled and requires grad: expected an nn.Parameter"):
        zerofx.compile(Trained())
    model = build("attribute")
    codes: Any = model[0].base.codes
    codes.CB = codes.data
    with pytest.raises(ValueError, match=r"'0.base.codes' is a Codes whose attribute 'CB' holds all of it once more"):
        zerofx.compile(model)
    lazy = nn.LazyLinear(4)
    lazy.weight, lazy.bias = nn.UninitializedParameter(requires_grad=False), None
    with pytest.raises(ValueError, match=r"is a UninitializedParameter: expected an nn\.Parameter"):
        zerofx.compile(lazy)


def test_what_cannot_be_sharded_is_refused_and_named(workers2: Workers) -> None:
    workers2.run(check_refused)
