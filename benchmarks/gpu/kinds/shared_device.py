"""Two ranks that share one device. NCCL refuses that; gloo moves CUDA tensors, with NCCL's operators in the graphs.

The process group is that of tests/nccl/stand_in.py. Shards, gathers, reductions and frees are those of two GPUs; time
is not, for all goes through the host.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.kinds.ranks import trains
from benchmarks.gpu.lines import Line, Setting

LIMIT = 130


def lines(setting: Setting) -> Iterator[Line]:
    cases = [(stage, "eager") for stage in (3, 2, 0)] + [(3, "inductor"), (2, "inductor")]
    yield from trains(setting, cases[:1] if setting.small else cases, shared=2)
