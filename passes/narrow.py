"""Weights travel in the dtype they compute in: casts move in front of the gather.

Under `zerofx.MixedPrecision` or ``torch.autocast`` a graph casts float32 weights to 16 bits before it uses them. Where
every use of a whole group is such a cast, the shard is cast instead, and half the bytes are gathered::

    w = zerofx.unshard(shard, …)                       low = cast(shard, bfloat16)
    b = zerofx.unshard(shard, …)                       w = zerofx.unshard(low, …)
    w16 = cast(w, bfloat16)               ─────▶       b = zerofx.unshard(low, …)
    b16 = cast(b, bfloat16)                            y = addmm(b, x, w)
    y = addmm(b16, x, w16)

In stages 1 and 2 under `zerofx.MixedPrecision` replicas have 16 bits already, and `gather` put a cast to 32 bits
behind each; it cancels against the cast back.

Sound because a cast works element by element, so it may be done before or after the pieces are put together; and
because widening a float and narrowing it again gives the same float. A group of which one weight is used as it is
(a normalisation under autocast) is left alone, and so is a cast that the model returns: it would become a view of the
gathered buffer, or of the replica.

Runs between ``gather`` and ``group``.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from zerofx.passes import edit
from zerofx.passes.context import Context, Tag

_TRAVEL = (torch.bfloat16, torch.float16, torch.float32)
"""What every backend can move."""


def narrow(gm: GraphModule, ctx: Context) -> int:
    """Cast shards instead of weights; returns how many casts of weights went away."""
    edits = 0
    for wide in edit.tagged(gm.graph, "widen"):
        (weight,) = wide.all_input_nodes
        for user in list(wide.users):
            if edit.is_cast(user, weight.meta["val"].dtype) and not edit.escapes(user):
                user.replace_all_uses_with(weight)
                gm.graph.erase_node(user)
                edits += 1
        if not wide.users:
            gm.graph.erase_node(wide)
    by_shard: dict[Node, list[Node]] = {}
    for node in edit.tagged(gm.graph, "unshard"):
        by_shard.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
    for shard, weights in by_shard.items():
        if shard.meta["zerofx"].kind == "shard":
            edits += _narrow_group(gm, shard, weights)
    return edit.finish(gm, edits)


def _narrow_group(gm: GraphModule, shard: Node, weights: list[Node]) -> int:
    casts = [user for weight in weights for user in weight.users]
    dtypes = {user.meta["val"].dtype for user in casts if edit.is_cast(user)}
    if len(dtypes) != 1 or not all(edit.is_cast(user) for user in casts):
        return 0
    if any(edit.escapes(user) for user in casts):
        return 0  # the cast outlives the graph; the gathered buffer must not
    (dtype,) = dtypes
    if dtype not in _TRAVEL or dtype.itemsize >= shard.meta["val"].dtype.itemsize:
        return 0
    tag = Tag("narrow", shard.meta["zerofx"].group)
    with gm.graph.inserting_before(weights[0]):
        low = edit.insert(gm.graph, edit.CAST, (shard, dtype), tag=tag, near=weights[0])
    for weight in weights:
        weight.args = (low, *weight.args[1:])
        weight.meta["val"] = weight.meta["val"].to(dtype)
    for user in casts:
        user.replace_all_uses_with(user.all_input_nodes[0])
        gm.graph.erase_node(user)
    return len(casts)
