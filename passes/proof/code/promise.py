"""What the final graph asks of the code that is generated for it.

The graph is read before the code generator runs, because that rewrites the graph. The passes are not asked: a node's
operator says what it is, as `verify` has proved. Tags name the groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from zerofx._torch import OpOverload, runs_again
from zerofx.passes import edit
from zerofx.passes.context import Context
from zerofx.passes.proof.facts import REFRESH, STEP
from zerofx.passes.proof.meaning import Op
from zerofx.passes.travel import GATHERS, communicates

Place = tuple[str, int] | None
"""("start", i): what the collective i brings; ("input", i): what input i holds; ("carried", i): what start or wait i of
state that lives elsewhere is about."""

CARRIES = {
    "reload": "reload",
    "offload": "offload",
    "offload_activation": "activation",
    "reload_activation": "activation",
}
CARRIES |= {f"wait_{operator}": rule for operator, rule in CARRIES.items()}
"""The operators of `zerofx.features.offload.operators`, and the rules that they are under."""


@dataclass
class Start:
    """One collective, in the order of the graph.

    Attributes:
        node, group, operator: of it; the operator without namespace, overload and what says where its result goes.
        gathers: whether what it brings is read as weights.
        waits: how many there are for it.
        numel: of what it sends.
        inputs: which of the graph's inputs it sends, where that can be said.
    """

    node: Node
    group: str
    operator: str
    gathers: bool
    waits: int = 0
    numel: int | None = None
    inputs: set[int] = field(default_factory=set)


@dataclass
class Carry:
    """A start or a wait of state that lives elsewhere, in the order of the graph.

    Attributes:
        node, operator: of it.
        constants: its arguments that are no tensors.
        input: which of the graph's inputs it is about, if it brings what that stands for.
        outputs: those that say that it has left.
    """

    node: Node
    operator: str
    constants: tuple[Any, ...]
    input: int | None = None
    outputs: tuple[int, ...] = ()

    @property
    def rule(self) -> str:
        return CARRIES[self.operator]

    @property
    def waits(self) -> bool:
        return self.operator.startswith("wait")

    @property
    def yields(self) -> bool:
        return self.operator.removeprefix("wait_") in ("reload", "reload_activation")


@dataclass
class Weights:
    """A memory that weights are read from.

    Attributes:
        node, group: of it.
        asked: by a number of elements that a weight, a part of one or the whole has, how many copies of so many the
            graph may want: one for each time that it is read, of as many as are read, and of as many as a result has
            that moves them (``repeat``, ``cat``). Matrix products want none: they read it where it is.
    """

    node: Node
    group: str
    asked: Counter[int]


@dataclass
class Promise:
    """The order and number of what matters, by place.

    Attributes:
        inputs: the graph's placeholders.
        starts: all collectives, `zerofx.refresh` among them.
        arriving: inputs that something is on its way to when the graph begins, and how often they are waited for.
        weights: by place.
        homes: group -> the inputs that its update writes to.
        steps: the groups that are updated.
        outputs: output -> the collectives whose sum it is.
        updates: the same of what groups are updated by.
        saved: output -> the name under which backward gets an input that forward returns.
        rereads: inputs that backward reads where no checkpoint has said so, by name.
        carried: all starts and waits of state that lives elsewhere.
    """

    inputs: list[Node]
    starts: list[Start] = field(default_factory=list)
    arriving: Counter[int] = field(default_factory=Counter)
    weights: dict[Place, Weights] = field(default_factory=dict)
    homes: dict[str, list[int]] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    outputs: dict[int, set[int]] = field(default_factory=dict)
    updates: dict[str, set[int]] = field(default_factory=dict)
    saved: dict[int, str] = field(default_factory=dict)
    rereads: dict[str, int] = field(default_factory=dict)
    carried: list[Carry] = field(default_factory=list)

    @staticmethod
    def of(gm: GraphModule, ctx: Context) -> Promise:
        """Read a graph that all passes have been through."""
        inputs = gm.graph.find_nodes(op="placeholder")
        promise = Promise(inputs)
        ops = {node: Op.of(node) for node in gm.graph.nodes if node.op == "call_function"}
        users: dict[Node, list[Op]] = {}
        for op in ops.values():
            for node in dict.fromkeys(op.inputs):
                users.setdefault(node, []).append(op)
        place = {node: i for i, node in enumerate(inputs)}
        started: dict[Node, int] = {}
        for op in ops.values():
            if _starts(op):
                started[op.node] = len(promise.starts)
                promise.starts.append(_start(op, ops, place))
            elif op.target is STEP:
                promise.steps.append(op.args[1])
                promise.updates[op.args[1]] = _behind(op.inputs, ops, started)
            elif _is_carry(op):
                promise.carried.append(_carry(op, place, edit.output_values(gm.graph)))
        promise._find_waits(ops.values(), started, place)
        promise._find_weights(users, started)
        promise._find_outputs(gm, ctx, ops, started)
        for i, node in enumerate(inputs):
            if _kind(node) in ("shard", "replica"):
                promise.homes.setdefault(_group(node), []).append(i)
            if ctx.phase == "backward" and _is_reread(node, users):
                promise.rereads[node.name] = i
        return promise

    @property
    def asks(self) -> bool:
        """Whether there is anything that code could do wrong."""
        return bool(self.starts or self.arriving or self.weights or self.steps or self.carried)

    def place_of(self, place: Place) -> Node | None:
        """The node of the graph that a place is."""
        if place is None:
            return None
        kind, i = place
        if kind == "carried":
            return self.carried[i].node
        return self.starts[i].node if kind == "start" else self.inputs[i]

    def _find_waits(self, ops: Iterable[Op], started: dict[Node, int], place: dict[Node, int]) -> None:
        for op in ops:
            if op.target is not _WAIT:
                continue
            source = op.inputs[0]
            while source not in started and source not in place and source.op == "call_function":
                source = source.all_input_nodes[0]  # an item of a coalesced collective's results, or a view
            if source in started:
                self.starts[started[source]].waits += 1
            elif source in place:
                self.arriving[place[source]] += 1

    def _find_weights(self, users: dict[Node, list[Op]], started: dict[Node, int]) -> None:
        """Where weights are read from, and who may want copies."""
        roots: dict[Node, Place] = {node: ("start", i) for node, i in started.items() if self.starts[i].gathers}
        roots |= {n: ("input", i) for i, n in enumerate(self.inputs) if _kind(n) in ("gathered", "replica")}
        for root, place in roots.items():
            asked: Counter[int] = Counter()
            moved: Counter[int] = Counter()
            found, todo = {root}, [root]
            while todo:
                node = todo.pop()
                value = node.meta.get("val")
                numel = value.numel() if isinstance(value, torch.Tensor) else None
                if isinstance(numel, int):
                    asked[numel] += 0
                for op in users.get(node, ()):
                    if op.node in found:
                        continue
                    if op.target is _WAIT or plain_name(op.target) == "zerofx.dequantize" or op.shares_memory():
                        found.add(op.node)
                        todo.append(op.node)
                    elif isinstance(numel, int) and not _is_product(op):
                        times = op.times(node)
                        asked[numel] += times
                        moved.update({size: times for size in _moved(op, users) if size != numel})
            asked.update({size: times for size, times in moved.items() if size in asked})
            self.weights[place] = Weights(root, _group(root), asked)

    def _find_outputs(self, gm: GraphModule, ctx: Context, ops: dict[Node, Op], started: dict[Node, int]) -> None:
        values = edit.output_values(gm.graph)
        for i, value in enumerate(values):
            if not isinstance(value, Node):
                continue
            if value.op == "placeholder" and i in ctx.saved:
                self.saved[i] = value.name
            if i < len(values) - len(ctx.found.reductions) or ctx.steps:
                continue
            # Inductor makes an empty gradient of nothing, and leaves its reduction to itself.
            if found := {k for k in _behind([value], ops, started) if self.starts[k].numel != 0}:
                self.outputs[i] = found


def _start(op: Op, ops: dict[Node, Op], place: dict[Node, int]) -> Start:
    source = op.inputs[0]
    value = source.meta.get("val")
    numel = value.numel() if isinstance(value, torch.Tensor) else None
    found = Start(op.node, _group(op.node), plain_name(op.target), op.target in GATHERS)
    found.gathers = found.gathers and _kind(op.node) == "all_gather"
    found.numel = numel if isinstance(numel, int) else None
    if op.target is REFRESH:
        found.group, found.numel = op.args[1], None
    todo = [source]
    while todo:
        node = todo.pop()
        if node in place:
            found.inputs.add(place[node])
        elif node in ops and _kind(node) in ("narrow", "quantize", "refresh", "reload", "wait_reload"):
            todo += ops[node].inputs
    return found


def _carry(op: Op, place: dict[Node, int], outputs: list[Any]) -> Carry:
    carry = Carry(op.node, plain_name(op.target), tuple(arg for arg in op.args if not isinstance(arg, Node)))
    if carry.yields:
        carry.input = place.get(op.args[1 if carry.waits else 0])
    elif carry.waits:
        carry.outputs = tuple(i for i, value in enumerate(outputs) if value is op.node)
    return carry


def _behind(values: Iterable[Node], ops: dict[Node, Op], started: dict[Node, int]) -> set[int]:
    """The collectives that zerofx's own nodes lead to, from ``values`` up, but for updates."""
    found, todo, seen = set(), list(values), set()
    while todo:
        node = todo.pop()
        if node in seen or node not in ops:
            continue
        seen.add(node)
        if node in started and ops[node].target is not REFRESH:
            found.add(started[node])
        elif _kind(node) in _ON_THE_WAY:
            todo += ops[node].inputs
    return found


