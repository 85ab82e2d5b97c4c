"""Whole weights for another program, a group at a time: `full_parameters`.

::

    rank 0's program     takes layer 0          takes layer 1          takes layer 2
    on the wire          layer 1, layer 2       layer 2, layer 3       layer 3

Each group travels as it lies: every rank sends its shard, cast first where that makes it shorter, and a weight is a
view of what arrives. So there is one collective for a group, however many parameters it has. What comes next is on its
way while the program reads what is there.

A group's replica is taken where it holds what is asked for (stages 1 and 2): it is refreshed, if a step has written the
shards since, and the next forward finds it so. In stage 0 nothing travels.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from zerofx._torch import DTensorLayout, is_dtensor
from zerofx.checkpoint.ranks import Ranks, compare_steps, steps_of
from zerofx.checkpoint.saving import wait_for_pending
from zerofx.checkpoint.state import unwrapped
from zerofx.passes import pairwise
from zerofx.passes.own import nearest
from zerofx.passes.travel import travel_of
from zerofx.runtime.ranks.turns import common
from zerofx.runtime.ranks.watch import alone
from zerofx.runtime.state.group import ShardGroup, groups_of
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedTensor

_WHAT = "zerofx.full_parameters"
_AHEAD = 2
"""Groups that are on their way while another is read."""
_LIMIT = 500 * 10**6
"""Bytes that `each_parameter` gathers at once."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def full_parameters(
    module: nn.Module,
    *,
    buffer: int | str = "1GB",
    dtype: torch.dtype | None = None,
    ranks: Literal["all", 0] = "all",
    names: Iterable[str] | Callable[[str], bool] | None = None,
    buffers: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole weights by name, a group at a time, to be handed to another program. A collective.

    ::

        for name, weight in zerofx.full_parameters(model, dtype=torch.bfloat16):
            engine.update_weight(name, weight)

    Every rank iterates, to the end or to the same place. Names are those of ``module.state_dict()``; a tied weight
    comes under each of its names. A group's weights come together, in the order of ``state_dict()``.

    A tensor is plain, on the module's device, and yours: nothing writes to it later. It is a view of its group's
    buffer. So that buffer is free once you have let go of all of its weights; ``clone()`` one that you keep alone.

    Args:
        module: sharded in any stage, or a submodule of one.
        buffer: the most bytes that are gathered at once, as a number or as "512MB"; at least one group is.
        dtype: of floating-point weights. Where it is smaller than a weight's own, less is sent: half in bf16. None: as
            they are; with ``MixedPrecision`` the masters.
        ranks: "all", or 0: rank 0 alone gets them. The others iterate too, and get nothing. Where rank 0 stops early,
            what is left is sent all the same, and dropped.
        names: those to bring, or a function that says of a name whether to. The same on every rank. None: all.
        buffers: whether the module's buffers come too, after the weights.

    Yields:
        the name; the whole tensor, of the weight's shape and ``dtype``.

    Raises:
        ValueError: an argument that is none of these.
        OutOfStepError: on every rank: optimizers have stepped more often on one than on another; or a rank iterates
            alone.
    """
    limit = _bytes_of(buffer)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"full_parameters(dtype={dtype!r}): expected a floating-point torch.dtype, or None.")
    if isinstance(ranks, bool) or ranks not in ("all", 0):
        raise ValueError(f'full_parameters(ranks={ranks!r}): expected "all", or 0 for rank 0 alone.')
    batches = _batches(_chosen(module, names, buffers), dtype)
    return _stream(_WHAT, module, batches, limit, everywhere=ranks == "all")


def each_parameter(what: str, module: nn.Module, *, everywhere: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """As `full_parameters` gives them, for the call ``what``: to all ranks, or to rank 0."""
    return _stream(what, module, _batches(_chosen(module, None, False), None), _LIMIT, everywhere=everywhere)


def _bytes_of(buffer: Any) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", buffer.strip()) if isinstance(buffer, str) else None
    if found is not None and found[2].upper() in _UNITS:
        buffer = int(float(found[1]) * _UNITS[found[2].upper()])
    if isinstance(buffer, bool) or not isinstance(buffer, int) or buffer <= 0:
        raise ValueError(
            f'full_parameters(buffer={buffer!r}): expected a number of bytes above 0, or one with its unit: "512MB".'
        )
    return buffer


def _chosen(module: nn.Module, names: Any, buffers: bool) -> dict[str, torch.Tensor]:
    """What is to be brought, by name; buffers last."""
    state = {
        name: value
        for name, value in unwrapped(module).state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and (buffers or isinstance(value, nn.Parameter))
    }
    ordered = sorted(state, key=lambda name: not isinstance(state[name], nn.Parameter))  # a stable sort
    if names is None:
        return {name: state[name] for name in ordered}
    if callable(names):
        return {name: state[name] for name in ordered if names(name)}
    wanted = [names] if isinstance(names, str) else list(names)
    if unknown := next((name for name in wanted if name not in state), None):
        kind = "parameter or buffer" if buffers else "parameter"
        raise ValueError(
            f"full_parameters(names=...): {unknown!r} is no {kind} of this {type(module).__name__}"
            f"{nearest(unknown, list(state))}. Expected names of module.state_dict()."
        )
    return {name: state[name] for name in ordered if name in set(wanted)}


@dataclass
class _Batch:
    """What comes together: of one group; or one tensor that is of none, whole already.

    Attributes:
        group: None: there is nothing to gather.
        dtype: of the tensors that come, where they are of floating point.
        members: the names of each.
    """

    group: ShardGroup | None
    dtype: torch.dtype | None
    members: dict[torch.Tensor, list[str]] = field(default_factory=dict)

    def kind(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype that ``tensor`` comes in."""
        return tensor.dtype if self.dtype is None or not tensor.is_floating_point() else self.dtype

    @property
    def sent(self) -> torch.dtype:
        """The dtype in which the group travels: its own, or a smaller one that is asked for."""
        assert self.group is not None
        own = self.group.layout.dtype
        smaller = self.dtype is not None and own.is_floating_point and self.dtype.itemsize < own.itemsize
        return self.dtype if smaller and self.dtype is not None else own

    @property
    def nbytes(self) -> int:
        """Of what is there while it is read: the buffer, and what is made of it."""
        made = sum(tensor.numel() * self.kind(tensor).itemsize for tensor in self.members)
        if self.group is None:
            return made
        there = self.group.layout.numel * self.sent.itemsize
        # A place that is not the rank's number: chunks are put in order. A DTensor, or a wider dtype: new tensors.
        again = _is_in_order(self.group) and not self.group.dtensors and self.dtype in (None, self.sent)
        return there if again else there + max(made, there)


