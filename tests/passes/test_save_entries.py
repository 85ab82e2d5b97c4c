"""save_entries: what enters a block is saved, where the fewest bytes are on their way; not in the middle of a layer."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.fx import Graph, Node

from zerofx._torch import saving_is_decided
from zerofx.model.layout import make_layout
from zerofx.passes import ParameterRef, save_entries

_aten = torch.ops.aten


class Forward:
    """A forward written down node by node, with its parameters."""

    def __init__(self) -> None:
        self.graph, self.parameters = Graph(), {}
        self.x = self.input("primals_1", 2, 4)

    def input(self, name: str, *shape: int) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape)
        return node

    def parameter(self, group: str, *shape: int) -> Node:
        node = self.input(f"primals_{len(self.parameters) + 2}", *shape)
        layout = make_layout(group, [(group, torch.Size(shape))], torch.float32, 2)
        self.parameters[node.name] = ParameterRef(layout, layout.slots[0])
        return node

    def call(self, target: torch._ops.OpOverload, *args: Node) -> Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
        return node

    def marked(self) -> list[str]:
        nodes = list(self.graph.nodes)
        save_entries(nodes, self.parameters)
        return [node.name for node in nodes if saving_is_decided(node)]


def test_the_hidden_state_in_front_of_a_normalisation_is_saved_and_no_view_of_it() -> None:
    forward = Forward()
    first, second = forward.parameter("blocks.0", 4, 4), forward.parameter("blocks.1", 4, 4)
    hidden = forward.call(_aten.mm.default, forward.x, first)
    seen = forward.call(_aten.view.default, hidden, [4, 2])
    normed = forward.call(_aten.tanh.default, seen)
    back = forward.call(_aten.view.default, normed, [2, 4])
    inside = forward.call(_aten.mm.default, back, second)
    forward.graph.output((forward.call(_aten.add.Tensor, hidden, inside),))
    assert forward.marked() == [hidden.name]


def test_a_group_that_begins_in_the_middle_of_a_layer_is_left_out() -> None:
    forward = Forward()
    sizes = {"blocks.0": (4, 4), "blocks.1.up": (4, 16), "blocks.1.down": (16, 4), "blocks.2": (4, 4)}
    weights = {name: forward.parameter(name, *shape) for name, shape in sizes.items()}
    value, entries = forward.x, {}
    for name, weight in weights.items():
        entries[name] = value
        value = forward.call(_aten.mm.default, value, weight)
    forward.graph.output((value,))
    assert forward.marked() == [entries["blocks.1.up"].name, entries["blocks.2"].name]


def test_a_group_that_is_read_again_behind_other_blocks_begins_another() -> None:
    forward = Forward()
    outer = forward.parameter("outer", 4, 4)
    hidden = [forward.call(_aten.mm.default, forward.x, outer)]
    for name in ("blocks.0", "blocks.1"):
        hidden.append(forward.call(_aten.mm.default, hidden[-1], forward.parameter(name, 4, 4)))
    forward.graph.output((forward.call(_aten.mm.default, hidden[-1], outer),))
    assert forward.marked() == [node.name for node in hidden]


def test_a_group_of_which_each_layer_reads_a_part_begins_no_block_again() -> None:
    forward = Forward()
    outer = forward.parameter("outer", 4, 4)
    hidden = [forward.call(_aten.mm.default, forward.x, outer)]
    for name in ("blocks.0", "blocks.1"):
        inside = forward.call(_aten.mm.default, hidden[-1], forward.parameter(name, 4, 4))
        hidden.append(forward.call(_aten.mm.default, inside, outer))
    forward.graph.output((hidden[-1],))
    assert forward.marked() == [hidden[0].name, hidden[1].name]


def test_inputs_and_casts_of_parameters_are_not_marked() -> None:
    forward = Forward()
    first, second = forward.parameter("a", 4, 4), forward.parameter("b", 4, 4)
    low = forward.call(torch.ops.prims.convert_element_type.default, second, torch.bfloat16)
    hidden = forward.call(_aten.mm.default, forward.x, first)
    low_hidden = forward.call(torch.ops.prims.convert_element_type.default, hidden, torch.bfloat16)
    forward.graph.output((forward.call(_aten.mm.default, low_hidden, low),))
    assert forward.marked() == [low_hidden.name]


def layered(names: list[list[str]]) -> tuple[Forward, list[Node]]:
    """Layers of several groups: a matrix product for each, with what enters it."""
    forward = Forward()
    value, entries = forward.x, []
    for group in itertools.chain.from_iterable(names):
        weight = forward.parameter(group, 4, 4)
        entries.append(value)
        value = forward.call(_aten.mm.default, value, weight)
    forward.graph.output((value,))
    return forward, entries


def marked(forward: Forward, layers: bool) -> list[str]:
    nodes = list(forward.graph.nodes)
    save_entries(nodes, forward.parameters, layers=layers)
    return [node.name for node in nodes if saving_is_decided(node)]


@pytest.mark.parametrize("outer", ["", "net.", "0.blocks."])
def test_of_a_layer_of_several_groups_each_begins_a_block_or_the_layer_does(outer: str) -> None:
    names = [[f"{outer}{i}.{part}" for part in ("up", "middle", "down")] for i in range(3)]
    forward, entries = layered(names)
    assert marked(forward, True) == [entries[3].name, entries[6].name]
    assert marked(forward, False) == [node.name for node in entries[1:]]


def test_two_numbers_beside_each_other_are_no_layers() -> None:
    forward, entries = layered([[f"{i}.{part}" for part in ("up", "down")] for i in range(2)])
    assert marked(forward, True) == [node.name for node in entries[1:]]
