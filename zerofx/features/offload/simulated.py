"""What a simulated step has to know of what is offloaded."""

from __future__ import annotations

from typing import Any

import torch

from zerofx.features.offload.facts import offload_of, offloaded
from zerofx.features.offload.operators import (
    OFFLOAD,
    OFFLOAD_ACTIVATION,
    RELOAD,
    RELOAD_ACTIVATION,
    WAIT_OFFLOAD,
    WAIT_OFFLOAD_ACTIVATION,
    WAIT_RELOAD,
    WAIT_RELOAD_ACTIVATION,
    laid_out,
    new_handle,
)
from zerofx.passes import edit
from zerofx.passes.context import Context
from zerofx.runtime.state.raw_file import padded
from zerofx.runtime.state.state_file import BUFFER
from zerofx.simulate.asked import Simulated
from zerofx.simulate.recorder import Recorder, nbytes_of


def _leaves(ctx: Context) -> frozenset[str]:
    return offload_of(ctx).gradients


def _passing(ctx: Context) -> int:
    """The buffer through which activations pass to a file."""
    if offload_of(ctx).on_host:
        return 0
    largest = max((edit.hinted_nbytes(each.handle) for each in offloaded(ctx).values()), default=0)
    return padded(min(BUFFER, largest))


def _move(recorder: Recorder, func: Any, *args: Any) -> Any:
    """A reload, an offload, or the wait for one, as `zerofx.features.offload.in_file` and ``on_host`` do it."""
    name, tensor, group, *place = recorder.name, *(args if func in (RELOAD, OFFLOAD) else args[1:])
    on_host = offload_of(recorder.context).on_host
    with recorder.unseen():
        nothing = tensor.new_empty(0)
    if func is RELOAD:
        with recorder.unseen():
            here = torch.empty_like(tensor)
        recorder.allocate(here)
        recorder.classify(here, "weights")
        recorder.on_its_way[group,] = (
            recorder.transfer(name or "reload", group, read=nbytes_of(tensor), on_host=on_host),
            here,
        )
        return nothing
    if func is OFFLOAD:
        recorder.classify(tensor, "gradients")
        recorder.give_back(nbytes_of(tensor))  # the place in the file is a storage that is emptied
        number = recorder.transfer(name or "offload", group, written=nbytes_of(tensor), on_host=on_host)
        recorder.on_its_way[(group, *place)] = number, tensor
        return nothing
    number, here = recorder.on_its_way.pop((group, *place))
    recorder.arrived(name or "wait", group, number)
    if func is WAIT_OFFLOAD:
        return nothing
    if recorder.world_size == 1:  # else the gather is what makes it the group at work
        recorder.group = group
    return here


def _move_activation(recorder: Recorder, func: Any, *args: Any) -> Any:
    """What forward saves leaves, or comes back, as `zerofx.features.offload.activation_store` does it."""
    starts, on_host = func in (OFFLOAD_ACTIVATION, RELOAD_ACTIVATION), offload_of(recorder.context).on_host
    of, order, place = args if starts else args[1:]
    name, key = recorder.name or func._schema.name.split("::")[1], ("saved", place)
    if starts:
        here, read = of, 0
        if func is RELOAD_ACTIVATION:  # it has its memory from now on
            with recorder.unseen():
                here = laid_out(of, order)
            recorder.allocate(here)
            read = nbytes_of(here)
        recorder.classify(here, "activations")
        written = 0 if func is RELOAD_ACTIVATION else nbytes_of(here)
        recorder.on_its_way[key] = recorder.transfer(name, recorder.group, read, written, on_host=on_host), here
        with recorder.unseen():
            return of.new_empty(0)
    number, here = recorder.on_its_way.pop(key)
    recorder.arrived(name, recorder.group, number)
    if func is WAIT_OFFLOAD_ACTIVATION:
        with recorder.unseen():
            here = new_handle(of)
        recorder.allocate(here)
    return here


_MOVES = dict.fromkeys((RELOAD, WAIT_RELOAD, OFFLOAD, WAIT_OFFLOAD), _move)
_ACTIVATIONS = (OFFLOAD_ACTIVATION, WAIT_OFFLOAD_ACTIVATION, RELOAD_ACTIVATION, WAIT_RELOAD_ACTIVATION)

SIMULATED = Simulated(
    leaves=_leaves, passing=_passing, operators={**_MOVES, **dict.fromkeys(_ACTIVATIONS, _move_activation)}
)
