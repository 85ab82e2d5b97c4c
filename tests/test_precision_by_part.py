"""Parts of one module in dtypes of their own: as in one process that casts by hand, and as under FSDP2."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

import zerofx
from tests.counting import count_collectives
from tests.slow import quick_if, slow
from tests.workers import Workers
from zerofx import MixedPrecision
from zerofx.integrations.fsdp import fully_shard
from zerofx.model.grouping import Grouping, plan_groups
from zerofx.model.policies import Policies
from zerofx.runtime.state.group import groups_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH, CLASSES = 32, 10
LOW = MixedPrecision(BF16, FP32)
BY_PART: dict[Any, MixedPrecision | None] = {
    "": LOW,
    "blocks.1": MixedPrecision(FP16, FP32),
    nn.LayerNorm: None,
    "*.router": MixedPrecision(FP32, output_dtype=FP32),
    "head": MixedPrecision(output_dtype=FP32),
}


class Block(nn.Module):
    """A normalisation, and a router that weighs two layers. ``seen``: in which dtypes it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: torch.Tensor, seen: list[torch.dtype]) -> torch.Tensor:
        h = self.norm(x)
        weights = self.router(h).softmax(-1)
        y = torch.tanh(self.one(h)) * weights[:, :1].to(h.dtype) + self.other(h) * weights[:, 1:].to(h.dtype)
        seen += [x.dtype, h.dtype, weights.dtype, self.one.weight.dtype, self.norm.weight.dtype]
        return x + y


class Outside(Block):
    """Its own code is in no graph."""

    forward = torch.compiler.disable(Block.forward)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.dtype]]:
        h, seen = self.embedding(x), []
        for block in self.blocks:
            h = block(h, seen)
        logits = self.head(h)
        return logits, [*seen, h.dtype, logits.dtype]


SEEN = [BF16, BF16, FP32, BF16, FP32] + [FP16, FP16, FP32, FP16, FP32] + [BF16, FP32]
"""Of `BY_PART`: block by block its input, what its normalisation returns, the router's result, two weights."""


def by_hand(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The logits of plain weights with `BY_PART`'s casts."""

    def linear(layer: nn.Linear, h: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return F.linear(h.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))

    h = F.embedding(x, net.embedding.weight.to(BF16))
    for block, dtype in zip(net.blocks, (BF16, FP16), strict=True):
        x = h.to(dtype)
        n = F.layer_norm(x.float(), (WIDTH,), block.norm.weight, block.norm.bias).to(dtype)
        weights = linear(block.router, n, FP32).softmax(-1)
        y = torch.tanh(linear(block.one, n, dtype)) * weights[:, :1].to(dtype)
        y = y + linear(block.other, n, dtype) * weights[:, 1:].to(dtype)
        h = (x + y).to(BF16)
    return linear(net.head, h, FP32)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(CLASSES, (2, 8), generator=generator).unbind()


Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def loss_of(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x)[0], y)


