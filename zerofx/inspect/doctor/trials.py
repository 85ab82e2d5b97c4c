"""What has to be tried: does generated code run, do two ranks train? Each trial is processes of its own.

So one that hangs or crashes is a line, too. All trials start together, and are stopped after a while::

    python -m zerofx.inspect.doctor.trials generated cpu            Inductor compiles a function, and it is right
    python -m zerofx.inspect.doctor.trials rank cpu gloo FILE 0     ┐ two ranks train in stage 3, and arrive at what
    python -m zerofx.inspect.doctor.trials rank cpu gloo FILE 1     ┘ one process arrives at

The last line that a process prints is what was found.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zerofx.compiler.api import compile
from zerofx.inspect.doctor.looks import Finding
from zerofx.model.grouping import Grouping
from zerofx.runtime.optim.adamw import AdamW

RANKS = 2


@dataclass
class Trial:
    """One trial.

    Attributes:
        name: of its line.
        what: is tried, in a few words.
        commands: the arguments of each process.
        do: what to do when it fails.
        folder: where its processes write.
    """

    name: str
    what: str
    commands: Sequence[Sequence[str]]
    do: str
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start the processes, which find zerofx where this one did."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for i, command in enumerate(self.commands):
            with (self.folder / f"{self.name}-{i}.log").open("wb") as log:
                whole = [sys.executable, "-m", __spec__.name, *command]
                self.processes.append(subprocess.Popen(whole, stdout=log, stderr=log, env=environment))

    def finish(self, deadline: float) -> Finding:
        """Wait until ``deadline`` of `time.monotonic`, and end what still runs then."""
        hung = []
        for i, process in enumerate(self.processes):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                hung.append(i)
        self.stop()
        said = [self._last_line(i) for i in range(len(self.processes))]
        if hung:
            where = ", ".join(f"process {i}: {said[i] or 'silent'}" for i in hung)
            busy = f"the machine is busy (load {os.getloadavg()[0]:.0f}): --timeout 300s gives it longer. If not: "
            return Finding(
                self.name, "FAILS", f"{self.what}: not through in time ({where})", busy * _is_busy() + self.do
            )
        failed = [i for i, process in enumerate(self.processes) if process.returncode]
        if failed:
            where = "; ".join(f"process {i}: {said[i] or f'exit {self.processes[i].returncode}'}" for i in failed)
            return Finding(self.name, "FAILS", f"{self.what}: {where}", self.do)
        return Finding(self.name, "ok", f"{self.what}: {said[0]}")

    def stop(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _last_line(self, i: int) -> str:
        lines = (self.folder / f"{self.name}-{i}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""


def _is_busy() -> bool:
    return os.getloadavg()[0] > 2 * (os.cpu_count() or 1)


def trials(folder: Path) -> list[Trial]:
    """What is to be tried on this machine; ``folder`` is empty, and stays until the end."""
    found = [_generated("cpu", folder), _ranks("cpu", "gloo", folder)]
    if torch.cuda.is_available():
        found.append(_generated("cuda", folder))
        if torch.cuda.device_count() >= RANKS and dist.is_nccl_available():
            found.append(_ranks("cuda", "nccl", folder))
    return found


def _generated(device: str, folder: Path) -> Trial:
    do = {
        "cpu": 'install g++ and Python\'s headers (python3-dev), or set CXX; until then, pass executor="eager"',
        "cuda": "look at the lines gpu and triton; a C compiler is needed too, which Triton builds its launcher with",
    }[device]
    return Trial(f"code {device}", f"what Inductor generates for {device}", [["generated", device]], do, folder)


def _ranks(device: str, backend: str, folder: Path) -> Trial:
    do = {
        "gloo": "set GLOO_SOCKET_IFNAME to the network interface by which ranks reach each other: lo on one machine",
        "nccl": "run it with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 and NCCL_SOCKET_IFNAME say where it hangs",
    }[backend]
    commands = [["rank", device, backend, str(folder / backend), str(rank)] for rank in range(RANKS)]
    return Trial(f"ranks {backend}", f"{RANKS} ranks train by {backend}", commands, do, folder)


def _try_generated(device: str) -> str:
    """In this process: a function, compiled and run."""
    start = time.monotonic()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 2 - 1).sum()

    x = torch.linspace(-1, 1, 4096, device=device)
    compiled, plain = torch.compile(function)(x), function(x)
    if not torch.allclose(compiled, plain):
        raise RuntimeError(f"it computes {compiled.item()} where PyTorch computes {plain.item()}")
    return f"right, after {time.monotonic() - start:.1f} s"


def _try_rank(device: str, backend: str, file: str, rank: int) -> str:
    """In this process: one rank of two that train in stage 3, beside one process that trains on the whole batch."""
    start = time.monotonic()
    torch.set_num_threads(1)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    store = dist.FileStore(file, RANKS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=40))
    batch = torch.linspace(-1, 1, 8 * RANKS, device=where).view(RANKS, 2, 4)
    alone = _train(_model(where), batch.flatten(0, 1), sharded=False)
    together = _train(_model(where), batch[rank], sharded=True)
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()
    return f"equal to one process, after {time.monotonic() - start:.1f} s"


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 3)).to(device)


def _train(model: nn.Module, batch: torch.Tensor, *, sharded: bool) -> list[torch.Tensor]:
    """Two steps; the weights after them."""
    if sharded:
        compile(model, stage=3, executor="eager", groups=Grouping(min_bytes=0))
        optimizer: torch.optim.Optimizer = AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if sharded else p.detach() for p in model.parameters()]  # type: ignore[attr-defined]


def main(arguments: Sequence[str]) -> int:
    """One process of a trial."""
    kind, device, *rest = arguments
    try:
        said = _try_generated(device) if kind == "generated" else _try_rank(device, rest[0], rest[1], int(rest[2]))
    except Exception as e:  # the last line says what it was
        print(f"{type(e).__name__}: {' '.join(str(e).split())}", flush=True)
        return 1
    print(said, flush=True)
    return 0


def folder() -> tempfile.TemporaryDirectory[str]:
    """Where trials write."""
    return tempfile.TemporaryDirectory(prefix="zerofx-doctor-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
