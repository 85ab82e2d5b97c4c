"""What each stage holds and sends is what `zerofx.inspect.predict.cost` says.

It is measured in the paper's table, in live memory and at the process group.

``python -m tests.test_zero_table`` prints the measured table of docs/stages.md.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from typing import Any

import pytest
import sympy
import torch
from torch import nn

import zerofx
from tests.counting import count_collectives
from tests.models import GPT, Block
from tests.slow import quick_if, slow_if
from tests.workers import Processes, Workers
from zerofx.inspect.predict import cost
from zerofx.model.layout import GroupLayout
from zerofx.runtime.state.group import ShardGroup, groups_of

STAGES = (0, 1, 2, 3)
BF16 = zerofx.MixedPrecision(param_dtype=torch.bfloat16)
BF16_REDUCED_IN_FP32 = zerofx.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# "bf16-fp32": computed in bf16, reduced in fp32.
PRECISIONS = {"fp32": None, "bf16": BF16, "bf16-fp32": BF16_REDUCED_IN_FP32}

# A layer has 12·96² weights, 443 kB: aligning it and dividing it over 4 ranks pads it by much less than 1 percent.
# Two layers, because time goes into compiling.
LAYERS, DIM, VOCAB, LENGTH = 2, 96, 131, 32
PARAMETERS = sum(p.numel() for p in GPT(LAYERS, DIM, 4, VOCAB, LENGTH).parameters())

# The dtype that gradients are reduced in has to do with no number of ranks: two are enough for that.
WORLDS = [(world, name) for name in PRECISIONS for world in (2, 3, 4) if world == 2 or name in ("fp32", "bf16")]
QUICK = [(2, "fp32", 0), (2, "fp32", 3), (3, "bf16", 3)]  # world, precision, stage


# (a) the paper's table


def paper_table() -> list[cost.Memory]:
    """Figure 1 of the ZeRO paper by stage: 16-bit weights and gradients, float32 master weights and Adam's moments."""

    def parts(first: int, stage: int) -> sympy.Expr:
        return cost.N / cost.M if stage >= first else cost.N

    return [cost.Memory(2 * parts(3, s), 2 * parts(2, s), 4 * parts(1, s), 8 * parts(1, s)) for s in range(4)]


def test_the_ideal_table_has_the_rows_of_the_zero_paper() -> None:
    n, m = cost.N, cost.M
    rows = [16 * n, 4 * n + 12 * n / m, 2 * n + 14 * n / m, 16 * n / m]
    assert [sympy.simplify(memory.total - row) for memory, row in zip(paper_table(), rows, strict=True)] == [0] * 4


def test_7_5_billion_parameters_on_64_ranks_take_the_gigabytes_of_figure_1() -> None:
    gigabytes = [float(memory.at(N=7.5e9, M=64).total) / 1e9 for memory in paper_table()]
    assert [round(x, 1) for x in gigabytes] == [120.0, 31.4, 16.6, 1.9]


def test_zerofx_is_above_the_paper_by_gradient_shards_in_fp32_and_nothing_else() -> None:
    sizes, share = cost.Sizes.of(BF16), cost.N / cost.M
    above = [sympy.expand(cost.memory(s, sizes).total - ideal.total) for s, ideal in enumerate(paper_table())]
    # Stage 1 keeps no whole gradients unless it accumulates: it is below the paper then, and at the paper's if it does.
    assert above == [0, 4 * share - 2 * cost.N, 2 * share, 0]
    accumulating = cost.memory(1, sizes, accumulating=True).total
    assert sympy.expand(accumulating - paper_table()[1].total) == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_stage_1_without_accumulation_holds_what_stage_2_holds(precision: str) -> None:
    sizes = cost.Sizes.of(PRECISIONS[precision])
    assert cost.memory(1, sizes) == cost.memory(2, sizes) != cost.memory(1, sizes, accumulating=True)


def test_letters_become_numbers_and_nothing_else_is_taken_for_a_letter() -> None:
    held = cost.memory(2, cost.MIXED).at(N=1000, M=4, m=4, w=2, g=2)
    assert [int(x) for x in astuple(held)] == [2000, 1000, 1000, 2000]
    assert int(held.total) == 6000
    assert cost.memory(2, cost.MIXED).at(m=4, w=2, g=2) == cost.memory(2, cost.Sizes.of(BF16))
    with pytest.raises(ValueError, match="'Q' is no letter"):
        held.at(Q=1)
    for formulas in (cost.memory, cost.traffic):
        with pytest.raises(ValueError, match="stage=4"):
            formulas(4)


