"""Changes to a finished graph that nobody thought about: any node, any argument, whatever comes of it.

`mutate` makes one, by chance, and says what it was. A graph that it leaves may compute the same still, or nothing.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from tests.passes.mutants import Graph, aten, c10d, inner
from zerofx import _torch
from zerofx.passes import Context, Reduction, edit
from zerofx.passes.ops import discard, release

_pytree = _torch.pytree
Change = Callable[[GraphModule, Context, random.Random], str | None]


def mutate(graph: Graph, rng: random.Random) -> tuple[str, str]:
    """Change ``graph`` in one place: the kind of change, and what it was."""
    gm, ctx = graph
    while True:
        change = rng.choice(CHANGES)
        what = change(gm, ctx, rng)
        if what is not None:
            return change.__name__, what


# ---- arguments ------------------------------------------------------------------------------------------------------


def another_operand(gm: GraphModule, ctx: Context, rng: random.Random) -> str | None:
    """A node reads another value of the same shape and dtype."""
    node = _any_call(gm, rng)
    leaves, spec = _pytree.tree_flatten((_operands(node), dict(node.kwargs)))
    places = [i for i, x in enumerate(leaves) if isinstance(x, Node)]
    if not places:
        return None
    place = rng.choice(places)
    others = [x for x in _before(node) if x is not leaves[place] and _alike(x, leaves[place])]
    if not others:
        return None
    old, leaves[place] = leaves[place], rng.choice(others)
    args, node.kwargs = _pytree.tree_unflatten(leaves, spec)
    node.args = (*node.args[: len(node.args) - len(args)], *args)
    return f"{node.name} reads {leaves[place].name} for {old.name}"


def another_constant(gm: GraphModule, ctx: Context, rng: random.Random) -> str | None:
    """A number, a dtype, a name among a node's arguments is another."""
    node = _any_call(gm, rng)
    call = inner(gm, node)
    leaves, spec = _pytree.tree_flatten((call.args, dict(call.kwargs)))
    places = [i for i, x in enumerate(leaves) if isinstance(x, (bool, int, float, str, torch.dtype))]
    if not places:
        return None
    place = rng.choice(places)
    old, new = leaves[place], _another(leaves[place], ctx, rng)
    if repr(new) == repr(old):
        return None
    leaves[place] = new
    call.args, call.kwargs = _pytree.tree_unflatten(leaves, spec)
    what = f"{node.name}: {new!r} for {old!r} (constant {place})"
    if rng.random() < 0.5:
        return what
    return f"{what}, and shapes to match" if propagate(gm) else None


def another_operator(gm: GraphModule, ctx: Context, rng: random.Random) -> str | None:
    """A node does something else with the same arguments."""
    node = _any_call(gm, rng)
    call = inner(gm, node)
    others = [x for family in _OPERATORS if call.target in family for x in family if x is not call.target]
    if not others:
        return None
    old, call.target = call.target, rng.choice(others)
    return f"{node.name}: {call.target} for {old}"


_OPERATORS: list[tuple[Any, ...]] = [
    (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    (aten.tanh.default, aten.relu.default, aten.exp.default, aten.neg.default, aten.clone.default),
    (aten.sum.dim_IntList, aten.amax.default, aten.mean.dim),
    (discard, release),
    (c10d.all_reduce.default, c10d.all_reduce_.default),
    (torch.ops.zerofx.all_gather_pairwise.default, c10d.all_gather_into_tensor.default),
]


def _another(value: Any, ctx: Context, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, 2 * value, value // 2, value + 32, value - 32, 0, 1, -1])
    if isinstance(value, float):
        return rng.choice([value + 1, 2 * value, value / 2, -value, 1.0, 0.0, value * (1 + 1e-4)])
    if isinstance(value, str):
        layouts = {ref.layout.name for ref in (*ctx.parameters.values(), *ctx.gradients.values())}
        return rng.choice(["sum", "avg", "max", ctx.process_group, ctx.reduce_group, *sorted(layouts)])
    return rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])


