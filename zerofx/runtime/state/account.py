"""What a rank holds at rest: bytes of each class of state, before a step and after it. The one place that says so.

=========  ==================  =======================  =======================  ====================================
           stage 0             stages 1, 2              stage 3                  where
=========  ==================  =======================  =======================  ====================================
replicas                       w P                      (one copy: w P/M)        `Weights.buffer`, where it is no shard
                                                        (row copy: m P/S)
shards     m N                 m P/M, where it is no    m P/M                    `Weights.shard`
                               part of the replica
gradients  m N                 m P/M                    m P/M                    ``.grad``
kept       g N                 g N                      g N                      under `zerofx.no_sync`, instead
cut off                        4 (M - 1)/M P            4 (M - 1)/M P            `Gradients.rest`, with error feedback
masters    4 N                 4 P/M                    4 P/M                    `zerofx.AdamW`, of 16-bit parameters
moments    2 m N               2 m P/M                  2 m P/M                  Adam; 8 N of 16-bit parameters
=========  ==================  =======================  =======================  ====================================

``N`` elements of parameters, ``P`` with the padding of the flat buffer; bytes of an element: ``m`` of a parameter,
``w`` as the model computes with it, ``g`` of a gradient as it is reduced. ``M`` ranks, or as many as share the class.

It counts layouts, and letters alike: `zerofx.plan` gives it sympy's. `zerofx.predict`, ``memory=`` and reports read it.
`zerofx.memory_summary` counts tensors, under these names.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

from zerofx.model.layout import GroupLayout
from zerofx.model.offload import OnDisk
from zerofx.model.wire import Wire
from zerofx.passes.context import Context

Number = Any
"""Of bytes or elements: an int, or an expression of sympy's."""


Given = Literal["parameters", "replica", "common replica", "shard", "row copy"]
"""What graphs are given of a group: `zerofx.runtime.state.weights` has the first, the second and the fourth."""

GIVEN: tuple[Given, ...] = ("parameters", "replica", "replica", "shard")
"""By stage."""

APART: tuple[Given, ...] = ("replica", "common replica", "row copy")
"""Beside these there may be a shard."""


class Shared(Protocol):
    """`zerofx.runtime.ranks.sharing.Sharing`, or `AtRest`."""

    @property
    def divides_between(self) -> bool: ...
    @property
    def two_hops(self) -> bool: ...
    @property
    def crosses(self) -> bool: ...


@dataclass(frozen=True)
class AtRest:
    """What these bytes follow from, of the module whose graphs have a context: a fact of it (`Context.facts`)."""

    wire: Wire | None = None
    divides_between: bool = False
    two_hops: bool = False
    crosses: bool = False
    on_disk: OnDisk | None = None
    on_host: frozenset[str] = frozenset()
    kinds_on_host: frozenset[str] = frozenset({"moment"})


@dataclass(frozen=True)
class Account:
    """Bytes by class: the table above. ``masters``: those that the optimizer keeps."""

    replicas: Number = 0
    shards: Number = 0
    gradients: Number = 0
    cut_off: Number = 0
    masters: Number = 0
    moments: Number = 0

    @property
    def weights(self) -> Number:
        """What parameters take, and what stands beside them; without gradients and the optimizer."""
        return self.replicas + self.shards + self.cut_off

    def __add__(self, other: Account) -> Account:
        return Account(*(getattr(self, x.name) + getattr(other, x.name) for x in fields(self)))

    def elsewhere(self, kinds: Collection[str]) -> Account:
        """What of it is in a file, or in the host's memory, where ``kinds`` are (`zerofx.runtime.state.home.Kind`)."""
        moves = {"shards": "weights", "gradients": "gradient", "masters": "moment", "moments": "moment"}
        return Account(**{name: getattr(self, name) for name, kind in moves.items() if kind in kinds})

    def without(self, other: Account) -> Account:
        """What is left when ``other`` is elsewhere."""
        return Account(*(getattr(self, x.name) - getattr(other, x.name) for x in fields(self)))


