"""After every pass the pair of graphs runs in a plain interpreter, and computes what it computed before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.passes.captured import MODELS, Casts, Pair, capture
from tests.passes.graphs import Flats, Numbers, Sketch, apply, aten, run
from tests.slow import quick_if, slow_if
from tests.workers import Workers
from zerofx.model.grouping import Grouping
from zerofx.passes import PIPELINE, discard
from zerofx.passes.ops import discard as discard_storage


def run_both(model: str, min_cut: bool, rank: int, **context: Any) -> tuple[Pair, torch.Tensor, Flats]:
    """The module's graphs, and the loss and the (whole) gradients of the module itself in eager mode.

    The same weights on every rank, each with a batch of its own.
    """
    torch.manual_seed(0)
    module = MODELS[model]()
    batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    grouping = Grouping([nn.Linear, nn.Embedding, nn.LayerNorm, Casts], min_bytes=0)
    pair = capture(module, batch, min_cut=min_cut, grouping=grouping, **context)
    loss = module(batch)
    loss.backward()
    flats: Flats = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            layout, slot = next((x, s) for x in pair.flats for s in x.slots if s.name == name)
            flat = flats.setdefault(layout, torch.zeros(layout.numel, dtype=layout.dtype))
            layout.view(flat, slot).copy_(parameter.grad)
    return pair, loss.detach(), flats


def check_close(value: Any, want: Any, what: str) -> None:
    torch.testing.assert_close(value, want, rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}")


@slow_if(lambda model: model == "tied")
@pytest.mark.parametrize("min_cut", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_on_one_rank_no_pass_changes_the_numbers(model: str, min_cut: bool) -> None:
    pair, loss, grads = run_both(model, min_cut, rank=0, world_size=1, executor="eager")
    names = []
    for name, got_loss, got_grads in pair.walk():
        check_close((got_loss, got_grads), ([loss], grads), name)
        names.append(name)
    assert names == ["before", *(pass_.__name__ for pass_ in PIPELINE)]


def compare_on_ranks(model: str, min_cut: bool, contexts: list[dict[str, Any]]) -> None:
    """On each rank: its own loss and the average of all gradients, whichever way the graphs are rewritten."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    process_group = dist.group.WORLD.group_name
    pair, loss, whole = run_both(model, min_cut, rank, world_size=world_size, process_group=process_group)
    own, average = {}, {}
    for layout, flat in whole.items():
        mine = slice(rank * layout.shard_numel, (rank + 1) * layout.shard_numel)
        own[layout] = flat[mine].clone()
        dist.all_reduce(flat)
        average[layout] = flat[mine] / world_size
    for context in contexts:
        pair.context = replace(pair.context, **context)
        reduced = False
        for name, got_loss, got_grads in pair.walk(rank):
            reduced = reduced or name == "reduce"
            want = average if reduced else own
            check_close((got_loss, got_grads), ([loss], want), f"rank {rank}, {context}, after {name}")


CONTEXTS: list[dict[str, Any]] = [
    {"executor": "eager", "memory_budget": None, "backend": "gloo"},
    {"executor": "eager", "memory_budget": 1 << 20, "backend": "another"},  # keeps gloo's own reduce-scatter
    {"executor": "inductor", "memory_budget": None, "backend": "gloo"},
]


@quick_if(lambda model, min_cut: model in ("layers", "casts") and not min_cut)
@pytest.mark.parametrize("min_cut", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_on_two_ranks_each_pass_leaves_the_loss_and_the_average_gradient(
    workers2: Workers, model: str, min_cut: bool
) -> None:
    workers2.run(compare_on_ranks, model, min_cut, CONTEXTS if min_cut else CONTEXTS[:1])


def run_escaping_weight() -> None:
    """A weight that is returned outlives the graph; its neighbour in another group does not."""
    rank = dist.get_rank()
    expected = None
    for n in range(len(PIPELINE) + 1):
        s = Sketch(process_group=dist.group.WORLD.group_name)
        x = s.input("x", 4, 8)
        w, _ = s.parameters("a", w=(8, 8), b=(8,))
        (v,) = s.parameters("b", v=(8, 8))
        y = s.call(aten.mm.default, s.call(aten.mm.default, x, w), v)
        gm, ctx = s.done(y, s.call(aten.t.default, w), w)
        numbers = Numbers.random(gm, ctx)
        if n:
            apply(gm, ctx, *PIPELINE[:n])
        got = run(gm, ctx, numbers, rank)
        expected = expected or got
        check_close(got, expected, f"after {n} passes")
        discards = [node for node in gm.graph.nodes if node.target is discard_storage]
        assert len(discards) == (n > PIPELINE.index(discard))


def test_on_two_ranks_a_weight_that_escapes_is_whole(workers2: Workers) -> None:
    workers2.run(run_escaping_weight)
