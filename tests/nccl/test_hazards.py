"""What could go wrong with memory on NCCL's stream, one after the other: docs/cuda.md has the argument for each.

Each test trains in one process with a recorded process group (`recording.py`) and asserts an order of events. Each then
breaks the code that sees to the order, and asserts that this is found: by the log, or by numbers that are NaN.
"""

from __future__ import annotations

import contextlib
import importlib
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import zerofx
from tests.nccl.events import Log, races, spans, touch, under_way
from tests.nccl.recording import Change, alone_with
from tests.nccl.stand_in import NAME
from zerofx import _torch
from zerofx.passes import edit
from zerofx.passes.ops import discard
from zerofx.runtime.ranks import watch
from zerofx.runtime.ranks.agree import OutOfStepError
from zerofx.runtime.state import weights as weights_module
from zerofx.runtime.state.group import ShardGroup, groups_of

EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)
LOW = zerofx.MixedPrecision(torch.bfloat16)


class Training:
    """Three layers and an optimizer. ``step`` trains once; the log begins behind what sharding them took."""

    def __init__(self, log: Log, optimizer: str = "zerofx", **options: Any) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4))
        self.model = zerofx.compile(net, executor="eager", groups=EACH_LAYER, **options)
        self.optimizer = zerofx.AdamW(self.model.parameters(), lr=0.1)
        self.log = log
        log.clear()

    @property
    def groups(self) -> dict[str, ShardGroup]:
        return {group.layout.name: group for group in groups_of(self.model)}

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(4, 8)).float().square().mean()

    def step(self, inside: bool = False) -> float:
        loss = self.loss()
        with zerofx.step_in_backward(self.optimizer) if inside else contextlib.nullcontext():
            loss.backward()
        if not inside:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()


@contextlib.contextmanager
def training(change: Change | None = None, **options: Any) -> Iterator[Training]:
    with alone_with(change) as log:
        yield Training(log, **options)


def clean(log: Log) -> None:
    """No race, and nothing under way at the end."""
    assert not races(log.events)
    assert not under_way(log.events)


def reads(log: Log, of: Any, kind: str = "compute") -> list[int]:
    """The places of events of a kind that read the memory of a tensor."""
    return [i for i, e in enumerate(log.events) if e.kind == kind and touch(spans([of]), e.reads)]


def starts_of(log: Log, what: str, of: Any) -> list[int]:
    """The places where collectives start that touch the memory of a tensor."""
    return log.where("start", what, spans([of]))


# ---- no race in anything that trains ---------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "2, bfloat16": {"stage": 2, "mixed_precision": LOW},
    "3, bfloat16": {"stage": 3, "mixed_precision": LOW},
    "3, all stay gathered": {"stage": 3, "memory_budget": float("inf")},
    "3, a leaf module": {"stage": 3, "leaf_modules": ["2"]},
    "2, a leaf module": {"stage": 2, "leaf_modules": ["2"]},
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_touches_memory_that_a_collective_is_at(way: str) -> None:
    with training(**WAYS[way]) as run:
        losses = [run.step() for _ in range(3)]
        clean(run.log)
        assert run.log.where("start"), "nothing travelled"
        assert torch.tensor(losses).isfinite().all()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_no_sync_keeps_is_reduced_without_a_race(stage: int) -> None:
    with training(stage=stage) as run:
        for _ in range(2):
            with zerofx.no_sync(run.model):
                run.loss().backward()
            run.step()
        clean(run.log)


def test_reductions_on_a_stream_of_their_own_race_with_no_gather() -> None:
    import torch.distributed as dist

    with alone_with() as log:
        other = dist.new_group(backend=NAME)
        run = Training(log, stage=3, reduce_group=other)
        for _ in range(2):
            run.step()
        clean(log)
        assert len({event.stream for event in log.events if event.kind == "start"}) == 2


# ---- a gathered buffer is freed while its all-gather is under way ----------------------------------------------------


def test_a_gathered_buffer_is_freed_behind_the_wait_for_it() -> None:
    with training(stage=3) as run:
        run.step()
        frees = run.log.where("free")
        assert frees
        for free in frees:
            buffer = run.log.events[free].writes
            start = max(i for i in run.log.where("start", "all-gather", buffer) if i < free)
            _, wait = run.log.span_of(start)
            readers = [i for i in run.log.where("compute", over=buffer) if start < i < free]
            assert start < wait < min(readers) and max(readers) < free
        clean(run.log)


def free_at_the_start(gm: GraphModule) -> None:
    for wait in edit.tagged(gm.graph, "wait"):
        with gm.graph.inserting_before(wait):
            gm.graph.call_function(discard, (wait.args[0],))