def loss_by_hand(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(by_hand(net, x), y)


def in_one_process(net: nn.Module, world: int, steps: int = 3, loss: Loss = loss_by_hand) -> nn.Module:
    """``net``, trained on the batches of all ranks."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for step in range(steps):
        for rank in range(world):
            loss(net, *batch(rank, step)).backward()
        for p in net.parameters():
            p.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    return net


def on_this_rank(net: nn.Module, steps: int = 3) -> nn.Module:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for step in range(steps):
        loss_of(net, *batch(dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def built() -> Net:
    torch.manual_seed(0)
    return Net()


def whole(p: Any) -> torch.Tensor:
    found: torch.Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
    return found


def check_same(net: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for name, p in plain.named_parameters():
        found = whole(net.get_parameter(name))
        torch.testing.assert_close(found, p.detach(), **tolerance, msg=lambda m, n=name: f"{n}: {m}")
        for other in zerofx_gathered(found):
            assert torch.equal(other, found), name


def zerofx_gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """``x`` of every rank."""
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x.contiguous())
    return everyone


EXACT = {"rtol": 1e-5, "atol": 1e-6}
ROUNDED = {"rtol": 5e-2, "atol": 5e-3}
"""Inductor computes in float32 between operations that it fuses."""


def check_training(stage: int, executor: str, options: dict[str, Any]) -> None:
    if mesh := options.pop("mesh", None):
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    options = {"groups": Grouping(min_bytes=0), "mixed_precision": BY_PART, **options}
    net = zerofx.compile(built(), stage=stage, executor=executor, **options)
    assert net(batch(0, 0)[0])[1] == SEEN
    on_this_rank(net)
    assert {p.dtype for p in net.parameters()} == {FP32}
    check_same(net, in_one_process(built(), dist.get_world_size()), **(EXACT if executor == "eager" else ROUNDED))


@quick_if(lambda world, stage, executor: (executor, world, stage) in {("eager", 3, 2), ("inductor", 2, 3)})
@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parts_train_as_if_cast_by_hand(
    workers2: Workers, workers3: Workers, stage: int, world: int, executor: str
) -> None:
    {2: workers2, 3: workers3}[world].run(check_training, stage, executor, {}, timeout=300)


OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "leaf of stage 3": (3, {"leaf_modules": [Block]}),
    "leaf of stage 2": (2, {"leaf_modules": ["blocks.1"]}),
    "leaf of stage 0": (0, {"leaf_modules": [Block]}),
    "lookups": (3, {"lookups": True}),
    "one_copy": (3, {"one_copy": True}),
    "all in one bucket": (0, {"buckets": "all"}),
    "one for each parameter": (0, {"buckets": "parameter"}),
    "kept gathered": (3, {"memory_budget": float("inf")}),
    "small groups merged": (3, {"groups": None}),
    "a budget for activations": (3, {"activation_budget": 0.5}),
}


@quick_if(lambda how: how in ("leaf of stage 3", "lookups", "one_copy", "small groups merged"))
@pytest.mark.parametrize("how", OPTIONS)
def test_so_they_do_with_other_options(workers2: Workers, how: str) -> None:
    stage, options = OPTIONS[how]
    workers2.run(check_training, stage, "eager", options, timeout=200)


@pytest.mark.parametrize("stage", [slow(2), 3])
def test_so_they_do_on_a_mesh(make_workers: Callable[[int], Workers], stage: int) -> None:
    make_workers(4).run(check_training, stage, "eager", {"mesh": (2, 2)}, timeout=200)


def check_features(stage: int) -> None:
    """Code outside of graphs, micro-batches, whole weights, copies."""
    net = built()
    net.blocks[1].__class__ = Outside
    zerofx.compile(net, stage=stage, executor="eager", mixed_precision=BY_PART)
    on_this_rank(net)
    plain = in_one_process(built(), dist.get_world_size())
    check_same(net, plain, **EXACT)

    with zerofx.unsharded(net, writeback=False):
        assert net(batch(0, 0)[0])[1] == [FP32] * len(SEEN)
    x, _ = batch(dist.get_rank(), 7)
    twin = copy.deepcopy(net)
    with zerofx.unsharded(net):
        found = twin(x)[1]  # its casts are its own
        assert found[:8] + found[9:] == SEEN[:8] + SEEN[9:]  # outside of graphs a weight says what it is
    assert torch.equal(twin(x)[0], net(x)[0])

    for step in range(2):
        with zerofx.no_sync(net) if step == 0 else contextlib.nullcontext():
            loss_of(net, *batch(dist.get_rank(), step)).backward()
    for step in range(2):
        for rank in range(dist.get_world_size()):
            loss_by_hand(plain, *batch(rank, step)).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad / dist.get_world_size(), **EXACT)


@pytest.mark.filterwarnings("ignore:.*needs the whole of")
@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_so_they_do_outside_of_graphs_in_micro_batches_and_in_copies(workers2: Workers, stage: int) -> None:
    workers2.run(check_features, stage, timeout=200)


def bytes_of_a_step(stage: int) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """What a forward and a backward send, and elements of each group."""
    options = {"stage": stage, "executor": "eager", "groups": Grouping(min_bytes=0)}
    net = zerofx.compile(built(), mixed_precision=BY_PART, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = batch(0, 0)
    loss_of(net, x, y).backward()
    optimizer.step()
    with count_collectives() as log:
        loss_of(net, x, y).backward()
    layouts = [group.layout for group in groups_of(net)]
    assert all(len({dtypes_of(slot.name) for slot in layout.slots}) == 1 for layout in layouts)
    held = {"all_gather_recv": 0, "gradients": 0}
    for layout in layouts:
        param, reduced = dtypes_of(layout.slots[0].name)
        held["all_gather_recv"] += layout.numel * param.itemsize // 2
        held["gradients"] += layout.numel * reduced.itemsize // 2
    return {name: n for name, n in log.bytes.items() if n}, held  # type: ignore[return-value]


def dtypes_of(name: str) -> tuple[torch.dtype, torch.dtype]:
    """What a weight of that name is gathered in, and its gradient reduced in."""
    if "norm" in name or "router" in name or "head" in name:
        return FP32, FP32
    return (FP16 if name.startswith("blocks.1") else BF16), FP32


def test_each_group_is_of_one_policy_and_travels_by_it(workers2: Workers) -> None:
    sent, counted = workers2.run(bytes_of_a_step, 2, timeout=100)[0]
    assert sent.pop("all_gather_recv") == counted["all_gather_recv"]
    assert list(sent.values()) == [counted["gradients"]]


class Sandwich(nn.Module):
    """Two linear layers with a normalisation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def sandwich() -> Sandwich:
    torch.manual_seed(0)
    return Sandwich()


FSDP2_LOW = MixedPrecisionPolicy(BF16, FP32)
FSDP2_FULL = MixedPrecisionPolicy(FP32, FP32, output_dtype=BF16)


def marked(call: Callable[..., Any], **options: Any) -> Sandwich:
    net = sandwich()
    call(net.norm, mp_policy=FSDP2_FULL)
    call(net, mp_policy=FSDP2_LOW, **options)
    return net


def check_beside_fsdp2(executor: str) -> None:
    eager = {"executor": executor}
    ours = sandwich()
    zerofx.compile(ours, mixed_precision={"": LOW, nn.LayerNorm: MixedPrecision(FP32)}, **eager)
    nets = [marked(fsdp2), marked(fully_shard, zerofx=eager), ours]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for net in nets:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    wanted = {name: whole(p) for name, p in nets[0].named_parameters()}
    tolerance = EXACT if executor == "eager" else ROUNDED
    for net in nets[1:]:
        for name, p in net.named_parameters():
            torch.testing.assert_close(whole(p), wanted[name], **tolerance)


@quick_if(lambda world, executor: world == 2 and executor == "eager")
@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_policy_per_module_is_fsdp2_s(make_workers: Callable[[int], Workers], world: int, executor: str) -> None:
    make_workers(world).run(check_beside_fsdp2, executor, timeout=200)


def check_meshes_of_marks() -> None:
    net = sandwich()
    fully_shard(net.norm, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(net)
    with pytest.raises(ValueError, match=r"fully_shard: mesh=DeviceMesh.* for 'norm' and None for the whole Zero"):
        list(net.parameters())


def test_marks_of_two_meshes_are_refused(workers2: Workers) -> None:
    workers2.run(check_meshes_of_marks)


def casts_of(net: nn.Module, given: Any) -> dict[str, tuple[torch.dtype | None, torch.dtype | None]]:
    """Of each part, what its inputs and outputs are cast to."""
    policies = Policies(net, given)
    return {name: policy.casts(*policies._computed(name)) for name, policy in policies.parts.items()}


def test_a_part_begins_where_another_rule_does_and_casts_its_outputs_back() -> None:
    found = casts_of(Net(), BY_PART)
    assert found == {
        "": (BF16, None),
        "blocks.0.norm": (FP32, BF16),
        "blocks.0.router": (FP32, FP32),
        "blocks.1": (FP16, BF16),
        "blocks.1.norm": (FP32, FP16),
        "blocks.1.router": (FP32, FP32),
        "head": (FP32, FP32),
    }


def test_the_last_rule_given_wins_and_what_one_rule_is_about_twice_is_one_part() -> None:
    first, last = {"blocks.*": LOW, "blocks.1*": None}, {"blocks.1*": None, "blocks.*": LOW}
    assert list(casts_of(Net(), first)) == ["", "blocks.0", "blocks.1"]
    assert casts_of(Net(), last) == {"": (None, None), "blocks.0": (BF16, FP32), "blocks.1": (BF16, FP32)}


def test_a_list_of_modules_casts_nothing_and_each_of_them_does() -> None:
    net = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.ParameterList([torch.ones(2)])]), nn.Linear(2, 2))
    found = casts_of(net, {"": LOW, "0": None})
    assert found == {"": (BF16, None), "0": (FP32, BF16), "0.0": (FP32, BF16), "0.1": (FP32, BF16)}
    assert Policies(net, {"": LOW, "0": None}).of("0.1.0") == MixedPrecision()


