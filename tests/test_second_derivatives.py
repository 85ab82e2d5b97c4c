"""Gradients in the loss: forces of an energy, penalties of a gradient, equations of physics; as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.slow import quick_if, slow
from tests.workers import Workers

pytestmark = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this PyTorch does not trace torch.autograd.grad"
)
EACH_GROUP = zerofx.Grouping(min_bytes=0)
CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5}
Batch = tuple[torch.Tensor, ...]


class Forces(nn.Module):
    """Energies of molecules from distances, by two layers of messages; and forces, the gradient by positions."""

    def __init__(self, width: int = 13, *, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.messages = nn.ModuleList(nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU()) for _ in range(2))
        self.energy = nn.Linear(width, 1)
        self.recompute = recompute

    def forward(self, species: torch.Tensor, positions: torch.Tensor, pairs: torch.Tensor) -> Any:
        positions = positions.detach().requires_grad_(True)
        sender, receiver = pairs
        distance = (positions[sender] - positions[receiver]).square().sum(1, keepdim=True)
        atoms = self.embedding(species)
        for layer in self.messages:
            inputs = torch.cat([atoms[sender], atoms[receiver], (-distance).exp().to(atoms.dtype)], dim=1)
            sent = checkpoint(layer, inputs, use_reentrant=False) if self.recompute else layer(inputs)
            atoms = atoms + torch.zeros_like(atoms).index_add(0, receiver, sent)
        energies = self.energy(atoms)
        (gradient,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies, -gradient


def molecule(rank: int, step: int, atoms: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    positions = torch.randn(atoms, 3, generator=generator)
    pairs = torch.combinations(torch.arange(atoms)).T
    species = torch.randint(5, (atoms,), generator=generator)
    return species, positions, torch.cat([pairs, pairs.flip(0)], dim=1)


def loss_of_forces(model: nn.Module, batch: Batch) -> torch.Tensor:
    energies, forces = model(*batch)
    wanted = torch.sin(3 * batch[1])
    return energies.float().square().mean() + (forces.float() - wanted).square().mean()


class Wave(nn.Module):
    """The residual of a wave equation: derivatives of the second order in forward, of the third in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(True)
        (first,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        second = [torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        return second[1] - 2.0 * second[0] - torch.sin(x[:, 0])


class Critic(nn.Module):
    """A discriminator and its penalty on real data (R1), for which the input comes with requires_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 19), nn.Softplus(), nn.Linear(19, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.requires_grad_()
        score = self.body(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score, gradient.square().sum(1).mean()


def points(rank: int, step: int, rows: int, columns: int) -> Batch:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(100 * step + rank)),)


def loss_of_wave(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(*batch).square().mean()


def loss_of_critic(model: nn.Module, batch: Batch) -> torch.Tensor:
    score, penalty = model(*batch)
    return nn.functional.softplus(-score).mean() + 5.0 * penalty


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module, Batch], torch.Tensor], Callable[[int, int], Batch]]
CASES: dict[str, Case] = {
    "forces": (Forces, loss_of_forces, lambda rank, step: molecule(rank, step, 5)),
    "sizes": (Forces, loss_of_forces, lambda rank, step: molecule(rank, step, 4 + (2 * rank + 3 * step) % 5)),
    "recompute": (lambda: Forces(recompute=True), loss_of_forces, lambda rank, step: molecule(rank, step, 5)),
    "wave": (Wave, loss_of_wave, lambda rank, step: points(rank, step, 6, 2)),
    "critic": (Critic, loss_of_critic, lambda rank, step: points(rank, step, 4, 7)),
}


def check(name: str, options: dict[str, Any], steps: int = 3) -> int:
    """Train and compare with one process, whose loss is the mean over ranks; returns how many graphs there are."""
    torch.manual_seed(0)
    build, loss_of, batch_of = CASES[name]
    plain = build()
    model = zerofx.compile(copy.deepcopy(plain), **{"groups": EACH_GROUP, **options})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, plain)]
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        loss = loss_of(model, batch_of(rank, step))
        loss.backward()
        wanted = [loss_of(plain, batch_of(r, step)) for r in range(world)]
        torch.testing.assert_close(loss, wanted[rank], **CLOSE)
        torch.stack(wanted).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = zerofx.full_state_dict(model, rank0_only=False)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
    return len(zerofx.graphs(model))


@quick_if(lambda stage: stage == 3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_that_of_one_process(workers2: Workers, workers3: Workers, stage: int, name: str) -> None:
    (workers3 if name == "forces" else workers2).run(check, name, {"stage": stage, "executor": "eager"})


@quick_if(lambda stage, name: stage == 3 and name == "critic")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_under_inductor(workers2: Workers, workers3: Workers, stage: int, name: str) -> None:
    (workers3 if name == "wave" else workers2).run(check, name, {"stage": stage, "executor": "inductor"}, timeout=300)


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "symbols": ("sizes", {"dynamic": True}),
    "little prefetched": ("forces", {"memory_budget": 4096}),
    "kept gathered": ("forces", {"memory_budget": float("inf")}),
    "saved in part": ("forces", {"activation_budget": 0.3}),
    "nothing saved": ("wave", {"activation_budget": 0.0}),
    "uneven": ("forces", {"uneven": True}),
    "leaf modules": ("forces", {"leaf_modules": ["messages.*"]}),
}


@quick_if(lambda stage, name: stage == 3 and name in ("nothing saved", "leaf modules"))
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_with_options(workers2: Workers, stage: int, name: str) -> None:
    case, options = OPTIONS[name]
    workers2.run(check, case, {"stage": stage, "executor": "eager", **options})


def twins(build: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = build()
    return zerofx.compile(copy.deepcopy(plain), **{"executor": "eager", "groups": EACH_GROUP, **options}), plain


def same_gradients(module: nn.Module, plain: nn.Module, **tolerance: Any) -> None:
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        found: Any = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad  # type: ignore[union-attr]
        torch.testing.assert_close(found, q.grad, msg=f"{name}: {{}}".format, **(tolerance or CLOSE))


def check_precision(stage: int) -> None:
    """As one process that casts weights and inputs by hand."""
    model, plain = twins(Forces, stage=stage, mixed_precision=zerofx.MixedPrecision(torch.bfloat16))
    world, rank = dist.get_world_size(), dist.get_rank()

    def by_hand(batch: Batch) -> torch.Tensor:
        weights = {name: p.bfloat16() for name, p in plain.named_parameters()}
        cast = tuple(x.bfloat16() if x.is_floating_point() else x for x in batch)
        return loss_of_forces(lambda *args: torch.func.functional_call(plain, weights, args), cast)  # type: ignore[arg-type]

    loss = loss_of_forces(model, molecule(rank, 0, 5))
    wanted = [by_hand(molecule(r, 0, 5)) for r in range(world)]
    torch.testing.assert_close(loss, wanted[rank], rtol=0.01, atol=0.01)
    loss.backward()
    torch.stack(wanted).mean().backward()
    same_gradients(model, plain, rtol=0.03, atol=0.03)


def check_accumulation(stage: int) -> None:
    model, plain = twins(Forces, stage=stage)
    one, other = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain))
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        with zerofx.no_sync(model):
            loss_of_forces(model, molecule(rank, step, 5)).backward()
        loss = loss_of_forces(model, molecule(rank, step + 5, 5))
        with zerofx.step_in_backward(one):
            loss.backward()
        for r in range(world):
            for seed in (step, step + 5):
                (loss_of_forces(plain, molecule(r, seed, 5)) / world).backward()
        other.step()
        other.zero_grad()
    found = zerofx.full_state_dict(model, rank0_only=False)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value, **CLOSE)


@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_with_mixed_precision_and_accumulation(workers2: Workers, stage: int) -> None:
    workers2.run(check_precision, stage)
    workers2.run(check_accumulation, stage)


# -- what else forward may do


class Inner(nn.Module):
    """A step of gradient descent inside of forward, as in MAML: by weights, on this rank's own data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (x @ self.weight + self.bias).tanh().square().mean()
        steps = torch.autograd.grad(loss, (self.weight, self.bias), create_graph=True)
        weight, bias = (p - 0.1 * step for p, step in zip((self.weight, self.bias), steps, strict=True))
        return (x @ weight + bias - 1.0).square().mean()


class Backward(nn.Module):
    """A backward inside of forward: its gradients are averaged, as any other's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(7, 4), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean()
        (loss / 1.0).backward()
        return self.other(x).square().mean()


class Transformed(nn.Module):
    """Derivatives by `torch.func`: ``kind`` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 1)), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def value(x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).squeeze(-1)

        slope = torch.func.grad(lambda x: value(x).sum())
        return {
            "grad": lambda: slope(x),
            "grad of grad": lambda: torch.func.grad(lambda x: slope(x)[:, 0].sum())(x),
            "vmap of grad": lambda: torch.func.vmap(torch.func.grad(value))(x),
            "jvp": lambda: torch.func.jvp(value, (x,), (torch.ones_like(x),))[1],
            "jvp of grad": lambda: torch.func.jvp(slope, (x,), (torch.ones_like(x),))[1],
            "jacrev": lambda: torch.func.vmap(torch.func.jacrev(value))(x),
            "laplacian": lambda: torch.func.vmap(lambda x: torch.func.hessian(value)(x).diagonal().sum())(x),
        }[self.kind]()


