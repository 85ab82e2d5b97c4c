"""Correct graphs, and ways to break one: each in the name of the rule of `zerofx.passes.verify` that must find it.

A mutant is a function that breaks a graph at a place, and another that says what places there are in a graph::

    @breaks("discard", tags("discard"))
    def a_dropped_discard(gm, ctx, mark):
        gm.graph.erase_node(mark)

Nodes are found by their tags, as the passes left them. The rules are divided over the files of this folder:

===============  =======================================
inputs.py        inputs, gather, slice
collectives.py   wait, group, order
buffers.py       discard, budget
gradients.py     saved, reduction
replicated.py    the same two, in stage 0 and of what the caller is promised
steps.py         step
values.py        write, value
tables.py        several, where rows of tables travel
coded.py         wire
carried.py       reload, offload
activations.py   activation
===============  =======================================
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

import zerofx
from tests.passes.facts import changed
from zerofx import _torch
from zerofx.compiler.records import GraphRecord
from zerofx.compiler.rewriting import copy_graph
from zerofx.passes import Context, Tag, VerificationError, edit, pipeline, verify
from zerofx.passes.context import Handover

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Graph = tuple[GraphModule, Context]
Places = Callable[[GraphModule, Context], Sequence[Any]]
Break = Callable[[GraphModule, Context, Any], None]


@dataclass(frozen=True)
class Mutant:
    """A way to break a graph: ``places`` finds where it can be done, ``break_`` does it at one of these."""

    rule: str
    places: Places
    break_: Break

    @property
    def name(self) -> str:
        return self.break_.__name__


MUTANTS: dict[str, list[Mutant]] = {}
"""By rule."""


class Block(nn.Module):
    """Two matrices of one shape, so that they can be taken for each other, between normalisations; random numbers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.last = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.second(F.dropout(torch.tanh(self.first(self.norm(x))), 0.1)))


class Model(nn.Module):
    """Blocks between an embedding and a head that share one weight; a frozen scale; two buffers that it writes to.

    ``table``: another embedding, which is only looked up.
    """

    mean: torch.Tensor
    most: torch.Tensor

    def __init__(self, dim: int = 32, blocks: int = 3, table: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, dim)
        self.table = nn.Embedding(96, dim, padding_idx=2) if table else None
        self.blocks = nn.ModuleList([Block(dim) for _ in range(blocks)])
        self.scale = nn.Parameter(torch.ones(dim), requires_grad=False)
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("most", torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x) if self.table is None else self.embedding(x) + self.table(x)
        for block in self.blocks:
            h = block(h)
        seen = h.detach().flatten(0, 1).float()
        self.mean.copy_(seen.mean(0))
        self.most.copy_(seen.amax(0))
        return F.cross_entropy(F.linear(h * self.scale, self.embedding.weight).flatten(0, 1), x.flatten())


def record(autocast: bool = False, blocks: int = 3, **options: Any) -> GraphRecord:
    """What zerofx compiles of the model, by the eager executor."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    table = options.get("lookups", False)
    dim = 64 if options.get("wire") else 32  # a matrix of 64 columns is one that travels in codes
    model, x = Model(dim, blocks, table), torch.randint(48, (2, 4))
    groups = zerofx.Grouping([Block, nn.Embedding] if table else [Block], min_bytes=0)
    zerofx.compile(model, executor="eager", groups=groups, **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x)
    loss.backward()
    (found,) = zerofx.graphs(model)
    return found


def rewritten(record: GraphRecord, **changes: Any) -> dict[str, Graph]:
    """The record's graphs once more through all passes but `verify`, in another context."""
    handover = Handover()
    graphs: dict[str, Graph] = {}
    for trace in (record.forward, record.backward):
        assert trace is not None
        gm, ctx = copy_graph(trace.before), changed(trace._initial.copy(), handover=handover, **changes)
        values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        with _torch.fake_mode_of(values):
            for pass_ in pipeline(ctx.stage)[:-1]:
                pass_(gm, ctx)
        verify(gm, ctx)
        graphs[ctx.phase] = gm, ctx
    return graphs


def another(graph: Graph) -> Graph:
    """A copy that may be broken."""
    gm, ctx = graph
    ctx = ctx.copy()
    ctx.handover.meanings = copy.deepcopy(ctx.handover.meanings)
    return copy_graph(gm), ctx


