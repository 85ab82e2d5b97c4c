"""``make gpu``: what one machine with GPUs can show of zerofx, in seven minutes, as one report.

::

    python -m benchmarks.gpu                        # one GPU
    python -m benchmarks.gpu --ranks 8              # eight, with NCCL: `make gpus`
    python -m benchmarks.gpu --device cpu           # what can be shown without one, small; the rest says so

==============  ====================================================================================
file            what
==============  ====================================================================================
__main__        the command: kinds, each in its own process with a limit of its own
lines           a line of the report: what was expected, what was found
report          the JSON and the page
ranks           processes that are ranks, for kinds that need some
probes          small questions, a function each, that the kind of that name asks
training        the small model that kinds train, and plain PyTorch beside it
kinds/          the kinds of lines, a file each
==============  ====================================================================================

A kind is a file in ``kinds`` with ``LIMIT``, its seconds, and ``lines(setting)``, which yields a `Line` as soon as it
is known. What raises, crashes or hangs costs its own lines and no others: it is a line in the report. So a new kind is
a new file and a name in `KINDS`.
"""

RIGHT = ("machine", "probes", "kernels", "ranks", "shared_device", "memory", "cuda_graph", "offload", "zoo")
"""Is it right? On a GPU all at once: none of them is timed."""
FAST = ("optimizer", "step_time", "compile_time")
"""How fast is it? One after the other, and alone; what comes late may find no time left."""
KINDS = (*RIGHT, *FAST)

__all__ = ["FAST", "KINDS", "RIGHT"]
