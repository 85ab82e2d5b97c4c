"""What is wrong with a checkpoint is said on every rank, and nothing of it is loaded."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.checkpoint.nets import EACH_GROUP, Net, batch, differing, digests, full_state, train
from tests.slow import slow_if
from tests.workers import Workers
from zerofx.kernels.checksum import checksum_of

LIMIT = 30  # seconds, for every rank to hear of it


def start(stage: int = 3) -> tuple[Any, Any]:
    model = zerofx.compile(Net(), stage=stage, executor="eager", groups=EACH_GROUP)
    optimizer = zerofx.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, range(1))
    return model, optimizer


def save(folder: str) -> None:
    model, optimizer = start()
    for step in (1, 2):
        zerofx.save(folder, model, optimizer, step=step, epoch=step)


def refused(load: Callable[[], Any], model: Any, optimizer: Any, *words: str) -> None:
    """``load`` raises on every rank, names ``words``, and leaves everything as it was."""
    before, random = full_state(model, optimizer), torch.get_rng_state()
    with pytest.raises(zerofx.CheckpointError) as error:
        load()
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, str(error.value))
    for word in words:
        assert word in messages[0], (word, messages[0])
    assert messages == messages[:1] * len(messages)
    assert not differing(digests(full_state(model, optimizer)), digests(before))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.fixture(scope="module")
def saved(make_workers: Callable[[int], Workers], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    make_workers(2).run(save, str(folder))
    return folder


def copy_of(saved: Path, to: Path) -> Path:
    """Both steps in ``to``; returns the later one's folder."""
    for path in saved.rglob("*"):
        if path.is_file():
            target = to / path.relative_to(saved)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return to / "step-00000002"


# -- files


def truncate(folder: Path) -> list[str]:
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    return ["__1_0.distcp", "truncated"]


def flip(folder: Path) -> list[str]:
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    return ["__0_0.distcp", "step-00000001"]


def flip_extra(folder: Path) -> list[str]:
    path = folder / "extra_1.pt"
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    return ["extra_1.pt", "checksum"]


def truncate_extra(folder: Path) -> list[str]:
    """Which no index speaks of."""
    path = folder / "extra_1.pt"
    path.write_bytes(path.read_bytes()[:-100])
    return ["extra_1.pt", "truncated", "were written"]


def lose(folder: Path) -> list[str]:
    (folder / "__1_0.distcp").unlink()
    return ["__1_0.distcp", "missing"]


def truncate_index(folder: Path) -> list[str]:
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:500])
    return [".metadata", "cannot be read"]


def newer(folder: Path) -> list[str]:
    mark = json.loads((folder / "zerofx.json").read_text())
    (folder / "zerofx.json").write_text(json.dumps(mark | {"format": 2, "zerofx": "9.9", "novelty": True}))
    return ["format 2", "9.9", "newer"]


def scramble_mark(folder: Path) -> list[str]:
    (folder / "zerofx.json").write_text("{")
    return ["zerofx.json", "cannot be read"]


def leave(folder: Path) -> list[str]:
    mark = json.loads((folder / "zerofx.json").read_text())
    mark["files"]["../../secret"] = [1, 1]
    (folder / "zerofx.json").write_text(json.dumps(mark))
    return ["../../secret", "not in its folder"]


