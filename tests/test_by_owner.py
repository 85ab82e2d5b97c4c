"""Optimizers that look at whole parameters: what one process computes, each parameter on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.counting import count_collectives
from tests.slow import slow
from tests.workers import Workers
from zerofx.integrations.states import full_optimizer_state
from zerofx.runtime.optim.by_owner import by_owner, wholes_of
from zerofx.runtime.optim.hooks import way_of
from zerofx.runtime.optim.owners import Owners

Maker = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Rows(torch.optim.Optimizer):
    """Written by hand: what it does with the rows and columns of a gradient is an option."""

    def __init__(self, params: Iterable[Any], how: str = "product", lr: float = 0.1) -> None:
        super().__init__(params, {"how": how, "lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if group["how"] == "fails":
                    raise ArithmeticError("in a step")
                state = self.state[p]
                rows = p.grad.reshape(p.shape[0], -1)
                state["seen"] = state.get("seen", 0) + 1
                state["products"] = state.get("products", 0) + rows @ rows.T
                state["mean"] = state.get("mean", 0) + p.grad
                scale = state["products"].norm() + 1
                noise = torch.rand(()) if group["how"] == "random" else 0
                p.sub_((state["mean"] + noise) / scale, alpha=group["lr"])
        return loss


class Parent(Rows):
    """Its step has hooks of its own once one was made."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class Dependent(torch.optim.Optimizer):
    """All gradients together decide about the step; ``how`` they are looked at."""

    def __init__(self, params: Iterable[Any], how: str) -> None:
        super().__init__(params, {"how": how, "distance": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        total = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                if group["how"] == "rows":
                    total += float(p.grad.reshape(p.shape[0], -1).mean(dim=1).abs().sum())
                else:
                    flat = p.grad.flatten()
                    total += float(torch.dot(flat, p.detach().view(-1)).abs() + flat.std() + flat.norm(-2))
        for group in self.param_groups:
            group["distance"] += total * 1e-3
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["distance"])


class Net(nn.Module):
    """Nothing divides by 2 or 3; one parameter never gets a gradient, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(7, 11), nn.Linear(11, 13), nn.Linear(13, 11, dtype=torch.float64)])
        self.unused = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)


OPTIMIZERS: dict[str, Maker] = {
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1, weight_decay=0.1),
    "Rows": Rows,
    "Muon": lambda groups: torch.optim.Muon(
        [{**group, "params": [p for p in group["params"] if p.dim() == 2]} for group in groups], lr=0.1
    ),
}


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.03}]


def set_gradients(*modules: nn.Module, seed: int) -> None:
    for module in modules:
        generator = torch.Generator().manual_seed(seed)
        for name, p in module.named_parameters():
            if name not in ("unused", "frozen"):
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def check_alike(module: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        whole = p.full_tensor() if isinstance(p, zerofx.ShardedTensor) else p.detach()
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, whole)
        assert all(torch.equal(x, whole) for x in told), f"{name} differs between ranks"
        torch.testing.assert_close(whole, q.detach(), rtol=1e-6, atol=1e-6, msg=f"{name}: {{}}".format)


def sharded(stage: int, **options: Any) -> nn.Module:
    return zerofx.shard(Net(), stage=stage, groups=zerofx.Grouping(min_bytes=0), **options)


# ----------------------------------------------------------------------------------------------------- numbers


def train(name: str, stage: int) -> float:
    """The share of one process's state that this rank has, in elements."""
    module, plain = sharded(stage), Net()
    mine, theirs = OPTIMIZERS[name](groups_of(module)), OPTIMIZERS[name](groups_of(plain))
    for step in range(4):
        set_gradients(module, plain, seed=step)
        mine.step()
        theirs.step()
    assert way_of(mine).kind == "owner" and not way_of(mine).draws
    check_alike(module, plain)
    summary = zerofx.memory_summary(module, mine).nbytes["optimizer state"]
    held = [x for state in mine.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    assert summary == sum(x.nbytes for x in [*held, *wholes_of(mine)])
    assert all(p in set(module.parameters()) for group in mine.param_groups for p in group["params"])
    return elements(mine) / elements(theirs)


def elements(optimizer: torch.optim.Optimizer) -> int:
    leaves = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return sum(x._local.numel() if isinstance(x, zerofx.ShardedTensor) else x.numel() for x in leaves)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_owners_compute_what_one_process_does_and_keep_its_state_once(
    workers2: Workers, workers3: Workers, name: str, stage: int
) -> None:
    for workers in (workers2, workers3):
        assert sum(workers.run(train, name, stage)) == pytest.approx(1.0)


def count(stage: int) -> list[float]:
    """Bytes that a step sends, in those that owners have not: the first step's, a later one's. Both on all ranks."""
    module = sharded(stage)
    trained: list[Any] = list(module.layers.parameters())  # type: ignore[union-attr,operator]
    optimizer = Rows(trained)
    owners = Owners(trained)
    elsewhere = sum(owners.elsewhere(p) * p.element_size() for p in trained)
    assert elsewhere < 0.4 * sum(p.numel() * p.element_size() for p in trained), "by cost alone it is half"
    found = []
    for step in range(3):
        set_gradients(module, seed=step)
        with count_collectives() as log:
            optimizer.step()
        found.append(log.bytes["all_to_all"])
    return [found[step] / elsewhere for step in (0, 2)]


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_travel_to_owners_and_new_weights_back(workers2: Workers, stage: int) -> None:
    (first, later), (first_too, later_too) = workers2.run(count, stage)
    assert first + first_too == pytest.approx(3.0), "weights as well: owners have none yet"
    assert later + later_too == pytest.approx(2.0)


def written() -> None:
    module, plain = sharded(3), Net()
    mine, theirs = Rows(module.parameters()), Rows(plain.parameters())
    for step in range(3):
        set_gradients(module, plain, seed=step)
        with torch.no_grad():
            for net in (module, plain):
                net.layers[0].weight.mul_(0.5)  # type: ignore[index,union-attr,operator]
        mine.step()
        theirs.step()
    check_alike(module, plain)


def test_weights_that_are_written_between_steps_are_gathered_anew(workers2: Workers) -> None:
    workers2.run(written)


def draw_on_mesh() -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = sharded(3, mesh=mesh)
    optimizer = Rows(module.parameters(), "random")
    for step in range(2):
        set_gradients(module, seed=step)
        optimizer.step()
    return [p.full_tensor() for p in module.parameters()]


def test_replicas_draw_the_same_random_numbers(make_workers: Callable[[int], Workers]) -> None:
    first, *others = make_workers(4).run(draw_on_mesh)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def train_on_mesh(stage: int) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module, plain = sharded(stage, mesh=mesh), Net()
    mine, theirs = Rows(groups_of(module)), Rows(groups_of(plain))
    for step in range(2):
        set_gradients(module, plain, seed=step)
        mine.step()
        theirs.step()
    check_alike(module, plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_on_a_mesh_owners_are_ranks_of_a_replica(make_workers: Callable[[int], Workers], stage: int) -> None:
    make_workers(4).run(train_on_mesh, stage)


def train_with_what_changes() -> None:
    module, plain = sharded(3), Net()
    optimizers = []
    for net in (module, plain):
        first, *others = list(net.parameters())
        optimizer = Rows([first])
        optimizers.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), others))
    for step in range(4):
        set_gradients(module, plain, seed=step)
        for optimizer, scheduler, others in optimizers:
            if step == 2:
                optimizer.add_param_group({"params": others, "lr": 0.2})
            optimizer.step()
            scheduler.step()
    assert optimizers[0][0].param_groups[0]["lr"] == 0.1 / 2**4
    check_alike(module, plain)


