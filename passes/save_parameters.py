"""save_parameters: a parameter that forward saves for backward leaves the graph's outputs; the caller puts it there.

::

    before:  output((loss, primals_1, relu))        primals_1 is a parameter, saved for backward
    after:   output((loss, None,      relu))        ctx.found.saved_parameters = {1: primals_1's parameter}

Sound, because whoever calls forward holds the parameter, and saves it in the same place of the same list. It is needed,
too. Inductor may return an input in other strides than it came in: a convolution that sees channels-last data has its
weight so. Backward is compiled for these strides then, and is handed the parameter with its own.

In stage 0 it is a pass of the pipeline, where parameters stay inputs. In the other stages `gather` calls it, since a
parameter that is only saved is not to be gathered.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from zerofx.passes import edit
from zerofx.passes.context import Context


def save_parameters(gm: GraphModule, ctx: Context) -> int:
    """Take saved parameters out of forward's outputs; returns how many.

    Requires ``ctx.saved`` and ``ctx.parameters``; runs after `rematerialize`. Provides ``ctx.found.saved_parameters``.
    """
    outputs, edits = edit.output_values(gm.graph), 0
    for i in ctx.saved:
        if isinstance(value := outputs[i], Node) and value.name in ctx.parameters:
            ctx.found.saved_parameters[i] = ctx.parameters[value.name]
            outputs[i], edits = None, edits + 1
    edit.set_output_values(gm.graph, outputs)
    return edit.finish(gm, edits)
