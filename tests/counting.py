"""Counts collectives where they meet the process group, and the bytes each of them moves.

A claim such as "stage 3 moves 1.5 times what data parallelism moves" is worth something only when it is
measured below everything that could be mistaken: the FX graph, Inductor, ``torch.distributed``. Every method
of the C++ ``ProcessGroup`` goes through a dispatcher operator (``c10d::allreduce_``,
``c10d::_allgather_base_``, ...), whoever calls it: ``torch.distributed`` functions,
``torch.ops._c10d_functional.*`` in code that Inductor generated, DDP's C++ reducer, on any thread.
:func:`count_collectives` puts a kernel in front of those operators (at the ``BackendSelect`` key, which no
mode or autograd guard excludes), notes the call and passes it on.

Why not a Python ``ProcessGroup`` that delegates: torch's trampoline class has no entry for
``_allgather_base``, ``_reduce_scatter_base``, ``alltoall``, ``gather``, ``scatter`` and ``reduce``; and it
would have to be *the* group of the run, while this counts on any group there is (gloo, NCCL, the fake one).

What ranks of one host read out of each other's memory (`zerofx.features.same_host`) passes no process group. It
is counted where it starts, as the receive and the send that gloo would have been asked for.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zerofx import _torch
from zerofx.features.same_host import same_host
from zerofx.passes.pairwise import ALL_GATHER_TAG, ALL_TO_ALL_TAG, COMPARISON_TAG, MEETING_TAG, OFFER_TAG, USED_TAG


@dataclass(frozen=True)
class Collective:
    """One call that reached a process group."""

    name: str  # all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, reduce, gather, scatter, ...
    bytes: int  # what it puts on the wire per rank, see _COLLECTIVES
    payload: int  # bytes of the whole (unsharded) tensors
    dtypes: tuple[torch.dtype, ...]
    group: str
    world_size: int
    operator: str  # the dispatcher operator, e.g. _allgather_base_, or SAME_HOST
    thread: int  # threading.get_ident() of the caller


@dataclass
class CollectiveLog:
    """What happened inside ``with count_collectives() as log``, in the order of the calls on this rank.

    ``used``: the messages beside reductions that say who has used which parameter. They are not among ``events``.
    ``compared``: nor are those by which ranks compare what they are about to run.
    """

    events: list[Collective] = field(default_factory=list)
    used: list[Collective] = field(default_factory=list)
    compared: list[Collective] = field(default_factory=list)

    @property
    def calls(self) -> Counter[str]:
        """Number of calls by name; a coalesced call counts once."""
        return Counter(event.name for event in self.events)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes on the wire by name."""
        total: Counter[str] = Counter()
        for event in self.events:
            total[event.name] += event.bytes
        return dict(total)

    @property
    def total_bytes(self) -> int:
        return sum(event.bytes for event in self.events)

    def __str__(self) -> str:
        size = self.bytes
        return ", ".join(f"{n} {name} ({size[name]:,} B)" for name, n in self.calls.items()) or "no collectives"


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in an operator's argument: a tensor, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)]


def _nbytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _all_but_mine(payload: int, world: int) -> int:
    return payload * (world - 1) // world


def _there_and_back(payload: int, world: int) -> int:
    return 2 * payload * (world - 1) // world


def _whole(payload: int, world: int) -> int:
    return payload if world > 1 else 0


def _nothing(payload: int, world: int) -> int:
    return 0


# operator: (name, index of the argument that is counted, that argument is one rank's part only, wire bytes).
# The payload is the whole, unsharded data. Wire bytes are what the collective's *definition* makes one rank
# receive (or send, where that is more), parts taken as equal; what one rank sends to others is counted where
# it is received (of an all-to-all that states sizes, these), so that M broadcasts of a part each are an
# all-gather. An implementation may send more:
# gloo's reduce-scatter is an all-reduce underneath.
_COLLECTIVES: dict[str, tuple[str, int, bool, Callable[[int, int], int]]] = {
    "_allgather_base_": ("all_gather", 0, False, _all_but_mine),
    "allgather_": ("all_gather", 0, False, _all_but_mine),
    "allgather_coalesced_": ("all_gather", 0, False, _all_but_mine),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, False, _all_but_mine),
    "_reduce_scatter_base_": ("reduce_scatter", 1, False, _all_but_mine),
    "reduce_scatter_": ("reduce_scatter", 1, False, _all_but_mine),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, False, _all_but_mine),
    "allreduce_": ("all_reduce", 0, False, _there_and_back),
    "allreduce_coalesced_": ("all_reduce", 0, False, _there_and_back),
    "alltoall_base_": ("all_to_all", 1, False, _all_but_mine),
    "alltoall_": ("all_to_all", 1, False, _all_but_mine),
    "broadcast_": ("broadcast", 0, False, _whole),
    "reduce_": ("reduce", 0, False, _whole),
    "gather_": ("gather", 1, True, _all_but_mine),
    "scatter_": ("scatter", 0, True, _all_but_mine),
    "send": ("send", 0, False, _nothing),
    "recv_": ("recv", 0, False, _whole),
    "recv_any_source_": ("recv", 0, False, _whole),
    "barrier": ("barrier", 0, False, _nothing),
    "monitored_barrier_": ("barrier", 0, False, _nothing),
}

