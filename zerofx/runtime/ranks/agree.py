"""Ranks in step: what each rank compiled and ran, compared through the store, never waiting for anyone.

A `Schedule` is the list of collectives of one compiled graph. It follows from the graph alone, so ranks that run the
same code have the same; ranks that do not would wait for each other, or worse, add up what does not belong together.
Compared are

* at compile time: schedules of graphs with the same operators for the same parameters. A rank that compiles alone, for
  an input of another shape, must get what the others have published;
* at run time: which schedules ran, in order (`zerofx.runtime.ranks.watch`).

::

    zerofx/<group>/schedule/<digest>            the schedule, for whoever meets its digest
    zerofx/<group>/compiled/<what>/<rank>       the digest that the rank got for these operators and parameters

Nothing is asked for that is not there: a key is read after ``store.check`` has said that it exists.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from zerofx.passes.context import Context
from zerofx.passes.proof.facts import ALL_REDUCES, REFRESH
from zerofx.passes.proof.meaning import Op
from zerofx.passes.travel import EXCHANGES, GATHERS, SCATTERS, communicates

_KINDS = (
    ("all-gather", GATHERS),
    ("reduce-scatter", SCATTERS),
    ("reduce-scatter", EXCHANGES),
    ("all-reduce", ALL_REDUCES),
)
OWN = "own"
"""A collective of a user's pass is of the kind ``own send``: told by what is sent, for what arrives may differ."""
OWN_OF_BACKEND = ("gather", "reduction", "all-reduce")
"""Kinds of collectives outside of graphs that are the backend's own, not pairwise exchanges."""
ON_DEMAND = "on demand"
"""The phase of what eager code gathers."""
CALL = "call"
"""The phase of a call that every rank must make (`zerofx.save`). Its one collective has the call's name for a kind."""


class OutOfStepError(RuntimeError):
    """Ranks run, or would run, different collectives; or one does not come to the collective that others wait in."""


@dataclass(frozen=True)
class Collective:
    """One collective of a schedule: ``nbytes`` of its result, or of its input where that is more."""

    kind: str
    group: str
    nbytes: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.group!r} ({self.nbytes:,} bytes of {self.dtype})"


