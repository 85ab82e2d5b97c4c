"""lower: the graph as its executor and its backend want it."""

from __future__ import annotations

import operator
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.testing import FileCheck

from tests.passes.graphs import (
    Numbers,
    Sketch,
    apply,
    assert_documented,
    assert_left_alone,
    aten,
    events,
    mlp_backward,
    mlp_forward,
    run,
    up_to,
)
from tests.workers import Workers
from zerofx import _torch
from zerofx.passes import discard, edit, lower


def test_on_gloo_a_reduce_scatter_becomes_an_all_to_all_and_a_sum() -> None:
    gm, ctx = mlp_backward(2, layers="a")
    apply(gm, ctx, *up_to(discard))
    applied = apply(gm, ctx, lower)
    assert applied.edits == 2  # with the gather
    FileCheck().check("cat_default = ").check_next(
        "torch.ops.zerofx.all_to_all_pairwise.default(cat_default, 2, 'pg')"
    ).check("wait_tensor.default(all_to_all_pairwise_default)").check_next(
        "view.default(wait_tensor_default_"
    ).check_same(", [1, 64])").check_next("sum.dim_IntList(view_default, [0])").check_next(
        "torch.ops.zerofx.own_part.default(cat_default, 2, 'pg')"
    ).check_next("add.Tensor(own_part_default, sum_dim_int_list)").check_next("mul.Tensor(add_tensor, 0.5)").check_not(
        "reduce_scatter"
    ).run(gm.code)
    assert_documented(applied.inserted, {"reduce_scatter": {5}, "gradient": {5}})


def test_on_gloo_an_all_gather_becomes_a_pairwise_exchange() -> None:
    gm, ctx = mlp_forward(2, layers="ab")
    apply(gm, ctx, *up_to(discard))
    before = events(gm)
    applied = apply(gm, ctx, lower)
    assert applied.edits == 2
    FileCheck().check("torch.ops.zerofx.all_gather_pairwise.default(shard_a, 2, 'pg')").check(
        "wait_tensor.default(all_gather_into_tensor_default)"
    ).check_not("all_gather_into_tensor.default").run(gm.code)
    assert events(gm) == before
    assert applied.inserted == []


@pytest.mark.parametrize("backend", ["nccl", "fake", "mpi"])
def test_on_any_other_backend_collectives_stay(backend: str) -> None:
    gm, ctx = mlp_backward(2, backend=backend)
    apply(gm, ctx, *up_to(discard))
    assert_left_alone(gm, ctx, lower)
    FileCheck().check_count("reduce_scatter_tensor.default(", 3, exactly=True).check_not("all_to_all").run(gm.code)


@pytest.mark.parametrize("world_size", [2, 7, 64])
@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("graph", [mlp_forward, mlp_backward])
def test_shapes_hold_at_any_world_size(fake_world, graph, executor: str, world_size: int) -> None:
    fake_world(world_size)
    gm, ctx = graph(world_size, executor=executor, process_group=dist.group.WORLD.group_name)
    numbers = Numbers.random(gm, ctx)
    before = [value.shape for value in run(gm, ctx, numbers)]
    apply(gm, ctx, *up_to(lower))
    n = len(before)
    outputs = run(gm, ctx, numbers)  # compares every shape with meta["val"]
    assert all(value is None or value.shape == want for value, want in zip(outputs[:n], before))
    assert [value.shape for value in outputs[n:]] == [(r.layout.shard_numel,) for r in ctx.found.reductions]


def test_the_eager_executor_keeps_the_graph_as_it_reads_with_its_discards() -> None:
    gm, ctx = mlp_forward(2, backend="nccl")
    apply(gm, ctx, *up_to(discard))
    assert_left_alone(gm, ctx, lower)
    assert events(gm, "discard") == ["discard a", "discard b", "discard c"]


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("graph", [mlp_forward, mlp_backward])
def test_with_one_rank_there_is_nothing_to_do(graph, executor: str) -> None:
    gm, ctx = graph(1, executor=executor)
    apply(gm, ctx, *up_to(discard))
    assert_left_alone(gm, ctx, lower)


def control_deps(gm: GraphModule) -> dict[str, set[str]]:
    """Node -> what must come before it besides its inputs, but for the chain of all starts."""
    ordered = {}
    for node in gm.graph.nodes:
        if "control_deps" not in str(node.target):
            continue
        deps = {str(dep) for dep in node.args[0]}
        if "zerofx" in node.meta and node.meta["zerofx"].kind == "all_gather":
            deps = {dep for dep in deps if not dep.startswith("all_gather")}
        ordered[node.name] = deps
    return {name: deps for name, deps in ordered.items() if deps}


