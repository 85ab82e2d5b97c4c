"""What could go wrong between the device and the host's memory: docs/cuda.md has the argument for each.

Each test trains in one process, on streams that are not there (`lanes.py`), and asserts an order. It then breaks the
code that sees to the order, and asserts that this is found: by the log, or by numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import zerofx
from tests.nccl.events import Event, storage_span, under_way
from tests.nccl.lanes import Done, Pretended, alone_on_lanes, unordered
from tests.nccl.recording import Change, alone_with
from tests.nccl.test_hazards import LOW, Training
from tests.slow import slow_if
from zerofx.passes import edit
from zerofx.runtime.optim.adamw import AdamW
from zerofx.runtime.state import copies
from zerofx.runtime.state.copies import AcceleratorCopies

WAYS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "2, bfloat16": {"stage": 2, "mixed_precision": LOW},
    "3, bfloat16": {"stage": 3, "mixed_precision": LOW},
}
STEPS = 3


@contextlib.contextmanager
def training(change: Change | None = None, **options: Any) -> Iterator[Training]:
    with alone_on_lanes(change) as log:
        yield Training(log, offload="cpu", **options)


def trained(run: Training, inside: bool) -> list[Any]:
    losses = [run.step(inside) for _ in range(STEPS)]
    return [*losses, *(group.shard.clone() for group in run.groups.values())]


def without(inside: bool, **options: Any) -> list[Any]:
    with alone_with() as log:
        return trained(Training(log, **options), inside)


def alike(found: list[Any], wanted: list[Any]) -> bool:
    return all(a.equal(b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(found, wanted, strict=True))


@slow_if(lambda way, inside: way == "3" and inside)
@pytest.mark.parametrize("inside", [False, True], ids=["", "in backward"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_touches_memory_that_a_copy_is_at_and_numbers_are_those_of_the_device(way: str, inside: bool) -> None:
    with training(**WAYS[way]) as run:
        found = trained(run, inside)
        assert not unordered(run.log.events)
        batches = len(run.log.where("host waits"))
        assert batches > 4 * (1 if inside else STEPS), "no buffer was used again"
    assert alike(found, without(inside, **WAYS[way]))


# ---- what goes out was written, and is there -------------------------------------------------------------------------


def test_a_gradient_that_is_copied_before_it_is_reduced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorCopies, "begin", lambda self: None)
    with training(stage=3) as run:
        run.step()
        races = [race for race in found_in(run) if race.startswith("copy out while")]
        assert any("copy back" not in race for race in races), "by what computes the average, or reduces it"


def test_arithmetic_in_a_buffer_before_its_gradient_came_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Done, "synchronize", lambda self: None)
    with training(stage=3) as run:
        found = trained(run, inside=False)
        assert any("adamw host while copy out" in race for race in found_in(run))
    assert not alike(found, without(False, stage=3)), "the buffer had its numbers"


# ---- a buffer is used again ------------------------------------------------------------------------------------------


def test_a_buffer_is_used_again_behind_the_copy_back_from_it() -> None:
    with training(stage=3) as run:
        run.step()
        blocks = [i for i in run.log.where("block", "back") if run.log.events[i].stream == "out"]
        assert len(blocks) == len(run.log.where("host waits")) - 4


def test_a_buffer_that_is_used_again_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorCopies, "out_behind", lambda self, mark: None)
    with training(stage=3) as run:
        found = trained(run, inside=False)
        assert any("copy out while copy back" in race for race in found_in(run))
    assert not alike(found, without(False, stage=3)), "what went back was what it should have been"


# ---- who reads the weights next --------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["", "in backward"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_are_gathered_before_they_came_back_are_found(
    monkeypatch: pytest.MonkeyPatch, stage: int, inside: bool
) -> None:
    monkeypatch.setattr(AcceleratorCopies, "end", lambda self: None)
    with training(stage=stage) as run:
        found = trained(run, inside)
        assert any("all-gather" in race and "copy back" in race for race in found_in(run))
    assert not alike(found, without(inside, stage=stage)), "old weights were as good"


def test_weights_that_come_back_while_a_graph_reads_them_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_a_replica_that_is_refreshed_ahead_of_its_last_reader_is_found`: the reader comes behind the update."""
    step = importlib.import_module("zerofx.features.step_in_backward.step")
    monkeypatch.setattr(step, "_last_reads", lambda graph: {})
    monkeypatch.setattr(AcceleratorCopies, "end", lambda self: None)

    def read_once_more(gm: GraphModule) -> None:
        for node in edit.tagged(gm.graph, "ahead"):
            group = node.meta["zerofx"].group
            (source,) = [n for n in edit.tagged(gm.graph, "refresh") if n.meta["zerofx"].group == group]
            with gm.graph.inserting_after(node):
                gm.graph.call_function(torch.ops.aten.sum.default, (source,))

    with training(read_once_more, stage=2) as run:
        run.step(inside=True)
        assert any("sum" in race and "copy back" in race for race in found_in(run))


# ---- a step that ends in the midst -----------------------------------------------------------------------------------


def broken_step(run: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic fails, and gradients are freed while chunks behind the first are on their way."""

    def fails(self: AdamW, keyed: list[Any], factor: float) -> None:
        assert not keyed, "the arithmetic fails"

    run.loss().backward()
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="the arithmetic fails"):
        patch.setattr(AdamW, "_step_runs", fails)
        run.optimizer.step()
    for p in run.model.parameters():
        run.log.add(Event("free", "gradient", None, "", (), storage_span(p.grad._local)))
    run.optimizer.zero_grad()


def test_behind_an_error_gradients_are_freed_when_they_are_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(stage=3) as run:
        broken_step(run, monkeypatch)
        assert len(run.log.where("compute", "copy")) > 2
        assert not found_in(run)
        assert not under_way(run.log.events)


def test_a_gradient_that_is_freed_while_it_goes_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorCopies, "end", lambda self: None)
    with training(stage=3) as run:
        broken_step(run, monkeypatch)
        assert any("gradient while copy out" in race for race in found_in(run))


# ---- what CUDA is asked for ------------------------------------------------------------------------------------------


def test_a_step_that_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(stage=3) as run:
        run.loss().backward()
        monkeypatch.setattr(Pretended, "captured", True)
        with pytest.raises(RuntimeError, match="a step is captured in a CUDA graph, and state in the host's memory"):
            run.optimizer.step()


def test_buffers_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(AcceleratorCopies, "stream", lambda self: None)
    one = AcceleratorCopies(torch.device("cuda", 0))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: asked.update(kwargs))
        one.pinned(64)
    assert asked == {"dtype": torch.uint8, "device": "cpu", "pin_memory": True}


def test_every_name_of_pytorch_that_copies_use_is_there() -> None:
    """The rest of it was replaced: names are what can be asserted without a GPU."""
    used = set(re.findall(r"torch\.(cuda|accelerator)\.(\w+)", inspect.getsource(copies)))
    assert used == {("accelerator", "current_stream")}
    assert all(hasattr(getattr(torch, module), name) for module, name in used)
    assert all(hasattr(torch.Stream, name) for name in ("wait_event", "record_event", "__enter__", "__exit__"))
    assert hasattr(torch.Event, "synchronize")


def found_in(run: Training) -> list[str]:
    return unordered(run.log.events)


def test_a_gpu_is_taken_and_a_cpu_is_not() -> None:
    assert AcceleratorCopies.takes(torch.device("cuda", 1)) and not AcceleratorCopies.takes(torch.device("cpu"))
    assert copies.copies_of(torch.device("cpu")) is None
    assert zerofx.Offload(optimizer="cpu").folder is None
