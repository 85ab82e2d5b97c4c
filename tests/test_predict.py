"""zerofx.predict beside what is counted and measured: bytes sent, live bytes; and its clock on graphs done by hand."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests import models
from tests.counting import count_collectives
from tests.memory import allocated_peak
from tests.passes.graphs import mlp_backward, mlp_forward
from tests.slow import quick_if, slow
from tests.workers import Workers
from zerofx import _torch
from zerofx.compiler.records import GraphRecord, Trace
from zerofx.simulate import inductor_code
from zerofx.simulate.clock import on_the_clock
from zerofx.simulate.recorder import Operation, Phase, Recorder
from zerofx.simulate.rehearsal import rehearse

Rates = zerofx.Rates
BF16 = zerofx.MixedPrecision(torch.bfloat16)

# ------------------------------------------------------------------ against real steps


def step_and_prediction(name: str, executor: str, probe: bool = False, **options: Any) -> dict[str, Any]:
    """One rank's step, counted and measured, and what is predicted for it."""
    model, batch = models.build(name), models.make_batch(name, 3)
    options.setdefault("groups", zerofx.Grouping(min_bytes=0))
    zerofx.compile(model, executor=executor, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        models.loss_of(model, batch).backward()

    for _ in range(2):  # compiles; and makes replicas stale
        step()
        optimizer.step()
        optimizer.zero_grad()
    with count_collectives() as log:
        peaks = [allocated_peak(step)]
    # gloo's thread may hold on to what an all-reduce was done with, for a moment longer than its wait: one step in 50.
    for _ in range(2):
        optimizer.zero_grad()
        peaks.append(allocated_peak(step))
    prediction = zerofx.predict(model, probe=probe)
    starts = [o for phase in prediction.phases for o in phase.operations if o.kind == "start"]
    waits = [o for phase in prediction.phases for o in phase.operations if o.kind == "wait"]
    return {
        "received": Counter(event.bytes for event in log.events if event.bytes),
        "wire": log.total_bytes,
        "starts": Counter(o.nbytes for o in starts),
        "predicted wire": prediction.wire_bytes,
        "groups": {o.group for o in starts},
        "unmatched": Counter(o.collective for o in starts) - Counter(o.collective for o in waits),
        "peak": min(peaks),
        "predicted peak": prediction.peak_bytes,
        "prediction": prediction,
    }


ZOO = [
    *(("gpt", "eager", stage, 2) for stage in (0, 1, 2, 3)),
    *(("gpt", "inductor", stage, 2) for stage in (0, 3)),
    ("gpt", "eager", 3, 3),
    *((name, "eager", 3, 2) for name in ("mlp", "tied", "gpt2", "gpt2_two_graphs", "llama", "bert", "vit")),
    ("llama", "inductor", 3, 2),
]
CASES = [case if case[0] in ("mlp", "tied") else slow(*case) for case in ZOO]


@pytest.fixture(scope="module")
def run_step(make_workers: Callable[[int], Workers]) -> Callable[..., list[dict[str, Any]]]:
    """Each case runs once, for all tests that look at it."""

    @functools.cache
    def run(name: str, executor: str, stage: int, world: int, mixed: bool = False) -> list[dict[str, Any]]:
        options = {"mixed_precision": BF16, "probe": True} if mixed else {}
        return make_workers(world).run(step_and_prediction, name, executor, stage=stage, timeout=250, **options)

    return run


@pytest.mark.parametrize(("name", "executor", "stage", "world"), CASES)
def test_bytes_on_the_wire_are_those_that_are_counted(
    run_step, name: str, executor: str, stage: int, world: int
) -> None:
    for rank in run_step(name, executor, stage, world):
        assert rank["predicted wire"] == rank["wire"] > 0
        if world == 2:  # one message is one collective
            assert rank["starts"] == rank["received"]
        assert "" not in rank["groups"]
        assert not rank["unmatched"]


@pytest.mark.parametrize(("name", "executor", "stage", "world"), CASES)
def test_peak_live_bytes_are_within_3_percent_of_those_measured(
    run_step, name: str, executor: str, stage: int, world: int
) -> None:
    for rank in run_step(name, executor, stage, world):
        assert rank["predicted peak"] == pytest.approx(rank["peak"], rel=0.03)


@quick_if(lambda stage: stage == 0)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_in_mixed_precision_too(run_step, stage: int) -> None:
    """oneDNN's products in bfloat16 take memory of their own, more than their results in a model this small."""
    for rank in run_step("gpt", "eager", stage, 2, mixed=True):
        assert rank["predicted wire"] == rank["wire"] > 0
        assert rank["starts"] == rank["received"]
        assert rank["predicted peak"] == pytest.approx(rank["peak"], rel=0.03)


@quick_if(lambda executor: executor == "eager")
@pytest.mark.parametrize(("name", "executor"), [("gpt", "inductor"), ("gpt", "eager")])
def test_all_ranks_predict_the_same(run_step, name: str, executor: str) -> None:
    first, second = (rank["prediction"] for rank in run_step(name, executor, 3, 2))
    assert first == second
    assert str(first) == str(second)


# ------------------------------------------------------------------ the clock


def traced(gm: torch.fx.GraphModule, ctx: Any) -> Trace:
    """A graph by hand as if it had been compiled."""
    trace = Trace(gm, ctx)
    with _torch.fake_mode_of([node.meta["val"] for node in gm.graph.nodes if "val" in node.meta]):
        trace.run(gm)
    return trace


def mlp(layers: str = "abc", **context: Any) -> GraphRecord:
    """Per layer a gather of 256 bytes received, a product of 512 operations, and a relu."""
    forward, backward = mlp_forward(2, layers, **context), mlp_backward(2, layers, **context)
    return GraphRecord(forward=traced(*forward), backward=traced(*backward))


INSTANT = 1e30


def forward_of(record: GraphRecord, rates: zerofx.Rates) -> Any:
    return on_the_clock(rehearse([record]), rates).phases[0]


ONE_PER_PRODUCT = Rates(flops_per_s=512, memory_bytes_per_s=INSTANT, link_bytes_per_s=256)


@pytest.mark.parametrize(
    ("link_bytes_per_s", "time", "exposed"),
    [
        (256, 4, 1),  # a gather takes as long as a product: only the first is exposed
        (2560, 3.1, 0.1),  # compute-bound
        (128, 7, 4),  # wire-bound: three gathers one after the other, and the last product
    ],
)
def test_gathers_one_group_ahead_are_hidden_behind_compute(
    link_bytes_per_s: float, time: float, exposed: float
) -> None:
    phase = forward_of(mlp(), replace(ONE_PER_PRODUCT, link_bytes_per_s=link_bytes_per_s))
    assert phase.time_s == pytest.approx(time)
    assert phase.exposed_s == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("core_share", "time"),
    [
        (0.25, 4.5),  # two gathers travel while products run, for a second each
        (0.5, 5),  # and for half of the time the first product stands
        (0.9, 5.8),
    ],
)
def test_compute_is_slower_while_something_travels_where_gloo_has_no_core_of_its_own(
    core_share: float, time: float
) -> None:
    phase = forward_of(mlp(), replace(ONE_PER_PRODUCT, core_share=core_share))
    assert phase.time_s == pytest.approx(time)


