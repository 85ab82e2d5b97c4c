"""A checkpoint is whole or not there, whenever a save dies; and nothing outside of its folder is touched."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from zerofx.checkpoint import folder as folders

Folder = Path


class Died(BaseException):
    """What a killed process does: nothing more."""


def model(value: float) -> nn.Module:
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.fill_(value)
    return module


def value_of(path: Path) -> float:
    module = model(0.0)
    zerofx.load(path, module)
    return module.weight[0, 0].item()


def calls_of_a_save(
    path: Path, monkeypatch: pytest.MonkeyPatch, die_at: int | None, error: BaseException | None = None, **options: Any
) -> list[str]:
    """Save 2.0 and die before the ``die_at``-th change to the file system, or have that one raise ``error``.

    Returns what the changes were.
    """
    changes: list[str] = []

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if die_at is not None and len(changes) >= die_at and error is None:
                raise Died  # it cleans nothing up either
            if len(changes) == die_at:
                changes.append(name)
                raise error  # type: ignore[misc]
            changes.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    with monkeypatch.context() as m:
        monkeypatch = m
        watch(os, "fsync")
        watch(Path, "rename")
        watch(Path, "mkdir")
        watch(folders.Written, "write")
        watch(shutil, "rmtree")
        if die_at is None:
            zerofx.save(path, model(2.0), **options)
        else:
            with contextlib.suppress(
                Died, KeyboardInterrupt, zerofx.CheckpointError
            ):  # failing to clean up is no failure
                zerofx.save(path, model(2.0), **options)
    return changes


@pytest.mark.parametrize("error", [None, OSError("disk"), KeyboardInterrupt()], ids=["dies", "fails", "interrupted"])
@pytest.mark.parametrize("step", [None, 7])
def test_a_save_that_dies_or_fails_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None, error: BaseException | None
) -> None:
    options = {} if step is None else {"step": step, "keep": 2}
    zerofx.save(tmp_path / "count", model(1.0), **options)
    changes = calls_of_a_save(tmp_path / "count", monkeypatch, None, **options)
    assert {"fsync", "rename", "mkdir", "write"} <= set(changes)
    seen = set()
    for die_at in (i for i, name in enumerate(changes) if name != "write" or i % 9 == 0):
        path = tmp_path / f"c{die_at}"
        zerofx.save(path, model(1.0), **options)
        calls_of_a_save(path, monkeypatch, die_at, error, **options)
        latest = zerofx.latest(path)
        assert latest is not None
        if isinstance(error, OSError):
            assert not latest.name.startswith("."), "it did not put the old one back"
        found = value_of(path)
        seen.add(found)
        assert found in (1.0, 2.0), die_at
        zerofx.save(path, model(3.0), **options)  # the next one clears up after it
        assert value_of(path) == 3.0
        if step is None:
            assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
        else:
            assert sorted(p.name for p in path.iterdir()) == ["step-00000007"]
    assert seen == {1.0, 2.0}


def die_between_two_renames(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Replace a checkpoint by one of 2.0, and die when that is whole, under its hidden name alone."""
    zerofx.save(path, model(1.0), **options)
    changes = calls_of_a_save(path.with_name(f"{path.name}-count"), monkeypatch, None, **options)
    first = len(changes) - changes[::-1].index("rename")  # nothing was there to be replaced: its only rename
    calls_of_a_save(path, monkeypatch, first, **options)


def test_a_save_that_dies_after_one_that_died_leaves_what_that_one_had_made_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for die_at in range(0, 12, 2):
        path = tmp_path / f"c{die_at}"
        die_between_two_renames(path, monkeypatch)
        assert not path.exists() and value_of(path) == 2.0
        calls_of_a_save(path, monkeypatch, die_at)
        assert value_of(path) == 2.0, die_at


@pytest.mark.parametrize("text", ["", '{"zerofx": '])
def test_a_save_that_dies_as_it_writes_the_mark_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def dies(_: Any, file: Any, **options: Any) -> None:
        file.write(text)
        file.flush()
        raise Died

    zerofx.save(tmp_path, model(1.0), step=1)
    with monkeypatch.context() as patch, contextlib.suppress(Died):
        patch.setattr(json, "dump", dies)
        patch.setattr(folders, "abandon", lambda folder: None)  # who is killed removes nothing
        zerofx.save(tmp_path, model(2.0), step=2)
    assert (tmp_path / ".step-00000002.tmp").exists()
    assert zerofx.latest(tmp_path) == tmp_path / "step-00000001" and value_of(tmp_path) == 1.0
    zerofx.save(tmp_path, model(3.0), step=2)
    assert value_of(tmp_path) == 3.0


@pytest.mark.parametrize("keep", [1, 2])
def test_a_step_that_is_whole_under_its_hidden_name_counts_and_is_removed_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    path = tmp_path / "c"
    die_between_two_renames(path, monkeypatch, step=1)
    assert not (path / "step-00000001").exists()
    zerofx.save(path, model(3.0), step=2, keep=keep)
    assert value_of(path) == 3.0
    if keep == 2:
        assert value_of(path / "step-00000001") == 2.0
    else:
        assert [p.name for p in path.iterdir()] == ["step-00000002"]


