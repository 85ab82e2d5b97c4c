"""A pass with a collective of one's own: rank 0 keeps a moving average of all weights, on its own memory alone.

    torchrun --nproc-per-node 2 examples/own_collective.py

In every forward of stage 3 each rank sends its part of a layer to rank 0, after the wait for the layer's gather, and
waits at the end of the graph: it travels while the layers compute. No other rank holds an average, or a whole layer.

Two operators do it, registered with `torch.library`. The pass declares the one that communicates. So zerofx keeps it
in the same place among all collectives on every rank, compares that between ranks, and checks that it is waited for.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from zerofx.passes import Context, edit
from zerofx.passes.pairwise import resolve_process_group, under_way

KEEPER, TAG, DECAY = 0, 77, 0.9
arriving: dict[str, list[Tensor]] = {}
averages: dict[str, Tensor] = {}  # on rank 0: by layer, its parameters end to end


@torch.library.custom_op("moving::send", mutates_args=())
def send(shard: Tensor, layer: str, process_group: str) -> Tensor:
    """Start to send this rank's part of ``layer`` to rank 0; returns what is sent, to be waited for."""
    group, part = resolve_process_group(process_group), shard.clone()
    if group.rank() == KEEPER:
        arriving[layer] = [part, *(torch.empty_like(part) for _ in range(1, group.size()))]
        works = [group.recv([x], rank, TAG) for rank, x in enumerate(arriving[layer]) if rank != KEEPER]
    else:
        works = [group.send([part], KEEPER, TAG)]
    return under_way(part, works)


@torch.library.custom_op("moving::average", mutates_args=())
def average(sent: Tensor, layer: str, decay: float) -> Tensor:
    """Add what has arrived of ``layer`` to its average."""
    if layer in arriving:
        whole = torch.cat(arriving.pop(layer))
        averages[layer] = averages[layer].lerp_(whole, 1 - decay) if layer in averages else whole
    return sent.new_zeros(())  # a graph needs a result


send.register_fake(lambda shard, layer, process_group: torch.empty_like(shard))
average.register_fake(lambda sent, layer, decay: sent.new_empty(()))


def moving_average(gm: torch.fx.GraphModule, ctx: Context) -> None:
    """Every forward sends each rank's weights to rank 0, which averages them over steps."""
    if ctx.phase != "forward":
        return
    graph, shards = gm.graph, edit.by_group(edit.tagged(gm.graph, "shard"))
    for layer, waits in edit.by_group(edit.tagged(graph, "wait")).items():
        with graph.inserting_after(waits[0]):
            args = (shards[layer][0], layer, ctx.process_group)
            sent = graph.call_function(torch.ops.moving.send.default, args)
        with graph.inserting_before(graph.output_node()):
            sent = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (sent,))
            done = graph.call_function(torch.ops.moving.average.default, (sent, layer, DECAY))
        edit.publish(gm, ctx, f"average of {layer}", done)


def averaged(record: zerofx.compiler.records.GraphRecord) -> dict[str, Tensor]:
    """On rank 0: the average of each parameter, by name."""
    slots = [(layout.name, slot) for layout in record.forward.context.found.shards for slot in layout.slots]
    return {slot.name: averages[layer].as_strided(slot.shape, slot.stride, slot.offset) for layer, slot in slots}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--executor", default="inductor", choices=("inductor", "eager"))
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, args.dim), nn.Tanh(), nn.Linear(args.dim, args.dim), nn.Tanh(), nn.Linear(args.dim, 1)
    )
    zerofx.compile(
        model,
        executor=args.executor,
        groups=zerofx.Grouping([nn.Linear], min_bytes=0),
        passes=[zerofx.Pass(moving_average, collectives=(torch.ops.moving.send.default,))],
    )
    optimizer = zerofx.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for step in range(1, args.steps + 1):
        x = torch.randn(32, 8)
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step:4}  loss {loss:.4f}", flush=True)

    weights = zerofx.full_state_dict(model)  # on rank 0
    if dist.get_rank() == 0:
        (record,) = zerofx.graphs(model)
        for name, mean in averaged(record).items():
            print(f"{name:10} is {(weights[name] - mean).norm() / mean.norm():.4f} of its norm from its average")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
