"""`zerofx.dry_run` makes the graphs of a real training step, allocates nothing, and grows linearly with the model."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
import zerofx.passes
from tests.models import GPT
from tests.slow import quick_if, slow
from zerofx._torch import inductor
from zerofx.compiler.records import GraphRecord, Trace
from zerofx.passes import edit


def small_gpt(layers: int = 3) -> GPT:
    return GPT(layers=layers, dim=16, heads=2, vocab=32, length=8)


SEPARATE = zerofx.Grouping(min_bytes=0)
TOKENS = torch.zeros(2, 8, dtype=torch.long)


@quick_if(lambda options: options == {"stage": 2})
@pytest.mark.parametrize(
    "options",
    [
        *({"stage": stage} for stage in range(4)),
        {"stage": 3, "mixed_precision": zerofx.MixedPrecision(torch.bfloat16, torch.float32)},
        {"stage": 3, "executor": "inductor"},
    ],
    ids=str,
)
def test_the_graphs_are_those_of_a_training_step(fake_world: Callable[..., None], options: dict[str, Any]) -> None:
    options = {"executor": "eager", "groups": SEPARATE, **options}
    model = small_gpt()
    dry = zerofx.dry_run(model, TOKENS, TOKENS, world_size=4, backend="fake", **options)

    fake_world(4)
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    zerofx.compile(model, init_sync=False, **options)
    model(TOKENS, TOKENS).backward()
    (real,) = zerofx.graphs(model)
    for mine, theirs in zip(dry.traces(), real.traces(), strict=True):
        assert mine.edits == theirs.edits
        assert mine.final.code.replace("'dry run'", repr(name)) == theirs.final.code
    assert [trace.context.phase for trace in dry.traces()] == ["forward", "backward"]


def test_the_module_stays_as_it_is() -> None:
    model = small_gpt()
    before = {name: (id(p), type(p), p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    zerofx.dry_run(model, TOKENS, TOKENS, world_size=8, executor="eager")
    for name, p in model.named_parameters():
        assert (id(p), type(p), p.data_ptr()) == before[name][:3]
        assert torch.equal(p, before[name][3]) and p.grad is None
    assert not dist.is_initialized()


def test_a_module_on_the_meta_device_gives_the_graphs_of_one_that_is_there() -> None:
    with torch.device("meta"):
        meta = small_gpt()
    records = [
        zerofx.dry_run(model, tokens, tokens, world_size=8, executor="eager")
        for model, tokens in ((meta, TOKENS.to("meta")), (small_gpt(), TOKENS))
    ]
    (a, b), (c, d) = ([trace.final.code for trace in record.traces()] for record in records)
    assert (a, b) == (c, d)
    assert all(p.is_meta and type(p) is nn.Parameter for p in meta.parameters())


def test_collectives_are_spelled_for_the_backend_asked_for() -> None:
    for backend, pairwise in (("gloo", True), ("nccl", False)):
        record = zerofx.dry_run(small_gpt(), TOKENS, TOKENS, world_size=8, executor="eager", backend=backend)
        assert record.forward is not None
        assert ("all_gather_pairwise" in record.forward.final.code) is pairwise


class Breaks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y.sum()


def test_a_module_of_several_graphs_is_refused() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        zerofx.dry_run(Breaks(4, 4), torch.ones(2, 4), world_size=2, executor="eager")


def test_what_cannot_be_is_refused(fake_world: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match="world_size=0: expected 1 or more"):
        zerofx.dry_run(small_gpt(), TOKENS, TOKENS, world_size=0)
    with pytest.raises(ValueError, match="unknown option 'stages'"):
        zerofx.dry_run(small_gpt(), TOKENS, TOKENS, world_size=2, stages=3)
    fake_world(2)
    mesh = dist.init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="mesh= in a dry run"):
        zerofx.dry_run(small_gpt(), TOKENS, TOKENS, world_size=2, mesh=mesh)
    model = zerofx.shard(small_gpt(), init_sync=False)
    with pytest.raises(ValueError, match="is sharded already"):
        zerofx.dry_run(model, TOKENS, TOKENS, world_size=2)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("stage", [1, 3])
def test_inductors_code_is_written_and_read_without_being_compiled(stage: int) -> None:
    record = zerofx.dry_run(two_layers(), torch.ones(2, 8), world_size=4, backend="nccl", code=True, stage=stage)
    for trace in record.traces():
        assert trace.code is not None and "def call(" in trace.code and "cpp_fused" in trace.code
        assert trace.seconds["check_code"] > 0
    assert record.backward is not None and "reduce_scatter_tensor.default(" in (record.backward.code or "")
    assert record.forward is not None
    assert (stage == 3) is ("all_gather_into_tensor.default(" in (record.forward.code or ""))


def test_what_backward_returns_no_more_is_no_output_that_inductor_lays_out_as_it_was() -> None:
    """On a GPU it follows each to where it is made, and None is made nowhere."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((None, x, None))
    gm = torch.fx.GraphModule({}, graph)
    gm.graph.output_node().meta["user_visible_output_idxs"] = [0, 1, 2]
    inductor._forget_lost_outputs(gm)
    assert gm.graph.output_node().meta["user_visible_output_idxs"] == [1]


def test_code_is_refused_where_there_is_none_to_write() -> None:
    with pytest.raises(ValueError, match="code=True with executor='eager'"):
        zerofx.dry_run(two_layers(), torch.ones(2, 8), world_size=2, executor="eager", code=True)
    with pytest.raises(ValueError, match="architecture='sm_35': expected one of sm_80, sm_90"):
        zerofx.dry_run(two_layers(), torch.ones(2, 8), world_size=2, device="cuda", architecture="sm_35")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this is PyTorch's CUDA build")
