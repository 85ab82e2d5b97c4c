"""Whole weights for a while: `unsharded`.

::

    with zerofx.unsharded(model):        every name has a plain, whole parameter
        model.head.weight[0] = 0         read it, edit it, run the model, copy it, pickle it
                                         rank 0's values go back to the slices

Each sharded parameter is replaced, under all its names, by a `WholeParameter` that holds gathered values of its own.
The sharded one is not touched: an optimizer holds it, a backward of an earlier forward finds it unchanged. So the two
live side by side, and what cannot end well is noticed at the end:

=======================================================  ================================================
inside                                                   at the end
=======================================================  ================================================
edits in place, on rank 0 or everywhere                  rank 0's values are taken
edits in place on other ranks alone                      RuntimeError on every rank, nothing is written
another parameter put under the name                     the same
the sharded parameter written (an optimizer's step)      the same, unless ``writeback=False``
an exception                                             the exception; nothing is written
a backward through a whole parameter                     RuntimeError at once: its gradient would be lost
=======================================================  ================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx._torch import as_dtensor, uncompiled
from zerofx.model.hugging_face import each_by_itself
from zerofx.runtime.eager.ondemand import gather_tensor
from zerofx.runtime.ranks.turns import common
from zerofx.runtime.ranks.watch import call
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedParameter, ShardedTensor
from zerofx.runtime.state.plain import PlainlyCopied, share_own

Place = tuple[nn.Module, str]
"""Where a parameter stands: the module that holds it, and its name there."""


class WholeParameter(PlainlyCopied):
    """A whole parameter that stands in the place of a sharded one."""


@contextlib.contextmanager
def unsharded(what: nn.Module | torch.Tensor | Iterable[torch.Tensor], *, writeback: bool = True) -> Iterator[Any]:
    """Whole weights inside of the block, under their names. It is a collective: every rank must enter it.

    ::

        with zerofx.unsharded(model):
            with torch.no_grad():
                model.embedding.weight[0] = 0
        with zerofx.unsharded(model, writeback=False):
            text = model.generate(prompt)                   # not a single collective: prompts may differ by rank
            plain = copy.deepcopy(model)                    # an ordinary module; outside it is a sharded one
        with zerofx.unsharded([p, q]) as (whole_p, whole_q):
            ...

    Everything in ``what`` is whole at once, on every rank, beside the shards. Where the model is too large for that,
    take a submodule, or a few parameters. The module runs uncompiled inside. With mixed precision the weights are the
    masters, and inputs are not cast.

    Args:
        what: a module that is sharded in any stage, a submodule of one; or parameters.
        writeback: when the block ends, rank 0's values become the parameters'. DeepSpeed's ``GatheredParameters`` does
            the same with ``modifier_rank=0``. It takes one transfer of all slices. False: edits are dropped.

    Yields:
        the module; or the whole parameters, in the order given; for one tensor, its whole parameter.

    Raises:
        ValueError: nothing in ``what`` is sharded.
        RuntimeError: an edit on another rank alone, a parameter that was replaced or stepped inside, or a backward
            through a whole parameter. Nothing is written then.
    """
    places = places_of(what)
    sharded = [p for p in places if isinstance(p, (ShardedParameter, ReplicatedParameter))]
    if not sharded and not any(map(is_whole, places)):
        raise ValueError(f"no parameter of this {type(what).__name__} is sharded: call zerofx.compile on it first.")
    watched = set().union(*(p._group.sharing.watched for p in sharded if p._group.family.stage))
    turns = next((p._group.family.turns for p in sharded if p._group.family.stage), None)
    with common(turns, "zerofx.unsharded"), call(watched, "zerofx.unsharded"):
        wholes = {p: whole_of(p) for p in sharded}
    versions = {p: (p._version, wholes[p]._version) for p in sharded}
    families = {p._group.family for p in sharded}
    with contextlib.ExitStack() as stack:
        if isinstance(what, nn.Module):
            stack.enter_context(uncompiled(what))
            stack.enter_context(each_by_itself(what))
        for family in families:
            stack.enter_context(family.casts_off())
        for p in sharded:
            stack.enter_context(in_place_of(p, wholes[p], places[p]))
        if isinstance(what, nn.Module):
            yield what
        else:
            given = [wholes.get(p, p) for p in places]
            yield given[0] if isinstance(what, torch.Tensor) else given
        if writeback and sharded:
            end = "the end of zerofx.unsharded"
            with common(turns, end), call(watched, end), torch.no_grad():
                _agree(places, wholes, versions)
                for p in sharded:
                    value: Any = wholes[p].detach()
                    take_from_rank_0(p, value if p._dtensor is None else value.to_local())


_WHOLE = "_zerofx_whole"
"""What a whole parameter has that is a DTensor: a subclass of that cannot be had."""


def is_whole(parameter: Any) -> bool:
    """Whether it stands in the place of a sharded parameter."""
    return isinstance(parameter, WholeParameter) or hasattr(parameter, _WHOLE)


def whole_of(parameter: ShardedParameter | ReplicatedParameter) -> nn.Parameter:
    """A whole parameter with the values of ``parameter``, which are gathered. A collective."""
    value = gather_tensor(parameter) if isinstance(parameter, ShardedParameter) else parameter.detach().clone()
    if (layout := parameter._dtensor) is None:
        whole: nn.Parameter = WholeParameter(value.detach(), parameter.requires_grad)
        share_own(parameter, whole)
    else:  # the DTensor that it was; a copy is an ordinary parameter, too
        whole = nn.Parameter(as_dtensor(value.detach(), layout), parameter.requires_grad)
        setattr(whole, _WHOLE, True)
    if parameter.requires_grad:
        name = parameter._slot.name

        def refuse(gradient: torch.Tensor) -> None:
            raise RuntimeError(
                f"a backward through {name!r} as zerofx.unsharded had it: this gradient would be lost. Run forward and "
                "backward outside of zerofx.unsharded, or forward under torch.no_grad()."
            )

        whole.register_hook(refuse)
    return whole


@contextlib.contextmanager
def in_place_of(parameter: nn.Parameter, whole: nn.Parameter, places: Iterable[Place]) -> Iterator[None]:
    """``whole`` stands where ``parameter`` stood."""
    for module, name in places:
        setattr(module, name, whole)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, parameter)


def places_of(what: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> dict[Any, list[Place]]:
    """The parameters of ``what``, and where in it each stands."""
    places: dict[Any, list[Place]] = {}
    if isinstance(what, nn.Module):
        for module in what.modules():
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(p, []).append((module, name))
        return places
    return {p: [] for p in ([what] if isinstance(what, torch.Tensor) else what)}


def _agree(places: dict[Any, list[Place]], wholes: dict[Any, nn.Parameter], versions: dict[Any, Any]) -> None:
    """Raise on every rank where what one of them did cannot be written back; else on none."""
    error, edited = "", set()
    for p, whole in wholes.items():
        sharded_version, whole_version = versions[p]
        name = p._slot.name
        if whole._version != whole_version:
            edited.add(name)
        if any(getattr(module, attribute) is not whole for module, attribute in places[p]):
            error = f"{name!r} was replaced by another parameter: edit it in place"
        elif p._version != sharded_version:
            error = (
                f"{name!r} was written where it is sharded (by an optimizer's step?): step outside, or use "
                "writeback=False"
            )
    sharing = next(iter(wholes))._group.sharing
    everyone = sharing.whole.all_gathered((error, edited, sharing.everyone.rank))
    for rank, (text, theirs, place) in enumerate(everyone):
        if not text and (alone := sorted(theirs - everyone[0][1])):
            text = f"{alone[0]!r} was edited there and not on rank 0, whose values are taken: edit on rank 0 too"
        elif not text and place == 0 and (left := sorted(everyone[0][1] - theirs)):
            text = f"{left[0]!r} was edited on rank 0 and not there, which has another part of it: edit it there too"
        if text:
            raise RuntimeError(f"zerofx.unsharded cannot write back, and has not; rank {rank}: {text}.")


def take_from_rank_0(parameter: ShardedTensor | ReplicatedParameter, whole: torch.Tensor) -> None:
    """Rank 0's ``whole`` becomes the value of ``parameter``. Each rank is sent its slice alone.

    Where there are replicas, rank 0 sends to its own, whose ranks pass their slices on to the others.
    """
    group, slot = parameter._group, parameter._slot
    layout = group.layout
    replicas = None if group.sharing.divides_between else group.sharing.replicas
    if isinstance(parameter, ReplicatedParameter):
        if layout.world_size > 1:
            dist.broadcast(whole := whole.contiguous(), group=group.process_group, group_src=0)
        parameter.copy_(whole)
        return
    flat = whole.reshape(-1)
    for rank in range(1, layout.world_size) if replicas is None or replicas.rank == 0 else ():
        piece = layout.piece(slot, rank)
        part = flat.narrow(0, piece.in_parameter, piece.length)
        if piece.length and group.rank == 0:
            dist.send(
                part.view(torch.uint8), group=group.process_group, group_dst=group.rank_at(rank)
            )  # as bytes: gloo lacks dtypes
        elif piece.length and group.rank == rank:
            dist.recv(part.view(torch.uint8), group=group.process_group, group_src=0)
    piece = layout.piece(slot, group.rank)
    if replicas is not None and piece.length:
        part = flat.narrow(0, piece.in_parameter, piece.length)
        dist.broadcast(part.view(torch.uint8), group=replicas.process_group, group_src=0)
    whole = flat.view(slot.shape)
    parameter.copy_(whole if parameter._dtensor is None else as_dtensor(whole, parameter._dtensor))
