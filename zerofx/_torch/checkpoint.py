"""The files of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import metadata as _metadata
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION as DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE


def index_class(module: str, name: str) -> Any:
    """What a checkpoint's index (``.metadata``) may name; None for anything else (2.11, 2.13, 2.15).

    Data classes, an enumeration, dtypes, sizes and layouts. The path that the folder once had becomes a string.
    """
    if module == _metadata.__name__ and name in _INDEX_CLASSES:
        return getattr(_metadata, name)
    if (module, name) == (StorageInfo.__module__, StorageInfo.__name__):
        return StorageInfo
    if (module, name) == ("torch.serialization", "_get_layout"):
        return torch.serialization._get_layout
    if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
        return getattr(torch, name)
    if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath", "PurePosixPath"):
        return lambda *parts: "/".join(map(str, parts))
    return None


_INDEX_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
