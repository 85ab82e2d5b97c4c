"""`copy.deepcopy` of a sharded module is a sharded module by itself: teachers, target networks, averages of weights."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofx
from tests import models
from tests.counting import count_collectives
from tests.slow import quick_if, slow, slow_if
from tests.tensor_parallel.models import MLP as ParallelMLP
from tests.tensor_parallel.models import skip_old
from tests.workers import Workers
from zerofx import MixedPrecision, ShardedParameter
from zerofx.runtime.state.group import groups_of

EACH_GROUP = zerofx.Grouping(min_bytes=0)
BF16 = MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def full(p: Any) -> torch.Tensor:
    whole: torch.Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
    return whole


def same(module: nn.Module, plain: nn.Module, **tolerance: Any) -> None:
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in module.named_parameters()] == names
    for name, p in plain.named_parameters():
        found = full(module.get_parameter(name))
        torch.testing.assert_close(found, p.detach(), **(tolerance or CLOSE), msg=lambda m, n=name: f"{n}: {m}")


def twins(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    options = {"executor": "eager", "groups": EACH_GROUP, **options}
    return zerofx.compile(models.build(name), **options), models.build(name)


def step(model: nn.Module, name: str, optimizer: torch.optim.Optimizer, seed: int, *, sharded: bool) -> None:
    """One step on a batch of which each rank has a part; a plain model is given all parts."""
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = [models.make_batch(name, 2, seed=seed * world + r) for r in range(world)]
    losses = [models.loss_of(model, part) for part in ([parts[rank]] if sharded else parts)]
    torch.stack(losses).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "ema": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "mean": AveragedModel,
    "own": lambda model: AveragedModel(model, avg_fn=lambda mean, new, n: 0.5 * mean + 0.5 * new),
    "buffers": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True),
}


def check_average(stage: int, how: str, options: dict[str, Any]) -> None:
    model, plain = twins("tied", stage=stage, **options)
    tolerance = {"rtol": 0.1, "atol": 0.02} if "mixed_precision" in options else CLOSE
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    step(model, "tied", optimizers[0], 0, sharded=True)
    step(plain, "tied", optimizers[1], 0, sharded=False)
    with count_collectives() as log:
        teacher = AVERAGES[how](model)
    assert not log.calls and teacher.module is not model
    reference = AVERAGES[how](plain)
    for seed in range(1, 4):
        step(model, "tied", optimizers[0], seed, sharded=True)
        step(plain, "tied", optimizers[1], seed, sharded=False)
        with count_collectives() as log:
            teacher.update_parameters(model)
        assert not log.calls  # slice by slice
        reference.update_parameters(plain)
        batch = models.make_batch("tied", 3, seed=seed)
        with torch.no_grad():
            found = teacher(batch["x"], batch["y"]) if "x" in batch else models.loss_of(teacher, batch)
            wanted = reference(batch["x"], batch["y"]) if "x" in batch else models.loss_of(reference, batch)
        torch.testing.assert_close(found, wanted, **tolerance)
    same(teacher, reference, **tolerance)
    same(model, plain, **tolerance)
    assert len(zerofx.graphs(teacher)) == len(zerofx.graphs(model)) >= 1
    assert not set(map(id, groups_of(teacher))) & set(map(id, groups_of(model)))


@quick_if(lambda stage, how: (how == "ema") == (stage in (0, 3)))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["ema", "mean"])
def test_an_average_of_a_student_is_that_of_one_process(
    workers2: Workers, workers3: Workers, how: str, stage: int
) -> None:
    (workers2 if how == "mean" else workers3).run(check_average, stage, how, {})


@pytest.mark.parametrize("how", ["own", slow("buffers")])
def test_an_average_by_a_function_of_ones_own(workers2: Workers, how: str) -> None:
    workers2.run(check_average, 3, how, {})


@pytest.mark.parametrize("stage", [0, slow(2), 3])
def test_with_mixed_precision_masters_are_averaged(workers2: Workers, stage: int) -> None:
    workers2.run(check_average, stage, "ema", {"mixed_precision": BF16})


def test_an_average_under_inductor(workers2: Workers) -> None:
    workers2.run(check_average, 3, "ema", {"executor": "inductor"}, timeout=300)


def check_own_ways(stage: int, shard_alone: bool) -> None:
    """The copy trains by itself, and the original stays as it is; and the other way round."""
    if shard_alone:
        model, plain = zerofx.shard(models.build("mlp"), stage=stage, groups=EACH_GROUP), models.build("mlp")
    else:
        model, plain = twins("mlp", stage=stage)
    first = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for seed in range(2):
        step(model, "mlp", first[0], seed, sharded=True)
        step(plain, "mlp", first[1], seed, sharded=False)
    model.get_parameter("second.bias").requires_grad_(False)
    plain.get_parameter("second.bias").requires_grad_(False)
    copies = [copy.deepcopy(m) for m in (model, plain)]
    before, kept = copy.deepcopy(plain), zerofx.full_state_dict(model, rank0_only=False)
    assert all(p.grad is None for p in copies[0].parameters())
    assert not copies[0].get_parameter("second.bias").requires_grad
    second = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in copies]
    for seed in range(2, 5):
        step(copies[0], "mlp", second[0], seed, sharded=True)
        step(copies[1], "mlp", second[1], seed, sharded=False)
    same(copies[0], copies[1])
    same(model, before)
    for name, value in zerofx.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, kept[name]), name  # bit for bit
    step(model, "mlp", first[0], 5, sharded=True)  # moments and all
    step(plain, "mlp", first[1], 5, sharded=False)
    same(model, plain)
    same(copies[0], copies[1])
    copies[0].load_state_dict(model.state_dict())  # a target network that is set anew
    same(copies[0], plain)
    third = copy.deepcopy(copies[0])  # a copy of a copy
    del copies[0], second
    gc.collect()
    batch = models.make_batch("mlp", 3)
    torch.testing.assert_close(models.loss_of(third, batch), models.loss_of(plain, batch), **CLOSE)
    with zerofx.no_sync(third):
        models.loss_of(third, batch).backward()
    models.loss_of(third, batch).backward()
    models.loss_of(plain, batch).backward()
    for name, p in plain.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(full(third.get_parameter(name).grad), 2 * p.grad, **CLOSE)


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, 3])
def test_copy_and_original_train_by_themselves(workers2: Workers, workers3: Workers, stage: int) -> None:
    (workers2 if stage % 2 else workers3).run(check_own_ways, stage, False)


@pytest.mark.parametrize("stage", [0, slow(2), 3])
def test_a_module_that_is_not_compiled_is_copied_too(workers2: Workers, stage: int) -> None:
    workers2.run(check_own_ways, stage, True)


def check_by_backend() -> None:
    batch, plain = models.make_batch("mlp", 3), models.build("mlp")
    how = {"backend": "zerofx", "options": {"executor": "eager", "groups": EACH_GROUP}}
    wrapped = torch.compile(models.build("mlp"), **how)  # type: ignore[call-overload]
    model = models.build("mlp")
    model.compile(**how)
    for m in (wrapped, model):
        before = models.loss_of(m, batch)  # sharded as its first graph arrives
        twin = copy.deepcopy(m)
        assert not set(map(id, groups_of(twin))) & set(map(id, groups_of(m))) and groups_of(twin)
        if m is model:
            twin.compile(**how)
        torch.testing.assert_close(models.loss_of(twin, batch), before)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        step(twin, "mlp", optimizer, 1, sharded=True)
        assert len(zerofx.graphs(twin)) >= 1
        torch.testing.assert_close(models.loss_of(m, batch), models.loss_of(plain, batch))


def test_modules_of_the_backend_are_copied_and_compiled_in_the_same_way(workers2: Workers) -> None:
    workers2.run(check_by_backend)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10))
        self.actor, self.critic = nn.Linear(10, 3), nn.Linear(10, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.encoder(x)
        return self.actor(hidden), self.critic(hidden)


class Agent(nn.Module):
    """A plain module that holds a sharded one, parts of it, and a target network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.encoder = net.encoder