def test_parameter_groups_may_be_added_and_schedulers_used(workers2: Workers) -> None:
    workers2.run(train_with_what_changes)


def train_by_parent() -> None:
    Rows(nn.Linear(2, 2).parameters())
    module, plain = sharded(3), Net()
    mine, theirs = Parent(groups_of(module)), Parent(groups_of(plain))
    for step in range(2):
        set_gradients(module, plain, seed=step)
        mine.step()
        theirs.step()
    check_alike(module, plain)


def test_a_step_that_calls_the_step_of_its_parent_is_one_step(workers2: Workers) -> None:
    workers2.run(train_by_parent)


def train_with_closure(stage: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    module = zerofx.compile(net, stage=stage, executor="eager")
    x, y = torch.randn(8, 5), torch.randn(8, 3)
    for model, optimizer in ((module, Rows(module.parameters())), (plain, Rows(plain.parameters()))):

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(3)]
        assert losses == sorted(losses, reverse=True)
    check_alike(module, plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_closure_in_a_step_trains_the_sharded_model(workers2: Workers, stage: int) -> None:
    workers2.run(train_with_closure, stage)


def overflow(stage: int) -> tuple[float, list[bool]]:
    """Loss scaling beside one process; in the second step one rank's gradients are not finite."""
    x = torch.linspace(-1, 1, 28, dtype=torch.float64).reshape(4, 7)
    module, plain = sharded(stage), Net()
    pairs = [(net, Rows(net.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)) for net in (module, plain)]
    moved = []
    for step in range(3):
        before = [p.detach().clone() for p in plain.parameters()]
        for net, optimizer, scaler in pairs:
            y = net.layers[1](net.layers[0](x.float())).double()
            loss = net.layers[2](y).square().mean()
            bad = step == 1 and (net is plain or dist.get_rank() == 1)
            scaler.scale(loss * float("inf") if bad else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        moved.append(any(not torch.equal(p, q) for p, q in zip(plain.parameters(), before, strict=True)))
        check_alike(module, plain)
    return pairs[0][2].get_scale(), moved


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
@pytest.mark.filterwarnings("ignore:.*needs the whole of")
def test_gradscaler_skips_a_step_on_all_ranks_when_one_overflows(workers2: Workers, stage: int) -> None:
    assert workers2.run(overflow, stage) == [(32.0, [True, False, True])] * 2


def train_in_backward() -> None:
    torch.manual_seed(0)
    net, plain = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3)), nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3))
    plain.load_state_dict(net.state_dict())
    module = zerofx.compile(net, stage=3, executor="eager")
    mine, theirs = Rows(module.parameters()), Rows(plain.parameters())
    x = torch.randn(8, 5)
    for _ in range(2):
        with zerofx.step_in_backward(mine):
            module(x).square().mean().backward()
        plain(x).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    check_alike(module, plain)


