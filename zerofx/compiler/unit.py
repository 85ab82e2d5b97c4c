"""What compiles one Dynamo graph starts from: which inputs are parameters, of which groups, and the options."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule

from zerofx import _torch
from zerofx.compiler.captured import check_claimable, check_one_module
from zerofx.compiler.choices import Search
from zerofx.compiler.options import Options
from zerofx.compiler.progress import wanted
from zerofx.model.layout import GroupLayout, is_quantized
from zerofx.passes.context import ParameterRef
from zerofx.passes.own import Pass
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedTensor

Executed = Callable[[GraphModule, list[Any], list[int]], Callable[..., Any]]
"""From a graph, its inputs, and which of these stay where they are, to a boxed function."""


@dataclass(frozen=True)
class Unit:
    """One graph of Dynamo's. Nothing of it changes while it is compiled.

    Attributes:
        options: what the user asked for.
        sharded: of its inputs, by number, those that are parameters of ours.
        groups: these parameters' groups, by layout. Weakly: Dynamo keeps what it compiled for as long as the code
            lives, which is longer than a model.
        pretend: for `zerofx.dry_run`, what takes the rewritten graphs in the place of an executor.
        code: whether Inductor writes its code for these all the same. It is read, and not compiled.
        probe: whether `memory=` may run kernels, for what they take inside of themselves.
        search: finds a division of `memory=`; None: the fastest that fits.
    """

    options: Options
    sharded: Mapping[int, ParameterRef]
    groups: Mapping[GroupLayout, ShardGroup]
    pretend: Executed | None = None
    code: bool = False
    probe: bool = True
    search: Search | None = None

    @staticmethod
    def of(
        options: Options,
        example_inputs: Sequence[Any],
        pretend: Executed | None = None,
        code: bool = False,
        probe: bool = True,
        search: Search | None = None,
    ) -> Unit:
        """Raises: see `check_claimable` and `check_one_module`."""
        tensors = {i: x for i, x in enumerate(example_inputs) if isinstance(x, (ShardedTensor, ReplicatedParameter))}
        for tensor in tensors.values():
            check_claimable(tensor)
        check_one_module(list(tensors.values()))
        sharded = {i: ParameterRef(x._group.graph_layout, x._slot) for i, x in tensors.items()}
        groups = {x._group.graph_layout: x._group for x in tensors.values()}
        return Unit(options, sharded, weakref.WeakValueDictionary(groups), pretend, code, probe, search)

    @property
    def names(self) -> frozenset[str]:
        """The groups' names, by which `zerofx.runtime.state.footprint` knows a graph."""
        return frozenset(layout.name for layout in self.groups)

    @property
    def read(self) -> list[str]:
        """The groups' names, in the order in which parameters are inputs."""
        return list(dict.fromkeys(layout.name for layout in self.groups))

    @property
    def speaks(self) -> bool:
        """Whether this rank says what it compiles."""
        return wanted(self.options.progress) and self.group.sharing.everyone.rank == 0

    @property
    def group(self) -> ShardGroup:
        """Any of the groups."""
        return next(iter(self.groups.values()))

    @property
    def family(self) -> Family:
        """The family of these groups: a graph's groups are of one module."""
        return self.group.family

    @property
    def gathers(self) -> bool:
        """Whether weights come as shards and are gathered."""
        return any(group.weights.gathers for group in self.groups.values())

    @property
    def dequantizes(self) -> bool:
        """Whether the graph reads frozen weights that are quantized, and so makes others of them."""
        return any(is_quantized(layout.dtype) and not layout.requires_grad for layout in self.groups)

    @property
    def fuses(self) -> bool:
        """Whether the executor fuses pointwise operations."""
        return self.options.executor != "eager"

    @property
    def own_kinds(self) -> frozenset[str]:
        """The kinds of nodes that a user's passes insert: their names."""
        return frozenset(pass_.name for pass_ in Pass.all_of(self.options.passes))

    @property
    def share(self) -> float:
        """Of all parameters that no other graph has read, the part that this one does: so much more may be saved."""
        layouts = {group.layout.name: group.layout for group in self.family.groups()}
        others = self.family.footprint.unread_elsewhere(self.names, frozenset(layouts))
        ours = sum(layout.numel for layout in self.groups)
        return ours / (ours + sum(layouts[name].numel for name in others))

    def parameters(self, graph: Graph) -> dict[str, ParameterRef]:
        """Of a graph that is cut out of it, the placeholders that are parameters."""
        indices = {node.name: _torch.input_index(node) for node in graph.find_nodes(op="placeholder")}
        return {name: self.sharded[i] for name, i in indices.items() if i is not None and i in self.sharded}
