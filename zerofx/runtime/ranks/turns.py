"""Turns: ranks whose batches run different graphs, or fewer of them, take part in each other's (``uneven=True``).

Before it runs anything with collectives each rank offers it, and all ranks see all offers, in a message of 24 bytes::

    rank 0 offers    forward 1 ──▶ runs it       backward 1 ──▶ shadows it    backward 1 ──▶ runs it
    rank 1 offers    forward 2 ──▶ shadows it    forward 2  ──▶ runs it       backward 2 ──▶ shadows it, ...

Where all offer the same they run it, and that was all. Else one offer is chosen, the same on every rank. Those that
made it run it. The others *shadow* it: they take part in its collectives, with shards for its gathers and zeros for its
reductions, and offer again. So nobody needs to know what comes next on another rank. What a shadow does is data. Who
offers a thing for the first time puts its shadow into the store.

============  ========================================================================================================
what is       when it is chosen
offered
============  ========================================================================================================
``GRAPH``     before all else; of different ones that of the first rank
``END``       of a forward, or of a backward in `zerofx.no_sync`, where nobody offers a graph. So whatever a rank shares
              with others after the module finds them there
``SYNC``      the end of a backward outside of it, where all are at the end of such a one, or beyond. So gradients are
              complete after it. What ranks have kept until then is reduced
``COMMON``    what all ranks do alike (a step, a norm, a checkpoint), where all offer the same
============  ========================================================================================================

Shadowing is a word of ``torch.distributed.algorithms.Join``, where a rank shadows whole iterations; here, graphs.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from zerofx._torch import backward_number, end_of_backward
from zerofx.passes import pairwise
from zerofx.runtime.ranks.agree import OutOfStepError

COMMON, SYNC, END, GRAPH = range(4)
"""What can be offered, by precedence."""
_KEPT, _READS, _REDUCES = 1, 2, 4
"""Marks of an offer: there are kept gradients; gradients have been read; it reduces some."""


class Shadow:
    """What ranks do that do not run a thing themselves.

    Attributes:
        kind: who knows what to do, of `SHADOWS`.
        family: the number of the module.
        what: all that is to be known of it, of types that can be pickled.
        reduces: whether gradients come of it.
        number: the same for what ranks may run together: ``same`` stands for its collectives, or else ``what``.
    """

    def __init__(self, kind: str, family: int, what: Any, *, reduces: bool, same: Any = None) -> None:
        self.kind: str = kind
        self.family: int = family
        self.what: Any = what
        self.reduces: bool = reduces
        self.number: int = _number_of(repr((kind, family, what if same is None else same)))


SHADOWS: dict[str, Callable[[Any, Any], None]] = {}
"""By kind, what takes part: it is called with the module's `zerofx.runtime.state.group.Family` and `Shadow.what`."""


class Offer(NamedTuple):
    """What a rank would run next."""

    kind: int
    number: int
    marks: int


