"""Correct graphs, and ways to break one: each in the name of the rule of `zerofx.passes.verify` that must find it.

A mutator looks for places where it can break a graph and breaks the one with the number that it is given; it returns
False where there are no so many places. It finds nodes by their tags, as the passes left them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

import zerofx
from zerofx import _torch
from zerofx.passes import Context, Tag, edit, pipeline, verify
from zerofx.passes.ops import discard as discard_storage
from zerofx.passes.ops import release
from zerofx.passes.proof.meaning import Meanings, Op
from zerofx.records import GraphRecord, _copy_context, copy_graph

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Graph = tuple[GraphModule, Context]
Mutator = Callable[[GraphModule, Context, int], bool]
MUTATORS: dict[str, list[Mutator]] = {}


class Block(nn.Module):
    """Two matrices of one shape, so that they can be taken for each other, and a normalisation."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


class Model(nn.Module):
    """Blocks between an embedding and a head that share one weight; a frozen scale."""

    def __init__(self, dim: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(blocks)])
        self.scale = nn.Parameter(torch.ones(dim), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(F.linear(h * self.scale, self.embedding.weight).flatten(0, 1), x.flatten())


def record(autocast: bool = False, **options: Any) -> GraphRecord:
    """What zerofx compiles of the model, by the eager executor."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Model(), torch.randint(48, (2, 4))
    zerofx.compile(model, executor="eager", groups=zerofx.Grouping([Block], min_bytes=0), **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x)
    loss.backward()
    (found,) = zerofx.graphs(model)
    return found


def rewritten(record: GraphRecord, **changes: Any) -> dict[str, Graph]:
    """The record's graphs once more through all passes but `verify`, in another context."""
    shared: dict[str, Any] = {"recipes": {}, "kept_gathered": {}, "meanings": Meanings()}
    graphs: dict[str, Graph] = {}
    for trace in (record.forward, record.backward):
        assert trace is not None
        gm, ctx = copy_graph(trace.before), replace(_copy_context(trace._initial), **shared, **changes)
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
    return copy_graph(gm), replace(_copy_context(ctx), meanings=copy.deepcopy(ctx.meanings))


def breaks(rule: str) -> Callable[[Mutator], Mutator]:
    """What the decorated mutator does must be found by ``rule``."""

    def add(mutator: Mutator) -> Mutator:
        MUTATORS.setdefault(rule, []).append(mutator)
        return mutator

    return add


def at(places: list[Any], n: int) -> Any:
    return places[n] if n < len(places) else None


def tagged(gm: GraphModule, *kinds: str) -> list[Node]:
    return edit.tagged(gm.graph, *kinds)


def collectives(gm: GraphModule) -> list[Node]:
    return tagged(gm, "all_gather", "reduce_scatter", "all_reduce")


def plain(nodes: list[Node]) -> list[Node]:
    """Those that no order is pinned on: their arguments are their own."""
    return [node for node in nodes if _torch.pinned(node) is None]


def set_arg(node: Node, i: int, value: Any) -> None:
    node.args = (*node.args[:i], value, *node.args[i + 1 :])


def inner(gm: GraphModule, node: Node) -> Node:
    """The node itself, or the operation that hides in it, whose constants may be changed."""
    if _torch.pinned(node) is None:
        return node
    subgraph = copy_graph(getattr(gm, node.args[1].target))
    setattr(gm, node.args[1].target, subgraph)
    (call,) = (n for n in subgraph.graph.nodes if n.op == "call_function")
    return call


def like(gm: GraphModule, after: Node, target: Any, *args: Any, tag: Tag | None = None) -> Node:
    """A new call right behind ``after``, which it reads, with a value of its own."""
    with gm.graph.inserting_after(edit.after_inputs(after)):
        node = gm.graph.call_function(target, args)
    fake = _torch.pytree.tree_map_only(Node, lambda n: n.meta["val"], args)
    with _torch.fake_mode_of([after.meta["val"]]):
        node.meta["val"] = target(*fake)
    if tag:
        node.meta["zerofx"] = tag
    return node


def first_reader(node: Node) -> Node | None:
    """A call of the model's that reads ``node``."""
    return next((u for u in node.users if u.op == "call_function" and "zerofx" not in u.meta), None)


# ---- inputs ---------------------------------------------------------------------------------------------------------


@breaks("inputs")
def an_input_of_another_size(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "shard", "replica", "kept", "gathered"), n)
    if node is not None:
        value = node.meta["val"]
        node.meta["val"] = value.new_empty(value.numel() + 32)
    return node is not None


