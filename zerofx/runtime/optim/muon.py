"""`Muon`: matrices by Newton-Schulz, everything else by AdamW, in one optimizer for a whole model.

::

    optimizer = zerofx.Muon(model, lr=0.02, adamw_lr=3e-4)

    momentum <- lerp(momentum, gradient)                      elementwise, on slices
    update   <- lerp(gradient, momentum)   (Nesterov)         elementwise, on slices
    update   <- orthogonalize(update)                         on whole matrices, each on the rank that owns it
    weight   <- (1 - lr decay) weight - lr ratio update       elementwise, on slices

Muon is of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/); that weights decay, and the size of updates,
of Liu et al. 2025 (arXiv 2502.16982). What is one thing and what another:

===================================  =====================================================
`zerofx.runtime.optim.matrices`      which parameters are matrices, and their blocks
`zerofx.runtime.optim.orthogonalize` Newton-Schulz on plain tensors
`zerofx.runtime.optim.owners`        slices travel to the rank that has the whole, and back
`zerofx.runtime.optim.adamw`         what is no matrix
===================================  =====================================================
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from zerofx.runtime.eager.norms import norms
from zerofx.runtime.optim import moments as _moments
from zerofx.runtime.optim.adamw import AdamW
from zerofx.runtime.optim.loaded import load_as_saved
from zerofx.runtime.optim.matrices import Form, Rule, Splits, named, ratio
from zerofx.runtime.optim.orthogonalize import QUINTIC, Coefficients, operations, orthogonalize, triples_of
from zerofx.runtime.optim.owners import Owners
from zerofx.runtime.state.parameter import ShardedTensor

AdjustLr = Literal["original", "match_rms_adamw"] | None
_OPTIONS = ("max_grad_norm", "iteration_dtype")
_OF_ADAMW = ("lr", "betas", "eps", "weight_decay")


class Muon(torch.optim.Optimizer):
    """Muon for matrices (Jordan et al. 2024), AdamW for everything else; sharded and plain parameters.

    The numbers are those of ``torch.optim.Muon`` over the matrices and of ``torch.optim.AdamW`` over the rest, and the
    state has their names: either loads the other's, group by group. Schedulers, closures and ``GradScaler`` work as in
    ``torch.optim``. Embeddings and the output head are by AdamW, and what has fewer than two dimensions.

    Args:
        params: a module, its ``named_parameters()``, or parameter groups as in ``torch.optim``. A group with
            ``use_muon`` is of one kind, as its value says. Others are divided by rule into two groups, matrices first;
            there, options hold for both, and those that begin with ``adamw_`` for the second alone.
        lr, weight_decay, momentum, nesterov, eps, ns_steps, adjust_lr_fn: as in ``torch.optim.Muon``.
            ``adjust_lr_fn="match_rms_adamw"`` makes updates as large as AdamW's, so that one ``lr`` is for both.
        ns_coefficients: three numbers, three for each step, ``"quintic"`` (those of ``torch.optim.Muon``), or
            ``"polar_express"`` (Amsel et al. 2025): nearer to orthogonal in as many steps.
        iteration_dtype: of Newton-Schulz, and of what travels for it: ``torch.bfloat16`` or ``torch.float32``.
        matrices, others: patterns (``fnmatch``) of names that are one or the other, against the rule.
        splits: pattern of names -> number of blocks, or the rows of each: a fused matrix, whose blocks are matrices of
            their own (``{"*.qkv.weight": 3}``).
        adamw_lr: None: ``lr`` with "match_rms_adamw", 3e-4 otherwise.
        adamw_betas, adamw_eps: as in ``torch.optim.AdamW``.
        adamw_weight_decay: None: ``weight_decay``.
        max_grad_norm: as in `zerofx.AdamW`: one norm, of all gradients of both kinds. The host waits for it.

    Attributes:
        grad_norm: the norm of the gradients at the last step, before clipping; None without max_grad_norm.

    Raises:
        ValueError: an option out of its range, a pattern of no parameter, or a parameter of which nobody can tell
            whether it is an embedding's; the message names it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr = None,
        *,
        iteration_dtype: torch.dtype = torch.bfloat16,
        matrices: Sequence[str] = (),
        others: Sequence[str] = (),
        splits: Splits | None = None,
        adamw_lr: float | torch.Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        if adamw_lr is None:
            adamw_lr = lr if adjust_lr_fn == "match_rms_adamw" else 3e-4
        decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
        self._adamw_defaults = {"lr": adamw_lr, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": decay}
        self.max_grad_norm: float | None = max_grad_norm
        self.iteration_dtype: torch.dtype = iteration_dtype
        _check({name: getattr(self, name) for name in _OPTIONS})
        _check(defaults)
        _check({f"adamw_{name}": value for name, value in self._adamw_defaults.items()})
        module = params if isinstance(params, nn.Module) else None
        self._rule = Rule(matrices, others, splits or {}, module)
        self._forms: dict[torch.Tensor, Form] = {}
        self._adamw: AdamW | None = None
        self._owners: Owners | None = None
        self.grad_norm: torch.Tensor | None = None
        super().__init__(params if module is None else module.parameters(), defaults)
        self._rule.check_used()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in ``torch.optim``; one without ``use_muon`` may become two, matrices first.

        Raises:
            ValueError: an option out of its range, or a parameter that cannot be what is said.
        """
        parameters, names = named(param_group)
        if not parameters:
            return super().add_param_group(param_group)  # says what is wrong with it
        options = {k: v for k, v in param_group.items() if k not in ("params", "use_muon")}
        said = param_group.get("use_muon")
        self._rule.learn(parameters, names)
        chosen = {p: self._rule.is_matrix(p) if said is None else bool(said) for p in parameters}
        self._check_parameters(chosen)
        forms = {p: self._rule.form_of(p) for p, use in chosen.items() if use}
        for use in (True, False):
            if members := [p for p in parameters if chosen[p] == use]:
                self._add(use, [(names[p], p) for p in members] if names else members, options)
        self._forms.update(forms)
        self._owners = None
        self._compose()

    def _check_parameters(self, chosen: dict[torch.Tensor, bool]) -> None:
        for p, use in chosen.items():
            if use and (p.ndim < 2 or p.is_complex()):
                raise ValueError(
                    f"zerofx.Muon: {self._rule.name_of(p) or 'a parameter'!r} of shape {tuple(p.shape)} and {p.dtype} "
                    "in a group with use_muon=True: expected real matrices. Put it into a group with use_muon=False."
                )
            if use and getattr(p, "_dtensor", None) is not None:
                raise ValueError(
                    f"zerofx.Muon: {self._rule.name_of(p) or 'a parameter'!r} is a DTensor, of which this rank has a "
                    "part: expected whole matrices, for a part's singular values are others. Name it in others=, "
                    "and AdamW is for it."
                )

    def _add(self, use_muon: bool, parameters: Sequence[Any], options: dict[str, Any]) -> None:
        """One group, of one kind, with the options of that kind alone: those of torch's optimizer of that kind."""
        if use_muon:
            unknown = {"betas"}
            own = {k: v for k, v in options.items() if not k.startswith("adamw_")}
            _check(own)
        else:
            unknown = self.defaults.keys() - _OF_ADAMW
            said = {k.removeprefix("adamw_"): v for k, v in options.items() if k.startswith("adamw_")}
            own = {**self._adamw_defaults, **options, **said}
            own = {k: v for k, v in own.items() if not k.startswith("adamw_")}
            _check({f"adamw_{k}": v for k, v in own.items()})
        super().add_param_group({**own, "use_muon": use_muon, "params": parameters})
        for name in unknown:
            self.param_groups[-1].pop(name, None)

    def _compose(self) -> None:
        """Have an AdamW over the groups that are its, with this optimizer's state; options are shared as well."""
        groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adamw = AdamW(groups, master=None) if groups else None
        if self._adamw is not None:
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Returns what ``closure``, which computes the loss anew, returns.

        Raises:
            RuntimeError: a sparse gradient; nothing has changed then.
        """
        loss = torch.enable_grad()(closure)() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"] if group["use_muon"] else ():
                if p.grad is not None and p.grad.is_sparse:
                    raise RuntimeError(
                        f"zerofx.Muon: a matrix of shape {tuple(p.shape)} has a sparse gradient: expected a dense one. "
                        "Leave sparse=True out of the embedding."
                    )
        factor = self._clip()
        if factor is None:
            return loss
        if self._adamw is not None:
            scale = None if factor == 1.0 else torch.tensor(1.0 / factor, device=self._device())
            self._adamw.step_all(scale)
        for group in self.param_groups:
            if group["use_muon"]:
                self._step_matrices(group, factor)
        return loss

    def _device(self) -> torch.device:
        assert self._adamw is not None
        return next(p.device for group in self._adamw.param_groups for p in group["params"])

    def _clip(self) -> float | None:
        """What to multiply gradients with; None where their norm is not finite."""
        if self.max_grad_norm is None:
            return 1.0
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = _norm(gradients)
        self.grad_norm = torch.tensor(norm)
        return min(1.0, self.max_grad_norm / (norm + 1e-6)) if math.isfinite(norm) else None

    def _step_matrices(self, group: dict[str, Any], factor: float) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        gradients = [p.grad for p in parameters]
        momenta = [self._momentum(p) for p in parameters]
        if factor != 1.0:
            gradients = list(torch._foreach_mul(gradients, factor))
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = list(torch._foreach_lerp(gradients, momenta, group["momentum"])) if group["nesterov"] else momenta
        updates = self._orthogonalized(parameters, updates, group)
        lr = float(group["lr"])
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        together: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for p, update in zip(parameters, updates, strict=True):  # of one ratio: of one shape, mostly
            of_ratio = together[max(self._ratios(p, group))]
            of_ratio[0].append(p)
            of_ratio[1].append(update)
        for times, (some, their_updates) in together.items():
            torch._foreach_add_(some, their_updates, alpha=-(lr * times))

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            assert parameter.grad is not None
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer: torch.Tensor = state["momentum_buffer"]
        return buffer

    def _ratios(self, parameter: torch.Tensor, group: dict[str, Any]) -> list[float]:
        """What ``lr`` is multiplied with, for each block."""
        shapes = self._forms[parameter].shapes(parameter.shape)
        return [ratio(rows, columns, group["adjust_lr_fn"]) for rows, columns in shapes]

    def _orthogonalized(
        self, parameters: list[torch.Tensor], updates: list[torch.Tensor], group: dict[str, Any]
    ) -> list[torch.Tensor]:
        """``updates``, orthogonalized: whole ones here, sharded ones each on the rank that owns the parameter."""
        here = [i for i, update in enumerate(updates) if not isinstance(update, ShardedTensor)]
        results = dict(zip(here, self._of_wholes([parameters[i] for i in here], [updates[i] for i in here], group)))
        away = [i for i, update in enumerate(updates) if isinstance(update, ShardedTensor)]
        if away:
            owners = self.owners()
            slices: list[Any] = [updates[i] for i in away]
            mine = [parameters[i] for i, update in zip(away, slices, strict=True) if owners.owns(update)]
            done = self._of_wholes(mine, owners.gather(slices, self.iteration_dtype), group)
            parts = owners.scatter(done, slices, self.iteration_dtype)
            results.update((i, x.like(part)) for i, x, part in zip(away, slices, parts, strict=True))
        return [results[i] for i in range(len(updates))]

    def owners(self) -> Owners:
        """Who orthogonalizes which of the sharded matrices."""
        if self._owners is None:
            matrices = (p for group in self.param_groups if group["use_muon"] for p in group["params"])
            self._owners = Owners([p for p in matrices if isinstance(p, ShardedTensor)], operations)
        return self._owners

    def _of_wholes(
        self, parameters: list[torch.Tensor], wholes: list[torch.Tensor], group: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Whole updates of ``parameters``, orthogonalized block by block."""
        blocks = [self._forms[p].blocks(whole) for p, whole in zip(parameters, wholes, strict=True)]
        done = iter(
            orthogonalize(
                [block for of_one in blocks for block in of_one],
                steps=group["ns_steps"],
                coefficients=group["ns_coefficients"],
                eps=group["eps"],
                dtype=self.iteration_dtype,
            )
        )
        results = []
        for p, of_one in zip(parameters, blocks, strict=True):
            ratios = self._ratios(p, group)
            largest = max(ratios)
            mine = [next(done) for _ in of_one]
            mine = [x if r == largest else x * (r / largest) for x, r in zip(mine, ratios, strict=True)]
            results.append(self._forms[p].joined(mine, p.shape))
        return results

    def __getstate__(self) -> dict[str, Any]:
        names = (*_OPTIONS, "_adamw_defaults", "_rule", "_forms")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._owners, self.grad_norm = None, None
        self._compose()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim``; what was saved by another optimizer need not have the options of this one alone.

        Raises:
            ValueError: a group was of the other kind when it was saved.
        """
        saved = state_dict["param_groups"]
        groups = []
        for i, (mine, theirs) in enumerate(zip(self.param_groups, saved)):
            if theirs.get("use_muon", mine["use_muon"]) != mine["use_muon"]:
                raise ValueError(
                    f"zerofx.Muon: parameter group {i} has use_muon={mine['use_muon']} here and "
                    f"use_muon={theirs['use_muon']} in the state to load: expected the same parameters as matrices. "
                    "Pass the same patterns and groups as then."
                )
            groups.append({**{k: v for k, v in mine.items() if k not in ("params", "param_names")}, **theirs})
        load_as_saved(self, {**state_dict, "param_groups": groups + saved[len(groups) :]}, _moments.MOMENTS)
        if self._adamw is not None:
            self._adamw._flatten()  # takes up what was loaded


def _norm(gradients: list[torch.Tensor]) -> float:
    """Of all together, over all ranks. One all-reduce for each module; sums in float64, for float32 loses digits."""
    families: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        families[gradient._group.family if isinstance(gradient, ShardedTensor) else None].append(gradient)
    total = 0.0
    for family, some in families.items():
        each = torch._foreach_norm(some, 2, torch.float64) if family is None else norms(some, 2.0, torch.float64)
        total += float(torch.stack(list(each)).square().sum())
    return math.sqrt(total)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _at_least_0(value: Any) -> bool:
    return _is_number(value) and float(value) >= 0


_AT_LEAST_0 = (_at_least_0, "a number of 0 or above")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": _AT_LEAST_0,
    "weight_decay": _AT_LEAST_0,
    "momentum": (lambda x: _at_least_0(x) and x < 1, "a number from 0 to below 1"),
    "eps": (lambda x: _is_number(x) and x > 0, "a number above 0"),
    "ns_steps": (lambda x: isinstance(x, int) and 0 < x < 100, "a whole number from 1 to 99"),
    "adjust_lr_fn": (lambda x: x in (None, "original", "match_rms_adamw"), '"original", "match_rms_adamw" or None'),
    "iteration_dtype": (lambda x: x in (torch.bfloat16, torch.float32), "torch.bfloat16 or torch.float32"),
    "max_grad_norm": (lambda x: x is None or (_is_number(x) and x > 0), "a number above 0, or None for no clipping"),
    "adamw_lr": _AT_LEAST_0,
    "adamw_weight_decay": _AT_LEAST_0,
    "adamw_eps": _AT_LEAST_0,
    "adamw_betas": (
        lambda x: isinstance(x, (tuple, list)) and len(x) == 2 and all(_at_least_0(b) and b < 1 for b in x),
        "two numbers from 0 to below 1",
    ),
}


def _check(options: dict[str, Any]) -> None:
    """Raise for the first of ``options`` that is out of its range."""
    for name, value in options.items():
        if name in _RANGES and not _RANGES[name][0](value):
            raise ValueError(f"zerofx.Muon: {name}={value!r}: expected {_RANGES[name][1]}.")
    if "ns_coefficients" in options:
        triples_of(options["ns_coefficients"], 1)
