"""What can be loaded: one view of four kinds of checkpoint.

==========================================  =================  ========================  ===================
source                                      weights            optimizer state           names
==========================================  =================  ========================  ===================
`DcpSource`: folder of                      yes                yes                       as the module has
torch.distributed.checkpoint, zerofx, FSDP2                                              them
`FileSource`: one ``torch.save`` file       yes                yes, numbered or named    perhaps ``module.``
                                                                                         before them
`SafetensorsSource`: a file, or a Hugging   yes                --                        as the module has
Face folder                                                                              them
`zerofx.checkpoint.deepspeed`               yes                Adam's moments            the same
==========================================  =================  ========================  ===================

A source says what there is (`Entry`: shape and dtype by name) before anything is read, so that all checks come first.
It then fills tensors in place, sharded ones with this rank's slice alone; files are mapped, not loaded. None of it runs
code that a file names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zerofx._torch import DTensorLayout, as_dtensor, is_dtensor
from zerofx.checkpoint.dcp import is_plain_name, places_in, read_index, read_into
from zerofx.checkpoint.extra import form_in
from zerofx.checkpoint.folder import MARK, Mark
from zerofx.checkpoint.nested import mapped, of_paths, readable, rebuild
from zerofx.checkpoint.ranks import CheckpointError
from zerofx.runtime.state.home import resident_of
from zerofx.runtime.state.parameter import ShardedTensor

Part = Callable[[int, int], torch.Tensor]
"""Elements from here to there of the flattened tensor, 1-D."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint: ``key`` is what its source finds it by.

    ``sharded``: whether it was when it was saved; None where that is not known.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    key: Any
    sharded: bool | None = None


class Source:
    """A checkpoint that has been opened.

    Attributes:
        where: what to call it in messages.
        model: weights and buffers by name.
        values: what the model's state has besides tensors; tensors in it as `Entry`.
        optimizer: state of each parameter by name, tensors as `Entry`; None: it has no optimizer's.
        options: of the parameter group that each parameter was in, by name.
        own: state under keys of the optimizer's own.
        beside: what the optimizer's ``state_dict`` had besides states and parameter groups.
        mark: what `zerofx.save` noted; None where that did not write it.
        folder: of `mark`.
    """

    mark: Mark | None = None
    folder: Path = Path()

    def __init__(self, where: str) -> None:
        self.where = where
        self.model: dict[str, Entry] = {}
        self.values: dict[str, Any] = {}
        self.optimizer: dict[str, dict[str, Any]] | None = None
        self.options: dict[str, dict[str, Any]] = {}
        self.own: dict[Any, Any] = {}
        self.beside: dict[str, Any] = {}

    def take(self, states: dict[str, Any], names: dict[Any, str]) -> None:
        """An optimizer's ``state_dict``, whose parameters have ``names``."""
        of = states["state"]
        self.optimizer = {names[key]: value for key, value in of.items() if key in names}
        self.own = {key: value for key, value in of.items() if key not in names}
        self.beside = {key: value for key, value in states.items() if key not in ("state", "param_groups")}
        for group in states["param_groups"]:
            options = {k: v for k, v in group.items() if k != "params"}
            self.options |= {names[key]: options for key in group["params"] if key in names}

    def verify(self, reads: Sequence[tuple[Entry, torch.Tensor]], rank: int, size: int) -> None:
        """Find damage before anything is loaded; the work is divided over ``size`` ranks where it can be.

        Raises:
            CheckpointError: naming the file.
        """

    def read(self, reads: Sequence[tuple[Entry, torch.Tensor]]) -> None:
        """Fill tensors from entries, casting where dtypes differ."""
        for entry, target in reads:
            part: Part = entry.key
            layout = DTensorLayout(target) if is_dtensor(target) else getattr(target, "_dtensor", None)
            if layout is not None:
                with torch.no_grad():
                    target.copy_(as_dtensor(layout.part_of(part(0, math.prod(entry.shape)).view(entry.shape)), layout))
            elif isinstance(target, ShardedTensor):
                piece = target._group.layout.piece(target._slot, target._group.rank)
                with resident_of([target]):
                    target._local.copy_(part(piece.in_parameter, piece.in_parameter + piece.length))
            else:
                target.copy_(part(0, math.prod(entry.shape)).view(entry.shape))


