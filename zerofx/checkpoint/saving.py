"""`save`: the state of a run into a folder, whole or not at all.

What happens, and on which thread when it is done in the background::

    the caller      states: what is to be saved, copied if it is not written at once ──▶ returns
    (or a thread)   plan: who writes what (torch.distributed.checkpoint's planner, on rank 0)
                    write: each rank its file, forced to the disk
                    commit: rank 0 writes the index and the mark, renames, removes what is too old

Each arrow is a `Ranks.together`: where one rank fails, all raise, the new folder is removed and the previous checkpoint
stands as it stood.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from zerofx._torch import DCP_VERSION, StorageInfo
from zerofx.checkpoint import extra as extras
from zerofx.checkpoint import folder as folders
from zerofx.checkpoint.cut_off import cut_off
from zerofx.checkpoint.dcp import INDEX
from zerofx.checkpoint.folder import Mark
from zerofx.checkpoint.nested import Form, check_readable, form_of, listed
from zerofx.checkpoint.ranks import CheckpointError, Counts, Ranks, compare_steps, steps_of
from zerofx.checkpoint.state import Optimizers, each_of, model_state, names_of, non_finite, optimizers_state, resident
from zerofx.runtime.state.group import groups_of
from zerofx.runtime.state.home import resident_of
from zerofx.runtime.state.parameter import ShardedTensor

CHOICE = "choice.txt"
"""Where `zerofx.compile` chose options, what it chose: for people to read."""


@overload
def save(
    path: str | Path,
    module: nn.Module,
    optimizer: Optimizers | None = ...,
    *,
    step: int | None = ...,
    keep: int | None = ...,
    background: Literal[False] = ...,
    **extra: Any,
) -> Path: ...


@overload
def save(
    path: str | Path,
    module: nn.Module,
    optimizer: Optimizers | None = ...,
    *,
    step: int | None = ...,
    keep: int | None = ...,
    background: Literal[True],
    **extra: Any,
) -> Saving: ...


def save(
    path: str | Path,
    module: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    background: bool = False,
    **extra: Any,
) -> Path | Saving:
    """Save ``module``, ``optimizer`` and whatever else makes up a run. Every rank must call it.

    The folder can be loaded by any number of ranks in any stage (`zerofx.load`), and by
    ``torch.distributed.checkpoint.load`` as ``{"model": ..., "optim": ...}``, into FSDP2 for one.

    Args:
        path: the checkpoint's folder; with ``step`` the folder of all checkpoints, this one is ``step-<step>`` in it.
            A checkpoint that is there already is replaced once the new one is whole.
        module: sharded in any stage, or plain. Of several ``nn.ModuleDict({"actor": actor, "critic": critic})``.
        optimizer: of ``module``'s parameters, or several of them; None: weights alone.
        step: of training; `zerofx.load` returns it.
        keep: how many checkpoints to leave in ``path``, this one included; None: all. Needs ``step``.
        background: return once the state is copied, and write in a thread of its own. One at a time: the next save
            waits for it.
        **extra: objects with ``state_dict()`` (schedulers, scalers, data loaders) or plain values.

    Returns:
        The checkpoint's folder; with ``background`` a `Saving`.

    Raises:
        CheckpointError: on every rank, if one of them cannot save: no space, a folder in the way that is no checkpoint,
            or weights that are not finite (they would push out a good checkpoint). What was there before is as it was,
            and the message says what is whole.
        OutOfStepError: on every rank: optimizers have stepped more often on one than on another. Nothing is written.
        ValueError: ``keep`` without ``step``.
    """
    if keep is not None and (step is None or keep < 1):
        raise ValueError(f"keep={keep!r} with step={step!r}: expected a number above 0, and a step.")
    ranks = Ranks.of(module)
    with ranks.call("zerofx.save"):
        return _save(folders.place(Path(path), step), ranks, module, optimizer, step, keep, background, extra)


def _save(
    target: Path,
    ranks: Ranks,
    module: nn.Module,
    optimizer: Optimizers | None,
    step: int | None,
    keep: int | None,
    background: bool,
    extra: dict[str, Any],
) -> Path | Saving:
    wait_for_pending(ranks)
    state: dict[str, Any] = {}
    form: Any = None

    def collect() -> Counts:
        nonlocal state, form
        stack.enter_context(resident(module))
        found = {"model": model_state(module)}
        if optimizer is not None:
            found["optim"] = optimizers_state(module, each_of(optimizer))
        _check_finite(module, found)
        state, form = listed(found), _form_of(found)
        return steps_of(module)

    with contextlib.ExitStack() as stack:
        what = f"Saving to {target}"
        compare_steps(what, module, ranks, ranks.together(what, collect))
        packed = extras.collect(extra | cut_off(module), ranks, form)
        weights = {name for names in names_of(module).values() for name in names}
        run = _Run(target, ranks, state, packed, step, keep, state["model"].keys() - weights)
        run.choices = _choices(module)
        if not background:
            return run()
        run.ranks, run.state, run.background = ranks.aside(), _copied(state), True
    _pending[ranks.key] = saving = Saving(run, ranks)
    return saving


class Saving:
    """A save in the background.

    One that fails says so in the next `save` or `load`, in `result`, and in a warning.
    """

    def __init__(self, run: Callable[[], Path], ranks: Ranks) -> None:
        self._run, self._ranks = run, ranks
        self._path: Path | None = None
        self._error: Exception | None = None
        self._told = False
        self._thread = threading.Thread(target=self._work, name="zerofx.save")  # no daemon: Python waits for it to end
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def result(self) -> Path:
        """Wait for it, on every rank. Returns the checkpoint's folder.

        Raises:
            CheckpointError: on every rank, where one of them failed.
        """
        with self._ranks.call("Saving.result"):
            self._join()
        self._told = True
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def wait(self) -> None:
        """Wait for it, on every rank; raises what `result` would, unless that has been raised already."""
        if self._told:
            self._join()
        else:
            self.result()

    def _join(self) -> None:
        """Ask each other until all are done: a rank that has died is noticed by that, and by nothing else."""
        while not all(self._ranks.all_gather(self.done())):
            self._thread.join(0.05)

    def _work(self) -> None:
        try:
            self._path = self._run()
        except Exception as e:
            self._error = e
            if self._ranks.rank == 0:
                warnings.warn(f"A save in the background failed: {e}", RuntimeWarning, stacklevel=1)


_pending: dict[str, Saving] = {}


def wait_for_pending(ranks: Ranks) -> None:
    """Wait for the save that these ranks have in the background, and raise what it has to say."""
    saving = _pending.pop(ranks.key, None)
    if saving is not None:
        saving.wait()


class _Run:
    """One save, from the states to the folder."""

    background = False
    choices = ""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        state: dict[str, Any],
        extra: bytes,
        step: int | None,
        keep: int | None,
        of_rank_0: Set[str],
    ) -> None:
        self.folder, self.ranks, self.state, self.extra, self.step, self.keep = folder, ranks, state, extra, step, keep
        self.of_rank_0 = of_rank_0  # what of the model ranks may differ in: buffers and extra state

    def __call__(self) -> Path:
        what = f"Saving to {self.folder}"
        [tmp, *_] = self.ranks.together(what, lambda: folders.begin(self.folder), only=0)
        try:
            self._write(what, tmp)
        except BaseException as e:
            if self.ranks.rank == 0:
                folders.abandon(self.folder)
            if isinstance(e, CheckpointError):
                left = folders.whole(self.folder) or folders.whole(self.folder.parent)
                raise CheckpointError(f"{e}. {f'The last whole checkpoint is {left}.' if left else ''}") from e
            raise
        later = folders.whole(self.folder.parent) if self.step is not None and self.ranks.rank == 0 else None
        if later is not None and later != self.folder:
            warnings.warn(
                f"{later} is of a later step than {self.folder.name}, which was saved now: it is what zerofx.load "
                "takes. Remove it if this run replaces it.",
                UserWarning,
                stacklevel=2,
            )
        return self.folder

    def _write(self, what: str, tmp: Path) -> None:
        ranks, planner = self.ranks, DefaultSavePlanner()
        local_plan: Any = None
        plans: list[SavePlan] = []
        index: Any = None
        mine: Any = None

        def plan() -> None:
            nonlocal local_plan
            planner.set_up_planner(self.state, is_coordinator=ranks.rank == 0)
            local_plan = planner.create_local_plan()
            if ranks.rank != 0:
                local_plan = replace(
                    local_plan, items=[item for item in local_plan.items if self._shares(planner, item)]
                )

        def plan_for_all() -> None:
            nonlocal plans, index
            plans, index = planner.create_global_plan(plans)

        def write() -> None:
            nonlocal mine
            mine = self._write_mine(tmp, planner.finish_plan(local_plan), planner)

        def commit() -> None:
            index.storage_data = {result.index: result.storage_data for results, _ in written for result in results}
            index.storage_meta, index.version = StorageMeta(self.folder.name), DCP_VERSION
            with folders.writing(tmp / INDEX) as file:
                pickle.dump(index, file)
            facts = [file.facts, *(fact for _, facts in written for fact in facts)]
            if self.choices:
                with folders.writing(tmp / CHOICE) as text:
                    text.write(self.choices.encode())
                facts.append(text.facts)
            mark = Mark(_version(), torch.__version__, self.step, ranks.size, dict(facts))
            folders.commit(self.folder, mark)

        ranks.together(what, plan)
        plans = ranks.gather(local_plan)
        ranks.together(what, plan_for_all, only=0)
        local_plan = ranks.scatter(plans)
        ranks.together(what, write)
        written = ranks.gather(mine)
        ranks.together(what, commit, only=0)
        if self.keep is not None:
            keep = self.keep
            ranks.together(f"{what} went well; removing older ones", lambda: folders.retire(self.folder, keep), only=0)

    def _shares(self, planner: DefaultSavePlanner, item: WriteItem) -> bool:
        """Whether this rank writes a part of it, or may be the one who writes it: not what is rank 0's alone."""
        top, name, *_ = planner.mappings[item.index.fqn]
        return item.type == WriteItemType.SHARD or top != "model" or name not in self.of_rank_0

    def _write_mine(
        self, tmp: Path, plan: SavePlan, planner: DefaultSavePlanner
    ) -> tuple[list[WriteResult], list[Any]]:
        """This rank's files: the tensors of its plan, one ``torch.save`` after the other, and its extra."""
        results = []
        with folders.writing(tmp / f"__{self.ranks.rank}_0.distcp") as file, _without_crc(not self.background):
            for item in plan.items:
                file.write(bytes(-file.size % 64))  # so that a tensor can be used where it lies
                at = file.size
                data: Any = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    file.write(data.getbuffer())
                else:
                    torch.save(_compact(data), file)  # type: ignore[arg-type]
                info = StorageInfo(file.name, at, file.size - at)
                results.append(WriteResult(index=item.index, size_in_bytes=info.length, storage_data=info))
        with folders.writing(tmp / extras.file_of(self.ranks.rank)) as extra:
            extra.write(self.extra)
        return results, [file.facts, extra.facts]


