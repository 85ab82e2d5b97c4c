"""A loop under accelerate with one line changed trains as with DistributedDataParallel, saves its state and goes on."""

from __future__ import annotations

import contextlib
import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.launched import as_torchrun_would, close, converted, forget, plain, run_script
from tests.slow import quick_if
from tests.workers import Workers

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zerofx[transformers]")


def changed(stage: int) -> str:
    options = f'functools.partial(z.Accelerator, zerofx={{"stage": {stage}, "executor": "eager"}})'
    line = f"import functools, zerofx.integrations.accelerate as z; Accelerator = {options}"
    return converted("accelerator", {"from accelerate import Accelerator": line})


def results(text: str, folder: str, checkpoints: list[str]) -> list[Any]:
    """The script from the start, and from each checkpoint."""
    return [run_script(text, folder, *checkpoint) for checkpoint in [[], *([c] for c in checkpoints)]]


@pytest.fixture(scope="module")
def reference(workers2: Workers, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What the script does as it is: from the start, and from its checkpoint, which leaves dropout another way."""
    folder = tmp_path_factory.mktemp("ddp")
    return workers2.run(results, plain("accelerator"), str(folder), [f"{folder}/ten"], timeout=280), folder


@quick_if(lambda stage: stage == 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_line_changed_accumulates_clips_saves_and_goes_on_as_with_ddp(
    workers2: Workers, reference: tuple[list[Any], Path], stage: int, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    expected, folder = reference
    checkpoints = [f"{tmp_path}/ten", f"{folder}/ten"]  # its own, and one of DistributedDataParallel
    found = workers2.run(results, changed(stage), str(tmp_path), checkpoints, timeout=280)
    for (from_start, from_own, from_ddp), (start, resumed) in zip(found, expected, strict=True):
        assert len(start["losses"]) == 40 and len(start["norms"]) == 20 and len(resumed["losses"]) == 20
        close(from_start, start)
        close(from_own, resumed)
        close(from_ddp, resumed)
    weights = [load_file(path / "weights" / "model.safetensors") for path in (tmp_path, folder)]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def check_refused(arguments: dict[str, Any]) -> str:
    from accelerate.utils import FullyShardedDataParallelPlugin

    from zerofx.integrations.accelerate import Accelerator

    if "fsdp_plugin" in arguments:
        arguments = {"fsdp_plugin": FullyShardedDataParallelPlugin()}
    with as_torchrun_would(), pytest.raises(ValueError) as error:
        Accelerator(cpu=True, **arguments)
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"fsdp_plugin": True},
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin): expected None",
        ),
        ({"dynamo_backend": "inductor"}, "'INDUCTOR' was chosen"),
        ({"zerofx": {"stage": 4}}, r"Accelerator(zerofx=...): stage=4: expected 0, 1, 2 or 3"),
        ({"zerofx": 3}, "Accelerator(zerofx=...)=3: expected a dictionary"),
    ],
)
def test_what_does_not_go_together_with_zerofx_is_refused_by_name(
    workers2: Workers, arguments: dict[str, Any], text: str
) -> None:
    assert text in workers2.run(check_refused, arguments)[0]


def test_in_one_process_nothing_is_sharded() -> None:
    from zerofx.integrations.accelerate import Accelerator
    from zerofx.integrations.states import is_sharded

    try:
        model = Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
    finally:
        forget()
    assert type(model) is torch.nn.Linear and not is_sharded(model)


class Endless(torch.utils.data.IterableDataset):
    """Its loader has no length."""

    def __iter__(self) -> Any:
        return iter(range(8))


def test_loaders_without_a_length_are_prepared_and_the_first_is_remembered() -> None:
    from torch.utils.data import DataLoader

    from zerofx.integrations.accelerate import Accelerator

    first, second = (DataLoader(Endless(), batch_size=2) for _ in range(2))
    try:
        accelerator = Accelerator(cpu=True)
        for loader in (first, second):
            accelerator.prepare(loader)
        assert accelerator._zerofx_loader is first
    finally:
        forget()


def gan() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    return torch.nn.Linear(6, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def synchronized(cls: Any, **options: Any) -> list[torch.Tensor]:
    """Weights behind three steps, each of three micro-batches in `no_sync`, the last of which is reduced."""
    with as_torchrun_would():
        accelerator = cls(cpu=True, **options)
        model = gan()[1]
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(accelerator.process_index)
        for _ in range(3):
            with accelerator.no_sync(model):
                for i in range(3):
                    loss = model(torch.randn(2, 4, generator=generator)).square().mean()
                    with accelerator.trigger_sync_in_backward(model) if i == 2 else contextlib.nullcontext():
                        accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def synchronizes(stages: list[int]) -> None:
    import accelerate

    from zerofx.integrations.accelerate import Accelerator

    wanted = synchronized(accelerate.Accelerator)
    for stage in stages:
        found = synchronized(Accelerator, zerofx={"stage": stage, "executor": "eager"})
        torch.testing.assert_close(found, wanted, msg=lambda m, stage=stage: f"stage {stage}: {m}")


def test_a_backward_that_triggers_the_reduction_inside_of_no_sync_is_as_with_ddp(workers2: Workers) -> None:
    workers2.run(synchronizes, [0, 1, 2, 3])


class Average:
    """As diffusers' ``EMAModel`` computes."""

    def __init__(self, parameters: Any, foreach: bool) -> None:
        self.shadows = [p.clone().detach() for p in parameters]
        self.foreach = foreach
        self.stored: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        pairs = list(zip(self.shadows, parameters, strict=True))
        if not self.foreach:
            for shadow, p in pairs:
                shadow.sub_(0.1 * (shadow - p)) if p.requires_grad else shadow.copy_(p)
            return
        for trained in (True, False):
            ours, theirs = map(list, zip(*(pair for pair in pairs if pair[1].requires_grad == trained)))
            if trained:
                torch._foreach_sub_(ours, torch._foreach_sub(ours, theirs), alpha=0.1)
            else:
                torch._foreach_copy_(ours, theirs, non_blocking=True)

    def _write(self, parameters: Any, values: list[torch.Tensor]) -> None:
        parameters = [p.data for p in parameters]
        if self.foreach:
            torch._foreach_copy_(parameters, [value.to(p.device).data for value, p in zip(values, parameters)])
            return
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value.to(p.device).data)

    def store(self, parameters: Any) -> None:
        self.stored = [p.detach().cpu().clone() for p in parameters]

    def copy_to(self, parameters: Any) -> None:
        self._write(parameters, self.shadows)

    def restore(self, parameters: Any) -> None:
        self._write(parameters, self.stored)

    def state_dict(self) -> dict[str, Any]:
        return {"shadows": self.shadows, "foreach": self.foreach}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadows = copy.deepcopy(state)["shadows"]