class DcpSource(Source):
    """A folder of torch.distributed.checkpoint: model and optimizer under the usual names, or a model alone."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.mark = Mark.read(folder) if (folder / MARK).is_file() else None
        self.index: Metadata = read_index(folder)
        kinds = self.index.state_dict_metadata
        wanted = set(names)
        fits = {prefix: sum(prefix + name in kinds for name in wanted) for prefix in ("model.", "state_dict.", "")}
        prefix = max(fits, key=lambda p: fits[p])
        states = next((p for p in ("optim.", "optimizer.") if any(k.startswith(p) for k in kinds)), "\0")
        places = {key: place for key, place in places_in(self.index).items() if key in kinds}
        depth = prefix.count(".")
        name_of = {key: str(place[depth]) for key, place in places.items() if len(place) > depth}
        values: dict[str, Any] = {}  # what is small, and needed to know what the rest is
        for key, kind in kinds.items():
            if key.startswith(f"{states}param_groups.") and isinstance(kind, TensorStorageMetadata):
                values[key] = torch.empty(kind.size, dtype=kind.properties.dtype)  # a learning rate, for one
            elif not isinstance(kind, TensorStorageMetadata):
                if key.startswith((prefix or states, states)) or name_of.get(key, key) in wanted:
                    values[key] = None
        self._fill(values)

        def found(key: str, sharded: bool | None = None) -> Any:
            kind = kinds.get(key)
            if kind is None:
                raise CheckpointError(f"{folder} is damaged: it lacks {key!r}.")
            if key in values or not isinstance(kind, TensorStorageMetadata):
                return values.get(key)
            return Entry(tuple(kind.size), kind.properties.dtype, key, sharded)

        form = None if self.mark is None else form_in(folder, self.mark)
        tree = rebuild(of_paths(places), lambda key, _: found(key)) if form is None else rebuild(form, found)
        model = tree.get(prefix[:-1], {}) if prefix else tree
        whole = wanted & model.keys()
        for name in whole:
            (self.model if isinstance(model[name], Entry) else self.values)[name] = model[name]
        given = tree.get(states[:-1])
        named = isinstance(given, dict) and {"state", "param_groups"} <= given.keys()
        if named:
            self.take(given, {name: name for group in given["param_groups"] for name in group["params"]})
        for key in kinds:
            if key.startswith(states):
                if not named:
                    self._take(key[len(states) :], found(key), kinds, states)
            elif key.startswith(prefix) and name_of.get(key) not in whole:
                value = found(key)
                (self.model if isinstance(value, Entry) else self.values)[key[len(prefix) :]] = value
        if not named:
            self._name_options(values, states)

    def _take(self, rest: str, found: Any, kinds: Any, states: str) -> None:
        """One value of the optimizer: ``state.<name>.<what>``, ``param_groups.<i>.<option>`` or flattened."""
        self.optimizer = {} if self.optimizer is None else self.optimizer
        kind, _, rest = rest.partition(".")
        name, _, what = rest.rpartition(".")
        if kind == "state":
            self.optimizer.setdefault(name, {})[what] = found
        elif kind == "param_groups" and f"{states}param_groups.{name}.params" not in kinds:
            self.options.setdefault(name, {})[what] = found

    def _name_options(self, values: dict[str, Any], states: str) -> None:
        for key, names in values.items():
            group, _, what = key.removeprefix(f"{states}param_groups.").rpartition(".")
            if what == "params" and group.isdigit():
                prefix = f"{states}param_groups.{group}."
                options = {k[len(prefix) :]: v for k, v in values.items() if k.startswith(prefix) and k != key}
                self.options |= {name: options for name in names}

    def verify(self, reads: Sequence[tuple[Entry, torch.Tensor]], rank: int, size: int) -> None:
        """By checksum where `zerofx.save` left them; else what is to be read is read once for nothing."""
        if self.mark is not None:
            self.mark.verify(self.folder, sorted(self.mark.files)[rank::size])
            return
        for entry, target in reads:
            trial = target.like(torch.empty_like(target._local)) if isinstance(target, ShardedTensor) else None
            self.read([(entry, torch.empty_like(target) if trial is None else trial)])

    def read(self, reads: Sequence[tuple[Entry, torch.Tensor]]) -> None:
        while reads:
            now: dict[str, Any] = {}
            later = []
            for entry, target in reads:
                if entry.key in now:
                    later.append((entry, target))  # a weight that becomes a master too
                else:
                    now[entry.key] = target
            self._fill(now)
            reads = later

    def _fill(self, targets: dict[str, Any]) -> None:
        try:
            read_into(self.folder, self.index, targets, compact=self.mark is not None)
        except CheckpointError:
            raise
        except Exception as e:  # what unpickling and copying out of a damaged file may raise
            raise CheckpointError(f"{self.folder} cannot be read: {type(e).__name__}: {e}") from e


class FileSource(Source):
    """One file of ``torch.save``: a state dict, or a dictionary with one for the model and one for the optimizer.

    ``order`` names the optimizer's parameters, which such files number.
    """

    MODEL = ("model", "model_state_dict", "state_dict", "module")
    OPTIMIZER = ("optim", "optimizer", "optimizer_state_dict", "optim_state_dict")

    def __init__(self, path: Path, names: Iterable[str], order: Sequence[str]) -> None:
        super().__init__(str(path))
        found = load_file(path)
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} holds a {type(found).__name__}: expected a dictionary of tensors.")
        key = next((k for k in self.MODEL if isinstance(found.get(k), dict)), None)
        state, wanted = (found if key is None else found[key]), set(names)
        for prefix in ("module.", "_orig_mod."):  # of DistributedDataParallel, of torch.compile
            if state and all(name.startswith(prefix) for name in state) and not wanted & set(state):
                state = {name[len(prefix) :]: value for name, value in state.items()}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                self.model[name] = of_tensor(value)
            else:
                self.values[name] = value
        states = next((found[k] for k in self.OPTIMIZER if isinstance(found.get(k), dict)), None)
        if key is not None and states is not None:
            self._take(states, order)

    def _take(self, states: dict[str, Any], order: Sequence[str]) -> None:
        numbers = [number for group in states["param_groups"] for number in group["params"]]
        if any(isinstance(number, int) for number in numbers):
            if order and len(numbers) != len(order):
                raise CheckpointError(
                    f"{self.where} has an optimizer of {len(numbers)} parameters, this one has {len(order)}."
                )
            names = dict(zip(numbers, order))
        else:
            names = {name: name for name in numbers}
        entries = mapped(dict(states["state"]), lambda _, v: of_tensor(v) if isinstance(v, torch.Tensor) else v)
        self.take({**states, "state": entries}, names)


def load_file(path: Path) -> Any:
    """What ``torch.save`` wrote, mapped where the format allows it; nothing but tensors and plain values.

    Raises:
        CheckpointError: the file is damaged, or holds more than that.
    """
    try:
        with readable():
            try:
                return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except RuntimeError as e:
                if "mmap can only be used" not in str(e):
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        raise CheckpointError(f"{path} cannot be loaded safely: {type(e).__name__}: {str(e).splitlines()[0]}") from e


def of_tensor(tensor: torch.Tensor) -> Entry:
    """An entry for a tensor that is in memory, or mapped."""
    return Entry(tuple(tensor.shape), tensor.dtype, lambda start, stop: tensor.reshape(-1)[start:stop])


SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The dtypes of the format that PyTorch has."""
SAFETENSORS_INDEX = "model.safetensors.index.json"


