"""What forward saves leaves the device after its last use, and comes back ahead of its first use in backward.

::

    forward     a = block_A(x)                  backward    a, b, c: placeholders
                b = block_B(a)                              use c
                c = block_C(b)                              use b
                return y, a, b, c                           use a

    offloaded   a = block_A(x)                  offloaded   a, b, c: placeholders of handles
                b = block_B(a)                              reload c
                offload a     while B computes              reload b
                c = block_C(b)                              c = wait_reload(c)
                offload b                                   reload a             while C computes
                ...                                         use c
                wait_offload(a)                             b = wait_reload(b)
                offload c                                   use b
                A = wait_offload(a)                         a = wait_reload(a)
                return y, A, B, C                           use a

What autograd saves is a *handle*: it has the tensor's shape, and one element of memory. Its memory is the tensor's
name, so what was taken away goes when autograd lets go of it, whether there was a backward or not.

Two are on their way at most, in forward as in backward: the third waits for the first. The wait reads what leaves, so
nobody is given its memory before.

What leaves is a whole tensor. Of several saved views of one (queries, keys and values of one product) it is that one,
once, and backward makes the views anew. A tensor stays if

* it has fewer bytes than `ActivationChoice.smallest`, or is not among `ActivationChoice.only`;
* somebody else holds its memory: an input, a parameter, an output of the model;
* it has gaps in memory, or a saved view of it cannot be made anew from sizes that backward knows.

Sound because a copy changes nothing: what comes back is what left, bit for bit and with its strides, and nothing writes
to a saved tensor.

Graphs with `OffloadFacts.activations`; a forward and then its backward, with the same `OffloadedActivations`. Requires
`rematerialize`. Runs after what moves nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx._torch import OpOverload, pytree, without_symbols
from zerofx.features.offload.facts import ActivationChoice, OffloadedActivation, offload_of, offloaded
from zerofx.features.offload.operators import (
    MAX_IN_FLIGHT,
    OFFLOAD_ACTIVATION,
    RELOAD_ACTIVATION,
    WAIT_OFFLOAD_ACTIVATION,
    WAIT_RELOAD_ACTIVATION,
)
from zerofx.passes import edit
from zerofx.passes.context import CHAIN, Context, Size, Tag
from zerofx.passes.kinds import NodeKind
from zerofx.passes.rematerialize import filled_in


def offload_activations(gm: GraphModule, ctx: Context) -> int:
    """Insert a start and a wait for each saved tensor that leaves (forward), or comes back (backward)."""
    if offload_of(ctx).activations is not None and ctx.phase == "forward":
        return edit.finish(gm, _take_away(gm.graph, ctx))
    if offloaded(ctx) and ctx.phase == "backward":
        return edit.finish(gm, _bring_back(gm.graph, ctx))
    return 0


def leaving(outputs: Sequence[Any], saved: Collection[int], choice: ActivationChoice) -> dict[Node, list[int]]:
    """Each tensor of forward that can leave, and at which of ``saved`` positions it, or a view of it, is returned."""
    found: dict[Node, list[int]] = {}
    returned = [x for i, x in enumerate(outputs) if i not in saved and isinstance(x, Node)]
    held = {whole_of(x) for x in returned}
    for i in sorted(saved):
        if isinstance(outputs[i], Node) and (whole := whole_of(outputs[i])) is not None:
            found.setdefault(whole, []).append(i)
    names = {x.name for i in saved if isinstance(x := outputs[i], Node)}
    return {
        whole: places
        for whole, places in found.items()
        if whole not in held
        and _can_leave(whole, choice)
        and all(_steps(outputs[i], whole, names) is not None for i in places)
        and (choice.only is None or any(outputs[i].name in choice.only for i in places))
    }


def whole_of(node: Node) -> Node | None:
    """What computes the memory that ``node`` looks at; None where that is an input, or not known."""
    while node.op == "call_function":
        if node.target is operator.getitem:
            source = edit.sources(node)[0]
            if not isinstance(source.target, OpOverload):
                return None
            if not edit.may_alias(source):
                return node
            node = source
        elif not isinstance(node.target, OpOverload):
            return None
        elif not edit.may_alias(node):
            return node
        else:
            node = edit.sources(node)[0]
    return None


def _can_leave(whole: Node, choice: ActivationChoice) -> bool:
    value = whole.meta.get("val")
    if "zerofx" in whole.meta or not isinstance(value, torch.Tensor):
        return False
    if value.layout is not torch.strided or edit.hinted_nbytes(value) < choice.smallest or order_of(value) is None:
        return False
    written = (edit.written_by(user) for alias in edit.aliases(whole) for user in alias.users if _writes(user))
    return not any(set(edit.aliases(whole)).intersection(nodes) for nodes in written)


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def order_of(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions as they lie in memory, the outermost first; None where it has gaps, or looks at an element twice.

    Dimensions that are symbols as they were when they were captured.
    """
    shape, stride = without_symbols((tuple(value.shape), tuple(value.stride())))
    for ties in (1, -1):
        order = sorted(range(len(shape)), key=lambda i: (-stride[i], ties * i))
        numel, wanted = 1, {}
        for i in reversed(order):
            wanted[i] = numel
            numel *= shape[i]
        if all(stride[i] == wanted[i] for i in order):
            return tuple(order)
    return None


