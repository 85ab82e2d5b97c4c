"""The tables of docs/cuda-dry.md, between its two marks, of what `tests.cuda_dry` has found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "cuda-dry.md"
BEGIN, END = "<!-- tables: written by `make cuda-dry` -->\n", "<!-- end of tables -->\n"


def write_page(found: dict[str, Any]) -> None:
    """Put the tables of ``found`` into the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + tables(found) + "\n" + END + after)


def tables(found: dict[str, Any]) -> str:
    """Markdown."""
    return "\n".join(["\n".join(_head(found)), "", "\n".join(_models(found)), "", "\n".join(_adamw(found))]) + "\n"


def _head(found: dict[str, Any]) -> list[str]:
    rows = found["rows"].values()
    written = [row for row in rows if "error" not in row]
    compiled = [code for row in written for code in row["compiled"]]
    spilled = {(code["kernel"], code["warps"], code["spilled"]) for code in compiled if code["spilled"]}
    failed = [f"{code['kernel']}: {code['error']}" for code in compiled if code["error"]]
    unknown = {name for row in written for phase in row["phases"].values() for name in phase["unknown"]}
    kernels = sum(row["kernels"] for row in written)
    return [
        f"torch {found['torch']}, triton {found['triton']}, {found['world_size']} ranks: {len(written)} of {len(rows)} "
        f"cells written and read, {kernels} kernels compiled in {len(compiled)} configurations.",
        "",
        f"- Spills: {', '.join(f'`{k}` with {w} warps, {n} bytes' for k, w, n in sorted(spilled)) or 'none'}.",
        f"- Kernels that were not compiled: {'; '.join(failed) or 'none'}.",
        f"- Calls that the reader does not know: {', '.join(f'`{name}`' for name in sorted(unknown)) or 'none'}.",
    ]


def _models(found: dict[str, Any]) -> list[str]:
    lines = [
        "| model | stage | precision | for | Triton kernels, compiled | registers, most | spills "
        "| products and convolutions | collectives | ahead of compute |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"].values():
        begin = f"| {row['model']} | {row['stage']} | {row['precision']} | {row['architecture']} |"
        if "error" in row:
            lines.append(f"{begin} not written: {row['error'].splitlines()[0][:200]} | | | | | |")
            continue
        phases, compiled = row["phases"].values(), row["compiled"]
        there = len({(code["phase"], code["kernel"]) for code in compiled if not code["error"]})
        lines.append(
            f"{begin} {row['kernels']}, {there} | {max(code['registers'] for code in compiled)} "
            f"| {sum(code['spilled'] > 0 for code in compiled) or 'none'} "
            f"| {sum(p['extern'] + p['operators'] for p in phases)} "
            f"| {sum(p['collectives'] for p in phases)} | {sum(p['ahead'] for p in phases)} |"
        )
    return lines


def _adamw(found: dict[str, Any]) -> list[str]:
    """One line for each kernel and what it is of; a pair of columns for each architecture."""
    names = list(found["adamw"])
    lines = [
        f"| kernel of `zerofx.AdamW` | weights, gradients, moments, masters | {' | '.join(names)} |",
        "|" + "---|" * (2 + len(names)),
    ]
    cells: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for kernel in found["adamw"][name]:
            text = f"{kernel['registers']} registers" + (
                f", spills {kernel['spilled']} bytes" * bool(kernel["spilled"])
            )
            cells.setdefault((kernel["kernel"], kernel["of"]), []).append(text)
    return lines + [f"| `{kernel}` | {of} | {' | '.join(texts)} |" for (kernel, of), texts in cells.items()]
