"""Codes on the wire: the bytes that they take, how they are listed, and how layouts keep their blocks whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.counting import CollectiveLog, count_collectives
from tests.slow import quick_if
from tests.test_wire import CHANGES, EACH_LAYER, SMALL
from tests.workers import Workers
from zerofx.model.layout import BLOCKED_NUMEL, make_layout
from zerofx.model.wire import sent_whole


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def test_a_step_sends_the_bytes_of_its_changes_codes(workers2: Workers) -> None:
    coded, plain = (workers2.run(bytes_sent, wire, 2) for wire in (CHANGES, None))
    assert coded[0][0] / plain[0][0] < 0.15
    assert coded[0][0] == coded[0][1]


def second_step(model: nn.Module) -> CollectiveLog:
    """What a step of `Wide` sends once its graphs are compiled."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with count_collectives() as log:
            model(torch.ones(2, 256)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return log


def bytes_sent(wire: zerofx.Wire | None, stage: int) -> tuple[int, int]:
    """Counted at the process group, and predicted."""
    model = zerofx.compile(Wide(), stage=stage, executor="eager", wire=wire, groups=EACH_LAYER)
    return sum(event.bytes for event in second_step(model).events), zerofx.predict(model).wire_bytes


@quick_if(lambda wire: wire.weights == "bf16")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("wire", "most"),
    [
        (zerofx.Wire("bf16", "bf16"), 0.51),
        (zerofx.Wire("int8", "int8"), 0.27),
        (zerofx.Wire("fp8", "fp8"), 0.27),
        (zerofx.Wire("int8", "int4"), 0.23),
        (zerofx.Wire(None, "int4"), 0.72),
    ],
    ids=str,
)
def test_a_step_sends_the_bytes_of_codes_and_scales(
    workers2: Workers, stage: int, wire: zerofx.Wire, most: float
) -> None:
    coded, plain = (workers2.run(bytes_sent, w, stage) for w in (wire, None))
    assert len(set(coded)) == 1
    assert coded[0][0] / plain[0][0] < most
    assert coded[0][0] == coded[0][1]


def test_a_listing_shows_what_is_written_in_codes_and_read() -> None:
    options: dict[str, Any] = {"stage": 3, "groups": EACH_LAYER, "backend": "gloo", "executor": "eager"}
    found = str(zerofx.dry_run(Wide(), torch.ones(2, 256), world_size=2, wire=SMALL, **options))
    for line in ("quantize layers.0    34.6 kB", "start    layers.0    69.2 kB", "dequant  layers.0   264.2 kB"):
        assert line in found, found


def test_why_a_gather_stands_where_it_does_is_said_of_the_buffer_and_not_of_its_codes() -> None:
    said = []
    for wire in (None, SMALL):
        options: dict[str, Any] = {"stage": 3, "groups": EACH_LAYER, "backend": "gloo", "executor": "eager"}
        record = zerofx.dry_run(Wide(), torch.ones(2, 256), world_size=2, memory_budget=600_000, wire=wire, **options)
        lines = str(record.explain("all_gather layers.2")).splitlines()
        said.append([line for line in lines if "stands" in line or "earlier" in line])
    assert said[0] and said[0] == said[1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("block", [32, 256, 1000])
def test_a_layout_keeps_blocks_of_large_parameters_whole_on_every_number_of_ranks(world_size: int, block: int) -> None:
    shapes = [("w", (70, 70)), ("b", (70,)), ("norm", (3,)), ("v", (4096,)), ("u", (99, 101)), ("end", (5,))]
    layout = make_layout("g", shapes, torch.float32, world_size, block=block)
    assert layout.shard_numel % block == 0
    for slot, following in zip(layout.slots, layout.slots[1:]):
        if slot.numel >= BLOCKED_NUMEL:
            assert slot.offset % block == 0
        if (slot.numel >= BLOCKED_NUMEL) != (following.numel >= BLOCKED_NUMEL):
            assert slot.end <= following.offset // block * block
    whole = {i for r in sent_whole(layout) for i in r}
    for slot in layout.slots:
        assert whole.isdisjoint(range(slot.offset, slot.end)) == (slot.numel >= BLOCKED_NUMEL)
        assert slot.numel >= BLOCKED_NUMEL or whole.issuperset(range(slot.offset, slot.end))
