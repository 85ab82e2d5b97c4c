"""Generated code, read: what Inductor writes passes, every way of breaking it is found, by the rule that says so."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import zerofx
from tests.passes.code_mutants import (  # noqa: F401  # they add themselves to MUTANTS
    MUTANTS,
    Mutant,
    Text,
    buffers,
    carried,
    collectives,
    cuda,
)
from tests.passes.generated import Generated, generated
from tests.passes.saved_cuda import saved
from zerofx.passes import VerificationError
from zerofx.passes.proof.code import check_code

CASES = [
    *(("gpt", {"stage": 3, "steps": True}), ("gpt", {"stage": 2, "steps": True})),
    *(("convolutions", {"stage": 3}), ("experts", {"stage": 3})),
    ("gpt", {"stage": 3, "world_size": 3, "memory_budget": 120_000}),
]
RULES = ("wait", "send", "discard", "order", "copy", "step", "read", "reload", "offload", "activation")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Generated]:
    """Code of all kinds: for the CPU, written now; for CUDA, saved."""
    folder = str(tmp_path_factory.mktemp("state"))
    away = zerofx.Offload(folder, gradients=folder, weights=folder, activations=folder, smallest=8192)
    elsewhere = [replace(each, name=f"{each.name}, elsewhere") for each in generated("gpt", stage=3, offload=away)]
    return [*(each for model, options in CASES for each in generated(model, **options)), *elsewhere, *saved()]


def test_what_inductor_writes_passes(texts: list[Generated]) -> None:
    assert len(texts) == 2 * (len(CASES) + 1) + len(saved())
    for each in texts:
        assert check_code(each.code, each.promise) is not None, each.name


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_may_repeat_and_join_parts_of_a_weight(stage: int) -> None:
    for each in generated("moved", stage=stage):
        assert check_code(each.code, each.promise) is not None, each.name


def found(each: Generated, mutant: Mutant) -> list[str]:
    """The rules by which ``mutant`` is refused at each of its places, if at all."""
    rules = []
    for i in range(len(mutant.places(Text(each.code)) or ())):
        text = Text(each.code)
        mutant.break_(text, mutant.places(text)[i])
        assert text.code != each.code
        try:
            check_code(text.code, each.promise)
        except VerificationError as e:
            rules.append(e.rule)
        else:
            rules.append(f"nothing, at place {i}")
    return rules


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_is_broken_is_found_by_its_rule(texts: list[Generated], mutant: Mutant) -> None:
    rules = {each.name: rules for each in texts if (rules := found(each, mutant))}
    assert rules, "it can be done nowhere"
    assert set().union(*rules.values()) == {mutant.rule}, rules


def test_there_are_enough_mutants(texts: list[Generated]) -> None:
    by_rule = Counter(mutant.rule for mutant in MUTANTS)
    assert set(by_rule) == set(RULES)
    assert sum(bool(mutant.places(Text(each.code))) for mutant in MUTANTS for each in texts) > 60
