"""A picture per stage: what rank 0 of two holds in a step of four layers, and when. ``stage-0.svg`` to ``stage-3.svg``.

When a buffer comes and goes is read off the listing of a real record (`zerofx.dry_run`). Of stage 1 the picture is that
of accumulation under `zerofx.no_sync`, since its graphs are those of stage 2 otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from drawing import Drawing
from torch import nn

import zerofx

LAYERS = 4
WIDTH, ROW, LEFT = 56, 17, 128
NONE, SHARE, COMING, WHOLE = range(4)  # of a buffer: nothing, this rank's half, whole soon or no more, whole


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 512) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).relu()
        x = self.layers[1](x).relu()
        x = self.layers[2](x).relu()
        return self.layers[3](x).relu()


@dataclass
class Column:
    """A stretch of time in which one layer computes."""

    name: str
    weights: list[int]
    gradients: list[int]
    starts: list[tuple[bool, int]] = field(default_factory=list)  # on the link: a gather (True) or a reduction


def columns(stage: int) -> list[Column]:
    """The step of ``stage``, column by column."""
    with torch.device("meta"):
        model, x = Net(), torch.zeros(8, 512, requires_grad=True)
    record = zerofx.dry_run(model, x, world_size=2, backend="gloo", executor="eager", stage=stage)
    rest = SHARE if stage == 3 else WHOLE
    weights, gradients = [rest] * LAYERS, [NONE] * LAYERS
    made = [Column("at rest", list(weights), list(gradients))]
    waiting: list[tuple[bool, int]] = []
    if stage in (1, 2):  # all refreshes start in front of forward
        weights, waiting = [COMING] * LAYERS, [(True, i) for i in range(LAYERS)]
    phase = ""
    for line in str(record).splitlines():
        event = re.match(r"  (\w+) +layers\.(\d)", line)
        computes = re.search(r"self\.layers\[(\d)\]", line)
        if found := re.match(r"(forward|backward):", line):
            phase = found[1]
        elif event:
            word, layer = event[1], int(event[2])
            if word == "start":
                weights[layer], waiting = COMING, [*waiting, (True, layer)]
            elif word in ("wait", "refresh"):
                weights[layer] = WHOLE
            elif word == "discard":
                weights[layer] = SHARE
            elif word == "reduce" and stage != 1:
                gradients[layer], waiting = COMING, [*waiting, (False, layer)]
            elif word == "reduced" and stage != 1:
                gradients[layer] = SHARE if stage else WHOLE
        elif computes:
            layer = int(computes[1])
            if phase == "backward":
                gradients[layer] = WHOLE
            name = f"{phase} {layer}"
            if made[-1].name != name:
                made.append(Column(name, list(weights), list(gradients)))
            made[-1].weights = [max(pair) for pair in zip(made[-1].weights, weights)]
            made[-1].gradients = [max(pair) for pair in zip(made[-1].gradients, gradients)]
            made[-1].starts += waiting
            waiting = []
    if stage == 1:
        made.append(Column("last backward", list(weights), [SHARE] * LAYERS, [(False, i) for i in range(LAYERS)]))
        waiting = []
    done = SHARE if stage else WHOLE
    made.append(Column("step", list(weights), [done] * LAYERS, waiting))
    return made


def draw(stage: int, title: str) -> None:
    made = columns(stage)
    height = 78 + ROW * (2 * LAYERS + 5) + 36
    drawing = Drawing(LEFT + WIDTH * len(made) + 16, height, f"Stage {stage}: {title}")
    drawing.words(16, 28, f"Stage {stage}: {title}", bold=True)
    top = 78
    for i, column in enumerate(made):
        words = column.name.replace("forward", "forw.").replace("backward", "back").split()
        x = LEFT + WIDTH * i + WIDTH / 2 - 3
        for j, word in enumerate(words):
            drawing.words(x, 54 + 14 * j, word, "faint", 12, "middle")
    share = WHOLE if stage == 0 else SHARE
    rows = [(f"weights {i}", "1", [c.weights[i] for c in made]) for i in range(LAYERS)]
    rows += [(f"gradients {i}", "3", [c.gradients[i] for c in made]) for i in range(LAYERS)]
    rows += [("moments, all", "2", [share] * len(made))]
    y = float(top)
    for label, hue, states in rows:
        if label in ("gradients 0", "moments, all"):
            y += ROW / 2
        drawing.words(16, y + 11, label, size=12)
        for i, state in enumerate(states):
            cell(drawing, LEFT + WIDTH * i, y, hue, state)
        y += ROW
    y += ROW / 2
    drawing.words(16, y + 11, "starts to travel", size=12)
    for i, column in enumerate(made):
        for j, (gather, layer) in enumerate(column.starts):
            x = LEFT + WIDTH * i + 3 + 13 * j
            drawing.arrow(x + 2, y + (2 if gather else 10), gather, "1" if gather else "3")
            drawing.words(x + 2, y + 24, str(layer), "faint", 10, "middle")
    y += ROW * 2 + 4
    legend(drawing, y)
    drawing.save(f"stage-{stage}.svg")


def cell(drawing: Drawing, x: float, y: float, hue: str, state: int) -> None:
    """A buffer: the left half is what rank 0 keeps, the right half what rank 1 does."""
    width, height = WIDTH - 6, ROW - 5
    drawing.box(x, y, width, height, "empty")
    if state:
        drawing.box(x, y, width / 2, height, hue)
    if state == WHOLE:
        drawing.box(x + width / 2, y, width / 2, height, hue)
    if state == COMING:
        for k in range(4):
            drawing.box(x + width / 2 + 2 + 6 * k, y, 2.5, height, hue)


def legend(drawing: Drawing, y: float) -> None:
    words = [(WHOLE, "whole"), (SHARE, "rank 0's half"), (COMING, "half travels"), (NONE, "not there")]
    for i, (state, said) in enumerate(words):
        x = 16 + 142 * i
        cell(drawing, x, y, "1", state)
        drawing.words(x + WIDTH, y + 11, said, "faint", size=12)


if __name__ == "__main__":
    draw(0, "nothing is divided")
    draw(1, "optimizer state is divided; gradients wait, whole, in no_sync")
    draw(2, "gradients are divided, too")
    draw(3, "weights are divided, too")