class SafetensorsSource(Source):
    """``model.safetensors``, or a folder of several with an index, as Hugging Face has them. Weights alone."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        files = [path]
        if path.is_dir():
            index = path / SAFETENSORS_INDEX
            names = sorted(p.name for p in path.glob("*.safetensors"))
            if index.is_file():
                try:
                    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
                except (ValueError, KeyError, AttributeError, TypeError) as e:
                    raise CheckpointError(f"{index} cannot be read: {type(e).__name__}: {e}.") from e
            for name in names:
                if not isinstance(name, str) or not is_plain_name(name) or not (path / name).is_file():
                    raise CheckpointError(f"{index} names {name!r}, which is not a file of its folder.")
            files = [path / name for name in names]
        for file in files:
            self.model |= _safetensors_entries(file)


def _safetensors_entries(path: Path) -> dict[str, Entry]:
    """The tensors of one file: 8 bytes with the header's length, the header in JSON, then bytes."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        found = {}
        for name, fact in header.items():
            if name == "__metadata__":
                continue
            dtype, shape, (start, stop) = SAFETENSORS[fact["dtype"]], tuple(fact["shape"]), fact["data_offsets"]
            start, stop = start + 8 + length, stop + 8 + length
            if not 8 + length <= start <= stop <= size or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name!r} at bytes {start} to {stop} of {size}")
            found[name] = Entry(shape, dtype, _bytes_part(mapped, start, dtype))
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path} cannot be read as safetensors, or is truncated: {type(e).__name__}: {e}.") from e


def _bytes_part(mapped: torch.Tensor, at: int, dtype: torch.dtype) -> Part:
    def part(start: int, stop: int) -> torch.Tensor:
        raw = mapped[at + start * dtype.itemsize : at + stop * dtype.itemsize]
        return (raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()).view(dtype)

    return part
