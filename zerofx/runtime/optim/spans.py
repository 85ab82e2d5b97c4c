"""What an optimizer works through: flat runs of shards, instead of one parameter after another.

The parameters of a group lie end to end in its shard, and their gradients in the output of one reduction. An
elementwise optimizer need not know where one ends and the next begins::

    shard       | attn.weight ........ | attn.bias | norm.weight | ... | of one group, on one rank
    span        |<------------------------------------------------>|     all that one optimizer owns
    runs        |<------------------- decayed ----->|<-not decayed->|    equal hyper-parameters and step count,
                                                                         gradients that lie as the weights lie

A *span* is a maximal sequence of neighbours in a shard that belong to one optimizer; its state (moments, master
weights) lies in flat buffers of the span's length, and ``optimizer.state[p]`` holds views of them. A *run* is found
anew at every step: parameters without a gradient, of another parameter group, with a gradient of their own or behind
in their step count split a span. A parameter that is not sharded is a span of its own.

Padding between neighbours is in spans and runs: weights, gradients and moments are zero there and stay so.

An optimizer that keeps a scale for each block of 256 elements (`zerofx.runtime.optim.moments`) asks for spans of
which all members have *blocks*, or none has. There every member starts on a multiple of 256, so blocks are a regular
grid over the span, and no two parameters share one::

    span        |<------ attn.weight ------>|<-attn.bias->|<------ mlp.weight ------>|
    blocks      |  0  |  1  |  2  |  3  |  4|    none     |  0  |  1  |  2  |  3  |  4
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofx.kernels.blockwise import BLOCK, blocks_in
from zerofx.model.layout import BLOCKED_NUMEL, Slot
from zerofx.runtime.ranks.sharing import RankGroup
from zerofx.runtime.state.group import ShardGroup
from zerofx.runtime.state.home import all_resident
from zerofx.runtime.state.parameter import ShardedTensor
from zerofx.runtime.state.staging import Staging
from zerofx.runtime.state.state_file import StateFile
from zerofx.runtime.state.weights import share_memory


@dataclass
class Member:
    """One parameter in a span: ``length`` elements from ``start``, which may be none.

    Attributes:
        gradient: this rank's part of its gradient at this step, 1-D; None where it has none, and between steps.
        updates: how many it has had, where the host counts them.
        state: what ``optimizer.state`` had for it when the span's buffers had the same.
        row: its place among all members of the optimizer's spans.
    """

    parameter: torch.Tensor
    start: int
    length: int
    gradient: torch.Tensor | None = None
    updates: float = 0.0
    state: dict[str, Any] = field(default_factory=dict)
    row: int = 0

    def has(self, state: dict[str, Any]) -> bool:
        """Whether ``state`` is still what it had."""
        return bool(self.state) and all(state.get(name) is value for name, value in self.state.items())

    def take_gradient(self) -> None:
        """Look what ``parameter.grad`` is at this step.

        Raises:
            RuntimeError: it is sparse.
        """
        gradient = self.parameter.grad
        if isinstance(gradient, ShardedTensor):
            gradient = gradient._local
        elif gradient is not None:
            if gradient.is_sparse:
                raise RuntimeError(
                    f"zerofx.AdamW: a parameter of shape {list(self.parameter.shape)} has a sparse gradient; use "
                    "sparse=False in the embedding it belongs to, or torch.optim.SparseAdam for it."
                )
            if gradient.stride() != self.parameter.stride():
                gradient = torch.empty_like(self.parameter).copy_(gradient)
            gradient = in_memory_order(gradient)
        self.gradient = gradient

    def like(self, flat: torch.Tensor, name: str = "") -> torch.Tensor:
        """The parameter's part of a flat buffer of the span, as ``optimizer.state`` has it under ``name``."""
        part = self.part(flat, name)
        return part if name.endswith("_scales") else self.shaped(part)

    def part(self, flat: torch.Tensor, name: str = "") -> torch.Tensor:
        """The same, 1-D."""
        return _part(flat, name, self.start, self.length)

    def shaped(self, part: torch.Tensor) -> torch.Tensor:
        """``length`` elements that are this rank's part of something of the parameter's shape, as that."""
        if isinstance(self.parameter, ShardedTensor):
            return self.parameter.like(part)
        return part.as_strided(self.parameter.shape, self.parameter.stride())


