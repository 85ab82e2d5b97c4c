"""The optimizer's step on a GPU: the host launches kernels, and waits for nothing.

Everything that a step depends on and the host need not know lies in tables on the device (`zerofx.kernels.segments`),
a row per member of the spans::

    partial_sums ─▶ sums ─all-reduce─▶ finalize ─▶ control (factor, found_inf, norm), steps, bias corrections
                                                        │
    adamw, one launch per kind ◀────────────────────────┘        returns at once where found_inf

So a step can be captured in a CUDA graph, and a step that is skipped costs no round trip. The host writes a table only
where something in it has changed, from pinned memory: a copy from pageable memory would make it wait.

Runs whose buffers are of one kind (`zerofx.kernels.runs.Kind`) are a *batch*, which one launch does, however many they
are: 430 runs of a model of 36 layers with 8-bit moments, 8,000 of a model of many experts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerofx.kernels import adamw as _adamw
from zerofx.kernels import norm as _norm
from zerofx.kernels.device import is_captured, there
from zerofx.kernels.runs import RUN_COLUMNS, Buffers, Kind, aligned
from zerofx.kernels.segments import BLOCK, CONTROL_COLUMNS, HYPER_COLUMNS, make_tiles
from zerofx.runtime.optim.moments import operands
from zerofx.runtime.optim.spans import Member, Run, Span, find_runs, ranks_of

_GOLDEN = 0x9E3779B97F4A7C15  # odd, so that no two seeds of 64 bits come to the same
_SET_BY_HOST = [HYPER_COLUMNS.index(name) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "sign")]


class Batch(NamedTuple):
    """Runs that one launch does.

    Attributes:
        kind: of all; its moments are None where somebody else updates them.
        ranks: over which sums over them run, `Span.ranks`.
        runs, tiles: the tables of `zerofx.kernels.runs` and `zerofx.kernels.segments`.
        counted: the gradients that this rank adds to such a sum; None: all of them.
    """

    kind: Kind
    ranks: tuple[str, ...]
    runs: torch.Tensor
    tiles: torch.Tensor
    counted: list[torch.Tensor] | None


class LastStep(NamedTuple):
    """Where buffers were when some spans were stepped last, and the batches that came of it."""

    places: list[Hashable]
    batches: list[Batch]


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
        self._buffers: dict[int, Buffers] = {}
        self._tiles: dict[Hashable, torch.Tensor] = {}
        self._most_tiles = 4 * sum(1 + member.length // BLOCK for member in self._members)
        self._runs: dict[Hashable, tuple[list[tuple[int, ...]], torch.Tensor, torch.Tensor]] = {}
        self._captured: list[torch.Tensor] = []
        self._last: dict[tuple[int, int], LastStep] = {}
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(
        self,
        spans: Sequence[Span],
        active: Sequence[Member],
        groups: Sequence[dict[str, Any]],
        max_grad_norm: float | None,
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        beside: Sequence[Run] = (),
        apart: Mapping[tuple[str, ...], float] | None = None,
    ) -> torch.Tensor:
        """Update ``spans``; returns the norm of the gradients, on the device.

        Args:
            beside: runs that are in the norm, and that somebody else updates by what was `decided`.
            apart: sums of squares of gradients that are on the host, of this rank, by `Span.ranks`.
            active: the members that take part, those included of which nothing is here.
            groups: the parameter group of each of these.
            scale, found_inf: what ``GradScaler`` has to say, one element each on the device, or None.
        """
        self._write_hyper(active, groups)
        batches = self._batches(spans, beside)
        total = torch.zeros(1, dtype=torch.float64, device=self.steps.device)
        if max_grad_norm is not None:
            total = self._sum_of_squares(batches, apart or {})
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
        for batch in batches:
            if batch.kind.moments is not None:
                seeds = self._seeds if batch.kind.seeded else None
                _adamw.adamw(batch.kind, batch.runs, batch.tiles, self._hyper, self._control, seeds)
        return self._control[CONTROL_COLUMNS.index("total_norm")].clone()  # the next step writes over it

    def decided(self) -> tuple[float, bool]:
        """The factor on gradients of the last step, and whether it was skipped. The host waits for the device."""
        control = self._control.tolist()
        return control[CONTROL_COLUMNS.index("gradient_factor")], control[CONTROL_COLUMNS.index("found_inf")] != 0

    def _write_hyper(self, active: Sequence[Member], groups: Sequence[dict[str, Any]]) -> None:
        """What the parameter groups say, where they say something new; tensors on the device stay there."""
        values: dict[int, tuple[float, ...]] = {}
        tensors: dict[tuple[int, torch.Tensor], list[int]] = defaultdict(list)
        said: dict[int, tuple[tuple[float, ...], list[tuple[int, torch.Tensor]]]] = {}
        for member, group in zip(active, groups, strict=True):
            if (found := said.get(id(group))) is None:
                found = said[id(group)] = _said_by(group)
            value, there_already = found
            for key in there_already:
                tensors[key].append(member.row)
            if self._written.get(member.row) != value:
                values[member.row] = value
        if values:
            new = torch.tensor(list(values.values()), dtype=torch.float64)
            self._hyper[self._index(tuple(values))[:, None], self._columns] = there(new, self._hyper.device)
            self._written |= values
        for (column, x), rows in tensors.items():
            here = x if x.device == self._hyper.device else there(x, self._hyper.device)
            self._hyper[self._index(tuple(rows)), column] = here.reshape(()).to(torch.float64)

    def _batches(self, spans: Sequence[Span], beside: Sequence[Run]) -> list[Batch]:
        """By kind, those first of which this step updates the weights."""
        places: list[Hashable] = [span.address for span in spans]
        for span in spans:
            gradients = (member.gradient for member in span.members)
            places += [None if g is None else (g.data_ptr(), g.dtype) for g in gradients]
        which = (id(spans[0]) if spans else 0, len(spans))
        last = self._last.get(which)
        if last is not None and not beside and last.places == places and not is_captured(self._hyper.device):
            return last.batches
        batches = self._new_batches(
            [run for span in spans for _, run in find_runs(span, [""] * len(span.members))], beside
        )
        if not beside and all(batch.counted is None for batch in batches) and not is_captured(self._hyper.device):
            self._last[which] = LastStep(places, batches)
        return batches

    def _new_batches(self, runs: Sequence[Run], beside: Sequence[Run]) -> list[Batch]:
        found: dict[tuple[Kind, tuple[str, ...], bool], list[tuple[Run, tuple[int, ...]]]] = defaultdict(list)
        for run in runs:
            buffers = self._buffers_of(run.span)
            row = buffers.row(run.start, run.gradient.data_ptr(), run.span.position + run.start, run.span.index)
            kind = buffers.kind(run.gradient.dtype, aligned(row))
            found[kind, run.span.ranks, run.is_counted_whole].append((run, row))
        for run in beside:
            row = (0, run.gradient.data_ptr(), *[0] * (len(RUN_COLUMNS) - 2))
            kind = Kind(run.span.whole.dtype, run.gradient.dtype, None, None, aligned(row))
            found[kind, run.span.ranks, run.is_counted_whole].append((run, row))
        batches = []
        for (kind, ranks, whole), pairs in found.items():
            key = (kind, ranks, whole, *((run.members[0].row, run.members[-1].row) for run, _ in pairs))
            counted = None if whole else [gradient for run, _ in pairs for gradient in run.counted() or ()]
            table = self._runs_of(key, [row for _, row in pairs])
            batches.append(Batch(kind, ranks, table, self._tiles_of(key, [run for run, _ in pairs]), counted))
        return batches

    def _buffers_of(self, span: Span) -> Buffers:
        """Made anew where the weights have come to lie elsewhere."""
        found = self._buffers.get(id(span))
        if found is None or found.param.data_ptr() != span.address:
            exp_avg, exp_avg_sq, scales = operands(span.state)
            master = span.state.get("master", span.state.get("remainder"))
            found = self._buffers[id(span)] = Buffers(span.weights(), exp_avg, exp_avg_sq, scales, master)
        return found

    def _sum_of_squares(self, batches: Sequence[Batch], apart: Mapping[tuple[str, ...], float]) -> torch.Tensor:
        """Over all ranks, of what is sharded; what is not is the same on every rank. A collective per process group."""
        totals = {name: self._hyper.new_full((1,), apart.get(name, 0.0)) for name in ((), *self._ranks)}
        for batch in batches:
            if batch.counted is None:
                parts = self._hyper.new_empty(_norm.PARTIAL_SUMS)
                _norm.partial_sums(batch.kind.grad, batch.runs, batch.tiles, parts, aligned=batch.kind.aligned)
                totals[batch.ranks] += parts.sum()
            for gradient in batch.counted or ():
                totals[batch.ranks] += gradient.double().square().sum()
        for names, chain in self._ranks.items():
            for ranks in chain:
                ranks.sum_(totals[names])
        return torch.stack(list(totals.values())).sum(dim=0)

    def _runs_of(self, key: Hashable, rows: list[tuple[int, ...]]) -> torch.Tensor:
        """A batch's table of runs: that of the last step, if all buffers are where they were.

        A CUDA graph has one of its own: a replay writes it once more, from memory that nobody else is given.
        """
        known = self._runs.get(key)
        captured = is_captured(self._hyper.device)
        if known is not None and known[0] == rows and not captured:
            return known[1]
        new = torch.tensor(rows, dtype=torch.int64)
        if captured and known is not None:  # nothing is pinned while a graph is captured, if it can be helped
            new = self._runs.pop(key)[2].copy_(new)
        elif self._hyper.device.type != "cpu":
            new = new.pin_memory()
        table = new.to(self._hyper.device, non_blocking=True)
        if captured:
            self._captured.append(new)
        else:
            self._runs[key] = (rows, table, new)
        return table

    def _tiles_of(self, key: Hashable, runs: Sequence[Run]) -> torch.Tensor:
        if (tiles := self._tiles.get(key)) is None:
            segments = [[(m.start - run.start, m.length, m.row) for m in run.members] for run in runs]
            tiles = self._tiles[key] = there(make_tiles(segments), self._hyper.device)
            while sum(map(len, self._tiles.values())) > max(self._most_tiles, len(tiles)):
                oldest = next(iter(self._tiles))  # other parameters have gradients in every step
                del self._tiles[oldest]
                self._runs.pop(oldest, None)
        return tiles

    def _index(self, rows: tuple[int, ...]) -> torch.Tensor:
        if rows not in self._indices:
            self._indices[rows] = there(torch.tensor(rows, dtype=torch.int64), self._hyper.device)
        return self._indices[rows]


def _said_by(group: dict[str, Any]) -> tuple[tuple[float, ...], list[tuple[int, torch.Tensor]]]:
    """What a parameter group says of the columns that the host sets; tensors apart, each with its column."""
    value = [group["lr"], *group["betas"], group["eps"], group["weight_decay"], -1.0 if group["maximize"] else 1.0]
    tensors = [(_SET_BY_HOST[i], x) for i, x in enumerate(value) if isinstance(x, torch.Tensor)]
    return tuple(0.0 if isinstance(x, torch.Tensor) else x for x in value), tensors
