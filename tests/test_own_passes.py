"""Passes of a user's own on real ranks: the worked examples compute what a plain loop computes."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from zerofx.passes import Context, edit

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@functools.cache
def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def build(**options: Any) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"executor": "eager", "groups": zerofx.Grouping([nn.Linear], min_bytes=0), **options}
    return zerofx.compile(Net(), **options)


def plain_norms(ranks: int, steps: int = 1) -> dict[str, float]:
    """Of the gradient of all ranks' mean loss, of one process alone; summed over micro-batches."""
    torch.manual_seed(0)
    model = Net()
    for step in range(steps):
        sum(model(batch(rank, step)).square().mean() for rank in range(ranks)).div(ranks).backward()
    return {
        name: math.hypot(*[p.grad.norm().item() for p in layer.parameters()]) for name, layer in model.named_children()
    }


def _norms(stage: int, executor: str, way: str) -> dict[str, float]:
    model = build(stage=stage, executor=executor, passes=[example("own_pass").gradient_norms])
    rank = dist.get_rank()
    if way == "no_sync":
        with zerofx.no_sync(model):
            model(batch(rank)).square().mean().backward()
        assert zerofx.published(model) == {}
        model(batch(rank, 1)).square().mean().backward()
    elif way == "step":
        optimizer = zerofx.AdamW(model.parameters(), lr=0.1)
        loss = model(batch(rank)).square().mean()
        with zerofx.step_in_backward(optimizer):
            loss.backward()
    else:
        model(batch(rank)).square().mean().backward()
    return {name.removeprefix("gradient norm of "): x.item() for name, x in zerofx.published(model).items()}


@pytest.mark.parametrize(
    ("stage", "way"),
    [(0, "plain"), (1, "plain"), (2, "step"), (3, "plain"), (3, "no_sync"), (3, "step"), (0, "no_sync")],
)
def test_published_norms_are_those_of_the_averaged_gradients(workers2: Any, stage: int, way: str) -> None:
    expected = plain_norms(2, steps=2 if way == "no_sync" else 1)
    for found in workers2.run(_norms, stage, "eager", way):
        assert found == pytest.approx(expected, rel=1e-5)


def test_with_inductor_norms_are_the_same_and_its_code_keeps_the_order(workers2: Any) -> None:
    for found in workers2.run(_norms, 3, "inductor", "plain", timeout=280):
        assert found == pytest.approx(plain_norms(2), rel=1e-5)


def _average(executor: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    module = example("own_collective")
    module.averages.clear()
    own = zerofx.Pass(module.moving_average, collectives=(torch.ops.moving.send.default,))
    model = build(executor=executor, passes=[own])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain: dict[str, torch.Tensor] = {}
    for step in range(4):
        for name, p in model.named_parameters():
            now = p.full_tensor().clone()  # type: ignore[operator]
            plain[name] = plain[name] * module.DECAY + now * (1 - module.DECAY) if step else now
        model(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(batch(0))  # inference: nothing is averaged
    record, *_ = zerofx.graphs(model)
    found = module.averaged(record) if dist.get_rank() == module.KEEPER else dict(module.averages)
    return found, plain


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_moving_average_is_a_plain_one_and_on_one_rank_alone(make_workers: Any, ranks: int) -> None:
    (found, plain), *others = make_workers(ranks).run(_average, "eager")
    assert found.keys() == plain.keys()
    for name, x in plain.items():
        torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-7)
    assert all(nothing == {} for nothing, _ in others)


@pytest.mark.slow
def test_the_moving_average_is_a_plain_one_with_inductor(workers2: Any) -> None:
    found, plain = workers2.run(_average, "inductor", timeout=280)[0]
    for name, x in plain.items():
        torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-7)