def test_a_buffer_that_is_freed_before_the_wait_is_found() -> None:
    with training(free_at_the_start, stage=3) as run:
        with contextlib.suppress(RuntimeError):  # the wait finds no memory
            run.step()
        assert any("free" in race and "all-gather" in race for race in races(run.log.events))


# ---- a replica is refreshed in place while the last graph still reads it ---------------------------------------------


@pytest.mark.parametrize("precision", [None, LOW], ids=["", "bfloat16"])
def test_a_refresh_starts_behind_the_last_reader_and_is_waited_for_before_the_next(precision: Any) -> None:
    with training(stage=2, mixed_precision=precision) as run:
        run.step()
        run.log.clear()
        run.step()
        run.step()
        for group in run.groups.values():
            first, second = (run.log.span_of(i) for i in starts_of(run.log, "all-gather", group.replica))
            readers = reads(run.log, group.replica)
            between = [i for i in readers if i < second[0]]
            behind = [i for i in readers if i > second[0]]
            assert between and first[1] < min(between)
            assert behind and second[1] < min(behind)
        clean(run.log)


def forget_the_wait(gm: GraphModule) -> None:
    for node in edit.tagged(gm.graph, "refresh"):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def test_a_refresh_that_nobody_waits_for_is_found() -> None:
    with training(forget_the_wait, stage=2) as run:
        run.step()
        loss = run.step()
        assert any("compute" in race and "all-gather" in race for race in races(run.log.events))
        assert loss != loss, "the replica was not overwritten while it was read"  # NaN


# ---- a shard is updated by the optimizer while a gather reads it -----------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_optimizer_writes_a_shard_behind_the_wait_for_the_last_gather_of_it(stage: int) -> None:
    with training(stage=stage) as run:
        for _ in range(2):
            run.step()
        for group in run.groups.values():
            writes = run.log.where("compute", "adamw", spans([group.shard]))
            assert len(writes) == 2
            gathers = [run.log.span_of(i) for i in starts_of(run.log, "all-gather", group.shard)]
            assert gathers and not [1 for start, wait in gathers for i in writes if start < i < wait]
        clean(run.log)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_while_a_gather_reads_the_shard_is_found(stage: int) -> None:
    with training(stage=stage) as run:
        run.step()
        run.log.clear()
        run.loss().backward()
        group = run.groups["2"]
        group.shard.add_(0)  # counts as a write, or stage 2 has nothing to gather
        buffer = group.weights.start_gather()
        run.optimizer.step()
        assert any("adamw" in race and "all-gather" in race for race in races(run.log.events))
        torch.ops._c10d_functional.wait_tensor(buffer)


# ---- a gradient's pack is used again while it is reduced -------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_pack_is_let_go_while_it_travels_held_by_the_collective_and_written_by_nobody(stage: int) -> None:
    with training(stage=stage) as run:
        run.step()
        reductions = run.log.where("start", "all-reduce" if stage == 0 else "reduce-scatter")
        if stage == 0:
            del reductions[0]  # which parameters are used
        assert len(reductions) == 3
        dropped = 0
        for i in reductions:
            start, wait = run.log.span_of(i)
            pack = run.log.events[start].reads
            dropped += len([j for j in run.log.where("drop", over=pack) if start < j < wait])
            assert not [j for j in run.log.where("compute", over=pack) if start < j < wait]
        assert dropped >= 3, "nobody has let go of a pack: this shows nothing"
        clean(run.log)


def write_to_the_pack(gm: GraphModule) -> None:
    for node in edit.tagged(gm.graph, "reduce_scatter"):
        with gm.graph.inserting_after(node):
            gm.graph.call_function(torch.ops.aten.zero_.default, (node.args[0],))


def test_a_pack_that_is_written_while_it_travels_is_found() -> None:
    with training(write_to_the_pack, stage=3) as run:
        run.step()
        assert any("zero_" in race and "reduce-scatter" in race for race in races(run.log.events))


# ---- step_in_backward ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_in_backward_comes_behind_all_that_reads_the_weights_and_before_their_next_gather(stage: int) -> None:
    with training(stage=stage) as run:
        run.step(inside=True)
        run.step(inside=True)
        loss = run.step(inside=True)
        assert loss == loss
        assert not races(run.log.events)
        for group in run.groups.values():
            gathers = [run.log.span_of(i) for i in starts_of(run.log, "all-gather", group.shard)]
            for write in run.log.where("compute", "adamw", spans([group.shard])):
                assert not [1 for start, wait in gathers if start < write < wait]


def test_replicas_are_refreshed_ahead_while_backward_goes_on() -> None:
    """Or the test above says nothing of stages 1 and 2."""
    with training(stage=2) as run:
        run.step(inside=True)
        loss = run.loss()
        run.log.clear()
        forward = len(run.log.events)
        with zerofx.step_in_backward(run.optimizer):
            loss.backward()
        ahead = [i for i in run.log.where("start", "all-gather") if i > forward]
        assert ahead and max(run.log.where("compute", "adamw")) > min(ahead)
        run.loss()
        clean(run.log)


