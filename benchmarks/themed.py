"""Figures of matplotlib that are legible on a light page and on a dark one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docs.pictures.drawing import style

HUES = {
    "#ffffff": "ground",
    "#000000": "ink",
    "#cccccc": "frame",
    "#d3d3d3": "frame",
    "#1f77b4": "1",
    "#ff7f0e": "2",
    "#2ca02c": "3",
    "#9467bd": "4",
    "#8c564b": "5",
}
"""matplotlib's colours, by the names that ``docs/pictures/drawing.py`` has for its own. Its red is legible on both."""


def save(figure: Any, path: Path) -> None:
    """Save ``figure`` as SVG, its colours those of the page's theme."""
    figure.savefig(path, metadata={"Date": None})
    path.write_text(themed(path.read_text()))


def themed(text: str) -> str:
    """An SVG of matplotlib's, with a CSS variable for each of `HUES`. What has no colour, such as text, has ink's."""
    for found, name in HUES.items():
        text = re.sub(found, f"var(--c{name})", text, flags=re.I)
    sheet = style().replace("</style>", " svg { fill: var(--cink); }</style>")
    text = text.replace("<defs>", f"{sheet}\n <defs>", 1)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
