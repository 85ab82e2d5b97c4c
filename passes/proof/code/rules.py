"""The rules of `zerofx.passes.proof.code`: the wrapper's lines, one after the other, beside what the graph asks for."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NoReturn

from torch.fx import Node

from zerofx.passes.proof.code.carried import Carried
from zerofx.passes.proof.code.line import Line, Memory
from zerofx.passes.proof.code.promise import Place, Promise, plain_name
from zerofx.passes.proof.code.wrapper import Walk, Wrapper
from zerofx.passes.proof.refusal import VerificationError, place_in_model


def check_code(code: str, promise: Promise, written: dict[str, str] | None = None) -> dict[str, str] | None:
    """Check what was generated for the graph of ``promise``.

    Args:
        code: the module that Inductor wrote.
        promise: what the final graph asks for.
        written: of a backward's graph, what was returned for its forward.

    Returns:
        The inputs that the code writes to and returns for backward, by name, each with the line that writes to it last.
        None: there is no function ``call`` in Python to read, as with ``cpp_wrapper``.

    Raises:
        zerofx.VerificationError: a rule is broken; it names the rule, the line, the group and the line of the model.
    """
    wrapper = Wrapper(code)
    if wrapper.call is None:
        return None
    reading = _Reading(promise, Walk(wrapper), written or {})
    for line in reading.walk.lines():
        reading.read(line)
    reading.finish()
    return reading.rewritten


@dataclass
class _Buffer:
    """What a collective brings, or an input that weights are read from.

    Attributes:
        place: of it.
        last: when it is touched for the last time.
        names: those under which it was waited for.
        returned: whether it leaves the code.
        decoded: whether it is what was read of codes that came; it has names from the next line on.
    """

    place: Place
    last: int = 0
    names: frozenset[str] = frozenset()
    returned: bool = False
    decoded: bool = False


@dataclass
class _Reading:
    """One walk over a wrapper.

    Attributes:
        under_way: by memory, the place of what is on its way to it.
        sent: by memory, the collectives that still send it.
        waits: by place, how many there were.
        buffers: by memory, the gathered ones.
        stale: by memory, the group whose update has changed it.
        origins: by memory, the inputs and collectives that its value was made of.
        copied: by place and elements, how many copies of weights there are.
        rewritten: what `check_code` returns.
        carried: what comes from elsewhere, and leaves.
    """

    promise: Promise
    walk: Walk
    written: dict[str, str]
    under_way: dict[Memory, Place] = field(default_factory=dict)
    sent: dict[Memory, set[int]] = field(default_factory=lambda: defaultdict(set))
    waits: Counter[Place] = field(default_factory=Counter)
    came: dict[Memory, Place] = field(default_factory=dict)
    buffers: dict[Memory, _Buffer] = field(default_factory=dict)
    stale: dict[Memory, str] = field(default_factory=dict)
    origins: dict[Memory, set[Place]] = field(default_factory=lambda: defaultdict(set))
    copied: Counter[tuple[Place, int]] = field(default_factory=Counter)
    starts: list[Line] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)
    writes: dict[int, str] = field(default_factory=dict)
    rewritten: dict[str, str] = field(default_factory=dict)
    line: Line = field(default_factory=lambda: Line("call", 0, ""))
    carried: Carried = field(init=False)
    _begun: bool = False

    def __post_init__(self) -> None:
        self.carried = Carried(self.promise, self.walk, self._refuse)

    def read(self, line: Line) -> None:
        """Check one line, and note what it does."""
        if not self._begun:
            self._begin()
        self.line = line
        if line.kind == "lost":
            self._lost(line)
        elif line.kind == "wait":
            self._wait(line)
        else:
            self._touch(line)
            self.carried.read(line)
            {"start": self._start, "step": self._step, "return": self._return}.get(line.kind, self._copies)(line)
            self._follow(line)

    def _begin(self) -> None:
        """The inputs have names."""
        self._begun = True
        promise, inputs = self.promise, self.walk.inputs
        if len(inputs) != len(promise.inputs):
            self._refuse("read", None, f"it takes {len(inputs)} inputs", f"the graph's, {len(promise.inputs)}")
        for i, memory in enumerate(inputs):
            self.origins[memory] = {("input", i)}
            if promise.arriving[i]:
                self.under_way[memory] = self.came[memory] = ("input", i)
            if ("input", i) in promise.weights:
                self.buffers[memory] = _Buffer(("input", i))

    # ---- one line ---------------------------------------------------------------------------------------------------

    def _lost(self, line: Line) -> None:
        known = {**self.came, **{memory: buffer.place for memory, buffer in self.buffers.items()}}
        place = next((known[m] for m in line.reads if m in known), None)
        if "wait_tensor" in line.text:
            self._refuse("wait", place, "it waits for what is not under way", "one wait, after the start")
        if line.reads:
            self._refuse("discard", place, "it names what was deleted before", "nothing after the last use")
        self._refuse("read", None, "it names what is not there yet", "what was made in a line before")

    def _touch(self, line: Line) -> None:
        """The rules of what any line may not touch."""
        for memory in line.reads | line.writes:
            if line.strange and (memory in self.came or memory in self.buffers or self.sent.get(memory)):
                place = self.came.get(memory)
                self._refuse("read", place, "it names a collective's memory, and is of no known kind", "a known one")
            if line.stream and (memory in self.came or memory in self.buffers or self.sent.get(memory)):
                self._elsewhere(line, self.came.get(memory))
            if memory in self.under_way:
                self._refuse(
                    "wait", self.under_way[memory], "it touches what is still under way", "the wait for it before"
                )
            if memory in self.stale:
                group = self.stale[memory]
                self._refuse(
                    "step", self._home(group), f"it reads weights that the update of {group!r} has changed", "it before"
                )
            if memory in self.buffers:
                buffer = self.buffers[memory]
                buffer.last = line.when
                if buffer.decoded and not buffer.names:
                    buffer.names = frozenset(self.walk.names_of(memory))
        for memory in line.writes:
            if self.sent.get(memory):
                i = min(self.sent[memory])
                self._refuse("send", ("start", i), "it writes to what is still being sent", "the wait for it before")
            if memory in self.buffers and line.sure:
                self._overwrite(memory)
        for i, memory in enumerate(self.walk.inputs):
            if memory in line.writes and line.sure:
                self.writes[i] = line.text
        for name, i in self.promise.rereads.items() if self.written else ():
            if name in self.written and self.walk.inputs[i] in line.reads:
                found = f"it reads the input {name!r}, to which forward has written since: {self.written[name]!r}"
                self._refuse("reread", ("input", i), found, "what was read before that, saved")

    def _overwrite(self, memory: Memory) -> None:
        """Memory that nobody reads as weights any more may be used for something else, under a name of its own."""
        buffer, names = self.buffers[memory], self.walk.names_of(memory)
        if len(names) != 1 or names[0] in buffer.names or ((buffer.place or "?")[0] == "input" and not buffer.last):
            self._refuse("discard", buffer.place, "it writes over gathered weights", "no writes to them")
        del self.buffers[memory]

    def _start(self, line: Line) -> None:
        i = len(self.starts)
        self.starts.append(line)
        if line.stream:
            self._elsewhere(line, ("start", i) if i < len(self.promise.starts) else None)
        if i >= len(self.promise.starts):
            self._refuse("order", None, "it starts a collective that the graph has not", f"{i} collectives")
        asked, place = self.promise.starts[i], ("start", i)
        if plain_name(line.name) != asked.operator or (asked.operator == "refresh" and line.group != asked.group):
            self._refuse("order", place, f"it starts another collective, as number {i + 1}", f"{asked.operator}")
        sent = [p for p in line.passed if p.memories and not p.writes] or [p for p in line.passed if p.memories]
        origins = set().union(*(self.origins[m] for p in sent for m in p.memories))
        numel = sent[0].numel if sent else None
        other = numel is not None and asked.numel is not None and numel != asked.numel
        if other or not {("input", k) for k in asked.inputs} <= origins:
            self._refuse(
                "order", place, f"as collective number {i + 1} it sends something else", "what the graph sends"
            )
        if asked.operator == "refresh":
            return
        brings = set(line.writes) | ({line.result} if line.result is not None else set())
        for p in sent:
            for memory in p.memories - brings:
                self.sent[memory].add(i)
        for memory in brings:
            self.under_way[memory] = self.came[memory] = place
            if asked.gathers:
                self.buffers[memory] = _Buffer(place)

    def _elsewhere(self, line: Line, place: Place) -> NoReturn:
        found = f"it runs on the stream {line.stream}, not on the one that the others run on"
        self._refuse("wait", place, found, "the stream that is current")

    def _wait(self, line: Line) -> None:
        found = line.reads
        places = {self._place_of(memory) for memory in found}
        if line.stream:
            self._elsewhere(line, next(iter(places), None))
        if None in places or not places:
            self._refuse("wait", None, "it waits for what no collective brings", "one wait for each collective")
        for memory in found:
            if memory not in self.under_way:
                place = self._place_of(memory)
                if self.waits[place] >= self._waits_asked(place):
                    self._refuse("wait", place, "it waits for what has come", "one wait for each collective")
            self.under_way.pop(memory, None)
            if memory in self.buffers:
                buffer = self.buffers[memory]
                buffer.names, buffer.last = frozenset(self.walk.names_of(memory)), line.when
        for place in places:
            assert place is not None
            self.waits[place] += 1
            if place[0] == "start" and place not in self.under_way.values():
                for starts in self.sent.values():
                    starts.discard(place[1])

    def _place_of(self, memory: Memory) -> Place:
        """Of what came to a memory: one of the results of a collective that has several comes with the others."""
        if memory not in self.came and isinstance(memory, tuple) and (place := self._place_of(memory[0])) is not None:
            self.came[memory] = place
            self.under_way.pop(memory[0], None)
        return self.came.get(memory)

    def _step(self, line: Line) -> None:
        group = line.group
        self.steps[group] += 1
        if self.steps[group] > self.promise.steps.count(group):
            self._refuse("step", self._home(group), f"it updates {group!r} once more", "one update")
        origins = set().union(*(self.origins[memory] for memory in line.reads))
        if not {("start", i) for i in self.promise.updates.get(group, ())} <= origins:
            self._refuse("step", self._home(group), f"it updates {group!r} by another gradient", "its own")
        for i in self.promise.homes.get(group, ()):
            memory = self.walk.inputs[i]
            place: Place = ("start", min(self.sent[memory])) if self.sent.get(memory) else self.under_way.get(memory)
            if place is not None:
                self._refuse("step", place, f"it updates {group!r} while its weights travel", "the wait before")
            self.stale[memory] = group

    def _return(self, line: Line) -> None:
        for i, memories in enumerate(line.values):
            for memory in memories:
                if memory in self.under_way:
                    self._refuse("wait", self.under_way[memory], "it returns what is under way", "the wait before")
                if memory in self.buffers:
                    self.buffers[memory].returned = True
            origins = set().union(*(self.origins[memory] for memory in memories))
            for k in self.promise.outputs.get(i, ()):
                if self.promise.starts[k].operator != "refresh" and ("start", k) not in origins:
                    self._refuse("order", ("start", k), f"output {i} is made of another collective's sum", "its own")
            if i in self.promise.saved:
                for k, text in self.writes.items():
                    if self.walk.inputs[k] in memories:
                        self.rewritten[self.promise.saved[i]] = text

    def _copies(self, line: Line) -> None:
        """The rule "copy"."""
        sources = [i for i, p in enumerate(line.passed) if p.reads and not p.memories.isdisjoint(self.buffers)]
        if not sources:
            return
        if line.kernel is not None:
            copies = line.kernel.copies
        elif line.name in (".clone", ".copy_") or plain_name(line.name) in _COPIES:
            copies = {-1: set(sources)}
        else:
            return
        for to, of in copies.items():
            for i in of & set(sources):
                if to == i:
                    continue
                numel = line.passed[i].numel if to == -1 else line.passed[to].numel
                for memory in line.passed[i].memories & self.buffers.keys():
                    self._copied(self.buffers[memory].place, numel)

    def _copied(self, place: Place, numel: int | None) -> None:
        weights = self.promise.weights.get(place)
        if weights is None or numel is None or numel not in weights.asked:
            return
        self.copied[place, numel] += 1
        if self.copied[place, numel] > weights.asked[numel]:
            found = f"it copies {numel} elements of a gathered weight"
            self._refuse("copy", place, found, f"{weights.asked[numel] or 'no'} copies, as in the graph")

    def _follow(self, line: Line) -> None:
        """What the memory that a line writes to is made of now."""
        origins = set().union(*(self.origins[memory] for memory in line.reads))
        if line.kind == "start":
            origins = origins | {("start", len(self.starts) - 1)}
        for memory in line.writes:
            self.origins[memory] = self.origins[memory] | origins
        if line.result is not None:
            self.origins[line.result] = origins
            if plain_name(line.name) == _DECODE:
                for memory in line.reads & self.buffers.keys():
                    self.buffers[line.result] = _Buffer(self.buffers[memory].place, line.when, decoded=True)

    # ---- all lines --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The rules of what must have been by the end."""
        promise = self.promise
        self.carried.finish()
        if len(self.starts) < len(promise.starts):
            i = len(self.starts)
            self._refuse("order", ("start", i), f"its collective number {i + 1} is never started", "every one")
        asked = {("start", i): start.waits for i, start in enumerate(promise.starts) if start.operator != "refresh"}
        asked |= {("input", i): waits for i, waits in promise.arriving.items()}
        for place, waits in asked.items():
            if self.waits[place] < waits:
                self._refuse("wait", place, "it is never waited for", "one wait for each collective")
        for group in promise.steps:
            if not self.steps[group]:
                self._refuse("step", self._home(group), f"{group!r} is never updated", "one update")
        for memory, buffer in self.buffers.items():
            after = next((line for line in self.starts if line.when > buffer.last), None)
            if buffer.returned or after is None or (buffer.place or "?")[0] == "input":
                continue
            if self.walk.released.get(memory, after.when) >= after.when:
                self.line = after
                found = "a gathered buffer that nothing uses any more is still there"
                self._refuse("discard", buffer.place, found, "its names deleted after its last use")

    def _waits_asked(self, place: Place) -> int:
        assert place is not None
        return self.promise.starts[place[1]].waits if place[0] == "start" else self.promise.arriving[place[1]]

    def _home(self, group: str) -> Place:
        return next((("input", i) for i in self.promise.homes.get(group, ())), None)

    def _refuse(self, rule: str, place: Place, found: str, expected: str) -> NoReturn:
        node = self.promise.place_of(place)
        group = self._group(place, node)
        line = self.line
        of = f", about {node.name!r}" if node is not None else ""
        of += f" of group {group!r}" if group else ""
        of += place_in_model(node) if node is not None else ""
        raise VerificationError(
            f"the code that Inductor generated breaks the rule {rule!r} at line {line.number}, "
            f"{line.text[:200]!r}{of}: {found}; expected: {expected}. The code was not run. This is a bug of zerofx or "
            "of Inductor, not of the model: please report it. docs/debugging.md says what to send, and what to try "
            "until it is mended.",
            rule,
            node.name if node is not None else "",
            group,
        )

    def _group(self, place: Place, node: Node | None) -> str | None:
        if place is not None and place[0] == "start":
            return self.promise.starts[place[1]].group or None
        tag = node.meta.get("zerofx") if node is not None else None
        return tag.group if tag is not None else None


_DECODE = "dequantize"
_COPIES = ("clone", "copy", "contiguous", "_to_copy")
