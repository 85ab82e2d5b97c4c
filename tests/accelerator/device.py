"""A device that is not there, with streams that are: ``torch.device("sim")``, for processes that import this file.

::

    x = torch.ones(4, device="sim")      a job on the current stream; the host goes on
    x.item()                             the host waits, and that is counted: `host_waits`
    _kernel[grid](x)                     Triton's interpreter, as a job on that stream

There are two devices, ``sim:0`` and ``sim:1``. What streams, memory and operators do is in ``csrc``. A *schedule* makes
some streams slow, so that what is not ordered happens in another order: see `schedule`.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tests.accelerator.build import loaded
from zerofx.kernels.device import TRITON
from zerofx.runtime.state.copies import AcceleratorCopies

_sim: Any = loaded()
NAME = "sim"
DEVICES: int = _sim.devices

SCHEDULES = ("slow compute", "slow link", "slow copies", "jitter")
"""Jobs are late: those of the default streams; of process groups; of streams that a program has made; all by chance."""


def _register() -> None:
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")

    class device:
        def __init__(self, index: Any) -> None:
            self.index = torch.device(NAME, index).index if isinstance(index, int) else torch.device(index).index

        def __enter__(self) -> None:
            self.before = torch.accelerator.current_device_index()
            torch.accelerator.set_device_index(self.index)

        def __exit__(self, *error: Any) -> None:
            torch.accelerator.set_device_index(self.before)

    vars(module).update(
        device=device,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        device_count=lambda: DEVICES,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        synchronize=torch.accelerator.synchronize,
        manual_seed=lambda seed: None,  # random numbers are the CPU's
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=0: torch.get_rng_state(),
        set_rng_state=lambda state, device=0: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    TRITON.append(NAME)
    AcceleratorCopies.kinds.append(NAME)


_register()


def is_ours(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == NAME


def as_host(x: Any) -> Any:
    """The same memory as a tensor of the CPU, for jobs. It holds nothing. Whatever is no tensor of the device stays."""
    return _sim.as_host(x.detach()) if is_ours(x) else x


# ---- streams --------------------------------------------------------------------------------------------------------

push = _sim.push
"""``push(stream, call, link_bytes=0)``: give a stream a job. Streams go by their number."""
new_stream = _sim.new_stream
place = _sim.place
wait_for = _sim.wait_for
synchronize = _sim.synchronize
take_host_waits = _sim.take_host_waits
now = _sim.now
"""Seconds, on the clock of `rates`."""
take_spans = _sim.take_spans
"""What took time there: ``(what, stream, start, end)`` of operators by name, "out", "back" and "link"."""
reset_peak = _sim.reset_peak


class InUse(NamedTuple):
    """Bytes in use now, and the most since `reset_peak`: of blocks, which are multiples of 512, and asked for."""

    blocks: int
    most_blocks: int
    asked: int
    most_asked: int


def in_use() -> InUse:
    """Of all devices."""
    return InUse(*_sim.in_use())


def current_stream() -> int:
    return _sim.current_stream(torch.accelerator.current_device_index())


@contextlib.contextmanager
def schedule(name: str, us: int = 300) -> Iterator[None]:
    """Streams are late inside: see `SCHEDULES`. ``us``: by how many microseconds a job."""
    _sim.set_delays(*(us if name == slow else 0 for slow in SCHEDULES))
    try:
        yield
    finally:
        _sim.set_delays(0, 0, 0, 0)


@contextlib.contextmanager
def rates(flops: float = 0, copied_bytes: float = 0, link_bytes: float = 0, *, paced: bool = False) -> Iterator[None]:
    """What jobs take on the clock, per second; 0: any number in no time. ``paced``: they really last as long.

    Matrix products take time by their ``flops``, all other operators none. Copies between the device and the host take
    it by their bytes, each on its stream.
    """
    _sim.set_rates(flops, copied_bytes, link_bytes, paced)
    try:
        yield
    finally:
        _sim.set_rates(0, 0, 0, False)


# ---- kernels in Triton ----------------------------------------------------------------------------------------------


def _launch_as_jobs() -> None:
    """Triton's interpreter copies tensors to the host and computes at once. On the device it is a job instead."""
    import numpy
    from triton.runtime.interpreter import GridExecutor

    one_at_a_time, interpret = threading.Lock(), GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        if not any(map(is_ours, [*args, *kwargs.values()])):
            return interpret(self, *args, **kwargs)
        on_host = [as_host(x) for x in args]
        named = {name: as_host(x) for name, x in kwargs.items()}

        def job() -> None:
            with (
                one_at_a_time,
                numpy.errstate(all="ignore"),
            ):  # the interpreter keeps the place in the grid in one variable
                interpret(self, *on_host, **named)

        push(current_stream(), job)

    GridExecutor.__call__ = launch


with contextlib.suppress(ImportError):  # without Triton there are no kernels to launch
    _launch_as_jobs()
