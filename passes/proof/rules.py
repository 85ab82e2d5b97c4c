"""What `verify` knows of optional features: the interface that each of them fills in.

A feature inserts nodes of its own, and nodes of the core in places of its own. It says what these are::

    a graph                        who is asked                                       for example
    its inputs                     inputs, held, shard                                a shard that is on the host
    each operation                 writes, operators, facts                           the wait for it
    what reads a shard             flats, gathers                                     a gather between hosts
    what is no shard's gather      other_gathers                                      indices of all ranks
    what reads a pack              packs, reductions                                  a sum over replicas
    its outputs                    outputs, saved, gradients, averaged                the update in a gradient's place
    all of it                      finished                                           each was waited for

`RULES` has those of all features, in the order of `zerofx.features.FEATURES`. The first that answers is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from zerofx.model.layout import GroupLayout
from zerofx.passes.proof.facts import Flat, Pack
from zerofx.passes.proof.meaning import Number, Op

Known = Any
"""`zerofx.passes.proof.known.Known`, which asks here."""


@dataclass(frozen=True)
class Rules:
    """Functions of what is `Known` so far. All are optional.

    Attributes:
        operators: by operator, what reads a call of it and the first fact among its inputs.
        facts: by type of a fact, what reads an operation that has such an input.
        inputs: reads the inputs that are not promised to the core.
        held: the layout of which a rank has a shard between steps; None: the group's.
        shard: reads the placeholder of a shard, which is a `Flat` so far.
        writes: reads what an operation writes to, before anything else of it.
        flats: reads what reads a shard or a gathered group; False: it is none of the feature's.
        gathers: of the gather of a shard: what it brings, the layout whose ranks it runs over, and their process
            group; None: it is the core's.
        other_gathers: reads a gather of what is no shard; False: it is none of the feature's.
        packs: reads what reads a pack; False: it is none of the feature's.
        reductions: reads the start of a reduction of a pack; False: it is none of the feature's.
        outputs: checks an output of the graph's, by its number.
        saved: checks a saved output (its number, the name that backward has for it, the value, and the number it had);
            False: it is none of the feature's.
        gradients: the gradient that an extra output stands for, of a group, by its number; None: itself.
        averaged: checks what became of a reduced gradient.
        finished: checks what can be said once all is read.
    """

    operators: Mapping[Any, Callable[[Known, Op, Any], None]] = field(default_factory=dict)
    facts: Mapping[type, Callable[[Known, Op, Any], None]] = field(default_factory=dict)
    inputs: Callable[[Known, list[Node]], None] | None = None
    held: Callable[[Known, GroupLayout], GroupLayout | None] | None = None
    shard: Callable[[Known, Node, Flat], None] | None = None
    writes: Callable[[Known, Op], None] | None = None
    flats: Callable[[Known, Op, Flat], bool] | None = None
    gathers: Callable[[Known, Op, Flat], tuple[Flat, GroupLayout, str] | None] | None = None
    other_gathers: Callable[[Known, Op], bool] | None = None
    packs: Callable[[Known, Op, Pack], bool] | None = None
    reductions: Callable[[Known, Op, Pack], bool] | None = None
    outputs: Callable[[Known, int, Any], None] | None = None
    saved: Callable[[Known, int, str, Node, Number | None], bool] | None = None
    gradients: Callable[[Known, Node, GroupLayout, int], Node | None] | None = None
    averaged: Callable[[Known, Node, Pack], None] | None = None
    finished: Callable[[Known], None] | None = None


RULES: list[Rules] = []


def readers(op: Op, fact: Any) -> Callable[[Known, Op, Any], None] | None:
    """What reads ``op`` by its operator or by the type of its input's ``fact``: the first feature's."""
    for rules in RULES:
        found = rules.operators.get(op.target) or rules.facts.get(type(fact))
        if found is not None:
            return found
    return None


def ask(name: str, *args: Any) -> Any:
    """Ask all features, and return the first answer that is neither None nor False; None: there is none."""
    for rules in RULES:
        answer = getattr(rules, name)
        if answer is not None and (found := answer(*args)) is not None and found is not False:
            return found
    return None
