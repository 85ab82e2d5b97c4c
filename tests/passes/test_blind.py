"""What `verify` accepts computes the same: blind mutants of finished graphs, run on two ranks beside the originals.

test_verify.py has mutants that somebody thought of, and the rule that finds each. These are found by chance: a mutant
may be refused by any rule, or compute the same, or not run at all. It must not compute something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from tests.passes.blind.survey import Case, Mutant, one_thread, record
from tests.slow import quick_if
from zerofx.compiler.records import GraphRecord

VARIANTS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 0, a bucket per parameter": {"stage": 0, "buckets": "parameter"},
    "stage 0, one bucket": {"stage": 0, "buckets": "all"},
    "stage 0, merged": {"stage": 0, "sync": "merge"},
    "stage 0, kept": {"stage": 0, "sync": "keep"},
    "stage 1": {"stage": 1},
    "stage 2, updated": {"stage": 2, "steps": True},
    "stage 2, merged": {"stage": 2, "sync": "merge"},
    "stage 2, nccl": {"stage": 2, "backend": "nccl"},
    "stage 3": {"stage": 3, "lookups": False},
    "stage 3, lookups": {"stage": 3},
    "stage 3, one copy": {"stage": 3, "lookups": False, "in_common": True},
    "stage 3, updated": {"stage": 3, "lookups": False, "steps": True},
    "stage 3, kept": {"stage": 3, "lookups": False, "sync": "keep"},
    "stage 3, merged": {"stage": 3, "lookups": False, "sync": "merge"},
    "stage 3, nccl, all kept": {"stage": 3, "lookups": False, "backend": "nccl", "memory_budget": float("inf")},
}
SHORT = [
    "stage 0",
    "stage 1",
    "stage 2, updated",
    "stage 3",
    "stage 3, lookups",
    "stage 3, one copy",
    "stage 3, merged",
]
EXECUTORS = ("eager", "inductor")
QUICK = {
    "eager": ("stage 2, updated", "stage 3", "stage 3, lookups"),
    "inductor": ("stage 3", "stage 3, one copy", "stage 3, merged"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@cache
def graphs_of(executor: str) -> GraphRecord:
    return record(executor, stage=3, lookups=True)


def survey(executor: str, variant: str, seeds: range) -> list[Mutant]:
    case = Case.of(f"{executor}, {variant}", graphs_of(executor), **VARIANTS[variant])
    return [case.try_(seed) for seed in seeds]


def check(mutants: list[Mutant]) -> None:
    wrong = [str(mutant) for mutant in mutants if mutant.outcome == "wrong"]
    assert not wrong, f"{len(wrong)} of {len(mutants)} accepted, and wrong:\n" + "\n".join(wrong)
    outcomes = Counter(mutant.outcome for mutant in mutants)
    assert outcomes["refused"] > len(mutants) / 4, outcomes  # else they would prove little


@quick_if(lambda executor, variant: variant in QUICK[executor])
@pytest.mark.parametrize("variant", SHORT)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_verify_accepts_computes_the_same(executor: str, variant: str) -> None:
    check(survey(executor, variant, range(24 if executor == "eager" else 8)))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_verify_accepts_computes_the_same_of_hundreds_of_mutants(executor: str, variant: str) -> None:
    mutants = survey(executor, variant, range(1000, 1400))
    print(f"\n{executor}, {variant}: {dict(Counter(mutant.outcome for mutant in mutants))}")
    check(mutants)


@quick_if(lambda executor: executor == "eager")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("variant", ["stage 0", "stage 3"])
def test_a_wrong_number_that_nobody_refuses_is_seen(
    executor: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `verify` most mutants run, and many compute something else: the comparison sees it."""
    monkeypatch.setattr("tests.passes.blind.survey.verify", lambda gm, ctx: 0)
    mutants = survey(executor, variant, range(16))
    assert sum(mutant.outcome == "wrong" for mutant in mutants) >= 4, [str(mutant) for mutant in mutants]


def test_a_seed_says_all() -> None:
    first, again = (survey("eager", "stage 3", range(5)) for _ in range(2))
    assert [str(mutant) for mutant in first] == [str(mutant) for mutant in again]
    assert torch.get_num_threads() == 1
