"""Every kind of layer that fuzzing knows, in every stage, with both executors, gives the numbers of one process.

Several kinds make a net, and nets, stages and executors meet in pairs (tests/pairwise.py). In ``make slow`` each kind
stands alone, too, and everything meets everything.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.fuzz.case import fails
from tests.fuzz.recipe import CONTAINERS, LEAVES, SHARERS, Layer, Recipe
from tests.pairwise import EXECUTORS, STAGES, pairwise
from tests.slow import quick_if

NETS = {
    "matrices": "linear strided single weight_norm spectral_norm",
    "bare_parameters": "norm batch_norm positions scalar scale empty count",
    "neighbours": "conv channels_last attention embedding bag",
    "recurrences": "gru lstm rnn",
    "functions": "custom stash function vmap stop cond",
    "shared_weights": "linear tied transposed again peek sometimes unused break",
    "views": "complex",
    "containers": " ".join(CONTAINERS),
}
STEPS = (("plain", "sometimes"), ("eval", "plain"))
LINEAR = Layer("linear", width=4)


def layer(kind: str) -> Layer:
    children = (LINEAR, Layer("norm")) if kind in CONTAINERS else ()
    return Layer(kind, width=6, children=children, of=1)


def check(make_workers, kinds: str, stage: int, executor: str) -> None:
    layers = (LINEAR, *map(layer, kinds.split()), LINEAR)
    problem = fails(make_workers, Recipe(layers, STEPS, stage=stage, executor=executor))
    assert not problem, problem


@quick_if(lambda net, stage: net == "views" and stage in (0, 3))
@pytest.mark.parametrize(("net", "stage", "executor"), pairwise(list(NETS), STAGES, EXECUTORS))
def test_a_net_of_several_kinds_trains_as_in_one_process(make_workers, net: str, stage: int, executor: str) -> None:
    check(make_workers, NETS[net], stage, executor)


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [*LEAVES, *CONTAINERS])
def test_a_kind_by_itself_trains_as_in_one_process(make_workers, kind: str, stage: int, executor: str) -> None:
    check(make_workers, kind, stage, executor)


def test_every_kind_is_in_a_net() -> None:
    met = Counter(itertools.chain.from_iterable(kinds.split() for kinds in NETS.values()))
    assert {*met} == {*LEAVES, *CONTAINERS}
    assert "linear" in NETS["shared_weights"] and {*SHARERS} <= {*NETS["shared_weights"].split()}
