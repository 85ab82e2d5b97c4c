"""Mixed precision: what is cast where, what is gathered in 16 bits, and what overflow does."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerofx
from tests.counting import count_collectives
from tests.slow import quick_if, slow
from zerofx.passes import edit

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STAGES = [0, 1, 2, 3]
stages = pytest.mark.parametrize("stage", STAGES)
EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)


class Net(nn.Module):
    """Two layers and a buffer; says in which dtypes it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)
        self.register_buffer("shift", torch.full((64,), 0.5))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.first(x))
        return {
            "hidden": hidden,
            "out": self.second(hidden),
            "shifted": self.shift * 2,
            "weight": self.first.weight.dtype,
        }


def build(stage: int, executor: str = "eager", **options: Any) -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net()
    net = copy.deepcopy(plain)
    zerofx.compile(net, stage=stage, executor=executor, groups=EACH_LAYER, **options)
    return net, plain


def rows() -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))


def dtypes(stage: int, precision: zerofx.MixedPrecision) -> dict[str, str]:
    net, _ = build(stage, mixed_precision=precision)
    outputs = net(rows())
    outputs["out"].float().square().mean().backward()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    optimizer.step()
    found = {name: value.dtype if isinstance(value, torch.Tensor) else value for name, value in outputs.items()}
    found |= {"parameter": net.first.weight.dtype, "gradient": net.first.weight.grad.dtype}
    found |= {"moment": optimizer.state[net.first.weight]["exp_avg"].dtype, "buffer": net.shift.dtype}
    return {name: str(dtype).removeprefix("torch.") for name, dtype in found.items()}


@stages
def test_the_model_computes_in_param_dtype_and_the_optimizer_in_the_master_s(workers2, stage: int) -> None:
    found = workers2.run(dtypes, stage, zerofx.MixedPrecision(BF16), timeout=120)[0]
    low, full = {"hidden", "out", "weight"}, {"shifted", "parameter", "gradient", "moment", "buffer"}
    assert found == dict.fromkeys(low, "bfloat16") | dict.fromkeys(full, "float32")


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_outputs_are_cast_on_request_and_inputs_left_alone_on_request(workers2, stage: int) -> None:
    precision = zerofx.MixedPrecision(BF16, output_dtype=FP32)
    found = workers2.run(dtypes, stage, precision, timeout=120)[0]
    assert found["hidden"] == found["out"] == "float32" and found["weight"] == "bfloat16"
    workers2.run(check_wrong_inputs, stage, timeout=120)


def check_wrong_inputs(stage: int) -> None:
    net, _ = build(stage, mixed_precision=zerofx.MixedPrecision(BF16, cast_forward_inputs=False))
    with pytest.raises(Exception, match=r"(?i)same dtype"):  # float32 rows meet 16-bit weights
        net(rows())


def wire(stage: int, executor: str, precision: zerofx.MixedPrecision | None) -> dict[str, int]:
    net, _ = build(stage, executor, mixed_precision=precision)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        net(rows())["out"].float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with count_collectives() as log:
        step()
    return {name: nbytes for name, nbytes in log.bytes.items() if nbytes}


@quick_if(lambda stage, executor: executor == "eager" and stage in (0, 3))
@pytest.mark.parametrize(("stage", "executor"), [*((s, "eager") for s in STAGES), (2, "inductor"), (3, "inductor")])
def test_weights_travel_in_param_dtype_and_gradients_in_reduce_dtype(workers2, stage: int, executor: str) -> None:
    full = workers2.run(wire, stage, executor, None, timeout=200)[0]
    for precision, share in ((zerofx.MixedPrecision(BF16), 2), (zerofx.MixedPrecision(BF16, FP32), 1)):
        low = workers2.run(wire, stage, executor, precision, timeout=200)[0]
        if stage:
            assert 2 * low.pop("all_gather_recv") == full["all_gather_recv"]
        (gradients,) = low
        assert share * low[gradients] == full[gradients]


