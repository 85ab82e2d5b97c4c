"""Ranks: who takes part, how they reach each other, and whether they are in step.

============  ==================================================================
sharing       who shares what: an interface
agree         the collectives of a graph, compared over ranks
used          which parameters any rank has a gradient of
watch         the watchdog: behind `timeout=`, a hang is an error that says who is missing
watched       graphs whose collectives are under watch
lookout       what the watchdog makes of what the other ranks tell
steps         what optimizers did, as ranks tell each other
turns         ranks that take part in graphs which they do not run
place         where a rank is while others wait for it
quantized     weights that travel quantized: the interface that a feature fills in
tracing       names in profiler traces
============  ==================================================================

Imports `zerofx.passes`, `zerofx.model` and `zerofx._torch`::

    passes ◀── ranks ◀── state
"""