def what_verify_misses(
    cases: Iterable[tuple[Graph, Callable[[GraphModule, Context], None], Collection[str]]],
) -> list[str]:
    """In words, each mutant that `verify` lets pass, or refuses by none of the rules that it breaks."""
    missed = []
    for graph, mutant, rules in cases:
        gm, ctx = another(graph)
        mutant(gm, ctx)
        try:
            verify(gm, ctx)
            missed.append(f"{mutant.__name__} is not found in {ctx.phase}")
        except VerificationError as error:
            if error.rule not in rules:
                missed.append(f"{mutant.__name__}: {error}")
    return missed


def breaks(rule: str, places: Places) -> Callable[[Break], Break]:
    """What the decorated function does, at any of ``places``, must be found by ``rule``."""

    def add(break_: Break) -> Break:
        MUTANTS.setdefault(rule, []).append(Mutant(rule, places, break_))
        return break_

    return add


def tags(*kinds: str, pinned: bool | None = None) -> Places:
    """The nodes of ``kinds``; ``pinned``: only those whose order is pinned, or only the others."""
    return lambda gm, ctx: [
        node for node in tagged(gm, *kinds) if pinned is None or (_torch.pinned(node) is not None) == pinned
    ]


def when(condition: Callable[[Context], object], places: Places) -> Places:
    """``places``, in graphs of which ``condition`` holds."""
    return lambda gm, ctx: places(gm, ctx) if condition(ctx) else []


def tagged(gm: GraphModule, *kinds: str) -> list[Node]:
    return edit.tagged(gm.graph, *kinds)


def group_of(node: Node) -> str:
    return node.meta["zerofx"].group  # type: ignore[no-any-return]


def numel(node: Node) -> int:
    return node.meta["val"].numel()  # type: ignore[no-any-return]


def bytes_of(node: Node) -> int:
    return numel(node) * node.meta["val"].element_size()  # type: ignore[no-any-return]


def set_arg(node: Node, i: int, value: Any) -> None:
    node.args = (*node.args[:i], value, *node.args[i + 1 :])


def exchange(x: Node, y: Node, i: int = 0) -> None:
    """Two nodes swap an argument."""
    here, there = x.args[i], y.args[i]
    set_arg(x, i, there)
    set_arg(y, i, here)


def inner(gm: GraphModule, node: Node) -> Node:
    """The node itself, or the operation that hides in it, whose constants may be changed."""
    if _torch.pinned(node) is None:
        return node
    subgraph = copy_graph(getattr(gm, node.args[1].target))  # type: ignore[union-attr, arg-type]
    setattr(gm, node.args[1].target, subgraph)  # type: ignore[union-attr, arg-type]
    (call,) = (n for n in subgraph.graph.nodes if n.op == "call_function")
    return call


def like(after: Node, target: Any, *args: Any, tag: Tag | None = None, **kwargs: Any) -> Node:
    """A new call right behind ``after``, which it reads, with a value of its own."""
    graph = after.graph
    with graph.inserting_after(edit.after_inputs(after)):
        node = graph.call_function(target, args, kwargs)
    fake = _torch.pytree.tree_map_only(Node, lambda n: n.meta["val"], args)
    with _torch.fake_mode_of([after.meta["val"]]):
        node.meta["val"] = target(*fake, **kwargs)
    if tag:
        node.meta["zerofx"] = tag
    return node


def instead(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """All who read ``node`` read ``target(node, *args)`` now."""
    readers = list(node.users)
    new = like(node, target, node, *args, **kwargs)
    for reader in readers:
        reader.replace_input_with(node, new)
    return new


def bypass(node: Node, source: Node | None = None) -> None:
    """All who read ``node`` read its input now, and it goes away."""
    node.replace_all_uses_with(source or node.all_input_nodes[0])
    node.graph.erase_node(node)


def outputs_of(gm: GraphModule) -> list[Any]:
    return edit.output_values(gm.graph)


def give(gm: GraphModule, place: int, value: Any) -> None:
    """The graph returns ``value`` at ``place``."""
    outputs = outputs_of(gm)
    outputs[place] = value
    edit.set_output_values(gm.graph, outputs)


def without_marks(buffer: Node) -> None:
    """``buffer`` is not discarded any more."""
    for mark in [u for u in buffer.users if "zerofx" in u.meta and u.meta["zerofx"].kind == "discard"]:
        mark.graph.erase_node(mark)


def readers(node: Node) -> list[Node]:
    """The model's calls that read ``node``, in graph order."""
    order = edit.positions(node.graph)
    found = [u for u in node.users if u.op == "call_function" and "zerofx" not in u.meta]
    return sorted(found, key=order.__getitem__)
