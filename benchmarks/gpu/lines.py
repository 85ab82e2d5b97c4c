"""A line of the report, and what all kinds are told."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["as expected", "otherwise", "failed", "not run", "told"]
NO_DEVICE = "not run: no device"
NO_TIME = "not run: no time left"


@dataclass(frozen=True)
class Line:
    """One thing that was looked at.

    Attributes:
        name: what.
        expected: in words; "" where nothing is, and the line only tells.
        found: in words.
        verdict: "otherwise" is another number than expected, "failed" is an error.
        value: the number that was judged, if there is one.
        detail: a traceback's end, or a path.
    """

    name: str
    expected: str
    found: str
    verdict: Verdict
    value: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Setting:
    """What all kinds are told.

    Attributes:
        device: "cuda" or "cpu"; with "cpu" everything is small, and times mean nothing.
        ranks: how many, each with a device of its own.
        folder: where a kind may leave files.
    """

    device: str
    ranks: int
    folder: str

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"


def told(name: str, found: str, value: float | None = None, detail: str = "") -> Line:
    """A line that nothing is expected of."""
    return Line(name, "", found, "told", value, detail)


def at_most(name: str, value: float, bound: float, unit: str = "", *, judged: bool = True, detail: str = "") -> Line:
    """``value`` is to be no more than ``bound``. Not ``judged``: it is told beside that."""
    fine = value <= bound  # and NaN is not
    verdict: Verdict = ("as expected" if fine else "otherwise") if judged else "told"
    return Line(name, f"at most {bound:.3g}{unit}", f"{value:.3g}{unit}", verdict, _finite(value), detail)


def at_least(name: str, value: float, bound: float, unit: str = "", *, judged: bool = True, detail: str = "") -> Line:
    """``value`` is to be no less than ``bound``."""
    fine = value >= bound
    verdict: Verdict = ("as expected" if fine else "otherwise") if judged else "told"
    return Line(name, f"at least {bound:.3g}{unit}", f"{value:.3g}{unit}", verdict, _finite(value), detail)


def not_run(name: str, expected: str = "", why: str = NO_DEVICE) -> Line:
    return Line(name, expected, why, "not run")


def failed(name: str, expected: str, error: BaseException) -> Line:
    """The line of what raised."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()
    return Line(name, expected, text[0][:300], "failed", detail="".join(traceback.format_exception(error))[-4000:])


def attempt(name: str, expected: str, make: Callable[[], Line | list[Line]]) -> Iterator[Line]:
    """The lines of ``make``, or that it raised."""
    try:
        made = make()
    except Exception as error:
        yield failed(name, expected, error)
        return
    yield from made if isinstance(made, list) else [made]


def _finite(value: Any) -> float | None:
    """JSON knows no NaN."""
    return float(value) if math.isfinite(value) else None
