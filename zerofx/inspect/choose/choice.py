"""What was chosen of a model's options, and why: ``print`` it.

::

    stage 2 for GPT on 8 ranks within 2.0 GB
      takes      1.6 GB: at rest 1.0 GB, activations 402.7 MB, gradients 12.6 MB, temporary 134.2 MB
      keeps      all that forward makes for backward
      a step     1.21 s, of which the optimizer 30.11 ms (predicted)
      next best  stage 0: 1.25 s, 3 percent slower
      then       stage 3: no faster than stage 2, which keeps all that it needs
      with       400.0 MB more: stage 0, 4 percent faster
      rates      of an ordinary machine, not of this one: zerofx.calibrate(keep=True) measures them
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zerofx.compiler.choices import Division, Offer
from zerofx.model.memory import Memory
from zerofx.model.offload import PARTS, Offload
from zerofx.model.sharding import Sharding
from zerofx.model.units import format_bytes, format_seconds

ALIKE = 0.01
"""Steps that differ by less than this part count as equally fast."""

WORTH = 0.05
"""By this part a step has to be faster for quantized collectives to be chosen: they change numbers."""


@dataclass(frozen=True)
class Alternative:
    """One way to train, as it was predicted.

    Attributes:
        options: of ``zerofx.compile``: "stage", and where there was something to choose "sharding" and "offload".
        division: of the memory; None: it does not fit, or was not predicted.
        offers: divisions that were predicted, from the least memory on.
        saved, whole: bytes that forward saves for backward, and that it would save without a budget.
        graphs: how many there are, where the module has graph breaks; 0: it has none.
        layers: how many were traced, fewer and more, of how many (`zerofx.inspect.choose.deep`); empty: all were.
        why: of one that was not predicted, why not; and
        impossible: whether that is since its options do not go together.
    """

    options: dict[str, Any]
    division: Division | None = None
    offers: tuple[Offer, ...] = ()
    saved: int = 0
    whole: int = 0
    graphs: int = 0
    layers: tuple[int, ...] = ()
    why: str = ""
    impossible: bool = False

    @property
    def stage(self) -> int:
        return int(self.options["stage"])

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step, all in; infinite where it does not fit."""
        return math.inf if self.division is None else self.division.step_s + self.division.optimizer_s

    @property
    def penalty(self) -> float:
        """By what its seconds are multiplied where alternatives are compared."""
        return 1.0 if self.options.get("wire") is None else 1 + WORTH

    @property
    def keeps_all(self) -> bool:
        """Whether there is nothing that more memory would make faster."""
        return self.division is not None and self.division.tried == 1

    @property
    def name(self) -> str:
        """The options in words."""
        words = [f"stage {self.stage}"]
        if isinstance(sharding := self.options.get("sharding"), Sharding):
            words.append(sharding.name)
        if (offload := Offload.of(self.options.get("offload"))) is not None:
            moved = " and ".join(part for part in PARTS if getattr(offload, part) is not None)
            words.append(f"{moved} {'on the host' if offload.on_host else 'on disk'}")
        if self.options.get("wire") is not None:
            words.append("quantized on the wire")
        return ", ".join(words)


