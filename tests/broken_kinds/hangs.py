"""A kind of lines that hangs behind the first."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.gpu.lines import Line, Setting, told

LIMIT = 8


def lines(setting: Setting) -> Iterator[Line]:
    yield told("before", "fine")
    time.sleep(600)