KINDS = ["grad", "grad of grad", "vmap of grad", "jvp", "jvp of grad", "jacrev", "laplacian"]


def check_forward(stage: int, build: Callable[[], nn.Module], graphs: int, executor: str = "eager") -> None:
    model, plain = twins(build, stage=stage, executor=executor)
    parts = [points(r, 0, 3, 7)[0] for r in range(dist.get_world_size())]
    model(parts[dist.get_rank()]).square().mean().backward()
    for x in parts:
        (plain(x).square().mean() / len(parts)).backward()
    if build is Backward:  # the one inside is of each call, and nobody has divided its loss
        for p in plain.layer.parameters():
            p.grad /= len(parts)
    same_gradients(model, plain)
    assert len(zerofx.graphs(model)) == graphs


@pytest.mark.parametrize("stage", [0, slow(2), 3])
def test_gradients_by_weights_and_backwards_inside_of_forward(workers2: Workers, stage: int) -> None:
    workers2.run(check_forward, stage, Inner, 1)
    workers2.run(check_forward, stage, Backward, 2)


@quick_if(lambda stage, kind: stage == 3 and kind in ("laplacian", "jvp of grad"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_transforms_inside_of_forward(workers2: Workers, stage: int, kind: str) -> None:
    workers2.run(check_forward, stage, partial(Transformed, kind), 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["laplacian", "jvp of grad"])
def test_transforms_under_inductor(workers3: Workers, kind: str) -> None:
    workers3.run(check_forward, 3, partial(Transformed, kind), 1, "inductor", timeout=300)


class Dynamics(nn.Module):
    """Forces where nothing is trained: no gradient by weights, and no reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.field = Forces()

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            _, forces = self.field(*batch)
        return forces.detach()


def check_no_training(stage: int) -> None:
    model, plain = twins(Dynamics, stage=stage)
    batch = molecule(dist.get_rank(), 0, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(*batch), plain(*batch), **CLOSE)
    (record,) = zerofx.graphs(model)
    assert "reduce" not in str(record)


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of a critic, outside of it."""
    x = x.clone().requires_grad_()
    score = model(x)
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + gradient.square().sum(1).mean()


class Broken(Critic):
    """What is differentiated is in two graphs."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        hidden = self.body[0](x)
        torch._dynamo.graph_break()
        score = self.body[2](self.body[1](hidden))
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score, gradient


def check_outside(stage: int) -> None:
    """Outside of forward it is refused, with ways that work: a leaf module, or a module that is not compiled."""
    parts = [points(r, 0, 4, 7)[0] for r in range(dist.get_world_size())]

    def build() -> nn.Module:
        return nn.Sequential(Critic().body)

    compiled, plain = twins(build, stage=stage)
    with pytest.raises(RuntimeError, match=r"Call torch.autograd.grad inside of forward, .*leaf_modules="):
        penalty(compiled, parts[0])
    broken, _ = twins(Broken, stage=stage)
    with pytest.raises(RuntimeError, match=r"double backward .*in one graph with it"):
        broken(parts[0])
    for x in parts:
        (penalty(plain, x) / len(parts)).backward()
    leaf, _ = twins(build, stage=stage, leaf_modules=["0"])
    for model in (leaf, sharded(build, stage)):
        penalty(model, parts[dist.get_rank()]).backward()
        same_gradients(model, plain)


def sharded(build: Callable[[], nn.Module], stage: int) -> nn.Module:
    torch.manual_seed(0)
    return zerofx.shard(build(), stage=stage)


@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_without_training_and_outside_of_forward(workers2: Workers, stage: int) -> None:
    workers2.run(check_no_training, stage)
    workers2.run(check_outside, stage)


def test_the_option_is_on_for_zerofx_alone() -> None:
    """Plain ``torch.compile`` goes on to break its graph there."""
    assert not torch._dynamo.config.trace_autograd_ops
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    @torch.compile(backend=backend)
    def slope(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return torch.autograd.grad(y.sum(), x)[0] + 1.0

    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(slope(x), x.cos() + 1.0)
    assert len(graphs) == 2
