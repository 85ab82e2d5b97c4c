"""What tensor-parallel ranks save in parts, and how it becomes whole again.

::

    forward     h ─ (permute) ─ part                              a Cut, "part": backward is brought its number
    backward    h: the part ─ gather ─ wait ─ as_strided          ... "whole": each view that forward would have saved

The rule "parts" of `zerofx.passes.verify`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from zerofx.features.partition_activations.facts import partition_of
from zerofx.passes import edit
from zerofx.passes.proof.facts import REFRESH, Started
from zerofx.passes.proof.known import Known
from zerofx.passes.proof.meaning import Number, Op
from zerofx.passes.proof.rules import Rules
from zerofx.passes.travel import GATHERS, communicates

PART = torch.ops.zerofx.part.default

Seen = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and offset of a view."""


@dataclass
class _Collects:
    """The starts of gathers of saved parts, and the numbers of these parts."""

    starts: dict[Node, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """Of the memory that the value ``of`` has: this rank's part, or, once gathered, all of it and zeros after it."""

    of: Number
    numel: int
    dtype: torch.dtype
    whole: bool = False

    @property
    def number(self) -> Number:
        """What backward is brought."""
        return hash(("part", self.of))


def _read_part(known: Known, op: Op, fact: Any) -> None:
    """This rank's part of a value, in the order of its memory."""
    ctx, (flat, ranks, process_group) = known.ctx, op.args
    found, wanted = (ranks, process_group), (partition_of(ctx).ranks, partition_of(ctx).group)
    if found != wanted:
        known.fail("group", op.node, "it is a part among {} ranks of {!r}".format(*found), "{} of {!r}".format(*wanted))
    value, source, turned = flat.meta["val"], flat, known.ops.get(flat)
    if turned is not None and turned.target is torch.ops.aten.permute.default and not _is_theirs(known, flat):
        (source,) = turned.inputs
    dense = value.is_contiguous() and not value.storage_offset()
    if not dense or value.untyped_storage().nbytes() != value.numel() * value.dtype.itemsize:
        known.fail("parts", op.node, f"{flat.name!r} is not all of its memory, in its order", "each element once")
    known.facts[op.node] = Cut(known.numbers[source], value.numel(), value.dtype)


def _is_theirs(known: Known, node: Node) -> bool:
    return known.before is not None and node.name in known.before.nodes


def _check_saved(known: Known, i: int, name: str, value: Node, was: Number | None) -> bool:
    """The saved output ``i`` is a part of what all ranks have alike; backward knows it by ``name``."""
    ctx, cut = known.ctx, known.facts.get(value)
    if not isinstance(cut, Cut):
        return False
    known.meanings.given[name] = cut.number
    if known.before is None or ctx.before is None:
        return True
    view = edit.output_values(ctx.before.graph)[i]
    maker = _maker(view)
    if known.before.nodes[maker.name] != cut.of:
        known.fail("parts", value, f"it is no part of the memory of {view.name!r}, which was saved", "a part of that")
    if maker.name not in partition_of(ctx).alike:
        known.fail("parts", value, f"ranks may have other values of {maker.name!r}", "what all ranks have alike")
    seen = view.meta["val"]
    _, views = known.meanings.parts.setdefault(cut.number, (cut, {}))
    key = tuple(seen.shape), tuple(seen.stride()), int(seen.storage_offset())
    known.renumbered[name] = views.setdefault(key, was)  # one memory, seen one way, is one value
    return True


def _maker(node: Node) -> Node:
    """What computed the memory that ``node`` looks at."""
    memory, found = node.meta["val"].untyped_storage()._cdata, node
    while True:
        values = ((x, x.meta.get("val")) for x in found.all_input_nodes)
        tensors = (x for x, value in values if isinstance(value, torch.Tensor))
        source = next((x for x in tensors if x.meta["val"].untyped_storage()._cdata == memory), None)
        if source is None:
            return found
        found = source


def _read_inputs(known: Known, inputs: list[Node]) -> None:
    """Of the inputs of backward, those that are parts."""
    for node in inputs:
        cut, _ = known.meanings.parts.get(known.numbers.get(node, 0), (None, None))
        if cut is None:
            continue
        numel, value = -(-cut.numel // partition_of(known.ctx).ranks), node.meta["val"]
        if tuple(value.shape) != (numel,) or value.dtype != cut.dtype:
            known.fail("inputs", node, f"it has {value.numel()} elements of {value.dtype}", f"{numel} of {cut.dtype}")
        known.facts[node] = cut


def _read_cut(known: Known, op: Op, cut: Cut) -> None:
    """What reads a part, or what was gathered of all."""
    if cut.whole:
        _, size, stride, *rest = op.args if op.target is torch.ops.aten.as_strided.default else (None, (), ())
        seen: Any = tuple(size), tuple(stride), rest[0] if rest else 0
        number = known.meanings.parts[cut.number][1].get(seen)
        if number is None or op.target is not torch.ops.aten.as_strided.default:
            known.fail("parts", op.node, "it reads all parts, end to end", "a view that forward would have saved")
        known.numbers[op.node] = number
        return
    if op.target not in GATHERS:
        known.fail("parts", op.node, f"it reads {op.inputs[0].name!r}, which is a part", "the gather of all")
    _, *found = op.args
    wanted = [partition_of(known.ctx).ranks, partition_of(known.ctx).group]
    if found != wanted:
        known.fail("group", op.node, "it runs over {} ranks of {!r}".format(*found), "{} of {!r}".format(*wanted))
    collects = known.record(_Collects).starts
    if cut.number in collects.values():
        known.fail("parts", op.node, "the same was gathered before", "one gather")
    collects[op.node] = cut.number
    known.facts[op.node] = Started(op.node, replace(cut, whole=True))
    known.waits[op.node] = []
    known.apart.add(op.node)


def _check(known: Known) -> None:
    """What can be said once all is read: the order of gathers, and that the executor keeps to it."""
    order, starts = known.order, list(known.record(_Collects).starts)
    for first, second in pairwise(starts):
        if order[known.waits[second][0]] < order[known.waits[first][0]]:
            found = f"it starts after {first.name!r}, which is waited for later"
            known.fail("parts", second, found, "first started, first waited for")
    for first, third in zip(starts, starts[2:]):
        if order[third] < order[known.waits[first][0]]:
            known.fail("parts", third, "two more are under way when it starts", "one at most")
    for start in starts:
        (wait,) = known.waits[start]
        if not wait.users:
            known.fail("parts", start, "nothing reads what it brings", "no gather")
    if known.ctx.executor != "inductor" or not starts:
        return
    previous = None
    for node, op in known.ops.items():
        if communicates(op.target) or op.target is REFRESH:
            if previous is not None and previous not in op.after:
                known.fail("parts", node, f"nothing keeps it after {previous.name!r}", "a dependence on it")
            previous = node


RULES = Rules(
    operators={PART: _read_part}, facts={Cut: _read_cut}, inputs=_read_inputs, saved=_check_saved, finished=_check
)
