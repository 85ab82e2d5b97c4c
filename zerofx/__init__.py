"""ZeRO as a compiler: sharded data parallelism as passes over torch.fx graphs."""

from zerofx.api import compile, drop_kept, graphs, no_sync
from zerofx.grouping import Grouping
from zerofx.optim import AdamW
from zerofx.parameter import ShardedParameter, ShardedTensor
from zerofx.passes import ops as _ops  # registers zerofx::unshard and zerofx::reduce_grad
from zerofx.plan import plan
from zerofx.precision import MixedPrecision
from zerofx.shard import shard

__version__ = "0.1.0"
__all__ = [
    "AdamW",
    "Grouping",
    "MixedPrecision",
    "ShardedParameter",
    "ShardedTensor",
    "compile",
    "drop_kept",
    "graphs",
    "no_sync",
    "plan",
    "shard",
]
del _ops
