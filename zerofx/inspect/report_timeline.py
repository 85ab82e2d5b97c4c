"""Drawings for `zerofx.report`: what a graph does and what it holds meanwhile, on one horizontal axis.

::

               0          10         20         30 ms
    compute   ▐ tokens ▐░▐ blocks.0 ▐ blocks.1 ▐    neighbouring kernels of one group are one bar; ░ compute waits
    wire      ▐ tokens ▐ blocks.1 ▐                 a bar per collective, while its bytes travel
    file      ▐ blocks.1 ▐                          a bar per shard that is read, gradient that is written, and update
    live      ▁▁▂▂▃▃▄▄▅▅▆▆▅▅▆▆▇▇▆▆                  bytes by kind, stacked

The axis is seconds where there are any, else operations, one step each. Places on it are percentages, so that to zoom
is to make the drawing wider: text keeps its size, and a label stands in its bar if it fits (report.html sees to both).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape

from zerofx.model.units import format_bytes, format_seconds
from zerofx.simulate.clock import LiveBytes, PhasePrediction
from zerofx.simulate.recorder import KINDS, Operation

WIDTH, HEIGHT = 1000, 160
"""Units of the drawing of live bytes, which is stretched to its place."""
MOST_POINTS = 1500
"""Points of a curve; of more neighbours the one with most bytes stands for all."""
TICKS = 10
"""Of the axis, at most, with a finer step for who zooms in."""


@dataclass
class _Bar:
    """``start`` to ``stop`` on the axis; ``find`` names the nodes it stands for: kind and group, as in a listing."""

    start: float
    stop: float
    kind: str
    label: str
    words: str
    find: str = ""
    details: tuple[str, ...] = ()


def chart(phase: PhasePrediction) -> str:
    """The axis, compute, the wire, the file where there is one, and live bytes, as HTML."""
    times, end = _axis(phase)
    most = max((sum(live.values()) for live in phase.live), default=0)
    scale = "".join(f'<span style="bottom:{100 * y:.2f}%">{format_bytes(y * most)}</span>' for y in (0, 0.5, 1))
    lanes = [("compute", _compute(phase, times))]
    for name, files in (("wire", False), ("file", True)):
        bars = _travelling(phase, times, files)
        lanes += [("" if i else name, lane) for i, lane in enumerate(_lanes(bars)) if bars or not files]
    names = "".join(f'<div class="row">{name}</div>' for name, _ in lanes)
    rows = "".join(f'<div class="row">{"".join(_bar(bar, end) for bar in bars)}</div>' for _, bars in lanes)
    return (
        f'<div class="chart"><div class="names"><div class="axis"></div>{names}'
        f'<div class="live scale">{scale}</div></div><div class="scroll"><div class="canvas">'
        f'<div class="axis">{_ticks(end, timed=bool(phase.spans))}</div>{rows}'
        f'<div class="live">{_live_bytes(phase, times, end)}</div></div></div></div>\n'
    )


def _bar(bar: _Bar, end: float) -> str:
    left, width = 100 * bar.start / max(end, 1e-12), 100 * (bar.stop - bar.start) / max(end, 1e-12)
    data = f' data-find="{escape(bar.find)}"' if bar.find else ""
    if bar.details:
        data += f' data-details="{escape(chr(10).join(bar.details))}"'
    return (
        f'<button type="button" class="{bar.kind}" style="left:{left:.4f}%;width:{width:.4f}%" '
        f'title="{escape(bar.words)}"{data}><span>{escape(bar.label)}</span></button>'
    )


def _ticks(end: float, timed: bool) -> str:
    """Labels at round places, and finer ones in between that are shown when there is room for them."""
    step = 10 ** math.floor(math.log10(max(end, 1e-12) / TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if end / (step * factor) <= TICKS)
    fine = step / 5
    if not timed:
        step, fine = max(1, step), max(1, fine)
    unit, factor = ("", 1.0) if not timed else ("s", 1.0) if end >= 1 else ("ms", 1e3) if end >= 1e-3 else ("µs", 1e6)
    ratio, ticks = round(step / fine), []
    for i in range(int(end / fine * (1 + 1e-9)) + 1):
        x = i * fine
        text = f"{x * factor:.10g}" + (f" {unit}".rstrip() if i % ratio == 0 else "")
        kind = ("coarse" if i % ratio == 0 else "fine") + " last" * (x > 0.93 * end)  # that has no room on its right
        ticks.append(f'<span class="{kind}" style="left:{100 * x / max(end, 1e-12):.4f}%">{text}</span>')
    return "".join(ticks)


def _axis(phase: PhasePrediction) -> tuple[list[tuple[float, float]], float]:
    """From when to when compute is at each operation, counted from the graph's start, and where all ends."""
    if not phase.spans:
        return [(i, i + 1.0) for i in range(len(phase.operations))], float(len(phase.operations))
    now = zero = _zero(phase)
    times = []
    for span in phase.spans:
        if span.operation.kind == "start":  # compute goes on at once
            times.append((now - zero, now - zero))
        else:
            times.append((span.start - zero, span.end - zero))
            now = span.end
    return times, max(now, *(span.end for span in phase.spans)) - zero


