"""Regional compilation: a rewritten graph is cut into regions, and regions that are equal are compiled once.

A *region* is a run of operators that compute, between nodes that do more: a start, a wait, an update. Weights are its
inputs, whoever's they are. So the blocks of a model are one region. What is left of the graph runs as it reads, like
any graph of the eager executor's::

    as the passes left it             the outer graph                        regions

    start B                           start B
    wait A                            wait A
    a, b = views of A
    h = mm(norm(x, a), b)             h, s = region_0(x, A) ─────────────▶   a, b = views of A
    discard A                         discard A                              h = mm(norm(x, a), b)
    s = rsqrt(var(h))                                                        s = rsqrt(var(h))
    start C                           start C
    wait B                            wait B
    a, b = views of B
    g = mm(norm(h, a), b)             g, t = region_0(h, B) ─────────────▶   the same: compiled once
    discard B                         discard B
    t = rsqrt(var(g))

A discard, and a wait for reduced gradients, go after what is computed up to the next start. So a block is one run. At
each start no more is gathered, or on its way, than the schedule says. Starts, and all else that does more than compute,
keep their order. A run ends as well where weights of another group are read: two blocks are two regions even where no
collective is between them. Views of what is outside cost nothing: each region makes its own.

=====================================  =====================================================================
stays outside                          since
=====================================  =====================================================================
collectives, waits, updates, copies    their order is the schedule
operators that write, or are unknown   a region's code writes to memory of its own alone (``check_region``)
draws from a device's generator        it is one for all: their order counts. Inductor's own draws depend on
                                       a seed, which comes from outside; they are compiled, however few
a user's pass's nodes                  they are the user's
runs of less than `LEAST` kernels      there is nothing to fuse
=====================================  =====================================================================
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from zerofx import _torch
from zerofx.compiler.unit import Unit
from zerofx.passes import edit
from zerofx.passes.ops import discard as discard_storage
from zerofx.passes.ops import release
from zerofx.passes.proof.code import check_region

LEAST = 2
"""Kernels that a region has at least."""

_OWN_PART = torch.ops.zerofx.own_part.default
_SEEDS = ("prims::inductor_seed", "prims::inductor_lookup_seed")
_DRAWS = ("prims::inductor_rand",)
_OF_DATA = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)

Compile = Callable[[GraphModule, list[Any], Node], Callable[[list[Any]], Any]]
"""From a region's graph, fake inputs and its first node to a boxed function."""


def takes(gm: GraphModule) -> bool:
    """Whether a graph can be cut.

    It calls no other graph (``torch.cond``, a loop), for nothing looks inside. And no size is a symbol: a region's code
    would need all that bring one as inputs, and regions would differ by these.
    """
    calls = any(isinstance(getattr(gm, n.target, None), GraphModule) for n in gm.graph.find_nodes(op="get_attr"))
    return not calls and not any(_torch.symbols_of(n.meta.get("val")) for n in gm.graph.find_nodes(op="placeholder"))


@dataclass
class Region:
    """One run of operators.

    Attributes:
        nodes: of the graph.
        inputs: that it reads, of the graph.
        outputs: of its own, that others read.
        graph: the run as a graph.
        key: what equal regions have in common: operators, arguments, and what inputs look like.
        group: that it serves, by what it reads and by tags of its own; else the module of the model.
    """

    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Node]
    graph: Graph
    key: str
    group: str

    @property
    def kernels(self) -> int:
        """How many of its operators do more than look at memory in another way."""
        return sum(node.target is not operator.getitem and not edit.may_alias(node) for node in self.nodes)

    @property
    def is_compiled(self) -> bool:
        """Whether it is worth it, or must be: what Inductor draws, it draws otherwise than PyTorch."""
        return self.kernels >= LEAST or any(_named(node, _DRAWS) for node in self.nodes)


