"""``make fuzz``: as many random cases as a time allows, or a case from a file.

    make fuzz                                  # ten minutes of new cases
    make fuzz ARGS="--minutes 60 --seed 7"
    make fuzz ARGS="--cases 5000 --minutes 600"
    make fuzz ARGS="--executor inductor --minutes 30"
    make fuzz ARGS="--meshes --minutes 30"     # on meshes of two dimensions alone
    make fuzz ARGS=case.txt                    # what a failing run printed

Cases are drawn in rounds of fifty, each from a seed of its own. Hypothesis cuts a failing one down as far as it
still fails; the run says how, and goes on. Exit status 1 if any case failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import FlakyFailure

from tests.fuzz import recipe as vocabulary
from tests.fuzz.case import fails
from tests.fuzz.recipe import Recipe
from tests.fuzz.strategies import recipes
from tests.workers import Processes, Workers

ROUND = 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz ARGS=...")
    parser.add_argument("case", nargs="?", type=Path, help="a file with one recipe: run that, nothing else")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; default: drawn")
    parser.add_argument("--executor", choices=["eager", "inductor", "regional"], default="eager")
    parser.add_argument("--largest-world", type=int, default=4)
    parser.add_argument("--meshes", action="store_true", help="draw cases on meshes of two dimensions alone")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    processes = Processes()
    try:
        if args.case is not None:
            problem = fails(lambda n: Workers(n, processes), eval(args.case.read_text(), vars(vocabulary)))
            print(problem or "it passes")
            return bool(problem)
        return fuzz(args, processes)
    finally:
        processes.stop()


def fuzz(args: argparse.Namespace, processes: Processes) -> int:
    seed = random.randrange(10**6) if args.seed is None else args.seed
    end, ran, failures, stages = time.monotonic() + 60 * args.minutes, 0, 0, Counter[int]()
    phases = [Phase.generate, Phase.shrink] if args.shrink else [Phase.generate]

    while time.monotonic() < end and ran < args.cases:

        @hypothesis.seed(seed)
        @settings(
            max_examples=ROUND,
            phases=phases,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(recipes(args.executor, args.largest_world, meshes=args.meshes))
        def one_round(recipe: Recipe) -> None:
            nonlocal ran
            if time.monotonic() > end:
                return
            ran += 1
            stages[recipe.stage] += 1
            problem = fails(lambda n: Workers(n, processes), recipe)
            assert not problem, problem

        try:
            one_round()
        except (AssertionError, FlakyFailure) as e:
            failures += 1
            flaky = isinstance(e, FlakyFailure)  # it failed, and passed when asked again
            problem = "\n".join(map(str, e.exceptions)) if flaky else str(e)
            print(f"\nFAILED in the round of seed {seed}{' once' * flaky}:\n{problem}", flush=True)
        seed += 1
        by_stage = ", ".join(f"{stages[s]} of stage {s}" for s in sorted(stages))
        print(f"{ran} cases ({by_stage}), {failures} failures; next seed {seed}", flush=True)
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