class Wide(nn.Linear):
    """What the pass is to make of a layer, by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.linear(x.double(), self.weight.double(), self.bias.double())
        return wide.to(x.dtype)


def _precision(by_hand: bool, stage: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    if by_hand:
        model.second.__class__ = Wide
    own = example("own_precision").add_up_in(torch.float64, "second")
    zerofx.compile(model, stage=stage, executor="eager", passes=[] if by_hand else [own])
    output = model(batch(dist.get_rank()))
    output.square().mean().backward()
    return output.detach(), {
        name: p.grad.full_tensor().clone() if stage else p.grad for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_a_layer_in_a_wider_dtype_is_bit_by_bit_what_it_is_by_hand(workers2: Any, stage: int) -> None:
    pairs = zip(workers2.run(_precision, False, stage), workers2.run(_precision, True, stage))
    for (output, gradients), (expected, wanted) in pairs:
        assert torch.equal(output, expected)
        assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


def test_a_layer_in_a_wider_dtype_is_nearer_to_the_truth(workers2: Any) -> None:
    plain, wide = workers2.run(_nearness)[0]
    assert wide < plain / 2


def _nearness() -> tuple[float, float]:
    module, errors = example("own_precision"), []
    x = torch.randn(16, 2048, generator=torch.Generator().manual_seed(3))
    for passes in ([], [module.add_up_in(torch.float64, "head")]):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = module.Model(2048)
        hidden = torch.tanh(model.body(x)).detach()
        truth = hidden.double() @ model.head.weight.double().T + model.head.bias.double()
        output = zerofx.compile(model, executor="eager", passes=passes)(x)
        errors.append(((output.double() - truth).norm() / truth.norm()).item())
    return errors[0], errors[1]


def by_rank(gm: torch.fx.GraphModule, ctx: Context) -> None:
    """What no pass may do: it decides by what one rank alone can see."""
    if ctx.phase == "forward" and dist.get_rank() == 0:
        with gm.graph.inserting_before(gm.graph.output_node()):
            x = gm.graph.call_function(torch.ops.aten.clone.default, (edit.tagged(gm.graph, "shard")[0],))
            x = gm.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", ctx.process_group))
            edit.publish(gm, ctx, "x", gm.graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,)))


def _out_of_step() -> str:
    try:
        model = build(passes=[by_rank], timeout=5)
        for _ in range(3):
            model(batch(0))
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


@pytest.mark.slow
def test_a_pass_that_decides_by_rank_is_named_by_the_ranks_that_are_out_of_step(make_workers: Any) -> None:
    said = make_workers(2).run(_out_of_step, timeout=150)
    assert any("own all_reduce of" in text and "rank 0 has" in text for text in said), said


def _with_torch_compile(stage: int) -> dict[str, float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {
        "stage": stage,
        "executor": "eager",
        "groups": zerofx.Grouping([nn.Linear], min_bytes=0),
        "passes": [example("own_pass").gradient_norms],
    }
    model = Net()
    torch.compile(model, backend="zerofx", options=options)(batch(dist.get_rank())).square().mean().backward()
    return {name.removeprefix("gradient norm of "): x.item() for name, x in zerofx.published(model).items()}


def test_passes_are_an_option_of_the_named_backend_too(workers2: Any) -> None:
    for found in workers2.run(_with_torch_compile, 3):
        assert found == pytest.approx(plain_norms(2), rel=1e-5)


def _with_and_without(executor: str) -> list[tuple[bool, bool]]:
    found = []
    for passes in ([], [example("own_pass").gradient_norms], []):
        model = build(passes=passes, executor=executor)
        model(batch(dist.get_rank())).square().mean().backward()
        (record,) = zerofx.graphs(model)
        found.append(("gradient_norms" in record.backward.edits, bool(zerofx.published(model))))
    return found


def test_a_model_with_a_pass_and_one_without_do_not_share_what_was_compiled(workers2: Any) -> None:
    for found in workers2.run(_with_and_without, "eager"):
        assert found == [(False, False), (True, True), (False, False)]


def test_the_pass_of_the_example_is_twenty_lines() -> None:
    import inspect

    lines = inspect.getsource(example("own_pass").gradient_norms).splitlines()
    assert len(lines) <= 26  # with its signature, its docstring and its comments


def test_every_example_is_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        if path.name != "train_gpt.py":  # it launches ranks, samples and counts bytes, too
            assert len(path.read_text().splitlines()) < 150, path.name
