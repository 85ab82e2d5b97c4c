"""Which parameters travel together: automatic blocks, ``groups=``, and the sizes that merge and split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import GPT, Block, build
from zerofx.model.grouping import Grouping, plan_groups


def names(module: nn.Module, **options) -> dict[str, list[str]]:
    """Group -> its parameters. Tiny groups are kept apart unless asked for."""
    grouping = Grouping(**{"min_bytes": 0, **options})
    planned = plan_groups(module, 2, grouping)
    found = {layout.name: [slot.name for slot in layout.slots] for layout, _ in planned}
    assert len(found) == len(planned), "two groups of one name"
    return found


def small_gpt(layers: int = 3) -> GPT:
    return GPT(layers=layers, dim=16, heads=2, vocab=32, length=8)


def test_each_block_of_a_gpt_is_a_group_with_the_embeddings_before_and_the_head_behind() -> None:
    model = small_gpt()
    found = names(model)
    assert list(found) == ["tokens", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert found["tokens"] == ["tokens.weight", "positions.weight"]
    assert found["norm"] == ["norm.weight", "norm.bias", "head.weight"]
    assert found["blocks.1"] == [f"blocks.1.{name}" for name, _ in model.blocks[1].named_parameters()]


def test_every_parameter_is_in_one_group_in_registration_order() -> None:
    model = small_gpt()
    planned = plan_groups(model, 2, Grouping(min_bytes=0))
    slots = [slot.name for layout, _ in planned for slot in layout.slots]
    assert slots == [name for name, _ in model.named_parameters()]
    for layout, parameters in planned:
        assert [(slot.name, slot.shape) for slot in layout.slots] == [
            (next(n for n, p in model.named_parameters() if p is parameter), tuple(parameter.shape))
            for parameter in parameters
        ]


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_layouts_are_for_the_world_size_asked_for(world_size: int) -> None:
    for layout, parameters in plan_groups(small_gpt(), world_size, Grouping()):
        assert layout.world_size == world_size
        assert {layout.dtype} == {p.dtype for p in parameters}


def test_the_outermost_number_makes_the_block() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.gate = nn.Linear(4, 3)

    model = nn.ModuleDict({"layers": nn.ModuleList([Expert(), Expert()])})
    assert list(names(model)) == ["layers.0", "layers.1"]
    assert list(names(nn.Sequential(nn.Linear(4, 4), Expert()))) == ["0", "1"]


def test_two_stacks_of_blocks_do_not_mix() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.bridge = nn.Linear(4, 4)
            self.decoder = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    found = names(Model())
    assert list(found) == ["encoder.0", "encoder.1", "bridge", "decoder.0", "decoder.1", "first"]
    assert found["first"] == ["first.weight", "first.bias", "last.weight", "last.bias"]


def test_parameters_from_all_over_are_called_after_the_module_that_holds_them_all() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleDict({"tokens": nn.Embedding(8, 4), "positions": nn.Embedding(8, 4)})

    assert list(names(Model())) == ["body"]


def test_a_module_without_blocks_is_one_group() -> None:
    assert list(names(build("mlp"))) == ["first"]
    assert names(nn.Linear(3, 3)) == {"weight": ["weight", "bias"]}


def test_what_a_module_holds_by_itself_belongs_to_its_block() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.inner = nn.Linear(4, 4)

    found = names(nn.Sequential(Scaled(), Scaled()))
    assert found["0"] == ["0.scale", "0.inner.weight", "0.inner.bias"]


def test_a_tied_parameter_is_taken_once_under_its_first_name() -> None:
    model = small_gpt()
    model.head.weight = model.tokens.weight
    planned = plan_groups(model, 2, Grouping(min_bytes=0))
    holders = [layout.name for layout, parameters in planned if any(p is model.head.weight for p in parameters)]
    assert holders == ["tokens"]
    assert "head.weight" not in [slot.name for layout, _ in planned for slot in layout.slots]


def test_a_block_used_twice_is_one_group() -> None:
    block = nn.Linear(4, 4)
    assert list(names(nn.Sequential(block, nn.ReLU(), block))) == ["0"]


def test_other_dtypes_and_frozen_parameters_are_groups_of_their_own() -> None:
    model = small_gpt(layers=2)
    model.blocks[0].norm1.to(torch.bfloat16)
    model.blocks[1].qkv.requires_grad_(False)
    planned = plan_groups(model, 2, Grouping(min_bytes=0))
    kinds = {layout.name: (layout.dtype, layout.requires_grad) for layout, _ in planned}
    assert kinds == {
        "tokens": (torch.float32, True),
        "blocks.0.norm1": (torch.bfloat16, True),
        "blocks.0": (torch.float32, True),
        "blocks.1": (torch.float32, True),
        "blocks.1.qkv": (torch.float32, False),
        "norm": (torch.float32, True),
    }
    for _, parameters in planned:
        assert len({(p.dtype, p.requires_grad) for p in parameters}) == 1


def test_names_are_unique_where_one_block_makes_several_groups() -> None:
    model = nn.ModuleList([Block(16, 2)])
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 2 == 0)  # weights on, biases off: the same modules in both groups
    found = names(model)
    assert list(found) == ["0", "0#2"]
    assert all(name.endswith("weight") for name in found["0"])
    layers = ["0.norm1", "0.qkv", "0.proj", "0.norm2", "0.up", "0.down"]
    assert list(names(model, max_bytes=1)) == [*layers, *(f"{layer}#2" for layer in layers)]


def test_tiny_neighbours_are_merged_up_to_min_bytes() -> None:
    model = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(6)])  # 256 bytes each
    assert [len(group) for group in names(model, min_bytes=0).values()] == [1] * 6
    assert [len(group) for group in names(model, min_bytes=512).values()] == [1] * 6  # two are not below 512
    assert [len(group) for group in names(model, min_bytes=513).values()] == [2, 2, 2]
    assert [len(group) for group in names(model, min_bytes=1025).values()] == [4, 2]
    assert list(names(model, min_bytes=1 << 20)) == ["0"]
    assert len(plan_groups(model, 2, Grouping())) == 1  # by default what is tiny is one group


def test_merging_keeps_kinds_apart_and_passes_over_what_lies_between() -> None:
    model = nn.ModuleList([nn.Linear(8, 8, bias=False, dtype=dtype) for dtype in [torch.float32, torch.bfloat16] * 2])
    planned = plan_groups(model, 2, Grouping(min_bytes=1 << 20))
    assert [(layout.dtype, [slot.name for slot in layout.slots]) for layout, _ in planned] == [
        (torch.float32, ["0.weight", "2.weight"]),
        (torch.bfloat16, ["1.weight", "3.weight"]),
    ]


def test_a_large_group_is_left_out_of_merging() -> None:
    model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 800, bias=False), nn.Linear(8, 8, bias=False)])
    assert list(names(model, min_bytes=2048)) == ["0", "1", "2"]


def test_a_huge_group_is_split_between_parameters() -> None:
    model = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(5)])])  # 256 bytes each
    assert names(model, max_bytes=512) == {
        "0": ["0.0.weight", "0.1.weight"],
        "0#2": ["0.2.weight", "0.3.weight"],
        "0.4": ["0.4.weight"],
    }
    assert [len(group) for group in names(model, max_bytes=511).values()] == [1] * 5
    assert [len(group) for group in names(model, max_bytes=5 * 256).values()] == [5]


def test_a_parameter_of_max_bytes_is_a_group_by_itself() -> None:
    model = nn.ModuleList([nn.Sequential(nn.Linear(8, 2), nn.Linear(800, 8, bias=False), nn.Linear(8, 2))])
    for most in (1024, 800 * 8 * 4):
        assert list(names(model, max_bytes=most).values()) == [
            ["0.0.weight", "0.0.bias"],
            ["0.1.weight"],
            ["0.2.weight", "0.2.bias"],
        ]
    assert len(names(model, max_bytes=2 * 800 * 8 * 4)) == 1


def test_what_is_smaller_than_min_bytes_stays_with_a_neighbour_that_is_not_large() -> None:
    layers = nn.LayerNorm(8), nn.Linear(8, 100), nn.Linear(100, 8)  # 64 bytes, 3,200 and 400, 3,200 and 32
    model = nn.ModuleList([nn.Sequential(*layers)])
    large = [["0.1.weight"], ["0.2.weight"]]
    small = ["0.0.weight", "0.0.bias", "0.1.bias", "0.2.bias"]
    assert list(names(model, max_bytes=1024, min_bytes=512).values()) == [small, *large]
    assert list(names(model, max_bytes=1024, min_bytes=400).values()) == [small, *large]  # 464 there, the last is tiny
    assert list(names(model, max_bytes=1024, min_bytes=32).values()) == [
        small[:2],
        large[0],
        small[2:3],
        large[1],
        small[3:],
    ]
    assert list(names(model, max_bytes=3500, min_bytes=512).values()) == [
        small[:2] + ["0.1.weight", "0.1.bias"],
        ["0.2.weight", "0.2.bias"],
    ]


@pytest.mark.parametrize(("backend", "groups"), [("gloo", 2), ("nccl", 1), ("", 1)])
def test_without_a_number_groups_are_small_on_gloo(backend: str, groups: int) -> None:
    with torch.device("meta"):
        model = nn.ModuleList([nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))])  # four of 4 MiB
    assert len(plan_groups(model, 2, Grouping(), backend=backend)) == groups


@pytest.mark.parametrize("groups", [Block, [Block], (Block, nn.Bilinear)])
def test_groups_may_be_module_classes(groups) -> None:
    found = names(small_gpt(), blocks=Grouping.of(groups).blocks)
    assert list(found) == ["tokens", "blocks.0", "blocks.1", "blocks.2", "norm"]


def test_the_innermost_chosen_module_counts() -> None:
    found = names(nn.Sequential(Block(8, 2)), blocks=[Block, nn.Linear])
    assert list(found) == ["0", "0.qkv", "0.proj", "0.up", "0.down"]
    assert found["0"] == ["0.norm1.weight", "0.norm1.bias", "0.norm2.weight", "0.norm2.bias"]


def test_groups_may_be_a_function_of_name_and_module() -> None:
    found = names(small_gpt(), blocks=lambda name, module: name in ("blocks", "head"))
    assert list(found) == ["tokens", "blocks", "norm", "head"]
    found = names(small_gpt(), blocks=lambda name, module: name in ("", "blocks.1"))
    assert [len(group) for group in found.values()] == [2 + 12 + 12 + 3, 12]  # the root's own, on both sides


def test_the_groups_option_takes_a_grouping_and_none() -> None:
    grouping = Grouping(min_bytes=7)
    assert Grouping.of(grouping) is grouping
    assert Grouping.of(None) == Grouping()


@pytest.mark.parametrize("groups", ["Block", [nn.Linear(2, 2)], [int], int, [Block, "Block"], 3])
def test_what_names_no_module_class_is_refused(groups) -> None:
    with pytest.raises(TypeError, match=r"groups=.*nn\.Module classes"):
        Grouping.of(groups)


@pytest.mark.parametrize("blocks", [[nn.Conv2d], [], lambda name, module: False])
def test_groups_that_match_no_module_are_refused(blocks) -> None:
    with pytest.raises(ValueError, match=r"groups=.*no module of this GPT matches"):
        plan_groups(small_gpt(), 2, Grouping(blocks))


def test_the_same_model_makes_the_same_groups() -> None:
    layouts = [[layout for layout, _ in plan_groups(build("gpt"), 3, Grouping(min_bytes=0))] for _ in range(2)]
    assert layouts[0] == layouts[1]
