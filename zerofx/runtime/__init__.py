"""What is there while a model trains.

============  ==================================================================
ranks         who takes part, and whether all are in step
state         what a rank holds of each group
eager         what sharded tensors do outside of graphs
optim         the optimizer's step over shards
============  ==================================================================

Imports run to the left, and down to `zerofx.passes`, `zerofx.model` and `zerofx._torch`::

    ranks ◀── state ◀── eager ◀── optim ◀── checkpoint, compiler
"""