def test_inductor_gets_the_discards_as_dependences() -> None:
    gm, ctx = mlp_forward(2, executor="inductor", memory_budget=2 * 512)
    apply(gm, ctx, *up_to(discard))
    applied = apply(gm, ctx, lower)
    assert applied.edits == gm.code.count("control_deps(") + 3  # and the gathers
    assert "discard" not in gm.code
    assert control_deps(gm) == {
        "wait_tensor_default": {"all_gather_into_tensor_default_1"},
        "all_gather_into_tensor_default_2": {"addmm"},
        "wait_tensor_default_1": {"all_gather_into_tensor_default_2"},
    }
    assert_documented(applied.inserted, {"all_gather": {3, 5}, "wait": {1, 3}})
    order = ["all_gather a", "all_gather b", "wait a", "all_gather c", "wait b", "wait c"]
    assert events(gm, "all_gather", "wait") == order


def test_all_starts_are_chained_so_that_every_rank_issues_them_in_one_order() -> None:
    gm, ctx = mlp_forward(2, layers="abcd", executor="inductor", memory_budget=1 << 20)
    apply(gm, ctx, *up_to(lower))
    first, *starts = edit.tagged(gm.graph, "all_gather")
    for start in starts:
        assert first in start.args[0]
        first = start


def test_gathers_and_reductions_start_as_they_take_turns_in_the_graph() -> None:
    gm, ctx = mlp_backward(2, layers="abcdef", executor="inductor", memory_budget=2 * 512)
    apply(gm, ctx, *up_to(lower))
    turns = 0
    for first, second in pairwise(edit.tagged(gm.graph, "all_gather", "reduce_scatter")):
        if first.meta["zerofx"].kind != second.meta["zerofx"].kind:
            assert first in second.args[0]
            turns += 1
    assert turns > 2


def test_the_first_wait_stands_behind_all_starts_that_go_ahead_of_it() -> None:
    gm, ctx = mlp_forward(2, layers="abcd", executor="inductor", memory_budget=1 << 20)
    apply(gm, ctx, *up_to(lower))
    assert control_deps(gm) == {"wait_tensor_default": {f"all_gather_into_tensor_default_{i}" for i in (1, 2, 3)}}


def test_a_start_waits_for_all_that_reads_a_tied_weight_freed_before_it() -> None:
    s = Sketch(executor="inductor", memory_budget=2 * 256)
    x = s.input("x", 8, 8)
    tied, a, b, c = (s.parameters(name, **{name: (8, 8)})[0] for name in ("tied", "a", "b", "c"))
    for w in (tied, a, tied, b, c):
        x = s.call(aten.mm.default, x, w)
    gm, ctx = s.done(x)
    apply(gm, ctx, *up_to(lower))
    assert events(gm, "all_gather") == [f"all_gather {name}" for name in ("tied", "a", "b", "c")]
    assert control_deps(gm)["all_gather_into_tensor_default_2"] == {"mm", "mm_1", "mm_2"}


def test_a_value_of_a_weight_that_outlives_it_is_stored_before_it_is_read() -> None:
    s = Sketch(executor="inductor", memory_budget=256)
    x = s.input("x", 8, 8)
    a, b = (s.parameters(name, **{name: (8, 8)})[0] for name in "ab")
    value = s.call(aten.exp.default, a)
    x = s.call(aten.mm.default, s.call(aten.add.Tensor, x, value), b)
    gm, ctx = s.done(s.call(aten.add.Tensor, x, value))
    apply(gm, ctx, *up_to(discard))
    order = ["all_gather a", "wait a", "weight a", "exp", "discard a", "add", "all_gather b", "wait b"]
    assert events(gm)[:8] == order
    apply(gm, ctx, lower)
    assert control_deps(gm) == {"add": {"exp"}, "all_gather_into_tensor_default_1": {"exp"}}


@pytest.mark.parametrize("reader", ["exp", "mm"])
def test_what_only_the_caller_reads_of_a_weight_needs_no_other_reader(reader: str) -> None:
    s = Sketch(executor="inductor", memory_budget=256)
    x = s.input("x", 8, 8)
    a, b = (s.parameters(name, **{name: (8, 8)})[0] for name in "ab")
    value = s.call(aten.exp.default, a) if reader == "exp" else s.call(aten.mm.default, x, a)
    gm, ctx = s.done(s.call(aten.mm.default, x, b), value)  # as CLIP returns the exponential of its scale
    apply(gm, ctx, *up_to(lower))
    assert control_deps(gm)["all_gather_into_tensor_default_1"] == {value.name}


def generated_events(gm: GraphModule) -> list[str]:
    """What the code that Inductor generates for the graph calls, in words as `events` has them."""
    from torch._inductor.utils import run_and_get_code

    inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    with _torch.fake_mode_of(inputs):
        _, (code,) = run_and_get_code(lambda: _torch.generate_code(gm, inputs))
    found, group_of = [], {}
    for line in code.partition("def call")[2].splitlines():
        if start := re.match(r"\s*(\w+) = torch\.ops\.\w+\.all_gather_pairwise\.default\(shard_(\w+),", line):
            group_of[start[1]] = start[2]
            found.append(f"all_gather {start[2]}")
        elif alias := re.match(r"\s*(\w+) = (\w+)$", line):
            group_of |= {alias[1]: group_of[alias[2]]} if alias[2] in group_of else {}
        elif wait := re.match(r"\s*torch\.ops\.\w+\.wait_tensor\.default\((\w+)", line):
            found.append(f"wait {group_of[wait[1]]}")
        elif kernel := re.match(r"\s*(?:\w+ = )?(?:extern_kernels|torch\.ops\.aten)\.(\w+)", line):
            found.append(kernel[1])
    return found


