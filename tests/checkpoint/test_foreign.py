"""Checkpoints of others are read, and others read ours: FSDP2, DistributedDataParallel, plain files, Hugging Face."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import zerofx
from tests.checkpoint.nets import EACH_GROUP, batch, differing, digests, disturb, full_state, train
from tests.models import build
from tests.workers import Workers


class Net(nn.Module):
    """What FSDP2 takes: no scalar."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(23, 7)
            self.layers = nn.ModuleList([nn.Linear(7, 11), nn.Linear(11, 13)])
            self.head = nn.Linear(13, 23)
            self.register_buffer("mask", torch.randn(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden), y)


def ours(seed: int = 0, stage: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = zerofx.compile(Net(seed), stage=stage, executor="eager", groups=EACH_GROUP)
    return model, zerofx.AdamW(model.parameters(), lr=0.02)


def fsdp2(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: Any = Net(seed)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def save_as_fsdp2_does(folder: str) -> tuple[dict[str, str], list[float]]:
    model, optimizer = fsdp2()
    train(model, optimizer, range(2))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    return digests(full_state(model, optimizer)), train(model, optimizer, range(2, 4))


def load_ours(folder: str, stage: int) -> tuple[dict[str, str], list[float]]:
    model, optimizer = ours(seed=1, stage=stage)
    assert zerofx.load(folder, model, optimizer)["step"] is None
    return digests(full_state(model, optimizer)), train(model, optimizer, range(2, 4))


def save_ours(folder: str) -> tuple[dict[str, str], list[float]]:
    model, optimizer = ours()
    train(model, optimizer, range(2))
    zerofx.save(folder, model, optimizer)
    return digests(full_state(model, optimizer)), train(model, optimizer, range(2, 4))


def load_as_fsdp2_does(folder: str) -> tuple[dict[str, str], list[float]]:
    model, optimizer = fsdp2(seed=1)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return digests(full_state(model, optimizer)), train(model, optimizer, range(2, 4))


def without_options(state: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in state.items() if not name.startswith("options")}


def alike(saved: list[Any], loaded: list[Any]) -> None:
    assert not differing(without_options(loaded[0][0]), without_options(saved[0][0]))
    for step in range(2):
        one, other = (sum(losses[step] for _, losses in runs) / len(runs) for runs in (saved, loaded))
        assert other == pytest.approx(one, rel=1e-6, abs=0)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_a_folder_of_fsdp2_is_loaded(make_workers: Callable[[int], Workers], tmp_path: Path, sizes: Any) -> None:
    saved = make_workers(sizes[0]).run(save_as_fsdp2_does, str(tmp_path / "c"))
    for stage in (1, 3):
        alike(saved, make_workers(sizes[1]).run(load_ours, str(tmp_path / "c"), stage))


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2)])
def test_fsdp2_loads_a_folder_of_ours(make_workers: Callable[[int], Workers], tmp_path: Path, sizes: Any) -> None:
    saved = make_workers(sizes[0]).run(save_ours, str(tmp_path / "c"))
    alike(saved, make_workers(sizes[1]).run(load_as_fsdp2_does, str(tmp_path / "c")))


def check_torchs_functions(folder: str) -> None:
    model, optimizer = ours()
    train(model, optimizer, range(2))
    state = digests(full_state(model, optimizer))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{folder}/a")
    flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": flat[0], "optim": flat[1]}, checkpoint_id=f"{folder}/flat")
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/alone")
    future = dcp.async_save({"model": weights, "optim": states}, checkpoint_id=f"{folder}/async")
    getattr(future, "upload_completion", future).result()

    def load_with_torch(name: str) -> None:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": states}, checkpoint_id=f"{folder}/{name}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    loads: dict[str, Callable[[], Any]] = {
        "torch": lambda: load_with_torch("a"),
        "torch, async": lambda: load_with_torch("async"),
        "zerofx": lambda: zerofx.load(f"{folder}/a", model, optimizer),
        "zerofx, flattened": lambda: zerofx.load(f"{folder}/flat", model, optimizer),
    }
    for name, load in loads.items():
        disturb(model, optimizer)
        load()
        assert not differing(digests(full_state(model, optimizer)), state), name
    losses = train(model, optimizer, range(2, 3))
    assert losses[0] > 0
    disturb(model, optimizer)
    zerofx.load(f"{folder}/alone", model)
    assert not differing(digests(full_state(model)), {k: v for k, v in state.items() if " " not in k})


@pytest.mark.filterwarnings("ignore")
def test_torchs_own_functions_save_and_load_a_sharded_module(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_torchs_functions, str(tmp_path))