def test_a_part_of_no_parameters_computes_in_those_of_the_part_around_it() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2, elementwise_affine=False))
    assert casts_of(net, {"": LOW, nn.LayerNorm: None})["1"] == (FP32, BF16)
    assert casts_of(net.double(), {"": LOW, nn.LayerNorm: None})["1"] == (torch.float64, BF16)


def test_containers_in_which_nothing_is_cast_stay_the_same_objects() -> None:
    cache, net = {"ids": torch.ones(2, dtype=torch.int64)}, nn.Identity()
    Policies(net, LOW).install()
    assert net(cache) is cache and net([torch.ones(2)])[0].dtype == BF16


@pytest.mark.parametrize("given", [BF16, {}, {1: LOW}, {"head": BF16}, [LOW]])
def test_what_is_no_policy_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=rf"mixed_precision={re.escape(repr(given))}: expected None, or a zerofx"):
        zerofx.plan(nn.Linear(2, 2), world_size=2, mixed_precision=given)
    with pytest.raises(ValueError, match="or one for each part, by module classes and patterns of names"):
        zerofx.shard(nn.Linear(2, 2), mixed_precision=given)


def test_a_rule_about_no_module_is_refused(fake_world: Callable[[int], None]) -> None:
    fake_world(2)
    with pytest.raises(ValueError, match="mixed_precision: 'heads' matches no module of this Net"):
        zerofx.shard(Net(), mixed_precision={"heads": None})


