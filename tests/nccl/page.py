"""The table of docs/cuda.md, made of benchmarks/results/nccl-spelling.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.nccl.parity import cells
from tests.pairwise import STAGES

ROOT = Path(__file__).parents[2]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "nccl-spelling.json", ROOT / "docs" / "cuda.md"
BEGIN, END = "<!-- made by python -m tests.nccl -->\n", "<!-- end -->\n"


def read() -> dict[str, Any]:
    """The lines that were measured, by cell."""
    return json.loads(RESULT.read_text())["cells"] if RESULT.exists() else {}


def table(lines: dict[str, Any]) -> str:
    """A row for each suite, executor and number of ranks, a column for each stage."""
    rows: dict[tuple[str, str, int], dict[int, list[Any]]] = {}
    for cell in cells():
        of_stage = rows.setdefault((cell.suite, cell.executor, cell.ranks), {stage: [] for stage in STAGES})
        of_stage[cell.stage].append(lines.get(str(cell)))
    text = ["| suite | executor | ranks | stage 0 | 1 | 2 | 3 |", "|---|---|---|---|---|---|---|"]
    for key, of_stage in rows.items():
        text.append(f"| {' | '.join(map(str, (*key, *(_cell(found) for found in of_stage.values()))))} |")
    ran = [line for line in lines.values() if line]
    versions = ", ".join(sorted({line["torch"] for line in ran}))
    off = max((line["off_gloo"] for line in ran if line.get("off_gloo") is not None), default=0.0)
    raced = sum(len(line.get("races", ())) for line in ran)
    text += [
        "",
        f"{len(ran)} of {len(cells())} cells were run, with torch {versions}; {raced} races were seen. A cell says how "
        "many of its cases were equal and, in parentheses, the largest relative difference of a loss from the suite's "
        "reference (at most 1e-5 is equal). From gloo's spelling losses of the suite *stages* differ by at most "
        f"{off:.0e}. The cases of FSDP2 compare losses, gradients and weights by themselves and raise.",
    ]
    return "\n".join(text) + "\n"


def _cell(found: list[Any]) -> str:
    ran = [line for line in found if line]
    if not ran:
        return "not run"
    equal = sum(line["verdict"] == "equal" for line in ran)
    off = max((line["off"] for line in ran if line.get("off")), default=0.0)
    left = f", {len(found) - len(ran)} not run" if len(ran) < len(found) else ""
    return f"{equal} of {len(ran)} equal{left}{f' ({off:.0e})' if off else ''}"


def write_page(lines: dict[str, Any]) -> None:
    """Put the table into the page, between its marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(lines)}\n{END}{rest.partition(END)[2]}")