def overflow(stage: int, folded: bool) -> dict[str, Any]:
    """Steps 0 and 2 are clean; in step 1 one rank's gradients are not finite."""
    net, _ = build(stage, mixed_precision=zerofx.MixedPrecision(FP16))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if folded:
        optimizer = zerofx.AdamW(net.parameters(), lr=0.1, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    before = [[p.clone() for p in net.parameters()]]
    scales = []
    for step in range(3):
        loss = net(rows())["out"].float().square().mean()
        if step == 1 and dist.get_rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if not folded:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        before.append([p.clone() for p in net.parameters()])
    moved = [any((a != b).any().item() for a, b in zip(x, y)) for x, y in itertools.pairwise(before)]
    return {"moved": moved, "scales": scales, "finite": all(p.isfinite().all().item() for p in net.parameters())}


@quick_if(lambda stage, folded: folded == (stage % 2 == 1))
@pytest.mark.parametrize("folded", [False, True])  # unscaling and clipping into zerofx.AdamW's step
@stages
def test_gradscaler_skips_a_step_on_all_ranks_when_one_overflows(workers3, stage: int, folded: bool) -> None:
    for found in workers3.run(overflow, stage, folded, timeout=120):
        assert found == {"moved": [True, False, True], "scales": [1024.0, 512.0, 512.0], "finite": True}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def gradient_near_the_largest(stage: int, where: str) -> torch.Tensor:
    module, options = nn.Sequential(Scaled()).half(), {}
    if where == "on demand":
        module[0].forward = torch.compiler.disable(module[0].forward)
    if where == "leaf":
        options["leaf_modules"] = [Scaled]
    precision = zerofx.MixedPrecision(reduce_dtype=FP32)
    zerofx.compile(module, stage=stage, executor="eager", mixed_precision=precision, **options)
    module(torch.full((5,), 40000.0, dtype=FP16)).backward()
    gradient = module[0].weight.grad
    return gradient.full_tensor() if stage else gradient


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["compiled", "on demand", "leaf"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_sum_over_ranks_that_the_parameters_dtype_cannot_hold_is_scaled_first(
    workers2, stage: int, where: str
) -> None:
    for gradient in workers2.run(gradient_near_the_largest, stage, where):
        assert gradient.dtype == FP16 and gradient.eq(40000).all()  # their sum is infinite in float16


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return self.second(torch.tanh(self.first(x))).float().square().mean()


def autocast(stage: int, executor: str) -> tuple[float, float, list[torch.dtype]]:
    """Largest difference of a gradient to the plain module's, relative; dtypes that are gathered."""
    torch.manual_seed(0)
    plain = Autocast()
    net = zerofx.compile(copy.deepcopy(plain), stage=stage, executor=executor, groups=EACH_LAYER)
    loss = net(rows())
    loss.backward()
    wanted = plain(rows())
    wanted.backward()
    worst = 0.0
    for p, q in zip(net.parameters(), plain.parameters()):
        dist.all_reduce(q.grad)
        q.grad /= dist.get_world_size()
        got = p.grad.full_tensor() if stage else p.grad
        worst = max(worst, ((got - q.grad).abs().max() / q.grad.abs().max()).item())
    final = zerofx.graphs(net)[0].forward.after("prefetch").graph
    gathered = [node.meta["val"].dtype for node in edit.tagged(final, "all_gather")]
    return worst, abs(loss - wanted).item(), gathered


@pytest.mark.parametrize("executor", ["eager", slow("inductor")])
@stages
def test_autocast_inside_of_the_model_works_and_its_weight_casts_move_before_the_gather(
    workers2, stage: int, executor: str
) -> None:
    for worst, loss, gathered in workers2.run(autocast, stage, executor, timeout=200):
        assert worst < 2e-2 and loss < 1e-2  # a few units in the last place of bfloat16
        assert gathered == ([BF16, BF16] if stage == 3 else [])


class Block(nn.Module):
    """A layer of a transformer in miniature: its normalisation computes in float32 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.enabled, self.blocks = enabled, nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16, enabled=self.enabled):
            for block in self.blocks:
                x = block(x)
        return x.square().mean()


def train_blocks(executor: str, enabled: bool) -> tuple[list[float], list[float], int, int]:
    """Losses of three steps, the plain module's, and what one step gathers, in bytes and in calls."""
    torch.manual_seed(0)
    plain = Blocks(enabled)
    groups = zerofx.Grouping(blocks=(Block,), min_bytes=0)
    budget = int(1.1 * sum(p.nbytes for p in plain.blocks[0].parameters()))  # for one block: none stays gathered
    net = zerofx.compile(copy.deepcopy(plain), executor=executor, groups=groups, memory_budget=budget)
    losses: dict[nn.Module, list[float]] = {net: [], plain: []}
    for model in losses:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            with count_collectives() as log:
                loss = model(rows())
                loss.backward()
            if model is net:
                gathered, calls = log.bytes["all_gather_recv"], log.calls["all_gather_recv"]
            else:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            losses[model].append(loss.item())
    return losses[net], losses[plain], gathered, calls


@quick_if(lambda executor: executor == "eager")
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_block_under_autocast_gathers_its_normalisation_alone_in_float32(workers2, executor: str) -> None:
    full = workers2.run(train_blocks, executor, False, timeout=200)
    for rank, (got, wanted, gathered, calls) in enumerate(workers2.run(train_blocks, executor, True, timeout=200)):
        assert got == pytest.approx(wanted, rel=1e-5 if executor == "eager" else 2e-2)
        assert 0.5 * full[rank][2] < gathered < 0.52 * full[rank][2]
        assert calls == 2 * full[rank][3]  # two gathers for one; Inductor's backward computes normalisations again


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))


