"""State in files: the numbers of a run in memory, bit for bit; and an error on every rank where a file fails."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn

import zerofx
from tests.slow import slow
from tests.workers import Workers
from zerofx.runtime.optim import through_file
from zerofx.runtime.state import raw_file, state_file
from zerofx.runtime.state.group import groups_of
from zerofx.runtime.state.home import Home

EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)
OPTIMIZERS: dict[str, Any] = {
    "zerofx": lambda ps: zerofx.AdamW(ps, lr=0.1, max_grad_norm=1.0),
    "decayed in part": lambda ps: zerofx.AdamW(
        [{"params": [p for p in ps if p.ndim > 1]}, {"params": [p for p in ps if p.ndim == 1], "weight_decay": 0.0}],
        lr=0.1,
    ),
    "bf16 moments": lambda ps: zerofx.AdamW(ps, lr=0.1, moments=torch.bfloat16),
    "split": lambda ps: zerofx.AdamW(ps, lr=0.1, master="split"),
    "torch AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "torch SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "torch foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "torch fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front, self.expert, self.head = nn.Linear(91, 143), nn.Sequential(nn.Linear(143, 143)), nn.Linear(143, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.expert(self.front(x).tanh()).tanh())


@contextlib.contextmanager
def small(chunk: int = 2048, buffer: int = 5 * 4096, kept: int = 0) -> Iterator[None]:
    """Chunks so small that the net above has several, which end in the midst of vectors."""
    before = state_file.CHUNK, through_file.CHUNK, through_file.BUFFER, state_file.KEPT
    try:
        state_file.CHUNK = through_file.CHUNK = chunk
        through_file.BUFFER, state_file.KEPT = buffer, kept
        yield
    finally:
        state_file.CHUNK, through_file.CHUNK, through_file.BUFFER, state_file.KEPT = before
        Home.any_away = False


def steps(model: nn.Module, optimizer: Any, how: str, count: int, first: int = 0) -> list[torch.Tensor]:
    """Losses of ``count`` steps of two micro-batches from step ``first`` on."""
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        one, two = torch.randn(2, 4, 91, generator=generator).to(dtype)
        if how == "no_sync":
            with zerofx.no_sync(model):
                model(one).float().square().mean().backward()
        elif how == "accumulation":
            model(one).float().square().mean().backward()
        losses.append(model(two).float().square().mean())
        if how == "in backward":
            with zerofx.step_in_backward(optimizer):
                losses[-1].backward()
        else:
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[operator]


def in_files(optimizer: torch.optim.Optimizer) -> bool:
    """All state with an element per weight is in a file, and nothing of it in memory."""
    found = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, zerofx.ShardedTensor)]
    return bool(found) and all(x._local.untyped_storage().nbytes() == 0 for x in found)


def both_ways(folder: str, options: dict[str, Any], optimizer: str, how: str, low: bool = False) -> bool:
    def run(offload: Any) -> list[torch.Tensor]:
        net = Net().bfloat16() if low else Net()
        model = zerofx.compile(net, groups=EACH_LAYER, offload=offload, **options)
        step = OPTIMIZERS[optimizer](list(model.parameters()))
        losses = steps(model, step, how, 3)
        if offload is not None:
            assert in_files(step)
            summary = zerofx.memory_summary(model, step)
            state = [x._local for s in step.state.values() for x in s.values() if isinstance(x, zerofx.ShardedTensor)]
            assert summary.on_disk >= sum(x.nbytes for x in state) and "on disk" in str(summary)
            assert summary.nbytes["optimizer state"] < 1000  # counters of steps
        return [*losses, *whole(model)]

    wanted = run(None)
    with small():
        found = run(folder)
    gc.collect()
    return all(a.equal(b) for a, b in zip(found, wanted, strict=True)) and all(x.isfinite().all() for x in found)


BF16 = zerofx.MixedPrecision(torch.bfloat16)
CASES = {
    "3": ({"stage": 3, "executor": "eager"}, "zerofx", ""),
    "3 torch": ({"stage": 3, "executor": "eager"}, "torch AdamW", "accumulation"),
    "3 decayed in part": ({"stage": 3, "executor": "eager"}, "decayed in part", "no_sync"),
    "3 in backward": ({"stage": 3, "executor": "eager"}, "decayed in part", "in backward"),
    "3 in backward torch": ({"stage": 3, "executor": "eager"}, "torch AdamW", "in backward"),
    "3 sgd": ({"stage": 3, "executor": "eager"}, "torch SGD", ""),
    "3 foreach": ({"stage": 3, "executor": "eager"}, "torch foreach", ""),
    "3 fused": ({"stage": 3, "executor": "eager"}, "torch fused", ""),
    "3 bf16": ({"stage": 3, "executor": "eager", "mixed_precision": BF16}, "zerofx", "no_sync"),
    "3 bf16 moments": ({"stage": 3, "executor": "eager"}, "bf16 moments", ""),
    "2": ({"stage": 2, "executor": "eager"}, "zerofx", "accumulation"),
    "2 bf16": ({"stage": 2, "executor": "eager", "mixed_precision": BF16}, "zerofx", ""),
    "1": ({"stage": 1, "executor": "eager"}, "zerofx", "no_sync"),
    "1 torch": ({"stage": 1, "executor": "eager"}, "torch AdamW", ""),
    "one copy": ({"stage": 3, "executor": "eager", "one_copy": True}, "zerofx", ""),
    "leaf module": ({"stage": 3, "executor": "eager", "leaf_modules": ["expert"]}, "zerofx", ""),
}


FAST = ("3 decayed in part", "3 in backward torch", "2 bf16", "1 torch")


@pytest.mark.parametrize("case", [case if case in FAST else slow(case) for case in CASES])
def test_state_in_files_gives_the_same_numbers(workers2: Workers, tmp_path: Path, case: str) -> None:
    assert workers2.run(both_ways, str(tmp_path), *CASES[case]) == [True, True]
    assert not list(tmp_path.iterdir())  # a run that ends leaves nothing


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_three_ranks_and_both_executors_give_the_same_numbers(
    workers3: Workers, tmp_path: Path, stage: int, executor: str
) -> None:
    options = {"stage": stage, "executor": executor}
    assert workers3.run(both_ways, str(tmp_path), options, "zerofx", "no_sync", timeout=300) == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["zerofx", "split"])
def test_masters_of_a_low_precision_model_live_in_files(workers2: Workers, tmp_path: Path, optimizer: str) -> None:
    options = {"stage": 3, "executor": "eager"}
    assert workers2.run(both_ways, str(tmp_path), options, optimizer, "", low=True) == [True, True]


# ---- without a compiler: gradients are given ------------------------------------------------------------------------


def sharded(offload: Any, optimizer: str = "zerofx", net: nn.Module | None = None) -> tuple[nn.Module, Any]:
    model = zerofx.shard(net or Net(), groups=EACH_LAYER, stage=3, offload=offload)
    return model, OPTIMIZERS[optimizer](list(model.parameters()))


def give(model: nn.Module, optimizer: Any, seed: int) -> None:
    """A step with gradients that are the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def resumed(folder: str, optimizer: str, saver: str) -> list[bool]:
    """Two steps, a checkpoint, a third; and the third anew from the checkpoint, into files and into memory."""
    found: list[bool] = []
    with small(kept=1 << 14):
        model, step = sharded(folder, optimizer)
        for seed in range(2):
            give(model, step, seed)
        saved = folder + "/saved"
        if saver == "zerofx":
            zerofx.save(saved, model, step)
        else:
            checkpoint.save({"model": dict(model.named_parameters()), "optim": named(model, step)}, checkpoint_id=saved)
        step.state_dict()
        give(model, step, 2)
        wanted = whole(model)
        for offload in (folder, None):
            again, its = sharded(offload, optimizer)
            give(again, its, 7)  # numbers that the checkpoint's must replace
            if saver == "zerofx":
                zerofx.load(saved, again, its)
            else:
                state = {"model": dict(again.named_parameters()), "optim": named(again, its)}
                checkpoint.load(state, checkpoint_id=saved)
                for p in again.parameters():
                    its.state[p]["step"].fill_(2)
                its.load_state_dict(its.state_dict())
            give(again, its, 2)
            found += [
                all(a.equal(b) for a, b in zip(whole(again), wanted, strict=True)),
                in_files(its) == bool(offload),
            ]
    plain, its = sharded(None, optimizer)
    for seed in range(3):
        give(plain, its, seed)
    return [*found, all(a.equal(b) for a, b in zip(whole(plain), wanted, strict=True))]


