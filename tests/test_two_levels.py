"""A mesh of two dimensions: each replica of the module is divided over a row; gradients are averaged over all ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerofx
from tests.counting import count_collectives
from tests.models import GPT, MLP
from tests.slow import quick_if
from zerofx.runtime.ranks import watch
from zerofx.runtime.ranks.agree import OutOfStepError
from zerofx.runtime.state.group import groups_of

STEPS, VOCAB, LENGTH = 3, 50, 8
GROUPS = zerofx.Grouping(min_bytes=0)


def mesh_of(rows: int, columns: int) -> Any:
    return init_device_mesh("cpu", (rows, columns), mesh_dim_names=("replicate", "shard"))


def build() -> GPT:
    torch.manual_seed(dist.get_rank())  # rank 0's weights are taken
    return GPT(2, 32, 2, VOCAB, LENGTH)


def train(shape: tuple[int, int] | None, how: str = "plain", optimizer: str = "torch", **options: Any) -> list[float]:
    """Losses, norms and a sum over all weights."""
    mesh = None if shape is None else mesh_of(*shape)
    options = {"groups": GROUPS, "executor": "eager", **options}
    model = zerofx.compile(build(), mesh=mesh, **options)
    kind = zerofx.AdamW if optimizer == "zerofx" else torch.optim.AdamW
    steps, history = kind(model.parameters(), lr=1e-2), []
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        data = torch.randint(VOCAB, (2, world, 2, LENGTH), generator=torch.Generator().manual_seed(step))[:, rank]
        if how == "no_sync":
            with zerofx.no_sync(model):
                model(data[0], data[0]).backward()
            loss = model(data[1], data[1])
            loss.backward()
        elif how == "step_in_backward":
            with zerofx.step_in_backward(steps):
                loss = model(data[0], data[0])
                loss.backward()
        else:
            loss = model(data[0], data[0])
            loss.backward()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        history.append(total.item() / world)
        if how != "step_in_backward":
            history.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            steps.step()
        steps.zero_grad()
    if options.get("sharding") == NEAR:
        left = zerofx.graphs(model)[0].forward.context.handover.kept_gathered.values()
        assert any(kept.ranks > 1 for kept in left), "backward gathers over a row"
    whole = zerofx.full_state_dict(model, rank0_only=False)
    return [*history, float(sum(value.double().abs().sum() for value in whole.values()))]


CASES = [
    ("plain", {}),
    ("plain", {"stage": 0}),
    ("plain", {"stage": 1}),
    ("no_sync", {}),
    ("no_sync", {"stage": 2}),
    ("step_in_backward", {}),
    ("step_in_backward", {"stage": 2}),
    ("plain", {"leaf_modules": ["blocks.1"]}),
    ("no_sync", {"leaf_modules": ["blocks.1"], "stage": 1}),
    ("plain", {"lookups": True}),
    ("plain", {"one_copy": True}),
    ("plain", {"memory_budget": float("inf")}),
]


BETWEEN = zerofx.Sharding(gradients="all", optimizer="all")
NEAR = zerofx.Sharding(weights="all", gradients="all", optimizer="all")
ALL = zerofx.Sharding(weights="all", backward="all", gradients="all", optimizer="all")


def compare(shape: tuple[int, int], cases: list[Any], optimizer: str, sharding: Any = None) -> None:
    for how, options in cases:
        wanted = train(None, how, optimizer, **{**options, "one_copy": False})
        found = train(shape, how, optimizer, sharding=sharding, **options)
        assert found == pytest.approx(wanted, rel=1e-5), (how, options)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1)])
def test_training_is_as_on_one_dimension(make_workers: Any, shape: tuple[int, int]) -> None:
    cases = [CASES[i] for i in (0, 4, 8)]
    make_workers(shape[0] * shape[1]).run(compare, shape, cases, "zerofx", timeout=300)


@pytest.mark.slow
def test_training_is_as_on_one_dimension_in_every_way(make_workers: Any) -> None:
    make_workers(4).run(compare, (2, 2), CASES, "zerofx", timeout=300)


DIVIDED = [case for case in CASES if case[1].get("stage", 3) == 3 and "one_copy" not in case[1]]


SMALL = {"memory_budget": 60_000}  # nothing stays gathered
NEARBY = [("plain", SMALL), ("no_sync", SMALL), ("step_in_backward", SMALL), ("plain", {**SMALL, "lookups": True})]


@pytest.mark.slow
def test_backward_that_gathers_from_near_ranks_trains_as_one_dimension(make_workers: Any) -> None:
    make_workers(4).run(compare, (2, 2), NEARBY[1:3], "zerofx", NEAR, timeout=300)


def test_weights_that_cross_the_rows_in_two_hops_train_as_on_one_dimension(make_workers: Any) -> None:
    leaf = ("no_sync", {"leaf_modules": ["blocks.1"], **SMALL})
    make_workers(4).run(compare, (2, 2), [("step_in_backward", SMALL), leaf], "zerofx", ALL, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (2, 1)])
def test_replicas_that_share_the_optimizers_work_train_as_one_dimension(make_workers: Any, shape: Any) -> None:
    make_workers(shape[0] * shape[1]).run(compare, shape, DIVIDED[1:3], "zerofx", BETWEEN, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "sharding"), [(NEARBY, NEAR), (DIVIDED, BETWEEN), (DIVIDED, ALL)])
def test_divided_over_both_dimensions_training_is_as_on_one_in_every_way(
    make_workers: Any, cases: Any, sharding: Any
) -> None:
    make_workers(4).run(compare, (2, 2), cases, "zerofx", sharding, timeout=300)


def losses_of_generated_code(sharding: Any, mesh: Any, **options: Any) -> list[float]:
    torch.manual_seed(dist.get_rank())
    model = zerofx.compile(
        MLP(),
        mesh=mesh,
        sharding=sharding,
        memory_budget=8000,
        groups=zerofx.Grouping(blocks=(torch.nn.Linear,), min_bytes=0),
        **options,
    )
    optimizer, history = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, 13, generator=generator), torch.randn(4, 7, generator=generator))
        loss.backward()
        history += [loss.item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return history


def compare_inductor() -> None:
    """The graphs are the same with both executors; numbers of one dimension are the eager executor's."""
    mesh = mesh_of(2, 2)
    wanted = losses_of_generated_code(None, None, executor="eager")
    for sharding in (None, BETWEEN, NEAR, ALL):
        assert losses_of_generated_code(sharding, mesh, executor="inductor") == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(4500)
