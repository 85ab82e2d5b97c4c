"""Codes between the rows of a mesh: what crosses is in codes, what stays in a row is exact, and replicas are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from tests.slow import quick_if
from tests.test_wire import EACH_LAYER, Net, batch, equal, rounded
from tests.test_wire_bytes import Wide, second_step
from tests.test_wire_feedback import Slope, slope

BETWEEN = zerofx.Sharding(gradients="all", optimizer="all")
NEAR = zerofx.Sharding(weights="all", gradients="all", optimizer="all")
ALL = zerofx.Sharding("all", "all", "all", "all")
SCHEMES = {"HSDP": None, "ZeRO-1 between": BETWEEN, "hpZ": NEAR, "one dimension": ALL}
NOTHING_KEPT: dict[str, Any] = {"executor": "eager", "groups": EACH_LAYER, "memory_budget": 150_000}


def codes(sharding: Any, **options: Any) -> zerofx.Wire:
    """int8 of all that crosses; in the first scheme no weights do."""
    weights = None if sharding is None else "int8"
    return zerofx.Wire(weights, "int8", stochastic=False, between="nodes", **options)


def compiled(module: Any, shape: tuple[int, int], sharding: Any, wire: Any, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return zerofx.compile(module, mesh=mesh, sharding=sharding, wire=wire, **{**NOTHING_KEPT, **options})


# ---- the numbers ----------------------------------------------------------------------------------------------------


def by_hand(scheme: str, rank: int, shape: tuple[int, int], stage: int) -> list[torch.Tensor]:
    """The gradients as ``rank`` adds them up, in 64 bits where nothing is written in codes."""
    rows, columns = shape
    mine: list[list[torch.Tensor]] = []  # what each rank, or row, sends
    for other in range(rows * columns):
        model = Net()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p if scheme == "HSDP" else rounded(p))
        model(batch(0, other)).backward()
        mine.append([p.grad.double() for p in model.parameters()])  # type: ignore[union-attr]
    own = rank
    if scheme in ("HSDP", "ZeRO-1 between") or (columns > 1 and stage == 3):  # else one exchange over all
        mine = [[sum(x) for x in zip(*mine[r * columns : (r + 1) * columns])] for r in range(rows)]  # type: ignore[misc]
        own = rank // columns if scheme != "HSDP" else -1
    sent = [[g if i == own else rounded(g) for g in each] for i, each in enumerate(mine)]
    return [sum(x) / (rows * columns) for x in zip(*sent)]  # type: ignore[misc]


def one_step(scheme: str, shape: tuple[int, int], options: dict[str, Any]) -> float:
    """The largest share of elements of a gradient that are not those by hand."""
    rank = dist.get_rank()
    model = compiled(Net(), shape, SCHEMES[scheme], codes(SCHEMES[scheme]), **options)
    model(batch(0, rank)).backward()
    off, found = [0.0], by_hand(scheme, rank, shape, options.get("stage", 3))
    for p, gradient in zip(model.parameters(), found, strict=True):
        piece = p._group.layout.piece(p._slot, p._group.rank)
        mine = gradient.flatten().narrow(0, piece.in_parameter, piece.length)
        if piece.length:
            away = (p.grad.to_local() - mine).abs() > 1e-5 * gradient.abs().max()
            off.append(float(away.float().mean()))
    return max(off)


CASES = [
    ("HSDP", {"stage": 3}),
    ("HSDP", {"stage": 2}),
    ("ZeRO-1 between", {}),
    ("hpZ", {}),
    ("one dimension", {}),
    ("one dimension", {"stage": 1}),
]


def several(cases: list[Any], shape: tuple[int, int]) -> list[float]:
    return [one_step(scheme, shape, options) for scheme, options in cases]


@quick_if(lambda shape: shape == (2, 1))
@pytest.mark.parametrize(("shape", "cases"), [((2, 2), CASES), ((2, 1), CASES[::2])])
def test_a_step_is_that_of_rounded_numbers_where_they_cross_and_of_exact_ones_where_not(
    make_workers: Any, shape: tuple[int, int], cases: list[Any]
) -> None:
    for off in make_workers(shape[0] * shape[1]).run(several, cases, shape, timeout=300):
        assert max(off) < 1e-3, off  # a number between two codes may fall to either, in 32 bits


@pytest.mark.slow
def test_generated_code_computes_the_same(make_workers: Any) -> None:
    cases = [(scheme, {"executor": "inductor", **options}) for scheme, options in CASES]
    for off in make_workers(4).run(several, cases, (2, 2), timeout=500):
        assert max(off) < 1e-3, off


def train(sharding: Any, wire: zerofx.Wire, **options: Any) -> list[torch.Tensor]:
    """The whole weights, as this rank's row has them, after two steps with accumulation and clipping."""
    model = compiled(Net(), (2, 2), sharding, wire, **options)
    optimizer = zerofx.AdamW(model.parameters(), lr=0.05, max_grad_norm=1.0)
    found = []
    for step in range(2):
        with zerofx.no_sync(model):
            model(batch(step, dist.get_rank())).backward()
        model(batch(step, 10 + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [p.full_tensor() for p in model.parameters()]
    model(batch(9, dist.get_rank()))  # it refreshes what a row has
    return found + [p._group.weights.buffer.clone() for p in model.parameters() if sharding is BETWEEN]


def ranks_agree() -> None:
    fed = {"error_feedback": True}
    runs: list[tuple[Any, zerofx.Wire, dict[str, Any]]] = [
        (None, zerofx.Wire(None, "int4", between="nodes", **fed), {"stage": 2}),
        (BETWEEN, zerofx.Wire("fp8", "int4", between="nodes", **fed), {}),
        (BETWEEN, zerofx.Wire("int8", "int8", between="nodes"), {"leaf_modules": ["deep"]}),
        (ALL, zerofx.Wire("fp8", "int4", between="nodes", **fed), {"leaf_modules": ["deep"]}),
        (NEAR, zerofx.Wire("int8", "int8", between="nodes"), {}),
    ]
    for sharding, wire, options in runs:
        found = train(sharding, wire, **options)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        for rank, theirs in enumerate(everyone):
            n = len(found) if rank % 2 == dist.get_rank() % 2 else 2 * 10  # copies are of columns
            assert equal(theirs[:n], found[:n]), (sharding, wire, rank)


@pytest.mark.slow
def test_all_ranks_have_the_same_bits_after_every_step(make_workers: Any) -> None:
    make_workers(4).run(ranks_agree, timeout=300)


# ---- error feedback, checkpoints ------------------------------------------------------------------------------------


def added_up(sharding: Any, feedback: bool, backwards: int) -> list[tuple[float, float, float]]:
    """Of the sum of so many gradients: how far weight and bias are off, and what part of the group is kept."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wire = zerofx.Wire(None, "int4", error_feedback=feedback, stochastic=False, between="nodes")
    model = compiled(Slope(), (2, 2), sharding, wire, groups=None)
    exact = sum(slope(r).double() for r in range(ranks)) / ranks
    nbytes, found = next(model.parameters())._group.layout.nbytes, []
    for n in range(1, backwards + 1):
        model(slope(rank)).backward()
        off = [(p.grad.full_tensor() - n * x).abs().max() for p, x in zip(model.parameters(), (exact, exact[0]))]
        found.append((*map(float, off), zerofx.memory_summary(model).nbytes["cut off"] / nbytes))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [None, BETWEEN], ids=["HSDP", "ZeRO-1 between"])
def test_what_is_cut_off_between_rows_is_in_the_next(make_workers: Any, sharding: Any) -> None:
    without, with_it = (make_workers(4).run(added_up, sharding, fed, 8)[0] for fed in (False, True))
    assert without[0][:2] == with_it[0][:2]
    assert without[7][0] > 6 * with_it[7][0] > 0
    for _, of_bias, kept in with_it:
        assert of_bias < 1e-5
        assert kept == (1 / 2 if sharding is None else 1 / 4)  # a rank sends its half of a group, or half of that


def goes_on(folder: str, sharding: Any) -> bool:
    wire = zerofx.Wire(None, "int4", error_feedback=True, between="nodes")

    def run(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            model(batch(step, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()

    def fresh() -> tuple[Any, Any]:
        model = compiled(Net(), (2, 2), sharding, wire)
        return model, zerofx.AdamW(model.parameters(), lr=0.05)

    model, optimizer = fresh()
    run(model, optimizer, range(2))
    zerofx.save(folder, model, optimizer)
    run(model, optimizer, range(2, 4))
    again, its_optimizer = fresh()
    zerofx.load(folder, again, its_optimizer)
    run(again, its_optimizer, range(2, 4))
    return equal([p.full_tensor() for p in model.parameters()], [p.full_tensor() for p in again.parameters()])


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_the_same_bits(make_workers: Any, tmp_path: Path) -> None:
    for i, sharding in enumerate((None, BETWEEN)):
        assert all(make_workers(4).run(goes_on, str(tmp_path / str(i)), sharding))


# ---- bytes ----------------------------------------------------------------------------------------------------------


def bytes_received(sharding: Any, wire: Any) -> tuple[dict[str, int], int, int, int]:
    """Of a step, counted by process group; and as predicted: all, and between rows. And a layer's elements, padded."""
    model = compiled(Wide(), (2, 2), sharding, wire, memory_budget=300_000)
    log = second_step(model)
    sharing = next(model.parameters())._group.sharing
    names = {sharing.weights.name: "weights"}
    if sharing.replicas is not None:
        names[sharing.replicas.name] = "column"
    if sharing.secondary is not None:
        names[sharing.secondary.name] = "secondary"
    found: dict[str, int] = {}
    for event in log.events:
        found[names[event.group]] = found.get(names[event.group], 0) + event.bytes
    predicted = zerofx.predict(model)
    return found, predicted.wire_bytes, predicted.replica_bytes, next(model.parameters())._group.layout.numel


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_sends_the_bytes_of_codes_between_rows_and_whole_numbers_in_them(make_workers: Any, scheme: str) -> None:
    sharding = SCHEMES[scheme]
    plain, coded = (make_workers(4).run(bytes_received, sharding, wire)[0] for wire in (None, codes(sharding)))
    for found, total, between, _ in (plain, coded):
        assert sum(found.values()) == total, (found, total)
        assert between == found["column"]
    assert 0.25 < coded[0]["column"] / plain[0]["column"] < 0.28  # each row has room for a whole bias
    for group in coded[0].keys() - {"column"}:  # whole numbers; of a layout that may be longer, in whole blocks
        assert coded[0][group] * plain[3] == plain[0][group] * coded[3]


def test_a_dry_run_has_the_bytes_and_the_nodes_of_codes_between_replicas() -> None:
    options: dict[str, Any] = {"stage": 3, "groups": EACH_LAYER, "backend": "gloo", "executor": "eager"}
    wire = zerofx.Wire(None, "int8", between="nodes")
    records = [zerofx.dry_run(Wide(), torch.ones(2, 256), world_size=(2, 2), wire=w, **options) for w in (wire, None)]
    coded, plain = (zerofx.predict(record) for record in records)
    assert coded.wire_bytes - coded.replica_bytes == plain.wire_bytes - plain.replica_bytes
    assert 0.25 < coded.replica_bytes / plain.replica_bytes < 0.27
    said = str(records[0])
    for line in ("quantize layers.1", "sum      layers.1", "summed   layers.1", "dequant  layers.1"):
        assert line in said, said


# ---- what is refused ------------------------------------------------------------------------------------------------


def refusals() -> list[str]:
    wire, line = codes(BETWEEN), init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for options in (
        {"wire": wire},
        {"wire": wire, "mesh": line},
        {"wire": wire, "mesh": square},
        {"wire": zerofx.Wire("int8", "int8"), "mesh": square},
    ):
        with pytest.raises(ValueError) as error:
            zerofx.compile(Net(), **options)
        found.append(str(error.value))
    return found


def test_codes_that_nothing_could_travel_in_are_refused(make_workers: Any) -> None:
    wanted = ["on one dimension", "on one dimension", "none travel between nodes", "twice, inside of a node"]
    for found in make_workers(4).run(refusals):
        assert all(words in message for words, message in zip(wanted, found, strict=True)), found
    with pytest.raises(ValueError, match=r"Wire\(between='rows'\): expected 'all' or 'nodes'"):
        zerofx.Wire("int8", between="rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on one dimension"):
        zerofx.dry_run(Wide(), torch.ones(2, 256), world_size=4, wire=codes(BETWEEN))