def named(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    names = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]}.{what}": value
        for p, state in optimizer.state.items()
        for what, value in state.items()
        if isinstance(value, zerofx.ShardedTensor)
    }


@pytest.mark.parametrize(("optimizer", "saver"), [("zerofx", "zerofx"), ("torch AdamW", "zerofx"), ("zerofx", "torch")])
def test_a_run_goes_on_from_a_checkpoint_of_files(
    workers2: Workers, tmp_path: Path, optimizer: str, saver: str
) -> None:
    assert workers2.run(resumed, str(tmp_path), optimizer, saver) == [[True] * 5] * 2


def failed(folder: str, how: str, rank: int = 1) -> str:
    """What every rank hears of what goes wrong on one."""
    patch = pytest.MonkeyPatch()
    with small():
        try:
            model, step = sharded(folder, "torch AdamW" if how.startswith("torch") else "zerofx")
            if how.endswith("full") and dist.get_rank() == rank:
                patch.setattr(os, "posix_fallocate", no_space)
            give(model, step, 0)
            if dist.get_rank() == rank:
                path = groups_of(model)[0].home.file.path  # type: ignore[union-attr]
                spoil(path, how.removeprefix("torch "), patch)
            give(model, step, 1)
        except zerofx.OffloadError as e:
            patch.undo()
            try:
                zerofx.save(folder + "/saved", model, step)
            except zerofx.CheckpointError as refused:
                return f"{e} || {refused}"
            return str(e)
        finally:
            patch.undo()
    return ""


