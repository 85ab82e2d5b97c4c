"""Runs a finished graph on all ranks in one process: node by node, each node on every rank before the next.

Collectives are not sent anywhere: they see the values of all ranks. What is under way is not a number until it was
waited for, and what was sent must still be there by then. What was discarded cannot be read.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from zerofx import _torch
from zerofx.features.lookups import operators as lookups_ops
from zerofx.passes import ops
from zerofx.passes.proof.facts import ALL_REDUCES, REFRESH, STEP
from zerofx.passes.proof.meaning import Op
from zerofx.passes.travel import GATHERS, SCATTERS

_pytree = _torch.pytree
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_zerofx = torch.ops.zerofx
_ASKS_FOR_ITS_RANK = (_zerofx.own_part.default, _zerofx.own_rows.default, _zerofx.sum_rows.default)
_PAIRWISE = torch.ops.zerofx.all_to_all_pairwise.default
_IN_PLACE = torch.ops._c10d_functional.all_reduce_.default


class Steppers(Protocol):
    """What updates weights in the place of the runtime's optimizer, by rank and group."""

    def step(self, rank: int, group: str, gradient: torch.Tensor) -> None: ...

    def refresh(self, rank: int, group: str) -> None: ...


@dataclass
class _UnderWay:
    """What a collective will have written to ``out``, and what it sends as it was when it started."""

    out: torch.Tensor
    brings: torch.Tensor
    source: torch.Tensor
    sent: torch.Tensor


