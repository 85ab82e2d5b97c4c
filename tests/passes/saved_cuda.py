"""CUDA code that Inductor wrote, saved with what its graph asks for: to be read where no CUDA code can be written.

``python -m tests.passes.saved_cuda`` writes the files anew, with PyTorch's CUDA build and no GPU. A promise is saved as
plain data. What it says of nodes is their names, kinds and groups.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from tests.passes.generated import Generated
from zerofx.passes.context import Tag
from zerofx.passes.proof.code import Promise
from zerofx.passes.proof.code.promise import Start, Weights

FOLDER = Path(__file__).parent / "cuda"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"stage": 3, "mixed_precision": True}),
    ("experts", {"stage": 3}),
    ("experts", {"stage": 2, "steps": True}),
]
"""Models of `tests.passes.generated`, and options."""


def saved() -> list[Generated]:
    """Every file."""
    found = []
    for file in sorted(FOLDER.glob("*.json")):
        data = json.loads(file.read_text())
        promise = _promise(data["promise"])
        found.append(Generated(f"{data['name']}, CUDA", None, None, promise, "\n".join(data["code"])))  # type: ignore[arg-type]
    return found


# ---- plain data -----------------------------------------------------------------------------------------------------


def _node(node: Node) -> list[str]:
    tag = node.meta.get("zerofx")
    return [node.name, tag.kind if tag else "", tag.group if tag else ""]


def _data(promise: Promise) -> dict[str, Any]:
    starts = [{**vars(start), "node": _node(start.node), "inputs": sorted(start.inputs)} for start in promise.starts]
    weights = [[place, _node(w.node), w.group, sorted(w.asked.items())] for place, w in promise.weights.items()]
    return {
        "inputs": [_node(node) for node in promise.inputs],
        "starts": starts,
        "arriving": sorted(promise.arriving.items()),
        "weights": weights,
        "homes": promise.homes,
        "steps": promise.steps,
        "outputs": [[i, sorted(ks)] for i, ks in promise.outputs.items()],
        "updates": [[group, sorted(ks)] for group, ks in promise.updates.items()],
        "saved": sorted(promise.saved.items()),
        "rereads": promise.rereads,
    }


def _promise(data: dict[str, Any]) -> Promise:
    graph = Graph()
    nodes: dict[str, Node] = {}

    def node(facts: list[str], is_input: bool = False) -> Node:
        name, kind, group = facts
        if name not in nodes:
            op, target = ("placeholder", name) if is_input else ("call_function", torch.relu)
            nodes[name] = graph.create_node(op, target, name=name)
            if kind:
                nodes[name].meta["zerofx"] = Tag(kind, group)
        return nodes[name]

    inputs = [node(facts, is_input=True) for facts in data["inputs"]]
    starts = [Start(**{**s, "node": node(s["node"]), "inputs": set(s["inputs"])}) for s in data["starts"]]
    weights = {
        tuple(p): Weights(node(facts), group, Counter(dict(asked))) for p, facts, group, asked in data["weights"]
    }
    return Promise(
        inputs,
        starts,
        Counter(dict(data["arriving"])),
        weights,  # type: ignore[arg-type]
        data["homes"],
        data["steps"],
        {i: set(ks) for i, ks in data["outputs"]},
        {group: set(ks) for group, ks in data["updates"]},
        dict(data["saved"]),
        data["rereads"],
    )


# ---- writing --------------------------------------------------------------------------------------------------------


def _plain(code: str) -> list[str]:
    """Without comments, blank lines, and what would time it."""
    lines = code.partition("\nrunner = Runner")[0].splitlines()
    return [line for line in lines if line.strip() and not re.match(r"\s*#", line)]


def write() -> None:
    """Write every case's forward and backward to a file each."""
    import zerofx
    from tests.passes.generated import MODELS
    from tests.passes.mutants import rewritten
    from zerofx import _torch

    FOLDER.mkdir(exist_ok=True)
    for model, options in CASES:
        torch._dynamo.reset()
        torch.manual_seed(0)
        build, draw = MODELS[model]
        mixed = zerofx.MixedPrecision(torch.bfloat16, torch.float32) if options.get("mixed_precision") else None
        stage, steps = options["stage"], options.get("steps", False)
        common: dict[str, Any] = {"device": "cuda", "backend": "nccl", "world_size": 4, "stage": stage}
        groups = zerofx.Grouping(min_bytes=0)
        record = zerofx.dry_run(build(), *draw(), **common, mixed_precision=mixed, groups=groups)
        with _torch.pretended_cuda("sm_90"):
            for phase, (gm, ctx) in rewritten(record, steps=steps).items():
                promise = Promise.of(gm, ctx)
                fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
                with _torch.fake_mode_of(fakes):
                    code = _torch.write_code(gm, fakes, is_backward=phase == "backward")
                name = f"{model}, stage {stage}{', updated' * steps}, {phase}"
                data = {"name": name, "torch": torch.__version__, "promise": _data(promise), "code": _plain(code)}
                file = FOLDER / f"{re.sub(r'[^a-z0-9]+', '_', name)}.json"
                file.write_text(json.dumps(data, indent=0) + "\n")
                print(file.name, flush=True)


if __name__ == "__main__":
    write()
