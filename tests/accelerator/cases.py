"""Training in many ways, on the CPU or on the simulated accelerator: the same function runs on ranks of either kind."""

from __future__ import annotations

import contextlib
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from zerofx.runtime.state.copies import AcceleratorCopies

STEPS, WIDTH = 4, 64
EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)


class Layers(nn.Module):
    """The loss of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


class Broken(nn.Module):
    """Between two graphs a weight is read by eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.last(hidden * self.scale).square().mean()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh()


class Experts(nn.Module):
    """A layer with two experts, of which data chooses one, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.last(self.experts[which](self.first(x).tanh())).square().mean()


@dataclass(frozen=True)
class Run:
    """One model with its optimizer, and a loop's step over it."""

    model: nn.Module
    optimizer: Any
    scheduler: Any = None

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x, 0) if isinstance(self.model, Experts) else self.model(x)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(run: Run, x: torch.Tensor) -> torch.Tensor:
    loss = run.loss(x)
    loss.backward()
    run.step()
    return loss


def accumulated(run: Run, x: torch.Tensor) -> torch.Tensor:
    with zerofx.no_sync(run.model):
        run.loss(-x).backward()
    return plain(run, x)


def summed(run: Run, x: torch.Tensor) -> torch.Tensor:
    """Both backwards reduce."""
    run.loss(-x).backward()
    return plain(run, x)


def evaluated(run: Run, x: torch.Tensor) -> torch.Tensor:
    """Between backward and the step another batch is looked at."""
    loss = run.loss(x)
    loss.backward()
    with torch.no_grad():
        other = run.loss(2 * x)
    run.step()
    return loss.detach() + other


def inside(run: Run, x: torch.Tensor) -> torch.Tensor:
    loss = run.loss(x)
    with zerofx.step_in_backward(run.optimizer):
        loss.backward()
    return loss


def clipped(run: Run, x: torch.Tensor) -> torch.Tensor:
    loss = run.loss(x)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
    run.step()
    return loss


