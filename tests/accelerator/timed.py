"""How long a step takes on the simulated accelerator's clock: what computes, what is copied, and both.

::

    compute    ▐ a ▐ b ▐ c ▐ ...            copies take no time
    copies     ▐ a▐ b▐ c▐ ...               matrix products take none
    step       max(compute, copies), if each is under way while the other is

Of one and the same compiled module: rates change, and nothing else. The host takes no time on that clock, so neither
does the optimizer's arithmetic.
"""

from __future__ import annotations

import collections
import time
import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zerofx
from tests.accelerator import device
from zerofx.inspect.predict import calibrate
from zerofx.runtime.state import staging
from zerofx.runtime.state.copies import AcceleratorCopies

STEPS, WIDTH, TOKENS = 2, 64, 64
BUFFER = 1 << 15  # bytes: as the model is to 8 MiB, so that the optimizer's step is of many chunks
WAYS, PHASES = ("out", "back", "link"), ("forward", "backward", "step")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """The loss of blocks as a transformer has, without attention."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


class Training:
    """A module and its optimizer, warm."""

    def __init__(self, layers: int, tokens: int = TOKENS, **options: Any) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        groups = zerofx.Grouping(blocks=(Block,), min_bytes=0)
        self.model = zerofx.compile(Blocks(layers).to("sim"), executor="eager", groups=groups, **options)
        offload = options.get("offload")
        on_host = offload is not None and offload.optimizer is not None  # else kernels would be interpreted
        optimizer = zerofx.AdamW if on_host else torch.optim.SGD
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)
        self.busy: collections.Counter[tuple[str, str]] = collections.Counter()
        self.x = torch.randn(tokens, WIDTH).to("sim")
        for _ in range(2):
            self.step()

    def step(self) -> None:
        loss = self.model(self.x)
        self.phase("forward")
        loss.backward()
        self.phase("backward")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.phase("step")

    def phase(self, name: str) -> None:
        """What was put on the clock since the last call is of this phase."""
        for what, _, start, end in device.take_spans():
            kind = what if what in WAYS else "compute"
            self.busy[name, kind] += (end - start) / STEPS

    def seconds(self, *, paced: bool = False, **rates: float) -> float:
        """Of a step, one of several in a row, on the clock of ``rates``, or that have passed; and `busy` of it."""
        self.busy.clear()
        with device.rates(**rates, paced=paced):
            torch.accelerator.synchronize()
            device.take_spans()
            began = time.monotonic() if paced else device.now()
            for _ in range(STEPS):
                self.step()
            torch.accelerator.synchronize()
            return ((time.monotonic() if paced else device.now()) - began) / STEPS

    def least(self) -> float:
        """Seconds that a step cannot be under while each of its phases ends before the next one begins."""
        return sum(max(self.busy[phase, kind] for kind in ("compute", *WAYS)) for phase in PHASES)


def measured(
    layers: int, ratios: Sequence[float], options: dict[str, Any], paced: bool = False
) -> list[dict[str, float]]:
    """By ratio of copies to compute: seconds of each by itself, of a step, the `Training.least` of it, and how many
    times the longer of both it takes; and what `zerofx.predict` says.

    ``paced``: jobs really last as long, and seconds are those that have passed.
    """
    with unittest.mock.patch.object(staging, "BUFFER", BUFFER):
        training, found = Training(layers, **options), []
    flops, copied = training.seconds(flops=1.0), training.seconds(copied_bytes=1.0)
    for ratio in ratios:
        rates = {"flops": flops}, {"copied_bytes": copied / ratio}
        compute, copies = (training.seconds(**each, paced=paced) for each in rates)
        step = training.seconds(**rates[0], **rates[1], paced=paced)
        times = {"compute": compute, "copies": copies, "step": step, "least": training.least()}
        known = zerofx.Rates(flops, 1e30, 1e30, host_copy_bytes_per_s=copied / ratio)
        predicted = zerofx.predict(training.model, known)
        whole = (predicted.time_s or 0.0) + (predicted.optimizer_s or 0.0)
        found.append({"ratio": ratio, **times, "over": step / max(compute, copies), "predicted": whole})
    return found


def on_one_stream(layers: int, ratios: Sequence[float], options: dict[str, Any]) -> list[dict[str, float]]:
    """The same with copies on the computing stream."""
    with unittest.mock.patch.object(AcceleratorCopies, "stream", AcceleratorCopies.computing):
        return measured(layers, ratios, options)


def calibrated(copied_bytes: float) -> tuple[float, float | None, float | None]:
    """Bytes per second between device and host: what is found on the clock, and in all rates; and seconds, of a CPU."""
    clock = unittest.mock.patch.object(calibrate.time, "perf_counter", device.now)
    with device.rates(copied_bytes=copied_bytes), clock:
        found = 1 / calibrate._to_and_from_host(torch.device("sim"))
    return found, zerofx.calibrate(device="sim").host_copy_bytes_per_s, calibrate._to_and_from_host(torch.device("cpu"))
