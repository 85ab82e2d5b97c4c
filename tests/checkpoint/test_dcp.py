"""Tensors are read where they lie in the files that hold them, and only where they lie there row by row."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from zerofx.checkpoint import dcp


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 4), torch.tensor(5.0), torch.empty(0, 4), torch.randn(10**5).bfloat16(), torch.ones(7, dtype=bool)],
    ids=["matrix", "scalar", "empty", "long", "bool"],
)
def test_the_bytes_of_a_saved_tensor_are_found(tensor: torch.Tensor) -> None:
    data = saved(tensor)
    found = dcp.only_tensor(data)
    assert found is not None
    assert data[found.start : found.stop] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("data", [b"", b"abc", bytes(100), saved([torch.ones(2), torch.ones(3)]), saved("text")])
def test_what_is_not_one_tensor_is_left_to_pytorch(data: bytes) -> None:
    assert dcp.only_tensor(data) is None


class Strided(nn.Module):
    """Memory in another order than rows, and views of larger memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.turned = nn.Parameter(torch.randn(5, 3, generator=generator).t())
        self.image = nn.Parameter(torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last))
        self.register_buffer("part", torch.randn(9, generator=generator)[::2])
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("odd", torch.randn(3, generator=generator).bfloat16())


@pytest.mark.parametrize("wanted", [True, False])
def test_tensors_of_any_strides_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    zerofx.save(tmp_path / "c", Strided(0))
    if not wanted:
        (tmp_path / "c" / "zerofx.json").unlink()  # of someone else: read by PyTorch
    found = []
    original = dcp._Reader._copy

    def copy(self: Any, item: Any, planner: Any) -> bool:
        found.append(original(self, item, planner))
        return found[-1]

    monkeypatch.setattr(dcp._Reader, "_copy", copy)
    module = Strided(1)
    zerofx.load(tmp_path / "c", module)
    for name, value in Strided(0).state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert set(found) == {wanted}
