"""A rewritten graph as text: one line per collective, the user's own operations folded by source line between them.

::

    forward: 3 all-gathers: 212.6 kB, at most 146.2 kB of it at once
      start    embed            13.1 kB
      start    blocks.0        133.1 kB
      wait     embed
               model.py:12        embedding                            x = self.embed(tokens)
      discard  embed
      ...

Layers that look alike are shown once: of a hundred blocks the first, and how many follow. Lines end at `WIDTH`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch.fx import Graph, Node

from zerofx.compiler.listing import operator_name
from zerofx.compiler.rewriting import Rewriting
from zerofx.model.offload import names_of
from zerofx.model.units import format_bytes
from zerofx.passes import edit
from zerofx.passes.context import Tag
from zerofx.passes.kinds import NODE_KINDS, kind_of
from zerofx.runtime.state.account import AtRest

_SILENT = frozenset(
    """
    getitem view permute t transpose expand unsqueeze squeeze select slice as_strided alias detach reshape
    full _unsafe_view split unbind
    """.split()
)
WIDTH = 120
_PLACE, _OPS = 24, 44
ALIKE = 3
"""Layers in a row that look alike; of more, all but the first are folded."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+)[^\n]*\n([^\n]*)')


def format_trace(trace: Rewriting, fold: bool = True) -> str:
    """The graph before `lower`: everything that zerofx put in, and what of the user's stands between.

    ``fold``: show layers that look alike once.
    """
    graph = trace.before_lower().graph
    collectives = edit.tagged(graph, *_verbs())
    width = max((len(node.meta["zerofx"].group) for node in collectives), default=0)
    body = _body(graph, width)
    lines = _folded(body) if fold else (line for _, line in body)
    return "\n".join([_header(trace, collectives), *_elsewhere(trace), *lines])


def _elsewhere(trace: Rewriting) -> Iterator[str]:
    there = trace.context.facts(AtRest).on_disk
    if hosted := trace.context.facts(AtRest).on_host:
        names = names_of(trace.context.facts(AtRest).kinds_on_host)
        yield f"  on host  {names} of {len(hosted)} group{'s' * (len(hosted) > 1)}"
    if there is not None:
        yield f"  on disk  {there.names} of {there.which}, in {there.path}"


def _header(trace: Rewriting, collectives: list[Node]) -> str:
    sizes: dict[str, list[int]] = {}
    for node in collectives:
        sizes.setdefault(node.meta["zerofx"].kind, []).append(whole_bytes(node))
    most = format_bytes(trace.context.found.gathered_bytes)
    gathers = sizes.get("all_gather", [])
    parts = []
    if trace.context.gathers:
        parts.append(f"{len(gathers)} all-gathers: {format_bytes(sum(gathers))}, at most {most} at once")
        left = trace.context.handover.kept_gathered.values()
        kept, near = (sum(value.nbytes for value in left if (value.ranks > 1) == some) for some in (False, True))
        if near:
            ranks = next(value.ranks for value in left if value.ranks > 1)
            verb = "stay" if trace.context.phase == "forward" else "came"
            parts.append(f"{format_bytes(near)} {verb} as parts among {ranks} near ranks")
        if kept:
            parts.append(f"{format_bytes(kept)} {'stay' if trace.context.phase == 'forward' else 'came'} gathered")
    elif "refresh" in sizes:
        how = "in common" if trace.context.in_common else "waited for"
        parts.append(f"{len(sizes['refresh'])} replicas of {format_bytes(sum(sizes['refresh']))} {how}")
    if "part" in sizes:
        (_, cut_in, _), *_ = (node.args for node in collectives if edit.is_kind(node, "part"))
        parts.append(f"{len(sizes['part'])} values of {format_bytes(sum(sizes['part']))} saved in {cut_in} parts")
    for name, kind in NODE_KINDS.items():
        if kind.total and name in sizes:
            parts.append(f"{len(sizes[name])} {kind.total} {format_bytes(sum(sizes[name]))}")
    if "step" in sizes:
        parts.append(f"{len(sizes['step'])} groups updated")
    return f"{trace.name}: {'; '.join([*parts, *_saving(trace)]) or 'no collectives'}"


