"""What draws random numbers is not drawn once more by backward.

::

    forward     mask = bernoulli(p)                      forward     mask = bernoulli(p)
                y = x * mask                                         y = x * mask
    saved       x                          ─────▶        saved       mask
    backward    mask = bernoulli(p)    another one       backward    dx = dy * mask
                dx = dy * mask

A partitioner that recomputes may take a drawing for an operator like others. Drawn again, it gives other numbers: the
gradient belongs to another forward. So what draws is marked to be saved, if anything after it is needed. Inductor
draws a seed once and makes numbers of it when they are read: there it is the seed, of 8 bytes, that is saved.

Runs on the joint graph, before it is cut into forward and backward. Sound because it moves that cut, and nothing else.
Leaves alone what a checkpoint has marked: PyTorch keeps the generator's state for it. Attention with a dropout of 0
draws nothing.
"""

from __future__ import annotations

from torch.fx import GraphModule

from zerofx._torch import must_save, saving_is_decided
from zerofx.passes import edit


def save_random(gm: GraphModule) -> int:
    """Mark what is to be saved; returns how many nodes were marked."""
    late = edit.behind_tangents(gm.graph)
    marked = 0
    for node in gm.graph.nodes:
        if node not in late and edit.draws(node) and not saving_is_decided(node):
            must_save(node)
            marked += 1
    return marked