def test_a_step_in_backward_waits_for_its_end(workers2: Workers) -> None:
    workers2.run(train_in_backward)


def draw() -> tuple[float, list[torch.Tensor]]:
    module = sharded(3)
    optimizer = Rows(module.parameters(), "random")
    torch.manual_seed(5)
    for step in range(2):
        set_gradients(module, seed=step)
        optimizer.step()
    assert way_of(optimizer).draws
    return float(torch.rand(())), [p.full_tensor() for p in module.parameters()]


def test_random_numbers_of_owners_leave_the_generators_of_ranks_alike(workers2: Workers) -> None:
    (one, weights), (other, others) = workers2.run(draw)
    assert one == other
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


# ------------------------------------------------------------------------------------------------- checkpoints


def save(path: str, stage: int) -> None:
    module = sharded(stage)
    optimizer = Rows(groups_of(module))
    for step in range(2):
        set_gradients(module, seed=step)
        optimizer.step()
    optimizer.state_dict()
    zerofx.save(path, module, optimizer)
    set_gradients(module, seed=2)
    optimizer.step()  # state goes back to its owners
    plain = Net()
    theirs = Rows(groups_of(plain))
    for step in range(3):
        set_gradients(plain, seed=step)
        theirs.step()
    check_alike(module, plain)
    whole = full_optimizer_state(optimizer)
    if dist.get_rank() == 0:
        expected = theirs.state_dict()
        assert whole["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            assert state["seen"] == whole["state"][number]["seen"]
            for what in ("mean", "products"):
                torch.testing.assert_close(whole["state"][number][what], state[what])


def load(path: str, stage: int) -> None:
    module = sharded(stage) if stage else zerofx.shard(Net(), stage=0)
    optimizer = Rows(groups_of(module))
    zerofx.load(path, module, optimizer)
    plain = Net()
    theirs = Rows(groups_of(plain))
    for step in range(4):
        set_gradients(plain, seed=step)
        theirs.step()
    for step in range(2, 4):
        set_gradients(module, seed=step)
        optimizer.step()
    check_alike(module, plain)


def save_of_mixed_shapes(path: str) -> None:
    """Adafactor's state of a bias is shaped as the bias, that of a matrix is not as the matrix."""
    module, plain = sharded(3), Net()
    mine, theirs = (torch.optim.Adafactor(groups_of(m), lr=0.1) for m in (module, plain))
    for step in range(3):
        set_gradients(module, plain, seed=step)
        mine.step()
        theirs.step()
        for _ in range(2):
            whole = full_optimizer_state(mine)
        if dist.get_rank() == 0:
            torch.testing.assert_close(whole["state"], theirs.state_dict()["state"], rtol=1e-5, atol=1e-7)
    zerofx.save(path, module, mine)
    zerofx.load(path, module, mine)
    set_gradients(module, plain, seed=3)
    mine.step()
    theirs.step()
    check_alike(module, plain)


def test_state_of_other_shapes_than_its_parameter_is_saved_as_often_as_asked(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(save_of_mixed_shapes, str(tmp_path / "it"))


@pytest.mark.parametrize(("stage", "other"), [(3, 3), (3, 0), (1, 2)])
def test_a_checkpoint_is_loaded_by_any_number_of_ranks(
    workers2: Workers, workers3: Workers, tmp_path: Path, stage: int, other: int
) -> None:
    workers2.run(save, str(tmp_path / "it"), stage)
    workers3.run(load, str(tmp_path / "it"), other)
    workers2.run(load, str(tmp_path / "it"), other)


# ------------------------------------------------------------------------------------------------------- a file


def offloaded(path: str) -> None:
    module = sharded(3, offload=path)
    set_gradients(module, seed=0)
    optimizer = Rows(module.parameters())
    with pytest.raises(TypeError, match=r"Rows over group .*whose optimizer state is in a file"):
        optimizer.step()
    assert by_owner(optimizer) is None


def test_state_in_a_file_is_refused_to_owners(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(offloaded, str(tmp_path))
