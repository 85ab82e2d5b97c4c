"""The refusals of zerofx: every `raise` with a message, as text, and the tests' texts that name a piece of it."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GAP = "…"
"""In a message, for what is filled in."""

INTERNAL = {
    "NotImplementedError": "a base class's method",
    "AssertionError": "cannot happen",
    "_Mismatch": "caught by its caller",
    "SkipFrame": "Dynamo's, which catches it",
    "BypassAOTAutogradCache": "AOTAutograd's, which catches it",
    "CacheMiss": "caught by AOTAutograd, which compiles",
}
"""Errors that no user meets."""


@dataclass(frozen=True)
class Refusal:
    """One `raise`.

    Attributes:
        place: file and line.
        error: the class.
        message: with `GAP` for what is filled in.
    """

    place: str
    error: str
    message: str

    def __str__(self) -> str:
        """File and message: where, without the line, which changes with what is above it."""
        return f"{self.place.partition(':')[0]}: {self.message}"

    @property
    def fragments(self) -> list[str]:
        """What of the message is always the same."""
        return [part for part in self.message.split(GAP) if part.strip()]


def text_of(node: ast.AST | None, names: dict[str, ast.AST]) -> str:
    """A message as text: what is filled in is a gap; a local name stands for what it was given."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text_of(v, names) for v in values)
        case ast.FormattedValue(value=ast.Name(id=name)) if isinstance(names.get(name), (ast.Constant, ast.JoinedStr)):
            return text_of(names.pop(name), names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left, names) + text_of(right, names)
        case ast.Name(id=name) if name in names:
            return text_of(names.pop(name), names)
        case ast.Call(func=ast.Attribute(value=inner, attr="format")):
            return re.sub(r"\{[^}]*\}", GAP, text_of(inner, names))
    return GAP


def refusals() -> Iterator[Refusal]:
    """Every `raise` of a new error in zerofx/, passes/ and kernels/."""
    for top in ("zerofx", "passes", "kernels"):
        for folder, _, files in os.walk(ROOT / top):  # does not follow the symlinks below zerofx/
            for path in (Path(folder, file) for file in sorted(files) if file.endswith(".py")):
                yield from _of_file(path)


def _of_file(path: Path) -> Iterator[Refusal]:
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.Lambda)):
            continue
        names = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                error = ast.unparse(node.exc.func).rpartition(".")[2]
                message = text_of(node.exc.args[0], dict(names)) if node.exc.args else ""
                yield Refusal(f"{path.relative_to(ROOT)}:{node.lineno}", error, re.sub(f"({GAP})+", GAP, message))


_FILLED_IN = re.compile(r"\.[*+]|\(\?\w?\)|\||\n|\\[wdSs][+*]?|…")
_CUT = re.compile(r"\.[*+]|\(\?\w?\)|\||\n|\\[wdSs][+*]?|…|[()\[\]]|'[^']*'|\d+|\{\w*\}")
"""Between what a test's text says of a message: what regular expressions fill in, and values."""


def test_pieces() -> set[str]:
    """What tests look for in messages, cut into pieces without anything special to regular expressions."""
    pieces: set[str] = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 400:
                text = re.sub(r"\\([^\w])", r"\1", node.value)
                pieces.update(piece.strip() for cut in (_CUT, _FILLED_IN) for piece in cut.split(text))
    return {piece for piece in pieces if len(piece) >= 8}


def named(refusal: Refusal, pieces: set[str]) -> bool:
    """Whether a test names a piece of the message."""
    words = [fragment.strip(" .:;,(") for fragment in refusal.fragments]
    if any(len(fragment) >= 12 and fragment in piece for fragment in words for piece in pieces):
        return True
    return any(piece in fragment for fragment in refusal.fragments for piece in pieces)
