"""The gradients of parameters that zerofx does not shard (``ignored=``), averaged as a backward ends.

::

    backward     engine: gradient of router.bias ──▶ kept here      .grad gets zeros
                 engine: gradient of norm.weight ──▶ kept here
    its end      one all-reduce    | router.bias | norm.weight | who has one |      .grad += average

One all-reduce for all of them, whatever graphs a rank ran: a rank that has no gradient of a parameter counts as zeros,
and a parameter of which no rank has one gets none. Inside of `zerofx.no_sync` gradients stay here, as those of sharded
parameters stay with their groups.

The parameters are plain: whole, with their own memory, in any code. Which are ignored is noted here, too, for a plain
parameter of a sharded module that is not is an error (`zerofx.compiler.captured`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from zerofx._torch import backward_number, end_of_backward, inside_backward, will_accumulate
from zerofx.passes.reduce import check_dense
from zerofx.runtime.eager.ondemand import reduce_rest
from zerofx.runtime.ranks.sharing import RankGroup
from zerofx.runtime.ranks.watch import alone
from zerofx.runtime.state.group import Family

_IGNORED: dict[int, tuple[weakref.ref[torch.Tensor], Averages | None]] = {}
"""By identity: tensors compare by elements."""


def note_ignored(parameter: torch.Tensor, averages: Averages | None = None) -> None:
    """``parameter`` stays plain; its gradients go to ``averages``, if there are some."""
    key = id(parameter)
    _IGNORED[key] = weakref.ref(parameter, lambda _: _IGNORED.pop(key, None)), averages


def is_ignored(parameter: torch.Tensor) -> bool:
    """Whether that was noted."""
    return id(parameter) in _IGNORED and _IGNORED[id(parameter)][0]() is parameter


def keeps_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a gradient of one of ``parameters``, which are ignored, was not averaged yet."""
    found = {averages for p in parameters if is_ignored(p) and (averages := _IGNORED[id(p)][1]) is not None}
    return any(averages.has_kept() for averages in found)


class Averages:
    """Of one module's ignored parameters.

    Attributes:
        ranks: that they are averaged over: all that share the module.
    """

    def __init__(self, family: Family, ranks: RankGroup, parameters: Mapping[str, nn.Parameter]) -> None:
        self.ranks = ranks
        self._family = weakref.ref(family)
        self._parameters = {name: weakref.ref(p) for name, p in parameters.items()}
        self._kept: dict[str, torch.Tensor] = {}
        self._found: dict[int, dict[str, torch.Tensor]] = {}  # by the backward: a reentrant one is inside another
        for name, parameter in parameters.items():
            note_ignored(parameter, self)
            self._hook(name, parameter)

    def alike(self, family: Family, memo: Mapping[int, nn.Parameter]) -> Averages | None:
        """Those of a copy of the module; ``memo``: from a parameter's id to its copy. None: it has none of them."""
        made = {
            name: memo[id(p)] for name, ref in self._parameters.items() if (p := ref()) is not None and id(p) in memo
        }
        return Averages(family, self.ranks, made) if made else None

    def has_kept(self) -> bool:
        """Whether there is a gradient that was not averaged yet."""
        if not inside_backward():
            self._found.clear()  # what a backward that failed had found
        return bool(self._kept)

    def kept(self) -> list[torch.Tensor]:
        """What `zerofx.no_sync` kept."""
        return list(self._kept.values())

    def drop_kept(self) -> None:
        """Forget what `zerofx.no_sync` kept."""
        self._kept.clear()

    def end_backward(self) -> None:
        """Inside a backward: average as it ends."""
        if (number := backward_number()) not in self._found:
            self._found[number] = {}
            end_of_backward(functools.partial(self._average, number))

    def _hook(self, name: str, parameter: nn.Parameter) -> None:
        averages = weakref.ref(self)

        def hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
            this = averages()
            return None if this is None or gradient is None else this._keep(name, gradient)

        if parameter.is_floating_point() or parameter.is_complex():
            before = parameter.requires_grad
            parameter.requires_grad_(True).register_hook(hook)  # a frozen one may be trained later
            parameter.requires_grad_(before)

    def _keep(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        parameter, family = self._parameters[name](), self._family()
        if parameter is None or family is None or not _accumulates(parameter):
            return None  # of torch.autograd.grad: this rank's own, as of any tensor
        check_dense(name, gradient.layout)
        mine = self._kept
        if family.sync:
            reduce_rest(family)  # which comes to `end_backward`
            mine = self._found[backward_number()]
        mine[name] = mine[name] + gradient if name in mine else gradient.detach()
        return torch.zeros_like(gradient)

    def _average(self, number: int) -> None:
        mine, kept, self._kept = self._found.pop(number), self._kept, {}
        mine |= {name: mine[name] + gradient if name in mine else gradient for name, gradient in kept.items()}
        live = {name: p for name, ref in self._parameters.items() if (p := ref()) is not None and p.requires_grad}
        kinds = dict.fromkeys((p.dtype, p.device) for p in live.values())
        for kind in kinds:
            self._average_of({name: p for name, p in live.items() if (p.dtype, p.device) == kind}, mine)

    def _average_of(self, parameters: dict[str, nn.Parameter], mine: Mapping[str, torch.Tensor]) -> None:
        """Of parameters of one dtype, on one device."""
        one = next(iter(parameters.values()))
        real = one.new_zeros(()).abs().dtype  # a complex one travels as two real ones
        rows = [mine.get(name, torch.zeros_like(p, requires_grad=False)) for name, p in parameters.items()]
        flat = [torch.view_as_real(x).reshape(-1) if x.is_complex() else x.reshape(-1) for x in rows]
        has = torch.tensor([float(name in mine) for name in parameters], dtype=real, device=one.device)
        pack = torch.cat([*(x.to(real) for x in flat), has])
        if self.ranks.size > 1:
            with alone(self.ranks.name, "ignored parameters", "all-reduce", "ignored", pack.nbytes, pack.dtype):
                dist.all_reduce(pack, group=self.ranks.process_group)
        *averages, has = pack.split([*(x.numel() for x in flat), len(rows)])
        for p, row, average, used in zip(parameters.values(), rows, averages, has.tolist(), strict=True):
            if used:
                average = (average / self.ranks.size).clone()
                whole = torch.view_as_complex(average.view(*row.shape, 2)) if row.is_complex() else average.view_as(row)
                p.grad = whole if p.grad is None else p.grad.add_(whole)


def _accumulates(parameter: torch.Tensor) -> bool:
    """Whether the backward that runs adds to ``.grad``: not ``torch.autograd.grad``, nor one with other ``inputs=``."""
    try:
        return will_accumulate(parameter)
    except RuntimeError:
        return False