def test_one_micro_batch_moves_2_times_the_parameters_and_3_times_in_stage_3() -> None:
    share = cost.N * (cost.M - 1) / cost.M
    for stage, times in zip(STAGES, (2, 2, 2, 3), strict=True):
        for no_sync in (False, True):  # with one micro-batch there is nothing to keep back
            moved = cost.traffic(stage, no_sync=no_sync).at(k=1, m=4)
            assert sympy.simplify(moved.total - times * share * 4) == 0


def blocks_and_the_rest(name: str, module: nn.Module) -> bool:
    """One group per layer and one for all else: backward needs every group (it would not read an embedding's)."""
    return name == "" or isinstance(module, Block)


Events = Counter[tuple[str, int]]
"""How often a collective of this name and payload (bytes of the whole) was started."""

Counted = tuple[dict[GroupLayout, bool], dict[tuple[int, bool], tuple[Events, int]]]
"""See `count`."""


# (b) live memory


@dataclass(frozen=True)
class Held:
    """Bytes of live storages by what they are for; the fields of `zerofx.inspect.predict.cost.Memory`."""

    weights: int
    gradients: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


def nbytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the tensors' storages, and their slices', that are not in ``seen``, where they are put."""
    count = 0
    for tensor in tensors:
        parts = [tensor, tensor.to_local()] if isinstance(tensor, zerofx.ShardedTensor) else [tensor]
        for storage in (part.untyped_storage() for part in parts):
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                count += storage.nbytes()
    return count


def resident(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Held:
    """What this rank holds of ``model``."""
    seen: set[int] = set()
    groups: list[ShardGroup] = groups_of(model)
    parameters = list(model.parameters())
    replicas = [group.replica for group in groups if group.replica is not None]
    owned = [*parameters, *(group.shard for group in groups if group.family.stage)]
    kept = [gradient for group in groups for gradient in group.gradients.kept()]
    states = [] if optimizer is None else list(optimizer.state.values())
    state = [x for values in states for x in values.values() if isinstance(x, torch.Tensor)]
    weights, master = nbytes(replicas, seen), nbytes(owned, seen)
    if groups[0].layout.param_dtype is None:  # the model computes with what the optimizer updates
        weights, master = weights + master, 0
    gradients = nbytes([p.grad for p in parameters if p.grad is not None] + kept, seen)
    master += nbytes([values["master"] for values in states if "master" in values], seen)  # zerofx.AdamW's
    return Held(weights, gradients, master, nbytes(state, seen))


def build(
    stage: int, precision: zerofx.MixedPrecision | None, buckets: str = "group"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = GPT(LAYERS, DIM, 4, VOCAB, LENGTH)
    options: dict[str, Any] = dict(stage=stage, mixed_precision=precision, buckets=buckets)
    zerofx.compile(model, executor="eager", groups=blocks_and_the_rest, **options)
    return model, torch.optim.Adam(model.parameters())


def hold(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Held]:
    """What this rank holds at moments of training."""
    x = torch.randint(VOCAB, (2, LENGTH))
    moments: dict[str, Held] = {}

    def backward() -> None:
        model(x, x).backward()

    def note(moment: str) -> None:
        moments[moment] = resident(model, optimizer)

    backward()
    optimizer.step()  # makes the moments
    note("stepped")
    optimizer.zero_grad()
    for _ in range(2):
        backward()
    note("accumulated in .grad")
    optimizer.step()
    optimizer.zero_grad()
    with zerofx.no_sync(model):
        for _ in range(2):
            backward()
    note("accumulating under no_sync")
    backward()
    note("reduced what no_sync kept")
    optimizer.step()
    note("stepped after no_sync")
    return moments


def train(stage: int, precision: zerofx.MixedPrecision | None, counting: bool) -> tuple[dict[str, Held], Counted]:
    """What one model's training holds and sends: time goes into compiling it."""
    model, optimizer = build(stage, precision)
    held = hold(model, optimizer)
    return held, count(model, optimizer) if counting else ({}, {})


@pytest.fixture(scope="module")
def trained(make_workers: Callable[[int], Workers]) -> Callable[..., list[tuple[dict[str, Held], Counted]]]:
    """Each model trains once, for all tests that look at it."""

    @functools.cache
    def run(world: int, stage: int, precision: str) -> list[tuple[dict[str, Held], Counted]]:
        return make_workers(world).run(train, stage, PRECISIONS[precision], world < 4, timeout=120)

    return run


