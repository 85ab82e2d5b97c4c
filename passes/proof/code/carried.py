"""The rules "reload", "offload" and "activation" of generated code: what is offloaded goes and comes as in the graph.

::

    buf3 = torch.ops.zerofx.reload_activation.default(addmm, [0, 1], 5)               addmm is a handle, for something
    cpp_fused_mul_0(…)                                                                nothing touches buf3, nor addmm
    buf9 = torch.ops.zerofx.wait_reload_activation.default(buf3, addmm, [0, 1], 5)    it has come: buf9 is that memory

The starts and waits of one rule take turns as in the graph. Each names what it names there, and each wait the ticket
of its own start. Between the two nothing touches what comes, and nothing writes to what leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from zerofx.passes.proof.code.line import Line, Memory
from zerofx.passes.proof.code.promise import CARRIES, Carry, Place, Promise, plain_name
from zerofx.passes.proof.code.wrapper import Walk

Refuse = Callable[[str, Place, str, str], NoReturn]
"""Called with the rule, what it is about, what was found, and what was expected."""


@dataclass(frozen=True)
class _Ticket:
    """What a start has begun: its place, and the memories that it was given."""

    place: Place
    carry: Carry
    given: frozenset[Memory]


@dataclass
class Carried:
    """What is on its way, while a wrapper is read.

    Attributes:
        turns: by rule, the places that are still to come, the last one first.
        tickets: by memory, what was begun. What is brought comes to that memory.
        leaving: by memory, what takes it away.
        said: by memory, what it says has left: a handle, or a gradient's place.
    """

    promise: Promise
    walk: Walk
    refuse: Refuse
    turns: dict[str, list[int]] = field(default_factory=dict)
    tickets: dict[Memory, _Ticket] = field(default_factory=dict)
    leaving: dict[Memory, _Ticket] = field(default_factory=dict)
    said: dict[Memory, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i in reversed(range(len(self.promise.carried))):
            self.turns.setdefault(self.promise.carried[i].rule, []).append(i)

    def read(self, line: Line) -> None:
        """Check one line, and note what it starts or waits for."""
        if line.kind == "carry":
            self._carry(line)
            return
        touched = line.reads.union(line.writes, *line.values)
        for memory in touched & self.tickets.keys():
            self._refuse(self.tickets[memory].place, "it touches what is still on its way", "the wait for it before")
        for memory in line.writes & self.leaving.keys():
            self._refuse(self.leaving[memory].place, "it writes to what is being taken away", "the wait for it before")
        if line.kind == "return":
            self._check_outputs(line)
            return
        for memory in touched & self.said.keys():
            self._refuse(self.said[memory], "it reads what stands for something elsewhere", "an output")
        for memory in touched & self._away.keys():
            self._refuse(self._away[memory], "it reads what stands for something elsewhere", "what has come of it")

    @functools.cached_property
    def _away(self) -> dict[Memory, Place]:
        """The inputs that stand for something elsewhere; they are known from the first line on."""
        places = ((carry.input, ("carried", i)) for i, carry in enumerate(self.promise.carried))
        return {self.walk.inputs[number]: place for number, place in places if number is not None}

    def _check_outputs(self, line: Line) -> None:
        for i, carry in enumerate(self.promise.carried):
            for output in carry.outputs:
                if all(self.said.get(memory) != ("carried", i) for memory in line.values[output]):
                    self._refuse(("carried", i), f"output {output} says nothing of it", "that it has left")

    def _carry(self, line: Line) -> None:
        operator = plain_name(line.name)
        rule = CARRIES[operator]
        if not self.turns.get(rule):
            self.refuse(rule, None, f"one more {operator} than in the graph", "none")
        i = self.turns[rule].pop()
        carry, place = self.promise.carried[i], ("carried", i)
        if (operator, line.constants) != (carry.operator, carry.constants):
            found = f"{operator}{line.constants} in the place of {carry.operator}{carry.constants}"
            self._refuse(place, found, "the graph's turn")
        passed = [p.memories for p in line.passed if p.memories]
        given = passed[-1] if passed else frozenset()
        if self.tickets.keys() & given:
            self._refuse(place, "it is given what is still on its way", "the wait for it before")
        if carry.input is not None and self.walk.inputs[carry.input] not in given:
            self._refuse(place, f"it is not given input {carry.input}", "that, as in the graph")
        if not carry.waits:
            self._begin(_Ticket(place, carry, given), line)
        else:
            self._end(place, carry, passed[0] if len(passed) > 1 else frozenset(), given, line)

    def _begin(self, ticket: _Ticket, line: Line) -> None:
        self.tickets[line.result] = ticket
        if not ticket.carry.yields:
            for memory in ticket.given:
                self.leaving[memory] = ticket

    def _end(self, place: Place, carry: Carry, named: frozenset[Memory], given: frozenset[Memory], line: Line) -> None:
        begun = [memory for memory in named if memory in self.tickets]
        if len(named) != 1 or not begun:
            self._refuse(place, "it names no ticket of what is on its way", "its start's")
        ticket = self.tickets.pop(begun[0])
        if ticket.carry.constants != carry.constants or ticket.given != given:
            self._refuse(place, "it names the ticket of another start, or is given another tensor", "its start's")
        self.leaving = {memory: other for memory, other in self.leaving.items() if other is not ticket}
        if line.result is not None:
            self.said[line.result] = place

    def finish(self) -> None:
        """All turns were taken."""
        for turns in self.turns.values():
            if turns:
                carry = self.promise.carried[turns[-1]]
                self._refuse(("carried", turns[-1]), f"{carry.operator}{carry.constants} never runs", "once")

    def _refuse(self, place: Place, found: str, expected: str) -> NoReturn:
        assert place is not None
        self.refuse(self.promise.carried[place[1]].rule, place, found, expected)