def test_one_parameter_of_two_policies_is_refused_by_both_names(fake_world: Callable[[int], None]) -> None:
    fake_world(2)
    net = Net()
    net.head.weight = net.embedding.weight
    message = r"'embedding\.weight' and 'head\.weight' are one parameter, with two policies, Mixed.*Give both modules"
    with pytest.raises(ValueError, match=message):
        zerofx.shard(net, mixed_precision={"": LOW, "head": None})
    assert not isinstance(net.head.weight, zerofx.ShardedParameter)
    only_outputs = MixedPrecision(BF16, FP32, output_dtype=FP32)
    zerofx.shard(net, mixed_precision={"": LOW, "head": only_outputs})  # gathered and reduced alike


def test_a_plan_counts_every_part_by_its_own_dtypes() -> None:
    net = Net()
    held = {name: p.numel() for name, p in net.named_parameters()}
    numel = sum(held.values())
    low = sum(n for name, n in held.items() if dtypes_of(name)[0] != FP32)
    one, two, three = zerofx.plan(net, world_size=4, stages=(1, 2, 3), mixed_precision=BY_PART).stages
    for each in (one, two):  # replicas as computed; of what is cast a master of its own
        assert float(each.memory.weights) == 2 * low + 4 * (numel - low)
        assert float(each.memory.total) == 2 * low + 4 * (numel - low) + 3 * numel + low
    assert float(three.memory.total) == 4 * numel
    groups = len(plan_groups(net, 4, Grouping(), mixed_precision=BY_PART))
    assert float(three.traffic.gathered) == pytest.approx(2 * 3 / 4 * (2 * low + 4 * (numel - low)))
    assert groups == 4


def predicted(stage: int) -> tuple[float, int, int, int]:
    """Received in a step as predicted, and as counted; held at rest as predicted, and as held."""
    net = zerofx.compile(built(), stage=stage, executor="eager", mixed_precision=BY_PART)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = batch(0, 0)
    loss_of(net, x, y).backward()
    optimizer.step()
    with count_collectives() as log:
        loss_of(net, x, y).backward()
    prediction, held = zerofx.predict(net), zerofx.memory_summary(net, optimizer).nbytes
    dry = zerofx.predict(zerofx.dry_run(Net(), x, world_size=2, stage=stage, executor="eager", mixed_precision=BY_PART))
    assert (dry.wire_bytes, dry.held_bytes) == (prediction.wire_bytes, prediction.held_bytes)
    at_rest = held["replicas"] + held["shards"]
    return prediction.wire_bytes, sum(log.bytes.values()), prediction.held_bytes, at_rest


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
def test_predictions_are_what_is_sent_and_held(workers2: Workers, stage: int) -> None:
    sent, counted, held, at_rest = workers2.run(predicted, stage, timeout=100)[0]
    assert (sent, held) == (counted, at_rest)