def plain_name(target: Any) -> str:
    """``all_reduce`` of ``_c10d_functional.all_reduce_.default``: Inductor may choose where a result goes."""
    name = str(target)
    return name.split(".")[1].removesuffix("_out").removesuffix("_") if "." in name else name


def _is_reread(node: Node, users: dict[Node, list[Op]]) -> bool:
    """Whether anything reads it, itself or through views, that no checkpoint computes once more."""
    todo = [node]
    while todo:
        for op in users.get(todo.pop(), ()):
            if not runs_again(op.node):
                if not op.shares_memory():
                    return True
                todo.append(op.node)
    return False


def _is_carry(op: Op) -> bool:
    return isinstance(op.target, OpOverload) and op.target.namespace == "zerofx" and plain_name(op.target) in CARRIES


def _starts(op: Op) -> bool:
    return communicates(op.target) or op.target is REFRESH


def _is_product(op: Op) -> bool:
    return isinstance(op.target, OpOverload) and op.target._schema.name in _PRODUCTS


def _moved(op: Op, users: dict[Node, list[Op]]) -> set[int]:
    """The sizes at which ``op`` and what follows it may write the elements that it has read, without a change."""
    sizes, found, todo = set(), {op.node}, [op]
    while todo:
        each = todo.pop()
        if plain_name(each.target) not in _MOVES and not each.shares_memory():
            continue
        if isinstance(each.value, torch.Tensor) and isinstance(each.value.numel(), int):
            sizes.add(each.value.numel())
        todo += [user for user in users.get(each.node, ()) if user.node not in found]
        found.update(user.node for user in todo)
    return sizes


def _kind(node: Node) -> str:
    tag = node.meta.get("zerofx")
    return tag.kind if tag is not None else ""


def _group(node: Node) -> str:
    tag = node.meta.get("zerofx")
    return tag.group if tag is not None else ""


_ON_THE_WAY = (
    "wait_grad wait_replicas sum_replicas given gradient reduce_scatter dequantize ahead".split()
    + "step offload wait_offload".split()
)
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_MOVES = ("repeat", "cat", "flip", "rev", "roll", "index", "clone", "_to_copy", "convert_element_type")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
