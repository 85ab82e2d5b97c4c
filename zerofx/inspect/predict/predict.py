"""What a training step will take, read off its compiled graphs: time, exposed communication, bytes sent, live bytes.

`zerofx.simulate` rehearses each graph and puts it on a clock. Nothing is measured, no step is run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from zerofx.compiler.api import _groups, graphs
from zerofx.compiler.records import GraphRecord
from zerofx.model.layout import GroupLayout
from zerofx.passes.context import Context
from zerofx.runtime.state.account import of_group
from zerofx.simulate.clock import Prediction, Rates, on_the_clock
from zerofx.simulate.files import Files
from zerofx.simulate.hosted import Hosted
from zerofx.simulate.rehearsal import rehearse, updated_inside


def predict(
    model: nn.Module | GraphRecord,
    rates: Rates | None = None,
    *,
    records: Iterable[GraphRecord] | None = None,
    probe: bool = False,
    step_in_backward: bool = False,
) -> Prediction:
    """What a step of ``model`` will take on this rank. It is no collective, and runs nothing without ``probe``.

    Args:
        model: compiled, and its backward run once (which compiles that); or a record, as of `zerofx.dry_run`. A dry run
            has no generated code, so its record is followed as the eager executor would run it.
        rates: without them there are bytes and no times.
        probe: run each of PyTorch's kernels of the step once by itself, on zeros, for the memory that it takes inside
            and gives back (workspace.py). Without that it counts for nothing.
        records: which of ``zerofx.graphs(module)`` make up the step, in the order they run; by default all that have a
            forward. A module that was compiled again for other shapes has more than one step's.
        step_in_backward: of a step with `zerofx.step_in_backward`, where backward ran both ways. One that ran in one
            way alone is predicted in that.

    Returns:
        Times in seconds, sizes in bytes. They are of forward and backward, with gradients None before. They do not
        include the optimizer, but for what a backward with `zerofx.step_in_backward` does with a file. With
        ``offload=`` its step is beside them (``optimizer_s``). Nor do they include what is computed outside of
        compiled graphs.

    Raises:
        ValueError: the module is not sharded.
        RuntimeError: nothing was compiled yet, or no backward; or Inductor's code cannot be followed.
    """
    chosen = step_of(model, records)
    if not chosen:
        raise RuntimeError(
            "nothing was compiled for training yet: graphs are captured when they first run. Run one step, forward and "
            "loss.backward(), before zerofx.predict."
        )
    context = next(trace.context for record in chosen for trace in record.traces())
    layouts, rank = layouts_of(chosen), 0
    if not isinstance(model, GraphRecord):
        groups = _groups(model)
        layouts, rank = [group.graph_layout for group in groups], groups[0].rank
    held = sum(of_group(layout, context).weights for layout in layouts)
    inside = updated_inside(chosen, step_in_backward)
    files = Files.of_module(context, layouts, rank)
    if files is not None:
        files = replace(files, inside=inside)
    hosted = None if inside else Hosted.of_module(context, layouts, rank)
    updates = {} if files is None else files.updates
    phases = rehearse(chosen, probe, updates=updates, step_in_backward=step_in_backward)
    return replace(on_the_clock(phases, rates, held), files=files, hosted=hosted)


def step_of(model: nn.Module | GraphRecord, records: Iterable[GraphRecord] | None = None) -> list[GraphRecord]:
    """The graphs that make up a step, as `predict` takes them."""
    if records is not None:
        return list(records)
    if isinstance(model, GraphRecord):
        return [model]
    return [record for record in graphs(model) if record.forward is not None]


def layouts_of(records: Iterable[GraphRecord]) -> list[GroupLayout]:
    """The groups whose parameters the graphs of ``records`` read, in the order they are first read."""
    traces = [trace for record in records for trace in record.traces()]
    return list(dict.fromkeys(ref.layout for trace in traces for ref in trace.context.parameters.values()))


def ranks_of(context: Context, layout: GroupLayout) -> str:
    """How many ranks there are, in words; by dimension where there are replicas."""
    if context.replicas == 1:
        return f"{layout.world_size} ranks"
    return f"{context.replicas} replicas of {layout.world_size} ranks"
