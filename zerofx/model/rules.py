"""Which modules an option is about: by class, or by a pattern of their names.

::

    nn.LayerNorm          every module of that class
    "layers.*.router"     every module of such a name; ``*`` matches dots too
    ""                    the module itself, where an option can be about all of it

Names are those of ``named_modules()``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from torch import nn

Rule = type[nn.Module] | str


def is_rule(x: Any) -> bool:
    """Whether ``x`` is a module class or a pattern."""
    return isinstance(x, str) or (isinstance(x, type) and issubclass(x, nn.Module))


def matches(rule: Rule, name: str, module: nn.Module) -> bool:
    """Whether ``rule`` is about ``module``, which has that ``name``; no pattern but "" is about the root."""
    if isinstance(rule, str):
        return rule == name or (bool(name) and fnmatch.fnmatchcase(name, rule))
    return isinstance(module, rule)


def matched(option: str, rule: Rule, module: nn.Module, names: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Those of ``names`` that ``rule`` is about. ``option``: of which it is a part.

    Raises:
        ValueError: there are none.
    """
    found = [name for name, m in names if matches(rule, name, m)]
    if not found:
        raise ValueError(
            f"{option}: {rule!r} matches no module of this {type(module).__name__}. Names are those of named_modules()."
        )
    return found
