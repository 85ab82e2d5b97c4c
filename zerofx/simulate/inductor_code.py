"""Inductor's generated code, made to run on fake tensors.

What Inductor writes is a Python module: kernels as text, and a function ``call`` that allocates, launches and frees::

    cpp_fused_gelu_3 = async_compile.cpp_pybinding([...], '''...''')     a name, and which arguments it writes
    def call(self, args):
        primals_1, shard_a = args
        args.clear()
        buf0 = torch.ops.zerofx.all_gather_pairwise.default(shard_a, 2, '0')     runs as it is
        buf1 = empty_strided_cpu((96, 64), (64, 1), torch.float32)               makes a fake tensor
        extern_kernels.mm(primals_1, reinterpret_tensor(buf0, …), out=buf1)      is noted
        del buf0                                                                 frees the fake tensor
        cpp_fused_gelu_3(buf1)                                                   is noted
        return (buf1, )

Only ``call`` runs. Nothing is compiled, and no kernel is looked into but for its signature.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import torch

from zerofx.simulate.recorder import Recorder


def load(code: str, recorder: Recorder) -> Callable[[list[Any]], Any]:
    """The boxed function ``call`` of ``code``: takes fake tensors, tells ``recorder`` what it does.

    Raises:
        RuntimeError: the module has no such function.
    """
    namespace: dict[str, Any] = {"__name__": "inductor_code"}
    for statement in ast.parse(code).body:
        kernel = _kernel_source(statement)
        if kernel is not None:
            name, source = kernel
            namespace[name] = _Kernel(name, source, recorder)
        elif _is_needed(statement):
            exec(compile(ast.Module([statement], []), "<inductor>", "exec"), namespace)
    for name in namespace:
        if name.startswith("assert_"):
            namespace[name] = _nothing
        elif name.startswith("empty_strided_"):
            namespace[name] = _empty_on(name.removeprefix("empty_strided_").removesuffix("_pinned"))
    namespace |= {"reinterpret_tensor": _reinterpret, "extern_kernels": _ExternKernels(recorder)}
    if "call" not in namespace:
        raise RuntimeError("Inductor's code has no function 'call': this version of PyTorch writes it in another way.")
    return namespace["call"]


class _Kernel:
    """A kernel that Inductor wrote. Arguments that it only reads are ``in_ptr``, in the signature's order."""

    def __init__(self, name: str, source: str, recorder: Recorder) -> None:
        self.name, self.recorder = name, recorder
        self.pointers = list(dict.fromkeys(re.findall(r"\b(?:in_out|in|out)_ptr\d+", source)))

    def __call__(self, *args: Any) -> None:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        out = [x for x, pointer in zip(tensors, self.pointers) if not pointer.startswith("in_ptr")]
        self.recorder.kernel(self.name, None, tensors, {}, out)

    def run(self, *args: Any, **launch: Any) -> None:
        """How Triton's kernels are called."""
        self(*args)


class _ExternKernels:
    """``extern_kernels.mm(a, b, out=c)``: ATen's, with an output that is there already, or returned."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __getattr__(self, name: str) -> Callable[..., Any]:
        packet = getattr(torch.ops.aten, {"bias_addmm": "addmm"}.get(name, name), None)

        def run(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
            if out is None:
                if packet is None:
                    raise RuntimeError(f"extern_kernels.{name} returns a tensor of a shape that is not known.")
                return packet(*args, **kwargs)  # the recorder sees it
            self.recorder.kernel(name, packet, args, kwargs, out)
            return out

        return run


def _kernel_source(statement: ast.stmt) -> tuple[str, str] | None:
    """Name and text of ``name = async_compile.<language>(…)``."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)],
            value=ast.Call(func=ast.Attribute(value=ast.Name(id="async_compile")), args=args),
        ):
            texts = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            return name, max(texts, key=len, default="")
    return None


def _is_needed(statement: ast.stmt) -> bool:
    match statement:
        case (
            ast.FunctionDef(name="get_args" | "benchmark_compiled_module")
            | ast.Assign(targets=[ast.Name(id="async_compile")])
        ):
            return False
    return isinstance(statement, (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.ClassDef))


def _empty_on(device: str) -> Callable[..., torch.Tensor]:
    def empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    return empty


def _reinterpret(x: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    return torch.as_strided(x, shape, stride, x.storage_offset() + offset)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
