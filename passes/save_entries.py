"""What enters a block of the model is saved, so that backward recomputes one block at a time.

::

    forward     h1 = block_0(h0)                           forward     h1 = block_0(h0)
                h2 = block_1(h1)                                       h2 = block_1(h1)
                h3 = block_2(h2)          ─────▶                       h3 = block_2(h2)
    saved       h0                                         saved       h0, h1, h2
    backward    h1, h2, h3 again, and all                  backward    block_2 again, from h2: its inside is there
                that is inside: at once                                block_1 again, from h1: that of block_2 is gone

A partitioner that must save few bytes cuts near the beginning. Then backward computes the model once more from there,
before it can begin with the last layer, and has everything at once that forward did not save: a tight budget for what
is saved makes the peak larger. What enters a block is little beside what is inside of it, and bounds what is there at
once to one block.

A block is what reads the parameters of one group. With ``layers`` it is what reads those of one layer, where a layer's
parameters are several groups: large ones are. Then less is saved, and more is computed again at once.

A block begins where the fewest bytes are on their way, between the last reader of other parameters and its own first
one: before a normalisation rather than after it. A block into which more bytes go than into the one before, and than
into the one after, begins in the middle of a layer, and is left out.

A group can be read again after others: an embedding's and the head's parameters are often one group. Then what reads
it again is another block. Without that, backward would begin with the inside of the last layer *and* all of the head.

Runs on the joint graph, before it is cut into forward and backward. Sound because it moves that cut, and nothing else.
Leaves alone what somebody has marked already: a checkpoint says itself where it begins.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from zerofx._torch import OpOverload, must_save, saving_is_decided
from zerofx.passes import edit
from zerofx.passes.context import ParameterRef

APART = 2
"""How many blocks begin between two of one group. With fewer its parameters belong to the layers around them."""


LAYERS = 3
"""So many numbers in one container make layers of what stands there: in ``net.0.blocks.7.w`` of ``net.0.blocks``."""


def save_entries(forward: Sequence[Node], parameters: Mapping[str, ParameterRef], *, layers: bool = False) -> int:
    """Mark what is to be saved; returns how many nodes were marked.

    ``forward``: what it computes, in order. ``parameters``: by the placeholder's name. ``layers``: see above.
    """
    made = _on_their_way(forward)
    blocks = {name: ref.layout.name for name, ref in parameters.items()}
    if layers:
        blocks |= _layers({name: ref.slot.name for name, ref in parameters.items()})
    places = _narrowest(_beginnings(forward, blocks), _crossing(made, len(forward)))
    entries = [[node for node, (first, last, _) in made.items() if first < place <= last] for place in places]
    sizes = [sum(made[node][2] for node in nodes) for nodes in entries]
    marked = 0
    for i, nodes in enumerate(entries):
        if 0 < i < len(sizes) - 1 and sizes[i] > max(sizes[i - 1], sizes[i + 1]):
            continue
        for node in nodes:
            if not saving_is_decided(node):
                must_save(node)
                marked += 1
    return marked


def _given(forward: Sequence[Node]) -> dict[Node, Node]:
    """Inputs, and views and casts of them: which input each comes of."""
    given: dict[Node, Node] = {}
    for node in forward:
        if node.op == "placeholder":
            given[node] = node
        elif edit.is_view_or_cast(node) and edit.sources(node)[0] in given:
            given[node] = given[edit.sources(node)[0]]
    return given


def _layers(names: Mapping[str, str]) -> dict[str, str]:
    """Of those that are in a layer: the outermost number in their name that has enough others beside it."""
    beside: dict[str, set[str]] = {}
    for name in names.values():
        for before, number in _numbers(name):
            beside.setdefault(before, set()).add(number)
    found = {}
    for key, name in names.items():
        numbers = (f"{before}.{number}" for before, number in _numbers(name) if len(beside[before]) >= LAYERS)
        if (layer := next(numbers, None)) is not None:
            found[key] = layer
    return found


def _numbers(name: str) -> list[tuple[str, str]]:
    """The numbers in a parameter's name, from the outermost on, each after its container's name."""
    parts = name.split(".")
    return [(".".join(parts[:i]), part) for i, part in enumerate(parts) if part.isdigit()]


def _beginnings(forward: Sequence[Node], blocks: Mapping[str, str]) -> list[tuple[int, int]]:
    """Of each block: the place of the last reader of a parameter before its first reader, and that one's place.

    ``blocks``: of each parameter that is sharded, by its placeholder's name.
    """
    given, last = _given(forward), 0
    begun: dict[str, int] = {}  # by block: how many had begun when it was read last
    beginnings: list[tuple[int, int]] = []
    for i, node in enumerate(forward):
        read = {given[x].name for x in node.all_input_nodes if x in given} if node not in given else set()
        here = {blocks[name] for name in read if name in blocks}
        if any(name not in begun or len(beginnings) - begun[name] >= APART for name in here):
            beginnings.append((last, i))
        begun |= dict.fromkeys(here, len(beginnings))
        last = i if here else last
    return beginnings


def _on_their_way(forward: Sequence[Node]) -> dict[Node, tuple[int, int, int]]:
    """What computes a tensor that is no view: its place, the place of the last reader in forward, and bytes."""
    place, given = {node: i for i, node in enumerate(forward)}, _given(forward)
    made: dict[Node, tuple[int, int, int]] = {}
    for node in forward:
        value, maker = node.meta.get("val"), _maker(node)
        if node in given or maker in given or not isinstance(value, torch.Tensor):
            continue
        last = max((place[user] for user in node.users if user in place), default=place[node])
        _, before, nbytes = made.get(maker, (0, 0, 0))
        made[maker] = place[maker], max(before, last), max(nbytes, edit.hinted_nbytes(value))
    return made


def _maker(node: Node) -> Node:
    """The operator that computes the memory that ``node`` looks at."""
    while node.op == "call_function" and edit.sources(node):
        if node.target is not operator.getitem and not (isinstance(node.target, OpOverload) and edit.may_alias(node)):
            break
        node = edit.sources(node)[0]
    return node


def _crossing(made: Mapping[Node, tuple[int, int, int]], n: int) -> list[int]:
    """Before each place, the bytes that were computed before and are read from there on."""
    changes = [0] * (n + 2)
    for first, last, nbytes in made.values():
        changes[first + 1] += nbytes
        changes[last + 1] -= nbytes
    return list(itertools.accumulate(changes))


def _narrowest(beginnings: Sequence[tuple[int, int]], crossing: Sequence[int]) -> list[int]:
    return [min(range(after + 1, first + 1), key=crossing.__getitem__, default=first) for after, first in beginnings]
