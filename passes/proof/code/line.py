"""One line of a wrapper: what it does to memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from zerofx.passes.proof.code.kernel import Kernel

Memory = Any  # int | tuple[Memory, int]
"""A number for each memory; one of the results of a call that returns several has theirs and its place."""
Value = frozenset[Memory] | tuple[Any, ...]
NOTHING: frozenset[Memory] = frozenset()
Kind = Literal["call", "start", "wait", "step", "carry", "return", "lost"]


@dataclass
class Passed:
    """One argument of a call: its memories, what the call does with them, its elements where they are known."""

    memories: frozenset[Memory]
    reads: bool = True
    writes: bool = False
    numel: int | None = None
    names: frozenset[str] = frozenset()


@dataclass
class Line:
    """What one line does to memory.

    Attributes:
        kind: "start" and "wait" of a collective, "step" of a group, "carry" for both of what lives elsewhere, "lost"
            for a name that stands for nothing (any more), else "call" or "return".
        number, text: of the line.
        name: of the kernel; or of the operator, without ``torch.ops``.
        passed: its arguments.
        result: a memory that it makes.
        group: the last string among the arguments.
        constants: the arguments of an operator that are numbers, strings, or lists of these, but for those with names.
        sure: whether its form is known.
        strange: whether not even its kind of statement is.
        values: what is returned.
        kernel: which.
        when: it runs, among the others: a branch's lines stand before ``call`` and run inside of it.
        stream: that it runs on, as text; "" for the one that is current when ``call`` is.
    """

    kind: Kind
    number: int
    text: str
    name: str = ""
    passed: list[Passed] = field(default_factory=list)
    result: Memory | None = None
    group: str = ""
    constants: tuple[Any, ...] = ()
    sure: bool = True
    strange: bool = False
    values: list[frozenset[Memory]] = field(default_factory=list)
    kernel: Kernel | None = None
    when: int = 0
    stream: str = ""

    @property
    def reads(self) -> frozenset[Memory]:
        return NOTHING.union(*(p.memories for p in self.passed if p.reads))

    @property
    def writes(self) -> frozenset[Memory]:
        return NOTHING.union(*(p.memories for p in self.passed if p.writes))


def flat(value: Value) -> frozenset[Memory]:
    """All memories of a value."""
    return NOTHING.union(*map(flat, value)) if isinstance(value, tuple) else value
