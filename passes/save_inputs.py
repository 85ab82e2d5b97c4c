"""What forward saves of an input is the input itself, not a view of it.

::

    forward     k = queue.t()                         forward     k = queue.t()
                y = z @ k                                         y = z @ k
    saved       k                          ─────▶     saved       queue
    backward    dz = dy @ k.t()                       backward    dz = dy @ queue.t().t()

Both are the same memory, and the partitioner does not care which it takes. Autograd does: it refuses a backward that
reads what was written since forward, by the version of the tensor that was saved. Code of Inductor returns a view as a
tensor with a version of its own, so a write to the input is not seen, and gradients are silently wrong: of a model that
has read ``queue.clone()``, and adds to ``queue`` when the graph has run. (Inductor drops such copies.)

Runs on the joint graph, when it is known what forward saves. Sound because it moves the cut between forward and
backward, and nothing else. Leaves alone parameters, of which `rematerialize` does the same; inputs that the graph
itself writes to, of which `save_reads` has copies; and views whose sizes are known when the graph runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from zerofx._torch import OpOverload, written_behind
from zerofx.passes import edit
from zerofx.passes.context import ParameterRef


def save_inputs(graph: Graph, saved: Sequence[Node], parameters: Mapping[str, ParameterRef]) -> list[Node]:
    """``saved`` with inputs in the places of their views. ``parameters``: by the placeholder's name."""
    writes = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    written = {*written_behind(graph), *(memory for node in writes for memory in edit.written_by(node))}

    def seen(node: Node) -> Node:
        source = node
        while _is_view(source):
            (source,) = source.all_input_nodes
        if source.op != "placeholder" or source.name in parameters:
            return node
        return node if source is node or not written.isdisjoint(edit.aliases(source)) else source

    return list(dict.fromkeys(map(seen, saved)))


def _is_view(node: Node) -> bool:
    return edit.is_view_or_cast(node) and edit.may_alias(node) and len(node.all_input_nodes) == 1
