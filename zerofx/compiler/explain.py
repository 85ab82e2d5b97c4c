"""Why a node of a rewritten graph is there, and why it stands where it stands.

::

    >>> print(record.explain("all_gather blocks.1"))
    forward: all_gather_into_tensor_default_2  # all_gather blocks.1
      brings   12 parameters, 200.7 kB: blocks.1.norm1.weight, blocks.1.norm1.bias, blocks.1.qkv.weight, ...
      made by  group: One collective per group: ...
      moved by prefetch: Gathers start ahead of their use, within a budget of live bytes; ...
      stands   1 group ahead of its use, before the wait for blocks.0: it travels while blocks.0 computes
      earlier  would be too much: 537.6 kB gathered at once, the budget is 401.4 kB
      for      models.py:74  for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)

Nothing of it is written down by the passes. Who made a node and who moved it is read off the graphs before and after
each pass; why it stands there, off the graph's order and bytes, as `zerofx.passes.schedule` counts them.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable

from torch.fx import Graph, Node

from zerofx.compiler.activations import given
from zerofx.compiler.listing import difference, node_line
from zerofx.compiler.printing import place_of, whole_bytes
from zerofx.compiler.rewriting import Rewriting
from zerofx.model.offload import OnDisk, names_of
from zerofx.model.units import format_bytes
from zerofx.passes import before_lower, edit
from zerofx.passes.context import Context, Tag
from zerofx.passes.kinds import NODE_KINDS, NodeKind
from zerofx.passes.own import Pass
from zerofx.passes.schedule import (
    Gather,
    budget_of,
    find_gathers,
    groups_ahead,
    live_bytes,
    room_in_flight,
    soonest,
)
from zerofx.runtime.optim.moved import Moved
from zerofx.runtime.state.account import AtRest

MOST_NAMES = 4
"""Parameters that are named; the others are counted."""

_BY_PASSES = ("made by", "moved by")
"""Questions whose answer is a pass, and what that is for: what it is for is said once."""

Why = list[tuple[str, str]]
"""What is said of a node: (which question, the answer)."""


def explain(trace: Rewriting, words: str) -> str:
    """What every node of zerofx's whose line has all of ``words`` (whole ones; a node's name will do) is there for.

    Neighbours of which the same is to be said, such as the views of a group's weights, are said together.

    Raises:
        ValueError: there is no such node in the graph.
    """
    reasons = Reasons(trace)
    found = [node for node in reasons.graph.nodes if node.name == words]
    found = found or [node for node in reasons.graph.nodes if has_words(node_line(node), words)]
    if not found:
        raise ValueError(
            f"no line of the {trace.context.phase} graph has {words!r} in it: give a node's name, or a kind and a "
            f"group as in its comment, such as {_example(reasons.graph)!r}. print(record) shows the groups, and "
            f'record.{trace.context.phase}.diff("group") every name.'
        )
    ours = [node for node in found if "zerofx" in node.meta]
    lines, purposes = [], set[str]()
    for (comment, why), alike in itertools.groupby(ours or found, lambda node: (_comment(node), reasons.why(node))):
        first, *others = (node.name for node in alike)
        all_of_them = f" to {others[-1]}, {1 + len(others)} alike" if others else ""
        lines.append(f"{trace.name}: {first}{all_of_them}{comment}")
        for question, answer in why:
            known = question in _BY_PASSES and answer in purposes
            lines.append(f"  {question:<8} {answer.partition(':')[0] if known else answer}")
        purposes |= {answer for question, answer in why if question in _BY_PASSES}
    return "\n".join(lines)


def _comment(node: Node) -> str:
    tag = node.meta.get("zerofx")
    return f"  # {tag.kind} {tag.group}" if tag else ""


def has_words(line: str, words: str) -> bool:
    """Whether each of ``words`` stands in ``line``, whole."""
    return set(words.split()) <= set(re.findall(r"[\w.#]+", line))


def purpose(pass_: Callable) -> str:
    """The first line of the file of a pass: what it is for. Of a user's: of its function's docstring."""
    if isinstance(pass_, Pass):
        return pass_.purpose or f"a pass of the user's, in {pass_.function.__module__}"
    return (sys.modules[pass_.__module__].__doc__ or "").partition("\n")[0]


def _example(graph: Graph) -> str:
    first = next((n for n in edit.tagged(graph, "all_gather", "refresh", "all_reduce", "reduce_scatter")), None)
    return f"{first.meta['zerofx'].kind} {first.meta['zerofx'].group}" if first is not None else "mm"


class History:
    """What the passes did to one graph.

    Attributes:
        graphs: pass -> the graph after it; "": as it was before all of them.
        made: a node's name -> the pass that inserted it.
        moved: a node's name -> the last pass that moved it, past a node of the model's, a wait for weights or a pack.
    """

    def __init__(self, trace: Rewriting) -> None:
        self.graphs: dict[str, Graph] = {"": trace.before.graph}
        self.made: dict[str, str] = {}
        self.moved: dict[str, str] = {}
        before = trace.before.graph
        for pass_, gm in trace.steps():
            name, after = pass_.__name__, gm.graph
            self.graphs[name] = after
            if name != "lower":  # only spells
                fixed = _fixed(before) & _fixed(after)
                old, new = _places(before, fixed), _places(after, fixed)
                self.made |= dict.fromkeys(new.keys() - old.keys(), name)
                self.moved |= {node: name for node in new.keys() & old.keys() if new[node] != old[node]}
            before = after

    def changes(self) -> dict[str, list[str]]:
        """Pass -> its marked lines (`zerofx.compiler.listing`)."""
        return {name: difference(old, new) for (_, old), (name, new) in itertools.pairwise(self.graphs.items())}


def _fixed(graph: Graph) -> set[str]:
    """The nodes that no pass moves."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    return {node.name for node in calls if "zerofx" not in node.meta or node.meta["zerofx"].kind in ("wait", "pack")}