def test_all_is_forced_to_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power may go at any moment: a name must not be there before what it stands for, nor go unwritten itself."""
    events: list[Any] = []  # inodes that were forced to the disk, and names that were given
    fsync, rename = os.fsync, Path.rename

    def forced(handle: int) -> None:
        fsync(handle)
        events.append(os.fstat(handle).st_ino)

    def named(path: Path, target: Path) -> Path:
        events.append(target)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", forced)
    monkeypatch.setattr(Path, "rename", named)
    folder = zerofx.save(tmp_path / "c", model(1.0), more=torch.ones(3))
    at = events.index(folder)
    files = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert len(files) >= 4 and set(files.values()) | {folder.stat().st_ino} <= set(events[:at])
    assert max(files, key=lambda name: events.index(files[name])) == folders.MARK
    assert folder.stat().st_ino in events[events.index(files[folders.MARK]) : at]
    assert tmp_path.stat().st_ino in events[at:]


def test_the_last_k_are_left_and_what_dead_saves_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / ".step-00000001.tmp").mkdir(parents=True)
    (tmp_path / ".step-00000001.tmp" / "half").write_text("")
    for step in (1, 2, 3, 10):
        assert zerofx.save(tmp_path, model(step), step=step, keep=2) == tmp_path / f"step-{step:08}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-00000003", "step-00000010"]
    assert zerofx.latest(tmp_path) == tmp_path / "step-00000010" and value_of(tmp_path) == 10.0
    assert value_of(tmp_path / "step-00000003") == 3.0
    with pytest.warns(UserWarning, match="step-00000010 is of a later step"):
        zerofx.save(tmp_path, model(4.0), step=4, keep=1)  # of a run that went back
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-00000004", "step-00000010"]


def test_steps_sort_as_numbers_however_long_they_are(tmp_path: Path) -> None:
    for step in (99999999, 100000000):
        zerofx.save(tmp_path, model(step), step=step)
    latest = zerofx.latest(tmp_path)
    assert latest is not None and latest.name == "step-100000000"


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_text("\\begin{document}")
    with pytest.raises(zerofx.CheckpointError, match="no checkpoint"):
        zerofx.save(tmp_path / "c", model(1.0))
    assert (tmp_path / "c" / "thesis.tex").read_text() == "\\begin{document}"
    assert zerofx.latest(tmp_path / "c") is None and zerofx.latest(tmp_path / "nothing") is None


def test_linked_steps_are_neither_loaded_nor_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    zerofx.save(outside, model(1.0))
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "step-00000001").symlink_to(outside)
    for step in (2, 3):
        zerofx.save(inside, model(step), step=step, keep=1)
    assert (inside / "step-00000001").is_symlink() and value_of(outside) == 1.0


@pytest.mark.parametrize("options", [{"keep": 2}, {"keep": 0, "step": 1}])
def test_keep_needs_a_step_and_is_above_0(tmp_path: Path, options: Any) -> None:
    with pytest.raises(ValueError, match="keep="):
        zerofx.save(tmp_path / "c", model(1.0), **options)


def test_a_save_in_the_background_is_of_the_moment_it_was_called(tmp_path: Path) -> None:
    module = model(1.0)
    saving = zerofx.save(tmp_path / "c", module, background=True)
    with torch.no_grad():
        module.weight.fill_(5.0)
    assert saving.result() == tmp_path / "c" and saving.done()
    assert value_of(tmp_path / "c") == 1.0


def test_a_background_save_that_fails_says_so_once_and_the_next_one_goes_through(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "file").write_text("")
    saving = zerofx.save(tmp_path / "file" / "c", model(1.0), background=True)
    with pytest.raises(zerofx.CheckpointError, match="FileExistsError"):
        zerofx.save(tmp_path / "d", model(1.0))  # waits for it
    zerofx.save(tmp_path / "d", model(2.0))
    assert value_of(tmp_path / "d") == 2.0
    with pytest.raises(zerofx.CheckpointError):
        saving.result()
    assert any("in the background failed" in str(w.message) for w in recwarn)


def test_the_mark_says_what_was_written(tmp_path: Path) -> None:
    zerofx.save(tmp_path / "c", model(1.0), step=None)
    mark = json.loads((tmp_path / "c" / "zerofx.json").read_text())
    assert mark["format"] == 1 and mark["world_size"] == 1 and mark["zerofx"] == zerofx.__version__
    files = {p.name: p.stat().st_size for p in (tmp_path / "c").iterdir() if p.name != "zerofx.json"}
    assert {name: size for name, (size, _) in mark["files"].items()} == files


@pytest.mark.parametrize("saved", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
@pytest.mark.parametrize("current", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_a_learning_rate_stays_a_number_or_a_tensor_as_the_running_optimizer_has_it(
    tmp_path: Path, saved: Any, current: Any
) -> None:
    module = model(1.0)
    first, second = (zerofx.AdamW(module.parameters(), lr=lr) for lr in (saved, current))
    zerofx.save(tmp_path / "c", module, first)
    zerofx.load(tmp_path / "c", module, second)
    found = second.param_groups[0]["lr"]
    assert type(found) is type(current) and float(found) == 0.25
