"""Sharded tensors in the terms of torch.distributed.checkpoint, and its folders read without running their code.

torch.distributed.checkpoint asks every value of a state dict three questions. `zerofx.ShardedTensor` answers them with
its rectangles (`boxes`), so ``torch.distributed.checkpoint.save`` and ``load`` take it as it is:

=============================  =====================================================================
question                       answer
=============================  =====================================================================
``__create_write_items__``     what this rank writes: one item per rectangle
``__create_chunk_list__``      what this rank needs when it loads: the same rectangles
``__get_tensor_shard__``       the rectangle at these offsets, as a view of the slice
=============================  =====================================================================

A folder that it wrote holds ``.metadata``, a pickle: an index of rectangles, file names and positions. Unpickling runs
whatever the file says. `read_index` admits the dozen classes that such an index consists of and nothing else.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.futures import Future

from zerofx._torch import StorageInfo, index_class
from zerofx.checkpoint.boxes import Box, boxes
from zerofx.checkpoint.nested import unpack
from zerofx.checkpoint.ranks import CheckpointError
from zerofx.runtime.state.callbacks import CALLBACKS
from zerofx.runtime.state.parameter import ShardedTensor

INDEX = ".metadata"


def boxes_of(tensor: ShardedTensor) -> list[tuple[Box, int]]:
    """This rank's rectangles of ``tensor``, each with where in the slice it begins.

    A tensor without elements is one empty rectangle on every rank: so that a checkpoint knows of it. Where it stands
    for a `DTensor`, they are rectangles of that: this rank's part begins somewhere in the whole.
    """
    slot, group, layout = tensor._slot, tensor._group, tensor._dtensor
    whole = slot.shape if layout is None else tuple(layout.shape)
    if math.prod(whole) == 0:
        return [(Box((0,) * len(whole), whole), 0)]
    piece = group.layout.piece(slot, group.rank)
    found, at = [], 0
    for box in boxes(slot.shape, piece.in_parameter, piece.in_parameter + piece.length):
        offsets = box.offsets if layout is None else tuple(map(sum, zip(box.offsets, layout.offsets, strict=True)))
        found.append((Box(offsets, box.sizes), at))
        at += box.numel
    return found


def write_items(tensor: ShardedTensor, name: str) -> list[WriteItem]:
    """What torch.distributed.checkpoint is to write of ``tensor`` from this rank: all but copies."""
    if not tensor._group.sharing.counts(tensor._dtensor):
        return []
    size, properties = tensor.shape, TensorProperties.create_from_tensor(tensor._local.new_empty(0))
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=size),
        )
        for box, _ in boxes_of(tensor)
    ]


def chunk_list(tensor: ShardedTensor) -> list[ChunkStorageMetadata]:
    """What torch.distributed.checkpoint is to read for ``tensor`` on this rank."""
    return [_chunk(box) for box, _ in boxes_of(tensor)]


def tensor_shard(tensor: ShardedTensor, index: MetadataIndex) -> torch.Tensor:
    """The rectangle at ``index.offset``: a view, to be read from or written to.

    Raises:
        ValueError: this rank has no rectangle there.
    """
    for box, at in boxes_of(tensor):
        if torch.Size(box.offsets) == index.offset:
            return tensor._group.home.keep_resident(tensor._local).narrow(0, at, box.numel).view(box.sizes)
    raise ValueError(f"this rank holds no rectangle of {index.fqn!r} at {index.offset}: {tensor!r}")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = index_class(module, name)
        if found is None:
            raise CheckpointError(f"it names {module}.{name}, which no index of a checkpoint contains")
        return found


def read_index(folder: Path) -> Metadata:
    """The index of a torch.distributed.checkpoint folder; no code of the file's choice runs.

    Raises:
        CheckpointError: no such file, not an index, or one that reaches out of its folder.
    """
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        _check_index(folder, index)
    except CheckpointError as e:
        raise CheckpointError(f"{path} is refused: {e}. It was tampered with, or is no checkpoint's index.") from e
    except Exception as e:  # a truncated or scrambled pickle raises almost anything
        raise CheckpointError(f"{path} cannot be read as a checkpoint's index: {type(e).__name__}: {e}.") from e
    return index


def _check_index(folder: Path, index: Any) -> None:
    """Types and positions are what they claim to be, and all files lie in ``folder`` and are long enough."""
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError("it holds no index")
    sizes: dict[str, int] = {}
    for key, place in index.storage_data.items():
        if not isinstance(key, MetadataIndex) or not isinstance(place, StorageInfo):
            raise CheckpointError(f"an entry is {key!r}: {place!r}")
        name = place.relative_path
        if name not in sizes:
            if not isinstance(name, str) or not is_plain_name(name) or (folder / name).is_symlink():
                raise CheckpointError(f"the file {name!r} of {key.fqn!r} is not a file of the folder")
            if not (folder / name).is_file():
                raise CheckpointError(f"the file {name!r} of {key.fqn!r} is missing")
            sizes[name] = (folder / name).stat().st_size
        if min(place.offset, place.length) < 0 or place.offset + place.length > sizes[name]:
            raise CheckpointError(
                f"{key.fqn!r} should be at {place.offset} to {place.offset + place.length} of {name!r}, which has "
                f"{sizes[name]} bytes: the file is truncated"
            )
    stored: dict[str, set[Any]] = {}
    for key in index.storage_data:
        stored.setdefault(key.fqn, set()).add(key.offset)
    for name, entry in index.state_dict_metadata.items():
        offsets = [chunk.offsets for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else []
        if (name not in stored and offsets) or not stored.get(name, set()) >= set(offsets):
            raise CheckpointError(f"a part of {name!r} is nowhere in its files")


def places_in(index: Metadata) -> dict[str, tuple[str | int, ...]]:
    """Where in the state that was saved each key of ``index`` was, as far as it says so."""
    places = index.planner_data if isinstance(index.planner_data, dict) else {}
    return {
        key: place
        for key, place in places.items()
        if isinstance(place, tuple) and place and ".".join(map(str, place)) == key
    }


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is that of a file in a folder, and not a path that leads anywhere else."""
    return name not in ("", ".", "..") and not any(sep in name for sep in ("/", "\\", "\0", os.sep))


