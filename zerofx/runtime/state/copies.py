"""Copies between a device and the host's memory, on two streams of their own: one for each direction.

::

    computing    gradients ●─────────────────────────────────────────● next reader of the weights
                           │ begin                               end │
    out                    └─ c0 ── c1 ── c2 ── ...                  │
    host                         c0    c1    c2     arithmetic       │
    back                            c0    c1    c2 ── ... ───────────┘

``begin``: what is copied out was written by the computing stream before. The host waits for a `Mark` before it reads
what came out. ``end``: the computing stream goes on after all copies, in either direction. docs/cuda.md has why this
is enough, and what breaks without each of them.

The computing stream is the one that is current. Another device is a class in a file of its own, and a line in `COPIES`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from zerofx.kernels.device import is_captured


class Mark(Protocol):
    """A place in the order of a stream."""

    def synchronize(self) -> None:
        """The host waits until all is done that the stream was given before."""


class Copies:
    """Of one device. A case overrides all of these."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def takes(cls, device: torch.device) -> bool:
        """Whether this device's memory is another than the host's, and copies to it are so."""
        raise NotImplementedError

    @property
    def captured(self) -> bool:
        """Whether what is put on the device now is noted, to be done later, instead of done."""
        raise NotImplementedError

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Bytes of the host that a copy may read and write while the host goes on. What is in them is anything."""
        raise NotImplementedError

    def begin(self) -> None:
        """What is copied out from now on is what the computing stream has written until now."""
        raise NotImplementedError

    def out(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy ``source``, on the device, ``into`` pinned memory. Both are 1-D, without gaps, of one dtype."""
        raise NotImplementedError

    def mark_out(self) -> Mark:
        """After all that has started to go out."""
        raise NotImplementedError

    def out_behind(self, mark: Mark) -> None:
        """What is copied out from now on is copied after ``mark``, of what goes back."""
        raise NotImplementedError

    def back(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy ``source``, in pinned memory, ``into`` memory of the device. Both as for `out`."""
        raise NotImplementedError

    def mark_back(self) -> Mark:
        """After all that has started to go back."""
        raise NotImplementedError

    def begin_back(self) -> None:
        """What is copied back from now on is copied after what the computing stream was given until now."""
        raise NotImplementedError

    def go_on_behind(self, mark: Mark) -> None:
        """What the computing stream is given from now on comes after ``mark``."""
        raise NotImplementedError

    def end(self) -> None:
        """What the computing stream is given from now on comes after all copies."""
        raise NotImplementedError


class AcceleratorCopies(Copies):
    """Between a GPU and pinned memory, by the streams that PyTorch has for accelerators of every kind.

    Attributes:
        kinds: of devices that are taken. Another one that has streams and pinned memory is a line.
    """

    kinds = ["cuda"]

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._out, self._back = self.stream(), self.stream()

    @classmethod
    def takes(cls, device: torch.device) -> bool:
        return device.type in cls.kinds

    @property
    def captured(self) -> bool:
        return is_captured(self.device)

    def stream(self) -> torch.Stream:
        return torch.Stream(self.device)

    def computing(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def begin(self) -> None:
        self._out.wait_event(self.computing().record_event())

    def out(self, into: torch.Tensor, source: torch.Tensor) -> None:
        with self._out:
            into.copy_(source, non_blocking=True)

    def mark_out(self) -> Mark:
        return self._out.record_event()

    def out_behind(self, mark: Mark) -> None:
        self._out.wait_event(mark)  # type: ignore[arg-type]  # it is an event

    def back(self, into: torch.Tensor, source: torch.Tensor) -> None:
        with self._back:
            into.copy_(source, non_blocking=True)

    def mark_back(self) -> Mark:
        return self._back.record_event()

    def begin_back(self) -> None:
        self._back.wait_event(self.computing().record_event())

    def go_on_behind(self, mark: Mark) -> None:
        self.computing().wait_event(mark)  # type: ignore[arg-type]  # it is an event

    def end(self) -> None:
        computing = self.computing()
        computing.wait_event(self._out.record_event())
        computing.wait_event(self._back.record_event())


COPIES: list[type[Copies]] = [AcceleratorCopies]
"""Every case. The first that takes a device is taken."""


def copies_of(device: torch.device) -> Copies | None:
    """How ``device`` and the host copy from each other; None: they have one memory, as a CPU has."""
    for case in COPIES:
        if case.takes(device):
            return case(device)
    return None