SAME_HOST = "zerofx.features.same_host.same_host"
"""The `Collective.operator` of what passed no process group."""
_PAIRWISE = {
    ALL_GATHER_TAG: "all_gather",
    ALL_TO_ALL_TAG: "all_to_all",
    MEETING_TAG: "meeting",
    USED_TAG: "used",
    COMPARISON_TAG: "comparison",
    OFFER_TAG: "offer",
}
"""What messages with these tags are parts of."""

_lock = threading.Lock()
_logs: list[CollectiveLog] = []
_library: torch.library.Library | None = None


def _note(operator: str, args: tuple[Any, ...]) -> None:
    name, counted, one_part, wire = _COLLECTIVES[operator]
    if name in ("send", "recv"):
        name = _message(name, args[-1])
    tensors = _tensors(args[counted])
    if any(t.is_meta or isinstance(t, torch._subclasses.FakeTensor) for t in tensors):
        return  # a tracer asks for shapes: nothing is sent
    group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
    world = group.size()
    payload = _nbytes(args[counted]) * (world if one_part else 1)
    dtypes = tuple(dict.fromkeys(t.dtype for t in tensors))
    thread = threading.get_ident()
    received = 0 if operator == "broadcast_" and args[2] == group.rank() else wire(payload, world)
    if operator == "alltoall_base_" and args[3]:
        received = _nbytes(args[0]) * (sum(args[3]) - args[3][group.rank()]) // max(1, sum(args[3]))
    _log(Collective(name, received, payload, dtypes, group.group_name, world, operator, thread))


def _message(name: str, tag: int) -> str:
    return f"{_PAIRWISE[tag & 0xFF]}_{name}" if tag & 0xFF in _PAIRWISE else name


def _log(event: Collective) -> None:
    with _lock:
        for log in _logs:
            beside = {"used": log.used, "comparison": log.compared}
            beside.get(event.name.partition("_")[0], log.events).append(event)


def _exchange(other: same_host.Neighbour, received: torch.Tensor, sent: torch.Tensor, tag: int) -> dist.Work:
    world, thread = dist.get_world_size(_torch.resolve_process_group(other.group_name)), threading.get_ident()
    for name, tensor, nbytes in (("recv", received, received.nbytes), ("send", sent, 0)):
        facts = _message(name, tag), nbytes, tensor.nbytes, (tensor.dtype,), other.group_name, world
        _log(Collective(*facts, SAME_HOST, thread))
    return _read_each_other(other, received, sent, tag)


_read_each_other = same_host.Neighbour.exchange


def _is_group(script_object: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(script_object._type())


def _install() -> torch.library.Library:
    """Registers the counting kernels; they last as long as the library object that is returned."""
    library = torch.library.Library("c10d", "IMPL")
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def register(operator: str) -> None:
        overload = getattr(torch.ops.c10d, operator).default

        def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
            _note(operator, args)
            return overload.redispatch(keyset & below, *args)

        library.impl(operator, kernel, "BackendSelect", with_keyset=True)

    for operator in _COLLECTIVES:
        register(operator)
    return library


@contextlib.contextmanager
def count_collectives() -> Iterator[CollectiveLog]:
    """Records every collective of this process, on any thread, until the context ends. May be nested."""
    global _library
    log = CollectiveLog()
    with _lock:
        if _library is None:
            _library = _install()
            same_host.Neighbour.exchange = _exchange  # type: ignore[assignment, method-assign]
        _logs.append(log)
    try:
        yield log
    finally:
        with _lock:
            _logs[:] = [other for other in _logs if other is not log]
            if not _logs and _library is not None:
                _library._destroy()
                _library = None
                same_host.Neighbour.exchange = _read_each_other  # type: ignore[method-assign]