def _steps(value: Node, whole: Node, saved: set[str]) -> tuple[Any, ...] | None:
    """How to make ``value``, a view of ``whole``, anew; None where it takes a size that is not saved."""
    steps: list[Any] = []
    while value is not whole:
        source = edit.sources(value)[0]
        others = [x for x in value.all_input_nodes if x is not source]
        if any(isinstance(x.meta.get("val"), torch.Tensor) or x.name not in saved for x in others):
            return None
        put = {source: CHAIN} | {size: Size(size.name) for size in others}
        steps.append((value.target, *pytree.tree_map_only(Node, put.__getitem__, (value.args, value.kwargs))))
        value = source
    return tuple(reversed(steps))


def _take_away(graph: Graph, ctx: Context) -> int:
    choice = offload_of(ctx).activations
    assert choice is not None
    outputs, order = edit.output_values(graph), edit.positions(graph)
    places = leaving(outputs, ctx.saved.difference(ctx.found.saved_parameters), choice)
    names = {x.name for i in ctx.saved if isinstance(x := outputs[i], Node)}
    lasts = {whole: _last_use(whole, order) for whole in places}
    starts: list[Node] = []
    handles: dict[Node, Node] = {}

    def wait(start: Node) -> None:
        whole, *rest = start.args
        tag = Tag("wait_offload_activation", start.meta["zerofx"].group)
        handles[whole] = edit.insert(graph, WAIT_OFFLOAD_ACTIVATION, (start, whole, *rest), tag=tag, near=start)  # type: ignore[index]

    behind: dict[Node, Node] = {}  # what was inserted last after a node
    numbers = {whole: i for i, whole in enumerate(sorted(places, key=lambda whole: order[lasts[whole]]))}
    for whole, place in numbers.items():
        dims, last = order_of(whole.meta["val"]), lasts[whole]
        assert dims is not None
        with graph.inserting_after(behind.get(last, last)):
            start = edit.insert(
                graph,
                OFFLOAD_ACTIVATION,
                (whole, list(dims), place),
                tag=Tag("offload_activation", whole.name),
                near=whole,
            )
        behind[last] = start
        if len(starts) >= MAX_IN_FLIGHT:
            with graph.inserting_before(start):
                wait(starts[-MAX_IN_FLIGHT])
        starts.append(start)
    with graph.inserting_before(graph.output_node()):
        for start in starts[-MAX_IN_FLIGHT:]:
            wait(start)
    for whole, positions in places.items():
        handle = handles[whole]
        for i in positions:
            name, steps = ctx.found.saved_names.get(i, outputs[i].name), _steps(outputs[i], whole, names)
            place, dims = numbers[whole], order_of(whole.meta["val"])
            offloaded(ctx)[name] = OffloadedActivation(place, whole.name, dims or (), handle.meta["val"], steps or ())
            outputs[i] = handle
    edit.set_output_values(graph, outputs)
    return 2 * len(starts)


