"""A graph's shadow: what a rank does that takes part in a graph which it does not run (``uneven=True``).

Of a rewritten graph it is the collectives and what leads from shards to them. In the place of what the model computes
there are zeros, so that a rank which shadows gives each reduction nothing, or what `zerofx.no_sync` kept::

    shard_h_0                                             shard_h_0
    full = wait(all_gather(shard_h_0))          ─────▶    wait(all_gather(shard_h_0))
    y = mm(x, as_strided(full, …))
    pack = cat([mm(dy_t, x).view(-1), zeros])             pack = cat([zeros, zeros])
    shard = wait(reduce_scatter(pack)) / M                shard = wait(reduce_scatter(pack)) / M

It is data: names of operators, numbers and dtypes (`zerofx.runtime.ranks.turns.Shadow`). A rank may take part in what
it has never traced. Names of groups stand for its own, and the averaged gradients go to ``.grad`` as after the graph:
those of which some rank has said that it has one (`zerofx.runtime.ranks.used`).

Ranks whose graphs have the same collectives run them together, by turns or not: `Schedule.digest` tells these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from zerofx._torch import backend_name, call_instead, resolve_process_group
from zerofx.compiler.branches import by_rank
from zerofx.model.layout import Slot
from zerofx.passes import edit
from zerofx.passes.context import Context
from zerofx.passes.proof.meaning import Op
from zerofx.passes.travel import communicates
from zerofx.runtime.ranks.agree import Schedule
from zerofx.runtime.ranks.turns import SHADOWS, Shadow, Turns
from zerofx.runtime.ranks.watch import watch_of
from zerofx.runtime.ranks.watched import watched
from zerofx.runtime.state.group import Family, ShardGroup

_BUFFERS = ("shard", "replica")
_OF_WEIGHTS = ("weight", "widen", "rebuild", "gathered")
"""What passes make of weights for the model. A gradient may be one of these, and of a shadow it is zeros."""
_wait = torch.ops._c10d_functional.wait_tensor.default
Value = tuple[Any, ...]
"""What a step reads: ``("step", place)``, ``("zeros", shape, dtype)``, ``("buffer", group)``, ``("is", constant)``."""


def shadow_of(
    gm: GraphModule, before: GraphModule, ctx: Context, family: int, schedule: Schedule, timeout: float | None
) -> Shadow | None:
    """Of a graph that all passes have been through; None where it has no collectives, nor starts any.

    Raises:
        ValueError: it has collectives of the model's own.
    """
    reduces = ctx.phase == "backward" and ctx.sync != "keep"
    outputs = edit.output_values(gm.graph)
    reduced = outputs[len(outputs) - len(ctx.found.reductions) :] if reduces and ctx.found.reductions else []
    refreshed = [layout.name for layout in ctx.found.shards] if ctx.stage in (1, 2) else []
    steps, places = _steps(gm, ctx, reduced)
    if not refreshed and not steps:
        return None
    given = [
        (places[node], layout.name, [slot.name for slot in (*mine, *others)])
        for node, (layout, mine, others) in zip(reduced, by_rank(before, ctx))
    ]
    what = {
        "schedule": schedule.to_json(),
        "process_group": ctx.process_group,
        "timeout": timeout,
        "refreshed": refreshed,
        "steps": steps,
        "given": given,
    }
    return Shadow("graph", family, what, reduces=bool(given), same=(schedule.digest, refreshed))


def _steps(gm: GraphModule, ctx: Context, reduced: list[Node]) -> tuple[list[Value], dict[Node, int]]:
    """The calls, and kept gradients, that are the shadow's, and the place of each among them."""
    ops = {node: Op.of(node) for node in gm.graph.nodes if node.op == "call_function"}
    starts = [op for op in ops.values() if communicates(op.target)]
    if foreign := next((op for op in starts if not _is_ours(op.node)), None):
        raise ValueError(
            f"uneven=True with a collective of the model's own, {foreign.target}, in {ctx.name}: ranks that run "
            "another graph cannot take part in it. Leave uneven= out, or the collective."
        )
    found = {node for node, op in ops.items() if _is_ours(node) and (communicates(op.target) or op.target is _wait)}
    found |= {*reduced}
    todo = list(found)
    while todo:
        new = [x for x in ops[todo.pop()].inputs if _is_followed(x) and x not in found]
        found.update(new)
        todo += [x for x in new if x in ops]
    kept = dict(zip(edit.tagged(gm.graph, "kept"), ctx.found.kept))
    places: dict[Node, int] = {}
    steps: list[Value] = []
    for node in gm.graph.nodes:
        if node not in found:
            continue
        places[node] = len(steps)
        if node in kept:
            ref, value = kept[node], node.meta["val"]
            steps.append(("kept", ref.layout.name, ref.slot.name, list(map(int, value.shape)), value.dtype))
        else:
            op = ops[node]
            steps.append((str(op.target), _as_data(list(op.args), places), _as_data(dict(op.kwargs), places)))
    return steps, places


def _is_ours(node: Node) -> bool:
    return "zerofx" in node.meta


def _is_followed(node: Node) -> bool:
    """Whether a shadow computes ``node`` as the graph does: a pass inserted it, on the way of shards or gradients."""
    if not _is_ours(node):
        return False
    kind = node.meta["zerofx"].kind
    return kind == "kept" or (node.op == "call_function" and kind not in _OF_WEIGHTS)


