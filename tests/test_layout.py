"""The law of layout.py: where parameters lie in a group's flat buffer, and which part of it a rank holds."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.model.layout import (
    ALIGNMENT,
    BLOCK,
    BLOCKED_NUMEL,
    ROW_PADDING,
    GroupLayout,
    Piece,
    Slot,
    alignment,
    contiguous_stride,
    excerpt,
    make_layout,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.complex64]
WORLD_SIZES = [1, 2, 3, 4, 7, 8, 48, 64]

dtypes = st.sampled_from(DTYPES)
world_sizes = st.sampled_from(WORLD_SIZES) | st.integers(1, 100)
shapes = st.lists(st.integers(0, 70), max_size=4).map(tuple) | st.tuples(st.integers(0, 5000), st.integers(0, 70))
groups = st.lists(shapes, max_size=6)


def layout_of(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, world_size: int = 2) -> GroupLayout:
    return make_layout("g", [(f"p{i}", shape) for i, shape in enumerate(shapes)], dtype, world_size)


def row(shape: tuple[int, ...]) -> int:
    """Elements of a row, 1 where there is none to keep whole."""
    return max(1, math.prod(shape[1:])) if len(shape) > 1 else 1


@settings(deadline=None)
@given(groups, dtypes, world_sizes)
def test_parameters_lie_in_order_aligned_and_apart(shapes, dtype, world_size) -> None:
    layout = layout_of(shapes, dtype, world_size)
    assert [slot.shape for slot in layout.slots] == shapes
    end = 0
    for slot in layout.slots:
        assert slot.offset >= end
        assert slot.offset * dtype.itemsize % ALIGNMENT == 0
        end = slot.offset + math.prod(slot.shape)
        assert slot.end == end
    assert end <= layout.numel
    assert layout.padding == layout.numel - sum(math.prod(shape) for shape in shapes) >= 0
    assert layout.nbytes == layout.numel * dtype.itemsize


@settings(deadline=None)
@given(groups, dtypes, world_sizes)
def test_shards_are_equal_aligned_and_not_empty(shapes, dtype, world_size) -> None:
    layout = layout_of(shapes, dtype, world_size)
    assert layout.shard_numel * world_size == layout.numel
    assert layout.shard_numel * dtype.itemsize % ALIGNMENT == 0
    assert layout.shard_numel > 0


@settings(deadline=None)
@given(groups, dtypes, world_sizes)
def test_the_pieces_of_all_ranks_tile_each_parameter_exactly(shapes, dtype, world_size) -> None:
    layout = layout_of(shapes, dtype, world_size)
    for slot in layout.slots:
        at = 0
        for rank in range(world_size):
            piece = layout.piece(slot, rank)
            if piece.length == 0:
                continue
            assert piece.in_parameter == at
            assert piece.in_shard >= 0
            assert piece.in_shard + piece.length <= layout.shard_numel
            assert rank * layout.shard_numel + piece.in_shard == slot.offset + at
            at += piece.length
        assert at == slot.numel


small = st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), max_size=6)


@settings(deadline=None, max_examples=50)
@given(small, dtypes, st.integers(1, 9))
def test_the_shards_side_by_side_are_the_flat_buffer(shapes, dtype, world_size) -> None:
    layout = layout_of(shapes, dtype, world_size)
    values = [torch.full(shape, i + 1).to(dtype) for i, shape in enumerate(shapes)]
    shards = torch.zeros(world_size, layout.shard_numel, dtype=dtype)
    for slot, value in zip(layout.slots, values, strict=True):
        for rank in range(world_size):
            piece = layout.piece(slot, rank)
            part = value.reshape(-1)[piece.in_parameter : piece.in_parameter + piece.length]
            shards[rank, piece.in_shard : piece.in_shard + piece.length] = part
    flat = shards.view(-1)  # what an all-gather of the shards returns
    for slot, value in zip(layout.slots, values, strict=True):
        view = layout.view(flat, slot)
        assert torch.equal(view, value)
        assert view.numel() == 0 or view.data_ptr() == flat.data_ptr() + slot.offset * dtype.itemsize
        assert slot.stride == contiguous_stride(slot.shape) == torch.empty(slot.shape).stride()
        assert torch.equal(flat.as_strided(slot.shape, slot.stride, slot.offset), value)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(shapes, st.booleans()), max_size=6), dtypes, world_sizes)
def test_the_excerpts_side_by_side_are_the_flat_buffer_of_the_parameters_taken(taken, dtype, world_size) -> None:
    layout = layout_of([shape for shape, _ in taken], dtype, world_size)
    slots = [slot for slot, (_, wanted) in zip(layout.slots, taken, strict=True) if wanted]
    ranges, part = excerpt(layout, slots)  # GroupLayout.__post_init__ checks that `part` obeys the law
    assert [(slot.name, slot.shape) for slot in part.slots] == [(slot.name, slot.shape) for slot in slots]
    assert part.shard_numel == sum(map(len, ranges)) <= layout.shard_numel
    for before, after in itertools.pairwise(ranges):
        assert before.stop < after.start
    align = alignment(dtype)
    assert all(r and r.start % align == r.stop % align == 0 for r in ranges)
    flat = torch.arange(layout.numel)
    shards = flat.view(world_size, -1)
    gathered = torch.cat([shard[r.start : r.stop] for shard in shards for r in ranges])
    for slot, at in zip(slots, part.slots, strict=True):
        assert torch.equal(part.view(gathered, at), layout.view(flat, slot))


def numel_of(shapes, units, dtype, world_size) -> int:
    """Of the cheapest flat buffer with every parameter, and every shard, on whole units, worked out again."""
    end = 0
    for shape, unit in zip(shapes, units, strict=True):
        end = math.ceil(end / unit) * unit + math.prod(shape)
    shard = math.lcm(ALIGNMENT // dtype.itemsize, *units)
    return max(1, math.ceil(end / world_size / shard)) * shard * world_size


@settings(deadline=None, max_examples=300)
@given(groups, dtypes, world_sizes)
def test_rows_and_blocks_are_whole_where_that_costs_little(shapes, dtype, world_size) -> None:
    layout = layout_of(shapes, dtype, world_size)
    align = ALIGNMENT // dtype.itemsize
    rows = [math.lcm(align, row(shape)) for shape in shapes]
    blocks = [math.lcm(align, BLOCK) if math.prod(shape) >= BLOCKED_NUMEL else align for shape in shapes]
    both = [math.lcm(r, b) for r, b in zip(rows, blocks, strict=True)]
    held = sum(map(math.prod, shapes))
    for units in (both, rows, blocks, [align] * len(shapes)):
        numel = numel_of(shapes, units, dtype, world_size)
        if numel - held <= ROW_PADDING * numel:
            break
    assert layout.numel == numel
    for slot, block in zip(layout.slots, blocks, strict=True):
        if units in (both, rows):
            assert slot.offset % row(slot.shape) == 0
        if units in (both, blocks):
            assert layout.keeps_blocks_whole(slot) == (block >= BLOCK > align)
        for rank in range(world_size):
            piece = layout.piece(slot, rank)
            if units in (both, rows):
                assert piece.in_parameter % row(slot.shape) == 0 == piece.length % row(slot.shape)
            if layout.keeps_blocks_whole(slot):
                assert piece.in_parameter % BLOCK == piece.in_shard % BLOCK == 0


def gpt_block(dim: int) -> list[tuple[int, ...]]:
    linears = [(3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim)]
    return [(dim,), (dim,), *itertools.chain.from_iterable((shape, shape[:1]) for shape in linears), (dim,), (dim,)]


def test_blocks_that_a_boundary_would_cut_or_that_lie_off_the_grid_are_not_whole() -> None:
    matrix, small = Slot("m", (64, 100), 256), Slot("s", (4095,), 8192)
    fits = GroupLayout("h.0", torch.float32, True, 2, (matrix, small), 2 * 6144)
    assert fits.keeps_blocks_whole(matrix) and not fits.keeps_blocks_whole(small)
    assert not dataclasses.replace(fits, numel=2 * 6272).keeps_blocks_whole(matrix)
    assert not fits.keeps_blocks_whole(dataclasses.replace(matrix, offset=128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [256, 512])
def test_every_matrix_of_a_gpt_block_has_whole_blocks_up_to_eight_ranks(dim: int, dtype: torch.dtype) -> None:
    for world_size in range(1, 9):
        layout = layout_of(gpt_block(dim), dtype, world_size)
        assert [layout.keeps_blocks_whole(slot) for slot in layout.slots] == [s.numel >= 4096 for s in layout.slots]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [256, 512])
def test_padding_of_a_gpt_block_is_below_one_percent(dim: int, dtype: torch.dtype) -> None:
    for world_size in range(2, 65):
        layout = layout_of(gpt_block(dim), dtype, world_size)
        assert layout.padding < layout.numel / 100, world_size


def test_a_large_matrix_is_cut_between_rows() -> None:
    layout = layout_of([(4096, 1024)], world_size=8)
    assert layout.padding == 0
    assert [layout.piece(layout.slots[0], r) for r in range(8)] == [Piece(0, r << 19, 1 << 19) for r in range(8)]


def test_a_little_padding_is_spent_on_whole_rows_and_much_is_not() -> None:
    layout = layout_of([(1001, 48)])
    assert layout.piece(layout.slots[0], 0).length == 502 * 48
    layout = layout_of([(101, 48)])
    assert layout.piece(layout.slots[0], 0).length == 2432  # 50.7 rows, to the next 32 elements


def test_the_example_of_the_docstring_in_real_alignment() -> None:
    layout = layout_of([(40, 40), (40,), (40,)], torch.float32)
    assert [slot.offset for slot in layout.slots] == [0, 1600, 1664]  # 128 bytes are 32 elements
    assert (layout.numel, layout.shard_numel) == (1728, 864)
    assert layout.piece(layout.slots[0], 1) == Piece(0, 864, 736)
    assert layout.piece(layout.slots[2], 0) == Piece(0, 0, 0)
    assert layout.piece(layout.slots[2], 1) == Piece(800, 0, 40)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_scalar_has_one_element_on_one_rank(world_size: int) -> None:
    layout = layout_of([()], world_size=world_size)
    (slot,) = layout.slots
    assert slot.numel == 1 and slot.stride == ()
    assert [layout.piece(slot, rank).length for rank in range(world_size)] == [1] + [0] * (world_size - 1)
    assert layout.view(torch.arange(float(layout.numel)), slot).item() == 0.0


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 5)])
def test_an_empty_parameter_takes_no_room_and_moves_nobody(shape: tuple[int, ...]) -> None:
    layout = layout_of([shape, (8, 8), shape, (8,), shape])
    assert [slot.offset for slot in layout.slots if slot.numel] == [s.offset for s in layout_of([(8, 8), (8,)]).slots]
    flat = torch.zeros(layout.numel)
    for slot in layout.slots:
        assert layout.view(flat, slot).shape == slot.shape
        if slot.numel == 0:
            assert [layout.piece(slot, rank).length for rank in range(2)] == [0, 0]


def test_a_group_of_nothing_is_padding_alone() -> None:
    layout = layout_of([], world_size=7)
    assert layout.slots == () and layout.numel == layout.padding == 7 * 32


def test_layouts_are_values() -> None:
    one, other = layout_of([(3, 4), ()]), layout_of([(3, 4), ()])
    assert one == other and hash(one) == hash(other) and len({one, other}) == 1
    assert one != dataclasses.replace(one, requires_grad=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.numel = 0  # type: ignore[misc]


@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_counts_elements(dtype: torch.dtype) -> None:
    assert alignment(dtype) * dtype.itemsize == ALIGNMENT


def make(slots: list[Slot], numel: int, world_size: int = 2) -> GroupLayout:
    return GroupLayout("h.0", torch.float32, True, world_size, tuple(slots), numel)


W, B = Slot("w", (8, 8), 0), Slot("b", (8,), 64)


def test_a_valid_layout_is_accepted() -> None:
    assert make([W, B], 128).shard_numel == 64


@pytest.mark.parametrize(
    ("slots", "numel", "world_size", "message"),
    [
        ([W, Slot("b", (8,), 32)], 128, 2, "'b' at 32 overlaps"),
        ([B, W], 128, 2, "'w' at 0 overlaps"),  # offsets must ascend
        ([W, Slot("b", (8,), 65)], 128, 2, "'b' at 65 .* not aligned"),
        ([Slot("w", (8, 8), -32)], 128, 2, "'w' at -32"),
        ([W, B], 64, 2, "64 elements"),  # too short for what it holds
        ([W, B], 128, 3, "do not divide over 3 ranks"),
        ([W, B], 96, 2, "do not divide"),  # shards of 48 elements are not aligned
    ],
)
def test_an_invalid_layout_is_refused_by_the_name_of_its_group(slots, numel, world_size, message) -> None:
    with pytest.raises(ValueError, match=rf"group 'h\.0': .*{message}"):
        make(slots, numel, world_size)