class Turns:
    """The turns of the ranks of one process group.

    Attributes:
        families: the modules whose graphs run by turns, by number.
    """

    def __init__(
        self, name: str, rank: int, store: dist.Store, offering: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        """``name``: of a gloo group of these ranks. ``offering``: a context in which this one waits for offers."""
        self.families: dict[int, weakref.ref[Any]] = {}
        self._name, self._rank, self._store, self._offering = name, rank, store, offering
        self._known: dict[int, Shadow] = {}
        self._busy = False
        self._ends: set[int] = set()

    # ---- what a rank is about to do ---------------------------------------------------------------------------------

    def graph(self, shadow: Shadow) -> contextlib.AbstractContextManager[None]:
        """This rank runs, inside, what ``shadow`` is of. Before that it shadows what has precedence."""
        if shadow.number not in self._known:
            self._store.set(f"shadow/{shadow.number}", pickle.dumps(shadow))  # type: ignore[arg-type]
            self._known[shadow.number] = shadow
        return self._turn(Offer(GRAPH, shadow.number, _REDUCES * shadow.reduces), "")

    def common(self, what: str, *, reads: bool = False) -> contextlib.AbstractContextManager[None]:
        """All ranks do alike, inside, what is called ``what``. ``reads``: it needs gradients that are complete.

        Raises:
            OutOfStepError: they are not, or another rank does something else that only all can do.
        """
        return self._turn(Offer(COMMON, _number_of(what), _READS * reads), what)

    def end_forward(self) -> None:
        """A forward ends here."""
        with self._turn(Offer(END, 0, 0), ""):
            pass

    def end_backward(self, family: Any) -> None:
        """Inside of a backward, ahead of what this rank runs of it: it has an end."""
        number = backward_number()
        if number == -1 or number in self._ends or self._busy:
            return
        self._ends.add(number)

        def end() -> None:
            self._ends.discard(number)
            with self._turn(Offer(SYNC, family.number, 0) if family.sync else Offer(END, 0, 0), ""):
                pass

        end_of_backward(end)

    # ---- turns ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self, offer: Offer, what: str) -> Iterator[None]:
        """What is offered runs inside, in this rank's turn. Inside of another turn it is a part of that."""
        if self._busy:
            yield
            return
        self._busy = True
        try:
            self._wait(offer, what)
            yield
        finally:
            self._busy = False

    def _wait(self, mine: Offer, what: str) -> None:
        while True:
            offers = self._exchange(mine)
            chosen = max(offer.kind for offer in offers)
            if chosen == GRAPH:
                graph = next(offer for offer in offers if offer.kind == GRAPH)
                if graph.marks & _REDUCES:
                    _check_unread(offers)
                if mine.kind == GRAPH and graph.number == mine.number:
                    return
                self._take_part(graph.number)
                continue
            if chosen == SYNC and any(offer.marks & _KEPT for offer in offers):
                _check_unread(offers)
                for number in sorted({offer.number for offer in offers if offer.kind == SYNC}):
                    SHADOWS["kept"](self._family(number), None)
            if chosen == COMMON:
                self._check_alike(offers, what)
            if mine.kind == chosen:
                return

    def _exchange(self, mine: Offer) -> list[Offer]:
        alive = (family for ref in self.families.values() if (family := ref()) is not None)
        kept = any(group.has_kept() for family in alive for group in family.groups())
        sent = torch.tensor(mine._replace(marks=mine.marks | _KEPT * kept))
        with self._offering():
            offers, works = pairwise.all_gather_small(sent, self._name, pairwise.OFFER_TAG)
            for work in works:
                work.wait()
        return [Offer(*offer.tolist()) for offer in offers]

    def _take_part(self, number: int) -> None:
        if number not in self._known:
            self._known[number] = pickle.loads(self._store.get(f"shadow/{number}"))
        shadow = self._known[number]
        with torch.no_grad(), record_function(f"zerofx: shadow {shadow.kind}"):
            SHADOWS[shadow.kind](self._family(shadow.family), shadow.what)

    def _family(self, number: int) -> Any:
        family = self.families[number]()
        assert family is not None, "a module that another rank runs is deleted on this one"
        return family

    def _check_alike(self, offers: list[Offer], what: str) -> None:
        others = [str(rank) for rank, offer in enumerate(offers) if offer.number != offers[self._rank].number]
        if others:
            raise OutOfStepError(
                f"rank {self._rank} is in {what}, and rank {', '.join(others)} in something else that all ranks must "
                "do together. uneven=True lets ranks run different layers; steps, norms and checkpoints are every "
                "rank's (docs/models.md)."
            )


def common(turns: Turns | None, what: str, *, reads: bool = False) -> contextlib.AbstractContextManager[None]:
    """`Turns.common`, where ranks take turns."""
    return contextlib.nullcontext() if turns is None else turns.common(what, reads=reads)


def _check_unread(offers: list[Offer]) -> None:
    for rank, offer in enumerate(offers):
        if offer.marks & _READS:
            raise OutOfStepError(
                f"rank {rank} has read gradients (in a norm, or a scaler) to which other ranks still add. With "
                "uneven=True every rank runs the last backward of a step outside of zerofx.no_sync, and the others of "
                "that step inside (docs/models.md)."
            )


def _number_of(what: str) -> int:
    return int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "big") >> 1
