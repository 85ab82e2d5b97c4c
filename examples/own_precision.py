"""A pass of one's own: one layer of a float32 model adds up in float64, forward and backward.

    torchrun --nproc-per-node 2 examples/own_precision.py

The pass stands before all of zerofx's. There it sees the model's graph, and may change what the model computes.
Weights are gathered and saved in 32 bits as before: they are cast where the layer multiplies with them.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Node

import zerofx
from zerofx.passes import Context, edit

aten = torch.ops.aten
SUMS = (aten.mm.default, aten.addmm.default, aten.sum.dim_IntList)
"""What adds up many numbers in a linear layer: the products, and the gradient of its bias."""


def add_up_in(dtype: torch.dtype, layer: str) -> zerofx.Pass:
    """A pass by which the module named ``layer`` adds up in ``dtype``."""

    def wide_sums(gm: torch.fx.GraphModule, ctx: Context) -> None:
        """One layer's products are added up in a wider dtype, and rounded once."""
        graph = gm.graph
        for node in list(graph.nodes):
            if node.target not in SUMS or edit.module_of(node) != layer:
                continue
            with graph.inserting_before(node):
                node.args = tuple(_cast(graph, x, dtype) for x in node.args)
            with graph.inserting_after(node):
                rounded = graph.call_function(edit.CAST, (node, node.meta["val"].dtype))
            node.replace_all_uses_with(rounded, delete_user_cb=lambda user, rounded=rounded: user is not rounded)

    return zerofx.Pass(wide_sums, before="rematerialize")


def _cast(graph: torch.fx.Graph, x: object, dtype: torch.dtype) -> object:
    return graph.call_function(edit.CAST, (x, dtype)) if isinstance(x, Node) else x


class Model(nn.Module):
    """Its head adds up many features that nearly cancel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.body = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--executor", default="inductor", choices=("inductor", "eager"))
    args = parser.parse_args()

    dist.init_process_group("gloo")
    x = torch.randn(64, args.dim, generator=torch.Generator().manual_seed(dist.get_rank()))
    for name, passes in (("all in float32", []), ("head in float64", [add_up_in(torch.float64, "head")])):
        torch.manual_seed(0)
        model = Model(args.dim)
        hidden = torch.tanh(model.body(x)).detach()
        truth = (hidden.double() @ model.head.weight.double().T + model.head.bias.double()).detach()
        model = zerofx.compile(model, stage=args.stage, executor=args.executor, passes=passes)
        output = model(x)
        output.square().mean().backward()
        if dist.get_rank() == 0:
            print(f"{name}: {(output.double() - truth).norm() / truth.norm():.2e} from float64", flush=True)
    if dist.get_rank() == 0:
        (record,) = zerofx.graphs(model)
        print("\n" + record.diff("wide_sums"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