def index_that_leaves(folder: Path) -> list[str]:
    (folder.parent / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    index = pickle.loads((folder / ".metadata").read_bytes())
    for place in index.storage_data.values():
        place.relative_path = "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return ["../secret", "not a file of the folder"]


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def code_in_the_index(folder: Path) -> list[str]:
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = Evil(folder / "executed")
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return ["system", "refused"]


def code_in_an_option(folder: Path) -> list[str]:
    _replace(folder, "optim.param_groups.0.lr", Evil(folder / "executed"))
    return ["cannot be read"]


def code_in_a_tensor(folder: Path) -> list[str]:
    (folder / "zerofx.json").unlink()  # or its checksum would tell
    _replace(folder, "model.embedding.weight", Evil(folder / "executed"))
    return ["cannot be read"]


def code_in_the_extra(folder: Path) -> list[str]:
    torch.save(Evil(folder / "executed"), folder / "extra_0.pt")
    mark = json.loads((folder / "zerofx.json").read_text())
    path = folder / "extra_0.pt"
    mark["files"][path.name] = [path.stat().st_size, checksum_of(path)]
    (folder / "zerofx.json").write_text(json.dumps(mark))
    return ["weights_only"]


def _replace(folder: Path, name: str, value: Any) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    torch.save(value, folder / "new.distcp")
    for key, place in index.storage_data.items():
        if key.fqn == name:
            place.relative_path, place.offset = "new.distcp", 0
            place.length = (folder / "new.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(index))


DAMAGES = [
    truncate, flip, flip_extra, truncate_extra, lose, truncate_index, newer, scramble_mark, leave, index_that_leaves,
    code_in_the_index, code_in_an_option, code_in_a_tensor, code_in_the_extra,
]  # fmt: skip


def check_damages(cases: list[tuple[str, list[str]]]) -> None:
    model, optimizer = start()
    for folder, words in cases:
        refused(lambda folder=folder: zerofx.load(folder, model, optimizer), model, optimizer, *words)
        assert not (Path(folder) / "executed").exists()
    assert train(model, optimizer, range(1, 2))[0] > 0  # the run goes on


def test_damaged_and_forged_checkpoints_are_refused_and_run_no_code(
    saved: Path, make_workers: Callable[[int], Workers], tmp_path: Path
) -> None:
    cases = []
    for damage in DAMAGES:
        folder = copy_of(saved, tmp_path / damage.__name__)
        words = damage(folder)
        cases.append((str(folder), words))
    make_workers(2).run(check_damages, cases, timeout=4 * LIMIT)


def test_the_forgeries_would_have_run_their_code(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path)
    code_in_the_index(folder)
    pickle.loads((folder / ".metadata").read_bytes())
    assert (folder / "executed").exists()


# -- other models, other optimizers


class Other(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        for name, parameter in Net().named_parameters():
            shape = changes.get(name.replace(".", "_"), parameter.shape)
            if shape is not None:
                self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.ones(shape)))
        for name in changes.keys() - set(self._parameters):
            if changes[name] is not None:
                self.register_parameter(name, nn.Parameter(torch.ones(changes[name])))


def step(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def check_others(folder: str) -> None:
    first = zerofx.shard(Other())
    optimizer = torch.optim.AdamW(first.parameters())
    step(first, optimizer)
    zerofx.save(f"{folder}/a", first, optimizer)
    zerofx.save(f"{folder}/alone", first)
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"back_bias": None, "renamed": (7,)}, ["lacks 'renamed'", "'back_bias', which the module has not"]),
        ({"back_bias": None}, ["has 'back_bias'"]),
        ({"more": (3,)}, ["lacks 'more'"]),
        ({"back_bias": (9,)}, ["back_bias has shape [7] there, [9] here"]),
    ]
    for changes, words in cases:
        model = zerofx.shard(Other(**changes))
        mine = torch.optim.AdamW(model.parameters())
        step(model, mine)
        refused(lambda m=model, o=mine: zerofx.load(f"{folder}/a", m, o), model, mine, *words)
    model = zerofx.shard(Other())
    sgd: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, sgd)
    refused(lambda: zerofx.load(f"{folder}/a", model, sgd), model, sgd, "another kind of optimizer than SGD", "betas")
    refused(lambda: zerofx.load(f"{folder}/alone", model, sgd), model, sgd, "no optimizer's state")
    some = torch.optim.AdamW(list(model.parameters())[1:])
    step(model, some)
    refused(lambda: zerofx.load(f"{folder}/a", model, some), model, some, "other parameters", "state of 'scale'")
    linear = nn.Linear(1, 1)
    refused(lambda: zerofx.load(f"{folder}/a", model, epoch=linear), model, some, "no 'epoch'")
    refused(lambda: zerofx.load(f"{folder}/none", model), model, some, "does not exist")
    if dist.get_rank() == 0:
        (Path(folder) / "empty").mkdir()
    refused(lambda: zerofx.load(f"{folder}/empty", model), model, some, "no whole checkpoint")
    stranger = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    refused(lambda: zerofx.save(f"{folder}/b", model, stranger), model, some, "parameter 0 of AdamW", "not one of")
    assert zerofx.latest(f"{folder}/b") is None


def test_another_model_or_optimizer_is_refused_by_name(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_others, str(tmp_path), timeout=4 * LIMIT)


# -- one rank


def check_one_rank(folder: str) -> None:
    model, optimizer = start()
    zerofx.save(folder, model, optimizer, step=1)
    rank = dist.get_rank()

    class Broken:
        def state_dict(self) -> Any:
            if dist.get_rank() == 1:
                raise OSError("the loader's file is gone")
            return {}

    refused(lambda: zerofx.save(folder, model, optimizer, step=2, data=Broken()), model, optimizer, "rank 1", "is gone")
    refused(lambda: zerofx.save(folder, model, optimizer, step=2, f=lambda: 0), model, optimizer, "f=function", "code")
    with torch.no_grad():
        if model.layers[1].weight.to_local().numel() and rank == 1:
            model.layers[1].weight.to_local()[0] = math.nan
    refused(
        lambda: zerofx.save(folder, model, optimizer, step=2, keep=1), model, optimizer, "layers.1.weight", "not finite"
    )
    assert zerofx.latest(folder) == Path(folder) / "step-00000001"
    assert [path.name for path in Path(folder).iterdir()] == ["step-00000001"]
    zerofx.load(folder, model, optimizer)
    assert math.isfinite(train(model, optimizer, range(1, 2))[0])


