"""What one division of `memory=` would take: live bytes, and seconds. Predicted while the model is compiled.

::

    zerofx.compiler.division ──▶ graphs of a trial ──▶ price: a rehearsal, on the clock ──▶ Price

It is the prediction of `zerofx.predict`, of graphs that nothing has run yet. They are followed as the eager executor
would run them. What kernels take inside of themselves is found by running each of them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from zerofx import _torch
from zerofx.model.layout import GroupLayout
from zerofx.model.memory import Memory
from zerofx.passes.context import Context
from zerofx.runtime.state.account import Elements, Terms, of_group, touched
from zerofx.simulate.asked import ask
from zerofx.simulate.clock import LiveBytes, on_the_clock, ordinary
from zerofx.simulate.files import Files
from zerofx.simulate.hosted import Hosted
from zerofx.simulate.rehearsal import Graph, Pair, rehearse, rehearse_micro_batches
from zerofx.simulate.workspace import Workspaces


class Price(NamedTuple):
    """What a division takes: live bytes by class at the peak, those left after forward, seconds of a step.

    ``live``: bytes by class while each operation runs, graph after graph.
    """

    peak: dict[str, int]
    left: int
    step_s: float
    live: tuple[tuple[LiveBytes, ...], ...] = ()


def price(forward: Graph, backwards: Sequence[Graph], memory: Memory, found: dict[Any, int] | None) -> Price:
    """Of one optimizer step's micro-batches: each of ``backwards`` follows a ``forward``.

    Args:
        backwards: one; or the first, one in the middle where there is one, and the last of several micro-batches.
        found: the workspaces that are known already, which grows; None: kernels take none.
    """
    workspaces = None if found is None else Workspaces(found)
    phases = rehearse_micro_batches(forward, backwards, workspaces)
    rates = memory.rates or ordinary(_device(forward))
    prediction = on_the_clock(phases, rates)
    seconds = [phase.time_s or 0.0 for phase in prediction.phases]
    in_step = [a + b for a, b in zip(seconds[::2], seconds[1::2], strict=True)]
    again = memory.micro_batches - len(in_step)  # of the one before the last, or of a last one that is like it
    step_s = sum(in_step) + again * in_step[-2 if len(in_step) > 2 else -1]
    left = sum(prediction.phases[0].live[-1].values())
    live = tuple(phase.live for phase in prediction.phases)
    return Price({str(kind): n for kind, n in prediction.peak.items()}, left, step_s, live)


def at_rest(forward: Graph, layouts: Sequence[GroupLayout], memory: Memory) -> int:
    """Bytes of memory that are there before a step and after it.

    Weights, what the optimizer keeps, and the graph's other inputs. And what stands for each parameter and for its
    gradient: an element; and the optimizer's counter of its steps: 4 bytes. What lives in a file is not there, but the
    buffers through which it passes are. Nor is what lives in the host's memory, buffers included.

    Args:
        layouts: of the module's groups, as graphs see them.
    """
    context = forward.context
    held = passing(Files.of_module(context, layouts), context)
    for layout in layouts:
        terms = Terms.of_graphs(context, layout, (0, memory.moments * layout.dtype.itemsize))
        there = of_group(layout, context, terms)
        held += there.weights + int(there.moments)
        held += len(layout.slots) * (2 * layout.dtype.itemsize + 4)
    inputs = {}
    for node in forward.before.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name not in context.parameters and isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            inputs[storage._cdata] = int(_torch.without_symbols(storage.nbytes()))
    return held + sum(inputs.values())


def optimizer_s(forward: Graph, layouts: Sequence[GroupLayout], memory: Memory) -> float:
    """Seconds of the step of `zerofx.AdamW` after the backwards: bound by memory, by the disk where that is known, and
    by the link to the host where state is there.

    Args:
        layouts: of the module's groups, as graphs see them.
    """
    context, rates = forward.context, memory.rates or ordinary(_device(forward))
    if (files := Files.of_module(context, layouts)) is not None:
        through = 0.0 if rates.disk_bytes_per_s is None else (files.read + files.written) / rates.disk_bytes_per_s
        return float(max(through, files.touched / rates.memory_bytes_per_s))
    if (hosted := Hosted.of_module(context, layouts)) is not None:
        return hosted.seconds(rates.of_host(), rates.memory_bytes_per_s)
    nbytes = 0
    for layout in (layout for layout in layouts if layout.requires_grad):
        terms = Terms.of_graphs(context, layout)
        n = Elements.of(layout, terms)
        nbytes += touched(layout.dtype.itemsize) * (n.numel if terms.given == "parameters" else n.owned)
    return float(nbytes / rates.memory_bytes_per_s)


def passing(files: Files | None, context: Context) -> int:
    """Bytes of the buffers through which state passes, and of the one through which activations do."""
    return max(0 if files is None else files.passing, ask("passing", context) or 0)


def of_code(record: Pair) -> int:
    """The most bytes that a step allocates with the code that Inductor wrote for ``record``; it runs kernels, too."""
    return on_the_clock(rehearse([record], probe=True)).peak_bytes


def _device(forward: Graph) -> str:
    values = (node.meta.get("val") for node in forward.before.graph.find_nodes(op="placeholder"))
    return next((x.device.type for x in values if isinstance(x, torch.Tensor)), "cpu")
