"""The report: JSON for programs, a page of Markdown for people."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import Line

Found = dict[str, list[Line]]
"""Kind -> its lines."""

_MARKS = {"as expected": "yes", "otherwise": "**no**", "failed": "**failed**", "not run": "not run", "told": ""}


def write(path: Path, found: Found, facts: dict[str, Any]) -> tuple[Path, Path]:
    """``path`` without its suffix; returns the paths of the JSON and of the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"kind": kind, **asdict(line)} for kind, several in found.items() for line in several]
    as_json, as_page = path.with_suffix(".json"), path.with_suffix(".md")
    as_json.write_text(json.dumps({**facts, "counts": counts(found), "lines": lines}, indent=1) + "\n")
    as_page.write_text(page(found, facts))
    return as_json, as_page


def counts(found: Found) -> dict[str, int]:
    """How many lines have which verdict."""
    return dict(Counter(line.verdict for several in found.values() for line in several))


def page(found: Found, facts: dict[str, Any]) -> str:
    said = ", ".join(f"{n} {verdict}" for verdict, n in counts(found).items())
    parts = [f"# zerofx on {facts['device']}\n", f"`{facts['command']}`, {facts['date']}: {said}.\n"]
    for kind, several in found.items():
        parts.append(f"## {kind.replace('_', ' ')}\n\n| line | expected | found | as expected |\n|---|---|---|---|")
        parts += [
            f"| {_cell(x.name)} | {_cell(x.expected)} | {_cell(x.found)} | {_MARKS[x.verdict]} |" for x in several
        ]
        parts.append("")
    broken = [line for several in found.values() for line in several if line.verdict == "failed" and line.detail]
    if broken:
        parts.append("## What failed\n")
    for line in broken:
        parts.append(f"### {line.name}\n\n```\n{line.detail.strip()}\n```\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
