"""save_parameters: a parameter that forward saves for backward leaves the graph's outputs; the caller puts it there.

::

    before:  output((loss, primals_1, relu))        primals_1 is a parameter, saved for backward
    after:   output((loss, None,      relu))        ctx.saved_parameters = {1: primals_1's parameter}

Sound, because the parameter outlives the step: whoever calls forward has it. It is also needed. Inductor may return an
input in other strides than it came in (a convolution's weight, channels-last), and backward reads the parameter's own.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from zerofx.passes import edit
from zerofx.passes.context import Context


def save_parameters(gm: GraphModule, ctx: Context) -> int:
    """Take saved parameters out of forward's outputs.

    Needs ``ctx.saved`` and ``ctx.parameters``. Provides ``ctx.saved_parameters``.
    """
    outputs = edit.output_values(gm.graph)
    for i in ctx.saved:
        if isinstance(value := outputs[i], Node) and value.name in ctx.parameters:
            ctx.saved_parameters[i] = ctx.parameters[value.name]
            outputs[i] = None
    edit.set_output_values(gm.graph, outputs)
    return edit.finish(gm, len(ctx.saved_parameters))