def _choices(module: nn.Module) -> str:
    """What was chosen for the options of ``module``, or for its parts, as `zerofx.explain` prints it."""
    families = dict.fromkeys(group.family for group in groups_of(module))
    found = [family.recipe.choice for family in families if family.recipe is not None]
    return "\n\n".join(f"{choice}" for choice in found if choice is not None)


def _form_of(state: dict[str, Any]) -> Form:
    """How leaves make up ``state``; all of them can be read again.

    Raises:
        CheckpointError: one cannot.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(listed(state))
    for key, value in planner.state_dict.items():
        if not isinstance(value, torch.Tensor):
            check_readable(value, f"{key}={type(value).__name__}")
    return form_of(state, planner.mappings)


def _check_finite(module: nn.Module, state: dict[str, Any]) -> None:
    values: dict[str, Any] = {}
    moments = state.get("optim", {"state": {}})["state"]
    for parameter, (name, *_) in names_of(module).items():
        values[name] = parameter
        values |= {f"{what} of {name}": value for what, value in moments.get(name, {}).items()}
    if (broken := non_finite(values)) is not None:
        raise CheckpointError(f"{broken} is not finite: a checkpoint of it would be of no use, and is not written")


def _copied(state: Any) -> Any:
    """``state`` in memory of its own, on the CPU."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_copied(value) for value in state]
    if isinstance(state, ShardedTensor):
        with resident_of([state]):
            return state.like(state._local.to("cpu", copy=True))
    return state.to("cpu", copy=True) if isinstance(state, torch.Tensor) else copy.deepcopy(state)


@contextlib.contextmanager
def _without_crc(wanted: bool) -> Iterator[None]:
    """``torch.save`` computes no CRCs of its own: those of the files are enough. Not in the background: it is a setting
    of the whole program."""
    before = torch.serialization.get_crc32_options()
    if wanted:
        torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        if wanted:
            torch.serialization.set_crc32_options(before)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on the CPU, row by row in a storage that holds nothing else: ``torch.save`` writes whole storages."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _version() -> str:
    try:
        return importlib.metadata.version("zerofx")
    except importlib.metadata.PackageNotFoundError:  # of sources that were never installed
        return "unknown"
