"""Eager: what sharded tensors do outside of graphs.

============  ==================================================================
elementwise   which operations run on slices, and which need the whole tensor
ondemand      one parameter at a time: its slices gathered, its gradient reduced
unshard       the whole tensor for one operation
writes        writes that are not slice by slice
norms         norms of many tensors with one all-reduce
reductions    numbers of a whole tensor: sums, extremes, dot products
averages      gradients of parameters that zerofx does not shard
leaf          modules that are gathered whole when they are entered
whole         whole weights for a while: `zerofx.unsharded`
============  ==================================================================

Imports `zerofx.runtime.state` and what is below it::

    state ◀── ondemand ◀── whole ◀── leaf
              ondemand ◀── averages
    state ◀── norms, ondemand ◀── unshard, whole ◀── writes ◀── elementwise
    state ◀── norms ◀── reductions ◀── elementwise
"""
