"""Ordinary, unsharded weights: in memory, or as safetensors that Hugging Face reads.

`full_state_dict` takes them a group at a time, as `zerofx.full_parameters` gives them. For a file weights come to rank
0 one by one, each rank sending its slice::

    rank 0    ####┐          one weight whole ──▶ the file
    rank 1    ####┼── send ──▶
    rank 2    ####┘

so nobody ever holds more than its shard and one weight. A safetensors file begins with a header that says where
everything will be, then come the bytes in that order: shapes are known, so it is written front to back.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx._torch import is_dtensor
from zerofx.checkpoint.folder import sync, writing
from zerofx.checkpoint.nested import mapped
from zerofx.checkpoint.parameters import each_parameter
from zerofx.checkpoint.ranks import CheckpointError, Counts, Ranks, compare_steps, steps_of
from zerofx.checkpoint.saving import wait_for_pending
from zerofx.checkpoint.sources import SAFETENSORS, SAFETENSORS_INDEX
from zerofx.checkpoint.state import model_state, names_of, plain, unwrapped
from zerofx.runtime.state.parameter import ShardedTensor

_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}


def full_state_dict(module: nn.Module, *, rank0_only: bool = True) -> dict[str, Any]:
    """``module.state_dict()`` as if it had never been sharded: plain tensors on the CPU. A collective.

    Args:
        module: sharded in any stage.
        rank0_only: the others get an empty dictionary. False: everything, on every rank.

    Raises:
        OutOfStepError: on every rank: optimizers have stepped more often on one than on another.
    """
    what, ranks = "zerofx.full_state_dict", Ranks.of(module)
    wholes: dict[str, torch.Tensor] = {}
    given: tuple[Any, Any] = (None, None)
    for name, whole in each_parameter(what, module, everywhere=not rank0_only):
        if whole is not given[0]:  # a tied weight comes under each of its names
            given = whole, whole.to("cpu", copy=True)  # which is no view of its group's buffer
        wholes[name] = given[1]
    result: dict[str, Any] = {}
    others: dict[int, torch.Tensor | None] = {}

    def gathered(_: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in others:
            others[id(value)] = gathered_value(plain(value), everywhere=not rank0_only)
        return others[id(value)]

    for name, value in unwrapped(module).state_dict(keep_vars=True).items():
        if not isinstance(value, nn.Parameter):
            result[name] = mapped(value, gathered)  # extra state may be tensors in containers
        elif name in wholes:
            result[name] = wholes[name]
    return result if ranks.rank == 0 or not rank0_only else {}


def export_safetensors(
    module: nn.Module,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write the weights as a Hugging Face folder: ``from_pretrained`` reads it, `zerofx.load` too. A collective.

    ``model.safetensors``, or several with ``model.safetensors.index.json``; and ``config.json`` where the module has a
    Hugging Face configuration. Tied weights are written once, under their first name.

    Args:
        module: sharded in any stage.
        path: the folder; other files in it are left alone. Weights that are there are replaced once all new files are
            written.
        dtype: of floating-point weights in the file; None: as they are (with ``MixedPrecision`` the masters).
        max_file_bytes: start a new file when one would be larger.

    Raises:
        CheckpointError: on every rank: rank 0 could not write, or safetensors has no name for a dtype.
        OutOfStepError: on every rank: optimizers have stepped more often on one than on another.
    """
    ranks = Ranks.of(module)
    with ranks.call("zerofx.export_safetensors"):
        _export(module, ranks, Path(path), dtype, max_file_bytes)