@dataclass
class Span:
    """Neighbours in one shard (``group``), or one parameter that is not sharded (None).

    Attributes:
        origin: where in the shard the span starts.
        numel: its length, padding between its members included.
        index: of its group, or parameter, among the optimizer's. The same on every rank and at any world size.
        blocks: whether its members have blocks.
        state: flat buffers by the name that ``optimizer.state[p]`` has for them.
        version: the weights' version counter when the state was brought up to date with them.
    """

    members: list[Member]
    group: ShardGroup | None
    origin: int
    numel: int
    index: int = 0
    blocks: bool = False
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    version: int = 0

    @property
    def position(self) -> int:
        """Where in the group's whole flat buffer the span starts, on this rank: what randomness may depend on."""
        return self.origin if self.group is None else self.group.rank * self.group.layout.shard_numel + self.origin

    @property
    def ranks(self) -> tuple[str, ...]:
        """The process groups over which sums over all of its state run, one after another; none where it is whole."""
        return tuple(ranks.name for ranks in self.shared)

    @property
    def shared(self) -> tuple[RankGroup, ...]:
        """See `ranks`."""
        if self.group is not None:
            return (self.group.sharing.optimizer, *self.group.sharing.foreign)
        part: Any = self.members[0].parameter
        layout = getattr(part, "_dtensor", None)
        return () if layout is None else tuple(part._group.sharing.divide(layout))

    @property
    def file(self) -> StateFile | None:
        """Where its state lives; None: in memory."""
        return None if self.group is None else self.group.home.file

    @property
    def staging(self) -> Staging | None:
        """Its state is in the host's memory, and gradients and weights pass through this to it, or are there; None."""
        return None if self.group is None else self.group.home.staging

    @property
    def whole(self) -> torch.Tensor:
        """What `weights` is a part of, and shares a version counter with. It need not be resident."""
        return self.members[0].parameter.detach() if self.group is None else self.group.shard

    def gradients_resident(self) -> contextlib.AbstractContextManager[Any]:
        """The members' gradients can be looked at inside, where its state lives in a file."""
        if self.group is None or self.file is None:
            return contextlib.nullcontext()
        return self.group.home.only(*(m.gradient for m in self.members if m.gradient is not None))

    def weights_resident(self) -> contextlib.AbstractContextManager[Any]:
        """So can the weights."""
        return contextlib.nullcontext() if self.group is None else self.group.home.only(self.group.shard)

    def state_resident(self) -> contextlib.AbstractContextManager[Any]:
        """Its state can be looked at inside."""
        return contextlib.nullcontext() if self.group is None else self.group.home.resident(*self.state.values())

    def take_counts(self, counts: torch.Tensor) -> None:
        """How many updates each member has had, of all members' ``counts``: somebody may have written to these."""
        first = self.members[0].row
        for member, count in zip(self.members, counts[first : first + len(self.members)].tolist(), strict=True):
            member.updates = count

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """New state."""
        device = self.whole.device
        if self.group is None:
            return torch.zeros(numel, dtype=dtype, device=device)
        return self.group.home.new("moment", numel, dtype, device)

    def keep(self, state: torch.Tensor) -> torch.Tensor:
        """State that was computed, as it is to be held."""
        if self.staging is not None:
            return self.zeros(state.numel(), state.dtype).copy_(state)
        return state if self.group is None else self.group.home.keep("moment", state)

    @property
    def address(self) -> int:
        """Where `weights` begin in memory."""
        whole = self.whole
        return whole.data_ptr() + self.origin * whole.itemsize

    def weights(self) -> torch.Tensor:
        """The span's weights, flat: a view, so that what is written there is written to the parameters."""
        if self.group is not None:
            return self.group.shard.narrow(0, self.origin, self.numel)
        return in_memory_order(self.members[0].parameter.detach())