@dataclass
class Cut:
    """One graph, cut.

    Attributes:
        gm: the graph after all passes.
        own: the kinds of nodes of a user's passes.
        groups: of inputs that are weights, by name: their groups.
        inner: the nodes that regions may have.
        light: nodes that run whenever someone reads what they yield: inputs, constants, sizes, views of what is
            outside.
    """

    gm: GraphModule
    own: Collection[str] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    inner: set[Node] = field(default_factory=set)
    light: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in self.gm.graph.nodes:
            if self._is_light(node):
                self.light.add(node)
            elif self._computes(node) and (node.target is not operator.getitem or node.args[0] in self.inner):
                self.inner.add(node)

    def items(self) -> Iterator[Node | Region]:
        """What runs, in order: outer nodes, and regions."""
        for item in self._runs():
            yield item if isinstance(item, Node) else self._region(item)

    def _computes(self, node: Node) -> bool:
        """Whether the node makes tensors of its arguments, and does no more."""
        if node.op != "call_function" or _is_number(node) or edit.is_kind(node, *self.own):
            return False
        op = node.target
        if not isinstance(op, _torch.OpOverload):
            return op is operator.getitem
        known = op.namespace in ("aten", "prims") and not op._schema.is_mutable and not _named(node, _SEEDS)
        return known and not edit.draws(node) and not any(tag in op.tags for tag in _OF_DATA)

    def _is_light(self, node: Node) -> bool:
        if node.op != "call_function":
            return node.op in ("placeholder", "get_attr")
        if (
            node.target is _OWN_PART
            or _named(node, ("prims::inductor_lookup_seed",))
            or (node.users and _is_number(node))
        ):
            return True
        if not self._computes(node) or _named(node, _DRAWS):
            return False
        sources = edit.sources(node)
        return not sources or (edit.may_alias(node) and self.inner.isdisjoint(sources))

    # ---- order -------------------------------------------------------------------------------------------------------

    def _runs(self) -> Iterator[Node | list[Node]]:
        """Outer nodes, and runs of inner ones between them, each with weights of one group."""
        run: dict[Node, None] = {}
        served = ""
        late: dict[Node, None] = {}  # after the run: discards, waits for gradients, and what reads these
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "output") or (node in self.inner and node.target is operator.getitem):
                continue  # what is taken out of several results stands after what yields them
            roots = {self._root(x) for x in node.all_input_nodes}
            if node in self.inner:
                where = run if late.keys().isdisjoint(roots) else late
                group = next(filter(None, map(self._group, roots)), "") if where is run else ""
                if group and group != served:
                    if run:
                        yield list(run)
                        run.clear()
                    served = group
                where |= dict.fromkeys([node, *(user for user in node.users if user.target is operator.getitem)])
            elif node.target in (discard_storage, release) or edit.is_kind(node, "wait_grad"):
                late[node] = None
            elif node not in self.light or (not self._computes(node) and roots & (run.keys() | late.keys())):
                yield from self._flushed(run, late)
                if node not in self.light:
                    yield node
        yield from self._flushed(run, late)

    def _flushed(self, run: dict[Node, None], late: dict[Node, None]) -> Iterator[Node | list[Node]]:
        if run:
            yield list(run)
        some: list[Node] = []
        for node in late:
            if node in self.inner:
                some.append(node)
                continue
            if some:
                yield some
            yield node
            some = []
        if some:
            yield some
        run.clear()
        late.clear()

    def _root(self, node: Node) -> Node:
        """What a light node looks at."""
        while node in self.light and (sources := edit.sources(node)):
            node = sources[0]
        return node

    def _group(self, node: Node) -> str:
        """The group of weights that a node from outside of all regions brings."""
        if node in self.inner:
            return ""
        tag = node.meta.get("zerofx")
        return self.groups.get(node.name, "") if tag is None else tag.group

    # ---- regions -----------------------------------------------------------------------------------------------------

    def _region(self, run: list[Node]) -> Region:
        graph, inside = Graph(), set(run)
        inputs = self._inputs(run, inside)
        env: dict[Node, Node] = {}
        for i, node in enumerate(inputs):
            env[node] = graph.placeholder(f"arg{i}")
            env[node].meta["val"] = node.meta["val"]

        def copied(node: Node) -> Node:
            if node not in env:
                args = {x: copied(x) for x in node.all_input_nodes}
                env[node] = graph.node_copy(node, args.__getitem__)
            return env[node]

        for node in run:
            copied(node)
        results = [n for n in run if isinstance(n.meta["val"], torch.Tensor)]
        outputs = [n for n in results if any(user not in inside for user in n.users)]
        graph.output(tuple(env[n] for n in outputs))
        tags = (node.meta["zerofx"].group for node in run if "zerofx" in node.meta)
        names = [*map(self._group, inputs), *tags, *map(edit.module_of, run)]
        group = next(filter(None, names), "(outside of modules)")
        return Region(run, inputs, outputs, graph, _key(graph), group)

    def _inputs(self, run: Iterable[Node], inside: Collection[Node]) -> list[Node]:
        """What a run reads, but for what it makes anew."""
        inputs: dict[Node, None] = {}
        seen: set[Node] = set()

        def read(node: Node) -> None:
            if node in seen:
                return
            seen.add(node)
            if self._is_made_anew(node):
                for x in node.all_input_nodes:
                    read(x)
            elif node not in inside:
                inputs[node] = None

        for node in run:
            for x in node.all_input_nodes:
                read(x)
        return list(inputs)

    def _is_made_anew(self, node: Node) -> bool:
        """Whether regions that read a light node have one of their own."""
        if node not in self.light or not self._computes(node) or node.target is operator.getitem:
            return False
        if node.target is not edit.AS_STRIDED:
            return True
        offset = edit.sources(node)[0].meta["val"].storage_offset()
        return isinstance(offset, int) and offset == 0  # it counts from where the memory begins, code from the input


