"""Graph passes: FX graph in, FX graph out. `PIPELINE` says what runs in which order.

A pass is a function ``pass_(gm, ctx) -> number of edits``, in a file of its name. It changes ``gm`` in place, tags what
it inserts (``node.meta["zerofx"]``), leaves a graph alone in which there is nothing for it to do, and knows layouts,
never a process group or a module. Beside the passes stand

============  ==================================================================
context       what a pass knows of its graph, and what passes leave for each other
saved         what passes leave for each other of what is saved
edit          what passes do to graphs
schedule      where gathers can start, by bytes
ops           zerofx's own operators
pairwise      the exchange behind two of them
travel        how a buffer travels between ranks
kinds         kinds of nodes, and what is said of them
own           a user's pass, and its place in the pipeline
adopt         what a user's pass inserted gets tags and values
proof/        what `verify` is made of
============  ==================================================================

Imports `zerofx._torch`, `zerofx.model` and `zerofx.kernels`::

    _torch, model ◀── pairwise ◀── ops ◀── travel ◀── context ◀── edit ◀── every pass, adopt ◀── zerofx.features
                                                      own ◀────┘
"""

from collections.abc import Callable, Collection, Sequence

from torch.fx import GraphModule

from zerofx.passes.all_reduce import all_reduce
from zerofx.passes.context import Context, ParameterRef, Recipe, Reduction, Tag
from zerofx.passes.discard import discard
from zerofx.passes.gather import gather
from zerofx.passes.group import group
from zerofx.passes.keep import keep
from zerofx.passes.lower import lower
from zerofx.passes.narrow import narrow
from zerofx.passes.own import Pass as OwnPass
from zerofx.passes.own import join
from zerofx.passes.prefetch import prefetch
from zerofx.passes.proof.refusal import VerificationError
from zerofx.passes.recompute_dequantized import recompute_dequantized
from zerofx.passes.reduce import reduce
from zerofx.passes.rematerialize import rematerialize
from zerofx.passes.save_ahead import save_ahead
from zerofx.passes.save_entries import save_entries
from zerofx.passes.save_inputs import save_inputs
from zerofx.passes.save_parameters import save_parameters
from zerofx.passes.save_random import save_random
from zerofx.passes.save_reads import save_reads
from zerofx.passes.spare_gathers import spare_gathers
from zerofx.passes.verify import verify

Pass = Callable[[GraphModule, Context], int]

PIPELINE: list[Pass] = [rematerialize, gather, narrow, reduce, group, keep, prefetch, discard, lower, verify]
"""The passes of stages 1, 2 and 3, in order; `zerofx.features` adds others."""

REPLICATED: list[Pass] = [rematerialize, save_parameters, all_reduce, prefetch, lower, verify]
"""The passes of stage 0."""

_INSERTED: dict[str, tuple[str | None, Callable[[Context], bool]]] = {}
"""Of features' passes, by name: the pass that they stand after, and whether a graph needs them."""


def insert(
    pass_: Pass,
    when: Callable[[Context], bool],
    *,
    after: str | None = None,
    before: str | None = None,
    stages: Collection[int],
) -> None:
    """Put a pass of a feature's next to one of the core's, after those that were put there."""
    for passes in [PIPELINE] * (3 in stages) + [REPLICATED] * (0 in stages):
        names = [each.__name__ for each in passes]
        place = names.index(before) if before is not None else names.index(after or "") + 1
        while after is not None and _INSERTED.get(names[place], ("",))[0] == after:
            place += 1
        passes.insert(place, pass_)
    _INSERTED[pass_.__name__] = after, when


def pipeline(stage: int, own: Sequence[OwnPass] = (), ctx: Context | None = None) -> tuple[Pass, ...]:
    """The passes of ``stage``, in order, and a user's ``own`` among them; those that ``ctx`` needs, if it is given."""
    passes = join(PIPELINE if stage else REPLICATED, own, stage)
    if ctx is None:
        return passes
    unneeded = {name for name, (_, when) in _INSERTED.items() if not when(ctx)}
    return tuple(pass_ for pass_ in passes if isinstance(pass_, OwnPass) or pass_.__name__ not in unneeded)


def before_lower(ctx: Context) -> str:
    """The pass after which zerofx's nodes are all there and the user's are still the user's: the one before `lower`."""
    names = [pass_.__name__ for pass_ in pipeline(ctx.stage, ctx.own, ctx)]
    return names[names.index("lower") - 1]


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
    "discard",
    "gather",
    "group",
    "insert",
    "keep",
    "lower",
    "narrow",
    "pipeline",
    "prefetch",
    "recompute_dequantized",
    "reduce",
    "rematerialize",
    "save_ahead",
    "save_entries",
    "save_inputs",
    "save_parameters",
    "save_random",
    "save_reads",
    "spare_gathers",
    "verify",
]
