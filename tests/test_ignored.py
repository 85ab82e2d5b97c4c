"""Parameters that stay plain (``ignored=``): whole on every rank, their gradients averaged, or left alone."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

import zerofx
from tests.counting import count_collectives
from tests.slow import quick_if, slow
from tests.workers import Workers
from zerofx.integrations.fsdp import fully_shard
from zerofx.runtime.state.group import groups_of

IGNORED = [nn.LayerNorm, "blocks.*.router.bias"]
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.layer = nn.LayerNorm(8), nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.layer(h) * self.router(h).softmax(-1)[:, :1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def built(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def rows(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def everywhere(x: torch.Tensor) -> list[torch.Tensor]:
    """``x`` of every rank."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.detach().contiguous())
    return found


def whole(p: Any) -> torch.Tensor:
    found: torch.Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
    return found


def check_same(net: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for name, p in plain.named_parameters():
        found = whole(net.get_parameter(name))
        torch.testing.assert_close(found, p.detach(), **(tolerance or CLOSE), msg=lambda m, n=name: f"{n}: {m}")
        assert all(torch.equal(other, found) for other in everywhere(found)), name


def plain_ones(net: nn.Module) -> set[str]:
    return {name for name, p in net.named_parameters() if type(p) is nn.Parameter}


NAMES = {f"blocks.{i}.{name}" for i in range(2) for name in ("norm.weight", "norm.bias", "router.bias")}


def optimizer_of(net: nn.Module, how: str) -> torch.optim.Optimizer:
    if how == "zerofx":
        return zerofx.AdamW(net.parameters(), lr=0.01, max_grad_norm=0.1)
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def check_training(stage: int, executor: str, how: str, options: dict[str, Any]) -> None:
    """Steps with clipping, micro-batches among them, as in one process."""
    if mesh := options.pop("mesh", None):
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, net = built(), built(seed=rank)  # rank 0's values are taken
    options = {"ignored": IGNORED, **options}
    zerofx.compile(net, stage=stage, executor=executor, groups=zerofx.Grouping(min_bytes=0), **options)
    assert plain_ones(net) == NAMES
    ours, theirs = optimizer_of(net, how), torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(4):
        with zerofx.no_sync(net) if step == 1 else contextlib.nullcontext():
            net(rows(rank, step)).backward()
        for other in range(world):
            (plain(rows(other, step)) / world).backward()
        if step == 1:
            assert net.blocks[0].norm.weight.grad is None or not net.blocks[0].norm.weight.grad.any()
            with pytest.raises(RuntimeError, match="keeps gradients"):
                ours.step()
            continue
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        if how == "torch":
            torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1), wanted, **CLOSE)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    check_same(net, plain, **({} if executor == "eager" else {"rtol": 1e-4, "atol": 1e-5}))


QUICK = [(0, 3, "eager", "zerofx"), (3, 3, "eager", "zerofx"), (3, 2, "inductor", "torch")]


@quick_if(lambda stage, world, executor, how: (stage, world, executor, how) in QUICK)
@pytest.mark.parametrize("how", ["torch", "zerofx"])
@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plain_parameters_train_with_sharded_ones(
    make_workers: Callable[[int], Workers], stage: int, world: int, executor: str, how: str
) -> None:
    make_workers(world).run(check_training, stage, executor, how, {}, timeout=300)


OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "leaf": (3, {"leaf_modules": [Block]}),
    "one_copy": (3, {"one_copy": True}),
    "all in one bucket": (0, {"buckets": "all"}),
    "a budget for activations": (3, {"activation_budget": 0.5}),
}


@quick_if(lambda how: how in ("leaf", "one_copy"))
@pytest.mark.parametrize("how", OPTIONS)
def test_they_train_with_other_options(workers2: Workers, how: str) -> None:
    stage, options = OPTIONS[how]
    workers2.run(check_training, stage, "eager", "torch", options, timeout=200)


@pytest.mark.parametrize("stage", [slow(2), 3])
def test_they_are_averaged_over_both_dimensions_of_a_mesh(make_workers: Callable[[int], Workers], stage: int) -> None:
    make_workers(4).run(check_training, stage, "eager", "torch", {"mesh": (2, 2)}, timeout=200)


