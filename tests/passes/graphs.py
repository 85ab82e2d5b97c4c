"""Graphs for tests of passes, written by hand; captured.py has those that AOTAutograd makes.

A test applies one pass with `apply`, looks at the code, and runs the graph with `run`, which works after every pass:
it brings whatever the graph asks for at that point, parameters or shards of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from tests.passes.facts import made
from zerofx import _torch
from zerofx.model.layout import GroupLayout, make_layout
from zerofx.model.precision import MixedPrecision
from zerofx.passes import PIPELINE, Context, ParameterRef, Tag

aten = torch.ops.aten
Pass = Callable[[GraphModule, Context], int]
Flats = dict[GroupLayout, torch.Tensor]


class Sketch:
    """A graph written by hand, and the context that goes with it.

    ::

        s = Sketch(world_size=2)
        x = s.input("x", 4, 8)
        w, b = s.parameters("h.0", w=(16, 8), b=(16,))      # one group, two placeholders
        y = s.call(aten.addmm.default, b, x, s.call(aten.t.default, w))
        gm, ctx = s.done(y, x, w, saved=[1, 2])

    Every node has a stack trace of its own: line n of "model.py" is the n-th call, line 100 + n the n-th placeholder.
    """

    def __init__(self, phase: str = "forward", *, world_size: int = 2, **context: Any) -> None:
        self.mode, self.graph = FakeTensorMode(), Graph()
        self.dtypes = MixedPrecision(context.pop("param_dtype", None), context.pop("reduce_dtype", None))
        context = {"process_group": "pg", "executor": "eager", **context}
        self.ctx = made(phase=phase, **context)
        self.world_size, self.lines = world_size, {"placeholder": 100, "call_function": 0}
        self.refs: dict[str, ParameterRef] = {}

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        """A placeholder that brings no parameter."""
        with self.mode:
            return self._add(self.graph.placeholder(name), torch.empty(shape, dtype=dtype))

    def group(
        self, group: str, dtype: torch.dtype = torch.float32, *, frozen: bool = False, **shapes: tuple[int, ...]
    ) -> GroupLayout:
        """Lay out a group without placeholders; its parameters are in ``self.refs`` from now on."""
        layout = make_layout(group, shapes.items(), dtype, self.world_size, not frozen, precision=self.dtypes)
        self.refs |= {slot.name: ParameterRef(layout, slot) for slot in layout.slots}
        return layout

    def parameters(
        self, group: str, dtype: torch.dtype = torch.float32, *, frozen: bool = False, **shapes: tuple[int, ...]
    ) -> list[Node]:
        """Lay out a group, and a placeholder for each of its parameters."""
        layout = self.group(group, dtype, frozen=frozen, **shapes)
        return [self.parameter(slot.name) for slot in layout.slots]

    def parameter(self, name: str, placeholder: str | None = None) -> Node:
        """A placeholder for a parameter of a group that was laid out before."""
        ref = self.refs[name]
        node = self.input(placeholder or name, *ref.slot.shape, dtype=ref.layout.dtype)
        self.ctx.parameters[node.name] = ref
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        name = _operator(target)  # as AOTAutograd names nodes: "mm", not "mm_default"
        fake_args, fake_kwargs = _torch.pytree.tree_map_only(Node, lambda n: n.meta["val"], (args, kwargs))
        with self.mode:
            value = target(*fake_args, **fake_kwargs)
        return self._add(self.graph.create_node("call_function", target, args, kwargs, name), value)

    def _add(self, node: Node, value: Any) -> Node:
        self.lines[node.op] += 1
        node.meta["stack_trace"] = f'  File "model.py", line {self.lines[node.op]}, in forward\n    {node.name}\n'
        node.meta["val"] = value
        return node

    def done(
        self, *outputs: Node | None, saved: Sequence[int] = (), gradients: dict[int, str] | None = None
    ) -> tuple[GraphModule, Context]:
        """The finished graph: which output positions are saved for backward, and which are whose gradients."""
        self.graph.output(tuple(outputs))
        self.ctx.saved = frozenset(saved)
        self.ctx.gradients = {i: self.refs[name] for i, name in (gradients or {}).items()}
        self.graph.lint()
        return GraphModule(torch.nn.Module(), self.graph), self.ctx


def mlp_forward(world_size: int = 2, layers: str = "abc", **context: Any) -> tuple[GraphModule, Context]:
    """``x = relu(x @ w)``, once per layer; layer "a" is the group "a" with the parameters "aw" and "ab"."""
    s = Sketch(world_size=world_size, **context)
    x = s.input("x", 4, 8)
    nodes = {name: s.parameters(name, **{f"{name}w": (8, 8), f"{name}b": (8,)}) for name in layers}
    for w, b in nodes.values():
        x = s.call(aten.relu.default, s.call(aten.addmm.default, b, x, w))
    return s.done(x)


def mlp_backward(world_size: int = 2, layers: str = "abc", **context: Any) -> tuple[GraphModule, Context]:
    """Last layer first, as AOTAutograd orders it: ``dx`` (which takes the weight), ``dw``, ``db``.

    Returns ``dw, db`` of each layer, and what flows out of the first one.
    """
    s = Sketch("backward", world_size=world_size, **context)
    saved = {name: s.input(f"x_{name}", 4, 8) for name in layers}
    for name in layers:
        s.group(name, **{f"{name}w": (8, 8), f"{name}b": (8,)})
    weights = {name: s.parameter(f"{name}w") for name in layers}
    dy = s.input("tangents_1", 4, 8)
    outputs: list[Node | None] = []
    gradients: dict[int, str] = {}
    for name in reversed(layers):
        dx = s.call(aten.mm.default, dy, s.call(aten.t.default, weights[name]))
        dw = s.call(aten.mm.default, s.call(aten.t.default, saved[name]), dy)
        db, dy = s.call(aten.sum.dim_IntList, dy, [0]), dx
        gradients |= {len(outputs): f"{name}w", len(outputs) + 1: f"{name}b"}
        outputs += [dw, db]
    return s.done(*outputs, dy, gradients=gradients)


@dataclass
class Applied:
    """What one pass did: the number it returned, and the nodes that are new."""

    edits: int
    inserted: list[Node]


def apply(gm: GraphModule, ctx: Context, *passes: Pass) -> Applied:
    """Run passes in order, the last one under watch."""
    vals = [node.meta["val"] for node in gm.graph.nodes if "val" in node.meta]
    with _torch.fake_mode_of(vals):
        for pass_ in passes[:-1]:
            pass_(gm, ctx)
        before = set(gm.graph.nodes)
        edits = passes[-1](gm, ctx)
    gm.graph.lint()
    return Applied(edits, [node for node in gm.graph.nodes if node not in before and node.op == "call_function"])


def up_to(pass_: Pass) -> tuple[Pass, ...]:
    """The pipeline up to and with ``pass_``."""
    return tuple(PIPELINE[: PIPELINE.index(pass_) + 1])


def assert_left_alone(gm: GraphModule, ctx: Context, pass_: Pass) -> None:
    """The pass finds nothing to do: it returns 0 and the code stays as it is."""
    code = gm.code
    assert apply(gm, ctx, pass_).edits == 0
    assert gm.code == code


def assert_documented(nodes: Iterable[Node], lines: dict[str, set[int]] | None = None) -> None:
    """Inserted nodes say what they are for and where they come from.

    ``lines``: kind -> the lines of model.py (see `Sketch`) that nodes of this kind point to.
    """
    found: dict[str, set[int]] = {}
    for node in nodes:
        tag = node.meta["zerofx"]
        assert isinstance(tag, Tag) and tag.group, node.format_node()
        assert "val" in node.meta, node.format_node()
        trace = node.meta["stack_trace"]
        found.setdefault(tag.kind, set()).add(int(trace.partition("line ")[2].partition(",")[0]))
    assert found
    if lines is not None:
        assert found == lines


def events(gm: GraphModule, *kinds: str) -> list[str]:
    """The graph's calls as a schedule: "all_gather a", "wait a", "mm", "discard a", ...; with kinds: only those."""
    found = []
    for node in gm.graph.nodes:
        tag = node.meta.get("zerofx")
        if node.op == "call_function" and (not kinds or (tag and tag.kind in kinds)):
            found.append(f"{tag.kind} {tag.group}" if tag else _operator(node.target))
    return found


