"""The tables of docs/cuda-dry.md, between its two marks, of what `tests.cuda_dry` has found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    always = sorted({name for row in written for name in _spill(row, all)})
    sometimes = sum(len(_spill(row, any)) - len(_spill(row, all)) for row in written)
    failed = [f"{code['kernel']}: {code['error']}" for code in compiled if code["error"]]
    unknown = {name for row in written for phase in row["phases"].values() for name in phase["unknown"]}
    kernels = sum(row["kernels"] for row in written)
    return [
        f"torch {found['torch']}, triton {found['triton']}, {found['world_size']} ranks: {len(written)} of {len(rows)} "
        f"cells written and read, {kernels} kernels compiled in {len(compiled)} configurations.",
        "",
        f"- Kernels that spill in every configuration: {', '.join(f'`{name}`' for name in always) or 'none'}.",
        f"- Kernels that do in one, and not in others, which Inductor takes then: {sometimes or 'none'}. "
        "Their names are in [cuda_dry.json](../benchmarks/results/cuda_dry.json).",
        f"- Kernels that were not compiled: {'; '.join(failed) or 'none'}.",
        f"- Calls that the reader does not know: {', '.join(f'`{name}`' for name in sorted(unknown)) or 'none'}.",
    ]


def _spill(row: dict[str, Any], how_many: Callable[[Iterable[bool]], bool]) -> list[str]:
    """The kernels of which all configurations spill, or any of them does."""
    spills: dict[tuple[str, str], list[bool]] = {}
    for code in row["compiled"]:
        spills.setdefault((code["phase"], code["kernel"]), []).append(code["spilled"] > 0)
    return [name for (_, name), each in spills.items() if how_many(each)]


def _models(found: dict[str, Any]) -> list[str]:
    lines = [
        "| model | stage | precision | for | Triton kernels | compiled | configurations | of which spill "
        "| products and the like | collectives | with compute before the wait |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"].values():
        begin = f"| {row['model']} | {row['stage']} | {row['precision']} | {row['architecture']} |"
        if "error" in row:
            lines.append(f"{begin} not written: {row['error'].splitlines()[0][:200]} | | | | | | |")
            continue
        phases, compiled = row["phases"].values(), row["compiled"]
        there = len({(code["phase"], code["kernel"]) for code in compiled if not code["error"]})
        lines.append(
            f"{begin} {row['kernels']} | {there} | {len(compiled)} | {sum(code['spilled'] > 0 for code in compiled)} "
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