@dataclass(frozen=True)
class Schedule:
    """The collectives of one graph in the order they start. ``phase``: forward, backward, ..., or where else."""

    phase: str
    collectives: tuple[Collective, ...]

    @property
    def digest(self) -> str:
        """Equal where the collectives are.

        An inference that gathers what a forward does is in step with it. So is a backward that merges what was kept
        with one of a rank that has kept nothing.
        """
        phase = self.phase.replace("inference", "forward").replace(" (merge)", "").replace("(merge, ", "(")
        return hashlib.sha256(Schedule(phase, self.collectives).to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps([self.phase, [list(asdict(c).values()) for c in self.collectives]])

    @staticmethod
    def of_call(what: str) -> Schedule:
        """That of a call of the name ``what``."""
        return Schedule(CALL, (Collective(what, "", 0, ""),))

    @staticmethod
    def from_json(text: bytes | str) -> Schedule:
        phase, collectives = json.loads(text)
        return Schedule(phase, tuple(Collective(*c) for c in collectives))

    @staticmethod
    def of(gm: GraphModule, ctx: Context, *, second: bool = False, parts: bool = False) -> Schedule:
        """The schedule of a graph that all passes have been through.

        ``second``: of what runs in ``ctx.second_group``. ``parts``: of what tensor-parallel ranks saved in parts, which
        runs in ``the group of their own``. Else of all the rest.
        """
        found = []
        for node in gm.graph.nodes:
            op = Op.of(node) if node.op == "call_function" else None
            kind = next((kind for kind, targets in _KINDS if op and op.target in targets), None)
            if op is None or second != (kind is not None and op.args[-1:] == (ctx.second_group,)):
                continue
            tag = node.meta.get("zerofx")
            if parts != (tag is not None and tag.kind == "gather_saved"):
                continue
            if tag is not None and tag.kind in ctx.own_kinds and communicates(op.target):
                kind = kind if op.target.namespace == "zerofx" else f"{OWN} {op.target._opname}"
            if op.target is REFRESH:
                layout = next(r.layout for r in ctx.found.reductions if r.layout.name == op.args[1])
                dtype = layout.weight_dtype
                found.append(Collective("all-gather", layout.name, layout.numel * dtype.itemsize, _name(dtype)))
            if kind is None:
                continue
            source = op.inputs[0].meta["val"]
            value = source if kind.startswith(OWN) else max(op.value, source, key=lambda x: x.numel())
            nbytes = int(value.numel()) * value.dtype.itemsize
            group = tag.group or tag.kind if tag else "the model's own"
            found.append(Collective(kind, group, nbytes, _name(value.dtype)))
        return Schedule(ctx.name, tuple(found))

    def heard(self, i: int) -> int:
        """The first collective from ``i`` on of which a watch hears: not one of a user's pass."""
        while i < len(self.collectives) and self.collectives[i].kind.startswith(OWN):
            i += 1
        return i

    def where(self, i: int) -> str:
        """The collective ``i``, in words."""
        if self.phase == CALL:
            return self.collectives[0].kind
        if i >= len(self.collectives):
            return f"nothing more in {self.phase}"
        return f"{self.phase}: {self.collectives[i]}"

    def short(self, i: int) -> str:
        """The collective ``i`` by kind and group alone."""
        if i >= len(self.collectives):
            return self.where(i)
        return f"{self.collectives[i].kind} {self.collectives[i].group}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def difference(mine: Schedule, theirs: Schedule, rank: int, other: int) -> str:
    """The first collective in which two schedules differ, as a sentence."""
    pairs = zip_longest(mine.collectives, theirs.collectives)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    return (
        f"the first collective that differs is number {first + 1}: rank {rank} has {mine.where(first)}; "
        f"rank {other} has {theirs.where(first)}"
    )


def fingerprint(gm: GraphModule, ctx: Context, *, by_shapes: bool) -> str:
    """What a graph that no pass has touched is: the operators, and the parameters they serve.

    ``by_shapes``: sizes of messages follow from those of inputs, so that a batch of another shape is another graph.
    """
    names = sorted({(ref.layout.name, ref.slot.name) for ref in [*ctx.parameters.values(), *ctx.gradients.values()]})
    operators = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    inputs = gm.graph.find_nodes(op="placeholder") if by_shapes else []
    shapes = [str(node.meta["val"].shape) for node in inputs if isinstance(node.meta["val"], torch.Tensor)]
    return _digest((ctx.name, names, operators, shapes))


def identity(fingerprint: str, family: int) -> str:
    """A graph of the model number ``family``."""
    return _digest((family, fingerprint))


def _digest(what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def publish(store: dist.Store, schedule: Schedule, what: str | None, rank: int, world_size: int) -> None:
    """Say what this rank compiled, and compare it with what others have said. Waits for nobody.

    ``what``: its `identity`; None: others may have another one.

    Raises:
        OutOfStepError: another rank has compiled the same operators, for the same parameters, to another schedule.
    """
    digest = schedule.digest
    store.set(f"schedule/{digest}", schedule.to_json())
    if what is None:
        return
    store.set(f"compiled/{what}/{rank}", digest)
    for other in range(world_size):
        key = f"compiled/{what}/{other}"
        if other == rank or not store.check([key]):
            continue
        theirs = store.get(key).decode()
        if theirs != digest:
            told = Schedule.from_json(store.get(f"schedule/{theirs}"))
            raise OutOfStepError(
                f"ranks {rank} and {other} compiled the same {schedule.phase} differently: "
                f"{difference(schedule, told, rank, other)}. Options (memory_budget, stage, precision) and versions "
                "must be the same on all ranks."
            )


def publish_choice(store: dist.Store, what: str, choice: str, rank: int, world_size: int) -> None:
    """Say how this rank divided ``memory`` for the graph ``what``, and compare with what others have said.

    Waits for nobody, as `publish`.

    Raises:
        OutOfStepError: another rank has divided it otherwise.
    """
    digest = hashlib.sha256(choice.encode()).hexdigest()[:16]
    store.set(f"divided/{what}/{rank}", digest)
    for other in range(world_size):
        key = f"divided/{what}/{other}"
        if other != rank and store.check([key]) and store.get(key).decode() != digest:
            raise OutOfStepError(
                f"ranks {rank} and {other} divided memory= differently for one graph: their kernels take other "
                "workspaces. Versions, threads and processors must be the same on all ranks. Otherwise give "
                "memory_budget= and activation_budget= instead."
            )


def own_part(default: dist.Store, prefix: str, world_size: int) -> dist.Store:
    """The part of ``default`` that belongs to one process group, over a connection of its own.

    torchrun's store outlives ``destroy_process_group``, and a later process group may have the same name. So ranks are
    counted as they come: the first ``world_size`` of them share part 0, the next part 1. A count in each process would
    not do: processes differ in how many process groups they have seen.
    """
    store = default.clone()  # type: ignore[attr-defined]  # the stubs lack it
    part = (store.add(f"{prefix}/came", 1) - 1) // world_size
    return dist.PrefixStore(f"{prefix}/{part}", store)
