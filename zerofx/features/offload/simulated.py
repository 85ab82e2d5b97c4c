"""What a simulated step has to know of what is offloaded."""

from __future__ import annotations

from zerofx.features.offload.facts import offload_of, offloaded
from zerofx.passes import edit
from zerofx.passes.context import Context
from zerofx.runtime.state.raw_file import padded
from zerofx.runtime.state.state_file import BUFFER
from zerofx.simulate.asked import Simulated


def _leaves(ctx: Context) -> frozenset[str]:
    return offload_of(ctx).gradients


def _passing(ctx: Context) -> int:
    """The buffer through which activations pass."""
    largest = max((edit.hinted_nbytes(each.handle) for each in offloaded(ctx).values()), default=0)
    return padded(min(BUFFER, largest))


SIMULATED = Simulated(leaves=_leaves, passing=_passing)
