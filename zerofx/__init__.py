"""ZeRO as a compiler: sharded data parallelism as passes over torch.fx graphs.

The way of a weight, from ``zerofx.compile(model, stage=3)`` through one training step::

    compiler/shard.py             every check first; then its group is broadcast from rank 0
    runtime/state/parameter.py    it becomes a `ShardedParameter`: full shape outside, this rank's slice inside
    runtime/state/weights.py      the slice is a view of the group's shard; the rest of the weight is freed
    compiler/backend.py           Dynamo captures the model with it; AOTAutograd cuts forward from backward
    passes/gather.py, group.py    in both graphs the shard comes in, is gathered, and the weight is a view of that
    passes/prefetch.py            the gather starts ahead of its use; discard.py ends the buffer after the last use
    compiler/runners.py           at every step the graph is handed the shard
    passes/reduce.py, group.py    its gradient is packed and reduced: each rank keeps its part
    runtime/state/gradients.py    that part becomes ``.grad``
    runtime/optim/adamw.py        the optimizer updates the shard, which is where the next gather begins

Under a trainer of others, ``zerofx.integrations`` has what takes these steps; it is imported by those who use it.
"""

from zerofx import features as _features
from zerofx.checkpoint import (
    CheckpointError,
    export_safetensors,
    full_parameters,
    full_state_dict,
    latest,
    load,
    receive_parameters,
    save,
    send_parameters,
)
from zerofx.compiler.api import compile, drop_kept, graphs, no_sync, published, verify
from zerofx.compiler.shard import shard
from zerofx.inspect.choose.alike import explain
from zerofx.inspect.choose.choice import Choice
from zerofx.inspect.choose.choose import choose
from zerofx.inspect.memory import MemorySummary, memory_summary
from zerofx.inspect.predict.calibrate import calibrate
from zerofx.inspect.predict.dry_run import dry_run
from zerofx.inspect.predict.plan import plan
from zerofx.inspect.predict.predict import predict
from zerofx.inspect.report import report
from zerofx.model.grouping import Grouping
from zerofx.model.memory import Memory
from zerofx.model.offload import Offload
from zerofx.model.precision import MixedPrecision
from zerofx.model.sharding import Sharding
from zerofx.model.wire import Wire
from zerofx.passes import VerificationError
from zerofx.passes import ops as _ops  # registers zerofx::unshard and zerofx::reduce_grad
from zerofx.passes.own import Pass
from zerofx.runtime.eager.whole import unsharded
from zerofx.runtime.optim.adamw import AdamW
from zerofx.runtime.optim.ema import EMA
from zerofx.runtime.optim.explained import explain_optimizer
from zerofx.runtime.optim.muon import Muon
from zerofx.runtime.optim.step import step_in_backward
from zerofx.runtime.ranks.agree import OutOfStepError
from zerofx.runtime.state.parameter import ShardedParameter, ShardedTensor
from zerofx.runtime.state.state_file import OffloadError
from zerofx.simulate.clock import Prediction, Rates

__version__ = "0.1.0"
__all__ = [
    "EMA",
    "AdamW",
    "CheckpointError",
    "Choice",
    "Grouping",
    "Memory",
    "MemorySummary",
    "MixedPrecision",
    "Muon",
    "Offload",
    "OffloadError",
    "OutOfStepError",
    "Pass",
    "Prediction",
    "Rates",
    "ShardedParameter",
    "ShardedTensor",
    "Sharding",
    "VerificationError",
    "Wire",
    "calibrate",
    "choose",
    "compile",
    "drop_kept",
    "dry_run",
    "explain",
    "explain_optimizer",
    "export_safetensors",
    "full_parameters",
    "full_state_dict",
    "graphs",
    "latest",
    "load",
    "memory_summary",
    "no_sync",
    "plan",
    "predict",
    "published",
    "receive_parameters",
    "report",
    "save",
    "send_parameters",
    "shard",
    "step_in_backward",
    "unsharded",
    "verify",
]
_features.load()
del _ops, _features