def test_what_fails_on_one_rank_fails_on_all_and_the_last_checkpoint_stands(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_one_rank, str(tmp_path / "c"), timeout=4 * LIMIT)


def check_gradient_that_is_not_finite(folder: str) -> None:
    model, optimizer = start()
    zerofx.save(folder, model, optimizer, step=1)
    before = digests(full_state(model, optimizer))
    (model(*batch(1)) * (math.nan if dist.get_rank() == 1 else 1.0)).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert not differing(digests(full_state(model, optimizer)), before)
    optimizer.zero_grad()
    zerofx.load(folder, model, optimizer)
    assert math.isfinite(train(model, optimizer, range(1, 2))[0])


def test_a_gradient_that_is_not_finite_on_one_rank_is_an_error_on_all(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_gradient_that_is_not_finite, str(tmp_path / "c"), timeout=LIMIT)


def check_full_disk(folder: str, background: bool) -> None:
    model, optimizer = start()
    zerofx.save(folder, model, optimizer, step=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit is an OSError, as on a full disk
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:

        def save() -> Any:
            saved: Any = zerofx.save(folder, model, optimizer, step=2, keep=1, background=background)
            return saved.result() if background else saved

        refused(save, model, optimizer, "rank 1: OSError", "File too large", "last whole checkpoint", "step-00000001")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == ["step-00000001"]
    zerofx.load(folder, model, optimizer)
    zerofx.save(folder, model, optimizer, step=2, keep=1)
    assert [path.name for path in Path(folder).iterdir()] == ["step-00000002"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.filterwarnings("ignore:A save in the background failed")
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_goes_on(
    workers2: Workers, tmp_path: Path, background: bool
) -> None:
    workers2.run(check_full_disk, str(tmp_path / "c"), background, timeout=4 * LIMIT)


# -- what else is saved


def check_extras(folder: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = start()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scheduler.step()
    torch.manual_seed(rank)
    zerofx.save(folder, model, optimizer, step=5, scheduler=scheduler, epoch=3, mine=[rank], names=["a", "a" * 1])
    expected = torch.rand(3)
    other = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    found = zerofx.load(folder, model, optimizer, scheduler=other)
    assert torch.equal(torch.rand(3), expected)
    assert found == {"step": 5, "path": Path(folder) / "step-00000005", "epoch": 3, "mine": [rank], "names": ["a", "a"]}
    assert other.state_dict() == scheduler.state_dict() and size == 2


def check_extras_elsewhere(folder: str) -> None:
    model, optimizer = start()
    before = torch.get_rng_state()
    speaks = pytest.warns(UserWarning, match="saved by 2 ranks") if dist.get_rank() == 0 else contextlib.nullcontext()
    with speaks:
        found = zerofx.load(folder, model, optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert found == {"step": 5, "path": Path(folder) / "step-00000005", "epoch": 3, "names": ["a", "a"],
                     "scheduler": found["scheduler"]}  # fmt: skip

    class Stateful:
        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("must not be asked")

    refused(lambda: zerofx.load(folder, model, optimizer, mine=Stateful()), model, optimizer, "mine", "2 ranks")


def test_schedulers_values_and_generators_come_back_each_ranks_its_own(
    make_workers: Callable[[int], Workers], tmp_path: Path
) -> None:
    make_workers(2).run(check_extras, str(tmp_path))
    make_workers(3).run(check_extras_elsewhere, str(tmp_path))


# -- exceptions in a step


def break_now(gradient: torch.Tensor) -> torch.Tensor:
    raise ValueError("in backward")


def check_recovery(stage: int) -> None:
    def run(breaks: bool) -> list[float]:
        model = zerofx.compile(Net(), stage=stage, executor="eager", groups=EACH_GROUP)
        optimizer = zerofx.AdamW(model.parameters(), lr=0.02)
        losses = train(model, optimizer, range(2))
        if breaks:
            with pytest.raises(IndexError):
                model(torch.tensor([0, 99]), torch.tensor([0, 0]))
            output = model(torch.tensor([0, 1]), torch.tensor([0, 0]))
            output.register_hook(break_now)
            with pytest.raises(ValueError, match="in backward"):
                output.backward()
            model.layers[0].weight.register_post_accumulate_grad_hook(late)
            with pytest.raises(ValueError, match="half way"):
                model(torch.tensor([0, 1]), torch.tensor([0, 0])).backward()
            armed.clear()
            optimizer.zero_grad()
        return losses + train(model, optimizer, range(2, 4))

    armed = [True]

    def late(parameter: Any) -> None:
        if armed:
            raise ValueError("half way")

    assert run(True) == run(False)


@slow_if(lambda stage: stage == 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_step_after_an_exception_in_forward_or_backward_is_as_if_nothing_had_been(
    workers2: Workers, stage: int
) -> None:
    workers2.run(check_recovery, stage)