# ---- nodes ----------------------------------------------------------------------------------------------------------


def bypassed(gm: GraphModule, ctx: Context, rng: random.Random) -> str | None:
    """Who reads a node reads an input of it, of the same shape and dtype."""
    node = _any_call(gm, rng)
    inputs = [x for x in node.all_input_nodes if _alike(x, node)]
    if not inputs or not node.users:
        return None
    source = rng.choice(inputs)
    node.replace_all_uses_with(source)
    gm.graph.erase_node(node)
    return f"{node.name} is bypassed: {source.name} in its place"


def moved(gm: GraphModule, ctx: Context, rng: random.Random) -> str | None:
    """A node stands elsewhere, behind all that it reads and before all that read it."""
    nodes, order = list(gm.graph.nodes), edit.positions(gm.graph)
    node = _any_call(gm, rng)
    first = max([order[x] for x in node.all_input_nodes] + [_inputs_end(nodes)]) + 1
    last = min((order[x] for x in node.users), default=len(nodes) - 1)
    places = [i for i in range(first, last + 1) if i not in (order[node], order[node] + 1)]
    if not places:
        return None
    before = nodes[rng.choice(places)]
    before.prepend(node)
    return f"{node.name} stands before {before.name}"


def left_out(gm: GraphModule, ctx: Context, rng: random.Random) -> str | None:
    """A node that nothing reads is gone: a write, a discard."""
    statements = [x for x in gm.graph.find_nodes(op="call_function", target=discard) if not x.users]
    statements += [x for x in _calls(gm) if not x.users and x not in statements]
    if not statements:
        return None
    node = rng.choice(statements)
    gm.graph.erase_node(node)
    return f"{node.name} is left out"


def repeated(gm: GraphModule, ctx: Context, rng: random.Random) -> str | None:
    """A node runs twice; nothing reads the second, or everything that read the first."""
    node = _any_call(gm, rng)
    users = list(node.users) if rng.random() < 0.5 else []
    with gm.graph.inserting_after(node):
        again = gm.graph.node_copy(node)
    for user in users:
        user.replace_input_with(node, again)
    return f"{node.name} runs twice" + (", and the second is read" if users else "")


def unpinned(gm: GraphModule, ctx: Context, rng: random.Random) -> str | None:
    """A node whose order is pinned does not wait for one of what it waited for."""
    pinned = [x for x in _calls(gm) if _torch.pinned(x) is not None and x.args[0]]
    if not pinned:
        return None
    node = rng.choice(pinned)
    after = list(node.args[0])  # type: ignore[arg-type]
    gone = after.pop(rng.randrange(len(after)))
    node.args = (after, *node.args[1:])
    return f"{node.name} does not wait for {gone}"


# ---- outputs, and what the runtime is told --------------------------------------------------------------------------


def another_output(gm: GraphModule, ctx: Context, rng: random.Random) -> str | None:
    """The graph returns another value of the same shape and dtype at one place, or nothing."""
    values = edit.output_values(gm.graph)
    place = rng.randrange(len(values))
    old = values[place]
    others = [x for x in gm.graph.nodes if isinstance(old, Node) and x is not old and _alike(x, old)] + [None]
    values[place] = rng.choice(others)
    if values[place] is old:
        return None
    edit.set_output_values(gm.graph, values)
    return f"output {place} is {values[place]} for {old}"


def outputs_exchanged(gm: GraphModule, ctx: Context, rng: random.Random) -> str | None:
    """Two outputs change places, mostly two of one shape and dtype."""
    values = edit.output_values(gm.graph)
    i, j = rng.randrange(len(values)), rng.randrange(len(values))
    if values[i] is values[j] or not (_alike(values[i], values[j]) or rng.random() < 0.2):
        return None
    values[i], values[j] = values[j], values[i]
    edit.set_output_values(gm.graph, values)
    return f"outputs {i} and {j} change places"


