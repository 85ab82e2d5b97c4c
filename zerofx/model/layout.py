"""Where each parameter lies in its group's flat buffer, and which part of it a rank holds.

A *group* is the unit of communication: the parameters of one layer with one dtype, one policy of mixed precision and
one ``requires_grad``. Laid end to end in registration order, each at an aligned offset, they form one flat buffer. The
buffer is padded so that it divides by the world size, and rank r's *shard* is the r-th contiguous part of it::

    world size 2      | attn.weight (4x4)   | attn.bias (4) | norm (4) | padding |
    flat buffer       | 0 .............. 15 | 16 ....... 19 | 20 .. 23 | 24 . 31 |
    shard of rank 0   |################ 0 .................. 15 #######|
    shard of rank 1                                    |## 16 .............. 31 #|

One all-gather of the shards is the flat buffer itself, so every weight is a view of it: nothing is copied in before
the collective or out after it. (FSDP2 shards each parameter by itself along dimension 0 and copies on both sides.)

The law, checked by ``GroupLayout.__post_init__``:

* offsets ascend, do not overlap, and are multiples of ``ALIGNMENT`` bytes;
* ``numel`` is ``world_size * shard_numel``, and every shard starts on an ``ALIGNMENT`` boundary;
* with a ``block``, shards are whole blocks of so many elements, a parameter of ``BLOCKED_NUMEL`` or more begins with
  one, and none is shared by such a parameter and a smaller one: what is written in blocks (`zerofx.model.wire`) is the
  same for any number of ranks;
* where it costs little (``ROW_PADDING``), offsets and shard boundaries also fall on whole rows of the parameters, so
  that a rank's part of a matrix is one rectangle, and on whole *blocks*, for which an optimizer may keep something
  together (a scale): ``BLOCK`` elements, counted from the first of a parameter of ``BLOCKED_NUMEL`` or more. The first
  of these that costs little is taken: rows and blocks, rows, blocks, neither.

Some parameters of a group can be gathered without the others: see `excerpt`.

Nothing here knows a process group: a layout can be made for any world size, on a machine with none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

ALIGNMENT = 128
"""Bytes. A cache line of every GPU, and more than any vector load needs."""

ROW_PADDING = 1 / 256
"""The largest share of a group that may be spent on aligning to whole rows and blocks."""

BLOCK = 256
"""Elements of a block; see `GroupLayout.keeps_blocks_whole`."""

BLOCKED_NUMEL = 4096
"""Elements below which a parameter is not worth having blocks (the bound of Dettmers et al. 2022)."""


class Precision(Protocol):
    """`zerofx.model.precision.MixedPrecision`, or a layout."""

    @property
    def param_dtype(self) -> torch.dtype | None: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat buffer: ``numel`` elements from ``offset``, in row-major order."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the parameter as a view of the flat buffer (row-major)."""
        return contiguous_stride(self.shape)


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank holds: ``length`` elements, which may be none."""

    in_shard: int
    """Where the piece starts in the rank's shard."""
    in_parameter: int
    """Where it starts in the flattened parameter."""
    length: int


@dataclass(frozen=True)
class GroupLayout:
    """The flat buffer of one group, and its division over ``world_size`` ranks."""

    name: str
    dtype: torch.dtype
    requires_grad: bool
    world_size: int
    slots: tuple[Slot, ...]
    numel: int
    """Elements of the flat buffer, padding included."""
    param_dtype: torch.dtype | None = None
    """What the model computes with them in, by the policy of their part (`zerofx.model.policies`); None: ``dtype``."""
    reduce_dtype: torch.dtype | None = None
    """What the same policy reduces their gradients in; None: see `gradient_dtype`."""

    def __post_init__(self) -> None:
        align = alignment(self.dtype)
        end = 0
        for slot in self.slots:
            if slot.offset < end or slot.offset % align:
                raise ValueError(f"group {self.name!r}: {slot.name!r} at {slot.offset} overlaps or is not aligned")
            end = slot.end
        if self.numel < end or self.numel % self.world_size or self.shard_numel % align:
            raise ValueError(f"group {self.name!r}: {self.numel} elements do not divide over {self.world_size} ranks")

    def __hash__(self) -> int:
        """Of its name and size: two layouts that agree in these are rarely different, and slots may be thousands."""
        return hash((self.name, self.dtype, self.requires_grad, self.world_size, self.numel))

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    @property
    def weight_dtype(self) -> torch.dtype:
        """What the model computes with them in."""
        return self.param_dtype or self.dtype

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """What graphs reduce their gradients in; None: the dtype in which backward returns them."""
        return self.reduce_dtype or self.param_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole flat buffer, as an all-gather brings it."""
        return self.numel * self.dtype.itemsize

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def piece(self, slot: Slot, rank: int) -> Piece:
        """The part of ``slot`` that ``rank`` holds."""
        first = rank * self.shard_numel
        start, stop = max(slot.offset, first), min(slot.end, first + self.shard_numel)
        if start >= stop:
            return Piece(0, 0, 0)
        return Piece(start - first, start - slot.offset, stop - start)

    def keeps_blocks_whole(self, slot: Slot) -> bool:
        """Whether ``slot`` has blocks, and they lie on one grid in every shard: no rank's boundary cuts one.

        Follows from the layout alone, so every rank says the same.
        """
        return slot.numel >= BLOCKED_NUMEL and slot.offset % BLOCK == self.shard_numel % BLOCK == 0

    def view(self, flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        """``slot``'s parameter as a view of the whole flat buffer ``flat`` (``numel`` elements)."""
        return flat.narrow(0, slot.offset, slot.numel).view(slot.shape)


