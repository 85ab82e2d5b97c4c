"""An average of a model's weights, in slices: updated after each step, put in the model's place to evaluate.

::

    ema = zerofx.EMA(model, decay=0.999)
    for batch in loader:
        ...; optimizer.step(); ema.update()
    with ema.swapped():
        evaluate(model)                                    # the averages, in the graphs that the model has
    zerofx.save(folder, nn.ModuleDict({"model": model, "ema": ema}), optimizer)

    model    shard ──────────────┐ swapped: exchanged, group by group
      │ update: one lerp a group │
    ema      shard ◀─────────────┘

Nothing is gathered and nothing is sent. The averages are a copy of the model (`zerofx.compiler.copies`), which is
sharded alike and has the weights' own dtype: of a model with float32 masters float32. It is a
``torch.optim.swa_utils.AveragedModel``, with the formula of its ``get_ema_multi_avg_fn``; the idea is Polyak's and
Ruppert's (1992). Averages for evaluation: Karras et al. 2024, and most diffusion models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zerofx.runtime.state.group import ShardGroup, groups_of
from zerofx.runtime.state.home import all_resident
from zerofx.runtime.state.parameter import ShardedTensor, count_writes


class EMA(AveragedModel):
    """``decay * average + (1 - decay) * weight``, of every trained weight of ``model``; buffers are the model's.

    Attributes:
        model: whose weights are averaged. It is not a child: ``state_dict`` has the averages, under ``module.``.
        module: the copy that holds the averages. To call it is to compile it; `swapped` takes the model's graphs.
        n_averaged: how often it was updated, int64. The first time the weights are taken as they are.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, use_buffers: bool = False) -> None:
        """Copy ``model``, which zerofx has sharded, in any stage. ``use_buffers``: average buffers as well.

        Raises:
            ValueError: a ``decay`` outside of 0 to 1, or a model that is not sharded.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"EMA(decay={decay!r}): expected a number from 0 to 1, such as 0.999.")
        if not groups_of(model):
            raise ValueError(f"EMA of a {type(model).__name__} that is not sharded: call zerofx.compile on it first.")
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=use_buffers)
        self.decay = decay
        object.__setattr__(self, "model", model)

    model: nn.Module

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's weights as they are now into the averages. Call it after ``optimizer.step()``."""
        groups, plain = self._groups(), self._plain()
        with all_resident(group.home for pair in groups for group in pair):
            pairs = [(own.shard, theirs.shard) for own, theirs in groups] + plain
            averages, weights = (list(each) for each in zip(*pairs, strict=True))
            if self.n_averaged == 0:
                torch._foreach_copy_(averages, weights)
            else:
                torch._foreach_lerp_(averages, weights, 1 - self.decay)
        _note_written(own for own, _ in groups)
        if not self.use_buffers:
            for own_buffer, buffer in zip(self.module.buffers(), self.model.buffers(), strict=True):
                own_buffer.copy_(buffer)
        self.n_averaged.add_(1)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """Inside, the model has the averages for weights, and this object has the weights. Yields the model.

        Not between a forward and its backward. It takes the memory of one group's shard for a moment.
        """
        self._swap()
        try:
            yield self.model
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        if self.n_averaged == 0:
            return  # there is no average yet
        for average, weight in self._plain():
            _exchange(average, weight)
        for pair in self._groups():
            with all_resident(group.home for group in pair):
                _exchange(pair[0].shard, pair[1].shard)
            _note_written(pair)

    def _groups(self) -> list[tuple[ShardGroup, ShardGroup]]:
        """Groups of the copy, and of the model: what is trained and sharded."""
        pairs = zip(groups_of(self.module), groups_of(self.model), strict=True)
        return [pair for pair in pairs if pair[1].family.stage and pair[1].layout.requires_grad]

    def _plain(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of the copy, and of the model: parameters that are whole, and buffers that are averaged."""
        pairs = list(zip(self.module.parameters(), self.model.parameters(), strict=True))
        if self.use_buffers:
            pairs += zip(self.module.buffers(), self.model.buffers(), strict=True)  # type: ignore[arg-type]
        return [
            (a.detach(), b.detach()) for a, b in pairs if not isinstance(b, ShardedTensor) and b.is_floating_point()
        ]


def _exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    before = one.detach().clone()
    one.copy_(other)
    other.copy_(before)


def _note_written(groups: Iterable[ShardGroup]) -> None:
    """A backward that has saved a weight of ``groups`` must raise, and replicas are to be refreshed."""
    members = [group.members.live(slot) for group in groups for slot in group.layout.slots]
    count_writes([p for p in members if isinstance(p, ShardedTensor)])
