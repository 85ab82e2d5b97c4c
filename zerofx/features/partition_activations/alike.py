"""What all ranks of `partition_activations` have alike: asked once per graph, so that the passes may rely on it.

::

    inputs and parameters     each rank's value, as a digest        those that differ are out
    the joint graph           a parameter stays alike only if its gradient is: else it is out, and what follows from it
    what forward saves        each value's operators, as a digest   (`same_values`)
    as backward begins        the gradients of outputs, once        an error where they differ

A value is compared with the other ranks' by what computes it: comparing the numbers of one step would prove nothing for
the next. A bias that is split over the ranks may begin as zeros on all of them. Its gradient tells it apart.

Ranks talk here, in the tensor-parallel group alone but for the parameters. All of them compile at the same call,
because the collectives of the model itself are in the graph.
"""

from __future__ import annotations

import hashlib
import re
import warnings
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule, Node

from zerofx import _torch
from zerofx._torch import OpOverload
from zerofx.compiler.unit import Unit
from zerofx.features.partition_activations.same_values import alike
from zerofx.passes import edit
from zerofx.runtime.ranks.sharing import RankGroup
from zerofx.runtime.state.group import Family
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedTensor

_PARAMETERS = (ShardedTensor, ReplicatedParameter)


class _Ranks(RankGroup):
    """Ranks that talk while something is being traced."""

    def all_gathered(self, what: Any) -> list[Any]:
        with _torch.with_numbers():
            return super().all_gathered(what)

    def __str__(self) -> str:
        return f"ranks {dist.get_process_group_ranks(self.process_group)}"