def _operator(target: Callable[..., Any]) -> str:
    return str(target).split(".")[1] if isinstance(target, _torch.OpOverload) else target.__name__


@dataclass
class Numbers:
    """Values for a graph's inputs, by placeholder; whole flat buffers for its groups."""

    inputs: dict[str, torch.Tensor]
    flats: Flats = field(default_factory=dict)

    @staticmethod
    def random(gm: GraphModule, ctx: Context, seed: int = 0) -> Numbers:
        """Of a graph that no pass has touched."""
        generator = torch.Generator().manual_seed(seed)
        refs = [*ctx.parameters.values(), *ctx.gradients.values()]
        inputs = {
            n.name: torch.randn(n.meta["val"].shape, generator=generator).to(n.meta["val"].dtype)
            for n in gm.graph.find_nodes(op="placeholder")
            if n.name not in ctx.parameters
        }
        flats = {ref.layout: torch.randn(ref.layout.numel, generator=generator).to(ref.layout.dtype) for ref in refs}
        return Numbers(inputs, flats)


class _Checked(Interpreter):
    """A plain interpreter that also compares each tensor with what ``meta["val"]`` promises.

    All-gathers that `lower` has not spelled yet go pairwise: several in flight, gloo's own corrupt the heap
    (docs/decisions/).
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops._c10d_functional.all_gather_into_tensor.default:
            target = torch.ops.zerofx.all_gather_pairwise.default
        return super().call_function(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        val = n.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(val, torch.Tensor):
            promised, got = (val.shape, val.dtype), (value.shape, value.dtype)
            assert promised == got, f"{n.format_node()}: meta says {promised}, the value is {got}"
        return value


def run(gm: GraphModule, ctx: Context, numbers: Numbers, rank: int = 0) -> list[Any]:
    """What the graph returns, by a plain interpreter, whatever passes it has been through."""
    layouts, gathered, args = iter(ctx.found.shards), iter(ctx.found.gathered), []
    for node in gm.graph.find_nodes(op="placeholder"):
        if "zerofx" in node.meta and node.meta["zerofx"].kind == "shard":
            layout = next(layouts)
            part = layout.shard_numel
            args.append(numbers.flats[layout][rank * part : (rank + 1) * part].clone())
        elif "zerofx" in node.meta and node.meta["zerofx"].kind == "gathered":
            args.append(numbers.inputs[ctx.handover.kept_gathered[next(gathered)].saved])  # what forward left there
        elif node.name in ctx.parameters:
            ref = ctx.parameters[node.name]
            args.append(ref.layout.view(numbers.flats[ref.layout], ref.slot))
        else:
            args.append(numbers.inputs[node.name])
    return list(_Checked(gm).run(*args))


def gradients(ctx: Context, outputs: Sequence[Any], rank: int = 0) -> Flats:
    """This rank's gradient shard of each group, from a backward's outputs before or after `reduce`."""
    shards: Flats = {}
    for i, ref in ctx.gradients.items():
        if outputs[i] is not None:
            layout, slot = ref.layout, ref.slot
            flat = outputs[i].new_zeros(layout.numel)
            layout.view(flat, slot).copy_(outputs[i])
            _add(shards, layout, flat[rank * layout.shard_numel :][: layout.shard_numel])
    for reduction, flat in zip(ctx.found.reductions, outputs[len(outputs) - len(ctx.found.reductions) :], strict=True):
        assert flat.shape == (reduction.layout.shard_numel,)
        _add(shards, reduction.layout, flat)
    return shards


def _add(shards: Flats, layout: GroupLayout, flat: torch.Tensor) -> None:
    shards[layout] = shards[layout] + flat if layout in shards else flat
