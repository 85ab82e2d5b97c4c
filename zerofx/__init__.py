"""ZeRO as a compiler: sharded data parallelism as passes over torch.fx graphs."""

from zerofx.checkpoint import CheckpointError, export_safetensors, full_state_dict, latest, load, save
from zerofx.compiler.api import compile, drop_kept, graphs, no_sync, verify
from zerofx.compiler.shard import shard
from zerofx.inspect.memory import MemorySummary, memory_summary
from zerofx.inspect.predict.calibrate import calibrate
from zerofx.inspect.predict.dry_run import dry_run
from zerofx.inspect.predict.plan import plan
from zerofx.inspect.predict.predict import Prediction, Rates, predict
from zerofx.inspect.report import report
from zerofx.model.grouping import Grouping
from zerofx.model.precision import MixedPrecision
from zerofx.passes import VerificationError
from zerofx.passes import ops as _ops  # registers zerofx::unshard and zerofx::reduce_grad
from zerofx.runtime import corners as _corners
from zerofx.runtime.eager.whole import unsharded
from zerofx.runtime.optim.adamw import AdamW
from zerofx.runtime.optim.step import step_in_backward
from zerofx.runtime.ranks.agree import OutOfStepError
from zerofx.runtime.state.parameter import ShardedParameter, ShardedTensor

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
_corners.furnish()
del _ops, _corners
