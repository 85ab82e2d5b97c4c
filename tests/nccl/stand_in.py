"""A process group for CPU tensors that takes NCCL's operators, and treats memory as NCCL does.

NCCL runs what it is given on a stream of its own. It may read an input, and write an output, at any moment between the
start and the wait, and the tensors are held until then::

    computing stream    ── start ─────── kernels ─────── wait ──▶
                             │ waits for what came before     ▲
    NCCL's stream            └──────── reads, writes ─────────┘

This one takes the first of these moments, or the last, and everybody who relies on another is found out::

    AT_ONCE     moved as it is started            who still reads what an output held before, reads the new
    AT_LAST     moved as it is waited for         who has written to an input meanwhile, sends the new;
                outputs are NaN until then        who reads an output too soon, reads NaN

Collectives of one group are moved in the order they were started, as on one stream. What is not asynchronous
(``async_op=False``) is moved at once, as NCCL runs it on the computing stream. `Log` has what was done when.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

from tests.nccl.events import Event, Log, spans
from zerofx._torch import PythonWork
from zerofx.runtime.ranks import watch as watching
from zerofx.runtime.ranks.sharing import SHARINGS, OneGroup, RankGroup

Moment = Literal["at once", "at last"]
AT_ONCE: Moment = "at once"
AT_LAST: Moment = "at last"
NAME = "nccl_like"


class OverGloo:
    """What is moved goes to real ranks: by those of gloo's collectives that are sound (docs/gloo.md)."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        self.gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self.rank, self.size = rank, size

    def gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        self.gloo.allgather([list(out.chunk(self.size))], [mine.clone()]).wait()

    def scatter(self, out: torch.Tensor, pack: torch.Tensor) -> None:
        self.gloo.allreduce([sums := pack.clone()]).wait()
        out.copy_(sums.chunk(self.size)[self.rank])

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> None:
        self.gloo.allreduce(tensors, opts).wait()

    def other(self, name: str, args: Any) -> None:
        getattr(self.gloo, name)(*args).wait()


class Alone:
    """There are no other ranks: they are taken to have sent what this one did."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        self.rank, self.size = rank, size

    def gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        mine = mine.clone()
        for part in out.chunk(self.size):
            part.copy_(mine)

    def scatter(self, out: torch.Tensor, pack: torch.Tensor) -> None:
        out.copy_(pack.chunk(self.size)[self.rank] * self.size)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> None:
        for tensor in tensors:
            tensor.mul_(self.size)

    def other(self, name: str, args: Any) -> None:
        if name == "allgather":
            for outputs, mine in zip(args[0], args[1], strict=True):
                for out in outputs:
                    out.copy_(mine)
        elif name == "broadcast" and args[1].rootRank != self.rank:
            for tensor in args[0]:
                tensor.zero_()


class Started(PythonWork):
    """A collective that was started. It holds its tensors until it was waited for, as NCCL's ``TensorShelf`` does."""

    def __init__(self, group: StandIn, what: str, inputs: Any, outputs: Any, move: Callable[[], None]) -> None:
        super().__init__()
        self.group, self.what, self.shelf = group, what, [*inputs, *outputs]
        self.number = next(group.log.numbers)
        self.moved = False
        self._move = move

    def move(self) -> None:
        if not self.moved:
            self.moved = True
            self._move()

    def wait(self, timeout: Any = None) -> bool:
        with self.ending():
            while not self.moved or self in self.group.under_way:  # the stream comes to it, and to what is before it
                self.group.under_way.pop(0).move()
            self.group.log.add(Event("wait", self.what, self.number, self.group.stream))
            self.shelf = []
        return True


class Done(PythonWork):
    """What was moved on the computing stream."""

    def wait(self, timeout: Any = None) -> bool:
        with self.ending():
            return True