@pytest.mark.parametrize("memory_budget", [256, None, 3 * 256, 1 << 20])
@pytest.mark.parametrize("reader", ["mm", "topk"])  # both without C++ to compile; topk returns a tuple
def test_the_code_that_inductor_generates_keeps_the_order(fake_world, reader: str, memory_budget: int | None) -> None:
    fake_world(2)
    s = Sketch(executor="inductor", memory_budget=memory_budget, process_group=dist.group.WORLD.group_name)
    x, outputs = s.input("x", 8, 8), []
    for name in "abcd":
        (w,) = s.parameters(name, **{name: (8, 8)})
        if reader == "mm":
            x = s.call(aten.mm.default, x, w)
        else:  # nothing orders these but `lower`
            outputs.append(s.call(operator.getitem, s.call(aten.topk.default, w, 2), 0))
    gm, ctx = s.done(x, *outputs)
    apply(gm, ctx, *up_to(discard))
    expected = [event for event in events(gm) if event.split()[0] in ("all_gather", "wait", reader)]
    apply(gm, ctx, lower)
    assert generated_events(gm) == expected


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_wait_for_a_refresh_is_spelled_the_same_everywhere(stage: int, backend: str, executor: str) -> None:
    gm, ctx = mlp_forward(2, stage=stage, backend=backend, executor=executor)
    apply(gm, ctx, *up_to(discard))
    assert_left_alone(gm, ctx, lower)
    FileCheck().check("wait_tensor.default(replica_a)").check("wait_tensor.default(replica_b)").check(
        "wait_tensor.default(replica_c)"
    ).run(gm.code)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_gloo_low_precision_gradients_are_summed_in_the_parameters_dtype(stage: int) -> None:
    gm, ctx = mlp_backward(2, layers="a", stage=stage, reduce_dtype=torch.bfloat16)
    apply(gm, ctx, *up_to(discard))
    apply(gm, ctx, lower)
    FileCheck().check("all_to_all_pairwise.default(cat_default, 2, 'pg')").check(
        "wait_tensor.default(all_to_all_pairwise_default)"
    ).check_next("view.default(wait_tensor_default").check_next(
        "sum.dim_IntList(view_default, [0], dtype = torch.float32)"
    ).check("own_part.default(").check_next("add.Tensor(own_part_default, sum_dim_int_list)").check_next(
        "mul.Tensor(add_tensor, 0.5)"
    ).run(gm.code)
    (start,) = edit.tagged(gm.graph, "reduce_scatter")
    assert start.meta["val"].dtype == torch.bfloat16  # what travels
    view, others, own, *rest = [node.meta["val"].dtype for node in edit.tagged(gm.graph, "gradient")]
    assert view == own == torch.bfloat16 and {others, *rest} == {torch.float32}


def average(
    backend: str, dtype: torch.dtype, gradients: list[float], kept: list[float] | None = None, **context: Any
) -> float:
    """The average over ranks of a gradient of one value, ``gradients[rank]``, plus what was kept of it."""
    rank = dist.get_rank()
    sync = "reduce" if kept is None else "merge"
    s = Sketch("backward", process_group=dist.group.WORLD.group_name, backend=backend, sync=sync, **context)
    s.group("a", dtype, w=(16, 16))
    gm, ctx = s.done(s.input("dw", 16, 16, dtype=dtype), gradients={0: "w"})
    apply(gm, ctx, *up_to(lower))
    numbers = Numbers({"dw": torch.full((16, 16), gradients[rank], dtype=dtype)})
    for node in edit.tagged(gm.graph, "kept"):
        numbers.inputs[node.name] = torch.full((16, 16), kept[rank], dtype=node.meta["val"].dtype)
    _, shard = run(gm, ctx, numbers, rank)
    assert shard.dtype == dtype and shard.eq(shard[0]).all()
    return shard[0].item()


def test_on_two_ranks_the_all_to_all_keeps_the_digits_that_a_low_precision_sum_loses(workers2: Workers) -> None:
    gradients = [1.0, 2.0**-9]  # each has few digits, their sum too many for 16 bits
    low = {"reduce_dtype": torch.bfloat16}
    assert workers2.run(average, "gloo", torch.float32, gradients, **low) == [0.5 + 2.0**-10] * 2
    assert workers2.run(average, "another", torch.float32, gradients, **low) == [0.5] * 2


@pytest.mark.parametrize(
    "backend",
    [
        "gloo",
        "another",
    ],
)
def test_on_two_ranks_gradients_are_summed_in_the_dtype_asked_for_if_that_is_wider(
    workers2: Workers, backend: str
) -> None:
    gradients, kept = [1.0, -1.0], [2.0**-8, 0.0]  # 1 + 2**-8 has too many digits for 16 bits, and the sum few
    got = workers2.run(average, backend, torch.bfloat16, gradients, kept, reduce_dtype=torch.float32)
    assert got == [2.0**-9] * 2