def _zero(phase: PhasePrediction) -> float:
    """When the graph begins: with its first kernel or wait, or with what it has on the wire before."""
    return min(span.start for span in phase.spans)


def _compute(phase: PhasePrediction, times: list[tuple[float, float]]) -> list[_Bar]:
    bars: list[_Bar] = []
    run: list[int] = []
    groups = _groups_at_work(phase)
    starts = {operation.collective: operation for operation in phase.operations if operation.kind == "start"}
    names: list[str] = []  # of the groups, in the order they first compute: neighbours differ in shade

    def close() -> None:
        if not run:
            return
        group = groups[run[0]]
        if not names or names[-1] != group:
            names.append(group)
        start, stop = times[run[0]][0], times[run[-1]][1]
        count = f"{len(run)} kernel{'' if len(run) == 1 else 's'}"
        words = f"{group or 'all groups'}: {count}{_when(phase, start, stop)}"
        kind = "kernel" if len(names) % 2 else "kernel odd"
        details = tuple(_kernel(phase.operations[i], *times[i], timed=bool(phase.spans)) for i in run)
        bars.append(_Bar(start, stop, kind, group, words, details=details))
        run.clear()

    for i, operation in enumerate(phase.operations):
        if operation.kind == "kernel":
            if run and groups[run[0]] != groups[i]:
                close()
            run.append(i)
        elif operation.kind == "wait" and phase.spans and times[i][1] > times[i][0]:
            close()
            find = f"{_WAITS[_node_kind(starts[operation.collective])]} {operation.group}"
            words = f"waits for {operation.group}{_when(phase, *times[i])}"
            bars.append(_Bar(*times[i], "exposed", operation.group, words, find))
    close()
    return bars


def _groups_at_work(phase: PhasePrediction) -> list[str]:
    """The group that each operation works for: whose weights were waited for last, else whose gradients travel next."""
    reduced = [o for o in phase.operations if _reduces(o)]
    groups, following = [], reduced[-1].group if reduced else ""
    for operation in reversed(phase.operations):
        if _reduces(operation):
            following = operation.group
        groups.append(operation.group or following)
    return groups[::-1]


def _reduces(operation: Operation) -> bool:
    return operation.kind == "start" and not operation.through_file and direction(operation) == "reduce"


def _kernel(operation: Operation, start: float, stop: float, timed: bool) -> str:
    took = f"{format_seconds(stop - start):>10}  " if timed else ""
    flops = f"  {operation.flops / 1e9:.3g} GFLOP" if operation.flops else ""
    where = f"  {operation.source}" if operation.source else ""
    return f"{took}{operation.name}  {format_bytes(operation.nbytes)} read and written{flops}{where}"


def _travelling(phase: PhasePrediction, times: list[tuple[float, float]], files: bool) -> list[_Bar]:
    """What is on the wire; or on its way from and to a file."""
    waits = {o.collective: times[i][1] for i, o in enumerate(phase.operations) if o.kind == "wait"}
    bars = []
    for i, operation in enumerate(phase.operations):
        if operation.kind != "start" or bool(operation.through_file) != files:
            continue
        if phase.spans:
            zero, span = _zero(phase), phase.spans[i]
            start, end = span.start - zero, span.end - zero
        else:  # no times: from the start to its wait
            start, end = times[i][0], waits.get(operation.collective, float(len(times)))
        kind = direction(operation)
        does, done, nbytes = kind, "received", operation.nbytes
        if files:
            does, done = _passing(operation)
            nbytes = operation.through_file
        words = f"{does} {operation.group}: {format_bytes(nbytes)} {done}{_when(phase, start, end)}"
        bars.append(_Bar(start, end, kind, operation.group, words, f"{_node_kind(operation)} {operation.group}"))
    return bars


