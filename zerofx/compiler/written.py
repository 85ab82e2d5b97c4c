"""A graph that writes to sharded weights: it writes to copies, and what these hold in the end goes to the slices.

::

    w: placeholder                              w: placeholder
    w.data.clamp_(-1, 1)                        v = zerofx.copied(w)
    y = linear(x, w)                            v.data.clamp_(-1, 1)
    return y                      ─────▶        y = linear(x, v)
                                                return y, v.detach()        after the run: w.copy_(v), slice by slice

A gathered weight is for reading, and AOTAutograd takes many a write out of the graph: it copies the new value to the
parameter afterwards, which has no memory. Whether a graph writes is known when AOTAutograd has traced it
(``nn.Embedding(max_norm=...)`` writes, and does not say so in Dynamo's graph). So it is compiled as it is first, and
anew where that raises `Written`.

Each rank takes its slice of the value that it has computed. Where ranks compute the same, it is that value; where they
do not, each element is the value of the rank that has it. So all ranks have the same weight afterwards.

The copy is saved for backward, if that needs what was read of it: the parameter has another value by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from zerofx import _torch
from zerofx.compiler.pair import Pair
from zerofx.passes import edit
from zerofx.runtime.state.callbacks import CALLBACKS


class Written(Exception):  # it is no error: whoever compiles starts anew
    """A graph writes to the sharded weights among its inputs at ``places``."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__(places)
        self.places = places

    @classmethod
    def in_chain(cls, error: BaseException | None) -> Written | None:
        """The one that ``error`` is, or that it was raised from."""
        while error is not None and not isinstance(error, Written):
            error = error.__cause__ or error.__context__
        return error


def check_unwritten(gm: GraphModule, pair: Pair) -> None:
    """Raise `Written` where a graph of AOTAutograd's, joint or forward, writes to weights. ``pair`` is given up then.

    Of what is copied already, the copies are saved. In stage 0 each rank has them whole, and such writes are what they
    are without zerofx.
    """
    unit = pair.unit
    if not unit.groups or not unit.family.stage:
        return
    sharded = unit.sharded
    written = _torch.inputs_written_behind(gm).intersection(sharded)
    for node in gm.graph.find_nodes(op="placeholder"):
        if (place := _torch.input_index(node)) is not None and place in sharded:
            views = edit.aliases(node)
            users = {user: None for view in views for user in view.users if isinstance(user.target, _torch.OpOverload)}
            if any(view in edit.written_by(user) for user in users for view in views):
                written.add(place)
    if written and unit.family.turns is not None:
        raise RuntimeError(
            f"uneven=True with a forward that writes to {sharded[min(written)].slot.name!r}: each rank takes its slice "
            "of what it has computed, and a rank that runs another graph computes nothing. Write to weights between "
            "steps, or leave uneven= out."
        )
    if written:
        raise Written(sorted(written))
    _save_copies(gm)


def write_to_copies(gm: GraphModule, places: Sequence[int]) -> None:
    """Have Dynamo's graph write to copies of its inputs at ``places``, and return them after its other outputs."""
    graph = gm.graph
    inputs = graph.find_nodes(op="placeholder")
    output, values = graph.output_node(), []
    for weight in (inputs[place] for place in places):
        with graph.inserting_after(inputs[-1]):
            copied = graph.call_function(torch.ops.zerofx.copied.default, (weight,))
        copied.meta |= {key: weight.meta[key] for key in ("example_value", "stack_trace") if key in weight.meta}
        weight.replace_all_uses_with(copied, delete_user_cb=lambda user, own=copied: user is not own)
        with graph.inserting_before(output):
            values.append(graph.call_method("detach", (copied,)))
    output.args = ((*output.args[0], *values),)  # type: ignore[misc]
    edit.finish(gm, len(places))


def _save_copies(joint: GraphModule) -> None:
    """Have backward read the copies that forward has made: made anew, they would hold what was written since."""
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.zerofx.copied.default):
        _torch.must_save(node)


def writing(compiled: Callable, places: Sequence[int]) -> Callable:
    """Wrap a compiled function that returns new values of its arguments at ``places`` last: they are written there."""

    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        values = outputs[-len(places) :]
        with torch.no_grad():
            for place, value in zip(places, values, strict=True):
                weight = args[place]
                with weight._group.gathered.outdated():
                    CALLBACKS.operation(torch.Tensor.copy_, (weight, value), {})
        return outputs[: -len(places)]

    return run