def _batches(chosen: dict[str, torch.Tensor], dtype: torch.dtype | None) -> list[_Batch]:
    found: dict[Any, _Batch] = {}
    for name, tensor in chosen.items():
        group = tensor._group if isinstance(tensor, ShardedTensor) else None
        batch = found.setdefault(tensor if group is None else group, _Batch(group, dtype))
        batch.members.setdefault(tensor, []).append(name)
    return list(found.values())


def _is_in_order(group: ShardGroup) -> bool:
    return all(group.rank_at(place) == place for place in range(group.layout.world_size))


def _stream(
    what: str, module: nn.Module, batches: list[_Batch], limit: int, *, everywhere: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Batches one after the other; the next are on their way within ``limit``."""
    ranks = Ranks.of(module)
    if any(group.family.stage for group in groups_of(module)):
        with ranks.call(what):
            compare_steps(what, module, ranks, ranks.all_gather(steps_of(module)))
            wait_for_pending(ranks)
    todo, arriving, held = deque(batches), deque[_Arriving](), 0
    try:
        while todo or arriving:
            while todo and len(arriving) <= _AHEAD and (not held or held + todo[0].nbytes <= limit):
                held += todo[0].nbytes
                arriving.append(_Arriving(what, todo.popleft(), everywhere))
            first = arriving.popleft()
            pairs = first.arrived()
            while pairs and (everywhere or ranks.rank == 0):
                yield pairs.popleft()
            held -= first.batch.nbytes
    except GeneratorExit:  # the program stops here; what is on its way arrives first
        for one in arriving:
            one.arrived()
        for batch in () if everywhere else todo:  # the other ranks yield nothing, so they go on to the end
            _Arriving(what, batch, everywhere).arrived()
        raise


class _Arriving:
    """A batch on its way.

    Attributes:
        batch: what arrives.
        flat: the group's buffer, which fills; None: this rank gets none.
    """

    def __init__(self, what: str, batch: _Batch, everywhere: bool) -> None:
        """Start to gather it for the call ``what``, on all ranks, or on rank 0."""
        self._what = what
        self.batch, self._everywhere = batch, everywhere
        self.flat: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._works: list[dist.Work] = []
        self._replica: torch.Tensor | None = None
        group = batch.group
        if group is None:
            return
        group.use(trained=False)
        with common(group.family.turns, what), torch.no_grad():
            if self._takes_replica(group):
                group.weights.refresh()
                self._replica = group.weights.replica
                return
            with group.home.only(group.shard):
                sent = group.shard.detach().to(batch.sent)
                # What is elsewhere at rest leaves the device as this context ends.
                leaves = group.home.moves("weights") and sent.dtype == group.shard.dtype
                self._sent = sent.clone() if leaves else sent
            self._start(group, self._sent)

    def _receives(self, group: ShardGroup) -> bool:
        """Whether this rank has the buffer. Each tensor-parallel rank has its part: all that are at rank 0's place."""
        replicas = None if group.sharing.divides_between else group.sharing.replicas
        return self._everywhere or (group.rank == 0 and (replicas is None or replicas.rank == 0))

    def _takes_replica(self, group: ShardGroup) -> bool:
        """Whether the replica holds what is asked for: the same on every rank."""
        weights, dtype = group.weights, self.batch.sent
        if weights.own_replica is None or weights.code is not None:
            return False
        return weights.dtype == dtype or (weights.exact and not weights.sends)

    def _start(self, group: ShardGroup, sent: torch.Tensor) -> None:
        layout, size = group.layout, group.layout.world_size
        replicas = None if group.sharing.divides_between else group.sharing.replicas
        if not self._everywhere and replicas is not None and replicas.rank:
            return  # the first replica's ranks have all of it
        self.flat = sent.new_empty(layout.numel) if self._receives(group) else None
        if size == 1:
            assert self.flat is not None
            self.flat.copy_(sent)
            return
        kind, nbytes = "all-gather" if self._everywhere else "gather", layout.numel * sent.itemsize
        with alone(group.group_name, self._what, kind, layout.name, nbytes, sent.dtype):
            if self._everywhere:
                assert self.flat is not None
                travel = travel_of(group.sharing.optimizer.backend(group.device))
                self._works = travel.gather_into(self.flat, sent, group.group_name)
                return
            parts: list[torch.Tensor] | None = None
            if self.flat is not None:
                placed = {group.rank_at(i): part for i, part in enumerate(self.flat.chunk(size))}
                parts = [placed[rank].view(torch.uint8) for rank in range(size)]  # as bytes: gloo lacks dtypes
            sent, to = sent.view(torch.uint8), group.rank_at(0)
            works = [dist.gather(sent, parts, group=group.process_group, group_dst=to, async_op=True)]
            for watcher in pairwise.WATCHERS:
                works = watcher.under_watch(works, group.group_name)
            self._works = works

    def arrived(self) -> deque[tuple[str, torch.Tensor]]:
        """Wait for it; the names and tensors that this rank gets."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], None
        flat, self.flat, group = self.flat, None, self.batch.group
        if group is None:
            return self._of_each(lambda x, _: self._as_plain(x))
        if self._replica is not None:
            replica = torch.ops._c10d_functional.wait_tensor(self._replica)  # on every rank: some send as they wait
            flat = replica.to(self.batch.sent, copy=True) if self._receives(group) else None
        if flat is None:
            return deque()
        if self._replica is None and self._everywhere and not _is_in_order(group):
            chunks = flat.chunk(group.layout.world_size)
            flat = torch.cat([chunks[group.rank_at(place)] for place in range(len(chunks))])
        layout = group.layout
        return self._of_each(lambda x, slot: self._whole(layout.view(flat, slot), x._dtensor, x))

    def _of_each(self, whole: Callable[[Any, Any], torch.Tensor]) -> deque[tuple[str, torch.Tensor]]:
        found: deque[tuple[str, torch.Tensor]] = deque()
        for tensor, names in self.batch.members.items():
            value = whole(tensor, getattr(tensor, "_slot", None))
            found += [(name, value) for name in names]
        return found

    def _as_plain(self, tensor: Any) -> torch.Tensor:
        """A copy of what is of no group, or is on each rank already (stage 0)."""
        if is_dtensor(tensor):
            return self._whole(tensor.full_tensor().detach(), None, tensor)
        layout = tensor._dtensor if isinstance(tensor, ReplicatedParameter) else None
        return self._whole(tensor.detach().clone(), layout, tensor)

    def _whole(self, value: torch.Tensor, layout: DTensorLayout | None, tensor: torch.Tensor) -> torch.Tensor:
        """``value`` of all tensor-parallel ranks, in the dtype that is asked for."""
        value = value if layout is None else layout.whole_of(value)
        return value.to(self.batch.kind(tensor))