def test_a_cuda_device_is_refused_by_a_build_for_the_cpu_which_says_what_to_install() -> None:
    with pytest.raises(RuntimeError, match=r"needs PyTorch's CUDA build, with or without a GPU.*pip install torch=="):
        zerofx.dry_run(two_layers(), torch.ones(2, 8), world_size=2, device="cuda", code=True)


def llama_405b(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Llama 3.1 405B with the sizes published, or the first layers of it, on the meta device; and a batch for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(1, 8192, dtype=torch.long, device="meta")
    return model, {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("layers", [2, slow(126)])
def test_llama_405b_is_planned_and_rewritten_for_1024_ranks(layers: int) -> None:
    model, batch = llama_405b(layers)
    if layers == 126:
        assert sum(p.numel() for p in model.parameters()) == 405_853_388_800
    blocks = zerofx.Grouping(max_bytes=2**40)  # a layer is 12.7 GB: by default it would be cut into many groups
    record = zerofx.dry_run(model, call=batch, world_size=1024, executor="eager", groups=blocks)
    groups = layers + 2
    assert zerofx.plan(model, world_size=1024, groups=blocks).groups == groups
    check_schedule(record, groups)
    for trace in record.traces():
        print(f"{trace.context.phase}: {len(trace.before.graph.nodes)} nodes, {sum(trace.seconds.values()):.1f} s")


def check_schedule(record: GraphRecord, groups: int) -> None:
    """One gather, one wait and one end per group and phase; one reduction per group; the bytes that were promised."""
    forward, backward = record.forward, record.backward
    assert forward is not None and backward is not None
    kept = 0  # groups that forward leaves gathered for backward
    for trace in (backward, forward):
        graph = trace.after("discard").graph
        kinds = Counter(n.meta["zerofx"].kind for n in graph.nodes if "zerofx" in n.meta)
        names = Counter((n.meta["zerofx"].kind, n.meta["zerofx"].group) for n in edit.tagged(graph, "all_gather"))
        here = kinds["gathered"]
        assert set(names.values()) == {1}
        if trace is backward:
            kept = here
            # The embedding's weight takes no part in backward.
            assert kinds["all_gather"] == kinds["wait"] == groups - 1 - kept
            assert kinds["reduce_scatter"] == kinds["wait_grad"] == groups == len(trace.context.found.reductions)
            assert len({reduction.layout.name for reduction in trace.context.found.reductions}) == groups
        else:
            assert kinds["all_gather"] == kinds["wait"] == groups
            assert kinds["discard"] == groups - kept
        most = most_live_bytes(trace)
        assert most <= trace.context.found.gathered_bytes <= 2 * largest(trace) + (kept and largest(trace))
        assert [v for i, v in enumerate(edit.output_values(graph)) if i in trace.context.found.saved_parameters] == [
            None
        ] * len(trace.context.found.saved_parameters)


def most_live_bytes(trace: Trace) -> int:
    """The most gathered bytes at any node: what was started, less what was discarded."""
    live = most = 0
    for node in trace.after("discard").graph.nodes:
        tag = node.meta.get("zerofx")
        if tag is not None and tag.kind in ("all_gather", "gathered"):
            live += node.meta["val"].nbytes
            most = max(most, live)
        elif tag is not None and tag.kind == "discard":
            live -= node.args[0].meta["val"].nbytes
    return most


def largest(trace: Trace) -> int:
    return max(layout.nbytes for layout in trace.context.found.shards)


PASSES = str(Path(zerofx.passes.__file__).resolve().parent)


def work_of(act: Callable[[], Any]) -> Counter[str]:
    """Function of the passes -> bytecode instructions that it executes while ``act`` runs."""
    work: Counter[str] = Counter()
    ours: dict[Any, str | None] = {}

    def name_of(code: Any) -> str | None:
        if code not in ours:
            path = Path(code.co_filename).resolve()
            ours[code] = f"{path.stem}.{code.co_name}:{code.co_firstlineno}" if str(path.parent) == PASSES else None
        return ours[code]

    def trace(frame: Any, event: str, arg: Any) -> Any:
        name = name_of(frame.f_code)
        if name is None:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            work[name] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return work


@pytest.mark.slow
def test_no_function_of_the_passes_works_more_than_n_log_n_in_the_number_of_layers() -> None:
    work: dict[int, Counter[str]] = {2: Counter(), 4: Counter(), 8: Counter()}
    for layers, done in work.items():
        model = small_gpt(layers)
        record = zerofx.dry_run(model, TOKENS, TOKENS, world_size=4, executor="eager", groups=SEPARATE)
        for trace in record.traces():
            trace._initial = dataclasses.replace(trace._initial, executor="inductor")  # `lower` does more for it
            done.update(work_of(lambda trace=trace: trace.final))
    assert len(work[2]) > 40, "the passes were not watched"
    grew = {name: (work[4][name] - work[2][name], work[8][name] - work[4][name]) for name in work[8]}
    # From 4 to 8 over from 2 to 4: n is 2, n log n with so small a log (the bisection in `keep`) up to 3, n squared 4.
    assert {name: (a, b) for name, (a, b) in grew.items() if b > 3.3 * a + 100} == {}


def test_a_loop_over_the_graph_per_group_counts_as_quadratic() -> None:
    """The counter of the test above finds what it looks for."""
    model = small_gpt(4)
    graph = zerofx.dry_run(model, TOKENS, TOKENS, world_size=4, executor="eager").forward
    assert graph is not None
    nodes = len(graph.before.graph.nodes)
    once = work_of(lambda: edit.positions(graph.before.graph))
    often = work_of(lambda: [edit.positions(graph.before.graph) for _ in range(nodes)])
    assert sum(once.values()) > nodes
    assert sum(often.values()) == nodes * sum(once.values())
