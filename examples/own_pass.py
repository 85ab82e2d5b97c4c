"""A pass of one's own: the norm of every layer's gradient, out of the graph, without waiting for anything.

    torchrun --nproc-per-node 2 examples/own_pass.py

The pass stands before `lower`, where zerofx's nodes are all there. In a backward graph it finds each layer's
averaged gradient (this rank's part of it), squares and sums that, and adds up all ranks' sums in one all-reduce at the
end. The loop reads the norms of a step when it prints, and not before. docs/own-passes.md explains it line by line.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from zerofx.passes import Context, edit

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def gradient_norms(gm: torch.fx.GraphModule, ctx: Context) -> None:
    """The norm of each layer's averaged gradient is published."""
    graph, squares = gm.graph, {}
    for gradient in edit.tagged(graph, "gradient"):  # there are none in a forward, nor where no_sync keeps them
        layer = gradient.meta["zerofx"].group
        with graph.inserting_before(gradient.next):
            square = graph.call_function(aten.mul.Tensor, (gradient, gradient))
            total = graph.call_function(aten.sum.default, (square,))
            if layer in squares:  # stage 0: a gradient per parameter
                total = graph.call_function(aten.add.Tensor, (squares[layer], total))
        squares[layer] = total
    if not squares:
        return
    with graph.inserting_before(graph.output_node()):
        norms = graph.call_function(aten.stack.default, (list(squares.values()),))
        if ctx.stage:  # each rank has a part
            norms = graph.call_function(c10d.all_reduce.default, (norms, "sum", ctx.reduce_group))
            norms = graph.call_function(c10d.wait_tensor.default, (norms,))
        norms = graph.call_function(aten.sqrt.default, (norms,))
        for i, layer in enumerate(squares):
            edit.publish(gm, ctx, f"gradient norm of {layer}", graph.call_function(aten.select.int, (norms, 0, i)))


class Model(nn.Module):
    """Learns the sum of two digits, from their embeddings."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(2 * dim), nn.Linear(2 * dim, 2 * dim)) for _ in range(layers)
        )
        self.head = nn.Linear(2 * dim, 19)

    def forward(self, pairs: Tensor) -> Tensor:
        hidden = self.embedding(pairs).flatten(1)
        for block in self.blocks:
            hidden = hidden + F.gelu(block(hidden))
        return F.cross_entropy(self.head(hidden), pairs.sum(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--executor", default="inductor", choices=("inductor", "eager"))
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = zerofx.compile(
        Model(args.layers, args.dim),
        stage=args.stage,
        executor=args.executor,
        groups=zerofx.Grouping(min_bytes=0),  # a group for each layer, however small
        passes=[gradient_norms],
    )
    optimizer = zerofx.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(dist.get_rank())  # from here on each rank has data of its own
    for step in range(1, args.steps + 1):
        loss = model(torch.randint(10, (12, 2)))
        loss.backward()
        norms = zerofx.published(model)  # tensors: nothing is waited for
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            said = ", ".join(f"{name.removeprefix('gradient norm of ')} {x:.4f}" for name, x in sorted(norms.items()))
            print(f"step {step:4}  loss {loss:.4f}  gradient norms: {said}", flush=True)

    if dist.get_rank() == 0:
        (record,) = zerofx.graphs(model)
        print("\nWhat the pass did to the backward graph:\n" + record.backward.diff("gradient_norms"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
