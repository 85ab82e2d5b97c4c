"""One HTML page about what was compiled: ``zerofx.report(model, "out.html")``, for a browser, without a network.

=========================  ===============================================  =========================
part of the page           what                                             from
=========================  ===============================================  =========================
the step                   time, exposed time, bytes; measured beside it    `zerofx.predict`
a timeline per graph       compute and collectives, where compute waits     its spans
live bytes per graph       gathered weights, activations, gradients, rest   its live bytes
groups                     members, bytes, this rank's part                 the module's layouts
passes                     edits, seconds, and what each pass changed       `zerofx.records`
graphs                     every node, with a filter                        `zerofx.listing`
=========================  ===============================================  =========================

The page is text and drawings that stand there when it is opened (a script does no more than filter), so that it can be
read by a program too: a number is in a ``data-value`` attribute, exact, beside the rounded one that is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from torch import nn

from zerofx.api import _groups, graphs
from zerofx.group import ShardGroup
from zerofx.listing import difference, graph_lines
from zerofx.predict import PhasePrediction, Prediction, Rates, predict
from zerofx.printing import format_bytes
from zerofx.records import GraphRecord, Trace
from zerofx.report_svg import live_bytes, timeline

MOST_LINES = 500
"""Lines of one pass's changes that the page shows; the rest is said to be there."""

_COMPARED = {"time_s": "time", "exposed_s": "exposed", "wire_bytes": "received", "peak_bytes": "peak live bytes"}


def report(
    module: nn.Module,
    path: str | Path,
    rates: Rates | None = None,
    *,
    measured: Mapping[str, float] | None = None,
    records: Iterable[GraphRecord] | None = None,
) -> Path:
    """Write the page about ``module`` to ``path``. No collective; runs no step.

    Args:
        module: compiled, and its backward run once.
        path: of a file that is made or replaced; its folder must be there.
        rates: of `zerofx.calibrate`. Without them the timeline shows the order of operations, not times.
        measured: what a real step took, shown beside what was predicted: "time_s", "exposed_s", "wire_bytes",
            "peak_bytes", as in ``Prediction.summary()``.
        records: as for `zerofx.predict`.

    Returns:
        ``path``.

    Raises:
        ValueError: the module is not sharded, or a name in ``measured`` is none of the four.
        RuntimeError: nothing was compiled for training yet.
    """
    unknown = sorted(set(measured or {}) - set(_COMPARED))
    if unknown:
        raise ValueError(f"measured={unknown[0]!r}: expected some of {', '.join(map(repr, _COMPARED))}.")
    groups = _groups(module)
    chosen = [r for r in graphs(module) if r.forward is not None] if records is None else list(records)
    prediction = predict(module, rates, records=chosen)
    traces = [(i, trace) for i, record in enumerate(chosen) for trace in record.traces()]
    page = Template((Path(__file__).parent / "report.html").read_text()).substitute(
        title=escape(f"{type(module).__name__}, stage {groups[0].family.stage}, {groups[0].layout.world_size} ranks"),
        step=_step(prediction, measured or {}),
        phases="".join(map(_phase, prediction.phases)),
        groups=_group_table(groups),
        graphs="".join(_graph(i, trace) for i, trace in traces),
    )
    Path(path).write_text(page, encoding="utf-8")
    return Path(path)


def _step(prediction: Prediction, measured: Mapping[str, float]) -> str:
    summary = prediction.summary()
    rows = []
    for key, words in _COMPARED.items():
        value, real = summary[key], measured.get(key)
        off = f"{100 * (value / real - 1):+.1f} %" if real and isinstance(value, (int, float)) else ""
        rows.append([words, _cell(key, value), _cell(key, real), off])
    rows.append(["held at rest", _cell("held_bytes", prediction.held_bytes), "", ""])
    return _table("step", ["", "predicted", "measured", "off by"], rows)


def _phase(phase: PhasePrediction) -> str:
    name = f"graph {phase.graph}, {phase.name}"
    facts = [f"receives {_cell('wire_bytes', phase.wire_bytes)}"]
    facts.append(f"peak {_cell('peak_bytes', sum(phase.peak.values()))}")
    if phase.time_s is not None:
        facts = [f"{_cell('time_s', phase.time_s)}, {_cell('exposed_s', phase.exposed_s)} exposed", *facts]
    return (
        f'<section class="phase" data-graph="{phase.graph}" data-phase="{phase.name}"><h3>{name}</h3>'
        f"<p>{'; '.join(facts)}</p>{timeline(phase)}{live_bytes(phase)}</section>\n"
    )


def _group_table(groups: list[ShardGroup]) -> str:
    rows = []
    for group in groups:
        layout = group.layout
        members = "<br>".join(escape(f"{slot.name} {list(slot.shape)}") for slot in layout.slots)
        rows.append(
            [
                escape(layout.name),
                _cell("bytes", layout.nbytes),
                _cell("bytes", layout.nbytes // (layout.world_size if group.family.stage else 1)),
                str(layout.dtype).removeprefix("torch.") + ("" if layout.requires_grad else ", frozen"),
                f"<details><summary>{len(layout.slots)}</summary>{members}</details>",
            ]
        )
    return _table("groups", ["group", "bytes", "on this rank", "dtype", "parameters"], rows)


def _graph(i: int, trace: Trace) -> str:
    variant = "" if trace.context.sync == "reduce" else f" ({trace.context.sync})"
    phase = trace.context.phase + variant
    rows, before, shown = [], trace.before, trace.before
    for name, edits in trace.edits.items():
        after = trace.after(name)
        lines = difference(before.graph, after.graph)
        more = f"\n{len(lines) - MOST_LINES} lines more: record.diff({name!r})" if len(lines) > MOST_LINES else ""
        text = escape("\n".join(lines[:MOST_LINES]) + more) or "nothing"
        seconds = _cell("time_s", trace.seconds.get(name))
        rows.append([escape(name), str(edits), seconds, f"<details><summary>what</summary><pre>{text}</pre></details>"])
        before = after
        shown = after if name != "lower" else shown
    listing = "\n".join(f"<span>{escape(line)}</span>" for line in graph_lines(shown.graph))
    return (
        f'<section class="graph" data-graph="{i}" data-phase="{phase}"><h3>graph {i}, {phase}</h3>'
        f"{_table('passes', ['pass', 'edits', 'took', 'changed'], rows)}"
        f"<details><summary>schedule</summary><pre>{escape(str(trace))}</pre></details>"
        f'<details open><summary>every node, before lower</summary><input type="search" placeholder="filter nodes: '
        f'all_gather blocks.1" aria-label="filter nodes"><pre class="listing">{listing}</pre></details></section>\n'
    )


def _cell(key: str, value: Any) -> str:
    """A number as it is shown, with the exact one beside it."""
    if value is None:
        return ""
    text = f"{1e3 * value:.2f} ms" if key.endswith("_s") else format_bytes(float(value))
    return f'<data class="{key}" value="{value}" data-value="{value}">{text}</data>'


def _table(name: str, head: list[str], rows: list[list[str]]) -> str:
    lines = ["".join(f"<th>{escape(x)}</th>" for x in head), *("".join(f"<td>{x}</td>" for x in row) for row in rows)]
    return f'<table class="{name}">' + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>\n"
