"""A kind of lines that raises behind the first."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.lines import Line, Setting, told

LIMIT = 60


def lines(setting: Setting) -> Iterator[Line]:
    yield told("before", "fine")
    raise ZeroDivisionError
