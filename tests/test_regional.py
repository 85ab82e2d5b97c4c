"""`executor="regional"`: equal layers are compiled once, in the order of the schedule, with Inductor's numbers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.models import GPT
from tests.slow import slow
from tests.workers import Workers
from zerofx import _torch
from zerofx.compiler.regional import Cut, Region, cut_into_regions
from zerofx.passes import VerificationError
from zerofx.passes.ops import discard
from zerofx.passes.proof.code import check_region
from zerofx.passes.travel import communicates

BF16 = zerofx.MixedPrecision(torch.bfloat16, torch.float32)


class Dropped(nn.Module):
    """A block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.3, self.training)


class Net(nn.Module):
    """Three equal blocks, the first of them checkpointed, and a buffer that forward writes to."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropped(width) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for i, block in enumerate(self.blocks):
            x = block(x) if i else checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def trained(executor: str, how: dict[str, Any], options: dict[str, Any]) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps and of an evaluation, and the weights then."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net: Any = zerofx.compile(Net(), executor=executor, groups=zerofx.Grouping(min_bytes=0), **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        rows = 4 + step * how.get("grows", 0)
        x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(10 * step + torch.distributed.get_rank()))
        if how.get("no_sync") and step:
            with zerofx.no_sync(net):
                net(x).backward()
        loss = net(x)
        inside = how.get("inside", False)
        with zerofx.step_in_backward(optimizer) if inside else contextlib.nullcontext():
            loss.backward()
        if not inside:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(net.eval()(x).item())
    for record in zerofx.graphs(net):
        zerofx.verify(record)
        cut = any("regions:" in str(trace) for trace in record.traces())
        assert cut == (executor == "regional") or how.get("grows")
    with zerofx.unsharded(net):
        return losses, [p.detach().clone() for p in net.parameters()]


def compared(folder: str, how: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    if options.get("offload") == "disk":
        options = {**options, "offload": zerofx.Offload(optimizer=folder, weights=folder, gradients=folder)}
    return [trained(executor, how, options) for executor in ("regional", "inductor")]


def norm_of_gradients(gm: GraphModule, ctx: Any) -> None:
    """A user's pass: it publishes a norm for each gradient."""
    for node in zerofx.passes.edit.tagged(gm.graph, "gradient") if ctx.phase == "backward" else ():
        with gm.graph.inserting_after(node):
            norm = gm.graph.call_function(torch.ops.aten.norm.Scalar, (node,))
        zerofx.passes.edit.publish(gm, ctx, f"norm {node.name}", norm)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 3": ({}, {}),
    "no_sync": ({"no_sync": True}, {}),
    "inside": ({"inside": True}, {}),
    "stage 0": ({}, {"stage": 0}),
    "stage 1": ({"inside": True}, {"stage": 1}),
    "stage 2": ({"no_sync": True}, {"stage": 2}),
    "bfloat16": ({}, {"mixed_precision": BF16}),
    "wire": ({}, {"wire": zerofx.Wire(weights="int8", gradients="int8")}),
    "sizes": ({"grows": 3}, {}),
    "budget": ({}, {"activation_budget": 0.3}),
    "gathered": ({}, {"memory_budget": float("inf")}),
    "published": ({}, {"passes": [norm_of_gradients]}),
    "offload": ({}, {"offload": "disk"}),
}
QUICK = ("stage 3",)


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in CASES])
def test_losses_and_weights_are_those_of_one_code_for_all(workers2: Workers, tmp_path: Path, name: str) -> None:
    """With dropout, and with a layer that is checkpointed: both draw the same numbers."""
    for (losses, weights), (wanted, others) in workers2.run(compared, str(tmp_path), *CASES[name], timeout=500):
        rounded = name == "bfloat16"  # where a kernel ends, what it has computed is rounded
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-2 if rounded else 2e-6, atol=0)
        for ours, theirs in zip(weights, others, strict=True) if not rounded else ():
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def final(model: nn.Module, *batch: torch.Tensor) -> dict[str, GraphModule]:
    """The graphs of a forward and a backward after all passes, in a world that pretends."""
    torch._dynamo.reset()  # a size that is another than before would be a symbol
    model = zerofx.compile(model, executor="regional", groups=zerofx.Grouping(min_bytes=0))
    model(*batch).backward()
    (record,) = zerofx.graphs(model)
    return {trace.name: trace.final for trace in record.traces()}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """The regions that are compiled. They run as they read: Inductor has no part in where a graph is cut."""
    found: list[GraphModule] = []

    def generate(gm: GraphModule, inputs: list[Any], **how: Any) -> Any:
        found.append(gm)
        return _torch.boxed(gm)

    monkeypatch.setattr(_torch, "generate_region", generate)
    return found


def gpt(layers: int) -> GPT:
    return GPT(layers, 32, 4, 64, 16)


