"""A rewritten graph as text: one line per collective, the user's own operations folded by source line between them.

::

    forward: 3 all-gathers bring 212.6 kB, at most 146.2 kB of it at once
      start    embed            13.1 kB
      start    blocks.0        133.1 kB
      wait     embed
               model.py:12        embedding                            x = self.embed(tokens)
      discard  embed
      ...
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from torch.fx import Graph, Node

from zerofx._torch import OpOverload
from zerofx.layout import GroupLayout

if TYPE_CHECKING:
    from zerofx.records import Trace

_VERBS = {
    "all_gather": "start",
    "wait": "wait",
    "discard": "discard",
    "reduce_scatter": "reduce",
    "wait_grad": "reduced",
}
_SILENT = frozenset(
    """
    getitem view permute t transpose expand unsqueeze squeeze select slice as_strided alias detach reshape
    full _unsafe_view split unbind
    """.split()
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)[^\n]*\n([^\n]*)')


def format_trace(trace: Trace) -> str:
    """The graph after ``discard``: everything that zerofx put in, and what of the user's stands between."""
    graph = trace.after("discard").graph
    layouts = {layout.name: layout for layout in trace.context.shards}
    layouts |= {reduction.layout.name: reduction.layout for reduction in trace.context.reductions}
    width = max((len(name) for name in layouts), default=0)
    return "\n".join([_header(trace, layouts), *_body(graph, layouts, width)])


def format_bytes(n: float) -> str:
    """``n`` bytes in the largest unit that leaves a number of at least 1 (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.1f} {unit}" if unit != "B" else f"{n:.0f} B"
        n /= 1000
    return f"{n:.1f} TB"


def _header(trace: Trace, layouts: dict[str, GroupLayout]) -> str:
    ctx = trace.context
    gathered = sum(layout.nbytes for layout in ctx.shards if layout.world_size > 1)
    gathers = sum(layout.world_size > 1 for layout in ctx.shards)
    most = format_bytes(ctx.gathered_bytes)
    parts = [f"{gathers} all-gathers bring {format_bytes(gathered)}, at most {most} at once"]
    reduced = [r.layout for r in ctx.reductions if r.layout.world_size > 1]
    if reduced:
        parts.append(f"{len(reduced)} reduce-scatters take {format_bytes(sum(layout.nbytes for layout in reduced))}")
    return f"{ctx.phase}: {'; '.join(parts)}"


def _body(graph: Graph, layouts: dict[str, GroupLayout], width: int) -> list[str]:
    lines: list[str] = []
    place = ""  # the run of the user's operations being folded, and where they come from
    ops: list[str] = []

    def flush() -> None:
        if ops:
            where, _, code = place.partition("\0")
            lines.append(f"           {where:<24} {_count(ops):<44} {code}".rstrip())
            ops.clear()

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        tag = node.meta.get("zerofx")
        if tag is None:
            name = _operator_name(node)
            if name in _SILENT:
                continue
            here = _place(node)
            if here != place:
                flush()
                place = here
            ops.append(name)
        elif tag.kind in _VERBS:
            flush()
            size = ""
            if tag.kind in ("all_gather", "reduce_scatter"):
                size = f"{format_bytes(layouts[tag.group].nbytes):>10}"
            lines.append(f"  {_VERBS[tag.kind]:<8} {tag.group:<{width}} {size}".rstrip())
    flush()
    return lines


def _operator_name(node: Node) -> str:
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", str(node.target))


def _place(node: Node) -> str:
    """``file:line\0code`` of the innermost frame of the user's that made ``node``."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line, code = frames[-1]
    return f"{Path(file).name}:{line}\0{code.strip()}"


def _count(ops: list[str]) -> str:
    """``mm, mm, add`` as ``mm ×2, add``, in order of first appearance."""
    counts: dict[str, int] = {}
    for op in ops:
        counts[op] = counts.get(op, 0) + 1
    return ", ".join(op if n == 1 else f"{op} ×{n}" for op, n in counts.items())
