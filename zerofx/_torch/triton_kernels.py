"""Machine code for the Triton kernels of a wrapper that Inductor wrote, without a GPU: what registers it takes."""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from zerofx._torch.pretended_cuda import ARCHITECTURES, pretended_cuda


@dataclass(frozen=True)
class KernelText:
    """One kernel as Inductor wrote it: a module, and the name of the kernel in it."""

    name: str
    source: str

    @property
    def nameless(self) -> str:
        """The text without its name: two kernels that have it in common are one piece of code."""
        return re.sub(rf"\b{re.escape(self.name)}\b", "kernel", self.source)


@dataclass(frozen=True)
class MachineCode:
    """One way to launch a kernel, compiled by the ptxas that Triton brings.

    Attributes:
        kernel: its name.
        warps: of a program.
        registers: of a thread.
        spilled: bytes of memory that a thread has for what does not fit into its registers.
        cubin: bytes of machine code.
        error: why there is none; all others are 0 then.
    """

    kernel: str
    warps: int = 0
    registers: int = 0
    spilled: int = 0
    cubin: int = 0
    error: str = ""


def kernel_texts(code: str) -> list[KernelText]:
    """The Triton kernels of a wrapper (2.11, 2.13, 2.15)."""
    found = []
    for statement in ast.parse(code).body:
        match statement:
            case ast.Assign(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="async_compile"), attr="triton"),
                    args=[ast.Constant(value=str(name)), ast.Constant(value=str(source)), *_],
                )
            ):
                found.append(KernelText(name, source))
    return found


def machine_code(kernels: list[KernelText], architecture: str) -> list[MachineCode]:
    """Compile kernels for ``architecture``, each once per configuration that Inductor would choose from (2.11, 2.15).

    Where a kernel cannot be compiled, the reason is its ``error``.
    """
    found = []
    with pretended_cuda(architecture):
        for kernel in kernels:
            try:
                found += _compiled(kernel, ARCHITECTURES[architecture].capability)
            except Exception as e:
                found.append(MachineCode(kernel.name, error=f"{type(e).__name__}: {e}"))
    return found


def _compiled(kernel: KernelText, capability: int) -> list[MachineCode]:
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launcher = getattr(PyCodeCache.load(kernel.source), kernel.name)
    found = []
    for config in launcher.configs:
        meta = launcher._create_compile_meta(config)
        source = ASTSource(launcher.fn, meta["signature"], meta["constants"], meta["configs"][0])
        options = launcher._create_compile_options(config, meta)
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        found.append(MachineCode(kernel.name, options["num_warps"], **_usage(binary.asm["cubin"])))
    return found


def _usage(cubin: bytes) -> dict[str, Any]:
    """What cuobjdump says of a kernel. Triton takes all of a thread's stack for spills, and so does this."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    registers, stack, local = (re.search(rf"{word}:(\d+)", said) for word in ("REG", "STACK", "LOCAL"))
    assert registers is not None and stack is not None and local is not None, said
    return {"registers": int(registers[1]), "spilled": int(stack[1]) + int(local[1]), "cubin": len(cubin)}
