"""Parameters that `parallelize_module` made DTensors on a "tp" dimension train on "dp", as with FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import zerofx
from tests.pairwise import EXECUTORS, STAGES
from tests.slow import quick_if, slow
from tests.tensor_parallel.models import (
    HIDDEN,
    STEPS,
    VOCAB,
    WIDTH,
    Leaf,
    adamw,
    batch,
    build,
    check_whole,
    compiled,
    mesh_2d,
    skip_old,
    train,
    weights_of,
    whole,
)
from tests.test_foreign_dimensions import Copy, Sum

pytestmark = skip_old


def train_beside(kind: str, stage: int, executor: str) -> None:
    mesh = mesh_2d()
    ours = compiled(kind, mesh, stage, executor)
    theirs = fully_shard(build(kind, mesh["tp"]), mesh=mesh["dp"])
    alone = build(kind)
    found = train(ours, adamw(ours), mesh["dp"])
    assert found == pytest.approx(train(theirs, adamw(theirs), mesh["dp"]), rel=1e-5)
    assert found == pytest.approx(train(alone, adamw(alone)), rel=1e-5)
    ours_whole = zerofx.full_state_dict(ours, rank0_only=False)
    for name, p in alone.named_parameters():
        assert ours_whole[name].shape == p.shape
        torch.testing.assert_close(ours_whole[name], p.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours_whole[name], whole(theirs.get_parameter(name)), rtol=1e-5, atol=1e-5)
    assert len(zerofx.graphs(ours)) == 1


@quick_if(lambda kind, stage, executor: (kind, stage, executor) == ("mlp", 2, "eager"))
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_tensor_parallel_layers_train_as_with_fsdp2_and_in_one_process(
    make_workers: Any, kind: str, stage: int, executor: str
) -> None:
    make_workers(4).run(train_beside, kind, stage, executor, timeout=300)


def train_in_other_ways(kind: str, stage: int) -> None:
    mesh = mesh_2d()
    options: dict[str, Any] = {"leaf_modules": [Leaf]} if kind == "leaf" else {}
    ours, alone = compiled(kind, mesh, stage, **options), build(kind)
    wanted = train(alone, adamw(alone))
    assert train(ours, adamw(ours), mesh["dp"]) == pytest.approx(wanted, rel=1e-5)
    check_whole(ours, weights_of(alone))


@quick_if(lambda kind, stage: (kind, stage) in [("broken", 3), ("uneven", 0)])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["broken", "leaf", "uneven"])
@pytest.mark.filterwarnings("ignore:.*outside of a compiled graph")
def test_graph_breaks_leaf_modules_and_uneven_parts_train_as_well(make_workers: Any, kind: str, stage: int) -> None:
    make_workers(4).run(train_in_other_ways, kind, stage)


def lose_in_parallel(stage: int, executor: str = "eager") -> None:
    mesh = mesh_2d()
    ours, alone = compiled("logits", mesh, stage, executor), build("logits")
    optimizers = adamw(ours), adamw(alone)
    for step in range(STEPS):
        tokens = batch(step)[mesh["dp"].get_local_rank()]
        with loss_parallel():
            logits = ours(tokens)
            assert isinstance(logits, DTensor) and logits.placements == (Shard(2),)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
        everyone = batch(step).flatten(0, 1)
        wanted = F.cross_entropy(alone(everyone).flatten(0, 1), everyone.flatten())
        wanted.backward()
        found = whole(loss)
        dist.all_reduce(found, group=mesh["dp"].get_group())
        assert found.item() / 2 == pytest.approx(wanted.item(), rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_whole(ours, weights_of(alone))


@pytest.mark.parametrize("stage", [3, slow(0)])
def test_a_loss_outside_of_the_model_is_computed_in_parallel(make_workers: Any, stage: int) -> None:
    make_workers(4).run(lose_in_parallel, stage)


def lose_with_logits_of_an_older_mesh(executor: str) -> None:
    older = DTensor.from_local(torch.zeros(12, VOCAB // 2), mesh_2d()["tp"], [Shard(1)], run_check=False)
    torch.ops.aten._unsafe_view(older, [2, 6, VOCAB])  # DTensor caches what the result is like, and its mesh is part
    lose_in_parallel(3, executor)


@pytest.mark.parametrize("executor", ["eager", slow("inductor")])
def test_logits_can_be_of_an_older_mesh_that_is_equal(make_workers: Any, executor: str) -> None:
    make_workers(4).run(lose_with_logits_of_an_older_mesh, executor)


def train_with_options(cases: list[dict[str, Any]]) -> None:
    mesh = mesh_2d()
    alone = build("transformer")
    wanted = train(alone, adamw(alone))
    for options in cases:
        given = options | ({"partition_activations": mesh["tp"]} if "partition_activations" in options else {})
        ours = compiled("transformer", mesh, **given)
        near = 2e-2 if "mixed_precision" in options else 1e-5
        assert train(ours, adamw(ours), mesh["dp"]) == pytest.approx(wanted, rel=near), options


LOW = zerofx.MixedPrecision(torch.bfloat16, torch.float32)
OPTIONS: list[dict[str, Any]] = [
    {"mixed_precision": LOW, "stage": 0},
    {"lookups": True},
    {"memory_budget": float("inf")},
    {"activation_budget": 0},
    {"activation_budget": 0, "stage": 1},
    {"partition_activations": "tp"},
]


@pytest.mark.parametrize("cases", [[{"mixed_precision": LOW}], slow(OPTIONS)])
def test_options_go_with_dtensors(make_workers: Any, cases: list[dict[str, Any]]) -> None:
    make_workers(4).run(train_with_options, cases)


def accumulate(stages: list[int]) -> None:
    """Two micro-batches a step, as one batch of both; with no_sync, and stepping inside of backward."""
    mesh = mesh_2d()
    alone = build("transformer")
    reference, wanted = adamw(alone), []
    for step in range(0, 4, 2):
        loss = (alone(batch(step).flatten(0, 1)) + alone(batch(step + 1).flatten(0, 1))) / 2
        loss.backward()
        wanted.append(loss.item())
        reference.step()
        reference.zero_grad()
    for stage in stages:
        ours = compiled("transformer", mesh, stage)
        optimizer, found = adamw(ours), []
        for step in range(0, 4, 2):
            first, second = (batch(step + i)[mesh["dp"].get_local_rank()] for i in (0, 1))
            with zerofx.no_sync(ours):
                one = ours(first) / 2
                one.backward()
            if stage == 3:
                with zerofx.step_in_backward(optimizer):
                    two = ours(second) / 2
                    two.backward()
            else:
                two = ours(second) / 2
                two.backward()
                optimizer.step()
            optimizer.zero_grad()
            total = whole(one + two)
            dist.all_reduce(total, group=mesh["dp"].get_group())
            found.append(total.item() / 2)
        assert found == pytest.approx(wanted, rel=1e-5), stage


@pytest.mark.parametrize("stages", [[3], slow([0, 1, 2])])
def test_gradients_that_are_kept_back_and_steps_inside_of_backward_are_right(
    make_workers: Any, stages: list[int]
) -> None:
    make_workers(4).run(accumulate, stages)


def train_beside_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    ours = build("transformer", mesh["tp"])
    zerofx.compile(ours, executor="eager", mesh=mesh["replicate", "shard"])
    alone = build("transformer")
    wanted = train(alone, adamw(alone))
    assert train(ours, adamw(ours), mesh["replicate"]) == pytest.approx(wanted, rel=1e-5)
    check_whole(ours, weights_of(alone))


@pytest.mark.slow
def test_parts_train_on_two_other_dimensions(make_workers: Any) -> None:
    make_workers(4).run(train_beside_replicas)


# ---- experts --------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Every expert sees every token, weighted. As DTensors experts are divided over "ep" and results are summed."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 4)

    def forward(self, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ self.up) @ self.down * share).sum(0)


class LocalExperts(Experts):
    """The same by hand: of a DTensor parameter a rank takes its part."""

    group, rank = "", 0

    def forward(self, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        if not self.group:
            return super().forward(x, share)
        up, down = self.up.to_local(), self.down.to_local()  # type: ignore[operator]
        x, share = Copy.apply(x, self.group), Copy.apply(share, self.group)
        mine = share[self.rank * len(up) :][: len(up)]
        return Sum.apply((torch.relu(x @ up) @ down * mine).sum(0), self.group)


class Mixture(nn.Module):
    def __init__(self, experts: type[Experts]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = experts()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        share = self.router(x).softmax(-1).t().unsqueeze(-1)
        return F.cross_entropy(self.head(x + self.experts(x, share)), tokens.flatten())


def experts_of(kind: type[Experts], ep: Any) -> Mixture:
    torch.manual_seed(0)
    model = Mixture(kind)
    if ep is None:
        return model

    def divide(name: str, module: nn.Module, mesh: Any) -> None:
        for name, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))

    def spread(module: nn.Module, inputs: Any, mesh: Any) -> Any:
        x, share = inputs
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return x, DTensor.from_local(share, mesh, [Replicate()], run_check=False)

    def join(module: nn.Module, output: Any, mesh: Any) -> Any:
        return output.redistribute(mesh, [Replicate()]).to_local()

    if kind is LocalExperts:
        model.experts.group, model.experts.rank = ep.get_group().group_name, ep.get_local_rank()
        divide("", model.experts, ep)
    else:
        distribute_module(model.experts, ep, divide, spread, join)
    return model


def train_experts(stage: int, executor: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    alone = experts_of(Experts, None)
    wanted = train(alone, adamw(alone))
    for kind in (Experts, LocalExperts):
        model = experts_of(kind, mesh["ep"])
        zerofx.compile(model, stage=stage, executor=executor, mesh=mesh["dp"], groups=zerofx.Grouping(min_bytes=0))
        assert train(model, adamw(model), mesh["dp"]) == pytest.approx(wanted, rel=1e-5), kind
        check_whole(model, weights_of(alone))


@quick_if(lambda stage, executor: (stage, executor) == (3, "eager"))
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("stage", STAGES)
def test_experts_divided_over_a_dimension_train_as_in_one_process(make_workers: Any, stage: int, executor: str) -> None:
    make_workers(4).run(train_experts, stage, executor, timeout=300)