@quick_if(lambda world, precision, stage: (world, precision, stage) in QUICK)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("world", "precision"), WORLDS)
def test_live_storages_are_within_one_percent_of_the_formulas(trained, world: int, stage: int, precision: str) -> None:
    sizes = cost.Sizes.of(PRECISIONS[precision])
    for moments, _ in trained(world, stage, precision):
        for moment, held in moments.items():
            formulas = cost.memory(stage, sizes, accumulating=moment == "accumulating under no_sync")
            expected = formulas.at(N=PARAMETERS, M=world)
            for name in (*(field.name for field in fields(Held)), "total"):
                close = pytest.approx(int(getattr(expected, name)), rel=0.01)
                assert getattr(held, name) == close, f"{name} when {moment}: {held}"


def hold_in_bfloat16(stage: int) -> tuple[Held, Held]:
    """Of a model that is bfloat16 itself, its masters in zerofx.AdamW: after a backward, and while accumulating."""
    model = GPT(LAYERS, DIM, 4, VOCAB, LENGTH).bfloat16()
    zerofx.compile(model, stage=stage, executor="eager")
    optimizer = zerofx.AdamW(model.parameters())
    x = torch.randint(VOCAB, (2, LENGTH))
    for _ in range(2):
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(x, x).backward()
    after = resident(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with zerofx.no_sync(model):
        model(x, x).backward()
    return after, resident(model, optimizer)


@quick_if(lambda world, stage: world == 2 and stage > 1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_in_bfloat16_with_masters_in_the_optimizer_a_rank_holds_the_papers_table(
    make_workers: Callable[[int], Workers], world: int, stage: int
) -> None:
    paper = paper_table()[stage].at(N=PARAMETERS, M=world)
    for after, accumulating in make_workers(world).run(hold_in_bfloat16, stage, timeout=120):
        held = accumulating if stage == 1 else after  # stage 1 is for accumulating whole gradients
        weights = held.weights + held.master  # bfloat16 weights and float32 masters
        assert weights == pytest.approx(int(paper.weights + paper.master), rel=0.01)
        assert held.gradients == pytest.approx(int(paper.gradients), rel=0.01)
        assert held.moments == pytest.approx(int(paper.moments), rel=0.01)
        assert held.total == pytest.approx(int(paper.total), rel=0.01)


# (c) more ranks than there are processes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [8, 64])
def test_at_rest_up_to_64_ranks_hold_the_weights_of_the_formulas(
    fake_world: Callable[..., None], world: int, stage: int, precision: str
) -> None:
    # A group is padded so that each of M shards ends on a boundary of 128 bytes: up to 128 M bytes for a group of any
    # size. With 64 ranks that is 8 kB, so a group must have 1 MB or more for it to stay below 1 percent. (Padding to
    # whole rows comes with a bound of its own, 1/256.)
    options = dict(stage=stage, mixed_precision=PRECISIONS[precision], init_sync=False)
    for rank in (0, world - 1):  # the last one holds the padding
        fake_world(world, rank)
        model = zerofx.shard(GPT(layers=2, dim=320, heads=4, vocab=1000, length=64), **options)
        smallest = min(group.layout.nbytes for group in groups_of(model))
        assert smallest > 100 * 128 * world
        held, parameters = resident(model), sum(p.numel() for p in model.parameters())
        expected = cost.memory(stage, cost.Sizes.of(PRECISIONS[precision])).at(N=parameters, M=world)
        assert held.weights == pytest.approx(int(expected.weights), rel=0.01)
        assert held.master == pytest.approx(int(expected.master), rel=0.01)
        assert held.weights + held.master >= int(expected.weights + expected.master)
        assert held.gradients == held.moments == 0


# (d) the wire


def count(model: nn.Module, optimizer: torch.optim.Optimizer) -> Counted:
    """The groups, and which stay gathered; by (micro-batches, no_sync) what an optimizer step starts and sends."""
    optimizer.zero_grad()
    x = torch.randint(VOCAB, (2, LENGTH))

    def step(micro_batches: int, no_sync: bool) -> None:
        for _ in range(micro_batches - 1):
            if no_sync:
                with zerofx.no_sync(model):
                    model(x, x).backward()
            else:
                model(x, x).backward()
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(2, no_sync=True)  # compiles; and what zerofx.compile left up to date is so no more
    counted = {}
    for micro_batches in (1, 4):
        for no_sync in (False, True):
            with count_collectives() as log:
                step(micro_batches, no_sync)
            events = Counter((event.name, event.payload) for event in log.events)
            counted[micro_batches, no_sync] = events, log.total_bytes
    (record,) = zerofx.graphs(model)
    assert record.forward is not None
    kept = record.forward.context.handover.kept_gathered
    return {group.layout: group.layout.name in kept for group in groups_of(model)}, counted


def by_the_layouts(stage: int, sizes: cost.Sizes, layouts: dict[GroupLayout, bool], k: int, no_sync: bool) -> Events:
    """What must be started, to the byte."""
    reductions = 1 if no_sync else k
    events: Events = Counter()
    for layout, kept in layouts.items():
        gathers = (0, 1, 1, k if kept else 2 * k)[stage]
        # On gloo each rank sends to each other one what that one is to have.
        for way in ("send", "recv") if stage else ():
            others, part = layout.world_size - 1, layout.shard_numel
            events[f"all_gather_{way}", part * int(sizes.weight)] += gathers * others
            events[f"all_to_all_{way}", part * int(sizes.gradient)] += reductions * others
        if not stage:  # packed without padding: nothing has to divide by the number of ranks
            events["all_reduce", (layout.numel - layout.padding) * int(sizes.gradient)] += reductions
    return +events


@quick_if(lambda world, precision, stage: (world, precision, stage) in QUICK)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("world", "precision"), [(world, name) for world, name in WORLDS if world < 4])
def test_a_step_starts_the_collectives_and_sends_the_bytes_of_the_formulas(
    trained, world: int, stage: int, precision: str
) -> None:
    sizes = cost.Sizes.of(PRECISIONS[precision])
    for _, (layouts, counted) in trained(world, stage, precision):
        assert len(layouts) == LAYERS + 1
        assert list(counted) == [(1, False), (1, True), (4, False), (4, True)]
        for (k, no_sync), (events, sent) in counted.items():
            assert events == by_the_layouts(stage, sizes, layouts, k, no_sync), (k, no_sync)
            spared = [sum(slot.numel for slot in layout.slots) for layout, stays in layouts.items() if stays]
            assert bool(spared) == (stage == 3)  # in the room that one group ahead takes anyway
            traffic = cost.traffic(stage, sizes, no_sync=no_sync, kept=(sum(spared), len(spared)))
            formulas = traffic.at(N=PARAMETERS, M=world, n=len(layouts), k=k)
            messages = sum(n for (name, _), n in events.items() if name != "all_reduce")
            exchanges = messages // (2 * (world - 1)) if stage else 0
            assert events.total() - messages + exchanges == formulas.collectives
            assert sent == pytest.approx(float(formulas.total), rel=0.01)
            assert sent > formulas.total - events.total()  # padding adds; the counter rounds each collective down
            letters = dict(N=PARAMETERS, M=world, n=len(layouts), k=k, F=0, B=0, c=1)
            time = cost.time(stage, sizes, no_sync=no_sync, kept=(sum(spared), len(spared)))
            assert float(time.at(**letters, a=0, b=1000).wire) == pytest.approx(sent / 1000, rel=0.01)
            assert time.at(**letters, a=1, b=float("inf")).wire == formulas.collectives


def count_buckets(buckets: str) -> Counted:
    return count(*build(0, None, buckets))


@slow_if(lambda buckets: buckets == "group")
@pytest.mark.parametrize("buckets", ["group", "parameter", "all"])
def test_buckets_of_plain_data_parallelism_change_how_many_collectives_and_not_the_bytes(
    workers2: Workers, buckets: str
) -> None:
    for layouts, counted in workers2.run(count_buckets, buckets, timeout=120):
        n = {"group": len(layouts), "parameter": sum(len(layout.slots) for layout in layouts), "all": 1}[buckets]
        for (k, no_sync), (events, sent) in counted.items():
            formulas = cost.traffic(0, cost.Sizes.of(None), no_sync=no_sync).at(N=PARAMETERS, M=2, n=n, k=k)
            assert {name for name, _ in events} == {"all_reduce"}
            assert events.total() == formulas.collectives
            assert sent == formulas.total


def main() -> None:
    """Print bytes per parameter as a table: measured on rank 0, in parentheses the formula's."""
    processes = Processes()
    pools = {world: Workers(world, processes) for world in (2, 3, 4)}
    columns = {"": "stepped", "`no_sync`, ": "accumulating under no_sync"}
    heads = ["stage", "precision", *(f"{column}M={world}" for column in columns for world in pools)]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    try:
        for (precision, policy), stage in itertools.product(PRECISIONS.items(), STAGES):
            measured = {world: pool.run(train, stage, policy, False)[0][0] for world, pool in pools.items()}
            cells = [str(stage), precision]
            for moment, world in itertools.product(columns.values(), pools):
                accumulating = moment == columns["`no_sync`, "]
                formulas = cost.memory(stage, cost.Sizes.of(policy), accumulating=accumulating).at(N=1, M=world)
                cells.append(f"{measured[world][moment].total / PARAMETERS:.2f} ({float(formulas.total):.2f})")
            print(f"| {' | '.join(cells)} |", flush=True)
    finally:
        processes.stop()


if __name__ == "__main__":
    main()
