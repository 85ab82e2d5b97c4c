"""A CUDA device that is not there: all that PyTorch, Inductor and Triton ask a driver for while they write code.

::

    with pretended_cuda("sm_90") as device:      device.stands_in(tensor): a CPU tensor that tracers take for a CUDA one
        torch.compile(...)                       Inductor writes a wrapper and Triton kernels; nothing can run

What stands in for what:

=============================  =====================================================================================
asked                          answered
=============================  =====================================================================================
is there a device? which?      one, with the properties of `ARCHITECTURES`
tensors on it                  none are ever made. A tensor on the CPU stands in; tracers see it on ``cuda:0``
streams, random state          the default stream, which nobody captures; a state that is never used
autograd of fake tensors       the engine in C++ asks for streams: python_engine.py
the kernel for attention       chosen by shapes and dtypes: pretended_attention.py
Triton's driver                the architecture alone
constants that Inductor folds  are computed on the CPU
what Inductor would measure    nothing is: products are not padded (`shape_padding`)
=============================  =====================================================================================

All is put back at the end: answers that were cached inside are forgotten, and those cached before are asked for anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import types
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch

from zerofx._torch.pretended_attention import pretended_attention
from zerofx._torch.python_engine import gradients
from zerofx._torch.tensors import TorchDispatchMode, pytree


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a device says of itself: the attributes of ``torch.cuda.get_device_properties`` that code depends on."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
    total_memory: int = 80 << 30
    regs_per_multiprocessor: int = 65536
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    shared_memory_per_block: int = 49152
    shared_memory_per_multiprocessor: int = 0
    clock_rate: int = 1_410_000
    memory_clock_rate: int = 1_593_000
    memory_bus_width: int = 5120
    gcnArchName: str = ""
    uuid: str = "GPU-pretended"

    @property
    def capability(self) -> int:
        """80 of sm_80."""
        return 10 * self.major + self.minor


ARCHITECTURES = {
    "sm_80": Architecture("NVIDIA A100-SXM4-80GB", 8, 0, 108, 40 << 20, 166912),
    "sm_90": Architecture("NVIDIA H100 80GB HBM3", 9, 0, 132, 50 << 20, 232448),
}
"""The devices that code can be written for."""


class PretendedDevice:
    """The device of `pretended_cuda`, and the tensors that stand in for tensors on it."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no other comes to lie at its address

    def stands_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tracers take ``tensor``, and all that shares its memory, to be on the device from now on; returns it."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._storages


def require_cuda_build() -> None:
    """Raise where this PyTorch cannot even make fake CUDA tensors.

    Raises:
        RuntimeError: it is a build for the CPU, or has no Triton.
    """
    if torch.version.cuda is None:
        raise RuntimeError(
            f"device='cuda' needs PyTorch's CUDA build, with or without a GPU: torch {torch.__version__} is built for "
            f"the CPU, and cannot make fake CUDA tensors. In an environment of its own: pip install "
            f"torch=={torch.__version__.partition('+')[0]} --index-url https://download.pytorch.org/whl/cu130; "
            "`make cuda-dry` makes one."
        )
    try:
        importlib.import_module("triton")
    except ImportError as e:
        raise RuntimeError("device='cuda' needs Triton, which Inductor writes kernels in: pip install triton") from e


@contextlib.contextmanager
def pretended_cuda(architecture: str) -> Iterator[PretendedDevice]:
    """Inside, code is written for a device of ``architecture`` (2.11, 2.15). Nothing may run on it.

    Raises:
        RuntimeError: see `require_cuda_build`.
    """
    require_cuda_build()
    properties, device = ARCHITECTURES[architecture], PretendedDevice()
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_answers)
        for owner, name, value in _stubs(properties, device):
            stack.enter_context(unittest.mock.patch.object(owner, name, value))
        stack.enter_context(_inductor_config())
        stack.enter_context(_triton_driver(properties))
        stack.enter_context(pretended_attention())
        _forget_answers()
        torch._C._ensureCUDADeviceGuardSet()  # nothing, where there is a device
        yield device


