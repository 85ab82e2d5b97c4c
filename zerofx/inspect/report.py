"""One HTML page about what was compiled: ``zerofx.report(model, "out.html")``, for a browser, without a network.

=========================  ===============================================  ===================================
part of the page           what                                             from
=========================  ===============================================  ===================================
the choice                 what was chosen, and why; if anything was        `zerofx.choose`
the step                   time, exposed time, bytes; measured beside it    `zerofx.predict`
a chart per graph          compute, collectives, waits; live bytes          its spans and live bytes
groups                     members, bytes, this rank's part                 the layouts
passes                     edits, seconds, and what each pass changed       `zerofx.compiler.records`
graphs                     every node, with a filter, and why it is there   `zerofx.compiler.listing`, ``.explain``
=========================  ===============================================  ===================================

The page is text and drawings that stand there when it is opened, so that it can be read by a program too: a number is
in a ``data-value`` attribute, exact, beside the rounded one that is shown. A script filters, zooms, and shows what
belongs to the bar or the node that was clicked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import nn

from zerofx.compiler.activations import given
from zerofx.compiler.api import _groups
from zerofx.compiler.explain import History, Reasons, purpose
from zerofx.compiler.listing import node_line
from zerofx.compiler.records import GraphRecord, Trace
from zerofx.inspect.predict.predict import layouts_of, predict, ranks_of, step_of
from zerofx.inspect.report_timeline import chart
from zerofx.model.layout import GroupLayout
from zerofx.model.units import format_bytes, format_seconds
from zerofx.passes.context import Context
from zerofx.runtime.state.account import AtRest
from zerofx.simulate.clock import PhasePrediction, Prediction, Rates
from zerofx.simulate.recorder import KINDS

MOST_LINES = 500
"""Lines of one pass's changes that the page shows; the rest is said to be there."""

_COMPARED = {"time_s": "time", "exposed_s": "exposed", "wire_bytes": "received", "peak_bytes": "peak live bytes"}
_AS_PREDICTED = 0.8
"""From so small a part of the measured time on, the page says why a prediction may be that much lower."""
_MEANS = {
    "time_s": "forward and backward, without the optimizer",
    "exposed_s": "of it, compute waits for collectives",
    "wire_bytes": "by this rank, which sends as many",
    "peak_bytes": "allocated by the step, on top of what is held at rest",
    "held_bytes": "parameters, shards and replicas",
    "disk_bytes": "in this rank's file, once there is optimizer state",
    "file_read": "from it, by the graphs",
    "file_written": "to it",
    "file_exposed_s": "of what is exposed, compute waits for the file",
    "optimizer_s": "of zerofx.AdamW, through the file; on top of the time above",
}
_OF_FILES = {
    "disk_bytes": "on disk",
    "file_read": "read",
    "file_written": "written",
    "file_exposed_s": "waits for it",
    "optimizer_s": "optimizer",
}


def report(
    model: nn.Module | GraphRecord,
    path: str | Path,
    rates: Rates | None = None,
    *,
    measured: Mapping[str, float] | None = None,
    records: Iterable[GraphRecord] | None = None,
    step_in_backward: bool = False,
) -> Path:
    """Write the page about ``model`` to ``path``. No collective; runs no step.

    Args:
        model: compiled, and its backward run once; or a record, such as `zerofx.dry_run` returns, for which none of
            the ranks need be there.
        path: of a file that is made or replaced; its folder must be there.
        rates: of `zerofx.calibrate`. Without them the timeline shows the order of operations, not times.
        measured: what a real step took, shown beside what was predicted: "time_s", "exposed_s", "wire_bytes",
            "peak_bytes", as in ``Prediction.summary()``.
        records, step_in_backward: as for `zerofx.predict`.

    Returns:
        ``path``.

    Raises:
        ValueError: the module is not sharded, or a name in ``measured`` is none of the four.
        RuntimeError: nothing was compiled for training yet.
    """
    unknown = sorted(set(measured or {}) - set(_COMPARED))
    if unknown:
        raise ValueError(f"measured={unknown[0]!r}: expected some of {', '.join(map(repr, _COMPARED))}.")
    chosen = step_of(model, records)
    prediction = predict(model, rates, records=chosen, step_in_backward=step_in_backward)
    if isinstance(model, GraphRecord):
        layouts, name = layouts_of(chosen), "A dry run" if model.pretended else "One graph"
    else:
        layouts, name = [group.layout for group in _groups(model)], type(model).__name__
    first = next(trace for record in chosen for trace in record.traces())
    context = first.context
    traces = [(i, trace) for i, record in enumerate(chosen) for trace in record.traces()]
    page = Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{name}, stage {context.stage}, {ranks_of(context, layouts[0])}"),
        facts=_facts(layouts, first, any(record.pretended for record in chosen)),
        step=_choice(model) + _step(prediction, measured or {}),
        phases="".join(_phase(phase, len(chosen)) for phase in prediction.phases),
        groups=_group_table(layouts, context),
        graphs="".join(_graph(i, trace, len(chosen)) for i, trace in traces),
    )
    Path(path).write_text(page, encoding="utf-8")
    return Path(path)


