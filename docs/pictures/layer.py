"""The picture of one layer's graph, before and after: ``layer.svg``.

The lines are read from real graphs, those of a `zerofx.dry_run`. Views and transposes are left out, and nodes get short
names; `NAMES` has them.
"""

from __future__ import annotations

import torch
from drawing import Drawing
from torch import fx, nn

import zerofx


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 512) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


LAYER = "layers.1"
# Of the kinds of `node.meta["zerofx"].kind`, for the layer that is drawn.
KINDS = {"all_gather": "gather", "wait": "full", "reduce_scatter": "sums", "wait_grad": "total", "gradient": "grad"}
# Of the nodes that AOTAutograd made: the name in the graph, and what it is to the second layer.
GIVEN = {"primals_4": "w", "primals_5": "b", "relu": "x", "t_1": "w.T", "detach_1": "h", "mm_2": "dh"}
FORWARD = {"addmm_1": "y", "relu_1": "h"}
BACKWARD = {"threshold_backward_2": "dy", "mm_4": "dx", "mm_5": "dw", "sum_3": "db"}
SEEN_THROUGH = ("t", "reshape", "view", "detach")
COLOUR = {"all_gather": "1", "wait": "1", "weight": "4", "discard": "2", "pack": "3", "reduce_scatter": "3"}
COLOUR |= {"wait_grad": "3", "gradient": "3"}
NOTES = {
    ("all_gather", True): "its weights start to travel",
    ("all_gather", False): "the layer after the next",
    ("", False): "other layers compute",
    ("wait", True): "the weights are here",
    ("weight", True): "a view, no copy",
    ("discard", True): "memory is given back",
    ("pack", True): "one flat buffer",
    ("reduce_scatter", True): "starts to travel",
    ("gradient", True): "this rank's half of the average",
}


class Lines:
    """The lines of a graph that belong to `LAYER`, with the kind of each."""

    def __init__(self, gm: fx.GraphModule, names: dict[str, str]) -> None:
        self.names = {node: names[node.name] for node in gm.graph.nodes if node.name in names}
        self.given = {
            node: GIVEN[node.name]
            for node in gm.graph.nodes
            if node.name in GIVEN and (node.op == "placeholder" or node.name in ("relu", "mm_2"))
        }
        self.rows: list[tuple[str, str, bool]] = []
        views, gap = iter("wb"), False
        for node in gm.graph.nodes:
            info = node.meta.get("zerofx")
            kind, mine = (info.kind, info.group == LAYER) if info is not None else ("", node in self.names)
            if mine and kind == "weight":
                self.names[node] = next(views)
            elif mine and kind in KINDS:
                self.names[node] = KINDS[kind]
            elif mine and kind == "pack" and _op(node) == "cat":
                self.names[node] = "pack"
            elif kind == "all_gather" and info.group == "layers.3":
                self.names[node], mine = "gather3", False
            if (node in self.names and node.op != "placeholder") or (mine and kind == "discard"):
                if self.rows and gap:
                    self.rows.append(("...", "", False))
                gap = False
                self.rows.append((self.text(node), kind, info is None or info.group == LAYER))
            elif info is None and node.op == "call_function":
                gap |= _op(node) not in SEEN_THROUGH

    def of(self, argument: object) -> str:
        """An argument, seen through views and transposes."""
        turned, known = False, self.names | self.given
        while isinstance(argument, fx.Node) and argument not in known and argument.all_input_nodes:
            if _op(argument) not in SEEN_THROUGH:
                break
            turned ^= _op(argument) == "t"
            argument = argument.all_input_nodes[0]
        if isinstance(argument, fx.Node):
            name = known.get(argument, argument.name)
            name = "zeros" if name.startswith("full_default") else "shard" if name.startswith("shard_") else name
            return f"{name}.T".removesuffix(".T.T") if turned else name
        return str(argument)

    def text(self, node: fx.Node) -> str:
        name, op, args = self.names.get(node, ""), _op(node), node.args
        if op == "as_strided":
            shape = "×".join(map(str, args[1]))
            return f"{name} = view({self.of(args[0])}, {shape}, at {args[3]:,})"
        if op == "cat":
            return f"{name} = cat([{', '.join(map(self.of, args[0]))}])"
        if op in ("discard", "release"):
            return f"discard({self.of(args[0])})"
        of = "3" if name == "gather3" else ""
        kept = [self.of(a) + of for a in args if isinstance(a, fx.Node)]
        if op == "mul":
            return f"{name} = {kept[0]} * {args[1]}"
        return f"{name} = {op}({', '.join(kept)})"


def _op(node: fx.Node) -> str:
    name = str(node.target).split(".")[-2] if hasattr(node.target, "overloadpacket") else node.name
    name = name.removesuffix("_into_tensor").removesuffix("_tensor")
    return name.split("_")[0] if name.startswith(("discard", "release")) else name


def draw() -> None:
    with torch.device("meta"):
        model, x = Net(), torch.zeros(8, 512, requires_grad=True)
    record = zerofx.dry_run(model, x, world_size=2, backend="nccl", executor="eager")
    assert record.forward is not None and record.backward is not None
    panels = [
        ("Forward of a layer, as AOTAutograd made it", Lines(record.forward.before, FORWARD)),
        ("The same, as zerofx runs it in stage 3", Lines(record.forward.after("verify"), FORWARD)),
        ("Backward of the layer, as AOTAutograd made it", Lines(record.backward.before, FORWARD | BACKWARD)),
        ("The same, as zerofx runs it in stage 3", Lines(record.backward.after("verify"), FORWARD | BACKWARD)),
    ]
    step, head = 21, 46
    height = 16 + sum(head + step * len(lines.rows) for _, lines in panels)
    drawing = Drawing(640, height, "One layer's graph before and after zerofx: collectives stand between its operators")
    y = 8.0
    for title, lines in panels:
        y += head - 16
        drawing.words(20, y, title, bold=True)
        y += 24
        for text, kind, mine in lines.rows:
            colour = COLOUR.get(kind, "ink")
            if kind:
                drawing.box(20, y - 14, 4, 18, colour)
            drawing.words(34, y, text, colour, mono=True)
            drawing.words(620, y, NOTES.get((kind, mine), ""), "faint", size=13, anchor="end")
            y += step
        y -= 8
    drawing.save("layer.svg")


if __name__ == "__main__":
    draw()