class Chosen(nn.Module):
    """Each rank runs a layer of its own; the last is run by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.layers[dist.get_rank()](h).square().mean()


def check_chosen(stage: int) -> None:
    net = Chosen()
    zerofx.compile(net, stage=stage, executor="eager", ignored=["layers"])
    with count_collectives() as log:
        net(rows(dist.get_rank())).backward()
    assert log.calls["all_reduce"] == (1 if stage else 2)  # of four layers
    world = dist.get_world_size()
    for i, layer in enumerate(net.layers):
        if i >= world:
            assert layer.weight.grad is None
            continue
        plain = copy.deepcopy(layer)
        with torch.no_grad():
            first = nn.functional.linear(rows(i), whole(net.first.weight), whole(net.first.bias))
        plain(first).square().mean().backward()
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad / world, **CLOSE)


@pytest.mark.parametrize("stage", [0, slow(2), 3])
def test_ranks_may_use_different_ones_of_them(workers3: Workers, stage: int) -> None:
    workers3.run(check_chosen, stage)


def check_left_alone(stage: int) -> None:
    rank = dist.get_rank()
    net = built(seed=rank)
    mine = net.head.weight.detach().clone()
    zerofx.compile(net, stage=stage, executor="eager", ignored={"head": "leave", nn.LayerNorm: "average"})
    assert torch.equal(net.head.weight, mine) and type(net.head.weight) is nn.Parameter
    net(rows(rank)).backward()
    of_each = everywhere(net.head.weight.grad)
    assert not torch.equal(of_each[0], of_each[1])
    plain = built()
    with torch.no_grad():
        plain.head.load_state_dict(net.head.state_dict())
    plain(rows(rank)).backward()
    torch.testing.assert_close(net.head.weight.grad, plain.head.weight.grad, **CLOSE)
    assert all(torch.equal(g, net.blocks[0].norm.weight.grad) for g in everywhere(net.blocks[0].norm.weight.grad))
    (own,) = torch.autograd.grad(net(rows(rank)), [net.blocks[0].norm.weight], retain_graph=False)
    (wanted,) = torch.autograd.grad(plain(rows(rank)), [plain.blocks[0].norm.weight])
    torch.testing.assert_close(own, wanted, **CLOSE)  # this rank's own, as of any tensor


@pytest.mark.parametrize("stage", [0, slow(2), 3])
def test_gradients_are_left_alone_on_request_and_by_autograd_grad(workers2: Workers, stage: int) -> None:
    workers2.run(check_left_alone, stage)


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("in the middle of a backward")


def check_features(stage: int, folder: Path) -> None:
    """Copies, checkpoints, whole weights, a step inside of backward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    options: dict[str, Any] = {"stage": stage, "executor": "eager", "ignored": IGNORED}
    net, plain = zerofx.compile(built(), **options), built()
    optimizer = zerofx.AdamW(net.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: Any, seed: int, inside: bool = False) -> None:
        with zerofx.step_in_backward(optimizer) if inside else contextlib.nullcontext():
            model(rows(rank, seed)).backward()
        if not inside:
            optimizer.step()
            optimizer.zero_grad()

    def reference(seed: int) -> None:
        for other in range(world):
            (plain(rows(other, seed)) / world).backward()
        theirs.step()
        theirs.zero_grad()

    failing = rows(rank, 5).requires_grad_()
    failing.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        net(failing).backward()  # its gradients are nobody's
    optimizer.zero_grad()
    step(net, optimizer, 0)
    reference(0)
    with zerofx.no_sync(net):
        net(rows(rank, 9)).backward()
    held = zerofx.memory_summary(net).nbytes
    nbytes = {name: p.nbytes for name, p in plain.named_parameters()}
    alone = sum(nbytes[name] for name in NAMES)
    shards = sum(group.shard.nbytes for group in groups_of(net)) if stage else sum(nbytes.values()) - alone
    assert held["kept gradients"] == sum(nbytes.values())
    assert held["shards"] == alone + (0 if stage in (1, 2) else shards)  # there a shard is a part of the replica
    zerofx.drop_kept(net)
    assert not zerofx.memory_summary(net).nbytes["kept gradients"]
    optimizer.zero_grad()
    twin = copy.deepcopy(net)
    assert plain_ones(twin) == NAMES
    zerofx.save(folder / "one", net, optimizer)
    step(net, optimizer, 1, inside=bool(stage))
    reference(1)
    check_same(net, plain)
    step(twin, zerofx.AdamW(twin.parameters(), lr=0.01), 1)  # averaged by a hook of its own
    assert all(torch.equal(p, twin.blocks[1].router.bias) for p in everywhere(twin.blocks[1].router.bias))

    other = zerofx.compile(built(seed=5), **{**options, "stage": 3 - stage})
    again = zerofx.AdamW(other.parameters(), lr=0.01)
    zerofx.load(folder / "one", other, again)
    step(other, again, 1)
    check_same(other, plain)
    full = zerofx.full_state_dict(net)
    if rank == 0:
        assert list(full) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(full[name], value, **CLOSE)
    zerofx.export_safetensors(net, folder / "exported")
    exported = load_file(folder / "exported" / "model.safetensors")
    torch.testing.assert_close(exported["blocks.1.router.bias"], plain.blocks[1].router.bias.detach(), **CLOSE)
    streamed = dict(zerofx.full_parameters(net))
    torch.testing.assert_close(streamed["blocks.0.norm.weight"], plain.blocks[0].norm.weight.detach(), **CLOSE)
    with zerofx.unsharded(net, writeback=False):
        torch.testing.assert_close(net(rows(0)), plain(rows(0)), **CLOSE)


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_copies_checkpoints_and_steps_in_backward_have_them(workers2: Workers, tmp_path: Path, stage: int) -> None:
    workers2.run(check_features, stage, tmp_path, timeout=200)