def _facts(layouts: list[GroupLayout], trace: Trace, pretended: bool) -> str:
    context = trace.context
    numel = sum(slot.numel for layout in layouts for slot in layout.slots)
    facts = [f"{numel:,} parameters in {len(layouts)} groups", f"executor {context.executor}", context.backend]
    if pretended and context.executor != "eager":
        facts[1] += ", followed as the eager one would run it"
    if context.memory_budget is not None and context.gathers:
        facts.append(f"memory_budget {format_bytes(context.memory_budget)}")
    if (chosen := trace.activations) is not None:
        saved, whole = format_bytes(chosen.saved_bytes), format_bytes(chosen.whole_bytes)
        facts.append(f"{given(chosen)}: {saved} of {whole} saved for backward")
    if (divided := trace.division) is not None:
        facts.append(f"a step takes {format_bytes(divided.peak_bytes)}, {format_bytes(divided.at_rest)} of it at rest")
    if (there := context.facts(AtRest).on_disk) is not None:
        facts.append(escape(f"{there.names} of {there.which} in {there.path}"))
    if any(layout.param_dtype is not None for layout in layouts):
        dtypes = {str(layout.weight_dtype).removeprefix("torch.") for layout in layouts}
        facts.append(f"computes in {' and '.join(sorted(dtypes))}")
    return " · ".join([*facts, f"torch {escape(torch.__version__)}"])


def _choice(model: nn.Module | GraphRecord) -> str:
    """What was chosen for it, and why; "" where nothing was."""
    choice = None if isinstance(model, GraphRecord) else _groups(model)[0].family.recipe.choice
    return "" if choice is None else f"<pre>{escape(str(choice))}</pre>"


def _step(prediction: Prediction, measured: Mapping[str, float]) -> str:
    summary = prediction.summary()
    rows, said = [], {**_COMPARED, "held_bytes": "held at rest"}
    for key, words in (said if prediction.files is None else said | _OF_FILES).items():
        value, real = summary[key], measured.get(key)
        off = f"{100 * (value / real - 1):+.1f} %" if real and isinstance(value, (int, float)) else ""
        shown = _cell(key, value) if value is not None else '<span class="soft">no rates</span>'
        rows.append([words, shown, _cell(key, real), off, f'<span class="soft">{_MEANS[key]}</span>'])
    head = ["", "predicted", "measured", "off by", ""]
    if not measured:
        head, rows = [head[0], head[1], head[4]], [[row[0], row[1], row[4]] for row in rows]
    return _table("step", head, rows) + _why_slower(prediction.time_s, measured.get("time_s"))


def _why_slower(predicted: float | None, measured: float | None) -> str:
    """What makes a measured step take much longer than predicted, as a rule; "" where it took as long."""
    if predicted is None or measured is None or predicted > _AS_PREDICTED * measured:
        return ""
    load, cores = (os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0), os.cpu_count() or 1
    busy = f"This machine has a load of {load:.0f} on {cores} cores: other programs took part of it."
    usual = "Small operators take longer than their bytes and flops; and rates are of a machine that does nothing else."
    return (
        f'<p class="facts">The step took {measured / predicted:.1f} times what was predicted. '
        f"{busy if load > cores + 1 else usual}</p>"
    )


def _phase(phase: PhasePrediction, graphs: int) -> str:
    facts = [f"receives {_cell('wire_bytes', phase.wire_bytes)}"]
    for key, words, nbytes in (("file_read", "reads", phase.file_read), ("file_written", "writes", phase.file_written)):
        facts += [f"{words} {_cell(key, nbytes)}"] if nbytes else []
    if phase.time_s is not None:
        facts = [f"{_cell('time_s', phase.time_s)}, {_cell('exposed_s', phase.exposed_s)} exposed", *facts]
    else:
        facts.append("the axis counts operations: there are no rates")
    at_peak = " ".join(f'<span class="key {kind}">{kind} {format_bytes(phase.peak[kind])}</span>' for kind in KINDS)
    peak = _cell("peak_bytes", sum(phase.peak.values()))
    return (
        f'<section class="phase" data-graph="{phase.graph}" data-phase="{phase.name}">'
        f"<h3>{_name(phase.graph, phase.name, graphs)}</h3>"
        f'<p class="facts"><span>{"; ".join(facts)}</span><label class="zoom">zoom '
        f'<input type="range" min="0" max="6" step="1" value="0" aria-label="zoom {phase.name}"></label></p>'
        '<p class="keys"><span class="key kernel">compute</span> <span class="key exposed">compute waits</span> '
        '<span class="key gather">weights travel</span> <span class="key reduce">gradients travel</span></p>'
        f"{chart(phase)}"
        f'<p class="keys readout"><span>live bytes at the peak, {peak}:</span> {at_peak}</p>'
        '<div class="detail" hidden></div></section>\n'
    )


