"""Ways to break generated code, as text: each in the name of the rule of `zerofx.passes.proof.code` that must find it.

A mutant is a function that breaks a text at a place, and another that says what places there are in it::

    @breaks("wait", waits)
    def a_dropped_wait(text, wait):
        del text.lines[wait.line]

Lines are found by expressions of this file's own, so that what the reader overlooks is not overlooked here, too. A
place is left out where the mutant would be the same program.

===============  ========================
file             rules
===============  ========================
collectives.py   wait, send, order, read
buffers.py       discard, copy, step
carried.py       reload, offload, activation
cuda.py          what only code for a GPU has, of several
===============  ========================
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Collective:
    """A collective of a text: the lines of its start and its wait, what it sends, what it brings, by name."""

    line: int
    wait: int
    sent: str
    brought: str
    result: str

    def __hash__(self) -> int:
        return hash(self.line)


class Text:
    """A generated module, of which ``lines`` may be changed; the rest is read from them when asked."""

    def __init__(self, code: str) -> None:
        self.lines = code.splitlines()

    @property
    def code(self) -> str:
        return "\n".join(self.lines)

    @property
    def begin(self) -> int:
        """Behind ``args.clear()``."""
        return next(i for i, line in enumerate(self.lines) if "args.clear()" in line) + 1

    @property
    def end(self) -> int:
        """The line that returns."""
        return next(i for i in range(self.begin, len(self.lines)) if re.match(r"\s*return \(", self.lines[i]))

    def find(self, expression: str, first: int = 0, last: int | None = None) -> list[int]:
        """The lines of the function that have it."""
        first, last = max(first, self.begin), self.end if last is None else last
        return [i for i in range(first, last) if re.search(expression, self.lines[i])]

    def waits(self) -> list[tuple[int, str]]:
        found = self.find(r"wait_tensor\.default\(\w+\)")
        return [(i, re.search(r"default\((\w+)\)", self.lines[i])[1]) for i in found]  # type: ignore[index]

    def collectives(self, kind: str = "all_gather|all_to_all") -> list[Collective]:
        """By the operators of gloo's ranks, or of nccl's: a reduction's is an exchange there, a reduce-scatter here."""
        found, nccl = [], kind.replace("all_to_all", "reduce_scatter")
        for i in self.find(rf"= torch\.ops\.(?:zerofx\.(?:{kind})_pairwise|_c10d_functional\.(?:{nccl})_\w*tensor)\."):
            result, sent = re.search(r"(\w+) = [\w.]+\((\w+),", self.lines[i]).groups()  # type: ignore[union-attr]
            alias = self.find(rf"^\s*\w+ = {result}$", i)[:1]
            brought = re.search(r"(\w+) =", self.lines[alias[0]])[1] if alias else result  # type: ignore[index]
            wait = next(line for line, name in self.waits() if name == brought)
            found.append(Collective(i, wait, sent, brought, result))
        return found

    def calls(self, name: str, first: int = 0, last: int | None = None) -> list[int]:
        """Kernels, products and operators that name ``name``."""
        found = self.find(rf"\b{name}\b", first, last)
        calls = re.compile(r"^\s*(\w+ = )?(cpp_fused\w*\(|triton_\w+\.run\(|extern_kernels\.|torch\.ops\.aten\.)")
        return [i for i in found if calls.search(self.lines[i])]

    def dels(self, name: str) -> list[int]:
        return self.find(rf"^\s*del {name}$")

    def aliases(self, name: str) -> list[str]:
        """``name``, and views of it that have names."""
        found = [name]
        for i in self.find(r"# alias"):
            alias, of = re.search(r"(\w+) = reinterpret_tensor\((\w+),", self.lines[i]).groups()  # type: ignore[union-attr]
            if of == name:
                found.append(alias)
        return found

    def start_lines(self, each: Collective) -> list[int]:
        """The start, another name for what it brings, what is asserted of that, and where the first name ends."""
        names = {each.result, each.brought}
        alias = self.find(rf"^\s*{each.brought} = {each.result}$") if len(names) > 1 else []
        ends = self.dels(each.result) if len(names) > 1 else []
        return sorted([each.line, *alias, *self.asserts(each), *ends])

    def asserts(self, each: Collective) -> list[int]:
        return self.find(rf"assert_\w+\({each.brought},", each.line, each.wait)

    @property
    def margin(self) -> str:
        """What stands before each line of the function."""
        return " " * (12 if self.find(r"_DeviceGuard") else 8)

    def insert(self, i: int, *lines: str) -> None:
        """Before line ``i``."""
        self.lines[i:i] = [self.margin + line for line in lines]

    def move(self, i: int, to: int) -> None:
        """Line ``i`` before line ``to``."""
        line = self.lines.pop(i)
        self.lines.insert(to - (i < to), line)

    def exchange(self, i: int, j: int, expression: str) -> None:
        """What ``expression`` finds in one line, for what it finds in the other."""
        here, there = re.search(expression, self.lines[i]), re.search(expression, self.lines[j])
        assert here is not None and there is not None
        for line, old, new in ((i, here, there), (j, there, here)):
            text = self.lines[line]
            self.lines[line] = text[: old.start(1)] + new[1] + text[old.end(1) :]

    def rename(self, i: int, old: str, new: str) -> None:
        self.lines[i] = re.sub(rf"\b{old}\b", new, self.lines[i])


Places = Callable[[Text], Any]
"""The places, as a list; False for none."""
Break = Callable[[Text, Any], None]


@dataclass(frozen=True)
class Mutant:
    """A way to break a text: ``places`` finds where it can be done, ``break_`` does it at one of these."""

    rule: str
    places: Places
    break_: Break

    @property
    def name(self) -> str:
        return self.break_.__name__


MUTANTS: list[Mutant] = []


def breaks(rule: str, places: Places) -> Callable[[Break], Break]:
    """What the decorated function does, at any of ``places``, must be found by ``rule``."""

    def add(break_: Break) -> Break:
        MUTANTS.append(Mutant(rule, places, break_))
        return break_

    return add


START = r"= torch\.ops\.(?:zerofx\.(?:\w+_pairwise|refresh)|_c10d_functional\.(?!wait)\w+)\."
KERNEL = r"cpp_fused|triton_\w+\.run|extern_kernels|torch\.ops\.aten"


def not_updated(text: Text) -> bool:
    """Where groups are updated, the rule "step" finds first that one gets another's gradient."""
    return not text.find(r"zerofx\.step")


def released(text: Text) -> list[tuple[Collective, int, int]]:
    """Gathers, where they are let go, and their last reader."""
    found = []
    for each in text.collectives("all_gather"):
        dels, reads = text.dels(each.brought), text.calls(each.brought, each.wait)
        found += [(each, dels[0], reads[-1])] if dels and reads else []
    return found


def reductions(text: Text) -> list[Collective]:
    return text.collectives("all_to_all")