@dataclass(frozen=True)
class Choice:
    """What `zerofx.choose` returns.

    Attributes:
        given: what the user gave, as it was given.
        alternatives: the chosen one, then the next best; those that do not fit are last.
        memory: the budget, with the rates by which times were predicted.
        what: the module and the ranks, in words.
        rates_of: where the rates are from, in words.
    """

    given: dict[str, Any]
    alternatives: tuple[Alternative, ...]
    memory: Memory
    what: str
    rates_of: str

    @property
    def chosen(self) -> Alternative:
        return self.alternatives[0]

    @property
    def options(self) -> dict[str, Any]:
        """For ``zerofx.compile(model, **choice.options)``."""
        return {**self.given, **self.chosen.options, "memory": self.memory}

    @property
    def division(self) -> Division:
        """What a step takes, and how long forward and backward are."""
        assert self.chosen.division is not None
        return self.chosen.division

    def better_with(self) -> list[tuple[int, str, float]]:
        """With how many bytes more which alternative is how many seconds: the nearest, and the fastest of all."""
        enough = (1 - ALIKE) * self.chosen.penalty * self.chosen.step_s
        found = [
            (offer.needs - self.memory.nbytes, each.name, offer.whole_s)
            for each in self.alternatives
            for offer in each.offers
            if offer.needs > self.memory.nbytes and each.penalty * offer.whole_s < enough
        ]
        if not found:
            return []
        nearest, fastest = min(found), min(found, key=lambda x: (x[2], x[0]))
        return [nearest] if nearest[2] <= (1 + ALIKE) * fastest[2] else [nearest, fastest]

    def __str__(self) -> str:
        chosen, division = self.chosen, self.division
        by_kind = [("at rest", division.at_rest), *division.peak.items(), ("other graphs", division.elsewhere)]
        takes = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in by_kind if n)
        times = f"{format_seconds(chosen.step_s)}, of which the optimizer {format_seconds(division.optimizer_s)}"
        rows = [
            ("takes", f"{format_bytes(division.peak_bytes)}: {takes}"),
            ("keeps", _kept(chosen)),
            ("a step", f"{times} (predicted)"),
        ]
        if chosen.graphs:
            rows.append(("graphs", f"{chosen.graphs}; what runs outside of these is not counted"))
        if chosen.layers:
            few, more, count = chosen.layers
            rows.append(("layers", f"{few} and {more} of {count} were traced; all are alike, so the rest follows"))
        headings = ["next best", "then"]
        rows += [(heading, self._beside(each)) for heading, each in zip(headings, self.alternatives[1:])]
        for more, name, seconds in self.better_with():
            faster = _percent(chosen.step_s / seconds - 1)
            rows.append(("with", f"{format_bytes(more)} more: {name}, {faster} faster"))
        rows.append(("rates", self.rates_of))
        head = f"{chosen.name} for {self.what} within {format_bytes(self.memory.nbytes)}"
        return "\n".join([head, *(f"  {name:<10} {said}" for name, said in rows)])

    def _beside(self, other: Alternative) -> str:
        """Why another one was not chosen."""
        if other.why:
            return f"{other.name}: {other.why}"
        if other.division is None:
            least = other.offers[0]
            lacking = format_bytes(least.needs - self.memory.nbytes)
            return f"{other.name}: needs {format_bytes(least.needs)} at least, {lacking} too much"
        slower = other.step_s / self.chosen.step_s - 1
        said = "as fast" if abs(slower) < ALIKE else f"{_percent(slower)} slower"
        takes = format_bytes(other.division.peak_bytes)
        return f"{other.name}: {format_seconds(other.step_s)}, {said}, and takes {takes}"


def best_first(alternatives: list[Alternative]) -> tuple[Alternative, ...]:
    """The fastest that fits, of `ALIKE` ones that with the lowest peak; then the others; then those that do not fit."""
    fastest = min((each.penalty * each.step_s for each in alternatives), default=math.inf)

    def place(each: Alternative) -> tuple[bool, float, float]:
        if each.division is None:
            return True, each.offers[0].needs if each.offers else math.inf, each.stage
        seconds = each.penalty * each.step_s
        alike = seconds <= (1 + ALIKE) * fastest
        return False, fastest if alike else seconds, each.division.peak_bytes

    return tuple(sorted(alternatives, key=place))


def _kept(chosen: Alternative) -> str:
    division = chosen.division
    assert division is not None
    saved = "all that forward makes for backward"
    if chosen.saved < chosen.whole:
        part = f"{format_bytes(chosen.saved)} of {format_bytes(chosen.whole)}"
        saved = f"{part} that forward makes for backward, which makes the rest again"
    if division.memory_budget is None:
        return saved
    if division.memory_budget == math.inf:
        return f"{saved}; and all weights gathered"
    return f"{saved}; and {format_bytes(division.memory_budget)} of weights gathered at once"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} percent" if 100 * part >= 1 else "less than 1 percent"
