"""Tiles cover segments, and nothing else."""

from __future__ import annotations

import pytest
import torch

from zerofx.kernels.segments import ALIGNMENT, make_tiles

SEGMENTS = [(0, 1, 0), (32, 0, 5), (64, 127, 1), (192, 256, 0), (448, 1000, 2), (1472, 0, 1)]


@pytest.mark.parametrize("block", [32, 128, 1024])
def test_every_element_of_a_segment_lies_in_one_tile_and_no_other_element_does(block: int) -> None:
    rows = torch.full((1500,), -1)
    for start, length, row in SEGMENTS:
        rows[start : start + length] = row
    covered, found = torch.zeros(1500, dtype=torch.int64), torch.full((1500,), -1)
    for start, length, row, _ in make_tiles([SEGMENTS], block).tolist():
        covered[start : start + length] += 1
        found[start : start + length] = row
    assert torch.equal(covered, (rows >= 0).long())
    assert torch.equal(found, rows)


@pytest.mark.parametrize("block", [32, 128, 1024])
def test_tiles_are_aligned_not_empty_and_no_longer_than_a_block(block: int) -> None:
    starts, lengths, _, _ = make_tiles([SEGMENTS], block).unbind(1)
    assert starts.remainder(ALIGNMENT).eq(0).all()
    assert lengths.gt(0).all() and lengths.le(block).all()


def test_without_segments_there_are_no_tiles() -> None:
    for runs in ([], [[]], [[(0, 0, 0)]]):
        tiles = make_tiles(runs)
        assert tiles.shape == (0, 4) and tiles.dtype is torch.int64


def test_tiles_of_several_runs_are_those_of_each_with_its_number() -> None:
    tiles = make_tiles([SEGMENTS, [], SEGMENTS[:3]], 128)
    assert torch.equal(tiles[tiles[:, 3] == 0], make_tiles([SEGMENTS], 128))
    assert torch.equal(tiles[tiles[:, 3] == 2][:, :3], make_tiles([SEGMENTS[:3]], 128)[:, :3])
    assert set(tiles[:, 3].tolist()) == {0, 2}


@pytest.mark.parametrize(
    "segments, block, message",
    [
        ([(0, 33, 0), (32, 1, 0)], 32, "overlaps"),
        ([(64, 1, 0), (0, 1, 0)], 32, "overlaps"),
        ([(16, 1, 0)], 32, "starts off"),
        ([(0, -1, 0)], 32, "negative"),
        ([(0, 1, -1)], 32, "negative"),
        ([(0, 1, 0)], 48, "multiple of 32"),
        ([(0, 1, 0)], 0, "positive"),
    ],
)
def test_segments_that_break_the_law_are_refused(
    segments: list[tuple[int, int, int]], block: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_tiles([segments], block)