def check_parts(stage: int) -> None:
    torch.manual_seed(0)
    plain = ActorCritic()
    model = zerofx.compile(copy.deepcopy(plain), stage=stage, executor="eager", groups=EACH_GROUP)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    encoder = copy.deepcopy(model.encoder)  # a part: compiled by itself
    torch.testing.assert_close(encoder(x), plain.encoder(x))
    assert len(zerofx.graphs(encoder)) == 1 and list(dict(encoder.named_parameters())) == ["0.weight", "0.bias"] + [
        "2.weight",
        "2.bias",
    ]
    held = copy.deepcopy(model.critic)
    gc.collect()
    assert len(groups_of(held)) == 1
    agent = copy.deepcopy(Agent(model))
    assert agent.encoder is agent.net.encoder and agent.net is not model
    with torch.no_grad():
        for found, wanted in zip(agent.net(x), plain(x)):
            torch.testing.assert_close(found, wanted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(part.square().mean() for part in model(x)).backward()
    optimizer.step()
    both, steps = copy.deepcopy((model, optimizer))  # moments with their parameters
    mine = list(both.parameters())
    assert all(any(p is q for q in mine) for p in steps.state) and len(steps.state) == len(mine)
    for original, its in ((model, optimizer), (both, steps)):
        its.zero_grad()
        sum(part.square().mean() for part in original(x)).backward()
        its.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(full(both.get_parameter(name)), full(p))
    if stage:
        moment = steps.state[mine[0]]["exp_avg"]
        assert moment._group is mine[0]._group is not optimizer.state[next(model.parameters())]["exp_avg"]._group
    shallow = copy.copy(model)
    shallow.label = "mine"  # type: ignore[assignment]
    assert copy.deepcopy(shallow).label == "mine"
    with pytest.raises(AssertionError):  # of a module whose copying fails nothing is left
        copy.deepcopy(Uncopied(model))
    sum(part.square().mean() for part in copy.deepcopy(model)(x)).backward()


class Uncopied(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def __getstate__(self) -> Any:
        raise AssertionError("of the user's own")


@pytest.mark.parametrize("stage", [0, slow(2), 3])
def test_parts_holders_and_optimizers_are_copied(workers2: Workers, stage: int) -> None:
    workers2.run(check_parts, stage)


def check_parametrized(stage: int) -> None:
    torch.manual_seed(0)
    plain = ActorCritic()
    nn.utils.parametrizations.weight_norm(plain.critic)
    model = zerofx.compile(copy.deepcopy(plain), stage=stage, executor="eager", groups=EACH_GROUP)
    both = copy.deepcopy(model)
    x = torch.randn(5, 6)
    for found in (model, both):
        for got, wanted in zip(found(x), plain(x), strict=True):
            torch.testing.assert_close(got, wanted)
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    sum(part.square().mean() for part in both(x)).backward()
    optimizer.step()
    same(model, plain)
    assert not torch.equal(full(both.get_parameter("actor.weight")), plain.actor.weight)


def test_a_parametrized_module_that_is_not_sharded_is_copied() -> None:
    plain = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    made = copy.deepcopy(nn.Sequential(plain, plain))
    assert made[0] is made[1] is not plain
    torch.testing.assert_close(made.eval()(torch.ones(2, 4)), nn.Sequential(plain, plain).eval()(torch.ones(2, 4)))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parametrized_module_is_copied(workers2: Workers, stage: int) -> None:
    workers2.run(check_parametrized, stage)


KINDS: dict[str, dict[str, Any]] = {
    "leaf": {"leaf_modules": ["second"]},
    "leaves, kept": {"leaf_modules": [nn.Linear], "memory_budget": float("inf"), "stage": 1},
    "all gathered": {"memory_budget": float("inf"), "fullgraph": True},
    "int4": {"wire": zerofx.Wire(weights="int4", gradients="int8"), "stage": 2},
    "int8": {"wire": zerofx.Wire(weights="int8")},
    "by turns": {"uneven": True},
}


def check_kind(kind: str) -> None:
    batch = models.make_batch("mlp", 2)
    model, _ = twins("mlp", **KINDS[kind])
    step(model, "mlp", zerofx.AdamW(model.parameters(), lr=0.01), 0, sharded=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(models.loss_of(twin, batch), models.loss_of(model, batch))
    for m in (model, twin):
        optimizer = zerofx.AdamW(m.parameters(), lr=0.01)
        for seed in range(2):
            step(m, "mlp", optimizer, seed, sharded=True)
    for name, p in model.named_parameters():
        torch.testing.assert_close(full(twin.get_parameter(name)), full(p))
    assert [type(m).forward for m in twin.modules()] != [type(m).forward for m in models.build("mlp").modules()] or (
        "leaf_modules" not in KINDS[kind]
    )


@slow_if(lambda kind: kind in ("leaf", "int8"))  # as "leaves, kept" and "int4"
@pytest.mark.parametrize("kind", KINDS)
def test_options_hold_for_copies(workers2: Workers, kind: str) -> None:
    workers2.run(check_kind, kind)


def check_saved(folder: str) -> None:
    model, _ = twins("mlp")
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin)]
    step(twin, "mlp", optimizers[1], 3, sharded=True)
    zerofx.save(f"{folder}/model", model, optimizers[0])
    zerofx.save(f"{folder}/twin", twin, optimizers[1])
    kept = [zerofx.full_state_dict(m, rank0_only=False) for m in (model, twin)]
    zerofx.load(f"{folder}/twin", model, optimizers[0])
    zerofx.load(f"{folder}/model", twin)
    for m, wanted in zip((twin, model), kept, strict=True):
        for name, value in zerofx.full_state_dict(m, rank0_only=False).items():
            assert torch.equal(value, wanted[name]), name
    step(model, "mlp", optimizers[0], 4, sharded=True)


def test_copy_and_original_are_saved_and_loaded(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_saved, str(tmp_path))


def check_hugging_face(folder: str) -> None:
    model = zerofx.compile(models.build("llama"), executor="eager")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    for name, m in (("model", model), ("twin", twin)):
        m.save_pretrained(f"{folder}/{name}")  # type: ignore[operator]
    found = [type(models.build("llama")).from_pretrained(f"{folder}/{name}") for name in ("model", "twin")]  # type: ignore
    for p, q in zip(*(m.parameters() for m in found)):
        assert torch.equal(2 * p, q)
    tokens = torch.ones(1, 3 + dist.get_rank(), dtype=torch.long)
    assert twin.generate(tokens, max_new_tokens=2, do_sample=False).shape[1] == tokens.shape[1] + 2  # type: ignore


@pytest.mark.slow
def test_a_copy_of_a_model_of_transformers_saves_and_generates_its_own(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_hugging_face, str(tmp_path))


def check_mesh(optimizer: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharding = zerofx.Sharding(gradients="all", optimizer="all") if optimizer == "all" else None
    model, plain = twins("mlp", mesh=mesh, sharding=sharding)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    step(model, "mlp", steps[0], 0, sharded=True)  # the row's copy is behind
    step(plain, "mlp", steps[1], 0, sharded=False)
    twin, other = copy.deepcopy(model), copy.deepcopy(plain)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, other)]
    for seed in (1, 2):
        step(twin, "mlp", steps[0], seed, sharded=True)
        step(other, "mlp", steps[1], seed, sharded=False)
    same(twin, other)
    same(model, plain)