class Alike:
    """Of one graph of Dynamo's.

    Attributes:
        ranks: the ranks that save parts.
        given: of the graph's inputs, by number, those that all have alike, with a digest each.
        tangents: the names of backward's inputs that are taken to be alike, until they were compared.
    """

    def __init__(self, name: str, gm: GraphModule, example_inputs: Sequence[Any], family: Family) -> None:
        """``gm``: Dynamo's graph."""
        self.ranks: _Ranks = _Ranks(_torch.resolve_process_group(name))
        self.tangents: set[str] = set()
        self._learned = False
        self._shared = _shared_by(family, self.ranks)
        mine = [_told(x, self._shared.parameters) for x in example_inputs]
        self._names = {i: x._slot.name for i, x in enumerate(example_inputs) if isinstance(x, _PARAMETERS)}
        everyone = self.ranks.all_gathered(mine)
        alike_on_all = [x is not None and all(theirs[i] == x for theirs in everyone) for i, x in enumerate(mine)]
        self.given: dict[int, str] = {i: f"input {i}" for i, found in enumerate(alike_on_all) if found}
        for node, x, found, told in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, alike_on_all, mine):
            if told is not None and not found and not isinstance(x, _PARAMETERS):
                self._warn(node, x)

    def _warn(self, node: Node, x: torch.Tensor) -> None:
        if self.ranks.rank == 0:
            source = _torch.source_name(node) or node.name
            source = re.sub(r"^L\['(?:kw)?args'\]\[(.+)\]$", r"argument \1", source)  # of the module's call
            warnings.warn(
                f"partition_activations: {source} of shape {tuple(x.shape)} differs between the "
                f"{self.ranks}. What is computed from it is saved whole. Tensor-parallel ranks get one batch.",
                stacklevel=2,
            )

    def learn(self, joint: GraphModule) -> None:
        """Forward and backward in one graph: parameters whose gradients differ will differ, so they are out.

        Raises:
            RuntimeError: one is out, and an earlier graph of the module took it to stay alike.
        """
        self._learned = True
        outputs = edit.output_values(joint.graph)
        gradients = {i: outputs[k] for k, i in _torch.gradient_outputs(joint.graph.output_node()).items()}
        gradients = {i: node for i, node in gradients.items() if i in self._names and node is not None}
        lost: set[int] = {-1}
        while lost:
            found = self._read(joint.graph)
            everyone = self.ranks.all_gathered({i: found.get(node, "") for i, node in gradients.items()})
            first = everyone[0]
            inputs = {i for theirs in everyone for i in theirs}
            lost = {i for i in inputs if not first.get(i) or any(x.get(i) != first[i] for x in everyone)}
            lost &= self.given.keys()
            for i in sorted(lost):
                del self.given[i]
                self._shared.lose(self._names[i])
        self._shared.relied |= {self._names[i] for i in self.given.keys() & self._names.keys()}

    def foresee(self, joint: GraphModule) -> Foreseen:
        """What all have alike of any forward that is cut out of ``joint``, which was learned. A collective."""
        return Foreseen(self, self._agreed({node.name: digest for node, digest in self._read(joint.graph).items()}))

    def agree(self, choice: str) -> None:
        """Compare what these ranks have chosen: parts of different tensors would meet. A collective.

        Raises:
            RuntimeError: on every rank, where they differ.
        """
        if any(theirs != choice for theirs in self.ranks.all_gathered(choice)):
            raise RuntimeError(
                f"memory= with partition_activations: the {self.ranks} have divided their bytes differently. They have "
                "other shapes, or kernels that take other workspaces. Expected layers that are split evenly; or give "
                "memory_budget= and activation_budget= instead of memory=."
            )

    def check(self, gradients: dict[str, Any]) -> None:
        """As a backward begins for the first time: are ``gradients`` alike, of outputs that are? A collective.

        Raises:
            RuntimeError: on every rank, where one is not.
        """
        if not self.tangents:
            return
        asked = {name: x for name, x in gradients.items() if name in self.tangents}
        mine = {name: digest_of(x) for name, x in asked.items() if isinstance(x, torch.Tensor)}
        everyone = self.ranks.all_gathered(mine)
        differs = next((name for name in mine if any(x.get(name) != mine[name] for x in everyone)), None)
        if differs is not None:
            raise RuntimeError(
                f"partition_activations: {differs}, the gradient of an output that the {self.ranks} have alike, "
                "differs between them. They would save parts of different tensors. Expected the same loss on all of "
                "them, and backward of it; or leave partition_activations out."
            )
        self.tangents = set()

    def _read(self, graph: Graph) -> dict[Any, str]:
        inputs = {node.name: _torch.input_index(node) for node in graph.find_nodes(op="placeholder")}
        given = {name: self.given[i] for name, i in inputs.items() if i in self.given}
        groups = self.groups(graph)
        found = alike(graph, given, groups)
        tangents = {node.name: found[of] for node, of in _torch.tangents(graph).items() if of in found}
        self.tangents = set(tangents)
        return alike(graph, given | {name: f"gradient of {of}" for name, of in tangents.items()}, groups)

    def groups(self, graph: Graph) -> set[str]:
        """The names of the process groups of these ranks, among those that the graph uses."""
        names = {
            x
            for node in graph.nodes
            if isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional"
            for x in node.args[-1:]
            if isinstance(x, str)
        }
        ours = dist.get_process_group_ranks(self.ranks.process_group)
        return {n for n in names if dist.get_process_group_ranks(_torch.resolve_process_group(n)) == ours}

    def saved(self, gm: GraphModule) -> frozenset[str]:
        """The nodes of a forward graph that all have alike."""
        if not self._learned:  # nobody has seen the gradients
            return frozenset()
        return frozenset(self._agreed(self.digests(gm)))

    def _agreed(self, mine: dict[str, str]) -> dict[str, str]:
        """The digests that all ranks tell alike, by name. A collective."""
        everyone = self.ranks.all_gathered(mine)
        return {name: digest for name, digest in mine.items() if all(x.get(name) == digest for x in everyone)}

    def digests(self, gm: GraphModule) -> dict[str, str]:
        """Of each node of a forward graph that follows from what is alike, by name."""
        inputs = {node.name: _torch.input_index(node) for node in gm.graph.find_nodes(op="placeholder")}
        given = {name: self.given[i] for name, i in inputs.items() if i in self.given}
        return {node.name: digest for node, digest in alike(gm.graph, given, self.groups(gm.graph)).items()}


