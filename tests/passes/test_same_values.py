"""alike: which values tensor-parallel ranks have alike; what a rank has of its own has no digest, or another one."""

from __future__ import annotations

import torch
from torch.fx import Node

from tests.passes.graphs import Sketch, aten
from zerofx.features.partition_activations.same_values import alike

c10d = torch.ops._c10d_functional


def digests(s: Sketch, *outputs: Node) -> dict[str, str]:
    s.done(*outputs)
    given = {name: name for name in ("x", "bias")}
    return {node.name: digest for node, digest in alike(s.graph, given, {"tp"}).items()}


def hidden(group: str, column: int = 0) -> dict[str, str]:
    """Of x + all_reduce(x @ w), where each rank has its own ``w``, and of a column of it."""
    s = Sketch()
    x, w = s.input("x", 8, 8), s.input("w", 8, 8)
    parts = s.call(aten.mm.default, x, w)
    total = s.call(c10d.wait_tensor.default, s.call(c10d.all_reduce.default, parts, "sum", group))
    return digests(s, s.call(aten.select.int, s.call(aten.add.Tensor, x, total), 1, column))


def test_what_a_collective_of_these_ranks_brings_is_alike_and_what_follows_from_it_and_inputs_that_are() -> None:
    found = hidden("tp")
    assert found.keys() == {"x", "all_reduce", "wait_tensor", "add", "select"}
    assert len(set(found.values())) == 5
    assert found["x"] == "x"


def test_what_another_group_brings_is_not_alike() -> None:
    assert hidden("dp").keys() == {"x"}


def test_a_constant_of_a_rank_makes_another_digest_of_all_that_follows() -> None:
    first, second = (hidden("tp", column=rank) for rank in (0, 1))
    assert first["add"] == second["add"] and first["select"] != second["select"]


def test_which_collective_it_is_makes_another_digest() -> None:
    s = Sketch()
    w = s.input("w", 8, 8)
    both = [s.call(c10d.all_reduce.default, x, "sum", "tp") for x in (w, s.call(aten.neg.default, w))]
    found = digests(s, *both)
    assert len(set(found.values())) == 2


def test_a_device_is_told_without_its_number() -> None:
    def of(device: torch.device) -> str:
        s = Sketch()
        node = s.call(aten.full.default, [4], 1.0, device=torch.device("cpu"))
        node.kwargs = {"device": device}
        return digests(s, node)["full"]

    assert of(torch.device("cuda:0")) == of(torch.device("cuda:1")) != of(torch.device("cpu"))


def test_what_a_rank_draws_writes_to_or_does_not_fill_is_its_own() -> None:
    s = Sketch()
    x, bias = s.input("x", 8, 8), s.input("bias", 8)
    drawn = s.call(aten.native_dropout.default, x, 0.5, True)
    empty = s.call(aten.empty_like.default, x)
    written = s.call(aten.neg.default, x)
    s.call(aten.copy_.default, written, empty)
    s.call(aten.copy_.default, bias, s.call(aten.sum.dim_IntList, x, [0]))
    after = s.call(aten.abs.default, bias)
    assert digests(s, drawn, empty, written, after).keys() == {"x", "sum_1"}