@pytest.mark.parametrize("optimizer", ["shard", slow("all")])
def test_copies_on_a_mesh(make_workers: Callable[[int], Workers], optimizer: str) -> None:
    make_workers(4).run(check_mesh, optimizer)


def check_tensor_parallel(stage: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = parallelize_module(ParallelMLP(), mesh["tp"], dict(ParallelMLP.plan))
    model = zerofx.compile(net, mesh=mesh["dp"], stage=stage, groups=EACH_GROUP, executor="eager")
    twin = copy.deepcopy(model)
    tokens = torch.randint(8, (3, 5), generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        m(tokens).backward()
        optimizer.step()
    whole = [zerofx.full_state_dict(m, rank0_only=False) for m in (model, twin)]
    assert [sorted(state) for state in whole] == [sorted(ParallelMLP().state_dict())] * 2
    for name, value in whole[0].items():
        torch.testing.assert_close(whole[1][name], value)


@skip_old
@pytest.mark.parametrize("stage", [slow(0), 3])
def test_copies_of_tensor_parallel_modules(make_workers: Callable[[int], Workers], stage: int) -> None:
    make_workers(4).run(check_tensor_parallel, stage)


def check_refused(folder: str) -> None:
    way_out = r"inside of `with zerofx.unsharded\(module, writeback=False\):`, where it is an ordinary module"
    for options, said in (({"offload": folder}, "offload="), ({"one_copy": True}, "one_copy=True")):
        model, _ = twins("mlp", **options)
        with pytest.raises(RuntimeError, match=f"copy.deepcopy of a MLP that was sharded with {said}.*{way_out}"):
            copy.deepcopy(model)
        with zerofx.unsharded(model, writeback=False):
            ordinary = copy.deepcopy(model)
        assert {type(p) for p in ordinary.parameters()} == {nn.Parameter}
        step(zerofx.compile(ordinary, executor="eager"), "mlp", torch.optim.SGD(ordinary.parameters()), 0, sharded=True)
    for stage in (0, 3):
        model, _ = twins("mlp", stage=stage)
        with zerofx.unsharded(model.second, writeback=False):
            with pytest.raises(RuntimeError, match=r"of which 'second.weight' is whole for now, and other weights are"):
                copy.deepcopy(model)
            ordinary = copy.deepcopy(model.second)
        assert {type(p) for p in ordinary.parameters()} == {nn.Parameter}
        with zerofx.unsharded(model, writeback=False):
            thawed = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert {type(p) for p in thawed.parameters()} == {nn.Parameter} and "__deepcopy__" not in vars(thawed)
    with pytest.raises(RuntimeError, match=r"copy the module that holds it, or `parameter.full_tensor"):
        copy.deepcopy(model.get_parameter("first.weight"))


def test_what_cannot_be_copied_is_refused_and_named(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_refused, str(tmp_path))


def check_memory(stage: int) -> None:
    """A copy takes what the original has at rest, and gives it back."""
    model = zerofx.shard(models.build("gpt"), stage=stage)
    most: list[int] = []
    storages = lambda m: {s.data_ptr(): s.nbytes() for g in groups_of(m) for s in held(g)}  # noqa: E731
    twin = copy.deepcopy(model)
    mine, its = storages(model), storages(twin)
    assert sum(mine.values()) == sum(its.values()) and not set(mine) & set(its)
    for p, q in itertools.zip_longest(model.parameters(), twin.parameters()):
        assert isinstance(q, ShardedParameter) and q.untyped_storage().nbytes() == 0 and type(p) is not type(q)
    ends = weakref.ref(groups_of(twin)[0])
    del twin, p, q, most
    assert ends() is None  # at once: there is no cycle


def held(group: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in (group.weights.shard, group.weights.own_replica) if x is not None]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_copy_holds_slices_and_ends_with_its_last_reference(workers2: Workers, stage: int) -> None:
    workers2.run(check_memory, stage)