def _places(graph: Graph, fixed: set[str]) -> dict[str, int]:
    """For each node how many of ``fixed`` stand before it."""
    places, n = {}, 0
    for node in graph.nodes:
        places[node.name] = n
        n += node.name in fixed
    return places


class Reasons:
    """Answers about the nodes of one graph, as it is before `lower`."""

    def __init__(self, trace: Rewriting, history: History | None = None) -> None:
        self.trace = trace
        self.context: Context = trace.context
        self.history: History = history or History(trace)
        self.graph: Graph = self.history.graphs[before_lower(trace.context)]
        self.order: dict[Node, int] = edit.positions(self.graph)
        self.gathers: list[Gather]
        self.held: list[Gather]
        self.gathers, self.held = find_gathers(self.graph, self.context)
        self.ahead: dict[Node, int] = groups_ahead(self.graph)
        self.purposes: dict[str, str] = {pass_.__name__: purpose(pass_) for pass_ in trace.passes}

    def why(self, node: Node) -> Why:
        """What there is to say of ``node``, in the order to read it."""
        tag = node.meta.get("zerofx")
        if tag is None and node.name not in self.history.made:
            return [("is", "the model's own, or AOTAutograd's"), *self._saving(node), *self._line(node)]
        said: Why = []
        tag = tag or Tag("", "")
        kind = NODE_KINDS.get(tag.kind, NodeKind(""))
        if kind.about:
            said.append((kind.about, self._what(node, tag)))
        for question, passes in zip(_BY_PASSES, (self.history.made, self.history.moved)):
            if node.name in passes:
                name = passes[node.name]
                said.append((question, f"{name}: {self.purposes[name]}"))
        said += _PLACES[tag.kind](self, node, tag.group) if tag.kind in _PLACES else []
        if kind.stands:
            said.append(("stands", kind.stands if isinstance(kind.stands, str) else kind.stands(node, self.context)))
        if kind.transfer:
            said += self._carried(node, tag.kind)
        facts = self.context.facts(AtRest)
        if tag.kind in _STATE and tag.group in facts.on_host:
            said.append(("on host", f"its {names_of(facts.kinds_on_host)}, where the optimizer steps"))
        there = facts.on_disk
        if there is not None and tag.kind in _SAID_OF_DISKS:
            said.append(("on disk", self._on_disk(there, tag.group)))
            said += self._update(there, tag.group) if tag.kind == "step" else []
        return [*said, *self._line(node)]

    def _what(self, node: Node, tag: Tag) -> str:
        """Bytes and parameters that a collective or a buffer is about."""
        about = node.args[0] if tag.kind == "discard" else node.args[1] if tag.kind == "wait_offload" else node
        size = format_bytes(whole_bytes(about))  # type: ignore[arg-type]
        if NODE_KINDS[tag.kind].counts_as == "gradients":
            reduced = [(r.layout.name, slot) for r in self.context.found.reductions for slot in r.slots]
            slots = [slot for group, slot in reduced if tag.group in (group, slot.name)]
        else:
            slots = [ref.slot for ref in self.context.parameters.values() if ref.layout.name == tag.group]
        names = list(dict.fromkeys(slot.name for slot in slots))
        more = f", {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        return f"{size}: {', '.join(names[:MOST_NAMES])}{more}" if names else size

    def _line(self, node: Node) -> Why:
        place = place_of(node).replace("\0", "  ")
        return [("for", place)] if place else []

    def _saving(self, node: Node) -> Why:
        """What an `activation_budget`, or `partition_activations`, has to do with a node of the model's."""
        chosen, phase = self.trace.activations, self.context.phase
        parts = [part for part in edit.tagged(self.graph, "part") if part.meta["zerofx"].group == node.name]
        if parts:
            return [("then", f"a part is saved: {parts[0].args[1]} tensor-parallel ranks have it alike")]
        if any(edit.is_kind(user, "offload_activation") for user in node.users):
            return [("then", "it is saved, and leaves the device: backward brings it back")]
        if chosen is None or node.name not in chosen.recomputed:
            return []
        if phase == "forward":
            return [("then", f"it is not saved: backward computes it again ({given(chosen)})")]
        return [("again", f"forward has not saved it ({given(chosen)})")]

    def _carried(self, node: Node, kind: str) -> Why:
        """When a transfer was started, and who waits for it."""
        if not kind.startswith("wait"):
            (wait,) = (user for user in node.users if user.meta["zerofx"].kind == f"wait_{kind}")
            start, other, words = node, wait, "waits"
        else:
            start, other, words = node.args[0], node.args[0], "started"  # type: ignore[assignment]
            wait = node
        between = [n.name for n in self._between(start, wait) if self._computes(n)]
        meanwhile = (
            f"{len(between)} of the model's operators compute meanwhile" if between else "nothing computes meanwhile"
        )
        said = [(words, f"{other.name}: {meanwhile}")]
        if kind in ("wait_reload", "wait_reload_activation"):
            readers = [n for n in node.users if n.meta.get("zerofx", Tag("", "")).kind != "discard"]
            said.append(("then", f"{', '.join(n.name for n in readers[:MOST_NAMES])} reads it"))
        return said

    def _on_disk(self, there: OnDisk, group: str) -> str:
        if group in there.groups:
            return f"its {there.names}, in {there.path}: as of {there.which}"
        return f"nothing of it: the group is none of the {there.which} in {there.path}"

    def _update(self, there: OnDisk, group: str) -> Why:
        """What the update of a group moves through a file."""
        layout = next(r.layout for r in self.context.found.reductions if r.layout.name == group)
        nbytes = Moved.of(layout, there).state
        return [("moves", f"zerofx.AdamW reads {format_bytes(nbytes)} and writes as much")] if nbytes else []

    def _index(self, group: str) -> int:
        return next(i for i, gather in enumerate(self.gathers) if gather.group == group)

    # ------------------------------------------------------------------ places, kind by kind

    def _gather(self, node: Node, group: str) -> Why:
        ahead, i = self.ahead[node], self._index(group)
        if ahead:
            next_, where = self.gathers[i - ahead], "before the wait for"
            if self._segment(i) and any(self._computes(n) for n in self._between(node, next_.waits[0])):
                where = "right after the last use of what is large beside it, and ahead of the wait for"
            words = f"{ahead} group{'s' * (ahead > 1)} ahead of its use, {where} {next_.group}"
            place = f"{words}: it travels while {next_.group} computes"
        elif self._segment(i) == 0:
            place = "where the graph begins: it travels while what comes before its wait computes"
        else:
            place = "right before its own wait: nothing computes meanwhile"
        return [("stands", place), ("earlier", self._not_earlier(node, i))]

    def _not_earlier(self, node: Node, i: int) -> str:
        starts = [self._segment(j) for j in range(len(self.gathers))]
        if starts[i] == 0 or i == 0:
            return "is no place: nothing of the model's comes before it"
        if starts[i] == starts[i - 1]:
            return f"would be ahead of the gather of {self.gathers[i - 1].group}: they start in the order of their use"
        earlier = starts[i] - 1
        live = live_bytes(self.gathers, starts, self.held)[earlier] + self.gathers[i].nbytes
        budget, by = budget_of(self.gathers, self.held, self.context), "memory_budget"
        if live <= budget and starts[i] == soonest(self.gathers, self.held, self.context)[i]:
            if self.gathers[i].group in self.context.reloaded:
                return "would let compute wait for its shard, which comes from the host: one group ahead is the most"
            return "would hold up the reductions that queue behind it: in backward two groups ahead are the most"
        if self.context.memory_budget is None:
            by = "without memory_budget what two groups ahead take and a quarter of the largest"
        return f"would be too much: {format_bytes(live)} gathered at once; the budget is {format_bytes(budget)}, {by}"

    def _segment(self, i: int) -> int:
        """In which of `schedule`'s segments gather i starts: 0 before anything computes."""
        start: Node = self.gathers[i].waits[0].args[0]  # type: ignore[assignment]
        segment = i + 1 - self.ahead[start]
        first = next((self.order[n] for n in self.graph.nodes if self._computes(n)), len(self.order))
        return 0 if segment == 1 and self.order[start] < first else segment

    @staticmethod
    def _computes(node: Node) -> bool:
        return node.op == "call_function" and "zerofx" not in node.meta

    def _between(self, first: Node, last: Node) -> list[Node]:
        return list(self.graph.nodes)[self.order[first] + 1 : self.order[last]]

    def _wait(self, node: Node, group: str) -> Why:
        if any(user.op == "output" for user in node.users):
            held = "it stays gathered: backward needs it first, and the budget has room (`keep`)"
            return [("stands", "before the group's first use"), ("then", held)]
        return [("stands", "before the group's first use")]

    def _refresh(self, node: Node, group: str) -> Why:
        brought = "the gather itself was started before the graph ran"
        if self.context.in_common:
            brought = "ranks have it in common, and had written their parts before the graph ran"
        return [("stands", f"before the group's first use; {brought}")]

    def _discard(self, node: Node, group: str) -> Why:
        return [("stands", "after the last reader of the group's gathered weights")]

    def _reduction(self, node: Node, group: str) -> Why:
        return [("stands", "right after the last of these gradients to be there")]

    def _wait_grad(self, node: Node, group: str) -> Why:
        if self.context.replicas > 1 and any(n.meta["zerofx"].kind == "sum_replicas" for n in node.users):
            return [("stands", "after the start of the next reduction: what goes to the replicas is to start early")]
        later = (n for n in edit.tagged(self.graph, "pack") if self.order[n] > self.order[node])
        following = next((n.meta["zerofx"].group for n in later), None)
        if following is None:
            return [("stands", "at the end: there is nothing left to compute meanwhile")]
        waits = edit.tagged(self.graph, "wait_grad")
        sizes = [whole_bytes(wait.args[0]) for wait in waits]  # type: ignore[arg-type]
        room = room_in_flight(sizes)[[wait.meta["zerofx"].group for wait in waits].index(following)]
        much = f"with it, more than {format_bytes(room)} would be in flight"
        return [("stands", f"before the packing of {following}: {much}")]

    def _gathered(self, node: Node, group: str) -> Why:
        return [("stands", "among the inputs: forward left the group gathered, so that it is not gathered again")]


_PLACES: dict[str, Callable[[Reasons, Node, str], Why]] = {
    "all_gather": Reasons._gather,
    "wait": Reasons._wait,
    "refresh": Reasons._refresh,
    "discard": Reasons._discard,
    "reduce_scatter": Reasons._reduction,
    "all_reduce": Reasons._reduction,
    "wait_grad": Reasons._wait_grad,
    "gathered": Reasons._gathered,
}
_STATE = ("reload", "wait_reload", "offload", "wait_offload")
_SAID_OF_DISKS = ("all_gather", "refresh", "reduce_scatter", "step", *_STATE)
