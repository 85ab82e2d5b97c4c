"""Graphs as AOTAutograd cuts them out of small modules: the forward, the backward, and the contexts to match."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from tests.passes.graphs import Flats, Numbers, apply, gradients, run
from zerofx import _torch
from zerofx.model.grouping import Grouping, plan_groups
from zerofx.model.precision import MixedPrecision
from zerofx.passes import PIPELINE, Context, ParameterRef
from zerofx.passes.context import Found, Handover


class Layers(nn.Module):
    """Linear layers one after the other: forward saves transposed weights or, with the min-cut partitioner, weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Tied(nn.Module):
    """One weight used first and last, and a block between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding((x[:, 0] * 10).abs().long() % 11)
        for block in self.blocks:
            h = h + F.gelu(block(self.norm(h)))
        return F.linear(h, self.embedding.weight).logsumexp(-1).mean()


class Casts(nn.Module):
    """Weights that are used in half precision, in pieces, and without a gradient; one that is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(12, 5) / 4)
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.low = nn.Parameter(torch.randn(4, 3).bfloat16())
        self.unused = nn.Parameter(torch.randn(7))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv.bfloat16().split(4)
        x = (x * self.scale).bfloat16()  # so that backward needs q, k and v
        h = torch.tanh(x @ q.t()) * (x @ k.t()) + (x @ v.t()).relu()
        h = h.float() @ self.frozen
        return (h.bfloat16() @ self.low).float().square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {"layers": Layers, "tied": Tied, "casts": Casts}


@dataclass
class Pair:
    """A module's forward and backward as AOTAutograd cut them, with a fresh copy for everyone who asks."""

    graphs: dict[str, GraphModule]
    refs: dict[int, ParameterRef]
    """Dynamo input -> parameter."""
    inputs: dict[int, torch.Tensor]
    """Dynamo input -> value, for the others."""
    flats: Flats
    context: Context

    def get(self, phase: str, handover: Handover | None = None) -> tuple[GraphModule, Context]:
        gm = GraphModule(self.graphs[phase], copy.deepcopy(self.graphs[phase].graph))
        output, index_of = gm.graph.output_node(), _torch.input_index
        parameters = {n.name: self.refs[i] for n in _placeholders(gm) if (i := index_of(n)) in self.refs}
        grads = _torch.gradient_outputs(output).items() if phase == "backward" else ()
        ctx = replace(
            self.context,
            phase=phase,  # type: ignore[arg-type]
            parameters=parameters,
            saved=_torch.saved_outputs(output) if phase == "forward" else frozenset(),
            gradients={position: self.refs[i] for position, i in grads if i in self.refs},
            handover=Handover() if handover is None else handover,
            found=Found(),
        )
        return gm, ctx

    def walk(self, rank: int = 0) -> Iterator[tuple[str, list[Any], Flats]]:
        """Take both graphs through the pipeline, and run them first and after each pass.

        Yields "before" or the pass' name, what the forward returns to the user, and ``rank``'s gradient shards.
        """
        handover = Handover()
        forward, ctx = self.get("forward", handover)
        backward, bctx = self.get("backward", handover)
        names = {_torch.input_index(n): n.name for n in _placeholders(forward)}
        inputs = {names[i]: value for i, value in self.inputs.items() if i in names}
        received = [n.name for n in _placeholders(backward)]
        for pass_ in (None, *PIPELINE):
            if pass_ is not None:
                apply(forward, ctx, pass_)
                apply(backward, bctx, pass_)
            returned = run(forward, ctx, Numbers(inputs, self.flats), rank)
            results = [value for i, value in enumerate(returned) if i not in ctx.saved]
            saved = [returned[i] for i in sorted(ctx.saved)]  # backward's first inputs; the loss' gradient is the last
            numbers = Numbers(dict(zip(received, [*saved, torch.ones(())], strict=True)), self.flats)
            outputs = run(backward, bctx, numbers, rank)
            yield pass_.__name__ if pass_ else "before", results, gradients(bctx, outputs, rank)


def capture(
    model: nn.Module,
    *inputs: torch.Tensor,
    world_size: int,
    min_cut: bool = False,
    grouping: Grouping | None = None,
    **context: Any,
) -> Pair:
    """Trace a module that returns one scalar loss; ``min_cut`` chooses the partitioner that Inductor uses."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    refs, flats = {}, {}
    precision = MixedPrecision(context.pop("param_dtype", None), context.pop("reduce_dtype", None))
    grouping = grouping or Grouping(min_bytes=0)
    for layout, parameters in plan_groups(model, world_size, grouping, mixed_precision=precision):
        flats[layout] = torch.zeros(layout.numel, dtype=layout.dtype)
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            layout.view(flats[layout], slot).copy_(parameter.detach())
            refs[id(parameter)] = ParameterRef(layout, slot)
    pair = Pair({}, {}, {}, flats, Context(**{"phase": "forward", "process_group": "pg", **context}))

    def keep(phase: str) -> Callable:
        def compiler(gm: GraphModule, _: Any) -> Callable:
            pair.graphs[phase] = GraphModule(gm, copy.deepcopy(gm.graph))
            forward = gm.forward

            def run_boxed(args: list[Any]) -> Any:
                values = list(args)
                args.clear()
                return forward(*values)

            run_boxed._boxed_call = True  # type: ignore[attr-defined]
            return run_boxed

        return compiler

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable:
        assert not pair.refs, "the module broke into several graphs"
        for i, x in enumerate(example_inputs):
            if id(x) in refs:
                pair.refs[i] = refs[id(x)]
            elif isinstance(x, torch.Tensor):
                pair.inputs[i] = x.detach().clone()
        partition = min_cut_rematerialization_partition if min_cut else default_partition
        cut = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=partition)
        return cut(gm, example_inputs)

    torch._dynamo.reset()
    with _torch.functorch_config():
        torch.compile(model, backend=backend, dynamic=False)(*inputs).backward()
    model.zero_grad()
    torch._dynamo.reset()
    return pair


def _placeholders(gm: GraphModule) -> list[Node]:
    return list(gm.graph.find_nodes(op="placeholder"))
