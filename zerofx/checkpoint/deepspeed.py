"""DeepSpeed's ZeRO checkpoints, read without DeepSpeed: weights in full precision and Adam's moments.

One file per rank has its part of flat vectors, of the float32 weights and of each moment. How parameters lie in them::

    stage 1, 2    | a a a a a a | a b b b b . |      one vector per parameter group, cut into equal parts:
                    rank 0        rank 1             a parameter runs on from one rank to the next

    stage 3       | a a a b b |   | a a a b . |      each parameter cut into equal parts, the last one padded:
                    rank 0          rank 1           every rank has a part of each

Names and shapes are in the ``model_states`` files. The layout is that of DeepSpeed's own ``zero_to_fp32.py``, read in
version 0.19.8. The files are pickles that name classes of DeepSpeed; a hollow class stands in for each of these, and
any other that is not PyTorch's is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from zerofx.checkpoint.dcp import is_plain_name
from zerofx.checkpoint.ranks import CheckpointError
from zerofx.checkpoint.sources import Entry, Part, Source, of_tensor

_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OPTIONS = ("lr", "betas", "eps", "weight_decay")
MOMENTS = ("exp_avg", "exp_avg_sq")


def find(path: Path) -> Path | None:
    """The folder with the files that ``path`` stands for: itself, or the one that its ``latest`` names."""
    if (path / "latest").is_file():
        tag = (path / "latest").read_text().strip()
        path = path / tag if is_plain_name(tag) else path
    return path if path.is_dir() and any(_FILE.fullmatch(p.name) for p in path.iterdir()) else None


class Hollow:
    """In the place of a class of DeepSpeed: keeps what it was made with and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        pass


