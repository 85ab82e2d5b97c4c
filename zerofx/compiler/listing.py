"""Graphs node by node, as text: a line per node, what a pass changed, a file of Python that runs.

A line has the node's name, its shape, the call, and as a comment what zerofx put it there for::

    wait_tensor_default_1: f32[50176] = wait_tensor(all_gather_into_tensor_default_1)     # wait blocks.0

A difference is marked before the line::

    + is new    - is gone    > was moved here    < was moved from here    ~ other arguments (as it was: -)
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx._torch import OpOverload

LONGEST_CONSTANT = 1000
"""Elements of a tensor that is a constant of a graph, and is written out in its Python code."""


def graph_lines(graph: Graph) -> list[str]:
    """A line for each node of ``graph``, in order."""
    return [node_line(node) for node in graph.nodes]


def node_line(node: Node) -> str:
    """``node`` as ``name: shape = operator(arguments)  # kind group``."""
    tag = node.meta.get("zerofx")
    note = f"  # {tag.kind} {tag.group}".rstrip() if tag is not None else ""
    name = f"{node.name}{_shape(node.meta.get('val'))}"
    if node.op == "placeholder":
        return f"{name} = input{note}"
    arguments = ", ".join([_argument(x) for x in node.args] + [f"{k}={_argument(x)}" for k, x in node.kwargs.items()])
    if node.op == "output":
        return f"return {arguments}"
    target = node.target if isinstance(node.target, str) else operator_name(node)
    return f"{name} = {target}({arguments}){note}"


def operator_name(node: Node) -> str:
    """``mm`` for ``torch.ops.aten.mm.default``."""
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", str(node.target))


def _argument(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        inside = ", ".join(map(_argument, x))
        return f"[{inside}]" if isinstance(x, list) else f"({inside})"
    return repr(x) if isinstance(x, str) else str(x)


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "b8"}


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = str(value.dtype).removeprefix("torch.")
    letters = dtype.rstrip("0123456789")
    return f": {_SHORT.get(letters, letters)}{dtype[len(letters) :]}[{', '.join(map(str, value.shape))}]"


def difference(before: Graph, after: Graph, context: int = 1) -> list[str]:
    """What is different in ``after``, with ``context`` equal lines around each change; linear if little is.

    Returns:
        Marked lines (see the module's docstring), runs of equal ones as "  ...". Empty if nothing is different.
    """
    old, new = graph_lines(before), graph_lines(after)
    hunks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    gone = {line for verb, i, j, _, _ in hunks if verb != "equal" for line in old[i:j]}
    made = {line for verb, _, _, i, j in hunks if verb != "equal" for line in new[i:j]}
    moved, names = gone & made, {_name(line) for line in gone - made}
    lines: list[str] = []
    for k, (verb, i, j, start, end) in enumerate(hunks):
        if verb == "equal":
            head = old[i : i + context] if k else []
            tail = old[max(j - context, i + len(head)) : j] if k < len(hunks) - 1 else []
            skipped = j - i - len(head) - len(tail)
            lines += [f"  {line}" for line in head] + ["  ..."] * bool(skipped) + [f"  {line}" for line in tail]
            continue
        lines += [f"{'<' if line in moved else '-'} {line}" for line in old[i:j]]
        lines += [f"{'>' if line in moved else '~' if _name(line) in names else '+'} {line}" for line in new[start:end]]
    return lines if gone or made else []


def _name(line: str) -> str:
    return line.partition(" = ")[0].partition(":")[0].partition(" ")[0]


def python_of(gm: GraphModule, name: str) -> tuple[dict[str, str], str]:
    """``gm`` as a function ``name``: the imports that it needs (name -> statement), and its source.

    Raises:
        RuntimeError: the graph holds a constant that is no text: a module, or a tensor of many elements.
    """
    with torch.no_grad():
        constants = [f"_{name}.{target} = {_constant(gm, target)}\n" for target in _constants(gm.graph)]
    code = gm.graph.python_code(f"_{name}")
    imports = {alias: _import(alias, thing) for alias, thing in code.globals.items()}
    signature, _, body = code.src.strip().partition("\n")
    signature = signature.replace("def forward(self, ", f"def {name}(").replace("def forward(self)", f"def {name}()")
    inputs = "".join(f"    # {node_line(node)}\n" for node in gm.graph.find_nodes(op="placeholder"))
    if constants:
        imports["types"] = "import types"
        constants.insert(0, f"_{name} = types.SimpleNamespace()\n")
    return imports, f"{''.join(constants)}{signature}\n{inputs}{body}\n"


def _constants(graph: Graph) -> Iterator[str]:
    yield from dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr"))


def _constant(gm: GraphModule, target: str) -> str:
    value = getattr(gm, target, None)
    if not isinstance(value, torch.Tensor) or value.numel() > LONGEST_CONSTANT:
        what = f"a tensor of {value.numel()} elements" if isinstance(value, torch.Tensor) else type(value).__name__
        raise RuntimeError(
            f"the graph holds the constant {target!r}, {what}: that is not written as text. Take the graph itself, "
            "record.forward.final."
        )
    return f"torch.tensor({value.tolist()!r}, dtype={value.dtype}, device={str(value.device)!r})"


def _import(alias: str, thing: Any) -> str:
    if isinstance(thing, types.ModuleType):
        return f"import {thing.__name__}" if alias == thing.__name__ else f"import {thing.__name__} as {alias}"
    if isinstance(thing, float):  # inf and nan
        return f'{alias} = float("{thing}")'
    if thing is type(None):
        return f"{alias} = type(None)"
    name = thing.__qualname__
    return f"from {thing.__module__} import {name}" + ("" if alias == name else f" as {alias}")
