"""`AdamW`: the optimizer's step on flat shards, with clipping, unscaling and master weights folded in.

What ``torch.optim.AdamW`` with ``clip_grad_norm_`` and a cast does in three walks over lists of tensors is one walk
over a few flat runs here (`zerofx.runtime.optim.spans`)::

    gradients ──▶ sum of squares ──all-reduce──▶ norm ──▶ found_inf, factor = clip / scale
    gradients, moments, weights ──▶ one update with the factor, or none where found_inf

Where the weights are of low precision the update is of *master weights*, which the optimizer holds: float32 copies,
or the 16 bits that a bfloat16 weight lacks (`zerofx.kernels.split`). Bytes of state per parameter, sharded as it is:

==========================  =============  =======  ==============================================
weights                     master         moments  where the master lives
==========================  =============  =======  ==============================================
float32                     --             8        the weights are the master (`MixedPrecision` too:
                                                    there the group's shard is)
bfloat16, float16           4              8        ``state[p]["master"]``
bfloat16, master="split"    2              8        ``state[p]["remainder"]``
==========================  =============  =======  ==============================================

and 4 less with ``moments=torch.bfloat16``, 6 less with ``moments="8bit"`` (`zerofx.runtime.optim.moments`: of
parameters of 4096 elements or more), both rounded stochastically. Which code runs where:

======================  ================================================================================
device                  path
======================  ================================================================================
cpu                     `zerofx.kernels.cpu`: PyTorch's fused AdamW, or a loop that Inductor compiles
cuda                    Triton: two launches per run and one per step, nothing waits for the host
cuda, with the state    as on the cpu, where the state is (`zerofx.runtime.optim.through_host`); the norm as on
in the host's memory    cuda, and the host waits for what follows from it
======================  ================================================================================
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from zerofx._torch import DisableTorchFunction
from zerofx.kernels import cpu
from zerofx.kernels.device import runs_triton
from zerofx.runtime.optim import moments as _moments
from zerofx.runtime.optim.loaded import adopt, begin, load_as_saved
from zerofx.runtime.optim.spans import Member, Part, Run, Span, find_runs, find_spans, resident
from zerofx.runtime.optim.squares import squares, sum_of_squares
from zerofx.runtime.optim.through_file import through_file
from zerofx.runtime.optim.through_host import through_host
from zerofx.runtime.state.home import resident_of
from zerofx.runtime.state.parameter import ShardedTensor

if TYPE_CHECKING:
    from zerofx.runtime.optim.device_step import DeviceStep
    from zerofx.runtime.state.group import ShardGroup

_T = TypeVar("_T")
Key = tuple[int, float]
Master = Literal["float32", "split"] | None
Moments = torch.dtype | Literal["8bit"]
_OPTIONS = ("max_grad_norm", "master", "moments", "seed")


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2019) for sharded and plain parameters; the numbers of ``torch.optim.AdamW``.

    It is one: parameter groups, schedulers, hooks, closures, ``state_dict`` and ``GradScaler`` work as they do there,
    and either loads the other's state.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``. ``lr`` and betas may be tensors.
        max_grad_norm: clip the norm of all gradients together, over all ranks, as ``clip_grad_norm_`` would before
            the step. With a number (``inf`` to clip nothing) a step whose norm is not finite changes nothing, on any
            rank; the last norm is in `grad_norm`. None: gradients are taken as they are.
        master: what float32 master weights of low-precision parameters are kept as: ``"float32"``, ``"split"`` (the
            16 bits that a bfloat16 weight lacks: half the memory, the same numbers), or None: none are kept, updates
            are rounded to the weights' dtype.
        moments: what both are kept as: ``torch.float32``, ``torch.bfloat16``, or ``"8bit"``, codes with a float32 scale
            for each block of 256 elements (Dettmers et al. 2022; `zerofx.runtime.optim.moments` says of which
            parameters). The latter two are rounded stochastically.
        seed: of that rounding.

    Attributes:
        grad_norm: the norm of the gradients at the last step, unscaled, before clipping; None without max_grad_norm.

    Raises:
        ValueError: an option out of its range; the message names it.
    """

    state: defaultdict[torch.Tensor, Any]

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        master: Master = "float32",
        moments: Moments = torch.float32,
        maximize: bool = False,
        capturable: bool = False,
        seed: int = 0,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={max_grad_norm!r}: expected a number above 0, or None for no clipping.")
        if master not in ("float32", "split", None):
            raise ValueError(f'master={master!r}: expected "float32", "split" or None.')
        if moments not in (torch.float32, torch.bfloat16, "8bit"):
            raise ValueError(f'moments={moments!r}: expected torch.float32, torch.bfloat16 or "8bit".')
        self.max_grad_norm = max_grad_norm
        self.master, self.moments = master, moments
        self.seed = seed
        self.grad_norm: torch.Tensor | None = None
        self._spans: list[Span] | None = None
        self._spans_of: dict[ShardGroup, list[Span]] = {}
        self._group_of: dict[int, int] = {}
        self._device_step: DeviceStep | None = None
        self._step_supports_amp_scaling = True
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, capturable=capturable)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Returns what ``closure``, which computes the loss anew, returns.

        Raises:
            RuntimeError: a sparse gradient; nothing has changed then.
        """
        loss = torch.enable_grad()(closure)() if closure is not None else None
        self.step_all(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        return loss

    @torch.no_grad()
    def step_all(self, scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None) -> None:
        """One update of everything, without what is asked around a step: for an optimizer that this is a part of.

        Args:
            scale: what gradients are divided by.
            found_inf: whether to change nothing.
        """
        if self._spans is None:
            self._flatten()
        assert self._spans is not None
        self._update(self._spans, scale, found_inf)

    @torch.no_grad()
    def step_group(self, group: ShardGroup) -> None:
        """One update of ``group`` alone, unclipped: a part of `step`, for `zerofx.step_in_backward`."""
        if self._spans is None:
            self._flatten()
        self._update(self._spans_of[group], None, None)

    def _update(self, spans: list[Span], scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        if any(span.staging is not None and span.staging.copies.captured for span in spans):
            raise RuntimeError(
                "zerofx.AdamW: a step is captured in a CUDA graph, and state in the host's memory is updated there, "
                'which a replay would not do. Leave offload="cpu" out, or capture forward and backward alone.'
            )
        with resident(spans):
            self._update_resident(spans, scale, found_inf)

    def _update_resident(self, spans: list[Span], scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        self._prepare(spans)
        active = [member for span in spans for member in span.members if member.gradient is not None]
        if self._device_step is None:
            stepped = self._step_on_host(spans, active, scale, found_inf)
        else:
            stepped = self._step_on_device(spans, active, scale, found_inf, self._device_step)
        if stepped:
            self._count_writes(spans, active)
        for member in active:
            member.gradient = None

    def _prepare(self, spans: list[Span]) -> None:
        """Look what every member's gradient is, and have state for those that have one."""
        members = [member for span in spans for member in span.members]
        with DisableTorchFunction():
            for member in members:
                member.take_gradient()
        for span in spans:
            if self._device_step is None:
                span.take_counts(self._counts)
            active = [member for member in span.members if member.gradient is not None]
            if active:
                self._ensure_state(span)
            if changed := [member for member in active if not member.has(self.state[member.parameter])]:
                with span.state_resident(), span.weights_resident():
                    for member in changed:
                        self._follow(span, member)

    def _follow(self, span: Span, member: Member) -> None:
        """The buffers have what ``optimizer.state`` has: somebody else may have put it there, or have emptied it."""
        state = self.state[member.parameter]
        if not state:
            return begin(span, member, state, self._counts[member.row])
        with resident_of(state.values()):
            self._adopt_resident(span, member, state)

    def _step_on_host(
        self, spans: list[Span], active: list[Member], scale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> bool:
        keyed = self._keyed(spans)
        factor = 1.0 if scale is None else 1.0 / float(scale)
        skip = found_inf is not None and bool(found_inf)
        if self.max_grad_norm is not None:
            norm = math.sqrt(sum_of_squares(spans, [run for _, run in keyed])) * factor
            self.grad_norm = torch.tensor(norm)
            skip |= not math.isfinite(norm)
            factor *= min(1.0, self.max_grad_norm / (norm + 1e-6))
        if skip:
            return False
        keyed.sort(key=lambda pair: pair[0])
        here = [(key, run) for key, run in keyed if run.span.file is None and run.span.staging is None]
        self._step_runs([(key, run.all()) for key, run in here], factor)
        for file, through in _by_place(keyed, lambda span: span.file):
            through_file(file, through, functools.partial(self._step_runs, factor=factor))
        self._step_staged(keyed, factor)
        everywhere = len(active) == len(self._counts)
        self._counts[slice(None) if everywhere else [member.row for member in active]] += 1
        return True

    def _keyed(self, spans: list[Span]) -> list[tuple[Key, Run]]:
        """The runs of ``spans`` at this step, as the host steps them."""
        return [
            pair
            for span in spans
            for pair in find_runs(span, [(self._group_of[id(m.parameter)], m.updates) for m in span.members])
        ]

    def _step_staged(self, keyed: list[tuple[Key, Run]], factor: float) -> None:
        """Update those runs whose state is in the host's memory."""
        for staging, through in _by_place(keyed, lambda span: span.staging):
            through_host(staging, through, functools.partial(self._step_runs, factor=factor))

    def _step_runs(self, keyed: Sequence[tuple[Key, Part]], factor: float) -> None:
        """One kernel call for each key: the number of a parameter group, and how many updates there were."""
        for (index, updates), together in itertools.groupby(keyed, key=lambda pair: pair[0]):
            parts = [part for _, part in together]
            exp_avgs, exp_avg_sqs, scales = zip(*(_moments.operands(part.state) for part in parts), strict=True)
            cpu.adamw(
                [part.weights for part in parts],
                [part.gradient for part in parts],
                exp_avgs,
                exp_avg_sqs,
                [part.state.get("master", part.state.get("remainder")) for part in parts],
                _hyper(self.param_groups[index], updates + 1),
                factor,
                # The same on every rank for what every rank has: parameters that are not sharded must stay alike.
                [hash((self.seed, updates, part.span.index)) + part.span.position + part.start for part in parts],
                scales,
            )

    def _step_on_device(
        self,
        spans: list[Span],
        active: list[Member],
        scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        device_step: DeviceStep,
    ) -> bool:
        staged = [span for span in spans if span.staging is not None]
        here = [span for span in spans if span.staging is None]
        keyed = self._keyed(staged)
        groups = [self.param_groups[self._group_of[id(member.parameter)]] for member in active]
        beside = [run for _, run in keyed if not run.gradient_on_host]
        apart = None if self.max_grad_norm is None else squares([run for _, run in keyed if run.gradient_on_host])
        norm = device_step(here, active, groups, self.max_grad_norm, scale, found_inf, beside, apart)
        self.grad_norm = None if self.max_grad_norm is None else norm
        counted = [member for span in staged for member in span.members if member.gradient is not None]
        if counted:
            known = self.max_grad_norm is None and scale is None and found_inf is None
            factor, skip = (1.0, False) if known else device_step.decided()
            if not skip:
                self._step_staged(sorted(keyed, key=lambda pair: pair[0]), factor)
                for member in counted:
                    member.updates += 1
        return True  # for all that the host knows

    def _count_writes(self, spans: list[Span], active: list[Member]) -> None:
        """The kernels do not count their writes; replicas, and weights saved for backward, go by these counters.

        By whether there are gradients, not by whether this rank has a part of them: every rank must refresh alike.
        """
        written = [span for span in spans if any(member.gradient is not None for member in span.members)]
        weights = [span.whole for span in written]
        with DisableTorchFunction():
            torch.autograd.graph.increment_version([*(member.parameter for member in active), *weights])
        for span, weight in zip(written, weights, strict=True):
            span.version = weight._version

    def _ensure_state(self, span: Span) -> None:
        """The span's flat buffers, made when the first of its parameters has a gradient.

        Weights that were written by somebody else since the last step are what counts: their masters are made anew.
        (A remainder is less than half a unit of a weight's last place, whatever the weight: it can stay.)
        """
        whole = span.whole
        if span.state:
            if "master" in span.state and whole._version != span.version:
                master = span.state["master"]
                with span.state_resident():
                    weights = span.weights().to(master.device)
                    master.copy_(torch.where(weights == master.to(weights.dtype), master, weights.float()))
                span.version = whole._version
            return
        dtype = torch.float32 if self.moments == "8bit" else self.moments
        span.state.update(_moments.zeros(span, torch.float64 if whole.dtype == torch.float64 else dtype))
        if whole.dtype.itemsize >= 4 or self.master is None:
            return
        if self.master == "split" and whole.dtype == torch.bfloat16:
            span.state["remainder"] = span.zeros(span.numel, torch.int16)
        else:
            with span.state_resident():
                span.state["master"] = span.keep(span.weights().float())
        span.version = whole._version

    def _flatten(self) -> None:
        """Find the spans anew, and bring the state that parameters have already into flat buffers."""
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        spans = self._spans = find_spans(parameters, blocks=self.moments == "8bit")
        self._group_of = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        self._spans_of = defaultdict(list)
        for span in spans:
            if span.group is not None:
                self._spans_of[span.group].append(span)
        device, *others = dict.fromkeys(span.whole.device for span in spans)
        if others:
            raise ValueError(
                f"zerofx.AdamW: parameters on {device} and on {others[0]}: expected one device. Move the module to it, "
                "or make an optimizer for the parameters of each."
            )
        self._device_step = None
        self._counts = torch.zeros(sum(len(span.members) for span in spans), dtype=torch.float32)  # steps are views
        if _runs_triton(device):
            from zerofx.runtime.optim.device_step import DeviceStep  # here, because it needs triton

            self._device_step = DeviceStep(spans, device, self.seed)
            self._counts = self._device_step.steps
        with resident(spans):
            for span in spans:
                for member in span.members:
                    if state := self.state.get(member.parameter):
                        self._adopt_state(span, member, state)

    def _adopt_state(self, span: Span, member: Member, state: dict[str, Any]) -> None:
        """What a parameter has as state becomes its part of the span's flat buffers."""
        self._ensure_state(span)
        with span.state_resident(), resident_of(state.values()):
            self._adopt_resident(span, member, state)

    def _adopt_resident(self, span: Span, member: Member, state: dict[str, Any]) -> None:
        adopt(span, member, state)
        state["step"] = self._counts[member.row].copy_(torch.as_tensor(state["step"]))
        if self._device_step is None or span.staging is not None:
            member.updates = float(state["step"])
        member.state = dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in _OPTIONS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.grad_norm, self._spans, self._device_step = None, None, None
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in ``torch.optim``; what the parameters so far have learned stays."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if self.moments == "8bit" and isinstance(p, ShardedTensor) and p._group.home.file is not None:
                raise ValueError(
                    f'moments="8bit" with {p._slot.name!r}, whose state lives in {p._group.home.file.path.parent} '
                    "(offload=): codes and their scales have no chunks yet. Leave one of both out."
                )
            if p.is_complex():
                raise ValueError("zerofx.AdamW takes real parameters; a complex one was found: use torch.view_as_real.")
        self._spans = None

    def state_dict(self) -> dict[str, Any]:
        """As in ``torch.optim``, with float32 moments where they are kept in 8 bits (a copy; no collective)."""
        kept = self.state
        try:
            with resident(self._spans or ()):
                self.state = defaultdict(dict, {p: _moments.in_float32(state) for p, state in kept.items()})
            return super().state_dict()
        finally:
            self.state = kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim``, but moments and masters keep the dtype that this optimizer has for them."""
        load_as_saved(self, state_dict, {*_moments.MOMENTS, "master", "remainder"})
        self._flatten()


def _runs_triton(device: torch.device) -> bool:
    """The choice of path: kernels for GPUs (and in Triton's interpreter, which tests use), `kernels.cpu` elsewhere."""
    return runs_triton(device) or os.environ.get("TRITON_INTERPRET") == "1"


def _hyper(group: dict[str, Any], step: float) -> cpu.Hyper:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return cpu.Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], group["maximize"], step)


def _by_place(
    keyed: list[tuple[Key, Run]], place_of: Callable[[Span], _T | None]
) -> list[tuple[_T, list[tuple[Key, Run]]]]:
    """Those runs whose state has a place of a kind, by that place."""
    found: dict[int, tuple[_T, list[tuple[Key, Run]]]] = {}
    for key, run in keyed:
        if (place := place_of(run.span)) is not None:
            found.setdefault(id(place), (place, []))[1].append((key, run))
    return list(found.values())