def no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def spoil(path: Path, how: str, patch: pytest.MonkeyPatch) -> None:
    if how in ("vanished", "replaced"):
        path.unlink()
        if how == "replaced":
            path.write_bytes(bytes(1 << 20))
    elif how == "short":
        os.truncate(path, 3 * 4096)
    elif how == "damaged":
        with path.open("r+b") as file:
            file.seek(5 * 4096 + 17)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
    elif how == "unwritable":

        def no_device(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        patch.setattr(os, "pwritev", no_device)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("full", "cannot be enlarged: No space left on device"),
        ("torch full", "cannot be enlarged: No space left on device"),
        ("vanished", "cannot be found: No such file"),
        ("replaced", "another file is in its place"),
        ("short", ", and should have"),
        ("damaged", "is damaged, or somebody writes to it"),
        ("torch damaged", "is damaged, or somebody writes to it"),
        ("unwritable", "cannot be written: Input/output error"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_an_error_on_all(workers2: Workers, tmp_path: Path, how: str, said: str) -> None:
    for text in workers2.run(failed, str(tmp_path), how):
        error, refused = text.split(" || ")
        assert said in error and "rank1-" in error, error
        assert "The optimizer's state is a mixture of two steps now" in error
        assert "Saving to" in refused and said in refused
    assert not (tmp_path / "saved").exists()


def refused(folder: str, how: str) -> str:
    path = Path(folder)
    number = next(state_file._numbers)
    theirs = path / f"rank1-{number + 1}.state"
    if how == "crash":  # what a run that died has left is not locked, and is made anew
        theirs.write_bytes(b"1" * 9999)
        model, step = sharded(folder)
        give(model, step, 0)
        return ""
    try:
        with contextlib.ExitStack() as stack:
            if how == "locked" and dist.get_rank() == 1:
                stack.callback(os.close, raw_file.locked(theirs))
            sharded(folder)
    except zerofx.OffloadError as e:
        return str(e)
    return "nothing"


def test_a_second_run_on_the_same_files_is_an_error_on_all(workers2: Workers, tmp_path: Path) -> None:
    for text in workers2.run(refused, str(tmp_path), "locked"):
        assert "offload= on rank" in text and str(tmp_path) in text and "cannot be" in text
        assert "another run keeps its state there; give each run a folder of its own" in text


def test_what_a_crash_has_left_is_made_anew(workers2: Workers, tmp_path: Path) -> None:
    assert workers2.run(refused, str(tmp_path), "crash") == ["", ""]


def test_lent_state_is_the_state(workers2: Workers, tmp_path: Path) -> None:
    assert workers2.run(lent, str(tmp_path)) == [[True] * 4] * 2


def lent(folder: str) -> list[bool]:
    """``to_local()`` of a moment: read, written, held over a step."""

    def change(offload: Any) -> tuple[list[torch.Tensor], bool]:
        model, step = sharded(offload)
        give(model, step, 0)
        moment = step.state[next(model.parameters())]["exp_avg"]
        moment.to_local().mul_(2)
        held = moment.to_local()
        give(model, step, 1)
        seen = held.clone()
        del held
        give(model, step, 2)
        return [seen, *whole(model)], in_files(step)

    with small():
        found, away = change(folder)
    wanted, here = change(None)
    return [
        all(a.equal(b) for a, b in zip(found, wanted, strict=True)),
        away,
        not here,
        found[0].isfinite().all().item(),
    ]


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": 3}, 'offload=3: expected "cpu", the path of a folder, a zerofx.Offload, or None'),
        ({"offload": "/tmp/x", "stage": 0}, "with stage=0: its parameters are plain tensors"),
        ({"offload": zerofx.Offload(optimizer="/tmp/x", groups=["nobody"])}, "no group has such a name. There are"),
    ],
)
def test_what_is_not_built_is_refused(options: dict[str, Any], said: str, fake_world: Any) -> None:
    fake_world(2)
    with pytest.raises(ValueError, match=said):
        zerofx.shard(Net(), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": 3}, r'Offload\(optimizer=3\): expected "cpu", the path of a folder, or None'),
        ({"fraction": 0}, r"Offload\(fraction=0\): expected a number above 0, up to 1"),
        ({"groups": "blocks"}, "expected patterns of names"),
    ],
)
def test_an_offload_out_of_range_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        zerofx.Offload(**options)