def test_without_room_to_prefetch_every_gather_is_exposed() -> None:
    phase = forward_of(mlp(memory_budget=512), ONE_PER_PRODUCT)
    assert (phase.time_s, phase.exposed_s) == (pytest.approx(6), pytest.approx(3))


def test_latency_counts_once_per_collective_and_they_queue() -> None:
    rates = replace(ONE_PER_PRODUCT, link_bytes_per_s=INSTANT, link_latency_s=1.5)
    phase = forward_of(mlp(), rates)  # on the wire 0-1.5, 1.5-3, 3-4.5: then the last product
    assert (phase.time_s, phase.exposed_s) == (pytest.approx(5.5), pytest.approx(2.5))


def test_a_kernel_without_much_arithmetic_takes_as_long_as_its_bytes() -> None:
    # addmm reads 32 + 128 + 256 and writes 128 bytes, relu reads and writes 128 each
    phase = forward_of(mlp(), Rates(INSTANT, 800, INSTANT))
    assert (phase.time_s, phase.exposed_s) == (pytest.approx(3), pytest.approx(0))


def test_spans_do_not_overlap_on_a_resource_and_waits_end_with_their_collective() -> None:
    rates = Rates(400.0, 700.0, 300.0, 0.2)
    prediction = on_the_clock(rehearse([mlp("abcdef")]), rates)
    spans = [span for phase in prediction.phases for span in phase.spans]
    wire = [span for span in spans if span.operation.kind == "start"]
    compute = [span for span in spans if span.operation.kind != "start"]
    for lane in (wire, compute):
        assert all(a.end <= b.start or math.isclose(a.end, b.start) for a, b in itertools.pairwise(lane))
    arrived = {span.operation.collective: span.end for span in wire}
    for span in compute:
        if span.operation.kind == "wait":
            assert span.end == max(span.start, arrived[span.operation.collective])
    waited = sum(span.end - span.start for span in compute if span.operation.kind == "wait")
    assert prediction.exposed_s == pytest.approx(waited)
    assert prediction.time_s == pytest.approx(compute[-1].end)