@dataclass(frozen=True)
class Terms:
    """What bytes follow from, beside numbers of elements.

    Attributes:
        given: what graphs are given of a group.
        master, weight, gradient: bytes of an element of a parameter, as it is computed with, and as it is reduced.
        apart: whether the shard is a tensor beside what they are given.
        holders: how many ranks have one replica in common.
        rests: of how many ranks' elements it keeps what codes cut off.
        optimizer: bytes of an element that it keeps as a master, and as moments.
        updaters: among how many ranks what a rank gathers from is divided for the optimizer.
        two_hops: whether it has no more than that of it.
    """

    given: Given
    master: Number
    weight: Number
    gradient: Number
    apart: bool = False
    holders: int = 1
    rests: int = 0
    optimizer: tuple[Number, Number] = (0, 0)
    updaters: int = 1
    two_hops: bool = False

    @staticmethod
    def of(
        stage: int,
        layout: GroupLayout,
        wire: Wire | None,
        sharing: Shared,
        ranks: int,
        replicas: int,
        one_copy: bool = False,
        optimizer: tuple[Number, Number] = (0, 0),
    ) -> Terms:
        """Of a group in so many ``replicas`` of a module, each gathered by so many ``ranks``; by its dtypes alone."""
        dtype, weight = layout.dtype, layout.weight_dtype
        gradient = layout.gradient_dtype or dtype
        copied = stage == 3 and sharing.divides_between and not sharing.two_hops
        given: Given = "row copy" if copied else "common replica" if one_copy else GIVEN[stage]
        wire = None if wire is None else wire.in_stage(stage)
        inside = wire is not None and ranks > 1 and (sharing.crosses or wire.between == "all")
        coded, rests = False, 0
        if wire is not None and (copied or inside):
            code = wire.weight_code
            coded = code is not None and code.shortens(dtype if copied else weight)
        if wire is not None and wire.error_feedback and (inside or replicas > 1):
            code = wire.gradient_code
            rests = rest_rows(ranks, replicas, sharing.divides_between) if code and code.shortens(gradient) else 0
        apart = given in APART and (coded or (weight != dtype and not copied))
        sizes, holders = (dtype.itemsize, weight.itemsize, gradient.itemsize), ranks if one_copy else 1
        updaters = replicas if sharing.divides_between else 1
        return Terms(given, *sizes, apart, holders, rests, optimizer, updaters, sharing.two_hops)

    @staticmethod
    def of_graphs(context: Context, layout: GroupLayout, optimizer: tuple[Number, Number] = (0, 0)) -> Terms:
        """Of a group of the module whose graphs have ``context``."""
        facts = context.facts(AtRest)
        how = facts.wire, facts, layout.world_size, context.replicas, context.in_common
        return Terms.of(context.stage, layout, *how, optimizer)


@dataclass(frozen=True)
class Elements:
    """Of a group, or of all: ``numel`` of the parameters, ``whole`` of the flat buffer; and of that on one rank:

    ``part`` of what is gathered from it, ``owned`` of what it updates, ``updated`` without the padding at its ends.
    """

    numel: Number
    whole: Number
    part: Number
    owned: Number
    updated: Number

    @staticmethod
    def of(layout: GroupLayout, terms: Terms, rank: int | None = None) -> Elements:
        """Of a group as graphs see it; ``rank``: its place in it, where padding is not to count."""
        mine = as_updated(layout, terms)
        owned, numel = mine.shard_numel, sum(slot.numel for slot in layout.slots)
        part = owned if terms.two_hops else layout.shard_numel
        return Elements(numel, layout.numel, part, owned, owned if rank is None else updated(mine, rank))


def at_rest(n: Elements, how: Terms, *, trained: bool = True, accumulating: bool = False) -> Account:
    """The table. ``accumulating``: between two backwards under `zerofx.no_sync`."""
    whole = how.given == "parameters"
    owned, moved = (n.numel, n.numel) if whole else (n.owned, n.updated)
    given = {
        "parameters": how.master * n.numel,
        "replica": how.weight * n.whole,
        "common replica": how.weight * n.whole // how.holders,
        "shard": how.master * n.part,
        "row copy": how.master * n.part,
    }[how.given]
    replicas, shards = (given, how.master * owned if how.apart else 0) if how.given in APART else (0, given)
    if not trained:
        return Account(replicas, shards)
    gradients = how.gradient * n.numel if accumulating else how.master * owned
    master, moment = how.optimizer
    return Account(replicas, shards, gradients, 4 * how.rests * owned, master * moved, moment * moved)


def of_group(layout: GroupLayout, context: Context, terms: Terms | None = None) -> Account:
    """In memory of the device, of a group of the module whose graphs have ``context``."""
    terms = Terms.of_graphs(context, layout) if terms is None else terms
    held = at_rest(Elements.of(layout, terms), terms, trained=layout.requires_grad)
    facts = context.facts(AtRest)
    there = facts.on_disk
    kinds = there.kinds if there is not None and layout.name in there.groups else frozenset[str]()
    return held.without(held.elsewhere(facts.kinds_on_host if layout.name in facts.on_host else kinds))


def as_updated(layout: GroupLayout, terms: Terms) -> GroupLayout:
    """The layout of a group that graphs see so, divided over all ranks that update it."""
    return replace(layout, world_size=layout.world_size * terms.updaters)


def rest_rows(ranks: int, replicas: int, divides_between: bool) -> int:
    """Of how many ranks' elements a rank keeps what codes cut off: of other ranks', or of what goes to all replicas."""
    if replicas == 1:
        return ranks - 1
    return replicas - 1 if divides_between else 1


def adamw(itemsize: int) -> tuple[int, ...]:
    """Bytes of an element in each buffer of `zerofx.AdamW`: a float32 master of a 16-bit parameter, and two moments."""
    return (4, 4, 4) if itemsize == 2 else (itemsize, itemsize)


def state_of(itemsize: int) -> tuple[int, int]:
    """The same, as `Terms` take it: masters, and moments."""
    *masters, one, other = adamw(itemsize)
    return sum(masters), one + other


def touched(itemsize: int) -> int:
    """Bytes of memory that it reads and writes for an element: the gradient once, the others twice."""
    return 7 * adamw(itemsize)[-1]


def updated(layout: GroupLayout, rank: int) -> int:
    """Elements of a shard from its first parameter's to its last one's: what moments have. The rest is padding."""
    pieces = [piece for slot in layout.slots if (piece := layout.piece(slot, rank)).length]
    ends = [piece.in_shard + piece.length for piece in pieces]
    return max(ends) - min(piece.in_shard for piece in pieces) if pieces else 0
