"""A pass of a user's own: a function, and its place among ours.

::

    def count(gm, ctx):                            a pass: it changes the graph in place
        ...

    zerofx.compile(model, passes=[count])                                      before `lower`
    zerofx.compile(model, passes=[zerofx.Pass(count, after="group")])          right after `group`
    zerofx.compile(model, passes=[zerofx.Pass(count, before="rematerialize")]) before all of ours

**Before all of ours** a pass sees the model's graph. It may change what the model computes: `verify` takes what it
leaves for the model. **After one of ours** a pass may read, compute and communicate. It must not change what the model
computes, and `verify` sees to that (rule "own").

`lower` and `verify` stand last. So what a pass inserts is spelled, ordered and checked like what ours insert.

docs/own-passes.md teaches how one is written.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from zerofx._torch import OpOverload
from zerofx.passes import kinds

LAST = "lower"
"""The first of the passes that no other stands after."""

COLLECTIVES: set[OpOverload] = set()
"""Operators of users that communicate, as their passes declared them (`Pass.collectives`)."""


@dataclass(frozen=True)
class Pass:
    """A user's pass, and its place.

    Attributes:
        function: ``function(gm, ctx)``: a ``torch.fx.GraphModule``, which it changes in place, and the `Context`. It
            returns its number of edits, or None. It runs once for each graph, and again when somebody looks at one.
        after, before: the name of the pass that it stands right after, or right before: ours, or one that stands
            ahead of it in ``passes=``. With neither it stands before `lower`.
        requires: what must have run before it: names of passes, or what a user's pass ``provides``.
        provides: names by which other passes may require it, beside its own.
        collectives: operators of one's own, which it inserts, that communicate.
    """

    function: Callable[[GraphModule, Any], Any]
    after: str | None = None
    before: str | None = None
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    collectives: tuple[OpOverload, ...] = ()

    def __post_init__(self) -> None:
        for field in ("requires", "provides", "collectives"):
            value = getattr(self, field)
            object.__setattr__(self, field, (value,) if isinstance(value, (str, OpOverload)) else tuple(value))
        if not callable(self.function):
            raise TypeError(f"zerofx.Pass({self.function!r}): expected a function of a graph module and a context.")
        _check_signature(self.function)
        if self.name in kinds.NODE_KINDS:
            raise ValueError(f"a pass named {self.name!r}: zerofx's own nodes are of that kind. Give it another name.")
        for target in self.collectives:
            if not isinstance(target, OpOverload):
                raise TypeError(
                    f"collectives={target!r} of the pass {self.name!r}: expected an operator with its overload, such "
                    "as torch.ops.mine.send.default."
                )
        COLLECTIVES.update(self.collectives)

    @property
    def name(self) -> str:
        """Of the function. What the pass inserts is of this kind."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    __name__ = name  # as a function has one: what lists passes need not tell them apart

    def __call__(self, gm: GraphModule, ctx: Any) -> Any:
        return self.function(gm, ctx)

    def __repr__(self) -> str:
        place = f", after={self.after!r}" * bool(self.after) + f", before={self.before!r}" * bool(self.before)
        return f"zerofx.Pass({self.name}{place})"

    @property
    def purpose(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @staticmethod
    def all_of(passes: Any) -> tuple[Pass, ...]:
        """What was given as ``passes=``, each as a `Pass`."""
        if not isinstance(passes, Sequence) or isinstance(passes, str):
            raise TypeError(f"passes={passes!r}: expected a list of functions (gm, ctx), or of zerofx.Pass: [my_pass].")
        return tuple(given if isinstance(given, Pass) else Pass(given) for given in passes)


def _check_signature(function: Callable) -> None:
    """Refuse what cannot be called with a graph and a context."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in: nobody can say
        return
    try:
        signature.bind(None, None)
    except TypeError:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"the pass {name}{signature} is not a function of a graph and its context: expected {name}(gm, ctx)."
        ) from None


def join(ours: Sequence[Callable], own: Sequence[Pass], stage: int) -> tuple[Any, ...]:
    """Our passes, and the user's ``own`` at their places among them.

    Raises:
        ValueError: a place that is not there, or something required that has not run; it names the nearest.
    """
    passes: list[Any] = list(ours)
    for pass_ in own:
        names = [each.__name__ for each in passes]
        if pass_.name in names:
            raise ValueError(f"two passes are named {pass_.name!r}: give one of them another name.")
        passes.insert(_place(pass_, passes, names, stage), pass_)
    _check_requirements(passes, stage)
    return tuple(passes)


def _place(pass_: Pass, passes: list[Any], names: list[str], stage: int) -> int:
    for where in ("after", "before"):
        name = getattr(pass_, where)
        if name is not None and name not in names:
            raise ValueError(
                f"the pass {pass_.name!r} is to stand {where}={name!r}, and stage {stage} has no pass of that name"
                f"{nearest(name, names)} Its passes are {', '.join(names)}."
            )
    last = names.index(LAST)
    place = names.index(pass_.before or LAST)
    if pass_.after is not None:
        behind = names.index(pass_.after) + 1
        while behind < last and isinstance(passes[behind], Pass) and passes[behind].after == pass_.after:
            behind += 1  # passes of one place stand as they were given
        if pass_.before is not None and behind > place:
            raise ValueError(
                f"the pass {pass_.name!r} is to stand after={pass_.after!r} and before={pass_.before!r}: expected a "
                f"place where the second comes later. The passes of stage {stage} are {', '.join(names)}."
            )
        place = behind if pass_.before is None else place
    if place > last:
        raise ValueError(
            f"the pass {pass_.name!r} is to stand after {LAST!r}: the last passes spell, order and check the graph. "
            f"Expected a place before them, such as before={LAST!r}."
        )
    return place


def _check_requirements(passes: list[Any], stage: int) -> None:
    there: set[str] = set()
    for pass_ in passes:
        if isinstance(pass_, Pass):
            missing = next((name for name in pass_.requires if name not in there), None)
            if missing is not None:
                raise ValueError(
                    f"the pass {pass_.name!r} requires {missing!r}, which nothing provides ahead of it in stage "
                    f"{stage}{nearest(missing, there)} Ahead of it stand {', '.join(sorted(there)) or 'no passes'}."
                )
            there.update(pass_.provides)
        there.add(pass_.__name__)


def in_front(passes: Iterable[Any]) -> tuple[Pass, ...]:
    """Those of ``passes`` that stand before all of ours."""
    found: list[Pass] = []
    for pass_ in passes:
        if not isinstance(pass_, Pass):
            break
        found.append(pass_)
    return tuple(found)


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say after an unknown ``name``: which of ``known`` it is nearest to, if it is near to one."""
    found = difflib.get_close_matches(str(name), list(known), n=1)
    return f": did you mean {found[0]!r}?" if found else "."
