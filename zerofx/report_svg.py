"""Drawings for `zerofx.report`, as SVG that stands in the page: a graph's timeline, and its live bytes over time.

::

    compute  ▐ tokens ▐ blocks.0 ▐░▐ blocks.1      neighbouring kernels of one group are one bar; ░ compute waits
    wire     ▐gather▐▐gather  ▐                    a bar per collective, while its bytes travel

Both have the same horizontal axis: seconds where there are any, else operations, one step each.
"""

from __future__ import annotations

from html import escape

from zerofx.predict import LiveBytes, PhasePrediction
from zerofx.printing import format_bytes
from zerofx.rehearsal import KINDS, Operation

WIDTH, ROW, HEIGHT = 1000, 26, 140
MOST_POINTS = 1500
"""Points of a curve; of more neighbours the one with most bytes stands for all."""

_Bar = tuple[float, float, str, str]  # from, to, CSS class, what it says


def timeline(phase: PhasePrediction) -> str:
    """Compute above, the wire below."""
    times, end = _axis(phase)
    scale = WIDTH / max(end, 1e-12)
    rows = (("compute", _compute(phase, times)), ("wire", _wire(phase, times)))
    bars = []
    for i, (name, row) in enumerate(rows):
        y = i * (ROW + 6)
        bars.append(f'<text x="0" y="{y + 11}">{name}</text>')
        for start, stop, kind, words in row:
            x, width = start * scale, max((stop - start) * scale, 0.5)
            bars.append(
                f'<rect class="{kind}" x="{x:.2f}" y="{y + 14}" width="{width:.2f}" height="{ROW - 12}">'
                f"<title>{escape(words)}</title></rect>"
            )
    label = f"timeline of {phase.name}" + ("" if phase.spans else ", in operations")
    return _svg("timeline", label, 2 * ROW + 10, bars)


def live_bytes(phase: PhasePrediction) -> str:
    """Bytes by kind, stacked."""
    times, end = _axis(phase)
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
            words = f"{kind}, at most {format_bytes(top)}"
            shapes.append(f'<polygon class="{kind}" data-most="{top}" points="{path}"><title>{words}</title></polygon>')
        below = above
    shapes.append(f'<text x="0" y="11">{format_bytes(most)}</text>')
    return _svg("live", f"live bytes of {phase.name}", HEIGHT, shapes)


def _svg(name: str, label: str, height: int, inside: list[str]) -> str:
    return (
        f'<svg class="{name}" role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {height}">'
        f"{''.join(inside)}</svg>\n"
    )


def _axis(phase: PhasePrediction) -> tuple[list[tuple[float, float]], float]:
    """From when to when compute is at each operation, counted from the graph's start, and where all ends."""
    if not phase.spans:
        return [(i, i + 1.0) for i in range(len(phase.operations))], float(len(phase.operations))
    now = zero = next((span.start for span in phase.spans if span.operation.kind != "start"), phase.spans[0].start)
    zero = min(zero, phase.spans[0].start)
    times = []
    for span in phase.spans:
        if span.operation.kind == "start":  # compute goes on at once
            times.append((now - zero, now - zero))
        else:
            times.append((span.start - zero, span.end - zero))
            now = span.end
    return times, max(now, *(span.end for span in phase.spans)) - zero


def _compute(phase: PhasePrediction, times: list[tuple[float, float]]) -> list[_Bar]:
    bars: list[_Bar] = []
    run: list[int] = []

    def close() -> None:
        if run:
            first = phase.operations[run[0]]
            count = f"{len(run)} kernel{'' if len(run) == 1 else 's'}"
            bars.append((times[run[0]][0], times[run[-1]][1], "kernel", f"{first.group or 'no group'}: {count}"))
            run.clear()

    for i, operation in enumerate(phase.operations):
        if operation.kind == "kernel":
            if run and phase.operations[run[0]].group != operation.group:
                close()
            run.append(i)
        elif operation.kind == "wait" and times[i][1] > times[i][0]:
            close()
            bars.append((*times[i], "exposed", f"waits for {operation.group}"))
    close()
    return bars


def _wire(phase: PhasePrediction, times: list[tuple[float, float]]) -> list[_Bar]:
    waits = {o.collective: times[i][1] for i, o in enumerate(phase.operations) if o.kind == "wait"}
    zero = phase.spans[0].start if phase.spans else 0.0
    if phase.spans:
        zero = min(zero, *(span.start for span in phase.spans))
    bars = []
    for i, operation in enumerate(phase.operations):
        if operation.kind != "start":
            continue
        if phase.spans:
            start, end = phase.spans[i].start - zero, phase.spans[i].end - zero
        else:  # no times: from the start to its wait
            start, end = times[i][0], waits.get(operation.collective, float(len(times)))
        kind = direction(operation)
        bars.append((start, end, kind, f"{kind} {operation.group}: {format_bytes(operation.nbytes)}"))
    return bars


def direction(operation: Operation) -> str:
    """Whether a collective brings weights ("gather") or takes gradients ("reduce"), by the name that it has."""
    return "gather" if "gather" in operation.name or "refresh" in operation.name else "reduce"


def _thinned(xs: list[float], live: list[LiveBytes]) -> list[tuple[float, LiveBytes]]:
    points = list(zip(xs, live, strict=True))
    step = -(-len(points) // MOST_POINTS)
    runs = [points[i : i + step] for i in range(0, len(points), step or 1)]
    return [(run[0][0], max((live for _, live in run), key=lambda each: sum(each.values()))) for run in runs]


def _steps(xs: list[float], ys: list[int], end: float, most: int) -> list[tuple[float, float]]:
    """The corners of a curve that keeps each value until the next."""
    scale, corners = WIDTH / max(end, 1e-12), []
    for x, y, until in zip(xs, ys, [*xs[1:], end], strict=True):
        height = HEIGHT - (HEIGHT - 16) * y / most
        corners += [(x * scale, height), (until * scale, height)]
    return corners
