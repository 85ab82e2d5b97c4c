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
import os
import pickle
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
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

from zerofx._torch import StorageInfo, index_class
from zerofx.checkpoint.boxes import Box, boxes
from zerofx.checkpoint.ranks import CheckpointError
from zerofx.parameter import ShardedTensor

INDEX = ".metadata"


def boxes_of(tensor: ShardedTensor) -> list[tuple[Box, torch.Tensor]]:
    """This rank's rectangles of ``tensor``, each with the view of the slice that it is.

    A tensor without elements is one empty rectangle on every rank: so that a checkpoint knows of it.
    """
    slot, group, local = tensor._slot, tensor._group, tensor._local
    if slot.numel == 0:
        return [(Box((0,) * len(slot.shape), slot.shape), local.view(slot.shape))]
    piece = group.layout.piece(slot, group.rank)
    found, at = [], 0
    for box in boxes(slot.shape, piece.in_parameter, piece.in_parameter + piece.length):
        found.append((box, local.narrow(0, at, box.numel).view(box.sizes)))
        at += box.numel
    return found


def write_items(tensor: ShardedTensor, name: str) -> list[WriteItem]:
    """What torch.distributed.checkpoint is to write of ``tensor`` from this rank."""
    size = torch.Size(tensor._slot.shape)
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(box), properties=TensorProperties.create_from_tensor(view), size=size
            ),
        )
        for box, view in boxes_of(tensor)
    ]


def chunk_list(tensor: ShardedTensor) -> list[ChunkStorageMetadata]:
    """What torch.distributed.checkpoint is to read for ``tensor`` on this rank."""
    return [_chunk(box) for box, _ in boxes_of(tensor)]


def tensor_shard(tensor: ShardedTensor, index: MetadataIndex) -> torch.Tensor:
    """The rectangle at ``index.offset``: a view, to be read from or written to.

    Raises:
        ValueError: this rank has no rectangle there.
    """
    for box, view in boxes_of(tensor):
        if torch.Size(box.offsets) == index.offset:
            return view
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


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is that of a file in a folder, and not a path that leads anywhere else."""
    return name not in ("", ".", "..") and not any(sep in name for sep in ("/", "\\", "\0", os.sep))


class _Reader(FileSystemReader):
    """PyTorch's reader with an index that was read safely."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self.set_up_storage_reader(index, is_coordinator=True)


class _Planner(DefaultLoadPlanner):
    """PyTorch's planner, which unpickles only tensors and plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_into(folder: Path, index: Metadata, targets: dict[str, Any]) -> None:
    """Fill ``targets``, tensors by their key in the index, in place; other values are put into the dictionary.

    Every rank by itself: there is no collective in it. A sharded tensor gets this rank's rectangles.
    """
    planner, reader = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False), _Reader(folder, index)
    planner.set_up_planner(targets, index, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    with torch.no_grad():
        reader.read_data(plan, planner).wait()
