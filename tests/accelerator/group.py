"""A process group for the simulated accelerator: NCCL's rules of streams, and real ranks, by way of gloo.

::

    computing stream    ── start ─────── kernels ─────── wait ──▶        the host waits for nothing
                             │ waits for what came before     ▲
    the group's stream       └─ host memory ── gloo ──────────┘

The rules are R1, R2, R3, R5 and R6 of docs/cuda.md. Each that a mutation can take away has a name in `broken`.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator import device
from zerofx._torch import PythonWork

NAME = "nccl_on_sim"

broken: set[str] = set()
"""Of "start" (R1), "wait" (R2) and "hold" (R3): rules that collectives started now do not follow."""

Move = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""From inputs to outputs, in the host's memory."""


@contextlib.contextmanager
def breaking(rule: str) -> Iterator[None]:
    broken.add(rule)
    try:
        yield
    finally:
        broken.remove(rule)


class Started(PythonWork):
    """A collective that was started. It holds its tensors until it was waited for."""

    def __init__(self, stream: int, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._stream, self._place = stream, device.place(stream)
        self._held = [] if "hold" in broken else [*tensors]

    def wait(self, timeout: Any = None) -> bool:
        with self.ending():
            if "wait" not in broken:
                device.wait_for(device.current_stream(), self._stream, self._place)
            self._held = []
        return True


class Barrier(PythonWork):
    """The one that the host waits for."""

    def __init__(self, stream: int) -> None:
        super().__init__()
        self._stream, self._place = stream, device.place(stream)

    def wait(self, timeout: Any = None) -> bool:
        with self.ending():
            device.synchronize(self._stream, self._place, "barrier")
        return True


class NcclLike(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, ""
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._stream: int = device.new_stream(torch.accelerator.current_device_index())

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

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device.NAME)]

    def _get_backend(self, of: torch.device) -> NcclLike:
        return self

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    # ---- collectives -------------------------------------------------------------------------------------------------

    def _start(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], move: Move, opts: Any) -> Started:
        for x in (*inputs, *outputs):
            if x.device.type != device.NAME:
                raise RuntimeError(f"No backend type associated with device type {x.device.type}")
        stream = computing = device.current_stream()
        if getattr(opts, "asyncOp", True):
            stream = self._stream
            if "start" not in broken:
                device.wait_for(stream, computing, device.place(computing))
        read, written = [device.as_host(x) for x in inputs], [device.as_host(x) for x in outputs]
        device.push(stream, lambda: move(read, written), max(sum(x.nbytes for x in xs) for xs in (inputs, outputs)))
        return Started(stream, (*inputs, *outputs))

    def _gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        self._gloo.allgather([list(out.chunk(self._size))], [mine.clone()]).wait()  # `mine` may be a part of `out`

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Started:
        def move(read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
            for out, mine in zip(written, read, strict=True):
                self._gather(out, mine)

        return self._start(inputs, outputs, move, opts)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Started:
        return self.allgather_into_tensor_coalesced([output], [mine], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Started:
        def move(read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
            for out, pack in zip(written, read, strict=True):
                self._gloo.allreduce([sums := pack.clone()]).wait()
                out.copy_(sums.chunk(self._size)[self._rank])

        return self._start(inputs, outputs, move, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, pack: torch.Tensor, opts: Any = None) -> Started:
        return self.reduce_scatter_tensor_coalesced([output], [pack], opts)

    # As 2.13 calls them; it knows the old names too, 2.11 these alone.
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_gather_single = _allgather_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self, output: torch.Tensor, pack: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Started:
        if len({*received, *sent}) > 1:
            raise NotImplementedError(f"parts of one size, not {sent} and {received}")

        def move(read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
            packs = [torch.empty_like(read[0]) for _ in range(self._size)]
            self._gloo.allgather([packs], [read[0].contiguous()]).wait()
            written[0].copy_(torch.cat([x.chunk(self._size)[self._rank] for x in packs]))

        return self._start([pack], [output], move, opts)

    all_to_all_single = alltoall_base

    def allreduce(self, tensors: Any, opts: Any = None) -> Started:
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._start(tensors, tensors, lambda _, written: self._gloo.allreduce(written, opts).wait(), opts)

    def broadcast(self, tensors: Any, opts: Any) -> Started:
        return self._start(tensors, tensors, lambda _, written: self._gloo.broadcast(written, opts).wait(), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Started:
        def move(read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
            self._gloo.allgather([written], [read[0].clone()]).wait()

        return self._start(inputs, outputs[0], move, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Started:
        def move(read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
            self._gloo.gather([written] if written else [], read, opts).wait()

        return self._start(inputs, outputs[0] if outputs else [], move, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Started:
        def move(read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
            self._gloo.scatter(written, [read] if read else [], opts).wait()

        return self._start(inputs[0] if inputs else [], outputs, move, opts)

    def barrier(self, opts: Any = None) -> Barrier:
        device.push(self._stream, lambda: self._gloo.barrier().wait())
        return Barrier(self._stream)


dist.Backend.register_backend(NAME, NcclLike, devices=[device.NAME])
