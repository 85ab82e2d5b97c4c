"""An SVG that is legible on a light page and on a dark one.

Each picture has a ground of its own. Colours are CSS variables with two sets of values; the browser takes the set of
the theme (``prefers-color-scheme``). So one file does for both, in GitHub's pages and in ours.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent

# name: (light, dark). "1" to "5" are hues for data, told apart by lightness too.
COLOURS = {
    "ground": ("#ffffff", "#1c1f26"),
    "frame": ("#d0d4dc", "#3a404c"),
    "ink": ("#1f2430", "#e4e7ee"),
    "faint": ("#6b7280", "#9aa3b2"),
    "empty": ("#eef0f4", "#2a2f39"),
    "1": ("#2563c9", "#6ea4f7"),
    "2": ("#d9762b", "#f0a35e"),
    "3": ("#2e8b57", "#63c08c"),
    "4": ("#8e5bb5", "#c39be0"),
    "5": ("#8a8f99", "#7d8594"),
}
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def style() -> str:
    """The style sheet of a picture: the colours, twice, and its two fonts."""
    sets = [" ".join(f"--c{name}: {pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1)]
    return (
        f"<style>:root {{ {sets[0]} }} @media (prefers-color-scheme: dark) {{ :root {{ {sets[1]} }} }}"
        f" text {{ font: 14px {SANS}; fill: var(--cink); }} .mono {{ font-family: {MONO}; }}</style>"
    )


class Drawing:
    """Shapes and words, written as one SVG of ``width`` by ``height``."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            style(),
        ]
        self.box(0.5, 0.5, width - 1, height - 1, "ground", edge="frame", radius=8)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "", radius: float = 0
    ) -> None:
        line = f' stroke="var(--c{edge})"' if edge else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
            f' fill="var(--c{fill})"{line}/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = "frame", width: float = 1) -> None:
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.parts.append(f'<line {ends} stroke="var(--c{colour})" stroke-width="{width:g}"/>')

    def words(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = "ink",
        size: int = 14,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        css = f"font-size: {size}px; fill: var(--c{colour})" + ("; font-weight: 600" if bold else "")
        kind = ' class="mono"' if mono else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind} xml:space="preserve" style="{css}">'
            f"{escape(text)}</text>"
        )

    def arrow(self, x: float, y: float, down: bool, colour: str) -> None:
        """A small triangle at the middle of its base: something comes in (down) or goes out."""
        tip = y + 7 if down else y - 7
        self.parts.append(f'<path d="M{x - 5:g} {y:g} H{x + 5:g} L{x:g} {tip:g} Z" fill="var(--c{colour})"/>')

    def save(self, name: str) -> Path:
        path = HERE / name
        path.write_text("\n".join([*self.parts, "</svg>", ""]))
        return path