def averaged(cls: Any, folder: str, foreach: bool, **options: Any) -> list[torch.Tensor]:
    """An average over steps, what the model says with it, and both behind a folder."""

    def whole(tensors: Any) -> list[torch.Tensor]:
        return [t.full_tensor() if hasattr(t, "full_tensor") else t.detach().clone() for t in tensors]

    with as_torchrun_would():
        accelerator = cls(cpu=True, **options)
        model: Any = gan()[1]
        model[2].bias.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.5))
        parameters = list(accelerator.unwrap_model(model).parameters())
        average = Average(parameters, foreach)
        accelerator.register_for_checkpointing(average)
        generator = torch.Generator().manual_seed(accelerator.process_index)

        def step() -> None:
            accelerator.backward(model(torch.randn(2, 4, generator=generator)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            average.step(parameters)

        step()
        step()
        found = whole(average.shadows)
        kinds = [type(shadow) for shadow in average.shadows]
        average.store(parameters)
        average.copy_to(parameters)
        with torch.no_grad():
            found.append(model(torch.ones(2, 4)).clone())
        average.restore(parameters)
        accelerator.save_state(folder)
        state = generator.get_state()
        step()
        found += whole([*average.shadows, *parameters])
        accelerator.load_state(folder)
        assert [type(shadow) for shadow in average.shadows] == kinds
        generator.set_state(state)
        step()
        torch.testing.assert_close(whole([*average.shadows, *parameters]), found[-2 * len(parameters) :])
        return found


def averages(folder: str, stages: list[int]) -> None:
    import accelerate

    from zerofx.integrations.accelerate import Accelerator

    for foreach in (False, True):
        wanted = averaged(accelerate.Accelerator, f"{folder}/{foreach}", foreach)
        for stage in stages:
            options = {"stage": stage, "executor": "eager"}
            found = averaged(Accelerator, f"{folder}/{foreach}{stage}", foreach, zerofx=options)
            torch.testing.assert_close(found, wanted, msg=lambda m, stage=stage: f"stage {stage}: {m}")


def test_an_average_of_prepared_weights_follows_evaluates_and_is_saved(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(averages, str(tmp_path), [0, 1, 3])


def saves_two(folder: str, stage: int) -> None:
    """One optimizer over two models, and hooks that see both, go through a folder and come back."""
    from zerofx.integrations.accelerate import Accelerator

    with as_torchrun_would():
        accelerator = Accelerator(cpu=True, zerofx={"stage": stage, "executor": "eager"})
        first, second = gan()
        optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.1)
        first, second, optimizer = accelerator.prepare(first, second, optimizer)
        seen: dict[str, Any] = {}

        def saving(models: list[Any], weights: list[Any], folder: str) -> None:
            seen["save"] = models[0] is first and len(models) == 2, [list(w) for w in weights]
            weights.pop()

        def loading(models: list[Any], folder: str) -> None:
            seen["load"] = models[1] is second, models.pop() is second

        accelerator.register_save_state_pre_hook(saving)
        accelerator.register_load_state_pre_hook(loading)

        def step() -> float:
            x = torch.ones(2, 6) * (1 + accelerator.process_index)
            loss = second(first(x)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        step()
        accelerator.save_state(folder)
        wanted = [step(), step()]
        accelerator.load_state(folder)
        assert [step(), step()] == wanted
        names = [list(m.state_dict()) for m in (first, second)]
        assert seen == {"save": (True, names if accelerator.process_index == 0 else [[], []]), "load": (True, True)}


@pytest.mark.parametrize("stage", [0, 3])
def test_one_optimizer_of_two_models_is_saved_and_hooks_of_states_see_both(
    workers2: Workers, stage: int, tmp_path: Path
) -> None:
    workers2.run(saves_two, str(tmp_path / "state"), stage)


def test_the_batch_of_a_loader_has_its_shapes_and_leaves_random_numbers_alone() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    from zerofx.integrations.states import first_batch

    def collate(samples: list[int]) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(len(samples), 3) + random.random()}

    before = torch.get_rng_state(), random.getstate()
    loader = DataLoader([0, 1, 2], batch_size=4, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    assert first_batch(loader)["x"].shape == (4, 3)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    for unsuited in (None, DataLoader(TensorDataset(torch.ones(3))), DataLoader(iter([1]))):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match='"auto" without "batch" in zerofx='):
            first_batch(unsuited)
