"""What a run consists of besides tensors: random generators, schedulers, the place in the data, plain values.

==============================  ====================================  ============================================
what                            saved                                 loaded
==============================  ====================================  ============================================
random generators (torch,       of each rank                          by each rank, if there are as many
CUDA, random, numpy)
something with state_dict()     once if all ranks' states are equal,  into the object given to `load` under the
                                else each rank's                      same name
a plain value                   the same                              returned
==============================  ====================================  ============================================

All of it is written with ``torch.save`` and read with ``weights_only=True``: tensors, numbers, strings and containers
of them. What could not be read back like that is refused when it is saved.
"""

from __future__ import annotations

import hashlib
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerofx.checkpoint.folder import Mark
from zerofx.checkpoint.nested import Form, check_readable, pack, unpack
from zerofx.checkpoint.ranks import CheckpointError, Ranks


def file_of(rank: int) -> str:
    """The name of the file with what ``rank`` saved."""
    return f"extra_{rank}.pt"


def collect(extra: dict[str, Any], ranks: Ranks, form: Form) -> bytes:
    """This rank's file: the states of ``extra`` now, and of its random generators. A collective.

    ``form`` is that of model and optimizer (`zerofx.checkpoint.nested`).

    Raises:
        CheckpointError: one that could not be loaded again, or names that differ between ranks.
    """

    def states() -> tuple[dict[str, str], dict[str, Any]]:
        found = {name: _state(value) for name, value in extra.items()}
        for name, state in found.items():
            check_readable(state, f"{name}={type(extra[name]).__name__}")
        return {name: _digest(state) for name, state in found.items()}, found

    mine: dict[str, Any] = {}

    def digests() -> dict[str, str]:
        found, states_ = states()
        mine.update(states_)
        return found

    everyone = ranks.together("Saving", digests)
    if any(theirs.keys() != everyone[0].keys() for theirs in everyone):
        raise CheckpointError(f"ranks save different things: {[sorted(theirs) for theirs in everyone]}.")
    shared = [name for name in everyone[0] if all(theirs[name] == everyone[0][name] for theirs in everyone)]
    return pack(
        {
            "random": random_state(),
            "form": form if ranks.rank == 0 else None,
            "shared": {name: mine[name] for name in shared} if ranks.rank == 0 else {},
            "own": {name: state for name, state in mine.items() if name not in shared},
        }
    )


def prepare(
    folder: Path, written_by: int, extra: dict[str, Any], ranks: Ranks, rng: bool
) -> Callable[[], dict[str, Any]]:
    """What loads all that `collect` saved: into the objects of ``extra``; it returns the rest.

    Raises:
        CheckpointError: something in ``extra`` that was not saved, or by each of another number of ranks for itself.
    """
    states, own, generators = read(folder, written_by, ranks)
    for name, target in extra.items():
        if name in own and written_by != ranks.size:
            raise CheckpointError(
                f"{name} was saved by each of {written_by} ranks for itself and there are {ranks.size} now: which "
                "state should a rank get? Load without it, and set it by hand."
            )
        if name not in states:
            raise CheckpointError(f"{folder} holds no {name!r}; it holds {sorted(states) or 'nothing of that kind'}.")
        if not hasattr(target, "load_state_dict"):
            raise CheckpointError(
                f"{name}={type(target).__name__} has no load_state_dict(): plain values are returned, do not pass them."
            )

    def apply() -> dict[str, Any]:
        for name, target in extra.items():
            target.load_state_dict(states[name])
        if rng and written_by == ranks.size:
            set_random_state(generators)
        elif rng and ranks.rank == 0:
            warnings.warn(
                f"{folder} was saved by {written_by} ranks and is loaded by {ranks.size}: the random generators are "
                "left as they are. Seed them, and pass rng=False.",
                UserWarning,
                stacklevel=2,
            )
        return {name: state for name, state in states.items() if name not in extra}

    return apply


def read(folder: Path, written_by: int, ranks: Ranks) -> tuple[dict[str, Any], set[str], dict[str, Any]]:
    """The states by name, the names of those that each rank saved for itself, and this rank's generators."""
    first = unpack((folder / file_of(0)).read_bytes())
    mine = first
    if 0 < ranks.rank < written_by:
        mine = unpack((folder / file_of(ranks.rank)).read_bytes())
    own = mine["own"] if written_by == ranks.size else {}
    return {**first["shared"], **own}, set(first["own"]), mine["random"]


def form_in(folder: Path, mark: Mark) -> Form | None:
    """That of model and optimizer; None in a folder of a version that noted none."""
    mark.verify(folder, [file_of(0)])
    return unpack((folder / file_of(0)).read_bytes()).get("form")


def random_state() -> dict[str, Any]:
    """The state of every random generator that this process uses."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators to what `random_state` found."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _digest(state: Any) -> str:
    """Equal for equal states (a pickle is not: it tells apart what is one object from what are two equal ones)."""
    digest = hashlib.sha256()

    def add(x: Any) -> None:
        if isinstance(x, dict):
            digest.update(f"{len(x)} items".encode())
            for key, value in x.items():
                add(key)
                add(value)
        elif isinstance(x, (list, tuple)):
            digest.update(f"{type(x).__name__} of {len(x)}".encode())
            for item in x:
                add(item)
        elif isinstance(x, torch.Tensor):
            digest.update(f"{x.dtype}{list(x.shape)}".encode())
            digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{type(x).__name__} {x!r};".encode())

    add(state)
    return digest.hexdigest()
