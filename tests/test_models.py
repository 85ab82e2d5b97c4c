"""The models keep what tests of data parallelism take for granted about them."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests import models
from tests.slow import slow_if


@pytest.mark.parametrize("name", models.BUILDERS)
def test_slices_average_to_the_whole_batch(name: str) -> None:
    model = models.build(name)
    batch = models.make_batch(name, 6, seed=1)
    whole = models.loss_of(model, batch)
    whole.backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    for world_size in (2, 3):
        model.zero_grad()
        parts = [models.loss_of(model, models.slice_batch(batch, r, world_size)) for r in range(world_size)]
        mean = torch.stack(parts).mean()
        mean.backward()
        torch.testing.assert_close(mean, whole)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected.get(key), msg=lambda m, key=key: f"{key}: {m}")


@slow_if(lambda name: name in ("gpt2", "gpt2_two_graphs", "llama", "bert"))
@pytest.mark.parametrize("name", models.BUILDERS)
def test_number_of_graphs(name: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(models.build(name), backend=counter)
    for seed in range(2):
        models.loss_of(compiled, models.make_batch(name, 4, seed)).backward()
    assert counter.frame_count == (2 if name == "gpt2_two_graphs" else 1)


def test_reference_run_learns_and_repeats() -> None:
    losses, parameters = models.reference_run("gpt2", 3)
    again, same = models.reference_run("gpt2", 3)
    assert losses == again and all(torch.equal(parameters[key], same[key]) for key in parameters)
    start = dict(models.build("gpt2").named_parameters())
    assert all(not torch.equal(start[key], parameters[key]) for key in parameters)


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    models.build("mlp")
    assert torch.equal(before, torch.get_rng_state())
