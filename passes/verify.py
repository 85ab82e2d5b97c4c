"""The finished graph, read once more from its first node to its last: is it the graph that was to be made?

The passes are not asked. What each node is follows from operators, arguments and inputs' shapes, and from what a
graph is given: which inputs are parameters, which outputs gradients, the layouts. What a pass wrote into the context is
read only where it is a promise to whoever runs the graph (which inputs are shards, what the extra outputs are), and is
checked like the rest. Tags name things in errors.

===========  ============================================================================================
rule         what must hold
===========  ============================================================================================
inputs       no parameter is an input any more; the last inputs are the shards (replicas, kept gradients, what was
             left gathered) that were promised, in size and dtype
gather       nothing reads a shard but its one gather; each parameter is gathered once, and is read; of
             tables, rows may be picked where they are
wait         each collective is waited for exactly once; nothing reads or returns what is under way
group        every collective runs in its process group, over as many ranks as the layout has, and sums
slice        each weight is exactly the part of the gathered buffer where its layout has it
discard      a gathered buffer is given back right after its last use, and not read afterwards
budget       gathered bytes never exceed the memory budget
saved        nothing full-size goes from forward to backward, but what is kept; where a parameter, or a view of one, was
             saved, the caller puts that parameter
reduction    each gradient is reduced once: where its layout has it, all of it and nothing else, times one over the
             number of ranks; where there are replicas it is summed over these once, after that; the sum is not narrowed
             before it is scaled
order        values are computed before they are read; gathers start in the order they are waited for, reductions too;
             no size depends on data; where the executor schedules, the order is pinned
wire         what travels in codes is written and read once, by one description, which is the option's and the layout's
step         where groups are updated in backward: each once, by its averaged gradient, after whatever reads the weights
             that this changes; its replicas at most once, after that; the order is pinned
reload       weights that live elsewhere are read by their reload alone: each comes once, is waited for once, and read;
             two are on their way at most, in the order of the graph, each after the readers of what is gone by then
offload      gradients that live elsewhere are taken away once, by the place that the caller knows, and waited for once;
             two are on their way at most, and nothing writes to one of them
parts        of what all tensor-parallel ranks have alike, a part is saved, in the order of its memory; backward gathers
             each once, in their process group, and reads what forward would have saved; one is under way beside the one
             that is waited for; the order among that group's collectives is pinned
activation   what forward saves and is to leave is taken away once, whole, and its handle is saved; nothing else of it
             is returned; backward reloads each handle's tensor once, by its number, and reads nothing else of it; two
             are on their way at most, in the order of the graph, and nothing writes to one of them
write        nothing writes to weights, nor can the caller, but where the model returns a view of them; all other
             writes stay as they were
own          what a user's pass inserted after ours is read by such passes alone, and writes to nothing else; its
             collectives are waited for once, take turns with all others as the graph reads, and serve what is
             published; its last readers of a gradient come before the update
value        every output, and every gradient before it is reduced, is what the graph before all passes computes
===========  ============================================================================================

``value`` needs that graph (``ctx.before``: after a user's passes that stand before all of ours); values have
numbers (`zerofx.passes.proof.meaning`). It finds two weights of one shape that were swapped.

Sound passes are not enough: this one would have to be wrong in the same way. Time is linear in the size of the graph.
Runs last; changes nothing.
"""

from __future__ import annotations

from torch.fx import GraphModule

from zerofx.passes.context import Context
from zerofx.passes.proof.live import check_discards, check_live_bytes, check_order, check_pinned, check_read
from zerofx.passes.proof.outputs import Outputs
from zerofx.passes.proof.reader import Reader
from zerofx.passes.proof.rules import ask


def verify(gm: GraphModule, ctx: Context) -> int:
    """Check the graph after all passes; returns 0, for it edits nothing.

    Raises:
        zerofx.VerificationError: a rule is broken; it names the rule, the node, the group and the line of the model.
    """
    reader = Reader(gm, ctx)
    reader.read()
    Outputs(reader).check()
    buffers = list(reader.buffers.values())
    check_read(buffers)
    check_discards([*buffers, *reader.owned.values()], reader.nodes, ctx)
    check_live_bytes(buffers, reader.order, ctx)
    waits = {s: w for s, w in reader.waits.items() if s not in reader.apart | reader.own}
    check_order(waits, reader.ops, reader.order, ctx)
    ask("finished", reader)
    if ctx.executor == "inductor":
        check_pinned(buffers, reader.ops, reader.order, reader.apart)
    return 0