def a_promise_changed(gm: GraphModule, ctx: Context, rng: random.Random) -> str | None:
    """What the runtime goes by is another: which parameter it saves, what inputs and extra outputs are."""
    promise = rng.choice(
        [
            ctx.found.saved_parameters,
            ctx.found.shards,
            ctx.found.reductions,
            ctx.found.kept,
            ctx.found.gathered,
            ctx.handover.kept_gathered,
        ]
    )
    name = next(name for name, value in [*vars(ctx.found).items(), *vars(ctx.handover).items()] if value is promise)
    keys = list(promise) if isinstance(promise, dict) else list(range(len(promise)))
    if not keys:
        return None
    i, j = rng.choice(keys), rng.choice(keys)
    if i != j and rng.random() < 0.7:
        promise[i], promise[j] = promise[j], promise[i]
        return f"{name}: {i} and {j} change places"
    if rng.random() < 0.3:
        del promise[i]
        return f"{name}: {i} is gone"
    return _another_entry(name, promise, i, ctx, rng)


def _another_entry(name: str, promise: Any, i: Any, ctx: Context, rng: random.Random) -> str | None:
    refs = [*ctx.parameters.values(), *ctx.gradients.values()]
    if name == "saved_parameters" and rng.random() < 0.5:
        position = rng.randrange(max(promise) + 2)
        promise[position] = promise[i]
        return f"{name}: {i} at {position} too"
    if name in ("saved_parameters", "kept"):
        promise[i] = rng.choice(refs)
        return f"{name}: {promise[i].slot.name} at {i}"
    if name == "reductions":
        layout, slots = promise[i].layout, list(promise[i].slots)
        if rng.random() < 0.5:
            slots = [rng.choice([ref.slot for ref in refs if ref.layout == layout])]
        else:
            slots.pop(rng.randrange(len(slots)))
        promise[i] = Reduction(layout, tuple(slots))
        return f"{name}: {[slot.name for slot in slots]} at {i}"
    if name == "kept_gathered" and ctx.saved:
        position = rng.choice(sorted(ctx.saved))
        promise[i] = promise[i]._replace(position=position)
        return f"{name}: {i} at {position}"
    return None


CHANGES: list[Change] = [
    another_operand,
    another_operand,
    another_constant,
    another_constant,
    another_operator,
    bypassed,
    moved,
    left_out,
    repeated,
    unpinned,
    another_output,
    outputs_exchanged,
    a_promise_changed,
]
"""Those that there are more ways of, more often."""


# ---- tools ----------------------------------------------------------------------------------------------------------


def _calls(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def _any_call(gm: GraphModule, rng: random.Random) -> Node:
    """One that the passes put there, half of the time."""
    calls = _calls(gm)
    ours = [node for node in calls if "zerofx" in node.meta]
    return rng.choice(ours if ours and rng.random() < 0.5 else calls)


def _operands(node: Node) -> tuple[Any, ...]:
    return node.args if _torch.pinned(node) is None else node.args[2:]


def _before(node: Node) -> list[Node]:
    found = []
    for other in node.graph.nodes:
        if other is node:
            break
        found.append(other)
    return found


def _inputs_end(nodes: list[Node]) -> int:
    return max((i for i, node in enumerate(nodes) if node.op == "placeholder"), default=-1)


def _alike(x: Any, y: Any) -> bool:
    if not isinstance(x, Node) or not isinstance(y, Node):
        return False
    a, b = x.meta.get("val"), y.meta.get("val")
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)


class _Propagate(Interpreter):
    def run_node(self, n: Node) -> Any:
        if n.target in (discard, release):
            return None
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            n.meta["val"] = value
        return value


def propagate(gm: GraphModule) -> bool:
    """Bring what nodes say of their values up to date; whether there are such values."""
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    try:
        log.disabled = True  # it reports what it raises, too
        with _torch.fake_mode_of(values):
            _Propagate(gm).run(*values, enable_io_processing=False)
    except Exception:  # operators refuse arguments in many ways
        return False
    finally:
        log.disabled = False
    return True