@dataclass
class Run:
    """Elements of a span from ``start`` up to ``end`` that one kernel call can do, with their gradients."""

    span: Span
    members: list[Member]
    gradient: torch.Tensor

    @property
    def start(self) -> int:
        return self.members[0].start

    @property
    def end(self) -> int:
        return self.members[-1].start + self.members[-1].length

    def state(self, start: int | None = None, end: int | None = None) -> dict[str, torch.Tensor]:
        """The run's part of the span's state, which is in memory; or from ``start`` in the span up to ``end``."""
        start, end = self.start if start is None else start, self.end if end is None else end
        return {name: _part(flat, name, start, end - start) for name, flat in self.span.state.items()}

    def part(
        self,
        start: int,
        end: int,
        state: dict[str, torch.Tensor],
        weights: torch.Tensor | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Part:
        """Elements of the span from ``start`` up to ``end``, which are the run's, with their ``state``.

        ``weights``, ``gradient``: these elements' own, if they are not in memory where they live.
        """
        if gradient is None:
            at = self.gradient.storage_offset() + start - self.start
            gradient = self.gradient.as_strided((end - start,), (1,), at)
        if weights is None:
            weights = self.span.weights().narrow(0, start, end - start)
        return Part(self.span, start, weights, gradient, state)

    def on_host(self, start: int, end: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradient and the weights of the span's elements from ``start`` up to ``end``, where the host has them.

        None: they are on the device. Who looks at them has to `settle` before.
        """
        if (group := self.span.group) is None or not group.home.away:
            return None, None
        gradient = group.home.on_host(self.gradient, self.end - self.start)
        weights = group.home.on_host(group.shard)
        return (
            None if gradient is None else gradient.narrow(0, start - self.start, end - start),
            None if weights is None else weights.narrow(0, self.span.origin + start, end - start),
        )

    def settle(self) -> None:
        """The host waits for copies from and to what it has of the run."""
        if self.span.group is not None:
            self.span.group.home.settle(self.gradient, self.span.group.shard)

    @property
    def gradient_on_host(self) -> bool:
        """Whether its gradients are in the host's memory."""
        return self.on_host(self.start, self.end)[0] is not None

    def all(self) -> Part:
        """The whole run, with its part of the span's state, which is in memory."""
        return self.part(self.start, self.end, self.state())

    def flat_gradient(self) -> torch.Tensor:
        """The gradients of all members, and what lies between them, as one flat tensor."""
        return self.gradient.as_strided((self.end - self.start,), (1,))

    @property
    def is_counted_whole(self) -> bool:
        """This rank adds all of its gradients to a sum over all ranks: `counted` is None."""
        return self.span.group is None or not self.span.group.sharing.foreign

    def counted(self) -> list[torch.Tensor] | None:
        """The gradients that this rank adds to a sum over all; None: all of them, `flat_gradient`.

        Copies on ranks of a tensor-parallel dimension are added by one of these.
        """
        if self.span.group is None or self.is_counted_whole:
            return None
        sharing = self.span.group.sharing
        held = [(member, member.gradient) for member in self.members if member.gradient is not None]
        return [gradient for member, gradient in held if sharing.counts(getattr(member.parameter, "_dtensor", None))]

    def summed(self) -> list[torch.Tensor]:
        """What this rank adds to a sum over all gradients, where it is: the host waits for what it has of that."""
        gradient, counted, group = self.on_host(self.start, self.end)[0], self.counted(), self.span.group
        if gradient is None or group is None:
            return [self.flat_gradient()] if counted is None else counted
        self.settle()
        if counted is None:
            return [gradient]
        return [flat for each in counted if (flat := group.home.on_host(each)) is not None]


@dataclass
class Part:
    """What a kernel is given of a run: from ``start`` in the span on, all 1-D and of one length."""

    span: Span
    start: int
    weights: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, torch.Tensor]


def _part(flat: torch.Tensor, name: str, start: int, length: int) -> torch.Tensor:
    """Elements of a span's flat buffer; where it holds scales, those of their blocks."""
    if name.endswith("_scales"):
        return flat.narrow(0, start // BLOCK, blocks_in(length))
    return flat.narrow(0, start, length)


def find_spans(parameters: Iterable[torch.Tensor], blocks: bool = False) -> list[Span]:
    """The spans of the parameters of one optimizer, in the order in which it has them, shard by shard.

    With ``blocks``, parameters that have some and parameters that have none are in spans of their own.
    """
    by_group: dict[ShardGroup, dict[Slot, torch.Tensor]] = {}
    spans: list[Span] = []
    for parameter in parameters:
        if isinstance(parameter, ShardedTensor):
            by_group.setdefault(parameter._group, {})[parameter._slot] = parameter
        else:
            span = Span([Member(parameter, 0, parameter.numel())], None, 0, parameter.numel(), index=len(spans))
            span.blocks = blocks and parameter.numel() >= BLOCKED_NUMEL and parameter.dtype != torch.float64
            spans.append(span)
    for index, (group, owned) in enumerate(by_group.items(), start=len(spans)):
        keys = {slot: _has_blocks(group, slot) if blocks else False for slot in owned}
        for key, run in itertools.groupby(group.layout.slots, key=keys.get):
            if key is not None:
                spans.append(_span(group, [(slot, owned[slot]) for slot in run], index, key))
    for row, member in enumerate(member for span in spans for member in span.members):
        member.row = row
    return spans


def _has_blocks(group: ShardGroup, slot: Slot) -> bool:
    return group.layout.dtype != torch.float64 and group.layout.keeps_blocks_whole(slot)


def _span(group: ShardGroup, neighbours: list[tuple[Slot, torch.Tensor]], index: int, blocks: bool) -> Span:
    pieces = [(parameter, group.layout.piece(slot, group.rank)) for slot, parameter in neighbours]
    held = [piece for _, piece in pieces if piece.length]
    origin = held[0].in_shard if held else 0
    end = held[-1].in_shard + held[-1].length if held else 0
    members = [Member(p, piece.in_shard - origin if piece.length else 0, piece.length) for p, piece in pieces]
    return Span(members, group, origin, end - origin, index, blocks)


def ranks_of(spans: Iterable[Span]) -> dict[tuple[str, ...], tuple[RankGroup, ...]]:
    """Over which ranks sums over the spans' state run, by `Span.ranks`."""
    return {span.ranks: span.shared for span in spans if span.shared}


def resident(spans: Iterable[Span]) -> contextlib.AbstractContextManager[Any]:
    """The weights, gradients and state of ``spans`` can be computed with inside, but for those that a step walks.

    Of those with a file groups are brought one after another, where they are needed (`Span.gradients_resident`). Where
    state is in the host's memory, a step computes there.
    """
    homes = (span.group.home for span in spans if span.group is not None)
    return all_resident(home for home in homes if home.file is None and home.staging is None)


def find_runs(span: Span, keys: Sequence[object]) -> Iterator[tuple[Any, Run]]:
    """The runs of ``span`` at this step, and the ``keys`` that the members of each agree in.

    A gradient continues a run where it lies after the gradients before it as its weight lies after theirs.
    """
    key: object = None
    run: Run | None = None
    for member, its_key in zip(span.members, keys, strict=True):
        gradient = member.gradient
        if gradient is not None and not member.length:
            continue  # nothing of it is here, and it separates nobody
        if run is not None and gradient is not None and key == its_key and _continues(run, member, gradient):
            run.members.append(member)
            continue
        if run is not None:
            yield key, run
        key, run = its_key, None if gradient is None else Run(span, [member], gradient)
    if run is not None:
        yield key, run


def _continues(run: Run, member: Member, gradient: torch.Tensor) -> bool:
    first = run.gradient
    return (
        gradient.dtype == first.dtype
        and gradient.data_ptr() == first.data_ptr() + (member.start - run.start) * first.itemsize
        and share_memory(gradient, first)
    )


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor without gaps, as a 1-D view in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
