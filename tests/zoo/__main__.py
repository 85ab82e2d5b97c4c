"""``make zoo``: trains every architecture in every stage with both executors, and writes docs/zoo.md.

    make zoo                                            # all of it, anew: hours
    make zoo ARGS=--resume                              # what a run that was cut off has left
    make zoo ARGS="--stages 0 1 2 --executors eager"    # these cells; the page keeps the others
    make zoo ARGS="--models lstm --minutes 10"
    make zoo ARGS="--meshes --schemes HSDP"             # four ranks as 2 x 2, stage 3, the eager executor
    make zoo ARGS="--resume --no-bytes"                 # whether they train, not what a step takes
    make zoo ARGS=--page                                # the page alone, of what was measured before

The page is written anew after each cell. Exit status 1 if a cell that was run is not equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict

import torch
import transformers

from tests.pairwise import EXECUTORS, STAGES
from tests.workers import Processes, Workers
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.predicted import measure
from tests.zoo.run import SCHEMES, train
from tests.zoo.table import PAGE, Line, cell, mesh_cell, page, read, reason, write

TIMEOUT = {"eager": 250, "inductor": 600}
Cell = tuple[str, int, str, str]
"""Model, stage, executor, and the scheme of a mesh or \"\"."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make zoo ARGS=...")
    here = [name for name, architecture in ARCHITECTURES.items() if architecture.is_here]
    parser.add_argument("--models", nargs="+", choices=list(ARCHITECTURES), default=here, metavar="MODEL")
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=STAGES)
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=EXECUTORS)
    parser.add_argument("--meshes", action="store_true", help="run on a mesh of 2 x 2 instead")
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES), metavar="SCHEME")
    parser.add_argument("--no-bytes", action="store_true", help="leave out what a step of stage 3 takes: half the time")
    parser.add_argument("--resume", action="store_true", help="keep what was measured, run what was not")
    parser.add_argument("--minutes", type=float, default=10**6, help="begin no cell after so many")
    parser.add_argument("--page", action="store_true", help="run nothing")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    lines, failed = read(), 0
    if not args.page:
        todo = cells(args)
        if not args.resume:
            lines = {name: line for name, line in lines.items() if name not in todo}
        failed = run({name: what for name, what in todo.items() if name not in lines}, lines, args)
    PAGE.write_text(page(lines))
    return failed > 0


def cells(args: argparse.Namespace) -> dict[str, Cell]:
    """What to run, by name. The cheap executor goes first: half of a table tells more than half of its rows."""
    if args.meshes:
        order = [(model, scheme) for scheme in args.schemes for model in args.models]
        return {mesh_cell(model, scheme): (model, 3, "eager", scheme) for model, scheme in order}
    return {
        cell(model, stage, executor): (model, stage, executor, "")
        for executor in sorted(args.executors)
        for model in args.models
        for stage in args.stages
    }


def run(todo: dict[str, Cell], lines: dict[str, Line], args: argparse.Namespace) -> int:
    """Runs cells and keeps what came of each at once; how many are not equal."""
    processes, end, failed = Processes(), time.monotonic() + 60 * args.minutes, 0
    try:
        for i, (name, what) in enumerate(todo.items()):
            if time.monotonic() > end:
                print(f"{len(todo) - i} cells are left: make zoo ARGS=--resume")
                break
            lines |= measured(name, *what, processes, not args.no_bytes)
            failed += lines[name]["verdict"] != "equal"
            print(f"{i + 1} of {len(todo)}: {name}: {lines[name]['verdict']}", flush=True)
            write(lines)
            PAGE.write_text(page(lines))
    finally:
        processes.stop()
    return failed


def measured(
    name: str, model: str, stage: int, executor: str, scheme: str, processes: Processes, with_bytes: bool
) -> dict[str, Line]:
    """A cell's line; of stage 3 with the eager executor one on the bytes of a step, too."""
    start, workers, found = time.monotonic(), Workers(4 if scheme else 2, processes), {}
    versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    try:
        outcomes = workers.run(train, model, stage, executor, scheme, timeout=TIMEOUT[executor])
    except AssertionError as e:  # raised, hung, died
        verdict = reason(str(e))
        print(e, file=sys.stderr)
    else:
        verdict = next((outcome.verdict for outcome in outcomes if outcome.verdict != "equal"), "equal")
        if with_bytes and (stage, executor, scheme) == (3, "eager", ""):
            first = outcomes[0]
            counts = {"parameters": first.parameters, "graphs": first.graphs, "places": first.places}
            found[f"{model}, a step"] = counts | asdict(workers.run(measure, model, timeout=250)[0])
    return found | {name: {"verdict": verdict, "seconds": round(time.monotonic() - start, 1), **versions}}


if __name__ == "__main__":
    sys.exit(main())
