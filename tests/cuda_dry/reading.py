"""What CUDA code that was written says of itself, beside what the verifier of generated code has found to hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from zerofx.compiler.records import Trace
from zerofx.passes.proof.code.line import Line
from zerofx.passes.proof.code.wrapper import Walk, Wrapper


@dataclass
class Facts:
    """Of one wrapper.

    Attributes:
        triton, extern, operators: launches of Triton's kernels, of ATen's with ``out=``, of ATen's operators.
        collectives: how many start.
        ahead: how many of these have something computed between their start and their wait.
        unknown: what is called that the reader knows nothing of, and takes to read and write all that it is given.
    """

    triton: int
    extern: int
    operators: int
    collectives: int
    ahead: int
    unknown: dict[str, int]


def facts(trace: Trace) -> dict[str, Any]:
    """`Facts` of the code of ``trace``."""
    assert trace.code is not None
    walk = Walk(Wrapper(trace.code))
    lines = list(walk.lines())
    launches = Counter(_kind(line) for line in lines)
    unknown = Counter(line.name for line in lines if line.kind == "call" and not line.sure)
    starts = [i for i, line in enumerate(lines) if line.kind == "start"]
    ahead = sum(_computes(lines, i) for i in starts)
    found = Facts(launches["triton"], launches["extern"], launches["operator"], len(starts), ahead, dict(unknown))
    return asdict(found)


def _kind(line: Line) -> str:
    if line.kind != "call":
        return line.kind
    if line.kernel is not None:
        return "triton"
    return "extern" if line.name.startswith("extern_kernels.") else "operator" if line.name.startswith("aten.") else ""


def _computes(lines: list[Line], start: int) -> bool:
    """Whether anything is computed between a start and the wait for it."""
    brings = set(lines[start].writes) | {lines[start].result} - {None}
    for line in lines[start + 1 :]:
        if line.kind == "wait" and not brings.isdisjoint(line.reads):
            return False
        if _kind(line) in ("triton", "extern", "operator"):
            return True
    return False
