"""What rank 0 says while graphs are compiled: which one, how far it is, how long it took.

::

    zerofx: forward 1, tokens to norm: group, 6 of 13 (0.4 s)           a line that rewrites itself, on a terminal
    zerofx: forward 1, tokens to norm: code for the executor (2.1 s)
    zerofx: forward 1, tokens to norm: 4.8 s, 0.5 s of them passes      what stays
    zerofx: backward 1, norm to tokens: from the cache                  what stays of a warm start

Without a terminal nothing is said, unless it was asked for: ``zerofx.compile(..., progress=True)``, or
``ZEROFX_PROGRESS=1`` in the environment. Then the last line alone is printed, once for each graph. ``progress=False``
and ``ZEROFX_PROGRESS=0`` ask for silence; the option goes first.

Where ``rich`` is installed it draws the line, and counts seconds while Inductor computes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

VARIABLE = "ZEROFX_PROGRESS"
_WANTED = {"1": True, "0": False}


def wanted(progress: bool | None) -> bool:
    """Whether anything is to be said, by the option, the environment, or because there is a terminal.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    if progress is not None:
        return progress
    text = os.environ.get(VARIABLE)
    if text is None:
        return sys.stderr.isatty()
    if text not in _WANTED:
        raise ValueError(f"{VARIABLE}={text!r}: expected 0 or 1.")
    return _WANTED[text]


@contextlib.contextmanager
def progress_of(name: str, groups: list[str], speaks: bool) -> Iterator[Progress]:
    """The graph ``name`` of these groups is compiled inside. ``speaks``: this rank says so."""
    graph = Progress(_label(name, groups))
    if speaks:
        graph.line = line()
    try:
        yield graph
    except BaseException:
        if graph.line is not None:
            graph.line.close("")
        raise
    if graph.line is not None:
        seconds = time.perf_counter() - graph.begun
        graph.line.close(f"zerofx: {graph.name}: {seconds:.1f} s, {graph.passes:.1f} s of them passes")


def say_served(name: str, groups: Sequence[str]) -> None:
    """Say that the graph ``name`` came from a cache (`zerofx.compiler.warm`)."""
    line().close(f"zerofx: {_label(name, groups)}: from the cache")


def _label(name: str, groups: Sequence[str]) -> str:
    return f"{name}, {groups[0]} to {groups[-1]}" if len(groups) > 1 else f"{name}, {groups[0]}"


class Progress:
    """How far one graph is."""

    def __init__(self, name: str) -> None:
        self.name, self.begun, self.passes = name, time.perf_counter(), 0.0
        self.line: Any = None

    def at_pass(self, name: str, i: int, n: int) -> None:
        """The pass ``name``, number ``i`` of ``n``, is next."""
        self.at(f"{name}, {i} of {n}")

    def at(self, what: str) -> None:
        """What is done next, in words."""
        if self.line is not None:
            self.line.show(f"zerofx: {self.name}: {what}", self.begun)

    def passes_done(self) -> None:
        """All passes have run."""
        self.passes = time.perf_counter() - self.begun


class Silent:
    """Where there is no terminal: the last line alone."""

    def show(self, text: str, begun: float) -> None:
        """Say how far it is."""

    def close(self, text: str) -> None:
        """Say what stays."""
        if text:
            print(text, file=sys.stderr, flush=True)


class Plain(Silent):
    """A line of a terminal that is written over."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, text: str, begun: float) -> None:
        """Say how far it is."""
        text = f"{text} ({time.perf_counter() - begun:.1f} s)"
        text = text[: (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1]
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def close(self, text: str) -> None:
        """Say what stays."""
        sys.stderr.write("\r" + " " * self._width + "\r")
        super().close(text)


class Rich(Silent):
    """The same, by ``rich``: the seconds run on while nothing is said."""

    def __init__(self, rich: Any) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._bar = Progress(*columns, console=rich.console.Console(stderr=True), transient=True)
        self._task = self._bar.add_task("")
        self._bar.start()

    def show(self, text: str, begun: float) -> None:
        """Say how far it is."""
        self._bar.update(self._task, description=text)

    def close(self, text: str) -> None:
        """Say what stays."""
        self._bar.stop()
        super().close(text)


def line() -> Silent:
    """How lines are written here."""
    if not sys.stderr.isatty():
        return Silent()
    try:
        import rich.console
    except ImportError:
        return Plain()
    return Rich(rich)
