"""Groups of ranks that are not all ranks (`zerofx.features.meshes`): what `verify` may meet.

::

    gathered group ─ own_part ─ clone       this rank's secondary shard: a `Flat` among near ranks, saved for backward
    part of a shard ─ gather ─ wait         the first of two hops: the shard that a row gathers from
    sum over a row ─ all-reduce ─ wait      over the replicas; or, by reduce-scatter, this rank's part of that sum
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from zerofx.features.meshes.facts import mesh_of
from zerofx.model.layout import GroupLayout
from zerofx.passes.proof.facts import ALL_REDUCES, Flat, Pack, Started, divided
from zerofx.passes.proof.known import Known, is_reshape
from zerofx.passes.proof.meaning import Op
from zerofx.passes.proof.rules import Rules
from zerofx.passes.travel import SCATTERS

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_OWN_PART = torch.ops.zerofx.own_part.default


def _held(known: Known, layout: GroupLayout) -> GroupLayout | None:
    """With two hops a rank holds a part of what its column has together."""
    ctx = known.ctx
    return replace(layout, world_size=layout.world_size * ctx.replicas) if mesh_of(ctx).two_hops else None


def _shard(reader: Known, node: Node, flat: Flat) -> None:
    """Where replicas share the optimizer's work, shards are brought up to date before forward."""
    if mesh_of(reader.ctx).refreshes_shards:
        reader.refreshed(node, flat)


def _is_secondary(known: Known, flat: Flat) -> bool:
    """Whether it is a part of a group among near ranks."""
    mesh = mesh_of(known.ctx)
    return bool(mesh.secondary_group) and not flat.whole and flat.layout.world_size == mesh.secondary_ranks


def _read_flat(known: Known, op: Op, flat: Flat) -> bool:
    """This rank's secondary shard of a gathered group, and its copy."""
    if op.target is _aten.clone.default and len(op.args) == 1 and _is_secondary(known, flat):
        known.facts[op.node] = flat
        return True
    if not (flat.whole and op.target is _OWN_PART and mesh_of(known.ctx).secondary_group):
        return False
    full, ranks, process_group = op.args
    found, wanted = (
        (ranks, process_group),
        (mesh_of(known.ctx).secondary_ranks, mesh_of(known.ctx).secondary_group),
    )
    if found != wanted:
        known.fail("group", op.node, "it is a part among {} ranks of {!r}".format(*found), "{} of {!r}".format(*wanted))
    if flat.part != flat.layout.shard_numel:
        known.fail("slice", op.node, "it is a part of what is not all of a group", "of a whole group")
    known.facts[op.node] = divided(flat, ranks)
    known.memory[op.node] = known.memory[full]
    return True


def _gather(known: Known, op: Op, flat: Flat) -> tuple[Flat, GroupLayout, str] | None:
    """The gather of a secondary shard; or of a part, which is the first of two hops."""
    ctx, over = known.ctx, flat.layout
    if _is_secondary(known, flat):
        return replace(flat, whole=True), over, mesh_of(ctx).secondary_group
    if not known.is_part(flat):
        return None
    row = replace(over, world_size=over.world_size // ctx.replicas)
    if flat.part != over.shard_numel:
        known.fail("slice", op.node, "it brings pieces of a part from other rows", "all of the part")
    brings = Flat(row, (range(row.shard_numel),), flat.dtypes)
    return brings, replace(over, world_size=ctx.replicas), ctx.replica_group


def _read_pack(known: Known, op: Op, pack: Pack) -> bool:
    """A sum over a row that goes on to the replicas."""
    again = op.target in SCATTERS or op.target is _OWN_PART
    if op.target in ALL_REDUCES or (again and pack.state.startswith("shard") and known.ctx.replicas > 1):
        _sum_over_replicas(known, op, pack)
        return True
    return False


def _start_reduction(known: Known, op: Op, pack: Pack) -> bool:
    """In a row of one rank the pack is what goes to the replicas: one rank's shard is the whole."""
    if known.ctx.is_of_replicas(op.args) and known.layout_of(pack, op.node).world_size == 1:
        _sum_over_replicas(known, op, replace(pack, state="shard"))
        return True
    return False


def _sum_over_replicas(known: Known, op: Op, pack: Pack) -> None:
    """A reduced gradient is summed over the replicas: once, in their process group, as it came."""
    node, ctx, whole = op.node, known.ctx, op.target in ALL_REDUCES
    operation = op.args[1] if isinstance(op.args[1], str) else "sum"
    ranks = ctx.replicas if whole else op.args[-2]
    found, wanted = (operation, ranks, op.args[-1]), ("sum", ctx.replicas, ctx.replica_group or "(none)")
    if found != wanted or ctx.replicas == 1:
        words = "a {} over {} ranks of {!r}"
        known.fail("group", node, f"it is {words.format(*found)}", words.format(*wanted))
    if whole == mesh_of(ctx).divides_between:
        known.fail("reduction", node, "it is not the part of the sum that this rank updates", "that part, or all")
    if pack.replicas != 1 or pack.narrowed or not pack.state.startswith("shard"):
        what = (
            "was narrowed" if pack.narrowed else "was summed over the replicas" if pack.replicas != 1 else "is no sum"
        )
        known.fail("reduction", node, f"what it sums over the replicas {what}", "a group's sum over a row, once")
    if type(op.value.numel()) is not int:
        known.fail("order", node, f"it moves {op.value.numel()} elements, which depends on data", "a number")
    in_place = op.target is _c10d.all_reduce_.default
    if in_place and (len(op.args[0].users) > 1 or is_reshape(op.args[0])):
        known.fail("write", node, f"it sums {op.args[0].name!r} in place, which others read", "memory of its own")
    if whole or op.target is _c10d.reduce_scatter_tensor.default:
        brings = replace(pack, replicas=ctx.replicas, divided=not whole)
    else:
        brings = Pack((), op.args[0].meta["val"].numel(), pack.dtype, "parts", of=pack)
    if op.target is _OWN_PART:
        known.facts[node] = replace(brings, state=f"own of {ranks}")
    else:
        known.facts[node] = Started(node, brings)
        known.waits[node] = []


def _check_averaged(known: Known, value: Node, pack: Pack) -> None:
    """A gradient is summed over all replicas, and is what this rank updates."""
    ctx = known.ctx
    if pack.replicas != ctx.replicas:
        known.fail("reduction", value, f"it is summed over {pack.replicas} replicas", f"over all {ctx.replicas}")
    if pack.divided != mesh_of(ctx).divides_between:
        expected = (
            "the part of the shard that this rank updates" if mesh_of(ctx).divides_between else "all of its shard"
        )
        known.fail("reduction", value, "it is another part of the gradient", expected)


RULES = Rules(
    held=_held,
    shard=_shard,
    flats=_read_flat,
    gathers=_gather,
    packs=_read_pack,
    reductions=_start_reduction,
    averaged=_check_averaged,
)
