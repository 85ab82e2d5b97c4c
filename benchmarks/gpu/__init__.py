"""``make gpu``: what one machine with GPUs can show of zerofx, in ten minutes, as one report.

::

    python -m benchmarks.gpu                        # one GPU
    python -m benchmarks.gpu --ranks 8              # eight, with NCCL: `make gpus`
    python -m benchmarks.gpu --device cpu           # what can be shown without one, small; the rest says so

==============  ====================================================================================
file            what
==============  ====================================================================================
__main__        the command: kinds in order of worth, each in its own process, within ten minutes
lines           a line of the report: what was expected, what was found
report          the JSON and the page
ranks           processes that are ranks, for kinds that need some
training        the small model that kinds train, and plain PyTorch beside it
kinds/          the kinds of lines, a file each
==============  ====================================================================================

A kind is a file in ``kinds`` with ``LIMIT``, its seconds, and ``lines(setting)``, which yields a `Line` as soon as it
is known. What raises, crashes or hangs costs its own lines and no others: it is a line in the report. So a new kind is
a new file and a name in `KINDS`.
"""

KINDS = (
    "machine",
    "kernels",
    "ranks",
    "shared_device",
    "memory",
    "cuda_graph",
    "offload",
    "optimizer",
    "step_time",
    "zoo",
    "compile_time",
)
"""In order of worth: what comes late may find no time left."""

__all__ = ["KINDS"]