def _export(module: nn.Module, ranks: Ranks, folder: Path, dtype: torch.dtype | None, max_file_bytes: int) -> None:
    what = f"Exporting to {folder}"
    wait_for_pending(ranks)
    entries: list[tuple[str, torch.Tensor, torch.dtype]] = []

    def collect() -> Counts:
        aliases = {alias for names in names_of(module).values() for alias in names[1:]}
        for name, value in model_state(module).items():
            if isinstance(value, torch.Tensor) and name not in aliases:
                kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
                if kind not in _DTYPE_NAMES:
                    raise CheckpointError(f"{name} is {kind}, which safetensors cannot hold: pass dtype=")
                entries.append((name, value, kind))
        return steps_of(module)

    compare_steps(what, module, ranks, ranks.together(what, collect))
    files = _divide(entries, max_file_bytes)
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    names = ["model.safetensors"] if len(files) == 1 else names
    for name, members in zip(names, files, strict=True):
        _write_file(folder / f".{name}.tmp", members, ranks, what)

    def publish() -> None:
        stale = set(folder.glob("model*.safetensors")) - {folder / name for name in names}
        for name in names:
            os.replace(folder / f".{name}.tmp", folder / name)
        (folder / SAFETENSORS_INDEX).unlink(missing_ok=True)
        if len(files) > 1:
            where = {entry[0]: name for name, members in zip(names, files, strict=True) for entry in members}
            index = {"metadata": {"total_size": sum(map(_nbytes, entries))}, "weight_map": where}
            with writing(folder / f".{SAFETENSORS_INDEX}.tmp") as file:
                file.write(json.dumps(index, indent=1).encode())
            os.replace(folder / f".{SAFETENSORS_INDEX}.tmp", folder / SAFETENSORS_INDEX)
        for path in stale:
            path.unlink()
        config: Any = getattr(unwrapped(module), "config", None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)
        sync(folder)

    ranks.together(what, publish, only=0)


def _divide(
    entries: list[tuple[str, torch.Tensor, torch.dtype]], limit: int
) -> list[list[tuple[str, torch.Tensor, torch.dtype]]]:
    """Consecutive entries of ``limit`` bytes at most, or one that is larger."""
    files: list[list[tuple[str, torch.Tensor, torch.dtype]]] = [[]]
    room = limit
    for entry in entries:
        if _nbytes(entry) > room and files[-1]:
            files.append([])
            room = limit
        files[-1].append(entry)
        room -= _nbytes(entry)
    return files


def _nbytes(entry: tuple[str, torch.Tensor, torch.dtype]) -> int:
    return math.prod(entry[1].shape) * entry[2].itemsize


def _write_file(path: Path, entries: list[tuple[str, torch.Tensor, torch.dtype]], ranks: Ranks, what: str) -> None:
    """One file, on rank 0, while the others send. A write that fails is reported once all have sent."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, value, dtype in entries:
        end = at + math.prod(value.shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(value.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    incoming = ((gathered_value(value), dtype) for _, value, dtype in entries)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with writing(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for whole, dtype in incoming:
                assert whole is not None, "rank 0 has them all"
                file.write(whole.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy())
                del whole  # before the next one comes

    error: Exception | None = None
    if ranks.rank == 0:
        try:
            write()
        except Exception as e:
            path.unlink(missing_ok=True)
            error = e
    for _ in incoming:  # what is left to send, or to receive where writing has failed
        pass
    ranks.together(what, lambda: _raise(error))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def gathered_value(tensor: torch.Tensor, everywhere: bool = False) -> torch.Tensor | None:
    """The whole of ``tensor`` on the CPU of rank 0 (or of every rank), None elsewhere."""
    if is_dtensor(tensor):
        return tensor.full_tensor().cpu()  # type: ignore[attr-defined]
    if not isinstance(tensor, ShardedTensor):
        return tensor.detach().to("cpu", copy=True)
    if everywhere or tensor._dtensor is not None:
        return tensor.full_tensor().cpu()
    with tensor._group.home.resident(tensor._local):
        return _bring_slices(tensor)


def _bring_slices(tensor: ShardedTensor) -> torch.Tensor | None:
    group, slot, layout = tensor._group, tensor._slot, tensor._group.layout
    process_group, replicas = group.process_group, group.sharing.replicas
    if replicas is not None and not group.sharing.divides_between and replicas.rank:
        return None  # the first replica's ranks have all of it
    if group.rank != 0:
        if tensor._local.numel():
            # As bytes: gloo does not know every dtype.
            dist.send(tensor._local.view(torch.uint8), group=process_group, group_dst=0)
        return None
    flat = tensor._local.new_empty(slot.numel)
    for rank in range(layout.world_size):
        piece = layout.piece(slot, rank)
        part = flat.narrow(0, piece.in_parameter, piece.length)
        if rank == 0:
            part.copy_(tensor._local)
        elif piece.length:
            dist.recv(part.view(torch.uint8), group=process_group, group_src=group.rank_at(rank))
    return flat.view(slot.shape).cpu()
