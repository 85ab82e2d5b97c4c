"""What the checksum of a checkpoint's files finds, and that it does not depend on how bytes come."""

from __future__ import annotations

import itertools
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerofx.kernels.checksum import BLOCK, CHUNK, Checksum, checksum_of


def checksum(data: bytes, cuts: list[int] | None = None) -> int:
    result = Checksum()
    edges = [0, *sorted(cuts or []), len(data)]
    for start, end in itertools.pairwise(edges):
        result.update(memoryview(data)[start:end])
    return result.value


SIZES = [0, 1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + BLOCK + 13, 3 * CHUNK - 1]


@given(st.sampled_from(SIZES), st.lists(st.floats(0, 1), max_size=12), st.integers(0, 2**32))
def test_pieces_of_any_size_have_the_checksum_of_the_whole(size: int, cuts: list[float], seed: int) -> None:
    data = random.Random(seed).randbytes(size)
    assert checksum(data, [int(cut * size) for cut in cuts]) == checksum(data)


@given(st.sampled_from(SIZES[1:]), st.floats(0, 1, exclude_max=True), st.integers(0, 7), st.integers(0, 2**32))
def test_one_flipped_bit_is_found(size: int, place: float, bit: int, seed: int) -> None:
    data = random.Random(seed).randbytes(size)
    damaged = bytearray(data)
    damaged[int(place * size)] ^= 1 << bit
    assert checksum(bytes(damaged)) != checksum(data)


@pytest.mark.parametrize("size", [2 * BLOCK, 2 * BLOCK + 5, CHUNK + 3 * BLOCK])
def test_blocks_that_moved_were_lost_or_zeroed_are_found(size: int) -> None:
    data = random.Random(size).randbytes(size)
    first, second, rest = data[:BLOCK], data[BLOCK : 2 * BLOCK], data[2 * BLOCK :]
    damaged = [second + first + rest, first + rest, second + rest, bytes(BLOCK) + second + rest, data[:-8]]
    assert len({checksum(x) for x in [data, *damaged]}) == 6


def test_a_file_has_the_checksum_of_its_bytes(tmp_path: Path) -> None:
    for size in SIZES:
        data = random.Random(size).randbytes(size)
        (tmp_path / "file").write_bytes(data)
        assert checksum_of(tmp_path / "file") == checksum(data)


@pytest.mark.parametrize("size", SIZES)
def test_the_checksum_is_the_crc_of_the_sums_of_words(size: int) -> None:
    data = random.Random(size).randbytes(size)
    blocks = [data[at : at + BLOCK] for at in range(0, size, BLOCK)]
    sums = [
        sum(int.from_bytes(block[at : at + 8], "little") for at in range(0, len(block), 8)) % 2**64 for block in blocks
    ]
    assert checksum(data) == zlib.crc32(b"".join(x.to_bytes(8, "little") for x in sums))