def _passing(operation: Operation) -> tuple[str, str]:
    """What is done with a file, and where to: in words."""
    if operation.read and operation.written:
        return "update", "through the file"
    return ("write", "to the file") if operation.written else ("read", "from the file")


def _lanes(bars: list[_Bar]) -> list[list[_Bar]]:
    """Rows in which no two bars overlap: one where there are times, for a wire carries one collective at a time."""
    lanes: list[list[_Bar]] = [[]]
    for bar in bars:
        free = next((lane for lane in lanes if not lane or lane[-1].stop <= bar.start), None)
        if free is None:
            lanes.append(free := [])
        free.append(bar)
    return lanes


def _when(phase: PhasePrediction, start: float, stop: float) -> str:
    if not phase.spans:
        return ""
    return f", {format_seconds(stop - start)} from {format_seconds(start)} on"


def direction(operation: Operation) -> str:
    """Whether a start brings weights ("gather") or takes gradients ("reduce"), by the name that it has."""
    if operation.through_file:
        return "reduce" if operation.written else "gather"
    return "gather" if "gather" in operation.name or "refresh" in operation.name else "reduce"


_WAITS = {
    "all_gather": "wait",
    "refresh": "refresh",
    "reduce_scatter": "wait_grad",
    "all_reduce": "wait_grad",
    "sum_replicas": "wait_replicas",
    "reload": "wait_reload",
    "offload": "wait_offload",
    "step": "step",
}


def _node_kind(operation: Operation) -> str:
    """The kind of the node that starts it, as its comment in a listing says."""
    if operation.through_file:
        return {"update": "step", "write": "offload", "read": "reload"}[_passing(operation)[0]]
    if direction(operation) == "gather":
        return "refresh" if "refresh" in operation.name else "all_gather"
    if operation.far == operation.nbytes and operation.far:
        return "sum_replicas"
    return "all_reduce" if "all_reduce" in operation.name else "reduce_scatter"


def _live_bytes(phase: PhasePrediction, times: list[tuple[float, float]], end: float) -> str:
    """Bytes by kind, stacked: a drawing, and the numbers for who points at it."""
    points = _thinned([*(start for start, _ in times), end], list(phase.live))
    most = max((sum(live.values()) for _, live in points), default=0) or 1
    shapes, below = [], [0] * len(points)
    for kind in KINDS:
        above = [b + live[kind] for b, (_, live) in zip(below, points, strict=True)]
        if any(live[kind] for _, live in points):
            upper = _steps([x for x, _ in points], above, end, most)
            lower = _steps([x for x, _ in points], below, end, most)
            top = max(live[kind] for _, live in points)
            path = " ".join(f"{x:.2f},{y:.2f}" for x, y in [*upper, *reversed(lower)])
            shapes.append(f'<polygon class="{kind}" data-most="{top}" points="{path}"></polygon>')
        below = above
    numbers = [[round(x / max(end, 1e-12), 6), *(live[kind] for kind in KINDS)] for x, live in points]
    label = f"live bytes of {phase.name}, at most {format_bytes(most)}"
    return (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'data-end="{end if phase.spans else ""}" data-live="{json.dumps(numbers, separators=(",", ":"))}">'
        f"{''.join(shapes)}</svg>"
    )


def _thinned(xs: list[float], live: list[LiveBytes]) -> list[tuple[float, LiveBytes]]:
    points = list(zip(xs, live, strict=True))
    step = -(-len(points) // MOST_POINTS)
    runs = [points[i : i + step] for i in range(0, len(points), step or 1)]
    return [(run[0][0], max((live for _, live in run), key=lambda each: sum(each.values()))) for run in runs]


def _steps(xs: list[float], ys: list[int], end: float, most: int) -> list[tuple[float, float]]:
    """The corners of a curve that keeps each value until the next."""
    scale, corners = WIDTH / max(end, 1e-12), []
    for x, y, until in zip(xs, ys, [*xs[1:], end], strict=True):
        height = HEIGHT - HEIGHT * y / most
        corners += [(x * scale, height), (until * scale, height)]
    return corners
