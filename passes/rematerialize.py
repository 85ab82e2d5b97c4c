"""No full weight survives from forward to backward: what derives from one is rebuilt from the parameter.

AOTAutograd's partitioner decides what forward saves. A parameter itself it saves for free (it is an input), but
now and then it prefers a view or a cast of one, which would keep the whole gathered buffer alive across the step::

    forward      w = primals_3                        w = primals_3
                 t = permute(w)                       t = permute(w)
                 y = mm(x, t)                         y = mm(x, t)
                 return y, x, t          ─────▶       return y, x, primals_3

    backward     t: placeholder                       primals_3: placeholder
                 dx = mm(dy, permute(t))              t = permute(primals_3)
                                                      dx = mm(dy, permute(t))

A view to a size that is known when the graph runs (a batch's) is rebuilt where forward saves that size, too.

Sound because a chain of views and casts of one parameter has the same value whenever it is run, as long as the
parameter was not written in between; that is checked when backward starts, as for any saved tensor.

Requires: a forward graph and then its backward graph, with one ``ctx.handover``. Runs before ``gather``. Provides
``ctx.found.saved_names``.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from zerofx._torch import pytree
from zerofx.passes import edit
from zerofx.passes.context import CHAIN, Context, Recipe, Size, Tag


def rematerialize(gm: GraphModule, ctx: Context) -> int:
    """Save parameters instead of what derives from them (forward), and rebuild it (backward)."""
    if ctx.phase == "forward":
        return edit.finish(gm, _save_parameters(gm, ctx))
    if ctx.phase == "backward":
        return edit.finish(gm, _rebuild(gm, ctx))
    return 0


def _save_parameters(gm: GraphModule, ctx: Context) -> int:
    outputs, edits = edit.output_values(gm.graph), 0
    saved = {outputs[i] for i in ctx.saved if isinstance(outputs[i], Node)}
    for i in sorted(ctx.saved):
        value: Any = outputs[i]
        if isinstance(value, Node):
            ctx.found.saved_names[i] = value.name
        steps: list[Any] = []
        while isinstance(value, Node) and edit.is_view_or_cast(value):
            (source,) = edit.sources(value)
            sizes = [x for x in value.all_input_nodes if x is not source]
            if not saved.issuperset(sizes):
                break
            put = {source: CHAIN} | {size: Size(size.name) for size in sizes}
            steps.append((value.target, *pytree.tree_map_only(Node, put.__getitem__, (value.args, value.kwargs))))
            value = source
        if steps and isinstance(value, Node) and value.name in ctx.parameters:
            ctx.handover.recipes[outputs[i].name] = Recipe(
                ctx.parameters[value.name], value.meta["val"], tuple(reversed(steps))
            )
            outputs[i], edits = value, edits + 1
    edit.set_output_values(gm.graph, outputs)
    if edits:
        gm.graph.eliminate_dead_code()
    return edits


def _rebuild(gm: GraphModule, ctx: Context) -> int:
    graph, edits = gm.graph, 0
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    for placeholder in inputs.values():
        recipe = ctx.handover.recipes.get(placeholder.name)
        if recipe is None:
            continue
        # The placeholder stays where it is in the list of inputs; it holds the parameter now.
        ctx.parameters[placeholder.name] = recipe.parameter
        placeholder.meta = {**placeholder.meta, "val": recipe.value}
        users = list(placeholder.users)
        if users:
            value = placeholder
            with graph.inserting_before(min(users)):
                for target, args, kwargs in recipe.steps:
                    args, kwargs = filled_in((args, kwargs), value, inputs)
                    tag = Tag("rebuild", recipe.parameter.layout.name)
                    value = edit.insert(graph, target, args, tag=tag, near=placeholder, **kwargs)
            for user in users:
                user.replace_input_with(placeholder, value)
        edits += 1
    return edits


def filled_in(arguments: Any, value: Node, inputs: dict[str, Node]) -> Any:
    """A step's arguments with ``value`` for `CHAIN`, and this graph's inputs for sizes."""
    arguments = pytree.tree_map_only(type(CHAIN), lambda _: value, arguments)
    return pytree.tree_map_only(Size, lambda size: inputs[size.name], arguments)