def test_a_replica_that_is_refreshed_ahead_of_its_last_reader_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = importlib.import_module("zerofx.features.step_in_backward.step")
    monkeypatch.setattr(step, "_last_reads", lambda graph: {})

    def read_once_more(gm: GraphModule) -> None:
        """A reader of the weights behind the gradients, as a model may have one."""
        for node in edit.tagged(gm.graph, "ahead"):
            (source,) = [
                n for n in edit.tagged(gm.graph, "refresh") if n.meta["zerofx"].group == node.meta["zerofx"].group
            ]
            with gm.graph.inserting_after(node):
                gm.graph.call_function(torch.ops.aten.sum.default, (source,))

    with training(read_once_more, stage=2) as run:
        run.step(inside=True)
        assert any("sum" in race and "all-gather" in race for race in races(run.log.events))


# ---- the watchdog aborts ---------------------------------------------------------------------------------------------


def test_behind_an_abort_nothing_is_computed_stepped_or_saved(tmp_path: Path) -> None:
    with training(stage=3) as run:
        run.step()
        run.loss().backward()
        before = {name: group.shard.clone() for name, group in run.groups.items()}
        group = run.groups["0"]
        one = watch.watch_of(group.group_name)
        assert one is not None
        one._fail("ranks 0 and 1 are out of step")
        assert group.process_group.aborted == 1
        with pytest.raises(OutOfStepError, match="out of step"):
            run.optimizer.step()
        with pytest.raises(OutOfStepError, match="out of step"):
            run.loss()
        with pytest.raises(OutOfStepError, match="out of step"):
            zerofx.save(tmp_path / "saved", run.model, run.optimizer)
        assert all(group.shard.equal(before[name]) for name, group in run.groups.items())
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("config", "aborted"), [("cpu:gloo,cuda:nccl", 1), ("cuda:nccl", 1), ("cpu:gloo", 0)])
def test_nccl_is_aborted_in_a_group_that_has_gloo_beside_it(
    monkeypatch: pytest.MonkeyPatch, config: str, aborted: int
) -> None:
    class Group:
        def __init__(self) -> None:
            self.aborted = self.received = 0

        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

        def abort(self) -> None:
            self.aborted += 1

        def recv(self, *args: Any) -> Any:
            self.received += 1
            raise RuntimeError("timed out")

    group = Group()
    monkeypatch.setattr(_torch.distributed, "resolve_process_group", lambda name: group)
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda _: config)
    _torch.abort_collectives("any")
    assert (group.aborted, group.received) == (aborted, int("gloo" in config))


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """What is put on the device inside goes into a CUDA graph, for all that zerofx knows."""
    with unittest.mock.patch.object(weights_module, "is_captured", lambda device: True):
        yield


@pytest.mark.parametrize("stage", [1, 2])
def test_a_captured_forward_refreshes_though_the_replica_is_fresh(stage: int) -> None:
    with training(stage=stage) as run:
        run.step()
        run.loss()  # the replicas are fresh
        run.log.clear()
        with capture():
            run.step()
        assert len(run.log.where("start", "all-gather")) == 3
        clean(run.log)


@pytest.mark.parametrize("stage", [1, 2])
def test_what_replays_have_written_is_seen_by_an_ordinary_forward(stage: int) -> None:
    with training(stage=stage) as run:
        run.step()
        with capture():
            run.step()
        run.loss()
        for group in run.groups.values():
            group.shard.data.fill_(0.25)  # as a replay does: no version counter tells
        expected = run.loss().item()
        for group in run.groups.values():
            assert group.replica is not None and (group.replica == 0.25).all()
        assert expected == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_under_way_where_a_capture_ends(stage: int) -> None:
    with training(stage=stage) as run:
        run.step(inside=True)
        with torch.no_grad():
            run.loss()  # waits for what was refreshed ahead; a forward that has a backward to come puts steps off
        run.log.clear()
        with capture():
            run.step(inside=True)
        clean(run.log)
        assert len(run.log.where("compute", "adamw")) == 3


# ---- expandable segments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 1 << 20, float("inf")])
def test_no_page_that_a_collective_is_at_is_given_back(budget: float | None) -> None:
    """With expandable segments a free page may be unmapped, and an access to it is a fault instead of wrong numbers."""
    with training(stage=3, memory_budget=budget) as run:
        for _ in range(2):
            run.step()
        assert not [race for race in races(run.log.events) if race.startswith("free")]
        held = [work for work in run.groups["0"].process_group.under_way if work.shelf]
        assert not held