class StandIn(dist.ProcessGroup):
    """See the file's first lines. ``mover``: `OverGloo` or `Alone`.

    Attributes:
        stream: what tells its stream from that of another group.
        under_way: what was started and not moved yet, in order.
        aborted: how often `abort` was called.
    """

    def __init__(self, rank: int, size: int, mover: Any, moment: Moment, log: Log) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self.mover, self.moment, self.log = rank, size, mover, moment, log
        self.stream = f"stream {next(log.streams)}"
        self.under_way: list[Started] = []
        self.aborted = 0
        self._name = ""

    # ---- what others ask of a process group --------------------------------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    getBackendName = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> StandIn:
        return self

    def abort(self) -> None:
        self.aborted += 1

    def _check(self) -> None:
        """An aborted communicator takes nothing more."""
        if self.aborted:
            raise dist.DistBackendError("NCCL communicator was aborted on this rank.")

    def shutdown(self) -> None:
        pass

    # ---- collectives -------------------------------------------------------------------------------------------------

    def _start(self, what: str, inputs: Any, outputs: Any, move: Callable[[], None], opts: Any) -> PythonWork:
        self._check()
        if not getattr(opts, "asyncOp", True):
            self.log.add(Event("compute", what, None, self.stream, spans(inputs), spans(outputs)))
            move()
            return Done()
        work = Started(self, what, inputs, outputs, move)
        self.log.add(Event("start", what, work.number, self.stream, spans(inputs), spans(outputs)))
        self.under_way.append(work)
        if self.moment == AT_ONCE:
            work.move()
        else:
            _spoil(inputs, outputs)
        return work

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PythonWork:
        def move() -> None:
            for out, mine in zip(outputs, inputs, strict=True):
                self.mover.gather(out.data, mine.data)

        return self._start("all-gather", inputs, outputs, move, opts)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> PythonWork:
        return self.allgather_into_tensor_coalesced([output], [mine], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PythonWork:
        def move() -> None:
            for out, pack in zip(outputs, inputs, strict=True):
                self.mover.scatter(out.data, pack.data)

        return self._start("reduce-scatter", inputs, outputs, move, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, pack: torch.Tensor, opts: Any = None) -> PythonWork:
        return self.reduce_scatter_tensor_coalesced([output], [pack], opts)

    # As 2.13 calls them; it knows the old names too, 2.11 these alone.
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_gather_single = _allgather_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base

    def allreduce(self, tensors: Any, opts: Any = None) -> PythonWork:
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._start(
            "all-reduce", tensors, tensors, lambda: self.mover.reduce([x.data for x in tensors], opts), opts
        )

    def _other(self, name: str, *args: Any) -> PythonWork:
        """A collective that zerofx runs outside of graphs alone, and never asynchronously."""
        self._check()
        self.log.add(Event("compute", name, None, self.stream))
        self.mover.other(name, args)
        return Done()

    def broadcast(self, *args: Any) -> PythonWork:
        return self._other("broadcast", *args)

    def allgather(self, *args: Any) -> PythonWork:
        return self._other("allgather", *args)

    def gather(self, *args: Any) -> PythonWork:
        return self._other("gather", *args)

    def scatter(self, *args: Any) -> PythonWork:
        return self._other("scatter", *args)

    def reduce(self, *args: Any) -> PythonWork:
        return self._other("reduce", *args)

    def send(self, *args: Any) -> PythonWork:
        return self._other("send", *args)

    def recv(self, *args: Any) -> PythonWork:
        return self._other("recv", *args)

    def barrier(self, opts: Any = None) -> PythonWork:
        return self._other("barrier")


def _spoil(inputs: Any, outputs: Any) -> None:
    """NCCL may be writing there. An input that lies inside of an output stays what it is."""
    if inputs is outputs:
        return
    for mine, out in zip(inputs, outputs, strict=True):
        kept = mine.clone()
        out.data.view(torch.uint8).fill_(255)  # which floating-point types read as NaN; .data counts no write
        if mine.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            mine.data.copy_(kept)


_making: tuple[type[Any], Moment, Log] = OverGloo, AT_LAST, Log()


def _make(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> StandIn:
    mover, moment, log = _making
    return StandIn(rank, size, mover(store, rank, size, timeout), moment, log)


dist.Backend.register_backend(NAME, _make, devices=["cpu"])


@contextlib.contextmanager
def making(mover: type[Any], moment: Moment) -> Iterator[Log]:
    """Groups made inside move by ``mover`` at ``moment``, and tell the log that this gives."""
    global _making
    before, _making = _making, (mover, moment, Log())
    try:
        yield _making[-1]
    finally:
        _making = before


@contextlib.contextmanager
def nccl_spelling(moment: Moment = AT_LAST) -> Iterator[StandIn]:
    """All ranks: modules that are sharded inside travel as on NCCL, through a `StandIn` over gloo, which is given.

    Its ``moment`` may be set where nothing is under way.
    """
    with making(OverGloo, moment):
        group: Any = dist.new_group(backend=NAME)

    def of(mesh: Any, reductions: str | None) -> OneGroup | None:
        return OneGroup(RankGroup(group), reductions) if mesh is None else None

    SHARINGS.insert(0, of)
    try:
        yield group
    finally:
        SHARINGS.remove(of)
        if (watch := watching._watches.pop(group.group_name, None)) is not None:
            watch.stop()
        dist.destroy_process_group(group)