def _stubs(properties: Architecture, device: PretendedDevice) -> list[tuple[Any, str, Any]]:
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor
    from torch._subclasses.meta_utils import MetaTensorDescriber

    facts: dict[str, Any] = {
        "get_device_properties": lambda device=None: properties,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "synchronize": lambda device=None: None,
        "exchange_device": lambda device: 0,
        "maybe_exchange_device": lambda device: 0,
    }
    more: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "_lazy_init": lambda: None,
    }
    private = {f"_{name}": facts[name] for name in ("exchange_device", "maybe_exchange_device")}
    public = {name: value for name, value in facts.items() if f"_{name}" not in private}
    stubs: list[tuple[Any, str, Any]] = [(torch.cuda, name, value) for name, value in (public | private | more).items()]
    stubs += [(device_interface.CudaInterface, name, staticmethod(value)) for name, value in facts.items()]
    stubs += [
        (device_interface, "caching_worker_device_properties", {}),
        (device_interface, "caching_worker_current_devices", {}),
        (torch.accelerator, "is_available", lambda: False),  # else Dynamo asks it for streams
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (fake_tensor.FakeTensorMode, "avoid_device_init", True),
        (MetaTensorDescriber, "describe_tensor", _on_the_device(MetaTensorDescriber.describe_tensor, device)),
        (torch.autograd, "grad", _without_streams(torch.autograd.grad)),
    ]
    folder = joint_graph.UniformValueConstantFolder
    stubs += [
        (folder, name, _on_the_cpu(getattr(folder, name))) for name in ("_deduce_value", "_add_peephole_patterns")
    ]
    return stubs


def _on_the_device(theirs: Any, device: PretendedDevice) -> Any:
    """``theirs``, but of a tensor that stands in: it is on ``cuda:0``. Fake tensors are made from what it says."""

    @functools.wraps(theirs)
    def describe(self: Any, t: torch.Tensor, **options: Any) -> Any:
        description = theirs(self, t, **options)
        if description.storage is None or not device.has(t):
            return description
        return dataclasses.replace(description, device=torch.device("cuda", 0))

    return describe


def _without_streams(theirs: Any) -> Any:
    """``torch.autograd.grad`` as AOTAutograd calls it, of tensors on the device."""

    @functools.wraps(theirs)
    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        if not any(x.is_cuda for x in outputs) or options.keys() - {"allow_unused"}:
            return theirs(outputs, inputs, grad_outputs, **options)
        given = [torch.ones_like(x) for x in outputs] if grad_outputs is None else grad_outputs
        return gradients(outputs, inputs, given, _traced_as_backward)

    return grad


@contextlib.contextmanager
def _traced_as_backward(node: Any) -> Iterator[None]:
    """What AOTAutograd's hooks do around a node of the autograd graph: operators get the line of their forward's."""
    from torch.fx import traceback

    mark, reset = (getattr(traceback, name, lambda: None) for name in _MARKS)
    stack = list(node.metadata.get("traceback_", ()))
    traceback.set_stack_trace(stack)
    traceback.set_grad_fn_seq_nr(node._sequence_nr())
    mark()
    try:
        yield
    finally:
        traceback.set_stack_trace([*stack, traceback.GRADIENT_ACC_SPECIAL_STACK])
        traceback.reset_grad_fn_seq_nr()
        reset()


_MARKS = ("_mark_autograd_backward", "_reset_autograd_backward")
"""Not in 2.11."""


def _on_the_cpu(theirs: Any) -> Any:
    """``theirs``, which computes the values of constants on the device that they are for: here, on the CPU."""

    @functools.wraps(theirs)
    def fold(*args: Any) -> Any:
        with _ConstantsOnTheCPU():
            return theirs(*args)

    return fold


class _ConstantsOnTheCPU(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def on_the_cpu(x: Any) -> Any:
            return torch.device("cpu") if isinstance(x, torch.device) else x

        args, kwargs = pytree.tree_map(on_the_cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


def _inductor_config() -> contextlib.AbstractContextManager[Any]:
    """No other process, which would not know of all this; nothing cached; nothing measured."""
    import torch._inductor.config

    return torch._inductor.config.patch(
        compile_threads=1, fx_graph_cache=False, autotune_local_cache=False, shape_padding=False
    )


@contextlib.contextmanager
def _triton_driver(properties: Architecture) -> Iterator[None]:
    """Triton's driver: it can say what it drives, and launch nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    facts = {
        "max_shared_mem": properties.shared_memory_per_block_optin,
        "multiprocessor_count": properties.multi_processor_count,
        "max_num_regs": properties.regs_per_multiprocessor,
        "warpSize": properties.warp_size,
    }
    pretended = types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda device: facts),
        get_current_target=lambda: GPUTarget("cuda", properties.capability, properties.warp_size),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_device_interface=lambda: torch.cuda,
    )
    before = driver._active
    driver.set_active(pretended)
    try:
        yield
    finally:
        driver._active = before


def _forget_answers() -> None:
    """Forget what was cached of the device."""
    from torch._inductor.runtime.hints import DeviceProperties

    DeviceProperties.create.cache_clear()
    for name in _ASKING:
        for function in vars(importlib.import_module(name)).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


_ASKING = ("torch.utils._triton", "torch._inductor.utils", "torch._inductor.comm_analysis")
"""Modules whose functions ask for the device once."""
