"""The parity suites with NCCL's spelling, all cells: benchmarks/results/nccl-spelling.json, and docs/cuda.md's table.

    python -m tests.nccl                                   # all of it, anew: an hour or two on two cores
    python -m tests.nccl --resume                          # what a run that was cut off has left
    python -m tests.nccl --executors eager --ranks 2
    python -m tests.nccl --page                            # the table alone, of what was measured before

The file is written after each cell. Exit status 1 if a cell that was run is not equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from tests.nccl.page import RESULT, read, write_page
from tests.nccl.parity import BOUND, Cell, cells, run
from tests.pairwise import EXECUTORS
from tests.workers import Processes, Workers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nccl")
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=EXECUTORS)
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 3), default=[2, 3])
    parser.add_argument("--resume", action="store_true", help="keep what was measured, run what was not")
    parser.add_argument("--minutes", type=float, default=10**6, help="begin no cell after so many")
    parser.add_argument("--page", action="store_true", help="run nothing")
    args = parser.parse_args()
    lines = read()
    if args.page:
        write_page(lines)
        return 0
    todo = [cell for cell in cells() if cell.executor in args.executors and cell.ranks in args.ranks]
    todo = [cell for cell in todo if not (args.resume and lines.get(str(cell), {}).get("verdict") == "equal")]
    processes, end, failed = Processes(), time.monotonic() + 60 * args.minutes, 0
    try:
        for i, cell in enumerate(todo):
            if time.monotonic() > end:
                print(f"{len(todo) - i} cells are left: python -m tests.nccl --resume")
                break
            lines[str(cell)] = line = measured(processes, cell)
            failed += line["verdict"] != "equal"
            print(f"{i + 1} of {len(todo)}: {cell}: {line['verdict']}", flush=True)
            write(lines)
    finally:
        processes.stop()
    return failed > 0


def measured(processes: Processes, cell: Cell) -> dict[str, Any]:
    began, timeout = time.monotonic(), 280 if cell.executor == "eager" else 900
    try:
        found = run(Workers(cell.ranks, processes), cell, timeout)
        verdict = "equal" if found.equal else f"other numbers: {found.off:.0e}; {'; '.join(found.races[:3])}"
        line = asdict(found)
    except AssertionError as e:  # of a suite, or raised, hung, died
        print(e, file=sys.stderr)
        verdict, line = str(e).strip().splitlines()[-1][:200], {}
    seconds = round(time.monotonic() - began, 1)
    return {**asdict(cell), "verdict": verdict, **line, "seconds": seconds, "torch": torch.__version__}


def write(lines: dict[str, Any]) -> None:
    """A line for each cell, in the table's order."""
    order = {str(cell): i for i, cell in enumerate(cells())}
    names = sorted((name for name in lines if name in order), key=order.__getitem__)
    body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(lines[name])}" for name in names)
    head = {"command": "python -m tests.nccl", "bound": BOUND}
    RESULT.write_text(f'{json.dumps(head)[:-1]}, "cells": {{\n{body}\n}}}}\n')
    write_page(lines)


if __name__ == "__main__":
    sys.exit(main())