class Odd(nn.Module):
    """What is no parameter to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.codes = nn.Parameter(torch.arange(4), requires_grad=False)
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.hooked, self.seen = nn.Parameter(torch.ones(4)), []
        self.hooked.register_hook(lambda g: self.seen.append(g.clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.layer(x)) * self.hooked + self.codes
        return (y * self.phase).abs().square().mean()


def check_odd(stage: int, executor: str) -> None:
    torch.manual_seed(0)
    net, rank = Odd(), dist.get_rank()
    plain = Odd()
    plain.load_state_dict(net.state_dict())
    with pytest.raises(Exception, match=r"codes|phase"):
        zerofx.compile(net, stage=stage, ignored=["norm"])
    zerofx.compile(net, stage=stage, executor=executor, ignored=["norm", "codes", "phase", "hooked"])
    x = rows(rank)[:, :4]
    net(x).backward()
    plain(x).backward()
    for name in ("norm.weight", "phase", "hooked"):
        mine = torch.view_as_real(g).contiguous() if (g := plain.get_parameter(name).grad).is_complex() else g
        average = sum(everywhere(mine)) / dist.get_world_size()
        found = net.get_parameter(name).grad
        torch.testing.assert_close(torch.view_as_real(found) if found.is_complex() else found, average, **CLOSE)
    torch.testing.assert_close(net.seen[0], plain.seen[0], **CLOSE)  # a hook sees what this rank has
    assert net.codes.grad is None


@quick_if(lambda stage, executor: stage == 3 and executor == "eager")
@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_cannot_be_sharded_may_be_ignored(workers2: Workers, stage: int, executor: str) -> None:
    workers2.run(check_odd, stage, executor, timeout=200)


def check_beside_fsdp2() -> None:
    """FSDP2's ``ignored_params`` are left alone."""
    x = rows(dist.get_rank())
    nets = []
    for call, options in ((fsdp2, {}), (fully_shard, {"zerofx": {"executor": "eager"}})):
        net = built(seed=dist.get_rank() if call is fully_shard else 0)
        net.load_state_dict(built().state_dict())
        ignored = set(net.head.parameters())
        for block in net.blocks:
            call(block)
        call(net, ignored_params=ignored, **options)
        net(x).backward()
        nets.append(net)
    theirs, ours = nets
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(whole(ours.get_parameter(name).grad), whole(p.grad), **CLOSE)
    assert plain_ones(ours) == {"head.weight", "head.bias"}


def test_they_are_fsdp2_s_ignored_params_where_they_are_left_alone(workers2: Workers) -> None:
    workers2.run(check_beside_fsdp2)


@pytest.mark.parametrize("given", ["head", [], [3], {"head": "drop"}, {"head": True}])
def test_what_is_no_list_of_rules_is_refused(given: Any) -> None:
    message = rf"ignored={re.escape(repr(given))}: expected a list of module classes and patterns of names of modules"
    with pytest.raises(ValueError, match=message):
        zerofx.shard(Net(), ignored=given)


def test_a_rule_must_match_and_leave_something_to_shard(fake_world: Callable[[int], None]) -> None:
    fake_world(2)
    with pytest.raises(ValueError, match=r"ignored: 'router\.bias' matches no parameter of this Net\. Names are those"):
        zerofx.shard(Net(), ignored=["router.bias"])
    with pytest.raises(ValueError, match=r"ignored=\['\*'\] is about every parameter of this Net: there is"):
        zerofx.shard(Net(), ignored=["*"])
    with pytest.raises(ValueError, match=r"uneven=True with ignored=\['head'\]"):
        zerofx.shard(Net(), ignored=["head"], uneven=True)
    with torch.device("meta"):
        net = Net()
    with pytest.raises(ValueError, match=r"ignored= with a module on the meta device \('blocks\.0\.norm\.weight'\)"):
        zerofx.shard(net, ignored=["head"])


def test_a_layout_that_has_no_average_is_refused(fake_world: Callable[[int], None]) -> None:
    fake_world(2)
    net = Net()
    net.table = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"ignored: 'table' is a Parameter with layout torch\.sparse_coo"):
        zerofx.shard(net, ignored=["table"])
    zerofx.shard(net, ignored={"table": "leave"})
    assert plain_ones(net) == {"table"}


def test_a_tied_one_is_ignored_under_either_name_and_the_last_rule_wins(
    fake_world: Callable[[int], None],
) -> None:
    fake_world(2)
    net = Net()
    net.blocks[1].layer.weight = net.blocks[0].layer.weight
    zerofx.shard(net, ignored={"blocks.1.layer": "average", "blocks.*.layer.bias": "leave"})
    assert plain_ones(net) == {"blocks.0.layer.weight", "blocks.0.layer.bias", "blocks.1.layer.bias"}
    (family,) = {group.family for group in groups_of(net)}
    assert list(family.averages._parameters) == ["blocks.0.layer.weight"]


def test_a_dry_run_leaves_them_out() -> None:
    net = Net()
    record = zerofx.dry_run(net, rows(0), world_size=2, executor="eager", ignored=IGNORED)
    slots = {slot.name for trace in record.traces() for layout in trace.context.found.shards for slot in layout.slots}
    assert slots == {name for name, _ in net.named_parameters()} - NAMES
