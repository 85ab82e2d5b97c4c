"""zerofx's own operators: two symbolic ones, two collectives, two updates, and statements.

``gather`` and ``reduce`` think per parameter, and say so with one node each; ``group`` then replaces these nodes by
one collective per group. Both operators really run (slowly), so that a graph can be executed after any pass:

==========================================================  ========================================================
``zerofx.unshard(shard, shape, offset, M, group)``          the full parameter, from every rank's ``shard`` of its
                                                            group's flat buffer
``zerofx.reduce_grad(grad, offset, shard_numel, M, group)`` this rank's shard of a flat buffer that holds the average of
                                                            ``grad`` over the M ranks from ``offset`` on, and zeros
==========================================================  ========================================================

Two collectives that gloo does better by a *pairwise exchange*, every rank sending straight to every other, and what
goes with the second:

==========================================================  ========================================================
``zerofx.all_gather_pairwise(shard, M, group)``             what ``all_gather_into_tensor`` is
``zerofx.all_to_all_pairwise(pack, M, group)``              what ``all_to_all_single`` with equal parts is, less this
                                                            rank's own part: the others' alone, in rank order
``zerofx.own_part(pack, M, group)``                         that part, as a view of ``pack``: not copied
==========================================================  ========================================================

`zerofx.passes.pairwise` says how the exchange goes.

One that cuts what forward saves (`zerofx.features.partition_activations.partition_saved`):

==========================================================  ========================================================
``zerofx.part(whole, T, group)``                            this rank's part of T, a copy: of the elements in row-major
                                                            order, with zeros after the last
==========================================================  ========================================================

One for weights that the model itself writes to (`zerofx.compiler.written`):

==========================================================  ========================================================
``zerofx.copied(weight)``                                   what ``clone`` is, and nobody takes it out
==========================================================  ========================================================

Two that update weights while backward runs (`step`); whoever runs the graph has said how (`stepping`):

==========================================================  ========================================================
``zerofx.step(gradient, group)``                            the optimizer's step for one group, whose averaged gradient
                                                            this rank's shard ``gradient`` is
``zerofx.refresh(stepped, group)``                          starts to refresh the group's replicas
==========================================================  ========================================================

And two statements: ``zerofx.discard(buffer)`` frees the storage of a gathered buffer here and now, and
``zerofx.release(buffer)`` says that a buffer of the caller's is not read any more.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Protocol

import torch

from zerofx._torch import resolve_process_group
from zerofx.passes.pairwise import all_gather_pairwise_, all_to_all_pairwise_, under_way

_c10d = torch.ops._c10d_functional


# Straight to the dispatcher: what `custom_op` wraps around an operator costs a tenth of a millisecond a call, and most
# of the time of a compilation's rewriting.
_library = torch.library.Library("zerofx", "FRAGMENT")
_library.define("unshard(Tensor shard, int[] shape, int offset, int world_size, str process_group) -> Tensor")
_library.define("reduce_grad(Tensor grad, int offset, int shard_numel, int world_size, str process_group) -> Tensor")
_library.define("all_gather_pairwise(Tensor shard, int world_size, str process_group) -> Tensor")
_library.define("all_to_all_pairwise(Tensor pack, int world_size, str process_group) -> Tensor")
_library.define("own_part(Tensor(a) pack, int world_size, str process_group) -> Tensor(a)")
_library.define("part(Tensor whole, int world_size, str process_group) -> Tensor")
_library.define("copied(Tensor weight) -> Tensor")
_library.define("step(Tensor gradient, str group) -> Tensor")
_library.define("refresh(Tensor stepped, str group) -> Tensor")


def _unshard(shard: torch.Tensor, shape: list[int], offset: int, world_size: int, process_group: str) -> torch.Tensor:
    full = shard
    if world_size > 1:
        full = _gathered(shard, world_size)  # with out=: the way that is sound on gloo
        full = _c10d.wait_tensor(_c10d.all_gather_into_tensor_out(shard, world_size, process_group, out=full))
    return full.narrow(0, offset, math.prod(shape)).view(shape).clone()


def _unsharded(shard: torch.Tensor, shape: list[int], offset: int, world_size: int, process_group: str) -> torch.Tensor:
    return shard.new_empty(shape)


def _reduce_grad(
    grad: torch.Tensor, offset: int, shard_numel: int, world_size: int, process_group: str
) -> torch.Tensor:
    flat = grad.new_zeros(world_size * shard_numel)
    flat[offset : offset + grad.numel()] = grad.reshape(-1)
    if world_size == 1:
        return flat
    reduced = _c10d.reduce_scatter_tensor(flat, "sum", world_size, process_group)
    return _c10d.wait_tensor(reduced) / world_size


def _reduced(grad: torch.Tensor, offset: int, shard_numel: int, world_size: int, process_group: str) -> torch.Tensor:
    return grad.new_empty(shard_numel)


def _all_gather_pairwise(shard: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    out = _gathered(shard, world_size)
    return under_way(out, all_gather_pairwise_(out, shard, process_group))


def _all_to_all_pairwise(pack: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    out = _exchanged(pack, world_size, process_group)
    return under_way(out, all_to_all_pairwise_(out, pack, world_size, process_group))


def _own_part(pack: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    part = pack.numel() // world_size
    return pack.narrow(0, resolve_process_group(process_group).rank() * part, part)


def _part(whole: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    numel, out = whole.numel(), _any_of_parts(whole, world_size, process_group)
    first = min(numel, resolve_process_group(process_group).rank() * out.numel())
    mine = whole.reshape(-1)[first : first + out.numel()]
    out[: mine.numel()].copy_(mine)
    out[mine.numel() :].zero_()
    return out


class Stepper(Protocol):
    """Who knows what the groups of a graph are, and their optimizer."""

    def step(self, group: str, gradient: torch.Tensor) -> None:
        """Update the parameters of ``group``."""

    def refresh(self, group: str) -> None:
        """Start to refresh the replicas of ``group``."""


_here = threading.local()


@contextlib.contextmanager
def stepping(stepper: Stepper | None) -> Iterator[None]:
    """A graph runs inside, in this thread, and its groups are updated by ``stepper``."""
    before, _here.stepper = getattr(_here, "stepper", None), stepper
    try:
        yield
    finally:
        _here.stepper = before


def _stepper(group: str) -> Stepper:
    stepper = getattr(_here, "stepper", None)
    if stepper is None:
        raise RuntimeError(
            f"zerofx.step of group {group!r} outside of a backward in zerofx.step_in_backward: nobody said which "
            "optimizer. Run the graph as that backward does."
        )
    return stepper


def _step(gradient: torch.Tensor, group: str) -> torch.Tensor:
    _stepper(group).step(group, gradient)
    return gradient.new_empty(0)


def _refresh(stepped: torch.Tensor, group: str) -> torch.Tensor:
    _stepper(group).refresh(group)
    return stepped.new_empty(0)


def _nothing(tensor: torch.Tensor, group: str) -> torch.Tensor:
    return tensor.new_empty(0)


def _gathered(shard: torch.Tensor, world_size: int, process_group: str = "") -> torch.Tensor:
    return shard.new_empty(world_size * shard.numel())


def _exchanged(pack: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    return pack.new_empty(pack.numel() // world_size * (world_size - 1))


def _any_part(pack: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    part = pack.numel() // world_size
    return pack.narrow(0, part, part)  # not the first: Inductor asks whether it is aligned


def _any_of_parts(whole: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    return whole.new_empty(-(-whole.numel() // world_size))


for _name, _run, _shape in (
    ("unshard", _unshard, _unsharded),
    ("reduce_grad", _reduce_grad, _reduced),
    ("all_gather_pairwise", _all_gather_pairwise, _gathered),
    ("all_to_all_pairwise", _all_to_all_pairwise, _exchanged),
    ("own_part", _own_part, _any_part),
    ("part", _part, _any_of_parts),
    ("copied", torch.clone, torch.empty_like),
    ("step", _step, _nothing),
    ("refresh", _refresh, _nothing),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _shape, "Meta")
torch.library.register_autograd("zerofx::copied", lambda ctx, gradient: gradient, lib=_library)


def discard(buffer: torch.Tensor) -> None:
    """Free ``buffer``'s memory. Views of it may still exist; none may be used."""
    buffer.untyped_storage().resize_(0)


def release(buffer: torch.Tensor) -> None:
    """The last use of ``buffer`` is behind; who else holds it may still read it (``backward(retain_graph=True)``)."""