@dataclass(frozen=True)
class _Group:
    """As much of a process group as an operator asks for."""

    _rank: int
    _size: int

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Lockstep:
    """``world_size`` ranks that run graphs together."""

    def __init__(self, world_size: int, process_groups: Sequence[str]) -> None:
        self.world_size, self.process_groups = world_size, process_groups
        self.under_way: list[list[_UnderWay]] = [[] for _ in range(world_size)]

    def run(
        self, gm: GraphModule, inputs: list[list[Any]], steppers: Steppers, order: Sequence[Node] | None = None
    ) -> list[list[Any]]:
        """What every rank's graph returns; ``inputs`` by rank. ``order``: of the nodes, the graph's own by default."""
        ranks = range(self.world_size)
        values: list[dict[Node, Any]] = [dict() for _ in ranks]
        placeholders = list(gm.graph.find_nodes(op="placeholder"))
        for rank in ranks:
            values[rank] |= zip(placeholders, inputs[rank], strict=True)
        draws = [itertools.count() for _ in ranks]
        for node in order or gm.graph.nodes:
            if node.op == "get_attr":
                for known in values:
                    known[node] = getattr(gm, node.target)
            elif node.op == "call_function":
                op = Op.of(node)
                filled = [_pytree.tree_map_only(Node, known.__getitem__, (op.args, op.kwargs)) for known in values]
                for args, kwargs in filled:
                    _check_not_freed((args, kwargs))
                for known, value in zip(values, self._call(op.target, filled, draws, steppers), strict=True):
                    known[node] = value
        outputs = gm.graph.output_node().args[0]
        returned = [list(_pytree.tree_map_only(Node, known.__getitem__, outputs)) for known in values]
        _check_not_freed(returned)
        return returned

    def _call(self, target: Any, filled: list[Any], draws: list[Iterator[int]], steppers: Steppers) -> list[Any]:
        ranks = range(self.world_size)
        if target in GATHERS or target in SCATTERS or target in ALL_REDUCES:
            return self._start(target, [args for args, _ in filled])
        if target is _WAIT:
            return [self._wait(rank, args[0]) for rank, (args, _) in enumerate(filled)]
        if target in (STEP, REFRESH):
            for rank, (args, _) in enumerate(filled):
                if target is STEP:
                    steppers.step(rank, args[1], args[0].clone())
                else:
                    steppers.refresh(rank, args[1])
            return [args[0].new_empty(0) for args, _ in filled]
        if isinstance(target, _torch.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
            for rank in ranks:
                args, kwargs = filled[rank]
                torch.manual_seed(1000 * rank + next(draws[rank]))
                filled[rank] = target(*args, **kwargs)
            return filled
        if str(target).startswith("prims.inductor_rand"):  # of a seed: what Inductor makes code for as it likes
            return [_seeded(target, args, kwargs) for args, kwargs in filled]
        called = []
        for rank, (args, kwargs) in enumerate(filled):
            with self._as_rank(rank) if target in _ASKS_FOR_ITS_RANK else contextlib.nullcontext():
                called.append(target(*args, **kwargs))
        return called

    def _as_rank(self, rank: int) -> contextlib.AbstractContextManager[Any]:
        """Operators inside that ask their process group for this rank get ``rank``."""

        def resolve(name: str) -> _Group:
            self._check_group(name)
            return _Group(rank, self.world_size)

        patched = contextlib.ExitStack()
        for module in (ops, lookups_ops):
            patched.enter_context(unittest.mock.patch.object(module, "resolve_process_group", resolve))
        return patched

    def _check_group(self, name: str) -> None:
        if name not in self.process_groups:
            raise RuntimeError(f"no process group {name!r}: expected one of {self.process_groups}.")

    def _start(self, target: Any, all_args: list[Any]) -> list[torch.Tensor]:
        source, *rest = all_args[0]
        operation = "sum"
        if target in ALL_REDUCES or target is torch.ops._c10d_functional.reduce_scatter_tensor.default:
            operation, *rest = rest
        *sizes, name = rest
        self._check_group(name)
        if sizes not in ([], [self.world_size]):
            raise RuntimeError(f"{target} over {sizes} ranks: expected {self.world_size}.")
        sources = [args[0] for args in all_args]
        brought = [value.clone() for value in self._brought(target, sources, operation)]
        started = []
        for rank, brings in enumerate(brought):
            own = sources[rank]
            out = own if target is _IN_PLACE else torch.empty_like(brings)
            sent = own.clone()
            _forget(out)
            source = sent if target is _IN_PLACE else own
            self.under_way[rank].append(_UnderWay(out, brings, source, sent))
            started.append(out)
        return started

    def _brought(self, target: Any, sources: list[torch.Tensor], operation: str) -> list[torch.Tensor]:
        ranks = range(self.world_size)
        if target in GATHERS:
            return [torch.cat([source.flatten() for source in sources]) for _ in ranks]
        if target is _PAIRWISE:
            chunks = [source.chunk(self.world_size) for source in sources]
            return [torch.cat([chunks[other][rank] for other in ranks if other != rank]) for rank in ranks]
        stacked = torch.stack(sources)
        total = _REDUCE[operation](stacked)
        return list(total.chunk(self.world_size)) if target in SCATTERS else [total for _ in ranks]

    def start(self, rank: int, out: torch.Tensor, brings: torch.Tensor) -> None:
        """``out`` will hold ``brings`` when it was waited for."""
        _forget(out)
        self.under_way[rank].append(_UnderWay(out, brings.clone(), brings, brings.clone()))

    def _wait(self, rank: int, value: torch.Tensor) -> torch.Tensor:
        rest = []
        for each in self.under_way[rank]:
            if each.out.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
                rest.append(each)
                continue
            _check_not_freed(each.source)
            each.out.copy_(each.brings)
            if not torch.equal(each.source.nan_to_num(), each.sent.nan_to_num()):
                _forget(each.out)  # whether the other ranks got the one or the other is not known
        self.under_way[rank] = rest
        return value


_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "avg": lambda x: x.mean(0),
    "product": lambda x: x.prod(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
}


def _seeded(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    seed = next(x for x in reversed(args) if isinstance(x, torch.Tensor))
    torch.manual_seed(int(seed))
    return target(*args, **kwargs)  # type: ignore[no-any-return]


def _forget(value: torch.Tensor) -> None:
    value.fill_(float("nan") if value.is_floating_point() else -(2**30))


def _check_not_freed(values: Any) -> None:
    for x in _pytree.tree_leaves(values):
        if isinstance(x, torch.Tensor) and x.numel() and not x.untyped_storage().nbytes():
            raise RuntimeError("it reads memory that was freed")


def another_order(gm: GraphModule, seed: int) -> list[Node]:
    """The nodes in an order that an executor might choose that goes by dependence alone: updates as early as may be.

    What draws random numbers keeps its order, and so does what writes to memory with all that reads it.
    """
    rng, nodes = random.Random(seed), list(gm.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    first: dict[Node, set[Node]] = {node: set(node.all_input_nodes) for node in nodes}
    ops_ = {node: Op.of(node) for node in nodes if node.op == "call_function"}
    drawn: list[Node] = []
    for node, op in ops_.items():
        if isinstance(op.target, _torch.OpOverload) and torch.Tag.nondeterministic_seeded in op.target.tags:
            first[node].update(drawn[-1:])
            drawn.append(node)
        for written in op.written():
            if op.target in (_WAIT, *ALL_REDUCES):
                continue
            for reader in written.users:
                if reader is not node:
                    early, late = sorted((reader, node), key=order.__getitem__)
                    first[late].add(early)
    output = nodes[-1]
    first[output] = set(nodes[:-1])
    users: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node, before in first.items():
        for other in before:
            users[other].append(node)
    waiting = {node: len(before) for node, before in first.items()}
    ready, found = [node for node in nodes if not waiting[node]], []
    while ready:
        ready.sort(key=lambda n: (n.op == "placeholder", n in ops_ and ops_[n].target is STEP))
        urgent = ready[-1].op == "placeholder" or (ready[-1] in ops_ and ops_[ready[-1]].target is STEP)
        node = ready.pop() if urgent else ready.pop(rng.randrange(len(ready)))
        found.append(node)
        for user in users[node]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return found