def test_without_its_home_the_option_is_refused(fake_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from zerofx.compiler import checks

    fake_world(2)
    monkeypatch.setattr(checks, "HOMES", [])
    with pytest.raises(ValueError, match="this zerofx has no such home"):
        zerofx.shard(Net(), offload="/tmp/x")


def test_host_memory_on_a_cpu_moves_nothing_and_says_so(fake_world: Any) -> None:
    fake_world(2)
    with pytest.warns(UserWarning, match="the host's memory is where their state is already"):
        model = zerofx.shard(Net(), groups=EACH_LAYER, offload="cpu")
    assert all(group.home.file is None for group in groups_of(model))


def one_process(folder: str) -> list[Any]:
    with small():
        model = zerofx.shard(Net(), groups=EACH_LAYER, offload=zerofx.Offload(optimizer=folder, fraction=0.5))
        chosen = [group.home.file is not None for group in groups_of(model)]
        try:
            zerofx.AdamW(model.parameters(), moments="8bit")
        except ValueError as e:
            return [chosen, str(e)]
    return [chosen, ""]


def test_a_fraction_takes_the_largest_groups_and_codes_are_refused(workers2: Workers, tmp_path: Path) -> None:
    for chosen, said in workers2.run(one_process, str(tmp_path)):
        assert chosen == [False, True, False]
        assert "codes and their scales have no chunks yet" in said
