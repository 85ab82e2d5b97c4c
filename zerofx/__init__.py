"""ZeRO as a compiler: sharded data parallelism as passes over torch.fx graphs."""

from zerofx.agree import OutOfStepError
from zerofx.api import compile, drop_kept, graphs, no_sync, verify
from zerofx.calibrate import calibrate
from zerofx.checkpoint import CheckpointError, export_safetensors, full_state_dict, latest, load, save
from zerofx.dry_run import dry_run
from zerofx.grouping import Grouping
from zerofx.memory import MemorySummary, memory_summary
from zerofx.optim import AdamW
from zerofx.parameter import ShardedParameter, ShardedTensor
from zerofx.passes import VerificationError
from zerofx.passes import ops as _ops  # registers zerofx::unshard and zerofx::reduce_grad
from zerofx.plan import plan
from zerofx.precision import MixedPrecision
from zerofx.predict import Prediction, Rates, predict
from zerofx.report import report
from zerofx.shard import shard
from zerofx.step import step_in_backward
from zerofx.whole import unsharded

__version__ = "0.1.0"
__all__ = [
    "AdamW",
    "CheckpointError",
    "Grouping",
    "MemorySummary",
    "MixedPrecision",
    "OutOfStepError",
    "Prediction",
    "Rates",
    "ShardedParameter",
    "ShardedTensor",
    "VerificationError",
    "calibrate",
    "compile",
    "drop_kept",
    "dry_run",
    "export_safetensors",
    "full_state_dict",
    "graphs",
    "latest",
    "load",
    "memory_summary",
    "no_sync",
    "plan",
    "predict",
    "report",
    "save",
    "shard",
    "step_in_backward",
    "unsharded",
    "verify",
]
del _ops