def _is_number(node: Node) -> bool:
    """Whether the node yields no tensor, and no tensors."""
    return not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _named(node: Node, names: tuple[str, ...]) -> bool:
    return isinstance(node.target, _torch.OpOverload) and node.target._schema.name.startswith(names)


def _key(graph: Graph) -> str:
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        what: Any = map_arg((node.args, node.kwargs), number.__getitem__)
        if node.op == "placeholder":
            what = value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                what = value.dtype, tuple(value.shape), value.stride(), value.device
        lines.append(f"{node.target if node.op == 'call_function' else node.op} {what}")
    return "\n".join(lines)


class _Boxed(nn.Module):
    """A region's code, as the outer graph calls it: with a list, which it empties."""

    def __init__(self, code: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self.code = code

    def forward(self, inputs: list[Any]) -> Any:
        return self.code(inputs)


def cut_into_regions(
    gm: GraphModule, own: Collection[str], groups: Mapping[str, str], compile_region: Compile
) -> GraphModule:
    """The outer graph, with each different region compiled once as a module ``region_0``, ``region_1``, and so on.

    Args:
        gm: a graph after all passes, as the eager executor gets it. It is not changed.
        own, groups: see `Cut`.
        compile_region: compiles one.
    """
    cut, graph = Cut(gm, own, groups), Graph()
    attributes: dict[str, Any] = {}
    env: dict[Node, Node] = {node: graph.node_copy(node) for node in gm.graph.find_nodes(op="placeholder")}

    def copied(node: Node) -> Node:
        """``node`` in the outer graph; a light one is made when it is first read."""
        if node not in env:
            args = {x: copied(x) for x in node.all_input_nodes}
            env[node] = graph.node_copy(node, args.__getitem__)
            if _named(node, ("prims::inductor_seeds",)):  # as Inductor's code draws them: the numbers are the same
                count, device = node.args
                env[node].target, env[node].args = torch.ops.aten.randint.low, (*_torch.SEEDS, [count])
                env[node].kwargs = {"dtype": torch.int64, "device": device}
            if node.op == "get_attr":
                attributes[str(node.target)] = operator.attrgetter(str(node.target))(gm)
        return env[node]

    items = list(cut.items())
    names: dict[str, str] = {}
    for key, code in _compiled(items, compile_region).items():
        names[key] = f"region_{len(names)}"
        attributes[names[key]] = _Boxed(code)
    for item in items:
        if isinstance(item, Node) or not item.is_compiled:
            for node in [item] if isinstance(item, Node) else item.nodes:
                copied(node)
            continue
        inputs = graph.call_function(_torch.box, tuple(map(copied, item.inputs)))
        results = graph.call_module(names[item.key], (inputs,))
        for i, node in enumerate(item.outputs):
            env[node] = graph.call_function(operator.getitem, (results, i))
            env[node].meta |= node.meta
    output = gm.graph.output_node()
    args = {x: copied(x) for x in output.all_input_nodes}
    graph.output(map_arg(output.args[0], args.__getitem__)).meta |= output.meta
    return GraphModule(attributes, graph)


def _compiled(items: Iterable[Node | Region], compile_region: Compile) -> dict[str, Callable[[list[Any]], Any]]:
    """Each different region's code, by its key, in the order in which they are first called.

    Ranks of one host share the work (`zerofx._torch.code_locks`): each compiles the next region that no other rank has
    begun. Those that others have begun it loads in the end.
    """
    different: dict[str, Region] = {}
    for item in items:
        if isinstance(item, Region) and item.is_compiled:
            different.setdefault(item.key, item)

    def code(region: Region) -> Callable[[list[Any]], Any]:
        return compile_region(GraphModule({}, region.graph), [x.meta["val"] for x in region.inputs], region.nodes[0])

    found: dict[str, Callable[[list[Any]], Any]] = {}
    for key, region in different.items():
        with contextlib.suppress(_torch.Claimed), _torch.unclaimed():
            found[key] = code(region)
    return {key: found[key] if key in found else code(region) for key, region in different.items()}


def run_regions(gm: GraphModule, unit: Unit, how: Mapping[str, Any]) -> Callable[[list[Any]], Any]:
    """The boxed function of a graph of ``unit``, with regions of Inductor's code; ``how``: what Inductor is told."""
    groups = {name: ref.layout.name for name, ref in unit.parameters(gm.graph).items()}

    def compiled(region: GraphModule, inputs: list[Any], first: Node) -> Callable[[list[Any]], Any]:
        code = _torch.generate_region(region, inputs, **how)
        if (text := _torch.source_code(code)) is not None:
            check_region(text, first)
        return code

    return _torch.boxed(cut_into_regions(gm, unit.own_kinds, groups, compiled))


def describe(gm: GraphModule, own: Collection[str], groups: Mapping[str, str]) -> list[str]:
    """A line for each different region of a graph after all passes: what it is for, and how often it runs.

    ::

        regions: 4 compiled, run 6 times
          tokens                                    7 kernels
          blocks.0, blocks.1, blocks.2             26 kernels, one region, compiled once
    """
    equal: dict[str, list[Region]] = {}
    for item in Cut(gm, own, groups).items():
        if isinstance(item, Region) and item.is_compiled:
            equal.setdefault(item.key, []).append(item)
    lines = [f"  regions: {len(equal)} compiled, run {sum(map(len, equal.values()))} times"] if equal else []
    for regions in equal.values():
        names = [region.group for region in regions]
        shown = ", ".join(names) if len(names) < _SHOWN else f"{names[0]}, {names[1]}, ... {names[-1]}"
        shared = ", one region, compiled once" if len(regions) > 1 else ""
        lines.append(f"    {shown:40} {regions[0].kernels:4} kernels{shared}")
    return lines


_SHOWN = 6
"""From so many names on, those in the middle are left out."""
