"""`load`: the state of a run from a folder, all of it or nothing.

::

    find      rank 0: which checkpoint the path stands for
    bind      every rank: what there is against what is wanted: names, shapes, options. Nothing is read
    verify    every rank its share of the files: checksums
    read      every rank its slices, in place
    hand on   module and optimizer take them as their own load_state_dict would; schedulers, random generators

Up to ``read`` nothing has changed, whatever goes wrong on whichever rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.checkpoint import cut_off
from zerofx.checkpoint import extra as extras
from zerofx.checkpoint import folder as folders
from zerofx.checkpoint.ranks import CheckpointError, Counts, Ranks, compare_steps, steps_of
from zerofx.checkpoint.restore import Binding, bind
from zerofx.checkpoint.saving import wait_for_pending
from zerofx.checkpoint.sources import DcpSource, FileSource, SafetensorsSource, Source
from zerofx.checkpoint.state import Optimizers, each_of, model_state, owned, resident


def load(
    path: str | Path,
    module: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    rng: bool = True,
    **extra: Any,
) -> dict[str, Any]:
    """Load what `zerofx.save`, or another program, saved. Every rank must call it.

    Args:
        path: a checkpoint; or a folder of them, of which the latest whole one is taken. It may be of any number of
            ranks and any stage, written by ``torch.distributed.checkpoint`` (FSDP2), a file of ``torch.save``, a
            safetensors file or a Hugging Face folder, or a folder of DeepSpeed's ZeRO.
        module: sharded in any stage, or plain.
        optimizer: of ``module``'s parameters, of the kind that was saved, or several of them; None: weights alone.
        rng: set the random generators, where as many ranks load as saved.
        **extra: what was saved under these names and has ``load_state_dict()``.

    Returns:
        A dictionary with ``step`` (None if none was saved), ``path`` (the checkpoint that was loaded) and the plain
        values that were saved, by name.

    Raises:
        CheckpointError: on every rank: there is none, it is of another model, kind of optimizer or newer format, or
            damaged. Nothing has changed then, unless the message says so.
        OutOfStepError: on every rank: optimizers have stepped more often on one than on another, and would go on so.
    """
    ranks = Ranks.of(module)
    with ranks.call("zerofx.load"):
        return _load(path, ranks, module, optimizer, rng, extra)


def _load(
    path: str | Path,
    ranks: Ranks,
    module: nn.Module,
    optimizer: Optimizers | None,
    rng: bool,
    extra: dict[str, Any],
) -> dict[str, Any]:
    wait_for_pending(ranks)
    what = f"Loading {path}"
    [(kind, found), *_] = ranks.together(what, lambda: _find(Path(path)), only=0)
    source: Any = None
    binding: Any = None
    apply: Any = None

    def prepare() -> Counts:
        nonlocal source, binding, apply
        optimizers = each_of(optimizer)
        order = [name for each in optimizers for _, name, _ in owned(module, each)]
        source = _open(kind, found, module, order)
        binding = bind(module, optimizers, source)
        apply = _extras(source, extra, ranks, rng)
        return steps_of(module)

    compare_steps(what, module, ranks, ranks.together(what, prepare))
    assert isinstance(source, Source) and isinstance(binding, Binding)
    ranks.together(what, lambda: source.verify(binding.reads, ranks.rank, ranks.size))

    def read() -> None:
        with torch.no_grad(), resident(module):
            source.read(binding.reads)
            binding.finish()

    result: dict[str, Any] = {"step": source.mark.step if source.mark else None, "path": found}
    try:
        ranks.together(what, read)
        ranks.together(what, lambda: result.update(cut_off.restore(module, apply())))
    except CheckpointError as e:
        raise CheckpointError(f"{e} This was found late: what is loaded is a mixture. Do not go on with it.") from e
    return result


def latest(path: str | Path) -> Path | None:
    """The whole checkpoint that `load` would take from ``path``; None where there is none yet.

    For a start that resumes if it can::

        start = zerofx.load(path, model, optimizer)["step"] if zerofx.latest(path) else 0
    """
    return folders.whole(Path(path))


def _find(path: Path) -> tuple[str, Path]:
    """What kind of checkpoint ``path`` stands for, and where it is."""
    if path.is_file():
        return ("safetensors" if path.suffix == ".safetensors" else "file"), path
    if (folder := folders.whole(path)) is not None:
        return "dcp", folder
    if path.is_dir() and any(path.glob("*.safetensors")):
        return "safetensors", path
    from zerofx.checkpoint.deepspeed import find

    if (folder := find(path)) is not None:
        return "deepspeed", folder
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: no save to it was completed.")
    raise CheckpointError(f"{path} holds no whole checkpoint, of any format that zerofx reads.")


def _open(kind: str, path: Path, module: nn.Module, order: list[str]) -> Source:
    names = list(model_state(module))
    if kind == "dcp":
        return DcpSource(path, names)
    if kind == "file":
        return FileSource(path, names, order)
    if kind == "safetensors":
        return SafetensorsSource(path)
    from zerofx.checkpoint.deepspeed import DeepSpeedSource

    return DeepSpeedSource(path)


def _extras(source: Source, extra: dict[str, Any], ranks: Ranks, rng: bool) -> Callable[[], dict[str, Any]]:
    """What restores all that is not tensors; checked now, done later."""
    if source.mark is not None:
        mine = [extras.file_of(r) for r in {0, ranks.rank} if r < source.mark.world_size]
        source.mark.verify(source.folder, mine)
        return extras.prepare(source.folder, source.mark.world_size, extra, ranks, rng)
    if extra:
        raise CheckpointError(
            f"{source.where} was not written by zerofx.save: it holds no {', '.join(map(repr, extra))}."
        )
    return dict
