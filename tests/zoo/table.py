"""What was measured of the zoo, kept from run to run, and the page that shows it.

``measured.json`` has a line for each cell that was run, a model in one stage with one executor, and one for the bytes
of each model's step. A run of a part of the table replaces that part's lines and no others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.pairwise import EXECUTORS, STAGES
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.run import SCHEMES

FOLDER = Path(__file__).parent
MEASURED, PAGE = FOLDER / "measured.json", FOLDER.parents[1] / "docs" / "zoo.md"
Line = dict[str, Any]

HEAD = """# Models that train

`make zoo` wrote this page. Every model is what transformers ships, small and with random weights. `lstm` and `unet` are
plain PyTorch. Each trains for three steps of SGD with momentum on two ranks, and in one process that never heard of
zerofx. `make zoo ARGS="--models lstm vit --stages 0 --executors eager"` runs a part of the table and keeps the rest.

## Every stage, both executors

* *equal*: every loss is within 1e-5 of the single process's, and every weight within 1e-4 at the end, both relative.
* *not run*: nothing is known of it here.
* Anything else is what went wrong.

{chaotic} are compared in 64 bits, because rounding errors grow in them.

"""

MESHES_HEAD = """
## On a mesh of two dimensions

Four ranks as 2 x 2, stage 3, the eager executor, against one process ([meshes](meshes.md)).
`make zoo ARGS="--meshes --models gpt2"` runs a model in every scheme.

"""

BYTES_HEAD = """
## A step of stage 3

The eager executor ran these.

* *Graphs*: how many Dynamo made of the model. With 1 the model is captured whole.
* *Gathered on demand*: the places outside of any graph that use a weight. They are right but slow, and each warns once.
* *Peak*: the most bytes that a step has allocated, counted at the allocator.
* *Off*: how far from it `zerofx.predict(model, probe=True)` is.
* *Received*: bytes from the other rank in a step, counted at the process group.
* *Said*: what was predicted for that.

What is computed outside of graphs is not predicted: the loss of `wav2vec2` and `hubert`, and all of `lstm`.

| model | parameters | graphs | gathered on demand | peak | off | received | said |
|---|---|---|---|---|---|---|---|
"""


def cell(model: str, stage: int, executor: str) -> str:
    """The name of a cell in ``measured.json``."""
    return f"{model}, stage {stage}, {executor}"


def mesh_cell(model: str, scheme: str) -> str:
    """The same, of a model on a mesh."""
    return f"{model}, 2 x 2, {scheme}"


def read() -> dict[str, Line]:
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def write(lines: dict[str, Line]) -> None:
    """Line by line, so that a change of one cell is a change of one line."""
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(lines[name])}" for name in sorted(lines))
    MEASURED.write_text("{\n" + text + "\n}\n")


def page(lines: dict[str, Line]) -> str:
    """docs/zoo.md of what was measured."""
    columns = [(executor, stage) for executor in EXECUTORS for stage in STAGES]
    titles = [f"{executor}, stage {stage}" if stage == STAGES[0] else str(stage) for executor, stage in columns]
    met = {key.partition(", ")[0] for key in lines}
    shown = [name for name in ARCHITECTURES if name in met or ARCHITECTURES[name].needs == "transformers"]
    families = list(dict.fromkeys(ARCHITECTURES[name].family for name in shown))
    shown.sort(key=lambda name: families.index(ARCHITECTURES[name].family))
    rows = [
        row(name, ARCHITECTURES[name].family, *(verdict(lines, name, stage, executor) for executor, stage in columns))
        for name in shown
    ]
    table = "\n".join([row("model", "family", *titles), "|---" * (2 + len(columns)) + "|", *rows])
    steps = [steps_row(name, lines[f"{name}, a step"]) for name in shown if f"{name}, a step" in lines]
    chaotic = [f"`{name}`" for name in shown if ARCHITECTURES[name].chaotic]
    head = HEAD.format(chaotic=" and ".join(chaotic))
    return f"{head}{table}\n\n{summary(lines, shown)}\n{meshes(lines, shown)}{BYTES_HEAD}" + "\n".join(steps) + "\n"


def meshes(lines: dict[str, Line], shown: list[str]) -> str:
    """The models that were run on a mesh; nothing where none was."""
    found = [(name, [lines.get(mesh_cell(name, scheme), {}) for scheme in SCHEMES]) for name in shown]
    rows = [row(name, *(line.get("verdict", "not run") for line in cells)) for name, cells in found if any(cells)]
    if not rows:
        return ""
    return MESHES_HEAD + "\n".join([row("model", *SCHEMES), "|---" * (1 + len(SCHEMES)) + "|", *rows]) + "\n"


def verdict(lines: dict[str, Line], model: str, stage: int, executor: str) -> str:
    return lines.get(cell(model, stage, executor), {}).get("verdict", "not run")


def summary(lines: dict[str, Line], shown: list[str]) -> str:
    """How many cells are equal, what was left out, and what it ran with."""
    cells = [lines.get(cell(m, s, e)) for m in shown for s in STAGES for e in EXECUTORS]
    ran = [line for line in cells if line is not None]
    equal = sum(line["verdict"] == "equal" for line in ran)
    away = [f"`{name}`" for name in ARCHITECTURES if name not in shown]
    needs = {architecture.needs for name, architecture in ARCHITECTURES.items() if name not in shown}
    text = f"{equal} of the {len(ran)} cells that were run are equal; {len(cells) - len(ran)} were not run."
    with_what = sorted({f"torch {line['torch']} and transformers {line['transformers']}" for line in ran})
    text += (
        f" They ran with {', or '.join(with_what)}, and took {sum(line['seconds'] for line in ran) / 60:.0f} minutes."
    )
    if away:
        text += f" Left out, as {' and '.join(sorted(needs))} was not installed: {', '.join(away)}."
    return text


def steps_row(name: str, line: Line) -> str:
    off = said = ""
    if line["predicted_peak"] is not None:
        off = f"{line['predicted_peak'] / line['peak'] - 1:+.2%}"
        said = "exactly" if line["wire"] == line["predicted_wire"] else f"{line['predicted_wire']:,}"
    places = ", ".join(f"`{place}`" for place in line["places"])
    figures = (f"{line[key]:,}" for key in ("parameters", "graphs"))
    return row(name, *figures, places, f"{line['peak']:,}", off, f"{line['wire']:,}", said)


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def reason(error: str) -> str:
    """Of what the ranks' tracebacks say, the last error's name and the beginning of its message."""
    lines = [line.strip() for line in error.splitlines()]
    errors = [line for line in lines if is_error(line)] or [line for line in lines if "no answer" in line] or lines[:1]
    text = errors[-1].replace("|", "/")
    return text if len(text) <= 100 else text[:97] + "..."


def is_error(line: str) -> bool:
    name = line.partition(":")[0]
    return " " not in name and name.endswith(("Error", "Failed", "Unsupported", "Exception"))
