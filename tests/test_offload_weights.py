"""Weights and gradients in files, beside the optimizer's state: the numbers of a run in memory, bit for bit."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.slow import quick_if, slow
from tests.test_offload import BF16, EACH_LAYER, OPTIMIZERS, Net, in_files, small, spoil, steps, whole
from tests.workers import Workers
from zerofx.runtime.state.group import groups_of


def offload(folder: str, options: dict[str, Any], parts: str) -> zerofx.Offload:
    weights, gradients = "w" in parts and options["stage"] == 3, "g" in parts
    return zerofx.Offload(folder, folder if gradients else None, folder if weights else None)


def at_rest(model: torch.nn.Module, where: zerofx.Offload) -> bool:
    """No shard is in memory that is to be in the file, and a backward leaves no gradient there."""
    model(torch.ones(4, 91, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
    gc.collect()
    groups = groups_of(model)
    for file in {group.home.file for group in groups}:
        file.settle()  # type: ignore[union-attr]
    summary = zerofx.memory_summary(model)
    kinds = {"gradients": where.gradients, "shards": where.weights}
    wrong = [kind for kind, place in kinds.items() if place is not None and summary.nbytes[kind]]
    said = [name for name, place in {"gradients": where.gradients, "weights": where.weights}.items() if place]
    nbytes = sum(group.shard.numel() * group.shard.itemsize for group in groups)
    return not wrong and all(name in summary.on_disk_of for name in said) and summary.on_disk >= nbytes * len(said)


def both_ways(folder: str, options: dict[str, Any], optimizer: str, how: str, parts: str, low: bool) -> list[bool]:
    def run(where: zerofx.Offload | None) -> tuple[list[torch.Tensor], list[bool]]:
        net = Net().bfloat16() if low else Net()
        model = zerofx.compile(net, groups=EACH_LAYER, offload=where, **options)
        step = OPTIMIZERS[optimizer](list(model.parameters()))
        losses = steps(model, step, how, 3)
        with torch.no_grad():
            losses.append(model(torch.ones(2, 91, dtype=losses[0].dtype if not low else torch.bfloat16)).float().mean())
        found = [*losses, *whole(model)]
        return found, [] if where is None else [in_files(step), at_rest(model, where)]

    wanted, _ = run(None)
    with small():
        found, kept = run(offload(folder, options, parts))
    gc.collect()
    equal = all(a.equal(b) for a, b in zip(found, wanted, strict=True)) and all(x.isfinite().all() for x in found)
    return [bool(equal), *kept]


EAGER = {"stage": 3, "executor": "eager"}
TWO = {"stage": 2, "executor": "eager"}
CASES: dict[str, tuple[dict[str, Any], str, str, str, bool]] = {
    "3": (EAGER, "zerofx", "accumulation", "wg", False),
    "3 weights": (EAGER, "zerofx", "", "w", False),
    "3 gradients": (EAGER, "zerofx", "accumulation", "g", False),
    "3 decayed in part, no_sync": (EAGER, "decayed in part", "no_sync", "wg", False),
    "3 in backward": (EAGER, "decayed in part", "in backward", "wg", False),
    "3 torch": (EAGER, "torch AdamW", "accumulation", "wg", False),
    "3 sgd": (EAGER, "torch SGD", "", "wg", False),
    "3 foreach": (EAGER, "torch foreach", "", "wg", False),
    "3 fused": (EAGER, "torch fused", "", "wg", False),
    "3 torch in backward": (EAGER, "torch AdamW", "in backward", "wg", False),
    "3 bf16": ({**EAGER, "mixed_precision": BF16}, "zerofx", "accumulation", "wg", False),
    "3 bf16 moments": (EAGER, "bf16 moments", "", "wg", False),
    "3 all gathered": ({**EAGER, "memory_budget": float("inf")}, "zerofx", "", "wg", False),
    "3 masters": (EAGER, "zerofx", "", "wg", True),
    "3 split masters": (EAGER, "split", "no_sync", "wg", True),
    "2": (TWO, "zerofx", "accumulation", "g", False),
    "2 decayed in part, no_sync": (TWO, "decayed in part", "no_sync", "g", False),
    "2 in backward": (TWO, "decayed in part", "in backward", "g", False),
    "2 bf16": ({**TWO, "mixed_precision": BF16}, "zerofx", "accumulation", "g", False),
    "2 torch": (TWO, "torch AdamW", "", "g", False),
    "2 masters": (TWO, "zerofx", "", "g", True),
    "1": ({**TWO, "stage": 1}, "zerofx", "accumulation", "g", False),
}


@quick_if(lambda case: case == "2")
@pytest.mark.parametrize("case", CASES)
def test_weights_and_gradients_in_files_give_the_same_numbers(workers2: Workers, tmp_path: Path, case: str) -> None:
    assert workers2.run(both_ways, str(tmp_path), *CASES[case]) == [[True] * 3] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_three_ranks_and_both_executors_give_the_same_numbers(
    workers3: Workers, tmp_path: Path, stage: int, executor: str
) -> None:
    options = {"stage": stage, "executor": executor}
    for how in ("accumulation", "in backward"):
        optimizer = "zerofx" if how == "accumulation" else "decayed in part"
        found = workers3.run(both_ways, str(tmp_path), options, optimizer, how, "wg", False, timeout=300)
        assert found == [[True] * 3] * 3, how


def resumed(folder: str, optimizer: str) -> list[bool]:
    """Two steps, a checkpoint, a third; and the third anew from it, into files and into memory."""

    def fresh(where: zerofx.Offload | None) -> tuple[torch.nn.Module, Any]:
        model = zerofx.compile(Net(), groups=EACH_LAYER, offload=where, **EAGER)
        return model, OPTIMIZERS[optimizer](list(model.parameters()))

    found = []
    with small(kept=1 << 14):
        where = offload(folder, EAGER, "wg")
        model, step = fresh(where)
        steps(model, step, "", 2)
        zerofx.save(folder + "/saved", model, step)
        wanted = [*steps(model, step, "", 1, first=2), *whole(model)]
        full = zerofx.full_state_dict(model, rank0_only=False)
        found.append(all(x.equal(y) for x, y in zip(full.values(), whole(model), strict=True)))
        for place in (where, None):
            again, its = fresh(place)
            steps(again, its, "", 1, first=7)  # numbers that the checkpoint's must replace
            zerofx.load(folder + "/saved", again, its)
            its.zero_grad()
            result = [*steps(again, its, "", 1, first=2), *whole(again)]
            found += [all(a.equal(b) for a, b in zip(result, wanted, strict=True)), in_files(its) == bool(place)]
    return found


@pytest.mark.parametrize("optimizer", ["zerofx", slow("torch AdamW")])
def test_a_run_goes_on_from_a_checkpoint_of_files(workers2: Workers, tmp_path: Path, optimizer: str) -> None:
    assert workers2.run(resumed, str(tmp_path), optimizer) == [[True] * 5] * 2


def failed(folder: str, how: str, rank: int = 1) -> list[str]:
    """What every rank hears of what goes wrong on one, in the midst of a graph."""
    patch = pytest.MonkeyPatch()
    with small():
        model = zerofx.compile(Net(), groups=EACH_LAYER, offload=offload(folder, EAGER, "wg"), **EAGER)
        step = OPTIMIZERS["decayed in part"](list(model.parameters()))
        steps(model, step, "", 1)
        if dist.get_rank() == rank:
            file = groups_of(model)[0].home.file
            assert file is not None
            if how == "full":
                patch.setattr(os, "posix_fallocate", _no_space)
                file._bury()
                file._free.clear()
            else:
                spoil(file.path, how, patch)
        try:
            steps(model, step, "", 1)
        except zerofx.OffloadError as e:
            patch.undo()
            try:
                zerofx.save(folder + "/saved", model, step)
            except zerofx.CheckpointError as refused:
                return [str(e), str(refused)]
            return [str(e), "saved"]
        finally:
            patch.undo()
    return ["", ""]


def _no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("vanished", "cannot be found: No such file"),
        ("short", ", and should have"),
        ("unwritable", "cannot be written: Input/output error"),
        ("full", "cannot be enlarged: No space left on device"),
    ],
)
def test_what_goes_wrong_in_a_graph_is_an_error_on_all_ranks(
    workers2: Workers, tmp_path: Path, how: str, said: str
) -> None:
    for error, refused in workers2.run(failed, str(tmp_path), how):
        assert said in error and "rank 1: " in error and "rank1-" in error, error
        assert "The optimizer's state is a mixture of two steps now" in error
        assert said in refused and "Saving to" in refused, refused
    assert not (tmp_path / "saved").exists()


def evaluated(folder: str) -> str:
    """What a rank hears of an evaluation in which rank 1 cannot read."""
    patch = pytest.MonkeyPatch()
    with small(kept=1 << 10):
        model = zerofx.compile(Net(), groups=EACH_LAYER, offload=offload(folder, EAGER, "wg"), **EAGER)
        step = OPTIMIZERS["zerofx"](list(model.parameters()))
        steps(model, step, "", 1)
        with torch.no_grad():
            assert model(torch.ones(4, 91)).isfinite().all()
        if dist.get_rank() == 1:
            spoil(groups_of(model)[0].home.file.path, "short", patch)  # type: ignore[union-attr]
        try:
            with torch.no_grad():
                model(torch.ones(4, 91))
        except zerofx.OffloadError as e:
            return str(e)
        finally:
            patch.undo()
    return ""


def test_an_evaluation_that_cannot_read_is_an_error_on_all_ranks(workers2: Workers, tmp_path: Path) -> None:
    for error in workers2.run(evaluated, str(tmp_path)):
        assert "rank 1: " in error and "What was computed without gradients is not right" in error, error


def deep(folder: str, layers: int) -> int:
    """The most bytes of extents that were in memory at one time, of a model of equal layers."""
    from tests.test_host_memory import WIDTH, Deep
    from zerofx.runtime.state import state_file

    most = 0
    pin = state_file.StateFile.pin

    def counted(self: Any, extent: Any) -> None:
        nonlocal most
        pin(self, extent)
        most = max(most, sum(each.nbytes for each in self._extents.values() if each.here))

    patch = pytest.MonkeyPatch()
    with small():
        where = zerofx.Offload(folder, folder, folder)
        model = zerofx.compile(
            Deep(layers), groups=zerofx.Grouping((torch.nn.Linear,), min_bytes=0), offload=where, **EAGER
        )
        step = zerofx.AdamW(model.parameters(), lr=0.01, max_grad_norm=1.0)
        patch.setattr(state_file.StateFile, "pin", counted)
        try:
            for _ in range(2):
                model(torch.ones(2, WIDTH)).square().mean().backward()
                step.step()
                step.zero_grad()
        finally:
            patch.undo()
    return most


def test_what_a_step_has_in_memory_does_not_grow_with_the_model(workers2: Workers, tmp_path: Path) -> None:
    small_one, large_one = (workers2.run(deep, str(tmp_path), layers) for layers in (3, 8))
    assert small_one == large_one and small_one[0] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": zerofx.Offload(weights="cpu")}, "weights= is built for the folder of optimizer= alone"),
        ({"offload": zerofx.Offload("/a", gradients="/b")}, "gradients= is built for the folder of optimizer= alone"),
        ({"offload": zerofx.Offload("/a", gradients="cpu")}, "gradients= is built for the folder of optimizer= alone"),
        ({"offload": zerofx.Offload("cpu", gradients="/a")}, "gradients= is built for the folder of optimizer= alone"),
        ({"offload": zerofx.Offload("/a", weights="/a"), "stage": 2}, "with stage=2: the weights are whole on every"),
        ({"offload": zerofx.Offload("cpu", weights="cpu"), "stage": 2}, "with stage=2: the weights are whole on every"),
        ({"offload": zerofx.Offload("cpu", "cpu"), "leaf_modules": [torch.nn.Linear]}, "gradients= is not built for"),
    ],
)
def test_what_is_not_built_is_refused(options: dict[str, Any], said: str, fake_world: Any) -> None:
    fake_world(2)
    with pytest.raises(ValueError, match=said):
        zerofx.shard(Net(), **options)
