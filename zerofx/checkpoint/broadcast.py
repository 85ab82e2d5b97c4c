"""Whole weights to ranks that do not train, an inference engine's: `send_parameters` and `receive_parameters`.

::

    trainer, rank 0      layer 0 ──┐ layer 1 ──┐     gathered ahead from the trainer's other ranks
                                   ▼           ▼
    group: broadcasts     what, layer 0    what, layer 1    ...    the end
                                   │           │
    engine, each rank              └▶ load     └▶ load

Weights that lie in one buffer are one broadcast, with no copy; `zerofx.full_parameters` gives a group's weights so.
Small ones are packed together. Before each goes a header, so the receivers need to know nothing of the model, and
the sender may rename, cast or merge what it sends. The next group is gathered while one is sent.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

_ALIGNED = 64
"""Where a tensor starts in a buffer that is packed, in bytes: a multiple of each dtype's size."""
_SMALL = 1 << 20
"""Buffers of fewer bytes are packed with what comes next."""
_HEADER = 1 << 13
"""Bytes of a header's first message; what is longer comes in a second one."""


def send_parameters(parameters: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None = None) -> None:
    """Send weights to the ranks of ``group`` that call `receive_parameters`.

    ::

        group = dist.new_group([0, 4, 5])                                            # the trainer is ranks 0 to 3
        zerofx.send_parameters(zerofx.full_parameters(model, ranks=0), group)        # on ranks 0 to 3
        engine.load_weights(zerofx.receive_parameters(group))                        # on ranks 4 and 5

    Args:
        parameters: names and plain tensors, of any dtypes. Every rank of the trainer iterates over its own, as
            `zerofx.full_parameters` has to be; rank 0 of ``group`` sends what its own gives.
        group: its rank 0 is the one that gets the weights. It has no other rank of the trainer. Beside what the
            iterator holds, two buffers of it are there while they are sent.

    Raises:
        ValueError: this rank is a member of ``group``, but not its rank 0.
    """
    place = dist.get_rank(group)  # -1: no member
    if place > 0:
        raise ValueError(
            f"zerofx.send_parameters on rank {place} of group=: expected its rank 0, or a rank of the trainer that is "
            "no member of it. Make the group of the trainer's rank 0 and of the receivers: dist.new_group([0, ...])."
        )
    sending: deque[tuple[list[Any], Any]] = deque()
    for parcel in _parcels(parameters if place == 0 else _dropped(parameters)):
        sending.append(_send(parcel, group))
        while len(sending) > 1:
            _wait(*sending.popleft())
    if place == 0:
        sending.append(_send(None, group))
    for each in sending:
        _wait(*each)