def _saving(trace: Rewriting) -> Iterator[str]:
    """What an `activation_budget`, or `memory`, has chosen."""
    chosen, phase, division = trace.activations, trace.context.phase, trace.division
    if division is not None and phase == "forward":
        yield f"a step takes {format_bytes(division.peak_bytes)} of memory={format_bytes(division.nbytes)}"
    if chosen is not None and phase == "forward":
        away = f", {format_bytes(chosen.offloaded_bytes)} in a file" if chosen.offloaded else ""
        yield f"{format_bytes(chosen.saved_bytes)} of {format_bytes(chosen.whole_bytes)} saved for backward{away}"
    if chosen is not None and phase == "backward":
        yield f"{len(chosen.recomputed)} operators of forward recomputed"


def _verbs() -> dict[str, str]:
    return {name: kind.verb for name, kind in NODE_KINDS.items() if kind.verb}


def whole_bytes(node: Node) -> int:
    """Bytes of the flat buffer that a collective is about, whole."""
    kind = kind_of(node)
    of = None if kind is None else 0 if kind.travels == "scatter" else kind.of
    source = node if of is None else node.args[of]
    value = source.meta["val"]  # type: ignore[union-attr]
    return 0 if value is None else value.numel() * value.dtype.itemsize


def _body(graph: Graph, width: int) -> list[tuple[Tag | None, str]]:
    """The lines, and what zerofx's are about."""
    lines: list[tuple[Tag | None, str]] = []
    place = ""  # the run of the user's operations being folded, and where they come from
    ops: list[str] = []

    def flush() -> None:
        if ops:
            where, _, code = place.partition("\0")
            line = f"           {_cut(where, _PLACE):<{_PLACE}} {_cut(_count(ops), _OPS):<{_OPS}} {code}".rstrip()
            lines.append((None, _cut(line, WIDTH)))
            ops.clear()

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        tag, kind = node.meta.get("zerofx"), kind_of(node)
        if kind is None:
            name = operator_name(node)
            if name in _SILENT:
                continue
            here = place_of(node) if tag is None else f"(the pass {tag.kind})\0"
            if here != place:
                flush()
                place = here
            ops.append(name)
        elif kind.verb:
            flush()
            size = f"{format_bytes(whole_bytes(node)):>10}" if kind.sized else ""
            lines.append((tag, f"  {kind.verb:<8} {tag.group:<{width}} {size}".rstrip()))
    flush()
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _folded(body: list[tuple[Tag | None, str]]) -> Iterator[str]:
    """The lines, but of layers in a row that look alike only the first.

    A layer is what stands from one wait for weights to the next; where there is none, from one reduction to the next;
    where there is neither, from one time to the next of a line that comes again and again. Two look alike if their
    lines do, group names being told by how far their number is from the layer's own.
    """
    kinds = {tag.kind for tag, _ in body if tag is not None}
    head = next((kind for kind in ("wait", "refresh", "reduce_scatter", "all_reduce") if kind in kinds), "")
    often = Counter(line for _, line in body)
    again = next((line for _, line in body if often[line] > ALIKE), "")
    layers: list[list[tuple[Tag | None, str]]] = [[]]
    for tag, line in body:
        if line == again if not head else tag is not None and tag.kind == head:
            layers.append([])
        layers[-1].append((tag, line))
    looks = [_look(layer) for layer in layers]
    i = 0
    while i < len(layers):
        alike = next((j for j in range(i, len(layers)) if looks[j] != looks[i]), len(layers)) - i
        yield from (line for _, line in layers[i])
        if alike > ALIKE:
            tags = [layers[j][0][0] for j in (i + 1, i + alike - 1)]
            names = " to ".join(tag.group for tag in tags if tag is not None)
            yield f"  ...      {names}{': ' if names else ''}{alike - 1} more like this one"
            i += alike
        else:
            i += 1


def _look(layer: list[tuple[Tag | None, str]]) -> list[str]:
    number = _number(layer[0][0].group) if layer and layer[0][0] is not None else 0

    def look(tag: Tag | None, line: str) -> str:
        if tag is None:
            return line
        return line.replace(tag.group, _NUMBER.sub(f"{_number(tag.group) - number:+d}", tag.group, count=1)).strip()

    return [" ".join(look(tag, line).split()) for tag, line in layer]


_NUMBER = re.compile(r"\d+")


def _number(group: str) -> int:
    found = _NUMBER.search(group)
    return int(found[0]) if found else 0


def place_of(node: Node) -> str:
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
