"""``make zoo``: trains every architecture and writes docs/zoo.md."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from tests.workers import Processes, Workers
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.predicted import Figures, measure
from tests.zoo.run import Outcome, train

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
HEAD = f"""# Models that train

`make zoo` wrote this page. Every model is what transformers {transformers.__version__} ships, small and with random
weights (`lstm` and `unet` are plain PyTorch): three steps of SGD with momentum, stage 3, two ranks, against one
process, with torch {torch.__version__.partition("+")[0]}. A model works when every loss is
within 1e-5 of the single process's and every weight within 1e-4 at the end, both relative.

*Graphs*: how many Dynamo made of the model; 1 is a model that is captured whole. *Gathered on demand*: the places
outside of any graph that use a weight. They are right but slow, and each warns once. *Peak*: the most bytes that a step
has allocated, counted at the allocator; *off*: how far from it `zerofx.predict(model, probe=True)` is; *received*:
bytes from the other rank in a step, counted at the process group; *said*: what was predicted for that. What is computed
outside of graphs (the loss of `wav2vec2` and `hubert`, all of `lstm`) is not predicted. Losses and weights of
`mobilenet_v2` are compared in 64 bits: it makes much of a rounding error.

| model | family | parameters | works | graphs | gathered on demand | loss | weights | peak | off | received | said |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def main() -> int:
    chosen = sys.argv[1:] or [name for name, architecture in ARCHITECTURES.items() if architecture.is_here]
    processes, rows, failed = Processes(), [], 0
    for name in chosen:
        figures = None
        try:
            outcome = Workers(2, processes).run(train, name, 3, timeout=250)[0]
            figures = Workers(2, processes).run(measure, name, timeout=250)[0]
        except AssertionError as e:
            reason = next((line for line in reversed(str(e).splitlines()) if "Error" in line), "no answer")
            outcome, failed = None, failed + 1
            print(f"{name}: {e}", file=sys.stderr)
        rows.append(row(name, outcome, "" if outcome else reason) + cells(figures))
        print(rows[-1], flush=True)
    processes.stop()
    if not sys.argv[1:]:
        works = sum("| yes |" in r for r in rows)
        PAGE.write_text(HEAD + "\n".join(rows) + f"\n\n{works} of {len(rows)} work.\n")
    return failed > 0


def row(name: str, outcome: Outcome | None, reason: str) -> str:
    family = ARCHITECTURES[name].family
    if outcome is None:
        return f"| {name} | {family} | | no: {reason[:120].replace('|', '/')} | | | | |"
    works = "yes" if outcome.loss < 1e-5 and outcome.weights < 1e-4 else "no: other numbers"
    places = ", ".join(f"`{place}`" for place in outcome.places)
    return (
        f"| {name} | {family} | {outcome.parameters:,} | {works} | {outcome.graphs} | {places} | "
        f"{outcome.loss:.0e} | {outcome.weights:.0e} |"
    )


def cells(figures: Figures | None) -> str:
    if figures is None:
        return " | | | |"
    peak, received = "", ""
    if figures.predicted_peak is not None:
        peak = f"{figures.off:+.2%}"
        received = "exactly" if figures.wire == figures.predicted_wire else f"{figures.predicted_wire:,}"
    return f" {figures.peak:,} | {peak} | {figures.wire:,} | {received} |"


if __name__ == "__main__":
    sys.exit(main())