@breaks("inputs")
def an_input_of_another_dtype(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "shard", "replica", "gathered"), n)
    if node is not None:
        node.meta["val"] = node.meta["val"].to(torch.float64)
    return node is not None


@breaks("inputs")
def a_shard_that_is_not_promised(gm: GraphModule, ctx: Context, n: int) -> bool:
    if n < len(ctx.shards):
        del ctx.shards[n]
        return True
    return False


@breaks("inputs")
def a_parameter_that_is_an_input_still(gm: GraphModule, ctx: Context, n: int) -> bool:
    name = at(sorted(ctx.parameters), n)
    if name is None or not ctx.stage:
        return False
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(first):
        gm.graph.placeholder(name).meta["val"] = first.meta["val"]
    return True


@breaks("inputs")
def a_shard_before_the_models_inputs(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "shard", "replica"), n)
    first = next(iter(gm.graph.nodes))
    if node is None or "zerofx" in first.meta:
        return False
    first.prepend(node)
    return True


# ---- gather ---------------------------------------------------------------------------------------------------------


@breaks("gather")
def a_weight_from_the_shard(gm: GraphModule, ctx: Context, n: int) -> bool:
    """Used before it is gathered."""
    shards = {s.meta["zerofx"].group: s for s in tagged(gm, "shard")}
    weights = [w for w in plain(tagged(gm, "weight")) if w.meta["zerofx"].group in shards]
    node = at(weights, n)
    if node is not None:
        set_arg(node, 0, shards[node.meta["zerofx"].group])
    return node is not None


@breaks("gather")
def a_shard_that_the_model_reads(gm: GraphModule, ctx: Context, n: int) -> bool:
    shard = at(tagged(gm, "shard"), n)
    if shard is not None:
        like(gm, shard, aten.neg.default, shard)
    return shard is not None


@breaks("gather")
def a_second_gather(gm: GraphModule, ctx: Context, n: int) -> bool:
    start = at(plain(tagged(gm, "all_gather")), n)
    if start is not None:
        again = like(gm, start, start.target, *start.args, tag=start.meta["zerofx"])
        like(gm, again, c10d.wait_tensor.default, again, tag=Tag("wait", "x"))
    return start is not None


@breaks("gather")
def a_gather_of_a_weight(gm: GraphModule, ctx: Context, n: int) -> bool:
    weight = at(tagged(gm, "weight"), n)
    if weight is not None:
        gather = torch.ops.zerofx.all_gather_pairwise.default
        like(gm, weight, gather, weight, 2, ctx.process_group, tag=Tag("all_gather", "x"))
    return weight is not None


# ---- wait -----------------------------------------------------------------------------------------------------------