def compare(unit: Unit, gm: GraphModule, example_inputs: Sequence[Any]) -> Alike | None:
    """See `zerofx.features.interface.Feature`."""
    name = unit.options.partition_activations
    if name is None or not unit.groups:
        return None
    alike = Alike(name, gm, example_inputs, unit.family)  # type: ignore[arg-type]
    return alike if alike.ranks.size > 1 else None


class Foreseen:
    """Stands for an `Alike` while divisions of `memory=` are tried: nobody asks other ranks.

    Attributes:
        ranks: as of `Alike`.
    """

    def __init__(self, alike: Alike, agreed: dict[str, str]) -> None:
        """``agreed``: the digests that all ranks have told of the joint graph, by name."""
        self.ranks = alike.ranks
        self._alike, self._agreed = alike, agreed

    def saved(self, gm: GraphModule) -> frozenset[str]:
        """The nodes of a forward graph that all have alike."""
        mine = self._alike.digests(gm)
        return frozenset(name for name, digest in mine.items() if self._agreed.get(name) == digest)


@dataclass
class _Shared:
    """What the graphs of one module have in common.

    Attributes:
        parameters: the names of those that are alike.
        relied: those that some graph takes to stay so.
    """

    parameters: set[str]
    relied: set[str] = field(default_factory=set)

    def lose(self, name: str) -> None:
        """A graph gives the parameter a gradient that differs."""
        if name in self.relied:
            raise RuntimeError(
                f"partition_activations: the gradient of {name!r} differs between the ranks in one graph, and another "
                "graph of the module, compiled before, takes it to stay alike. Mend the graph break between them, use "
                "two parameters, or leave partition_activations out."
            )
        self.parameters.discard(name)


_shared: weakref.WeakKeyDictionary[Family, dict[str, _Shared]] = weakref.WeakKeyDictionary()


def _shared_by(family: Family, ranks: RankGroup) -> _Shared:
    """What the graphs of a module know of its parameters. A collective, the first time."""
    known = _shared.setdefault(family, {})
    if ranks.name not in known:
        groups = family.groups()
        with _torch.with_numbers():
            mine = {slot.name: digest_of(group.parameter(slot)) for group in groups for slot in group.layout.slots}
            everyone = ranks.all_gathered(mine)
            here = {name for name, digest in mine.items() if all(x.get(name) == digest for x in everyone)}
            known[ranks.name] = _Shared(here.intersection(*groups[0].sharing.everyone.all_gathered(here)))
    return known[ranks.name]


def digest_of(x: torch.Tensor) -> str:
    """Of what this rank holds of a tensor: shape, dtype, and bits."""
    with _torch.with_numbers():
        return _digest(x)


def _digest(x: torch.Tensor) -> str:
    if isinstance(x, ShardedTensor):
        local = x.to_local()
    else:
        with _torch.DisableTorchFunction():
            local = x.detach()
    bits = local.contiguous().reshape(-1).view(torch.uint8)
    sums = [0, 0]
    for chunk in bits.split(1 << 22):
        wide = chunk.to(torch.int64)
        weights = torch.arange(1, wide.numel() + 1, device=wide.device)
        sums = [(a * 31 + int(b)) % (1 << 61) for a, b in zip(sums, (wide.sum(), (wide * weights).sum()))]
    return hashlib.sha256(repr((tuple(x.shape), x.dtype, bits.numel(), sums)).encode()).hexdigest()[:16]


def _told(x: Any, parameters: Collection[str]) -> str | None:
    """What this rank says of an input; None: it cannot be alike, or nobody can say that it stays so.

    ``parameters``: the names of those that are alike.
    """
    if isinstance(x, _PARAMETERS):
        return f"parameter {x._slot.name}" if x._slot.name in parameters else None
    if not isinstance(x, torch.Tensor) or x.requires_grad or type(x) is not torch.Tensor:
        return None
    return digest_of(x)
