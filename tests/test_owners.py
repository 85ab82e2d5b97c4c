"""Who owns which parameter, what travels to owners and back, and what is said of it."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.test_by_owner import Dependent, Net, Rows, sharded
from tests.workers import Workers
from zerofx.model.layout import make_layout
from zerofx.runtime.optim.owners import SLACK, Owners, assign, matrix_cost


def test_no_owner_has_much_more_than_its_share() -> None:
    for seed in range(50):
        draws = random.Random(seed)
        shapes = [[draws.choice([1, 64, 256, 1024]) for _ in range(draws.choice([1, 2, 2, 3]))] for _ in range(60)]
        for ranks in (2, 3, 8):
            owners = assign(shapes, ranks)
            for of in (matrix_cost, lambda shape: float(torch.Size(shape).numel())):
                loads = [sum(of(s) for s, o in zip(shapes, owners, strict=True) if o == rank) for rank in range(ranks)]
                largest = max(map(of, shapes))
                assert max(loads) <= 1.1 * sum(loads) / ranks + largest, f"seed {seed}, {ranks} ranks"


GPT = [(512,), (1536, 512), (512, 512), (512,), (2048, 512), (512, 2048)]
LLAMA = [(512,), (512, 512), (128, 512), (128, 512), (512, 512), (512,), (1792, 512), (1792, 512), (512, 1792)]


def matrices_of(layer: list[tuple[int, ...]], layers: int, ranks: int) -> tuple[list[Any], list[dict[int, int]]]:
    """Shapes of all matrices, and what of each a rank holds, where each layer is a group."""
    layout = make_layout("layer", [(str(i), shape) for i, shape in enumerate(layer)], torch.float32, ranks)
    slots = [slot for slot in layout.slots if len(slot.shape) > 1]
    held = [{r: n for r in range(ranks) if (n := layout.piece(slot, r).length)} for slot in slots]
    return [slot.shape for slot in slots] * layers, held * layers


@pytest.mark.parametrize(
    ("layer", "ranks", "most"),
    [(GPT, 2, 0.17), (GPT, 3, 0.001), (GPT, 4, 0.3), (GPT, 8, 0.6), (LLAMA, 2, 0.07), (LLAMA, 4, 0.3), (LLAMA, 8, 0.7)],
)
def test_owners_have_much_of_their_parameters_and_no_more_than_their_share(
    layer: list[tuple[int, ...]], ranks: int, most: float
) -> None:
    """By cost alone, (M-1)/M of the elements would have to move, or, in a GPT with two ranks, a third."""
    shapes, held = matrices_of(layer, 8, ranks)
    owners = assign(shapes, ranks, held=held)
    total = sum(map(math.prod, shapes))
    assert 1 - sum(elements.get(rank, 0) for elements, rank in zip(held, owners, strict=True)) / total <= most
    loads = [sum(math.prod(s) for s, o in zip(shapes, owners, strict=True) if o == rank) for rank in range(ranks)]
    assert max(loads) <= SLACK * total / ranks


def test_where_a_rank_holds_all_others_own_as_much() -> None:
    shapes = [(64, 64)] * 12
    assert sorted(assign(shapes, 3, held=[{0: 4096}] * 12)) == [0] * 4 + [1] * 4 + [2] * 4


def exchange(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(5, 3), (7,), (2, 3, 4), (1,), (11, 2)]
    module = nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes])
    wholes = [p.detach().clone() for p in module]
    zerofx.shard(module, stage=3)
    parameters: Any = list(module)
    owners = Owners(parameters)
    owned = [i for i, p in enumerate(parameters) if owners.owns(p)]
    found = owners.gather([p.like(p._local) for p in parameters])
    assert len(found) == len(owned)
    for i, whole in zip(owned, found, strict=True):
        assert torch.equal(whole, wholes[i])
    slices = owners.scatter([whole * 2 for whole in found], parameters)
    for p, part in zip(parameters, slices, strict=True):
        assert torch.equal(part, p._local * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_owners_gather_and_scatter_is_whole_and_in_place(
    workers2: Workers, workers3: Workers, dtype: torch.dtype
) -> None:
    for workers in (workers2, workers3):
        workers.run(exchange, dtype)


def explain() -> dict[str, str]:
    module = sharded(3)
    matrices = [p for p in module.parameters() if p.dim() == 2 and p.requires_grad]
    made = {
        "AdamW": torch.optim.AdamW(module.parameters()),
        "Adafactor": torch.optim.Adafactor(module.parameters()),
        "Muon": zerofx.Muon([{"params": matrices, "use_muon": True}]),
        "Dependent": Dependent(matrices, "rows"),
    }
    return {name: zerofx.explain_optimizer(optimizer) for name, optimizer in made.items()}


def explain_a_large_one() -> list[str]:
    net = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7))
    return zerofx.explain_optimizer(Rows(zerofx.shard(net, stage=3).parameters())).splitlines()


def test_a_parameter_that_is_more_than_a_ranks_share_is_named(workers3: Workers) -> None:
    for lines in workers3.run(explain_a_large_one):
        assert [line for line in lines if "alone" in line] == [
            "'0.weight' alone is 2.5 times a rank's share: no owner has less of it."
        ]
        assert not any("alone" in line for line in lines[:-1])


def explain_few(matrices: int) -> list[str]:
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(matrices)))
    return zerofx.explain_optimizer(Rows(zerofx.shard(net, stage=3).parameters())).splitlines()


def test_where_parameters_are_too_few_for_the_ranks_the_one_that_owns_most_is_named(workers3: Workers) -> None:
    for lines in workers3.run(explain_few, 4):
        assert lines[-1].endswith(" owns 1.5 times its share: 4 parameters divide no better over 3 ranks.")
    for lines in workers3.run(explain_few, 6):
        assert not any("divide no better" in line for line in lines)


def test_explain_optimizer_says_how_it_steps_and_who_owns_what(workers2: Workers) -> None:
    one, other = workers2.run(explain)
    assert one == other
    assert one["AdamW"] == "AdamW steps on flat slices: element by element, or by numbers of whole parameters."
    head, travels, first, second = one["Adafactor"].splitlines()
    assert head.startswith("Adafactor steps each parameter whole, on its owner: it uses '")
    moved, of = re.findall(r"[\d,]+", travels)[:2]
    assert 0 < int(moved) < int(of) / 2 and "as gradients, and back, as new weights" in travels
    elements = [int(line.split(" elements")[0].split(",", 1)[1].replace(",", "")) for line in (first, second)]
    assert first.startswith("rank 0 ") and "layers." in first and second.startswith("rank 1 ")
    assert sum(elements) == sum(p.numel() for p in Net().parameters() if p.requires_grad) == int(of)
    head, travels, first = one["Muon"].splitlines()[:3]
    assert head == "Muon orthogonalizes each matrix whole, on its owner; all else is on flat slices."
    assert travels.endswith("elements travel to an owner, as momenta, and back, as updates.") and first[:6] == "rank 0"
    assert one["Dependent"].startswith("Dependent is refused: it uses 'reshape' while the update of one parameter")