class DeepSpeedSource(Source):
    """One tag's folder. Tensor and pipeline parallelism are refused."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        files: dict[int, Path] = {}
        for path in folder.iterdir():
            if match := _FILE.fullmatch(path.name):
                if match[2] != "00":
                    raise CheckpointError(f"{folder} is of a run with tensor parallelism: {path.name}.")
                files[int(match[1])] = path
        states = [_load(files[rank])["optimizer_state_dict"] for rank in sorted(files)]
        count = states[0]["partition_count"]
        count = max(count) if isinstance(count, list) else count
        if sorted(files) != list(range(count)):
            raise CheckpointError(f"{folder} was written by {count} ranks and has the files of ranks {sorted(files)}.")
        third = "fp32_flat_groups" in states[0]
        pattern = "*zero_pp_rank_{}_mp_rank_00_model_states.pt" if third else "*mp_rank_00_model_states.pt"
        models = [_load(_only(folder, pattern.format(rank))) for rank in range(count if third else 1)]
        self.optimizer = {}
        for name, value in models[0]["module"].items():
            if isinstance(value, torch.Tensor) and (not third or name in models[0]["buffer_names"]):
                self.model[name] = of_tensor(value)
        for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
            fragments = [[model["frozen_param_fragments"][name]] for model in models]
            part = _dealt(fragments, 0, math.prod(shape)) if third else _cut(fragments, 0)
            self.model[name] = Entry(tuple(shape), fragments[0][0].dtype, part)
        (self._third if third else self._second)(states, models[0])
        for alias, name in models[0]["shared_params"].items():
            self.model[alias] = self.model[name]

    def _second(self, states: list[dict[str, Any]], model: dict[str, Any]) -> None:
        base = [_base(state.get("base_optimizer_state"), self.where) for state in states]
        for group, shapes in enumerate(model["param_shapes"]):
            vectors = {"": [[state["single_partition_of_fp32_groups"][group]] for state in states]}
            moments = [state["state"].get(group, {}) for state in base]
            vectors |= {name: [[m[name]] for m in moments] for name in MOMENTS if name in moments[0]}
            paddings = states[0].get("param_alignment_paddings")
            at = 0
            for i, (name, shape) in enumerate(shapes.items()):
                parts = {what: _cut(vector, at) for what, vector in vectors.items()}
                self._add(name, shape, parts, moments[0].get("step"), base[0]["param_groups"][group])
                at += math.prod(shape) + (paddings[group][i] if paddings else 0)

    def _third(self, states: list[dict[str, Any]], model: dict[str, Any]) -> None:
        base = [_base(state.get("optimizer_state_dict"), self.where) for state in states]
        ranks, flats = len(states), [state["fp32_flat_groups"] for state in states]
        moments = [[state["state"].get(j, {}) for j in range(len(flat))] for state, flat in zip(base, flats)]
        vectors = {"": flats}
        vectors |= {name: [[m[name] for m in mine] for mine in moments] for name in MOMENTS if name in moments[0][0]}
        at = 0
        for group, shapes in enumerate(model["param_shapes"]):
            for name, shape in shapes.items():
                parts = {what: _dealt(vector, at, math.prod(shape)) for what, vector in vectors.items()}
                self._add(name, shape, parts, moments[0][0].get("step"), base[0]["param_groups"][group])
                at += -(-math.prod(shape) // ranks)

    def _add(self, name: str, shape: Sequence[int], parts: dict[str, Part], step: Any, options: dict[str, Any]) -> None:
        assert self.optimizer is not None
        entries = {what: Entry(tuple(shape), torch.float32, part) for what, part in parts.items()}
        self.model[name] = entries.pop("")
        if entries:
            count = torch.as_tensor(float(step or 0))
            self.optimizer[name] = {"step": of_tensor(count), **entries}
        self.options[name] = {k: options[k] for k in _OPTIONS if k in options}


def _base(state: Any, where: str) -> dict[str, Any]:
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        raise CheckpointError(f"{where} keeps its optimizer's state in a way that zerofx does not know.")
    return state


def _cut(vector: list[list[torch.Tensor]], at: int) -> Part:
    """Of a parameter that begins at ``at`` in one vector, of which rank r has the r-th part."""

    def part(start: int, stop: int) -> torch.Tensor:
        return _slice([flat for flats in vector for flat in flats], at + start, at + stop)

    return part


def _dealt(vector: list[list[torch.Tensor]], at: int, numel: int) -> Part:
    """Of a parameter of which every rank has an equal part, at ``at`` of its own vector."""
    each = -(-numel // len(vector))

    def part(start: int, stop: int) -> torch.Tensor:
        found = []
        for rank, flats in enumerate(vector):
            low, high = max(start, rank * each), min(stop, (rank + 1) * each)
            if low < high:
                found.append(_slice(flats, at + low - rank * each, at + high - rank * each))
        return torch.cat(found) if found else vector[0][0][:0]

    return part


def _slice(flats: Iterable[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of ``flats`` end to end."""
    found, begin, last = [], 0, None
    for flat in flats:
        low, high = max(start - begin, 0), min(stop - begin, flat.numel())
        if low < high:
            found.append(flat.reshape(-1)[low:high])
        begin, last = begin + flat.numel(), flat
    if sum(map(len, found)) != max(0, stop - start):
        raise CheckpointError(f"its vectors have {begin} elements, {stop} are needed: a file is truncated.")
    assert last is not None
    return torch.cat(found) if found else last.reshape(-1)[:0]


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise CheckpointError(f"{folder} has {len(found)} files {pattern}, expected one.")
    return found[0]


def _load(path: Path) -> Any:
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        strangers = [name for name in unknown if not name.startswith("deepspeed.")]
        if strangers:
            raise CheckpointError(f"{path} is refused: it names {strangers[0]}, which DeepSpeed's checkpoints do not.")
        with torch.serialization.safe_globals([(Hollow, name) for name in unknown]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except CheckpointError:
        raise
    except Exception as e:
        raise CheckpointError(f"{path} cannot be loaded safely: {type(e).__name__}: {str(e).splitlines()[0]}") from e