def receive_parameters(
    group: dist.ProcessGroup | None = None, *, device: torch.device | str | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `send_parameters` sends, in its order, on each rank of ``group`` but the first.

    Where a program stops early, what is left is received all the same, and dropped.

    Args:
        group: as the sender has it.
        device: where the tensors arrive, one that the group's backend takes. None: the current GPU with NCCL, else the
            CPU.

    Yields:
        the name; the tensor, of the sender's shape and dtype. It is yours, and a view of the buffer that it came in:
        ``clone()`` one that you keep alone.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if _is_nccl(group) else torch.device("cpu")
    ended = False
    try:
        while not ended:
            flat, entries = _receive(group, torch.device(device))
            ended = flat is None
            found = deque((entry.name, entry.view(flat)) for entry in entries if flat is not None)
            del flat
            while found:
                yield found.popleft()
    finally:
        while not ended:
            ended = _receive(group, torch.device(device))[0] is None


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    return "nccl" in str(dist.get_backend(group))


@dataclass(frozen=True)
class _Entry:
    """A tensor in a buffer: ``offset`` is in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Of the buffer's bytes."""
        return flat.narrow(0, self.offset, self.nbytes).view(self.dtype).view(self.shape)


@dataclass
class _Parcel:
    """Tensors that go in one broadcast."""

    pairs: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of the tensors, each counted once."""
        return sum(tensor.nbytes for tensor in {_place(t): t for _, t in self.pairs}.values())

    def joins(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` goes with these: it lies in their buffer, or they are few."""
        return not self.pairs or _storage(tensor) == _storage(self.pairs[-1][1]) or self.nbytes < _SMALL

    def packed(self) -> tuple[torch.Tensor, list[_Entry]]:
        """One buffer of bytes with all of them: the one that they lie in, where they are most of it."""
        (_, first), *_ = self.pairs
        whole = first.untyped_storage()
        if all(_storage(t) == _storage(first) and t.is_contiguous() for _, t in self.pairs):
            if whole.nbytes() <= self.nbytes + self.nbytes // 8:
                entries = [
                    _Entry(n, t.dtype, tuple(t.shape), int(t.storage_offset()) * t.itemsize) for n, t in self.pairs
                ]
                return torch.empty(0, dtype=torch.uint8, device=first.device).set_(whole), entries
        offsets: dict[Any, int] = {}
        entries, end = [], 0
        for name, tensor in self.pairs:
            at = offsets.setdefault(_place(tensor), end)
            end = end if at != end else end + -(-tensor.nbytes // _ALIGNED) * _ALIGNED
            entries.append(_Entry(name, tensor.dtype, tuple(tensor.shape), at))
        flat = torch.empty(end, dtype=torch.uint8, device=first.device)
        for entry, (_, tensor) in zip(entries, self.pairs, strict=True):
            entry.view(flat).copy_(tensor)
        return flat, entries


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(tensor: torch.Tensor) -> Any:
    """Equal for tied weights."""
    return _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _parcels(parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[_Parcel]:
    parcel = _Parcel()
    for name, tensor in parameters:
        if not parcel.joins(tensor):
            full, parcel = parcel, _Parcel()
            yield full
            del full
        parcel.pairs.append((name, tensor.detach()))
        del tensor
    if parcel.pairs:
        yield parcel


def _dropped(parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Nothing, once ``parameters`` has been iterated to its end."""
    for _ in parameters:
        pass
    yield from ()


def _send(parcel: _Parcel | None, group: dist.ProcessGroup | None) -> tuple[list[dist.Work | None], Any]:
    """Start to send ``parcel``, or that it is the end. What is sent is kept until it has gone."""
    flat, entries = (None, []) if parcel is None else parcel.packed()
    listed = [[entry.name, str(entry.dtype).split(".")[1], entry.shape, entry.offset] for entry in entries]
    text = json.dumps([None if flat is None else flat.numel(), listed]).encode()
    length = len(text).to_bytes(8, "little")
    first, rest = (length + text[: _HEADER - 8]).ljust(_HEADER, b" "), text[_HEADER - 8 :]
    device = torch.device("cuda", torch.cuda.current_device()) if _is_nccl(group) else torch.device("cpu")
    messages = [torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in (first, rest) if part]
    messages += [] if flat is None else [flat.to(device)]
    return [dist.broadcast(message, group=group, group_src=0, async_op=True) for message in messages], messages


def _wait(works: list[dist.Work | None], _: Any) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _receive(group: dist.ProcessGroup | None, device: torch.device) -> tuple[torch.Tensor | None, list[_Entry]]:
    def get(size: int) -> torch.Tensor:
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        dist.broadcast(flat, group=group, group_src=0)
        return flat

    first = bytes(get(_HEADER).tolist())
    size = int.from_bytes(first[:8], "little")
    rest = bytes(get(size + 8 - _HEADER).tolist()) if size + 8 > _HEADER else b""
    nbytes, listed = json.loads((first[8:] + rest)[:size])
    entries = [_Entry(name, getattr(torch, dtype), tuple(shape), at) for name, dtype, shape, at in listed]
    return (None if nbytes is None else get(nbytes)), entries
