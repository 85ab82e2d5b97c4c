"""Checkpoints: `save`, `load`, `latest`, and weights for other programs.

============  ======================================================================================
file          what it knows
============  ======================================================================================
boxes         a flat slice as rectangles
dcp           torch.distributed.checkpoint's protocol, and its index read safely
nested        values that are made of others, and what of them can be read safely
ranks         an error of one rank is an error of all
folder        a checkpoint is whole or not there
state         module and optimizer by name
cut_off       what codes cut off of gradients
extra         random generators, schedulers, plain values
saving        from states to a folder
sources       what can be loaded: four formats in one view
restore       what goes where
loading       from a folder to states
export        unsharded weights
parameters    the same on their way to another program, a group at a time
broadcast     the same over a process group, to ranks that do not train
pretrained    save_pretrained of a sharded model of transformers
deepspeed     ZeRO's checkpoints
============  ======================================================================================

Imports `zerofx.runtime` and what is below it::

    optim ◀── boxes, nested, dcp, ranks, state ◀── folder, sources ◀── saving, restore ◀── loading, export ◀── compiler
"""

from zerofx.checkpoint.broadcast import receive_parameters, send_parameters
from zerofx.checkpoint.export import export_safetensors, full_state_dict
from zerofx.checkpoint.loading import latest, load
from zerofx.checkpoint.parameters import full_parameters
from zerofx.checkpoint.ranks import CheckpointError
from zerofx.checkpoint.saving import Saving, save

__all__ = [
    "CheckpointError",
    "Saving",
    "export_safetensors",
    "full_parameters",
    "full_state_dict",
    "latest",
    "load",
    "receive_parameters",
    "save",
    "send_parameters",
]
