"""A user's pass runs: what it inserted gets tags and values, so that the passes after it and `verify` can read it.

::

    square = graph.call_function(aten.mul.Tensor, (gradient, gradient))    as torch.fx has it

    meta["val"]          what the operator makes of its inputs' fake values
    meta["zerofx"]       Tag("norms", "blocks.0"): the pass, and the group of what it reads
    meta["stack_trace"]  the line of the model that its input serves

    aten.stack           aten.unsqueeze, aten.cat, for Inductor, which knows no others at this point

Before all of ours no node gets a tag: it is the model's from then on. What such a pass must leave alone is checked
here, for what AOTAutograd knows of the graph it goes on knowing: inputs, and the number, shapes and dtypes of outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from zerofx._torch import pytree, taken_apart
from zerofx.passes import edit
from zerofx.passes.context import Context, Tag
from zerofx.passes.own import Pass

_aten = torch.ops.aten


def adopt(pass_: Pass, gm: GraphModule, ctx: Context, *, front: bool) -> int:
    """Run ``pass_``; returns its number of edits, counted where it does not say.

    ``front``: it stands before all of ours.

    Raises:
        ValueError, TypeError: it did what no pass may; the message says what.
    """
    calls = {node: _call(node) for node in gm.graph.nodes}
    inputs = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    outputs = [(getattr(x, "name", None), _looks(x)) for x in edit.output_values(gm.graph)]
    published = len(ctx.found.published)
    edits = pass_(gm, ctx)
    if edits is not None and not isinstance(edits, int):
        raise TypeError(
            f"the pass {pass_.name!r} returned a {type(edits).__name__}: expected its number of edits, or None. It "
            "changes the graph that it is given in place."
        )
    new = [node for node in gm.graph.nodes if node not in calls]
    changed = [node for node in gm.graph.nodes if node in calls and calls[node] != _call(node)]
    found = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    if found != inputs:
        odd = next((name for name in [*found, *inputs] if name not in inputs or name not in found), "their order")
        raise ValueError(
            f"the pass {pass_.name!r} changed the inputs of the {ctx.name} graph ({odd!r}): expected those that it "
            "was given, whoever runs the graph knows no others. A constant goes in with torch.ops.aten.full."
        )
    _fill(gm, new, changed if front else [])
    if ctx.executor == "inductor":
        new = [piece for node in new for piece in _take_apart(gm, node)]
    if front:
        _check_outputs(pass_, gm, ctx, outputs, len(ctx.found.published) > published)
    else:
        for node in new:
            node.meta["zerofx"] = Tag(pass_.name, _group_of(node))
    gone = len(calls) - sum(node in calls for node in gm.graph.nodes)
    edit.finish(gm, len(new) + len(changed) + gone)
    return len(new) + len(changed) + gone if edits is None else edits


def _call(node: Node) -> tuple[Any, ...]:
    return node.op, node.target, node.args, node.kwargs


def _group_of(node: Node) -> str:
    """The group that ``node`` serves: of its own tag, or of what it reads, if that is of one alone."""
    if "zerofx" in node.meta:
        return node.meta["zerofx"].group
    groups = {n.meta["zerofx"].group for n in node.all_input_nodes if "zerofx" in n.meta}
    return groups.pop() if len(groups) == 1 else ""


def _fill(gm: GraphModule, new: list[Node], changed: list[Node]) -> None:
    """Give new nodes values and lines of the model; and changed ones, and what reads them, new values."""
    fresh, stale = set(new), set(changed)
    for node in gm.graph.nodes:
        if node.op == "get_attr" and node in fresh:
            _attribute(gm, node)
        if node.op != "call_function":
            continue
        if node in fresh:
            for source in node.all_input_nodes:
                for key in ("stack_trace", "nn_module_stack", "fwd_nn_module_stack"):
                    if key in source.meta:
                        node.meta.setdefault(key, source.meta[key])
        if (node in fresh and "val" not in node.meta) or node in stale:
            before = node.meta.get("val")
            args, kwargs = pytree.tree_map_only(Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
            node.meta["val"] = node.target(*args, **kwargs)
            if _looks(before) != _looks(node):
                stale.update(user for user in node.users if user.op == "call_function" and user not in fresh)


def _take_apart(gm: GraphModule, node: Node) -> list[Node]:
    """``node`` as Inductor knows it: for what it takes apart, the pieces."""
    pieces = taken_apart(node) if node.op == "call_function" else None
    if pieces is None:
        return [node]
    found: dict[Node, Node] = dict(zip(pieces.graph.find_nodes(op="placeholder"), node.all_input_nodes))
    before = set(gm.graph.nodes)
    with gm.graph.inserting_before(node):
        result: Any = gm.graph.graph_copy(pieces.graph, found)
    new = [n for n in gm.graph.nodes if n not in before]
    for piece in new:
        for key in ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "zerofx"):
            if key in node.meta:
                piece.meta[key] = node.meta[key]
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):  # items of what returns several
            user.replace_all_uses_with(result[user.args[1]])
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    return new


def _attribute(gm: GraphModule, node: Node) -> None:
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    example = next((n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)), None)
    mode = getattr(example, "fake_mode", None)
    node.meta.setdefault("val", mode.from_tensor(value) if mode is not None else value)


def _looks(value: Any) -> Any:
    """Shape and dtype of a node's value, or of a value."""
    value = value.meta.get("val") if isinstance(value, Node) else value
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _check_outputs(
    pass_: Pass, gm: GraphModule, ctx: Context, before: list[tuple[str | None, Any]], published: bool
) -> None:
    """Outputs stay as AOTAutograd knows them, and what is saved keeps the name by which backward knows it."""
    if published:
        raise ValueError(
            f"the pass {pass_.name!r} publishes something, and stands before all of zerofx's: expected a place "
            "after one of them, such as before='lower'. In front a pass changes what the model computes."
        )
    after = edit.output_values(gm.graph)
    odd = next((i for i, ((_, was), now) in enumerate(zip(before, after)) if was != _looks(now)), None)
    if odd is not None or len(before) != len(after):
        found = f"{len(after)} outputs, expected {len(before)}"
        if odd is not None:
            found = f"output {odd} as {_words(_looks(after[odd]))}, expected {_words(before[odd][1])}"
        raise ValueError(
            f"the pass {pass_.name!r} leaves the {ctx.name} graph with {found}: autograd and the other graph know "
            "the outputs as they were. Cast back what the pass computes in another way."
        )
    for i in ctx.saved:
        if isinstance(after[i], Node) and after[i].name != before[i][0]:
            after[i] = _named(gm, after[i], str(before[i][0]), {after[k] for k in ctx.saved if k != i})
    edit.set_output_values(gm.graph, after)


def _words(looks: Any) -> str:
    return f"{list(looks[0])} of {looks[1]}" if isinstance(looks, tuple) else str(looks)


def _named(gm: GraphModule, node: Node, name: str, others: set[Any]) -> Node:
    """``node``, or a copy of it, under the name by which backward gets what is saved there."""
    if node.op == "placeholder" or node in others:
        with gm.graph.inserting_before(gm.graph.output_node()):
            copy = gm.graph.call_function(_aten.clone.default, (node,))
        copy.meta |= {k: node.meta[k] for k in ("val", "stack_trace", "nn_module_stack") if k in node.meta}
        node = copy
    holder = next((n for n in gm.graph.nodes if n.name == name and n is not node), None)
    if holder is not None:
        holder.name = f"{name}_before_{node.name}"
    node.name = name
    return node
