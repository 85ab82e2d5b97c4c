"""The memory that a kernel takes and gives back inside of itself: found by running it once.

No operator says how much that is: it is up to the library behind it, to shapes, to threads. A convolution by oneDNN
reorders its weights into blocks. A product in bfloat16 may be packed. A sum of bfloat16 in float32 converts all of its
input first. So the kernel is run, by itself, on zeros of the shapes at hand::

    while it runs    + weights in blocks    + result    - weights in blocks
    live                   40,960            43,008           2,048
    workspace        43,008 - 2,048 = 40,960: the most there was, less what is left

A kernel that refuses zeros counts as one that takes nothing: lengths of ``ctc_loss`` must not be 0.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from zerofx import _torch
from zerofx._torch import pytree


@dataclass(frozen=True)
class _Zeros:
    """A tensor to be made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()


class Workspaces:
    """Kernels whose workspace is wanted. Those with the same operator, shapes and dtypes are run once, in `measure`.

    ``found``: what earlier ones have found, by kernel, and where this one's findings go.
    """

    def __init__(self, found: dict[Any, int] | None = None) -> None:
        self._found: dict[Any, int] = {} if found is None else found
        self._wanted: dict[Any, tuple[Callable[[], Any], list[Callable[[int], None]]]] = {}
        self._devices: set[torch.device] = set()

    def want(self, func: Any, args: Any, kwargs: Any, tell: Callable[[int], None]) -> None:
        """``tell`` will be called with the bytes that ``func`` takes inside. Holds on to none of its arguments."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not any(isinstance(x, torch.Tensor) for x in leaves):
            return tell(0)
        self._devices |= {x.device for x in leaves if isinstance(x, torch.Tensor)}
        leaves = [
            _Zeros(tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in leaves
        ]

        def make() -> tuple[Any, Any, Any]:
            args, kwargs = pytree.tree_unflatten([x.make() if isinstance(x, _Zeros) else x for x in leaves], spec)
            return func, args, kwargs

        key = func, str(spec), tuple(map(repr, leaves))
        self._wanted.setdefault(key, (make, []))[1].append(tell)

    def measure(self) -> None:
        """Run the kernels one after the other, and tell. Each has its arguments' and results' memory meanwhile."""
        with torch.no_grad(), _torch.with_numbers(), _generators_kept(self._devices):  # a graph may be traced meanwhile
            by_device: dict[str, list[Any]] = {}
            for key, (make, _) in self._wanted.items():
                if key in self._found:
                    continue
                func, args, kwargs = make()
                try:
                    func(*args, **kwargs)  # what is set up once, and kept, is not the kernel's
                except (RuntimeError, ValueError, IndexError):
                    self._found[key] = 0
                    continue
                tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
                by_device.setdefault(tensors[0].device.type, []).append((make, key))
                del func, args, kwargs, tensors
            for device, kernels in by_device.items():
                found = (_on_cpu if device == "cpu" else _on_accelerator)([make for make, _ in kernels])
                self._found.update((key, nbytes) for nbytes, (_, key) in zip(found, kernels, strict=True))
        for key, (_, tells) in self._wanted.items():
            for tell in tells:
                tell(self._found[key])
        self._wanted.clear()


def _generators_kept(devices: Iterable[torch.device]) -> contextlib.AbstractContextManager[None]:
    """What kernels draw inside changes no random number that is drawn later."""
    others = {device for device in devices if device.type != "cpu"}
    kind = next((device.type for device in others), "cuda")
    return torch.random.fork_rng([device.index or 0 for device in others], device_type=kind)


def _on_cpu(kernels: list[Callable[[], Any]]) -> list[int]:
    arguments: Any = None

    def bring(make: Callable[[], Any]) -> None:
        nonlocal arguments
        arguments = make()

    def run() -> Any:
        func, args, kwargs = arguments
        return func(*args, **kwargs)

    runs = [step for make in kernels for step in (lambda make=make: bring(make), run)]
    found = []
    for changes in _torch.allocations(runs)[1::2]:
        live = list(itertools.accumulate(changes, initial=0))
        found.append(max(live) - live[-1])
    return found


def _on_accelerator(kernels: list[Callable[[], Any]]) -> list[int]:
    found = []
    for make in kernels:
        func, args, kwargs = make()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        out = func(*args, **kwargs)
        torch.accelerator.synchronize()
        found.append(int(torch.accelerator.max_memory_allocated() - torch.accelerator.memory_allocated()))
        del out
    return found
