"""Weights and gradients in the host's memory: the same numbers, and on the device what two shards take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.seams.host_memory import counting
from tests.seams.test_seams import all_equal
from tests.workers import Workers
from zerofx.features.offload.operators import MAX_IN_FLIGHT

BF16 = zerofx.MixedPrecision(torch.bfloat16)
WIDTH = 48


class Deep(nn.Module):
    """Layers of one size, each a group."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def train(options: dict[str, Any], how: str = "", layers: int = 4) -> list[torch.Tensor]:
    """Losses of three steps, and the whole weights after them; micro-batches are added up as ``how`` says."""
    model = zerofx.compile(Deep(layers), groups=zerofx.Grouping((nn.Linear,), min_bytes=0), **options)
    optimizer = zerofx.AdamW(model.parameters(), lr=0.01, max_grad_norm=None if how == "steps" else 1.0)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for parts in torch.randn(3, 2, 4, WIDTH, generator=generator):
        if how == "no_sync":
            with zerofx.no_sync(model):
                model(parts[1]).square().mean().backward()
        elif how == "added":
            model(parts[1]).square().mean().backward()
        losses.append(model(parts[0]).square().mean())
        if how == "steps":
            with zerofx.step_in_backward(optimizer):
                losses[-1].backward()
            continue
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(parts[0]).mean())
    return [x.detach() for x in [*losses, *(p.full_tensor() for p in model.parameters())]]


def both_ways(cases: list[tuple[dict[str, Any], str]]) -> list[str]:
    """The cases in which numbers differ, or nothing was moved."""
    wrong = []
    for options, how in cases:
        wanted = train(options, how)
        with counting() as traffic:
            found = train(options, how)
        moved = traffic.taken > 0 and (traffic.brought > 0) == (options["stage"] == 3) and traffic.here == 0
        wrong += [f"{options} {how} {traffic}"] * (not all_equal(found, wanted) or not moved)
    return wrong


def few(executor: str) -> list[tuple[dict[str, Any], str]]:
    three = {"stage": 3, "executor": executor}
    return [({**three, "mixed_precision": BF16}, "added"), (three, "steps"), ({**three, "stage": 2}, "no_sync")]


def crossed(executor: str) -> list[tuple[dict[str, Any], str]]:
    """Stages, precisions and ways to accumulate, so that each meets stage 3."""
    three = {"stage": 3, "executor": executor}
    ways = [(three, how) for how in ("", "no_sync", "added", "steps")]
    ways += [({**three, "mixed_precision": BF16}, "added"), ({**three, "memory_budget": float("inf")}, "")]
    lower = [({**three, "stage": stage}, how) for stage, how in ((2, "added"), (2, "steps"), (1, "no_sync"))]
    return [*ways, *lower, ({**three, "stage": 2, "mixed_precision": BF16}, "")]


@pytest.mark.slow
def test_losses_and_weights_are_bitwise_those_of_state_on_the_device(workers2: Workers) -> None:
    assert workers2.run(both_ways, few("eager")) == [[], []]


@pytest.mark.slow
def test_with_inductor_too(workers2: Workers) -> None:
    assert workers2.run(both_ways, [({"stage": 3, "executor": "inductor"}, "added")]) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "executor"), [(2, "eager"), (3, "eager"), (2, "inductor"), (3, "inductor")])
def test_every_way(make_workers, ranks: int, executor: str) -> None:
    assert make_workers(ranks).run(both_ways, crossed(executor)) == [[]] * ranks


def most_on_the_device(options: dict[str, Any], layers: int) -> tuple[int, int]:
    """The most bytes of state at a time, and those of one shard."""
    with counting() as traffic:
        train(options, "added", layers)
    model = zerofx.shard(Deep(1), stage=3)
    return traffic.most, next(model.parameters())._group.layout.shard_numel * 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_device_holds_no_more_of_a_deep_model_than_of_a_shallow_one(workers2: Workers, stage: int) -> None:
    """Of weights what two shards take, and of gradients."""
    options = {"stage": stage, "executor": "eager"}
    for layers in (4, 9):
        for most, shard in workers2.run(most_on_the_device, options, layers):
            assert 0 < most <= (2 * MAX_IN_FLIGHT if stage == 3 else MAX_IN_FLIGHT) * shard


def listing(executor: str) -> list[str]:
    with counting():
        model = zerofx.compile(Deep(), groups=zerofx.Grouping((nn.Linear,), min_bytes=0), stage=3, executor=executor)
        model(torch.ones(4, WIDTH)).sum().backward()
        (record,) = zerofx.graphs(model)
        said = [record.explain("wait_reload layers.1"), record.explain("offload layers.1")]
        return [str(record.forward), str(record.backward), *said]


def test_a_listing_shows_what_is_reloaded_and_what_leaves(workers2: Workers) -> None:
    forward, backward, reloaded, left = workers2.run(listing, "eager")[0]
    assert "4 shards are reloaded: 18.9 kB" in forward.splitlines()[0]
    assert "4 gradients leave the device: 18.9 kB" in backward.splitlines()[0]
    assert "  reload   layers.1     4.7 kB" in forward and "  left     layers.0" in backward
    assert "made by  reload_weights: Weights that live elsewhere come" in reloaded
    assert "made by  offload_gradients: Gradients that live elsewhere leave" in left
