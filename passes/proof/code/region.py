"""The rule of a region's code: it reads what it is given, and writes to memory of its own.

A region (`zerofx.compiler.regional`) has no collective, no wait and no discard in it: these run outside, one by one, as
the proved graph has them. What its code could still do wrong is write to memory that others have: weights, what is
being sent, what forward saved. So every line of the wrapper is read, as `zerofx.passes.proof.code.rules` does::

    arg0, arg1 = args                                        two memories, "input 0" and "input 1"
    buf0 = empty_strided_cpu(…)                              memory of its own
    extern_kernels.mm(arg0, arg1, out=buf0)                  reads two, writes one       sound
    cpp_fused_gelu_0(arg1)                                   writes to input 1           refused
    torch.ops._c10d_functional.wait_tensor.default(arg0)     a wait                      refused
"""

from __future__ import annotations

from torch.fx import Node

from zerofx.passes.proof.code.wrapper import Walk, Wrapper
from zerofx.passes.proof.refusal import refuse


def check_region(code: str, node: Node) -> bool:
    """Check what was generated for a region.

    Args:
        code: the module that Inductor wrote.
        node: of the graph, the region's first; an error names its line of the model.

    Returns:
        Whether there was a function ``call`` in Python to read; with ``cpp_wrapper`` there is none.

    Raises:
        zerofx.VerificationError: it writes to an input, starts or waits for something, or reads what is not there.
    """
    wrapper = Wrapper(code)
    if wrapper.call is None:
        return False
    walk = Walk(wrapper)
    for line in walk.lines():
        written = line.writes & frozenset(walk.inputs)
        if line.kind not in ("call", "return"):
            refuse("region", node, f"its code has a {line.kind!r}, in {line.text.strip()!r}", "computing alone")
        if written and line.sure:
            refuse("region", node, f"its code writes to an input, in {line.text.strip()!r}", "memory of its own")
    return True
