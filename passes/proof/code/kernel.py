"""A kernel that Inductor wrote, as text: which arguments it reads, which it writes, which it copies.

The wrapper has each kernel as a string. Nothing is compiled; names and types of the arguments say what they are for::

    cpp_fused_gelu_3 = async_compile.cpp_pybinding(['const float*', 'float*'], '''… kernel(in_ptr0, out_ptr0) …''')
    triton_poi_fused_1 = async_compile.triton('triton_poi_fused_1', '''… def triton_poi_fused_1(in_ptr0, …) …''')

==================  =============================================================
argument            what the kernel does with it
==================  =============================================================
``const`` in C++    reads it, whatever its name
``in_ptr``          reads it; so does a template with ``arg_A``, ``arg_B``
``out_ptr``         writes it; so is ``ws_ptr``, memory for its own use
``in_out_ptr``      reads and writes it
any other name      may read and write it (kernels that the user wrote)
==================  =============================================================

An output is a copy of an input where all that is stored there was loaded from it, at an address that no value decides,
and at most converted to another dtype.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Argument:
    """What a kernel does with one of its arguments. ``sure``: whether its name says so."""

    name: str
    reads: bool
    writes: bool
    sure: bool = True


@dataclass
class Kernel:
    """One kernel: its name in the wrapper, its arguments in order, its text."""

    name: str
    arguments: tuple[Argument, ...]
    text: str

    @cached_property
    def copies(self) -> dict[int, set[int]]:
        """The place of an argument that is a copy of others -> theirs."""
        place = {argument.name: i for i, argument in enumerate(self.arguments)}
        stored = _stored(self.text)
        found = {}
        for name, sources in stored.items():
            if name in place and None not in sources:
                found[place[name]] = {place[source] for source in sources if source in place}
        return found


def read_kernel(statement: ast.stmt) -> Kernel | None:
    """The kernel of ``name = async_compile.<language>(…)``; None for any other statement."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)],
            value=ast.Call(func=ast.Attribute(value=ast.Name(id="async_compile"), attr=language), args=args),
        ):
            texts = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            text = max(texts, key=len, default="")
            if language == "triton":
                return Kernel(name, _triton_arguments(text, texts[0] if texts else name), text)
            types = [
                element.value
                for arg in args
                if isinstance(arg, ast.List)
                for element in arg.elts
                if isinstance(element, ast.Constant) and isinstance(element.value, str)
            ]
            return Kernel(name, _cpp_arguments(text, types), text)
    return None


def _cpp_arguments(text: str, types: Sequence[str]) -> tuple[Argument, ...]:
    signature = re.search(r"\bkernel\s*\(([^)]*)\)", text)
    declared = [part.strip() for part in signature[1].split(",")] if signature else []
    if not types:
        types = [part.rpartition(" ")[0] for part in declared]
    names = [part.rpartition(" ")[2].lstrip("*&") for part in declared]
    if len(names) != len(types):
        names = ["?"] * len(types)
    found = []
    for type_, name in zip(types, names):
        if type_.startswith("const ") or "*" not in type_:
            found.append(Argument(name, reads=True, writes=False))
        elif name.startswith(("out_ptr", "ws_ptr")):
            found.append(Argument(name, reads=False, writes=True))
        else:
            found.append(Argument(name, reads=True, writes=True, sure=name.startswith("in_out_ptr")))
    return tuple(found)


def _triton_arguments(text: str, name: str) -> tuple[Argument, ...]:
    signatures = {found[1]: found[2] for found in re.finditer(r"\bdef\s+(\w+)\s*\(([^)]*)\)", text)}
    signature = signatures.get(name) or (list(signatures.values()) or [""])[-1]
    mutated = re.search(r"""["']mutated_arg_names["']\s*:\s*\[([^\]]*)\]""", text)
    both = re.findall(r"\w+", mutated[1]) if mutated else []
    found = []
    for part in signature.split(","):
        argument = part.split(":")[0].split("=")[0].strip()
        if not argument:
            continue
        if argument in both or argument.startswith("in_out_ptr"):
            found.append(Argument(argument, reads=True, writes=True))
        elif argument.startswith(("out_ptr", "ws_ptr")):
            found.append(Argument(argument, reads=False, writes=True))
        elif argument.startswith(("in_ptr", "arg_")):
            found.append(Argument(argument, reads=True, writes=False))
        else:
            found.append(Argument(argument, reads=True, writes=True, sure=False))
    return tuple(found)


_POINTER = r"((?:in_out|in|out)_ptr\d+)"
_LOAD = re.compile(rf"\b(tmp\d+) = (?:[\w:<>, ]*::loadu\(|tl\.load\((?:tl\.make_block_ptr\()?)?{_POINTER}\b(.*)")
_CONVERT = re.compile(
    r"\b(tmp\d+) = (?:[\w:<>, ]*\bconvert<[^()]*>|static_cast<[^()]*>|float|double|half)\((tmp\d+)\);"
)
_TO = re.compile(r"\b(tmp\d+) = (tmp\d+)\.to\([\w.]+\)\s*$")
_STORE = re.compile(rf"\b(tmp\w*)\.store\((\w+) \+|{_POINTER}\[.*\] = (?:[\w:<>]+\()?(\w+)\)?;")
_STORE_OF_TRITON = re.compile(
    rf"\btl\.store\((?:tl\.make_block_ptr\()?{_POINTER}\b.*?, (?:tl\.broadcast_to\()?(\w+)[,.)]"
)
_TRANSPOSE = re.compile(
    r"\btranspose_mxn<(?:[^<>]|<[^<>]*>)*>\((\w+)(?: \+ .*?)?, (?:static_cast<int64_t>\([^)]*\)|\w+), ([a-z]\w*)\b"
)


def _stored(text: str) -> dict[str, set[str | None]]:
    """What each output is stored: the inputs that it was loaded from; None stands for anything else."""
    origin: dict[str, str | None] = {}
    stored: dict[str, set[str | None]] = {}

    def store(to: str, value: str) -> None:
        if "_ptr" in to:
            stored.setdefault(to, set()).add(value if "_ptr" in value else origin.get(value))
        else:
            origin[to] = value if "_ptr" in value else origin.get(value)

    for line in text.splitlines():
        if found := _LOAD.search(line):
            origin[found[1]] = found[2] if "tmp" not in found[3] else None
        elif found := _CONVERT.search(line) or _TO.search(line):
            origin[found[1]] = origin.get(found[2])
        elif found := _TRANSPOSE.search(line):
            store(found[2], found[1])
        elif found := _STORE.search(line):
            store(found[2] or found[3], found[1] or found[4])
        elif found := _STORE_OF_TRITON.search(line):
            store(found[1], found[2])
        elif found := re.search(r"\b(tmp\d+) = ", line):
            origin[found[1]] = None
        elif found := re.search(rf"{_POINTER}\b.*?(?:\[.*\] =|atomic_add)", line) or re.search(
            rf"atomic_add\w*\(&?{_POINTER}", line
        ):
            stored.setdefault(found[1], set()).add(None)
    return stored
