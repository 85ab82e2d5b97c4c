"""What a deep module takes, from two shallow ones: layers that are alike add the same bytes and seconds each.

::

    layers    6 ── 8 ─ ─ ─ ─ ─ ─ ─ ─ 126         bytes of a rank, seconds of a step
    saves all    ·──·─ ─ ─ ─ ─ ─ ─ ─ ─×
                                      ┊          between both ends: as much more is computed again as less is saved
    saves least  ·──·─ ─ ─ ─ ─ ─ ─ ─ ─×

Both are traced, cut and rehearsed as any module (`zerofx.compiler.division`), at both ends of the ladder of what
forward saves, for each budget of gathered weights: what one group takes, what three do, all. There every layer is
treated alike, so what `SHALLOW` layers take goes on in a straight line.

Peaks do so moment by moment. In few layers the logits may be the most, in many all gradients after the last backward.
So the first third of a graph and the last are followed for themselves, too, and the highest one counts.

Between both ends some layers save more than others. Bytes are on the line between them; seconds follow the work that
the ladder's rungs compute again. `zerofx.compile` divides the budget anew, for the whole graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zerofx.compiler.choices import Activations, Division, Offer
from zerofx.compiler.division import Trials, Tried
from zerofx.model.memory import Memory
from zerofx.simulate.clock import LiveBytes
from zerofx.simulate.price import Price

SHALLOW = 6, 8
"""How many layers are traced."""

DEEP = 24
"""From how many layers on: those of fewer are traced themselves, for two traces and ten trials take as long."""


ROUNDED = 8
"""So many bytes at most are rounded up, a class of memory each."""


class End(NamedTuple):
    """A division in which all layers are treated alike. Bytes and seconds, as in `Division`."""

    peak: dict[str, int]
    at_rest: int
    left: int
    saved: int
    step_s: float
    optimizer_s: float

    @property
    def needs(self) -> int:
        """All bytes of a rank at the worst moment."""
        return self.at_rest + sum(self.peak.values())

    def towards(self, other: End, part: float) -> End:
        """On the line from here, where ``part`` is 0, to ``other``, where it is 1; or beyond."""
        peak = {kind: _on_the_way(n, other.peak[kind], part) for kind, n in self.peak.items()}
        nbytes = (_on_the_way(a, b, part) for a, b in zip(self[1:4], other[1:4], strict=True))
        return End(peak, *nbytes, *(a + part * (b - a) for a, b in zip(self[4:], other[4:], strict=True)))


def _on_the_way(here: int, there: int, part: float) -> int:
    return here + math.ceil(part * (there - here))


class Ends(NamedTuple):
    """Under one budget for gathered weights: the trials that save all, and the least; and the bytes that these save."""

    budget: float | None
    all_: tuple[Tried, int]
    least: tuple[Tried, int]


@dataclass
class Survey:
    """A search (`zerofx.compiler.choices.Search`) that tries all ends, and takes one.

    Attributes:
        any_fits: whether any division that fits will do: then those that need least are tried alone.
        ends: of each ladder, and budget for gathered weights.
        ladders: what forward saves between both ends.
    """

    any_fits: bool
    ends: dict[tuple[int, str], Ends] = field(default_factory=dict)
    ladders: list[list[Activations]] = field(default_factory=list)

    def __call__(self, trials: Trials) -> Tried:
        budgets, taken = trials.budgets(), None
        for i, ladder in enumerate(trials.ladders(few=self.any_fits)):
            last = ladder[-1]
            first = last if self.any_fits else 0
            self.ladders.append([trials.rungs[rung].chosen for rung in (0, *ladder)])
            self._note((i, "least" if len(budgets) > 1 else "all"), trials, trials.least(first), trials.least(last))
            if len(budgets) > 1 and not self.any_fits:
                for name, budget in (("ample", budgets[0]), ("all", budgets[-1])):
                    self._note((i, name), trials, trials.try_(first, budget), trials.try_(last, budget))
            taken = trials.least(last)
        assert taken is not None, "there is a ladder, and least is where all gathers have room"
        return taken

    def _note(self, name: tuple[int, str], trials: Trials, first: Tried | None, last: Tried | None) -> None:
        if first is not None and last is not None:
            saved = [trials.rungs[tried.rung].chosen.saved_bytes for tried in (first, last)]
            self.ends[name] = Ends(last.memory_budget, (first, saved[0]), (last, saved[1]))


class Deep(NamedTuple):
    """What was found for the whole depth.

    Attributes:
        division: the fastest that fits; None: none does.
        offers: as `Division.offers`.
        saved, whole: bytes that forward saves, and would save.
    """

    division: Division | None
    offers: tuple[Offer, ...]
    saved: int
    whole: int


def followed(few: Survey, more: Survey, count: int, memory: Memory) -> Deep | None:
    """What ``count`` layers take, from surveys of `SHALLOW` ones; None: they do not go on in a straight line."""
    if not more.ends or few.ends.keys() != more.ends.keys():
        return None
    part = (count - SHALLOW[0]) / (SHALLOW[1] - SHALLOW[0])
    found: list[tuple[End, float | None, bool]] = []
    for (ladder, name), ends in more.ends.items():
        fewer = few.ends[ladder, name]
        all_, least = _beyond(fewer.all_, ends.all_, part), _beyond(fewer.least, ends.least, part)
        if all_ is None or least is None:
            return None
        for share, again in _curve(more.ladders[ladder], all_, least, memory.nbytes):
            seconds = all_.step_s + again * (least.step_s - all_.step_s)
            end = all_.towards(least, share)._replace(step_s=seconds)
            found.append((end, ends.budget, share == 0 and name == "all"))
    offers, whole = _offers([end for end, *_ in found]), max(end.saved for end, *_ in found)
    fitting = [each for each in found if each[0].needs <= memory.nbytes]
    if not fitting:
        return Deep(None, offers, 0, whole)
    end, budget, keeps_all = min(fitting, key=lambda each: (not each[2], each[0].step_s, each[0].needs))
    tried = 1 if keeps_all else len(found)
    division = Division(
        memory.nbytes, end.at_rest, end.peak, end.left, budget, end.step_s, end.optimizer_s, tried, offers=offers
    )
    return Deep(division, offers, end.saved, whole)


def _beyond(few: tuple[Tried, int], more: tuple[Tried, int], part: float) -> End | None:
    """One end at the whole depth."""
    peak = _peak(few[0].price, more[0].price, part)
    if peak is None:
        return None
    ends = [
        End({}, tried.at_rest, tried.price.left, saved, tried.price.step_s, tried.optimizer_s)
        for tried, saved in (few, more)
    ]
    return ends[0].towards(ends[1], part)._replace(peak=peak)


def _peak(few: Price, more: Price, part: float) -> dict[str, int] | None:
    """Bytes by class at the worst moment; None: the moments of few layers are not those of more."""
    found = []
    for short, long in zip(few.live, more.live, strict=True):
        third = max(1, len(short) // 3)
        for window in (slice(None), slice(0, third), slice(-third, None)):
            a, b = _worst(short[window]), _worst(long[window])
            found.append({str(kind): _on_the_way(n, b[kind], part) for kind, n in a.items()})
    peak = max(found, key=lambda live: sum(live.values()))
    return None if min(peak.values()) < 0 else peak


def _worst(live: Sequence[LiveBytes]) -> LiveBytes:
    return max(live, key=lambda each: sum(each.values()))


def _curve(rungs: Sequence[Activations], all_: End, least: End, nbytes: int) -> list[tuple[float, float]]:
    """What can be saved less, and computed again: parts of the way from all to the least, of bytes and of seconds.

    The rungs of a ladder; and what just fits. Seconds follow the work that a rung computes again.
    """
    most, fewest = rungs[0].saved_bytes, rungs[-1].saved_bytes
    found = [(0.0, 0.0)]
    for rung in rungs[1:-1]:
        found.append(((most - rung.saved_bytes) / (most - fewest), rung.work / (rungs[-1].work or 1.0)))
    found.append((1.0, 1.0))
    if least.needs < nbytes < all_.needs:
        share = min(1.0, (all_.needs - nbytes + ROUNDED) / (all_.needs - least.needs))
        i = next(i for i, (x, _) in enumerate(found) if x >= share)
        (x, y), (u, v) = found[i - 1], found[i]
        found.insert(i, (share, y + (v - y) * (share - x) / (u - x)))
    return found


def _offers(ends: Sequence[End]) -> tuple[Offer, ...]:
    """From what needs least on, each that is faster than those before it."""
    offers: list[Offer] = []
    for end in sorted(ends, key=lambda end: (end.needs, end.step_s)):
        if not offers or end.step_s < offers[-1].step_s:
            offers.append(Offer(end.needs, end.at_rest, end.step_s, end.optimizer_s))
    return tuple(offers)