TOKENS = torch.randint(64, (2, 2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options",
    [{}, slow({"stage": 0}), slow({"stage": 2}), slow({"stage": 1}), slow({"memory_budget": float("inf")})],
    ids=lambda x: "-".join(map(str, x.values())) or "3",
)
def test_five_layers_are_as_many_regions_to_compile_as_three(
    fake_world: Any, compiled: list[GraphModule], options: dict[str, Any]
) -> None:
    fake_world(2)
    counts = []
    for layers in (3, 5):
        compiled.clear()
        torch._dynamo.reset()
        model = zerofx.compile(gpt(layers), executor="regional", groups=zerofx.Grouping(min_bytes=0), **options)
        model(*TOKENS).backward()
        counts.append(len(compiled))
    assert counts[0] == counts[1] <= 14
    said = str(zerofx.graphs(model)[0])
    assert "blocks.1, blocks.2, blocks.3" in said and "one region, compiled once" in said


def test_the_outer_graph_starts_in_the_order_of_the_graph_and_discards_before_the_next_start(
    fake_world: Any, compiled: list[GraphModule]
) -> None:
    fake_world(4)
    for gm in final(gpt(3), *TOKENS).values():
        outer = cut_into_regions(gm, (), {}, lambda graph, inputs, first: _torch.boxed(graph))
        before, after = (list(map(str, starts(each))) for each in (gm, outer))
        assert before and before == after, "a collective starts out of turn"
        gone = {node.args[0].name for node in gm.graph.nodes if node.target is discard}
        assert gathered(gm, gone) == gathered(outer, gone), "at a start more is gathered than the schedule says"


def gathered(gm: GraphModule, gone: set[str]) -> list[int]:
    """At each start: how many of the buffers that are to be discarded are there."""
    live: set[str] = set()
    found, starting = [], starts(gm)
    for node in gm.graph.nodes:
        live |= {node.name} & gone
        if node.target is discard:
            live.discard(node.args[0].name)  # type: ignore[union-attr]
        elif node in starting:
            found.append(len(live))
    return found


def starts(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if communicates(node.target)]


def test_regions_compute_and_do_no_more(fake_world: Any, compiled: list[GraphModule]) -> None:
    fake_world(2)
    final(Net(), torch.ones(4, 24))
    assert compiled
    for name in (str(node.target) for gm in compiled for node in gm.graph.nodes):
        assert "zerofx" not in name and "c10d" not in name and "copy_" not in name and "seed" not in name


def test_regions_that_another_rank_has_begun_are_loaded_when_no_others_are_left(
    fake_world: Any, compiled: list[GraphModule]
) -> None:
    fake_world(2)
    gm, asked = final(gpt(3), *TOKENS)["forward"], []

    def compile_region(graph: GraphModule, inputs: list[Any], first: Node) -> Any:
        asked.append(first.name)
        if len(asked) in (1, 3):
            raise _torch.Claimed
        return _torch.boxed(graph)

    outer = cut_into_regions(gm, (), {}, compile_region)
    different = list(dict.fromkeys(asked))
    assert len(different) > 3 and asked == [*different, different[0], different[2]]
    called = [str(node.target) for node in outer.graph.find_nodes(op="call_module")]
    assert list(dict.fromkeys(called)) == [f"region_{i}" for i in range(len(different))]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x))
        return torch.cond(hidden.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (hidden,)).sum()


def test_a_graph_with_branches_is_one_code(fake_world: Any, compiled: list[GraphModule]) -> None:
    fake_world(2)
    model = zerofx.compile(Branches(), executor="regional", groups=zerofx.Grouping(min_bytes=0))
    model(torch.ones(2, 8)).backward()
    (record,) = zerofx.graphs(model)
    assert not compiled and record.forward is not None and record.forward.code is not None
    assert "regions:" not in str(record)


def test_what_a_generator_draws_stays_outside() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    drawn = graph.call_function(torch.ops.aten.rand_like.default, (x,))
    y = graph.call_function(torch.ops.aten.mul.Tensor, (x, drawn))
    z = graph.call_function(torch.ops.aten.tanh.default, (y,))
    graph.output((z,))
    for node in (x, drawn, y, z):
        node.meta["val"] = torch.empty(3, device="meta")
    drew, region = Cut(GraphModule({}, graph)).items()
    assert drew is drawn and isinstance(region, Region) and region.nodes == [y, z] and region.inputs == [x, drawn]


CODE = """
def call(self, args):
    arg0, arg1 = args
    args.clear()
    buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
    {line}
    return (buf0, )
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("extern_kernels.mm(arg0, arg1, out=buf0)", ""),
        ("extern_kernels.mm(arg0, buf0, out=arg1)", "writes to an input"),
        ("torch.ops.aten.add_.Tensor(arg0, arg1)", "writes to an input"),
        ("torch.ops._c10d_functional.wait_tensor.default(arg0)", "has a 'wait'"),
        ("buf1 = torch.ops._c10d_functional.all_reduce.default(arg0, 'sum', '0')", "has a 'start'"),
        ("del arg1\n    extern_kernels.mm(arg0, arg1, out=buf0)", "has a 'lost'"),
    ],
)
def test_code_of_a_region_that_does_more_is_refused(line: str, found: str) -> None:
    node = torch.fx.Graph().placeholder("x")
    if not found:
        assert check_region(CODE.format(line=line), node)
        return
    with pytest.raises(VerificationError, match=found):
        check_region(CODE.format(line=line), node)