def check_in_place(folder: str) -> None:
    model, optimizer = ours(stage=2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    expected = [model(*batch(step)).item() for step in range(2)]
    disturb(model, optimizer)
    assert model(*batch(0)).item() != expected[0]
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    assert [model(*batch(step)).item() for step in range(2)] == expected


@pytest.mark.filterwarnings("ignore")
def test_replicas_follow_what_torch_loads_in_place_on_all_ranks(workers3: Workers, tmp_path: Path) -> None:
    workers3.run(check_in_place, str(tmp_path / "c"), timeout=60)


def check_plain_files(folder: str) -> None:
    rank = dist.get_rank()
    plain = nn.parallel.DistributedDataParallel(Net())
    optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=0.02)
    train(plain, optimizer, range(2))
    if rank == 0:
        torch.save({"model": plain.module.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/both.pt")
        torch.save({"state_dict": plain.state_dict()}, f"{folder}/prefixed.pt")
        torch.save(plain.module.state_dict(), f"{folder}/old.pt", _use_new_zipfile_serialization=False)
    dist.barrier()
    expected = digests(full_state(plain.module, optimizer))
    weights = {k: v for k, v in expected.items() if " " not in k}
    go_on = train(plain, optimizer, range(2, 4))
    for stage in (0, 2, 3):
        model, mine = ours(seed=1, stage=stage)
        zerofx.load(f"{folder}/both.pt", model, mine)
        assert not differing(without_options(digests(full_state(model, mine))), without_options(expected)), stage
        assert train(model, mine, range(2, 4)) == pytest.approx(go_on, rel=1e-6)
        for file in ("prefixed.pt", "old.pt"):
            disturb(model, mine)
            zerofx.load(f"{folder}/{file}", model)
            assert not differing(digests(full_state(model)), weights), (file, stage)
        disturb(model, mine)
        model.load_state_dict(torch.load(f"{folder}/both.pt", weights_only=True)["model"])
        assert not differing(digests(full_state(model)), weights), stage
    zerofx.save(f"{folder}/c", model, mine)
    state = digests(full_state(model, mine))
    other = nn.parallel.DistributedDataParallel(Net(seed=3))
    theirs = torch.optim.AdamW(other.parameters(), lr=0.5)
    zerofx.load(f"{folder}/c", other, theirs)  # and back
    found = digests(full_state(other.module, theirs))
    assert not differing(without_options(found), without_options(state))


def test_data_parallel_runs_are_loaded_from_plain_files_and_load_ours(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_plain_files, str(tmp_path))


def check_full(folder: str, stage: int) -> None:
    model, _ = ours(stage=stage)
    reference = Net().state_dict()
    full = zerofx.full_state_dict(model)
    assert list(full) == (list(reference) if dist.get_rank() == 0 else [])
    everywhere = zerofx.full_state_dict(model, rank0_only=False)
    for state in (full or reference, everywhere):
        for name, value in reference.items():
            assert type(state[name]) is torch.Tensor and torch.equal(state[name], value)
    zerofx.export_safetensors(model, f"{folder}/{stage}", max_file_bytes=600)
    zerofx.export_safetensors(model, f"{folder}/{stage}-bf16", dtype=torch.bfloat16)
    dist.barrier()
    other, _ = ours(seed=1, stage=stage)
    zerofx.load(f"{folder}/{stage}", other)
    assert not differing(digests(full_state(other)), digests(reference))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_full_weights_are_the_plain_modules_in_memory_and_in_safetensors(
    workers3: Workers, tmp_path: Path, stage: int
) -> None:
    workers3.run(check_full, str(tmp_path), stage)
    reference, folder = Net().state_dict(), tmp_path / str(stage)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert list(index) == list(reference) and len(set(index.values())) > 2
    for name, value in reference.items():
        assert torch.equal(safetensors.torch.load_file(folder / index[name])[name], value)
    half = safetensors.torch.load_file(tmp_path / f"{stage}-bf16" / "model.safetensors")
    assert all(torch.equal(half[name], value.bfloat16()) for name, value in reference.items())
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def check_streaming(folder: str) -> None:
    from zerofx.checkpoint import export

    model, _ = ours()
    gathered_value, refs, peak = export.gathered_value, [], 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal peak
        found = gathered_value(*args, **kwargs)
        if found is not None:
            refs.append(weakref.ref(found))
        peak = max(peak, sum(ref() is not None for ref in refs))
        return found

    export.gathered_value = counted
    try:
        zerofx.export_safetensors(model, folder)
    finally:
        export.gathered_value = gathered_value
    buffers = len(list(model.buffers()))
    assert (len(refs), peak) == ((len(model.state_dict()), 1) if dist.get_rank() == 0 else (buffers, 1))


def test_an_export_holds_one_weight_at_a_time_and_that_on_rank_0_alone(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_streaming, str(tmp_path / "weights"))


def export_hugging_face(folder: str, name: str) -> None:
    model = zerofx.shard(build(name))
    zerofx.export_safetensors(model, f"{folder}/one")
    zerofx.export_safetensors(model, f"{folder}/many", max_file_bytes=20_000)
    if dist.get_rank() == 0:
        build(name, seed=2).save_pretrained(f"{folder}/theirs")  # type: ignore[operator]
    dist.barrier()
    zerofx.load(f"{folder}/theirs", model)
    assert not differing(digests(full_state(model)), digests(build(name, seed=2).state_dict()))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_from_pretrained_reads_what_was_exported_and_we_read_what_it_saves(
    workers2: Workers, tmp_path: Path, name: str
) -> None:
    workers2.run(export_hugging_face, str(tmp_path), name)
    reference = build(name)
    for folder in ("one", "many"):
        loaded, report = type(reference).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert not differing(digests(loaded.state_dict()), digests(reference.state_dict()))


def check_refused_by_torch() -> None:
    model, _ = ours()
    weights = get_model_state_dict(model)
    assert list(weights) == list(Net().state_dict())
    with pytest.raises(RuntimeError, match="full_state_dict"):
        torch.save(weights, "/dev/null")


def test_a_sharded_state_dict_is_not_pickled(workers2: Workers) -> None:
    workers2.run(check_refused_by_torch)