def make_layout(
    name: str,
    parameters: Iterable[tuple[str, Sequence[int]]],
    dtype: torch.dtype,
    world_size: int,
    requires_grad: bool = True,
    block: int = 1,
    precision: Precision | None = None,
) -> GroupLayout:
    """Lay ``(name, shape)`` parameters, which have the policy ``precision``, out in the given order; see the law."""
    named = [(n, tuple(shape)) for n, shape in parameters]
    align = alignment(dtype)
    plain = [math.lcm(align, own) for own in _own_blocks([math.prod(shape) for _, shape in named], block)]
    align = math.lcm(align, block)
    rows = [math.lcm(own, _row(shape)) for own, (_, shape) in zip(plain, named, strict=True)]
    blocks = [BLOCK if math.prod(shape) >= BLOCKED_NUMEL else 1 for _, shape in named]
    for aligns in (list(map(math.lcm, rows, blocks)), rows, list(map(math.lcm, plain, blocks))):
        layout = _place(name, named, aligns, math.lcm(align, *aligns), dtype, world_size, requires_grad)
        if layout.padding <= ROW_PADDING * layout.numel:
            break
    else:
        layout = _place(name, named, plain, align, dtype, world_size, requires_grad)
    if precision is None:
        return layout
    return replace(layout, param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)


def excerpt(layout: GroupLayout, slots: Iterable[Slot]) -> tuple[list[range], GroupLayout]:
    """The ranges of a shard to send so that ``slots`` arrive, and the layout of what arrives.

    A range is sent by every rank if any rank has a part of one of ``slots`` there, so that all send the same::

        shard of rank 0   |## norm1 ##|......................|          |## norm1 ##|.......|
        shard of rank 1   |................|## norm2 ##|.....|  ─────▶  |...........|#norm2#|

    The excerpts side by side are a flat buffer again, by the same law. A slot that runs from one shard into the next
    is still in one piece there: it reaches the end of the one and begins the other, so it also reaches the end of the
    one's excerpt and begins the other's. The new layout has ``slots`` in the order given, that of the flat buffer.
    """
    slots, align = list(slots), alignment(layout.dtype)
    pieces = [layout.piece(slot, rank) for slot in slots for rank in range(layout.world_size)]
    ranges = [range(0)]
    for piece in sorted((p for p in pieces if p.length), key=lambda p: p.in_shard):
        stop = _round_up(piece.in_shard + piece.length, align)
        if piece.in_shard <= ranges[-1].stop:
            ranges[-1] = range(ranges[-1].start, max(stop, ranges[-1].stop))
        else:
            ranges.append(range(piece.in_shard, stop))
    ranges = [r for r in ranges if r] or [range(align)]
    part = sum(map(len, ranges))

    placed: list[Slot] = []
    for slot in slots:
        rank, at = divmod(slot.offset, layout.shard_numel)
        offset = rank * part + sum(len(r) for r in ranges if r.stop <= at)
        offset += next((at - r.start for r in ranges if at in r), 0)
        end = placed[-1].end if placed else 0
        placed.append(replace(slot, offset=offset if slot.numel else _round_up(end, align)))
    return ranges, replace(layout, slots=tuple(placed), numel=layout.world_size * part)


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether numbers of ``dtype`` are codes, which mean something with a scale beside them: integers, 8-bit floats.

    A frozen weight may have such a dtype. It is sharded and gathered as it is, and the model's own code dequantizes it.
    """
    return not dtype.is_complex and (not dtype.is_floating_point or dtype.itemsize < 2)


def alignment(dtype: torch.dtype) -> int:
    """``ALIGNMENT`` in elements of ``dtype``."""
    return max(1, ALIGNMENT // dtype.itemsize)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


def _place(
    name: str,
    named: Sequence[tuple[str, tuple[int, ...]]],
    aligns: Sequence[int],
    shard_align: int,
    dtype: torch.dtype,
    world_size: int,
    requires_grad: bool,
) -> GroupLayout:
    slots, end = [], 0
    for (parameter, shape), align in zip(named, aligns, strict=True):
        slots.append(Slot(parameter, shape, offset=_round_up(end, align)))
        end = slots[-1].end
    numel = world_size * _round_up(max(1, math.ceil(end / world_size)), shard_align)
    return GroupLayout(name, dtype, requires_grad, world_size, tuple(slots), numel)


def _own_blocks(numels: Sequence[int], block: int) -> list[int]:
    """What each parameter's offset is a multiple of, so that large and small ones share no block."""
    large = [numel >= BLOCKED_NUMEL for numel in numels]
    return [block if here or before else 1 for here, before in zip(large, [False, *large])]


def _row(shape: Sequence[int]) -> int:
    """Elements of one row (everything but dimension 0); a vector has no rows to keep whole."""
    return max(1, math.prod(shape[1:])) if len(shape) > 1 else 1


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
