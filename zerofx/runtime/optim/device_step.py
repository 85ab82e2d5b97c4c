"""The optimizer's step on a GPU: the host launches kernels, and waits for nothing.

Everything that a step depends on and the host need not know lies in tables on the device (`zerofx.kernels.segments`),
a row per member of the spans::

    partial_sums ─▶ sums ─all-reduce─▶ finalize ─▶ control (factor, found_inf, norm), steps, bias corrections
                                                        │
    adamw, one launch per flat run ◀────────────────────┘        returns at once where found_inf

So a step can be captured in a CUDA graph, and a step that is skipped costs no round trip. The host writes a table only
where a hyper-parameter has changed, from pinned memory: a copy from pageable memory would make it wait.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from zerofx.kernels import adamw as _adamw
from zerofx.kernels import norm as _norm
from zerofx.kernels.device import there
from zerofx.kernels.segments import CONTROL_COLUMNS, HYPER_COLUMNS, make_tiles
from zerofx.runtime.optim.moments import operands
from zerofx.runtime.optim.spans import Member, Run, Span, ranks_of

_GOLDEN = 0x9E3779B97F4A7C15  # odd, so that no two seeds of 64 bits come to the same
_SET_BY_HOST = [HYPER_COLUMNS.index(name) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "sign")]


class DeviceStep:
    """The tables of one optimizer, and its step.

    Attributes:
        steps: float32 [R], the updates that each member has had. ``optimizer.state[p]["step"]`` is a view of it.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device, seed: int) -> None:
        self._members = [member for span in spans for member in span.members]
        rows = len(self._members)
        self.steps: torch.Tensor = torch.zeros(rows, dtype=torch.float32, device=device)
        self._hyper = torch.zeros(rows, len(HYPER_COLUMNS), dtype=torch.float64, device=device)
        self._columns = torch.tensor(_SET_BY_HOST, device=device)
        self._control = torch.zeros(len(CONTROL_COLUMNS), dtype=torch.float32, device=device)
        self._written: dict[int, tuple[float, ...]] = {}
        self._index_of = {id(member): span.index for span in spans for member in span.members}
        indices = range(1 + max((span.index for span in spans), default=0))
        seeds = [(seed * _GOLDEN + (i << 24)) % (1 << 64) for i in indices]
        self._seeds = torch.tensor(seeds, dtype=torch.uint64).view(torch.int64).to(device)
        self._ranks = ranks_of(spans)
        self._tiles: dict[tuple[int, ...], torch.Tensor] = {}
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(
        self,
        runs: Sequence[Run],
        active: Sequence[Member],
        groups: Sequence[dict[str, Any]],
        max_grad_norm: float | None,
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        beside: Sequence[Run] = (),
    ) -> torch.Tensor:
        """Update ``runs``; returns the norm of the gradients, on the device.

        Args:
            beside: runs that are in the norm, and that somebody else updates by what was `decided`.
            active: the members that take part, those included of which nothing is here.
            groups: the parameter group of each of these.
            scale, found_inf: what ``GradScaler`` has to say, one element each on the device, or None.
        """
        self._write_hyper(active, groups)
        total = torch.zeros(1, dtype=torch.float64, device=self.steps.device)
        if max_grad_norm is not None:
            total = self._sum_of_squares([*runs, *beside])
        limit = math.inf if max_grad_norm is None else max_grad_norm
        rows = tuple(member.row for member in active)
        if len(rows) == len(self._members):
            _norm.finalize(total, limit, scale, found_inf, self._hyper, self.steps, self._control)
        else:  # only of those that take part the steps are counted
            index = self._index(rows)
            hyper, steps = self._hyper[index], self.steps[index]
            _norm.finalize(total, limit, scale, found_inf, hyper, steps, self._control)
            self._hyper[index], self.steps[index] = hyper, steps
        drawn = tuple(sorted({self._index_of[id(member)] for member in active}))
        self._seeds[self._index(drawn)] += 1
        for run in runs:
            state = run.state()
            exp_avg, exp_avg_sq, scales = operands(state)
            _adamw.adamw(
                run.of(run.span.weights()),
                run.flat_gradient(),
                exp_avg,
                exp_avg_sq,
                self._tiles_of(run),
                self._hyper,
                self._control,
                master=state.get("master", state.get("remainder")),
                scales=scales,
                seed=None if exp_avg.dtype.itemsize >= 4 else self._seeds[run.span.index],
                position=run.span.position + run.start,
            )
        return self._control[CONTROL_COLUMNS.index("total_norm")].clone()  # the next step writes over it

    def decided(self) -> tuple[float, bool]:
        """The factor on gradients of the last step, and whether it was skipped. The host waits for the device."""
        control = self._control.tolist()
        return control[CONTROL_COLUMNS.index("gradient_factor")], control[CONTROL_COLUMNS.index("found_inf")] != 0

    def _write_hyper(self, active: Sequence[Member], groups: Sequence[dict[str, Any]]) -> None:
        """What the parameter groups say, where they say something new; tensors on the device stay there."""
        values: dict[int, tuple[float, ...]] = {}
        tensors: dict[tuple[int, torch.Tensor], list[int]] = defaultdict(list)
        for member, group in zip(active, groups, strict=True):
            sign = -1.0 if group["maximize"] else 1.0
            value = [group["lr"], *group["betas"], group["eps"], group["weight_decay"], sign]
            for i, x in enumerate(value):
                if isinstance(x, torch.Tensor):
                    tensors[_SET_BY_HOST[i], x].append(member.row)
                    value[i] = 0.0
            if self._written.get(member.row) != tuple(value):
                values[member.row] = tuple(value)
        if values:
            new = torch.tensor(list(values.values()), dtype=torch.float64)
            self._hyper[self._index(tuple(values))[:, None], self._columns] = there(new, self._hyper.device)
            self._written |= values
        for (column, x), rows in tensors.items():
            here = x if x.device == self._hyper.device else there(x, self._hyper.device)
            self._hyper[self._index(tuple(rows)), column] = here.reshape(()).to(torch.float64)

    def _sum_of_squares(self, runs: Sequence[Run]) -> torch.Tensor:
        """Over all ranks, of what is sharded; what is not is the same on every rank. A collective per process group."""
        parts = torch.zeros(len(runs), _norm.PARTIAL_SUMS, dtype=torch.float64, device=self.steps.device)
        totals = {name: parts.new_zeros(1) for name in ((), *self._ranks)}
        for part, run in zip(parts, runs, strict=True):
            if (counted := run.counted()) is None:
                _norm.partial_sums(run.flat_gradient(), self._tiles_of(run), part)
                totals[run.span.ranks] += part.sum()
            for gradient in counted or ():
                totals[run.span.ranks] += gradient.double().square().sum()
        for names, chain in self._ranks.items():
            for ranks in chain:
                ranks.sum_(totals[names])
        return torch.stack(list(totals.values())).sum(dim=0)

    def _tiles_of(self, run: Run) -> torch.Tensor:
        key = tuple(member.row for member in run.members)
        segments = [(member.start - run.start, member.length, member.row) for member in run.members]
        return self._cached(self._tiles, key, lambda: make_tiles(segments))

    def _index(self, rows: tuple[int, ...]) -> torch.Tensor:
        return self._cached(self._indices, rows, lambda: torch.tensor(rows, dtype=torch.int64))

    def _cached(self, cache: dict[tuple[int, ...], torch.Tensor], key: tuple[int, ...], make: Any) -> torch.Tensor:
        if key not in cache:
            cache[key] = there(make(), self._hyper.device)
        return cache[key]