def _name(graph: int, phase: str, graphs: int) -> str:
    return (f"graph {graph}, " if graphs > 1 else "") + phase


def _group_table(layouts: list[GroupLayout], context: Context) -> str:
    rows, there = [], context.facts(AtRest).on_disk
    for layout in layouts:
        members = "<br>".join(escape(f"{slot.name} {list(slot.shape)}") for slot in layout.slots)
        rows.append(
            [
                escape(layout.name),
                _cell("bytes", layout.nbytes),
                _cell("bytes", layout.nbytes // (layout.world_size if context.stage else 1)),
                *([] if there is None else [there.names if layout.name in there.groups else ""]),
                str(layout.dtype).removeprefix("torch.") + ("" if layout.requires_grad else ", frozen"),
                f"<details><summary>{len(layout.slots)}</summary>{members}</details>",
            ]
        )
    disk = [] if there is None else ["on disk"]
    return _table("groups", ["group", "bytes", "on this rank", *disk, "dtype", "parameters"], rows)


def _graph(i: int, trace: Trace, graphs: int) -> str:
    phase = trace.name
    history, passes = History(trace), []
    changes = history.changes()
    for pass_ in trace.passes:
        name = pass_.__name__
        edits = f"{trace.edits[name]} edit{'' if trace.edits[name] == 1 else 's'}"
        passes.append(
            f'<details class="pass" data-pass="{name}"><summary><strong>{name}</strong><span>{edits}</span>'
            f"<span>{_cell('time_s', trace.seconds.get(name))}</span><span>{_code(purpose(pass_))}</span></summary>"
            f"<pre>{_marked(changes[name], name)}</pre></details>"
        )
    return (
        f'<section class="graph" data-graph="{i}" data-phase="{phase}"><h3>{_name(i, phase, graphs)}</h3>'
        f"{''.join(passes)}"
        '<details class="pass"><summary><strong>schedule</strong><span class="rest">all of zerofx\'s nodes, your lines '
        f"between them</span></summary><pre>{escape(str(trace))}</pre></details>"
        '<div class="filter"><input type="search" placeholder="find nodes: all_gather blocks.1" '
        f'aria-label="find nodes of {phase}"><output></output></div>'
        f'<pre class="listing">{_listing(Reasons(trace, history))}</pre></section>\n'
    )


def _listing(reasons: Reasons) -> str:
    lines = []
    for node in reasons.graph.nodes:
        tag, data = node.meta.get("zerofx"), ""
        if tag is not None:
            why = "\n".join(f"{question:<8} {answer}" for question, answer in reasons.why(node))
            data = f' data-tag="{escape(f"{tag.kind} {tag.group}")}" data-why="{escape(why)}"'
        lines.append(f"<span{data}>{escape(node_line(node))}</span>")
    return "".join(lines)


def _marked(lines: list[str], name: str) -> str:
    marks = {"+": "new", "-": "gone", "~": "other", ">": "here", "<": "away"}
    shown = [f'<span class="{marks.get(line[0], "same")}">{escape(line)}</span>' for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        shown.append(f"<span>{len(lines) - MOST_LINES} lines more: record.diff({name!r})</span>")
    return "\n".join(shown) or "nothing"


def _code(text: str) -> str:
    """What stands between backticks, as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _cell(key: str, value: Any) -> str:
    """A number as it is shown, with the exact one beside it."""
    if value is None:
        return ""
    text = format_seconds(float(value)) if key.endswith("_s") else format_bytes(float(value))
    return f'<data class="{key}" value="{value}" data-value="{value}">{text}</data>'


def _table(name: str, head: list[str], rows: list[list[str]]) -> str:
    lines = ["".join(f"<th>{escape(x)}</th>" for x in head), *("".join(f"<td>{x}</td>" for x in row) for row in rows)]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="wide {name}"><table class="{name}">{body}</table></div>\n'
