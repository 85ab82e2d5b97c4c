"""Graph passes: FX graph in, FX graph out. `PIPELINE` says what runs in which order.

A pass is a function ``pass_(gm, ctx) -> number of edits``, in a file of its name. It changes ``gm`` in place, tags what
it inserts (``node.meta["zerofx"]``), leaves a graph alone in which there is nothing for it to do, and knows layouts,
never a process group or a module. Beside the passes stand

============  ==================================================================
context       what a pass knows of its graph, and the passes tell each other
saved         what passes tell each other of what is saved
edit          what passes do to graphs
schedule      where gathers can start, by bytes
ops           zerofx's own operators
pairwise      the exchange behind two of them
alike         which values all ranks of a process group have alike
travel        how a buffer travels between ranks: a seam
coded         buffers in codes: operators, and a gather outside of graphs
carry         state that lives elsewhere: operators that bring it and take it away
feedback      what a gradient's code cut off is added to the next: an operator
kinds         nodes that corners insert
own           a user's pass, and its place in the pipeline
adopt         what a user's pass inserted gets tags and values
proof/        what `verify` is made of
lookups/      a corner: rows of tables that are only looked up
============  ==================================================================

Imports `zerofx._torch`, `zerofx.model` and `zerofx.kernels`::

    _torch, model ◀── pairwise ◀── ops ◀── travel ◀── context, coded, carry ◀── edit ◀── every pass, adopt
                                                      own ◀────┘
"""

from collections.abc import Callable, Sequence

from torch.fx import GraphModule

from zerofx.passes.all_reduce import all_reduce
from zerofx.passes.compress import compress
from zerofx.passes.context import Context, ParameterRef, Recipe, Reduction, Tag
from zerofx.passes.discard import discard
from zerofx.passes.far import far
from zerofx.passes.fetch import fetch
from zerofx.passes.gather import gather
from zerofx.passes.group import group
from zerofx.passes.keep import keep
from zerofx.passes.lower import lower
from zerofx.passes.narrow import narrow
from zerofx.passes.near import near
from zerofx.passes.own import Pass as OwnPass
from zerofx.passes.own import join
from zerofx.passes.prefetch import prefetch
from zerofx.passes.proof.refusal import VerificationError
from zerofx.passes.put import put
from zerofx.passes.reduce import reduce
from zerofx.passes.rematerialize import rematerialize
from zerofx.passes.replicate import replicate
from zerofx.passes.save_ahead import save_ahead
from zerofx.passes.save_entries import save_entries
from zerofx.passes.save_parameters import save_parameters
from zerofx.passes.save_parts import save_parts
from zerofx.passes.save_random import save_random
from zerofx.passes.save_reads import save_reads
from zerofx.passes.spare_gathers import spare_gathers
from zerofx.passes.step import step
from zerofx.passes.stow import stow
from zerofx.passes.verify import verify

Pass = Callable[[GraphModule, Context], int]

PIPELINE: list[Pass] = [
    rematerialize,
    gather,
    narrow,
    reduce,
    group,
    keep,
    near,
    prefetch,
    far,
    replicate,
    fetch,
    save_parts,
    discard,
    step,
    put,
    stow,
    compress,
    lower,
    verify,
]
"""The passes of stages 1, 2 and 3, in order. Corners insert theirs (`zerofx.passes.lookups`)."""

REPLICATED: tuple[Pass, ...] = (
    rematerialize,
    save_parameters,
    all_reduce,
    prefetch,
    save_parts,
    stow,
    lower,
    verify,
)
"""The passes of stage 0."""


def pipeline(stage: int, own: Sequence[OwnPass] = ()) -> tuple[Pass, ...]:
    """The passes of ``stage``, in order, and a user's ``own`` among them."""
    return join(PIPELINE if stage else REPLICATED, own, stage)


def before_lower(stage: int, own: Sequence[OwnPass] = ()) -> str:
    """The pass after which zerofx's nodes are all there and the user's are still the user's: the one before `lower`."""
    names = [pass_.__name__ for pass_ in pipeline(stage, own)]
    return names[names.index("lower") - 1]


def __getattr__(name: str) -> Pass:
    """A pass that a corner has put into `PIPELINE`, under its own name."""
    found = next((pass_ for pass_ in PIPELINE if pass_.__name__ == name), None)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


__all__ = [
    "PIPELINE",
    "REPLICATED",
    "Context",
    "OwnPass",
    "ParameterRef",
    "Recipe",
    "Reduction",
    "Tag",
    "VerificationError",
    "all_reduce",
    "before_lower",
    "compress",
    "discard",
    "far",
    "fetch",
    "gather",
    "group",
    "keep",
    "lower",
    "narrow",
    "near",
    "pipeline",
    "prefetch",
    "put",
    "reduce",
    "rematerialize",
    "replicate",
    "save_ahead",
    "save_entries",
    "save_parameters",
    "save_parts",
    "save_random",
    "save_reads",
    "spare_gathers",
    "step",
    "stow",
    "verify",
]