def _last_use(whole: Node, order: dict[Node, int]) -> Node:
    """The last node of forward that reads its memory, or looks at it; and what is given back after that."""
    aliases = edit.aliases(whole)
    readers = [user for alias in aliases for user in alias.users if user.op != "output"]
    last = max([*aliases, *readers], key=order.__getitem__)
    while edit.is_kind(last.next, "discard"):
        last = last.next
    return last


def _bring_back(graph: Graph, ctx: Context) -> int:
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    order = edit.positions(graph)
    given: dict[int, list[Node]] = {}
    for node in inputs.values():
        if node.name in offloaded(ctx):
            given.setdefault(offloaded(ctx)[node.name].place, []).append(node)
    firsts: dict[int, Node] = {}
    for place, nodes in given.items():
        if users := [user for node in nodes for user in node.users]:
            firsts[place] = min(users, key=order.__getitem__)
    for nodes in given.values():
        for node in nodes:
            node.meta = {**node.meta, "val": offloaded(ctx)[node.name].handle}
    coming = sorted(firsts, key=lambda place: (order[firsts[place]], place))
    calls = (node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(next(calls)):
        starts = {place: _start(graph, given[place][0], ctx) for place in coming[:MAX_IN_FLIGHT]}
    for i, place in enumerate(coming):
        start = starts[place]
        readers = [(node, list(node.users)) for node in given[place]]
        with graph.inserting_before(firsts[place]):
            tag = Tag("wait_reload_activation", start.meta["zerofx"].group)
            here = edit.insert(graph, WAIT_RELOAD_ACTIVATION, (start, *start.args), tag=tag, near=start)
            if i + MAX_IN_FLIGHT < len(coming):
                following = coming[i + MAX_IN_FLIGHT]
                starts[following] = _start(graph, given[following][0], ctx)
            for node, users in readers:
                value = _made_anew(graph, here, offloaded(ctx)[node.name], inputs)
                for user in users:
                    if user is not start:
                        user.replace_input_with(node, value)
    return 2 * len(coming)


def _start(graph: Graph, handle: Node, ctx: Context) -> Node:
    known = offloaded(ctx)[handle.name]
    args = (handle, list(known.order), known.place)
    return edit.insert(graph, RELOAD_ACTIVATION, args, tag=Tag("reload_activation", known.source), near=handle)


def _made_anew(graph: Graph, whole: Node, known: OffloadedActivation, inputs: dict[str, Node]) -> Node:
    value = whole
    for target, args, kwargs in known.steps:
        args, kwargs = filled_in((args, kwargs), value, inputs)
        value = edit.insert(graph, target, args, tag=Tag("rebuild", known.source), near=whole, **kwargs)
    return value


NODE_KINDS = {
    "offload_activation": NodeKind(
        "the start of the copy of what forward saves away from the device",
        sized=True,
        about="takes",
        transfer=True,
        verb="offload_activation",
        of=0,
        total="activations leave the device:",
        stands="after the last use in forward: two are on their way at most",
    ),
    "wait_offload_activation": NodeKind(
        "its handle, when it has left",
        transfer=True,
        verb="left",
        stands="ahead of the second tensor that leaves after it, or at the end",
    ),
    "reload_activation": NodeKind(
        "the start of its copy back",
        sized=True,
        about="brings",
        transfer=True,
        verb="reload_activation",
        of=0,
        total="activations come back:",
        stands="after the wait for the one before the last: two are on their way at most",
    ),
    "wait_reload_activation": NodeKind(
        "what has come", transfer=True, verb="here", stands="before the first use in backward"
    ),
}