def test_generated_code_trains_as_on_one_dimension(make_workers: Any) -> None:
    make_workers(4).run(compare_inductor, timeout=1400)


MIXED = {"mixed_precision": zerofx.MixedPrecision(torch.bfloat16, torch.float32)}


def mixed_precision(shape: tuple[int, int]) -> None:
    for sharding, options in ((None, {"stage": 2}), (None, {}), (BETWEEN, {}), (NEAR, {"memory_budget": 30_000})):
        wanted = train(None, "no_sync", "zerofx", **MIXED, **options)
        found = train(shape, "no_sync", "zerofx", sharding=sharding, **MIXED, **options)
        assert found == pytest.approx(wanted, rel=2e-3), (sharding, options)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 2), (2, 3)])
def test_mixed_precision_on_six_ranks_is_as_on_one_dimension(make_workers: Any, shape: tuple[int, int]) -> None:
    make_workers(6).run(mixed_precision, shape, timeout=900)


# ---- what travels ---------------------------------------------------------------------------------------------------


def bytes_by_dimension(stage: int, sharding: Any) -> None:
    """A step's collectives by process group are the formulas, and what is predicted."""
    mesh, row = mesh_of(2, 2), 2
    budget = 60_000 if sharding in (NEAR, ALL) else None
    options = {"groups": GROUPS, "executor": "eager", "stage": stage, "sharding": sharding, "memory_budget": budget}
    model = zerofx.compile(build(), mesh=mesh, **options)
    names = mesh.get_group(1).group_name, mesh.get_group(0).group_name
    layouts = [group.layout for group in groups_of(model)]
    x = torch.zeros(2, LENGTH, dtype=torch.long)
    model(x, x).backward()
    for p in model.parameters():  # stages 1 and 2 refresh what was written
        with torch.no_grad():
            p.mul_(1.0)
        p.grad = None
    with count_collectives() as log:
        model(x, x).backward()
    wire = {name: sum(e.bytes for e in log.events if e.group == name and "send" not in e.name) for name in names}
    whole = sum(layout.nbytes for layout in layouts)
    backward = zerofx.graphs(model)[0].backward.context
    again = sum(layout.nbytes for layout in backward.found.shards) if stage == 3 else 0
    near = sum(
        backward.handover.kept_gathered[name].nbytes * row for name in backward.found.gathered if sharding == NEAR
    )
    assert wire[names[0]] == (whole + again + near + whole) * (row - 1) // row
    crossed = again if sharding == ALL else 0
    assert wire[names[1]] == 2 * (whole // row) // 2 + crossed // row // 2
    assert {e.group for e in log.events} == set(names)
    predicted = zerofx.predict(model)
    assert predicted.wire_bytes == sum(wire.values())
    assert predicted.replica_bytes == wire[names[1]]
    text = str(zerofx.graphs(model)[0])
    assert f"{len(layouts)} sums over replicas:" in text
    assert "goes to the 2 replicas' ranks" in zerofx.graphs(model)[0].explain("sum_replicas")
    assert "of replica" in str(zerofx.memory_summary(model))


@quick_if(lambda sharding: sharding == ALL)
@pytest.mark.parametrize(("stage", "sharding"), [(2, None), (3, None), (3, BETWEEN), (3, NEAR), (3, ALL)])
def test_bytes_of_each_dimension_are_the_formulas_and_the_prediction(
    make_workers: Any, stage: int, sharding: Any
) -> None:
    make_workers(4).run(bytes_by_dimension, stage, sharding)


@pytest.mark.slow
def test_a_dry_run_of_a_mesh_has_its_replicas() -> None:
    x = torch.zeros(2, LENGTH, dtype=torch.long)
    torch.manual_seed(0)
    model = GPT(2, 32, 2, VOCAB, LENGTH)
    one = zerofx.predict(zerofx.dry_run(model, x, x, world_size=4, executor="eager", groups=GROUPS))
    record = zerofx.dry_run(model, x, x, world_size=(3, 4), executor="eager", groups=GROUPS)
    two = zerofx.predict(record)
    shards = sum(reduction.layout.nbytes // 4 for reduction in record.backward.context.found.reductions)
    assert two.replica_bytes == sum(
        2 * (reduction.layout.nbytes // 4) * 2 // 3 for reduction in record.backward.context.found.reductions
    )
    assert two.wire_bytes - two.replica_bytes == one.wire_bytes and shards
    rates = zerofx.Rates(1e9, 1e9, 1e9, replica_bytes_per_s=1e6)
    slow, same = zerofx.predict(record, rates), zerofx.predict(record, zerofx.Rates(1e9, 1e9, 1e9))
    assert slow.time_s > same.time_s
    nothing = zerofx.dry_run(model, x, x, world_size=(3, 4), stage=0, executor="eager")
    assert nothing.backward.context.found.reductions[0].layout.world_size == 12


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def prepared(shape: tuple[int, int] | None, sharding: Any = None) -> tuple[Any, Any]:
    mesh = None if shape is None else mesh_of(*shape)
    model = zerofx.compile(build(), mesh=mesh, sharding=sharding, groups=GROUPS, executor="eager")
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: Any, optimizer: Any, seed: int) -> None:
    x = torch.randint(VOCAB, (12, LENGTH), generator=torch.Generator().manual_seed(seed))
    x = x.chunk(dist.get_world_size())[dist.get_rank()]
    model(x, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def save_on(shape: tuple[int, int] | None, path: str, sharding: Any = None) -> list[torch.Tensor]:
    """Saved after two steps; the weights after a third."""
    model, optimizer = prepared(shape, sharding)
    for seed in (0, 1):
        step(model, optimizer, seed)
    zerofx.save(path, model, optimizer)
    step(model, optimizer, 2)
    return list(zerofx.full_state_dict(model, rank0_only=False).values())


def load_on(shape: tuple[int, int] | None, path: str, sharding: Any = None) -> list[torch.Tensor]:
    model, optimizer = prepared(shape, sharding)
    zerofx.load(path, model, optimizer)
    step(model, optimizer, 2)
    return list(zerofx.full_state_dict(model, rank0_only=False).values())


@pytest.mark.slow
def test_a_checkpoint_goes_on_on_any_mesh_and_replicas_write_once_in_shares(make_workers: Any, tmp_path: Path) -> None:
    four, two = make_workers(4), make_workers(2)
    [wanted, *others] = four.run(save_on, (2, 2), str(tmp_path / "mesh"))
    four.run(save_on, None, str(tmp_path / "line"))
    sizes = {name: [p.stat().st_size for p in (tmp_path / name).glob("*.distcp")] for name in ("mesh", "line")}
    assert sum(sizes["mesh"]) == pytest.approx(sum(sizes["line"]), rel=0.1)
    assert len(sizes["mesh"]) == 4 and min(sizes["mesh"]) > max(sizes["mesh"]) / 4
    found, mesh, line, between = others, *(str(tmp_path / name) for name in ("mesh", "line", "between"))
    found += four.run(load_on, None, mesh) + four.run(load_on, (2, 2), line) + four.run(load_on, (2, 2), mesh, BETWEEN)
    found += four.run(save_on, (2, 2), between, BETWEEN) + two.run(load_on, None, between)
    found += two.run(load_on, (2, 1), mesh)
    for weights in found:
        for got, expected in zip(weights, wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


# ---- ranks in step --------------------------------------------------------------------------------------------------


def one_stays_away() -> str:
    watch.TICK, watch.SILENT = 0.25, 2.0
    mesh = mesh_of(2, 2)
    model = zerofx.compile(build(), mesh=mesh, groups=GROUPS, executor="eager", timeout=4)
    x = torch.zeros(2, LENGTH, dtype=torch.long)
    model(x, x).backward()
    if dist.get_rank() == 3:
        time.sleep(15)
    try:
        model(x, x).backward()
        model(x, x).backward()
    except OutOfStepError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_rank_that_stays_away_is_an_error_in_every_replica(make_workers: Any) -> None:
    messages = make_workers(4).run(one_stays_away, timeout=100)
    assert all("waited" in message for message in messages[:3]), messages


def one_replica_does_not_step() -> str:
    watch.TICK, watch.SILENT = 0.25, 2.0
    model, optimizer = prepared((2, 2))
    x = torch.zeros(2, LENGTH, dtype=torch.long)
    try:
        for i in range(8):
            model(x, x).backward()
            if i or dist.get_rank() < 2:
                optimizer.step()
            time.sleep(0.6)
    except OutOfStepError as error:
        return str(error)
    return ""


def test_a_replica_that_does_not_step_is_an_error(make_workers: Any) -> None:
    messages = make_workers(4).run(one_replica_does_not_step, timeout=100)
    assert all("stepped its optimizer" in message for message in messages), messages


# ---- writes, and what is refused ------------------------------------------------------------------------------------


def write_and_refuse() -> None:
    for sharding in (None, BETWEEN):
        model, _ = prepared((2, 2), sharding)
        with zerofx.unsharded(model):
            for p in model.parameters():
                with torch.no_grad():
                    p.fill_(float(dist.get_rank()) + 1)
        for whole in (zerofx.full_state_dict(model, rank0_only=False), zerofx.full_state_dict(model)):
            assert {tuple(value.unique().tolist()) for value in whole.values()} <= {(1.0,)}
        assert bool(whole) == (dist.get_rank() == 0)
    scrambled = DeviceMesh("cpu", [[1, 0], [3, 2]])
    with pytest.raises(ValueError, match="ascending order in each row and each column"):
        zerofx.compile(build(), mesh=scrambled)
    deep = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "replicate", "shard"))
    with pytest.raises(ValueError, match="mesh has 3 dimensions: expected one, or two"):
        zerofx.compile(build(), mesh=deep)
    inner = deep["replicate", "shard"]
    assert train_once(inner) == pytest.approx(train_once(mesh_of(2, 2)), rel=1e-6)
    everything = zerofx.Sharding("all", "all", "all", "all")
    for stage in (2, 3):
        found = train_once(mesh_of(2, 2), sharding=everything, stage=stage)
        assert found == pytest.approx(train_once(None, stage=stage), rel=1e-6)
    others = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    second = others[dist.get_rank() // 2]
    assert train_once(mesh_of(2, 2), reduce_group=second) == pytest.approx(train_once(None), rel=1e-5)


def train_once(mesh: Any, **options: Any) -> float:
    model = zerofx.compile(build(), mesh=mesh, groups=GROUPS, executor="eager", **options)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    return float(sum(value.double().abs().sum() for value in zerofx.full_state_dict(model, rank0_only=False).values()))


@pytest.mark.slow
def test_rank_0_writes_for_all_replicas_and_odd_meshes_are_refused(make_workers: Any) -> None:
    make_workers(4).run(write_and_refuse)


def test_a_plan_of_a_mesh_has_its_replicas() -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)
    one, two = zerofx.plan(model, world_size=4, memory=1e9), zerofx.plan(model, world_size=(3, 4), memory=1e9)
    for a, b in zip(one.stages[1:], two.stages[1:4], strict=True):
        assert b.memory == a.memory and float(b.traffic.gathered) == float(a.traffic.gathered)
        assert float(b.traffic.between) == pytest.approx(2 * 2 / 3 * 4e6 / 4)
        assert int(b.traffic.collectives) == int(a.traffic.collectives) + 1
    assert float(two.stages[0].traffic.total) == pytest.approx(2 * 11 / 12 * 4e6)
    assert "3 replicas of 4 ranks" in str(two) and "between rows" in str(two)


def test_a_listing_shows_sums_over_replicas() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    options: dict[str, Any] = {"groups": zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0), "executor": "eager"}
    found = str(zerofx.dry_run(model, torch.ones(2, 64), world_size=(2, 2), stage=3, **options))
    lines = [" ".join(line.split()) for line in found.splitlines()]
    assert "3 sums over replicas:" in found and "sum 2 8.3 kB" in lines and "summed 2" in lines, found