@breaks("wait")
def a_dropped_wait(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(plain(tagged(gm, "wait", "wait_grad", "refresh")), n)
    if node is not None:
        for mark in [u for u in node.users if u.target is discard_storage]:
            gm.graph.erase_node(mark)
        node.replace_all_uses_with(node.all_input_nodes[0])
        gm.graph.erase_node(node)
    return node is not None


@breaks("wait")
def a_use_before_the_wait(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(plain([w for w in tagged(gm, "weight") if w.args[0].op == "call_function"]), n)
    if node is not None:
        set_arg(node, 0, Op.of(node.args[0]).args[0])
    return node is not None


@breaks("wait")
def a_second_wait(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(plain(tagged(gm, "wait", "wait_grad", "refresh")), n)
    if node is not None:
        like(gm, node, c10d.wait_tensor.default, node.args[0], tag=node.meta["zerofx"])
        if node.meta["zerofx"].kind == "wait":  # so that no other rule is broken
            ctx.executor = "inductor"
    return node is not None


@breaks("wait")
def a_wait_for_nothing(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "pack", "weight"), n)
    if node is not None:
        like(gm, node, c10d.wait_tensor.default, node, tag=Tag("wait", "x"))
    return node is not None


# ---- group ----------------------------------------------------------------------------------------------------------


def _wrong_collective(i: int, wrong: Callable[[Any], Any]) -> Mutator:
    def mutate(gm: GraphModule, ctx: Context, n: int) -> bool:
        node = at(collectives(gm), n)
        if node is None:
            return False
        call = inner(gm, node)
        place = len(call.args) + i
        if isinstance(call.args[place], Node) or not isinstance(call.args[place], type(wrong(call.args[place]))):
            return False
        set_arg(call, place, wrong(call.args[place]))
        return True

    return mutate


for _name, _place, _wrong in (
    ("another_group", -1, lambda group: "elsewhere"),
    ("one_rank_more", -2, lambda ranks: ranks + 1 if isinstance(ranks, int) else None),
    ("a_maximum", -3, lambda sums: "max" if isinstance(sums, str) else None),
    ("an_average_in_the_collective", -2, lambda sums: "avg" if isinstance(sums, str) else None),
):
    _mutator = _wrong_collective(_place, _wrong)
    _mutator.__name__ = _name
    breaks("group")(_mutator)


# ---- slice ----------------------------------------------------------------------------------------------------------


@breaks("slice")
def a_weight_one_element_on(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(plain(tagged(gm, "weight")), n)
    if node is not None:
        set_arg(node, 3, node.args[3] + 1)
    return node is not None


@breaks("slice")
def a_weight_past_the_end(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(plain(tagged(gm, "weight")), n)
    if node is not None:
        set_arg(node, 3, node.args[0].meta["val"].numel())
    return node is not None


@breaks("slice")
def a_transposed_weight(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at([w for w in plain(tagged(gm, "weight")) if len(w.args[1]) == 2], n)
    if node is not None:
        set_arg(node, 2, [1, node.args[1][0]])
    return node is not None


@breaks("slice")
def a_weight_of_another_shape(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at([w for w in plain(tagged(gm, "weight")) if len(w.args[1]) == 1], n)
    if node is not None:
        set_arg(node, 1, [node.args[1][0] // 2])
    return node is not None


@breaks("slice")
def a_whole_group_that_the_model_reads(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "wait", "refresh", "gathered"), n)
    if node is not None:
        like(gm, node, aten.neg.default, node)
    return node is not None


@breaks("slice")
def another_part_of_the_shard(gm: GraphModule, ctx: Context, n: int) -> bool:
    """Of a group that is gathered in two parts."""
    node = at([x for x in tagged(gm, "narrow") if x.target is aten.slice.Tensor], n)
    if node is not None:
        shift = 32 if node.args[2] == 0 else -32
        node.args = (*node.args[:2], node.args[2] + shift, node.args[3] + shift)
    return node is not None


# ---- discard --------------------------------------------------------------------------------------------------------


@breaks("discard")
def a_dropped_discard(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "discard"), n)
    if node is not None:
        gm.graph.erase_node(node)
    return node is not None


@breaks("discard")
def a_second_discard(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "discard"), n)
    if node is not None:
        with gm.graph.inserting_after(node):
            gm.graph.call_function(node.target, node.args)
    return node is not None


@breaks("discard")
def a_discard_before_the_last_use(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "discard"), n)
    if node is not None:
        edit.after_inputs(node.args[0]).append(node)
    return node is not None


@breaks("discard")
def a_late_discard(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "discard"), n)
    if node is None or all(x.op == "output" or "zerofx" in x.meta for x in _following(node)):
        return False
    gm.graph.output_node().prepend(node)
    return True


@breaks("discard")
def what_autograd_owns_is_freed(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "discard"), n)
    if node is not None:
        node.target = release if node.target is discard_storage else discard_storage
    return node is not None


@breaks("discard")
def a_weight_is_discarded(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "weight"), n)
    if node is not None:
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(discard_storage, (node,))
    return node is not None


def _following(node: Node) -> list[Node]:
    nodes = list(node.graph.nodes)
    return nodes[nodes.index(node) + 1 :]


# ---- budget ---------------------------------------------------------------------------------------------------------


@breaks("budget")
def all_gathers_at_once(gm: GraphModule, ctx: Context, n: int) -> bool:
    starts = plain(tagged(gm, "all_gather"))
    if n or len(starts) < 4 or ctx.executor == "inductor":
        return False
    ctx.memory_budget = None
    place = edit.last_placeholder(gm.graph)
    for start in starts:
        for node in [*(x for x in start.all_input_nodes if x.op != "placeholder"), start]:
            place.append(node)
            place = node
    return True


@breaks("budget")
def a_smaller_budget(gm: GraphModule, ctx: Context, n: int) -> bool:
    bytes_of = [w.meta["val"].numel() * w.meta["val"].element_size() for w in tagged(gm, "wait", "gathered")]
    if bytes_of and n < 3:
        ctx.memory_budget = max(bytes_of) - 1 - n
    return bool(bytes_of) and n < 3


@breaks("budget")
def other_graphs_hold_more(gm: GraphModule, ctx: Context, n: int) -> bool:
    if n or not ctx.gathered_bytes:
        return False
    ctx.memory_budget, ctx.held_elsewhere = ctx.gathered_bytes, 1 << 20
    return True