def _as_data(x: Any, places: dict[Node, int]) -> Any:
    """An argument as data."""
    if isinstance(x, Node):
        if x in places:
            return ("step", places[x])
        if edit.is_kind(x, *_BUFFERS):
            return ("buffer", x.meta["zerofx"].group)
        value = x.meta["val"]
        return ("zeros", list(map(int, value.shape)), value.dtype)
    if isinstance(x, (list, tuple)):
        return [_as_data(item, places) for item in x]
    if isinstance(x, dict):
        return {key: _as_data(item, places) for key, item in x.items()}
    return ("device",) if isinstance(x, torch.device) else ("is", x)


# ---- taking part --------------------------------------------------------------------------------------------------


def _take_part(family: Family, what: dict[str, Any]) -> None:
    groups = {group.layout.name: group for group in family.groups()}
    for name in what["refreshed"]:
        groups[name].weights.refresh()
    used = family.send_used(family.marked(_kept_slots(what, groups))) if what["given"] else None

    def run(_: list[Any]) -> list[tuple[str, list[str], torch.Tensor]]:
        return _run(what, groups)

    ran = watched(run, Schedule.from_json(what["schedule"]), what["process_group"], what["timeout"])
    for name, names, gradient in ran([]):
        assert used is not None
        slots = tuple(slot for slot in groups[name].layout.slots if slot.name in names)
        groups[name].accumulate(family.used_anywhere(used, groups[name], slots), gradient, checked=True)


def _kept_slots(what: dict[str, Any], groups: dict[str, ShardGroup]) -> Iterator[tuple[str, Slot]]:
    """Of which parameters this rank has a gradient to give: by group and slot."""
    for kind, *rest in what["steps"]:
        if kind == "kept":
            name, slot, *_ = rest
            yield from ((name, kept) for kept in groups[name].gradients.kept_slots() if kept.name == slot)


def _run(what: dict[str, Any], groups: dict[str, ShardGroup]) -> list[tuple[str, list[str], torch.Tensor]]:
    """Run the steps; returns the averaged gradients: group, slots, tensor."""
    steps = what["steps"]
    values: dict[int, Any] = {}
    last = {at: len(steps) for at, _, _ in what["given"]}
    for i, step in enumerate(steps):
        for at in _read(step):
            last[at] = max(last.get(at, 0), i)
    for i, step in enumerate(steps):
        values[i] = _kept(step, groups) if step[0] == "kept" else _call(step, values, groups)
        for at in [at for at in values if last.get(at, at) <= i]:
            del values[at]
    for name in what["refreshed"]:
        _wait(groups[name].weights.buffer)
    return [(name, slots, values[at]) for at, name, slots in what["given"]]


def _read(x: Any) -> Iterable[int]:
    """The steps that ``x`` reads."""
    if isinstance(x, tuple) and x and x[0] == "step":
        yield x[1]
        return
    for item in x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ():
        yield from _read(item)


def _kept(step: Value, groups: dict[str, ShardGroup]) -> torch.Tensor:
    _, name, slot, shape, dtype = step
    group = groups[name]
    kept = group.gradients.take_kept(next(s for s in group.layout.slots if s.name == slot))
    return torch.zeros(shape, dtype=dtype, device=group.device) if kept is None else kept.to(dtype)


def _call(step: Value, values: dict[int, Any], groups: dict[str, ShardGroup]) -> Any:
    target, args, kwargs = step
    device = next(iter(groups.values())).device

    def meant(x: Any) -> Any:
        if isinstance(x, list):
            return [meant(item) for item in x]
        if isinstance(x, dict):
            return {key: meant(item) for key, item in x.items()}
        kind, *rest = x
        if kind == "zeros":
            return torch.zeros(rest[0], dtype=rest[1], device=device)
        if kind == "buffer":
            return groups[rest[0]].weights.buffer
        return {"step": lambda: values[rest[0]], "is": lambda: rest[0], "device": lambda: device}[kind]()

    return _operator(target)(*meant(args), **meant(kwargs))


def _operator(name: str) -> Callable[..., Any]:
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


SHADOWS["graph"] = _take_part


# ---- a module whose graphs run by turns ---------------------------------------------------------------------------


def take_turns(family: Family, name: str) -> None:
    """The graphs of ``family`` run by turns, and may be different ones on each rank. A collective."""
    if (watch := watch_of(name)) is None:
        return
    if watch.turns is None:
        group, own = resolve_process_group(name), name
        if backend_name(group, torch.device("cpu")) != "gloo":
            made: Any = torch.distributed.new_group(
                torch.distributed.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
            )
            watch.names.add(own := made.group_name)
        message = ("uneven=True", "message", "what runs next", 24, torch.int64)
        watch.turns = Turns(own, watch.rank, watch.store, lambda: watch.alone(*message))
    watch.turns.families[family.number] = weakref.ref(family)
    family.turns = watch.turns


def end_forwards(module: nn.Module, turns: Turns) -> None:
    """A call of ``module`` returns once no rank runs a graph of a forward any more."""
    call: Any = module._compiled_call_impl

    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        turns.end_forward()
        return outputs

    call_instead(module, forward)
