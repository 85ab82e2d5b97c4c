"""A rank's slice is at most 2N − 1 rectangles, and those of all ranks tile the parameter."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.checkpoint.boxes import boxes
from zerofx.model.layout import make_layout

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=5)


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.data())
def test_boxes_are_the_elements_of_the_slice_in_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).reshape(shape)
    found = boxes(shape, start, stop)
    seen = []
    for box in found:
        part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        assert part.numel() == box.numel > 0
        seen += part.flatten().tolist()
    assert seen == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert len({box.offsets for box in found}) == len(found)  # torch.distributed.checkpoint tells them apart by that


def test_a_slice_of_whole_rows_is_one_box() -> None:
    assert boxes((6, 5, 4), 20, 80) == [((1, 0, 0), (3, 5, 4))]


def test_a_slice_may_need_all_2n_minus_1_boxes() -> None:
    assert [len(boxes((5,) * n, 1, 5**n - 1)) for n in (1, 2, 3, 4)] == [1, 3, 5, 7]


@settings(max_examples=150, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=5), st.integers(1, 64))
def test_the_boxes_of_all_ranks_tile_every_parameter_at_any_world_size(shapes: list[list[int]], ranks: int) -> None:
    layout = make_layout("g", [(str(i), shape) for i, shape in enumerate(shapes)], torch.float32, ranks)
    for slot in layout.slots:
        hits = torch.zeros(slot.shape, dtype=torch.long)
        pieces = [layout.piece(slot, rank) for rank in range(ranks)]
        for box in itertools.chain(*(boxes(slot.shape, p.in_parameter, p.in_parameter + p.length) for p in pieces)):
            hits[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
        assert bool((hits == 1).all()), (slot, hits)
