"""State: what a rank holds of each group of parameters.

==============  ==================================================================
parameter       a sharded tensor: full shape outside, a flat slice inside
aliases         sharded tensors that share a slice, until one gets other values
plain           what a parameter was before, which copies of it are again
backends        such tensors in code that another backend compiles
parts           stage 0 of DTensors: parameters that are this rank's parts
group           a group, and the family of groups of one module
weights         shard and replica
gradient_hooks  the user's hooks on gradients of one backward
gradients       ``.grad``, and what `zerofx.no_sync` keeps back
gathered        whole buffers that outlive what gathered them
account         bytes of each class at rest: what plans, predictions and `memory=` read
footprint       what a module's graphs leave in memory between forward and backward
carriage        what a run of a graph moves to the device and away from it: the interface that a feature fills in
home            where state lives: an interface
staging         pinned buffers between the two, and what lives in some
pinned          pinned buffers that are used again
copies          copies between the two, on streams of their own: an interface
state_file      that file: chunks, checksums, who has it
raw_file        what a file is to the operating system
space           what is free in it
transfers       the thread that reads and writes files for graphs
callbacks       what is left to packages above
==============  ==================================================================

Imports `zerofx.runtime.ranks` and what is below it::

    copies ◀── staging ◀─────┐
    ranks ◀── state_file ◀── home ◀── weights ◀── gathered, gradients ◀── group ◀── parameter
                  └── carriage ◀──────────────────────────────────────────────────┘
"""