def test_a_reduction_travels_while_the_next_group_computes() -> None:
    rates = replace(ONE_PER_PRODUCT, link_bytes_per_s=2560)
    backward = on_the_clock(rehearse([mlp()]), rates).phases[1]
    # Six products. Exposed: the first gather, the last reduction and nothing between.
    assert backward.time_s == pytest.approx(6.2)
    assert backward.exposed_s == pytest.approx(0.2)
    groups = [o.group for o in backward.operations if o.kind == "start"]
    assert groups == ["c", "b", "a", "c", "b", "a"]


# ------------------------------------------------------------------ live bytes


def test_live_bytes_of_a_graph_by_hand() -> None:
    forward, backward = on_the_clock(rehearse([mlp()])).phases
    x, w = 128, 512  # an activation; a gathered group (64 + 8 floats, padded)
    # start a, b, c; wait, addmm, relu (a is gone); the same for b and c; the end. The second and third relu count from
    # the moment that the product's input is freed, and its weights not yet.
    weights = [w, 2 * w, 3 * w, 3 * w, 3 * w, 2 * w, 2 * w, 2 * w, 2 * w, w, w, w, 0]
    assert [live["weights"] for live in forward.live] == weights
    assert forward.peak == {"weights": 3 * w, "activations": 0, "gradients": 0, "temporary": x}
    # What is sent stays until this rank's part of it was summed; what is received has half its bytes, as a shard has.
    at = {o.name: live["gradients"] for o, live in zip(backward.operations, backward.live)}
    assert at["mm_2"] == at["wait_tensor_default_1"] == 3 * w // 2
    assert at["wait_tensor_default_3"] == at["sum_dim_int_list"] == 3 * w  # two are under way
    assert at["add_tensor"] == 5 * w // 2  # what was received is gone
    assert at["mul_tensor"] == 3 * w // 2  # and what was sent
    assert backward.live[-1] == {"weights": 0, "activations": 0, "gradients": 3 * w // 2, "temporary": x}


def test_what_forward_saves_is_activations_until_backward_has_read_it(fake_world) -> None:
    fake_world(2)
    prediction = zerofx.predict(trained())
    forward, backward = prediction.phases
    saved = forward.live[-1]["activations"]
    assert saved > 0
    assert backward.live[0]["activations"] == saved
    assert prediction.peak_bytes == sum(prediction.peak.values()) >= saved


def test_without_room_to_prefetch_one_group_is_live() -> None:
    forward, backward = on_the_clock(rehearse([mlp(memory_budget=512)])).phases
    assert forward.peak["weights"] == max(live["weights"] for live in backward.live) == 512


# ------------------------------------------------------------------ Inductor's code

CODE = """
from torch._inductor.async_compile import AsyncCompile
import torch
async_compile = AsyncCompile()
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
cpp_fused_relu_0 = async_compile.cpp_pybinding(['float*'], r'''
extern "C" void kernel(float* in_out_ptr0, const float* in_ptr0, float* out_ptr0) {}
''')
class Runner:
    def call(self, args):
        x, w = args
        args.clear()
        assert_size_stride(x, (4, 8), (8, 1), 'input')
        buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        extern_kernels.mm(x, reinterpret_tensor(w, (8, 8), (1, 8), 64), out=buf0)
        buf1 = reinterpret_tensor(buf0, (32, ), (1, ), 0); del buf0  # reuse
        buf2 = empty_strided_cpu((16, ), (1, ), torch.float32)
        cpp_fused_relu_0(buf1, x, buf2)
        del x
        del buf1
        buf3 = torch.ops.aten.sort.default(buf2)
        buf4 = buf3[0]
        del buf3
        return (buf4, None)
call = Runner().call
def get_args():
    raise AssertionError
async_compile.wait(globals())
"""


def test_inductors_code_is_followed_line_by_line() -> None:
    recorder = Recorder()
    with torch.no_grad(), _torch.fake_mode(), recorder:
        with recorder.unseen():
            inputs = [torch.empty(4, 8), torch.empty(256)]
        for x in inputs:
            recorder.know(x)
        with recorder.phase(0, "forward", None) as phase:  # type: ignore[arg-type]
            del x
            outputs = inductor_code.load(CODE, recorder)(inputs)
            assert not inputs, "boxed: the code takes its inputs"
            assert outputs[0].shape == (16,)
    product, fused, sort = phase.operations
    assert (product.name, product.flops, product.nbytes) == ("mm", 2 * 4 * 8 * 8, 128 + 256 + 128)
    assert (fused.name, fused.flops, fused.nbytes) == ("cpp_fused_relu_0", 0, 128 + 128 + 64)
    assert sort.name == "sort"
    made = [(change.before, change.buffer.nbytes) for change in phase.changes if change.made]
    freed = [(change.before, change.buffer.nbytes) for change in phase.changes if not change.made]
    assert made == [(0, 128), (1, 64), (2, 64), (2, 128)]  # the sort's indices have 8 bytes
    assert freed == [(2, 128), (3, 128), (3, 64)]  # buf1, which is buf0; the sort's indices; as it returns, buf2


def test_code_that_is_not_inductors_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no function 'call'"):
        inductor_code.load("x = 1", Recorder())


@pytest.mark.parametrize(("executor", "hidden"), [("inductor", 1), ("eager", 3)])
def test_where_kernels_are_fused_forward_saves_nothing_that_can_be_recomputed_from_the_rest(
    executor: str, hidden: int
) -> None:
    """A product of backward reads what the normalisation gives; the first product is saved, of which all comes."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))
    record = zerofx.dry_run(model, torch.randn(128, 16), world_size=2, stage=3, executor=executor, backend="gloo")
    saved = zerofx.predict(record).phases[0].live[-1]["activations"]
    assert saved // (128 * 64 * 4) == hidden


# ------------------------------------------------------------------ the call


def trained(executor: str = "eager", length: int = 16, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = models.GPT(layers=2, dim=32, heads=2, vocab=64, length=32)
    zerofx.compile(model, executor=executor, groups=zerofx.Grouping(min_bytes=0), **options)
    x = torch.randint(64, (2, length))
    model(x, x).backward()
    return model


def test_a_prediction_is_the_same_every_time_and_changes_nothing(fake_world) -> None:
    fake_world(4)
    model, rates = trained(), Rates(1e10, 1e10, 1e9, 1e-5)
    before = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    first = zerofx.predict(model, rates)
    assert zerofx.predict(model, rates) == first
    for name, p in model.named_parameters():
        # Bit by bit: on ranks that are not there, what nobody sent may be any number, or none.
        assert torch.equal(p.grad.to_local().view(torch.int32), before[name].view(torch.int32))
    x = torch.randint(64, (2, 16))
    model(x, x).backward()  # what was compiled still runs


def test_without_rates_there_are_bytes_and_no_times(fake_world) -> None:
    fake_world(4)
    model = trained()
    prediction, timed = zerofx.predict(model), zerofx.predict(model, Rates(1e10, 1e10, 1e9))
    assert prediction.time_s is prediction.exposed_s is None
    assert (prediction.wire_bytes, prediction.peak) == (timed.wire_bytes, timed.peak)
    assert timed.time_s > timed.exposed_s > 0


def test_parameters_at_rest_are_what_the_rank_holds(fake_world) -> None:
    n = sum(p.numel() for p in models.GPT(layers=2, dim=32, heads=2, vocab=64, length=32).parameters()) * 4
    for stage, share in ((0, 1), (1, 1), (3, 4)):
        fake_world(4)
        held = zerofx.predict(trained(stage=stage)).held_bytes
        assert n / share <= held < 1.03 * n / share
        if stage == 0:
            assert held == n


@quick_if(lambda stage, precision: stage == 3 and precision is not None)
@pytest.mark.parametrize("precision", [None, zerofx.MixedPrecision(torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_record_is_predicted_as_the_module_that_it_is_of(fake_world, stage: int, precision: Any) -> None:
    fake_world(4)
    model, rates = trained(stage=stage, mixed_precision=precision), Rates(1e10, 1e10, 1e9)
    (record,) = zerofx.graphs(model)
    assert zerofx.predict(record, rates) == zerofx.predict(model, rates)


@pytest.mark.slow
def test_sizes_that_are_symbols_count_as_they_were_captured(fake_world) -> None:
    fake_world(2)
    fixed, free = zerofx.predict(trained(dynamic=False)), zerofx.predict(trained(dynamic=True))
    assert free.wire_bytes == fixed.wire_bytes
    assert free.peak_bytes == pytest.approx(fixed.peak_bytes, rel=0.02)


def test_text_has_one_line_per_graph_and_phase_and_one_for_the_step(fake_world) -> None:
    fake_world(4)
    lines = str(zerofx.predict(trained(), Rates(1e10, 1e10, 1e9))).splitlines()
    assert lines[0].split()[:4] == ["graph", "phase", "time", "exposed"]
    assert [line.split()[:2] for line in lines[1:3]] == [["0", "forward"], ["0", "backward"]]
    assert lines[3].split()[0] == "step"
    assert "held at rest" in lines[4]


def test_where_a_model_breaks_into_graphs_the_text_says_that_it_knows_no_more_than_these() -> None:
    one, two = (str(on_the_clock(rehearse([mlp()] * n))).splitlines()[-1] for n in (1, 2))
    assert one.startswith("held at rest")
    assert two == "not in it: what is computed outside of the 2 graphs, and what that holds"


def test_what_is_missing_is_said(fake_world) -> None:
    with pytest.raises(ValueError, match="is not sharded"):
        zerofx.predict(torch.nn.Linear(2, 2))
    fake_world(2)
    # With a dynamic size PyTorch compiles backward with forward.
    model = zerofx.compile(models.MLP(), executor="eager", dynamic=False)
    with pytest.raises(RuntimeError, match="nothing was compiled for training yet"):
        zerofx.predict(model)
    loss = model(torch.zeros(2, 13), torch.zeros(2, 7))
    with pytest.raises(RuntimeError, match=r"no backward yet.*loss\.backward"):
        zerofx.predict(model)
    loss.backward()
    assert zerofx.predict(model).wire_bytes > 0
    (record,) = zerofx.graphs(model)
    record.forward.context.executor = "inductor"
    with pytest.raises(RuntimeError, match="kept no Python code of a forward graph"):
        zerofx.predict(model)


@pytest.mark.parametrize(
    "wrong",
    [
        {"flops_per_s": 0},
        {"link_bytes_per_s": -1.0},
        {"link_latency_s": float("nan")},
        {"core_share": -0.1},
        {"core_share": 1.0},
    ],
)
def test_rates_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Rates(**{"flops_per_s": 1.0, "memory_bytes_per_s": 1.0, "link_bytes_per_s": 1.0} | wrong)


def calls(run: Callable[[], object]) -> int:
    """How many Python functions ``run`` calls."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # what it would collect, and call, is left of earlier tests
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_work_is_linear_in_the_number_of_nodes() -> None:
    letters = [chr(97 + i) for i in range(26)]
    names = [a + b for a in letters for b in letters]

    def work(layers: int) -> int:
        record = mlp(names[:layers])  # type: ignore[arg-type]
        rehearse([record])  # fills the caches of fake tensors
        return calls(lambda: on_the_clock(rehearse([record]), ONE_PER_PRODUCT))

    small, large = work(10), work(20)
    assert large < 2.3 * small


def test_the_clock_and_live_bytes_take_one_walk_over_the_operations() -> None:
    def work(n: int) -> int:
        phase = Phase(0, "forward", [Operation(str(i), "kernel", nbytes=1) for i in range(n)], [])
        return calls(lambda: on_the_clock([phase], ONE_PER_PRODUCT))

    assert work(2000) < 2.1 * work(1000)


def main() -> None:
    """Print peaks and bytes received of rank 0 as a table, predicted beside measured."""
    pools: dict[int, Workers] = {}
    print("| model | executor | stage | ranks | peak, measured | predicted | off by | received, counted | predicted |")
    print("|---|---|---|---|---|---|---|---|---|")
    try:
        for name, executor, stage, world in ZOO:
            pool = pools.setdefault(world, Workers(world))
            found = pool.run(step_and_prediction, name, executor, stage=stage, timeout=250)[0]
            peak, said = found["peak"], found["predicted peak"]
            cells = [name, executor, stage, world, f"{peak:,}", f"{said:,}", f"{said / peak - 1:+.2%}"]
            cells += [f"{found['wire']:,}", f"{found['predicted wire']:,}"]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    finally:
        for pool in pools.values():
            pool.stop()


if __name__ == "__main__":
    main()