def on_own_stream(run: Run, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward on a stream of the user's, the step on the default one, which waits for it."""
    if x.device.type == "cpu":
        return plain(run, x)
    own, default = torch.Stream(x.device), torch.accelerator.current_stream()
    own.wait_stream(default)
    with own:
        loss = run.loss(x)
        loss.backward()
    join(default, own)
    run.step()
    return loss


def join(stream: torch.Stream, other: torch.Stream) -> None:
    stream.wait_stream(other)


def saved(run: Run, x: torch.Tensor) -> torch.Tensor:
    """What is saved in the background is the state as of the call, though training goes on; loading brings it back."""
    loss = plain(run, x)
    with shared_folder() as folder:
        saving = zerofx.save(folder, run.model, run.optimizer, background=True)
        plain(run, -x)
        saving.result()
        zerofx.load(folder, run.model, run.optimizer)
    return loss


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """One for all ranks, gone behind the block."""
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


def scheduled(run: Run, x: torch.Tensor) -> torch.Tensor:
    loss = plain(run, x)
    run.scheduler.step()
    return loss


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        optimizer: "zerofx" or "torch".
        stages: in which it can be.
        mesh: rows, and ranks of each.
        reduce_group: reductions have a process group of their own, so a stream.
        meta: the module is on the meta device, and initialised on this one.
        reads: the host needs what the device has computed.
        bound: how far losses may be from the CPU's. zerofx.AdamW is another kernel, and its last bit decides how a
            weight is rounded to a few bits.
    """

    step: Callable[[Run, torch.Tensor], torch.Tensor] = plain
    optimizer: str = "zerofx"
    model: type[nn.Module] = Layers
    options: dict[str, Any] = field(default_factory=dict)
    stages: Sequence[int] = (0, 1, 2, 3)
    max_grad_norm: float | None = None
    mesh: tuple[int, int] | None = None
    reduce_group: bool = False
    meta: bool = False
    reads: bool = False
    bound: float = 1e-5


BF16 = zerofx.MixedPrecision(torch.bfloat16, torch.float32)
ALL_ACTIVATIONS = zerofx.Offload(activations="cpu", smallest=1)

ON_HOST: dict[str, tuple[zerofx.Offload, Sequence[int]]] = {
    "gradients": (zerofx.Offload("cpu", gradients="cpu"), (1, 2, 3)),
    "weights": (zerofx.Offload("cpu", weights="cpu"), (3,)),
    "all": (zerofx.Offload("cpu", "cpu", "cpu", activations="cpu", smallest=1), (3,)),
}
"""What lives in the host's memory besides the optimizer's state, and in which stages that can be."""

HOWS: dict[str, dict[str, Any]] = {
    "": {},
    ", summed": {"step": summed},
    ", no_sync": {"step": accumulated},
    ", step_in_backward": {"step": inside},
    ", max_grad_norm": {"max_grad_norm": 0.01},
    ", clip_grad_norm_": {"step": clipped},
    ", a scheduler": {"step": scheduled},
    ", evaluated": {"step": evaluated},
    ", a graph break": {"model": Broken},
    ", a stream of the user's": {"step": on_own_stream},
    ", from the meta device": {"meta": True},
    ", saved in the background": {"step": saved},
    ", bfloat16": {"options": {"mixed_precision": BF16}, "bound": 2e-3},
    ", memory_budget": {"options": {"memory_budget": float("inf")}},
}
"""The ways to train with each of these."""

CASES = {
    "plain": Case(),
    "torch.optim": Case(optimizer="torch"),
    "no_sync": Case(accumulated),
    "step_in_backward": Case(inside),
    "step_in_backward, torch.optim": Case(inside, optimizer="torch", stages=(1, 2, 3)),
    "max_grad_norm": Case(max_grad_norm=0.01),
    "clip_grad_norm_": Case(clipped),
    "a scheduler": Case(scheduled),
    "bfloat16": Case(options={"mixed_precision": BF16}, bound=2e-3),
    "a graph break": Case(model=Broken),
    "a leaf module": Case(model=Experts, options={"leaf_modules": [Expert]}),
    "int8 on the wire": Case(
        options={"wire": zerofx.Wire(weights="int8", gradients="int8")}, stages=(1, 2, 3), bound=2e-3
    ),
    "a mesh of one row": Case(mesh=(1, 2)),
    "a mesh of two rows": Case(mesh=(2, 1)),
    "reductions apart": Case(reduce_group=True, stages=(1, 2, 3)),
    "a stream of the user's": Case(on_own_stream),
    "from the meta device": Case(meta=True),
    "saved in the background": Case(saved, reads=True),
    "memory_budget": Case(options={"memory_budget": float("inf")}, stages=(3,)),
    "state on the host": Case(options={"offload": "cpu"}, stages=(1, 2, 3), reads=True),
    "activations on the host": Case(options={"offload": ALL_ACTIVATIONS}),
    "activations and state on the host": Case(
        options={"offload": zerofx.Offload("cpu", activations="cpu", smallest=1)}, stages=(1, 2, 3), reads=True
    ),
    "activations on the host, no_sync": Case(accumulated, options={"offload": ALL_ACTIVATIONS}, stages=(3,)),
    "activations on the host, a graph break": Case(model=Broken, options={"offload": ALL_ACTIVATIONS}, stages=(2, 3)),
    "state on the host, step_in_backward": Case(inside, options={"offload": "cpu"}, stages=(1, 2, 3), reads=True),
    **{
        f"{what} on the host{how}": Case(
            stages=stages,
            reads=True,
            **case | {"options": {"offload": there, **case.get("options", {})}},
        )
        for what, (there, stages) in ON_HOST.items()
        for how, case in HOWS.items()
    },
}


def made(case: Case, stage: int, device: str) -> Run:
    torch.manual_seed(0)
    torch._dynamo.reset()
    options = dict(case.options)
    if device == "cpu" and "offload" in options:
        del options["offload"]  # it changes no number, and the CPU's memory is the host's
    if case.mesh is not None:
        options["mesh"] = dist.device_mesh.init_device_mesh(device, case.mesh, mesh_dim_names=("rows", "columns"))
    if case.reduce_group:
        options["reduce_group"] = dist.new_group()
    if case.meta:
        options["device"] = device
    with torch.device("meta" if case.meta else "cpu"):
        model = case.model()
    model = zerofx.compile(
        model if case.meta else model.to(device), stage=stage, executor="eager", groups=EACH_LAYER, **options
    )
    optimizer: torch.optim.Optimizer
    if case.optimizer == "zerofx":
        optimizer = zerofx.AdamW(model.parameters(), lr=1e-2, max_grad_norm=case.max_grad_norm)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Run(model, optimizer, scheduler if case.step is scheduled else None)


def batch(step: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(8, WIDTH, generator=generator).to(device)


def losses(case: Case, stage: int, device: str) -> list[float]:
    """Of all steps. They are read behind the last: until then the host waits for nothing that zerofx does not need."""
    run = made(case, stage, device)
    found = [case.step(run, batch(step, device)).detach() for step in range(STEPS)]
    return [x.item() for x in found]


def cases_of(stage: int) -> list[str]:
    return [name for name, case in CASES.items() if stage in case.stages]


def on_cpu(names: list[str], stage: int) -> dict[str, list[float]]:
    return {name: losses(CASES[name], stage, "cpu") for name in names}


def on_sim(names: list[str], stage: int, schedule: str) -> dict[str, list[float]]:
    with simulated(schedule):
        return {name: losses(CASES[name], stage, "sim") for name in names}


def host_waits(names: list[str], stage: int) -> dict[str, dict[str, int]]:
    """By case, how often the host waits in a step of which nobody reads a number, and what for."""
    from tests.accelerator import device

    found = {}
    with simulated("slow compute"):
        for name in names:
            case = CASES[name]
            run, x = made(case, stage, "sim"), batch(0, "sim")
            for _ in range(2):  # the tables of the optimizer are made
                case.step(run, x)
            device.take_host_waits()
            case.step(run, x)
            found[name] = device.take_host_waits()
    return found


def waits_apart(names: list[str], stage: int) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """By case, the same of forward and backward, and of the optimizer's step."""
    from tests.accelerator import device

    found = {}
    with simulated("slow compute"):
        for name in names:
            case = CASES[name]
            run, x = made(case, stage, "sim"), batch(0, "sim")
            for _ in range(2):
                case.step(run, x)
            device.take_host_waits()
            case.step(Run(run.model, Nothing()), x)
            before = device.take_host_waits()
            run.step()
            found[name] = before, device.take_host_waits()
    return found


class Nothing:
    """An optimizer that does nothing."""

    def step(self) -> None:
        pass

    zero_grad = step


def pinned(stage: int) -> tuple[int, ...]:
    """Bytes behind one step, behind three, with two forwards that wait for backwards; bytes of four layers' outputs."""
    with simulated("slow copies"):
        run, found = made(CASES["activations on the host"], stage, "sim"), []
        for step in range(3):
            plain(run, batch(step, "sim"))
            found.append(zerofx.memory_summary(run.model).pinned)
        both = [run.loss(batch(step, "sim")) for step in range(2)]
        found.append(zerofx.memory_summary(run.model).pinned)
        for loss in both:
            loss.backward()
    return found[0], found[2], found[3], 4 * 8 * WIDTH * 4


def refused_activations() -> tuple[str, str]:
    """What is said where a graph is captured, and where a hook copies what forward has saved."""
    with simulated("jitter"):
        run, x = made(CASES["activations on the host"], 3, "sim"), batch(0, "sim")
        captured = unittest.mock.PropertyMock(return_value=True)
        with unittest.mock.patch.object(AcceleratorCopies, "captured", captured):
            first = said(lambda: run.loss(x))
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            loss = run.loss(x)
        return first, said(loss.backward)


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@contextlib.contextmanager
def simulated(schedule: str, us: int = 300) -> Iterator[None]:
    """Few programs in the interpreter, small buffers, streams that are late."""
    from tests.accelerator import device
    from zerofx.kernels import norm
    from zerofx.runtime.state import staging

    with (
        unittest.mock.patch.object(norm, "PARTIAL_SUMS", 4),
        unittest.mock.patch.object(staging, "BUFFER", 1 << 13),
        device.schedule(schedule, us),
    ):
        yield
        torch.accelerator.synchronize()  # an error that a job has left would be the next test's
