"""Which parameters of a module stay as they are: ``ignored=``.

::

    ignored=[nn.BatchNorm2d, "layers.*.router.bias"]              whole on every rank, gradients averaged
    ignored={nn.BatchNorm2d: "average", "adapters": "leave"}      the same by rule; gradients of adapters are left alone

A rule is a module class, a pattern of names of modules, or one of names of parameters (`zerofx.model.rules`). It is
about all parameters of the modules that it matches. Where two are about one parameter, the last one given wins.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from zerofx.model.rules import Rule, is_rule, matches

How = Literal["average", "leave"]
"""What is done with gradients of a parameter that is ignored: averaged over the ranks, or nothing."""
Ignored = Sequence[Rule] | Mapping[Rule, How]
"""What ``ignored=`` may be."""


def check_ignored(given: Any) -> None:
    """Refuse what is no list of rules, and no dictionary of them (ValueError)."""
    if given is None:
        return
    known = isinstance(given, (list, tuple, Mapping)) and len(given) > 0 and all(map(is_rule, given))
    if not known or (isinstance(given, Mapping) and not all(how in ("average", "leave") for how in given.values())):
        raise ValueError(
            f"ignored={given!r}: expected a list of module classes and patterns of names of modules or parameters, "
            'such as [nn.BatchNorm2d, "layers.*.router.bias"]; or a dictionary of these to "average" or "leave".'
        )


def ignored_in(module: nn.Module, given: Ignored | None) -> dict[nn.Parameter, How]:
    """The parameters of ``module`` that are ignored, in its order.

    Raises:
        ValueError: a rule is about no parameter; or nothing is left to shard.
    """
    rules: Mapping[Rule, How] = given if isinstance(given, Mapping) else dict.fromkeys(given or (), "average")
    modules = list(module.named_modules(remove_duplicate=False)) if rules else []
    named = list(module.named_parameters(remove_duplicate=False)) if rules else []
    found: dict[nn.Parameter, How] = {}
    for rule, how in rules.items():
        within = {name for name, m in modules if matches(rule, name, m)}
        about = [p for name, p in named if _is_about(rule, name, within)]
        if not about:
            raise ValueError(
                f"ignored: {rule!r} matches no parameter of this {type(module).__name__}. Names are those of "
                "named_modules() and named_parameters()."
            )
        found |= dict.fromkeys(about, how)
    ordered = {p: found[p] for _, p in named if p in found}
    if ordered and len(ordered) == len({p: None for _, p in named}):
        raise ValueError(
            f"ignored={given!r} is about every parameter of this {type(module).__name__}: there is nothing to shard. "
            "Leave some to zerofx; stage=0 divides nothing, and averages all gradients."
        )
    return ordered


def _is_about(rule: Rule, parameter: str, within: set[str]) -> bool:
    if isinstance(rule, str) and fnmatch.fnmatchcase(parameter, rule):
        return True
    holder = parameter
    while holder:
        holder = holder.rpartition(".")[0]
        if holder in within:
            return True
    return False