class _Reader(FileSystemReader):
    """PyTorch's reader with an index that was read safely.

    ``compact``: all tensors were written row by row, so what is needed of them is copied from where it lies in the
    mapped file. Else PyTorch makes a tensor of each first.
    """

    def __init__(self, folder: Path, index: Metadata, compact: bool) -> None:
        super().__init__(folder)
        self.set_up_storage_reader(index, is_coordinator=True)
        self._kinds, self._compact = index.state_dict_metadata, compact
        self._files: dict[str, torch.Tensor] = {}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        others = [item for item in plan.items if not self._copy(item, planner)]
        return super().read_data(replace(plan, items=others), planner)

    def _copy(self, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read ``item`` from the mapped file, if it is a tensor that lies there row by row."""
        place, kind = self.storage_data[item.storage_index], self._kinds[item.storage_index.fqn]
        if not self._compact or not isinstance(kind, TensorStorageMetadata) or not place.length:
            return False
        name = place.relative_path
        if name not in self._files:
            path = Path(self.path) / name
            self._files[name] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        record = self._files[name][place.offset : place.offset + place.length]
        sizes = next(chunk.sizes for chunk in kind.chunks if chunk.offsets == item.storage_index.offset)
        dtype = kind.properties.dtype
        found = only_tensor(record.numpy())
        if found is None or len(found) != math.prod(sizes) * dtype.itemsize:
            return False
        raw = record[found.start : found.stop]
        if raw.storage_offset() % dtype.itemsize:
            return False
        part = tuple(slice(at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True))
        target = planner.resolve_tensor(item).detach()
        target.copy_(raw.view(dtype).view(sizes)[part])
        planner.commit_tensor(item, target)
        return True


def only_tensor(record: Any) -> range | None:
    """Where in the bytes of a ``torch.save`` file, a zip archive that compresses nothing, its one tensor's lie.

    None where that cannot be told: it is larger than 4 GB, or has no or several storages.
    """
    view = memoryview(record)
    end = len(view) - 22
    if end < 0 or bytes(view[end : end + 4]) != b"PK\5\6":
        return None
    count, _, at = struct.unpack_from("<HII", view, end + 10)
    found = []
    for _ in range(count):
        if bytes(view[at : at + 4]) != b"PK\1\2":
            return None
        method, size, name, extra, comment, local = struct.unpack_from("<H12xI3H8xI", view, at + 10)
        if bytes(view[at + 46 : at + 46 + name]).split(b"/")[-2:-1] == [b"data"] and method == 0:
            begin = local + 30 + sum(struct.unpack_from("<HH", view, local + 26))
            found.append(range(begin, begin + size))
        at += 46 + name + extra + comment
    return found[0] if len(found) == 1 and found[0].stop <= len(view) else None


class _Planner(DefaultLoadPlanner):
    """PyTorch's planner, which unpickles only tensors and plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = unpack(value)


def read_into(folder: Path, index: Metadata, targets: dict[str, Any], *, compact: bool = False) -> None:
    """Fill ``targets``, tensors by their key in the index, in place; other values are put into the dictionary.

    Every rank by itself: there is no collective in it. A sharded tensor gets this rank's rectangles. ``compact``: see
    `_Reader`.
    """
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = _Reader(folder, index, compact)
    planner.set_up_planner(targets, index, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    with torch.no_grad():
        reader.read_data(plan, planner).wait()


CALLBACKS.write_items, CALLBACKS.chunk_list, CALLBACKS.tensor_shard = write_items, chunk_list, tensor_shard
