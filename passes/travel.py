"""How a buffer travels between ranks: by which operators, what is sent of it, and how what arrives is read.

A `Travel` spells the collectives of ZeRO as operators. `lower` has them inserted into a graph, and code outside of
graphs has them run, so each spelling is written once::

    lower            travel.gather(insert, shard, M, pg)      nodes
    leaf modules     travel.gather(run, shard, M, pg)         tensors

===============  ====================================  ==========================================================
travel           a gather                              a reduction
===============  ====================================  ==========================================================
`Collective`     ``all_gather_into_tensor``            ``reduce_scatter_tensor``
`Pairwise`       ``zerofx.all_gather_pairwise``        ``zerofx.all_to_all_pairwise``, and a sum of all parts
===============  ====================================  ==========================================================

An *exchange* is a reduction without the sum: quantized parts (`zerofx.features.wire`) are to be read before they are
added. It is ``all_to_all_single``, or ``zerofx.all_to_all_pairwise``.

A buffer travels as the bytes that it is given: `Travel.gathered` gives back what arrived. Another case is a
class in a file of its own, and a line in `TRAVELS`. Graphs of ``one_copy`` have no gathers, so nothing travels there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import zerofx.passes.ops  # noqa: F401  # it registers the operators
from zerofx._torch import OpOverload, gather_into, resolve_process_group
from zerofx.passes import pairwise
from zerofx.passes.own import COLLECTIVES

_aten, _zerofx = torch.ops.aten, torch.ops.zerofx
_c10d = torch.ops._c10d_functional

Call = Callable[..., Any]
"""``call(operator, *args, **kwargs)``: `run` it, or insert a node for it. Values are tensors, or nodes."""


def run(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The `Call` of code outside of graphs."""
    return operator(*args, **kwargs)


class Travel:
    """Two collectives, as PyTorch's functional operators. Also what other ways are made from.

    Attributes:
        gather_target: the operator of a gather; its arguments are ``(sent, M, process group)``.
        scatter_target: the operator of a reduction.
        exchange_target: the operator of an exchange.
    """

    gather_target: OpOverload = _c10d.all_gather_into_tensor.default
    scatter_target: OpOverload = _c10d.reduce_scatter_tensor.default
    exchange_target: OpOverload = _c10d.all_to_all_single.default

    def takes(self, backend: str) -> bool:
        """Whether buffers travel so in process groups of this backend."""
        raise NotImplementedError

    def connect(self, process_group: str) -> None:
        """Ranks get to know each other, before anything travels. A collective."""

    # ---- in a graph, or one operator after the other -----------------------------------------------------------------

    def gather(self, call: Call, shard: Any, world_size: int, process_group: str) -> Any:
        """Start to gather every rank's ``shard``: ``[shard_numel]`` becomes ``[M * shard_numel]``, once waited for."""
        return call(self.gather_target, shard, world_size, process_group)

    def gathered(self, call: Call, arrived: Any) -> Any:
        """The flat buffer, of what a gather yields."""
        return arrived

    def scatter(self, call: Call, pack: Any, world_size: int, process_group: str) -> Any:
        """Start to reduce ``pack``, ``[M * shard_numel]``."""
        return call(self.scatter_target, pack, "sum", world_size, process_group)

    def summed(
        self, call: Call, pack: Any, arrived: Any, numel: int, world_size: int, process_group: str, wider: Any
    ) -> Any:
        """The sum over ranks of this rank's part of ``pack``, ``[numel]``, of what a reduction yields.

        ``wider``: a dtype to sum in, if that is wider than the pack's; else None. A way that does not sum by itself
        ignores it.
        """
        return arrived

    def exchange(self, call: Call, pack: Any, numel: int, world_size: int, process_group: str) -> Any:
        """Start to send each rank its part of ``pack``, ``[M * numel]``, as it is.

        Brings the parts for this rank in the order of ranks, ``[M * numel]``, or without its own.
        """
        sizes = [numel] * world_size
        return call(self.exchange_target, pack, sizes, sizes, process_group)

    # ---- into a buffer that is there ---------------------------------------------------------------------------------

    def gather_into(self, out: torch.Tensor, shard: torch.Tensor, process_group: str) -> list[dist.Work]:
        """Start to fill ``out``, of which ``shard`` may be a part; returns what to wait for."""
        return [gather_into(out, shard, resolve_process_group(process_group))]


class Collective(Travel):
    """As one collective of the backend's own."""

    def takes(self, backend: str) -> bool:
        return True


class Pairwise(Travel):
    """As messages between each two ranks: what gloo does best, and safely (`zerofx.passes.lower` says why)."""

    gather_target: OpOverload = _zerofx.all_gather_pairwise.default
    scatter_target: OpOverload = _zerofx.all_to_all_pairwise.default
    exchange_target: OpOverload = scatter_target

    def takes(self, backend: str) -> bool:
        return backend == "gloo"

    def connect(self, process_group: str) -> None:
        pairwise.connect(process_group)

    def scatter(self, call: Call, pack: Any, world_size: int, process_group: str) -> Any:
        return call(self.scatter_target, pack, world_size, process_group)

    def exchange(self, call: Call, pack: Any, numel: int, world_size: int, process_group: str) -> Any:
        return call(self.exchange_target, pack, world_size, process_group)

    def summed(
        self, call: Call, pack: Any, arrived: Any, numel: int, world_size: int, process_group: str, wider: Any
    ) -> Any:
        dtype = {} if wider is None else {"dtype": wider}
        others = call(_aten.view.default, arrived, [world_size - 1, numel])
        others = call(_aten.sum.dim_IntList, others, [0], **dtype)
        own = call(_zerofx.own_part.default, pack, world_size, process_group)
        return call(_aten.add.Tensor, own, others)

    def gather_into(self, out: torch.Tensor, shard: torch.Tensor, process_group: str) -> list[dist.Work]:
        return pairwise.all_gather_pairwise_(out, shard, process_group)


TRAVELS: list[Travel] = [Pairwise(), Collective()]
"""Every way there is. The first that takes a backend is taken."""


def travel_of(backend: str) -> Travel:
    """How buffers travel in process groups of ``backend``."""
    return next(travel for travel in TRAVELS if travel.takes(backend))


class _Targets:
    """The operators of one kind, of whatever stands in `TRAVELS` now."""

    def __init__(self, pick: Callable[[Travel], OpOverload]) -> None:
        self._pick = pick

    def __iter__(self) -> Iterator[OpOverload]:
        return map(self._pick, TRAVELS)

    def __contains__(self, target: Any) -> bool:
        return any(target is mine for mine in self)


GATHERS = _Targets(lambda travel: travel.gather_target)
SCATTERS = _Targets(lambda travel: travel.scatter_target)
EXCHANGES = _Targets(lambda travel: travel.exchange_target)


def communicates(target: Any) -> bool:
    """Whether an operator starts a collective: PyTorch's, one of ours, or one that a user's pass declared."""
    if not isinstance(target, OpOverload) or target is _c10d.wait_tensor.default:
        return False
    ours = target in GATHERS or target in SCATTERS or target in EXCHANGES
    return target.namespace == "_c10d_functional" or target in COLLECTIVES or ours