def test_a_complex_view_of_a_weight_of_stage_0_keeps_its_imaginary_part(fake_world) -> None:
    fake_world(2)
    net = zerofx.shard(Filter(), stage=0, mixed_precision=zerofx.MixedPrecision(torch.float32))
    for met in (torch.ones(3), torch.ones(3, dtype=torch.complex64)):
        product = torch.view_as_complex(net.filter) * met
        assert product.dtype == torch.complex64
        assert product.imag.tolist() == [1.0] * 3


CAST: dict[str, Callable[[nn.Linear], torch.Tensor]] = {
    "randn_like": lambda layer: torch.randn_like(layer.weight) * layer.bias.sum(),
    "tanh": lambda layer: F.tanh(layer.weight),
    "hardswish": lambda layer: F.hardswish(layer.weight),
    "_weight_norm": lambda layer: torch._weight_norm(layer.weight, layer.bias[:, None], 0),
}


@pytest.mark.parametrize("name", CAST)
def test_functions_that_pytorch_s_list_of_overridable_ones_lacks_get_weights_that_are_cast(fake_world, name) -> None:
    class Of(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return CAST[name](self)

    fake_world(1)
    module = zerofx.compile(Of(4, 4), executor="eager", mixed_precision=zerofx.MixedPrecision(torch.bfloat16))
    found = module(torch.ones(4))
    found.sum().backward()
    assert found.dtype == torch.bfloat16 and module.bias.dtype == torch.float32


def test_the_named_backend_refuses_mixed_precision_that_comes_too_late(fake_world) -> None:
    fake_world(1)
    torch._dynamo.reset()
    options = {"executor": "eager", "mixed_precision": zerofx.MixedPrecision(BF16)}
    with pytest.raises(Exception, match=r"zerofx\.shard\(module, \.\.\.\) before torch\.compile"):
        torch.compile(Net(), backend="zerofx", options=options)(torch.ones(2, 64))


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_a_dtype_that_is_not_floating_point_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=torch\.int8"):
        zerofx.MixedPrecision(**{name: torch.int8})
