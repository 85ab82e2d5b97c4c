"""zerofx.graphs: what was compiled, before and after each pass, and as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import zerofx
from tests.models import GPT
from tests.slow import quick_if
from zerofx.compiler import printing
from zerofx.passes import pipeline


def compiled(executor: str = "eager") -> GPT:
    torch.manual_seed(0)
    model = GPT(layers=2, dim=32, heads=2, vocab=64, length=16)
    zerofx.compile(model, executor=executor, groups=zerofx.Grouping(min_bytes=0))
    x = torch.randint(64, (2, 16))
    model(x, x).backward()
    return model


def test_a_graph_can_be_seen_before_and_after_every_pass(fake_world) -> None:
    fake_world(4)
    (record,) = zerofx.graphs(compiled())
    for trace in (record.forward, record.backward):
        assert trace is not None
        before = trace.before.code
        assert "shard" not in before and "c10d" not in before
        for pass_ in trace.passes:
            trace.after(pass_.__name__).graph.lint()
        assert trace.before.code == before, "looking changed the record"
        assert "zerofx.unshard" in trace.after("gather").code
        assert "all_gather_into_tensor" not in trace.after("reduce").code
        assert "all_gather_into_tensor" in trace.after("group").code
        assert "discard" in trace.after("discard").code
        assert trace.after("lower").code == trace.final.code
    assert "zerofx.reduce_grad" in record.backward.after("reduce").code
    with pytest.raises(KeyError, match="no pass 'fuse'"):
        record.forward.after("fuse")


def test_a_record_says_how_much_each_pass_did(fake_world) -> None:
    fake_world(4)
    model = compiled()
    (record,) = zerofx.graphs(model)
    assert list(record.forward.edits) == [pass_.__name__ for pass_ in pipeline(3, ctx=record.forward.context)]
    parameters = len(list(model.parameters()))
    assert record.forward.edits["gather"] == record.forward.edits["group"] == parameters
    assert record.backward.edits["reduce"] == parameters
    assert (record.forward.edits["reduce"], record.forward.edits["keep"], record.forward.edits["discard"]) == (0, 1, 3)
    assert record.forward.context.found.gathered_bytes > 0


def test_text_shows_groups_in_order_with_bytes_and_the_users_lines(fake_world) -> None:
    fake_world(4)
    (record,) = zerofx.graphs(compiled())
    text = str(record)
    forward, backward = text.split("backward:")
    assert re.search(
        r"^forward: 4 all-gathers: [\d.]+ kB, at most [\d.]+ kB at once; [\d.]+ kB stay gathered$", forward, re.M
    )
    assert re.search(r"^ 2 all-gathers: .* at once; [\d.]+ kB came gathered; ", backward)
    assert re.search(r"4 reduce-scatters: [\d.]+ kB$", backward.splitlines()[0])
    events = re.findall(r"^  (start|wait|discard|reduce) +([\w.]+)", forward, re.M)
    starts = [("start", group) for group in ("tokens", "blocks.0", "blocks.1", "norm")]  # the last is small
    assert events[:5] == [*starts, ("wait", "tokens")]
    assert events.index(("discard", "blocks.0")) < events.index(("wait", "blocks.1"))
    assert [group for verb, group in re.findall(r"^  (reduce) +([\w.]+)", backward, re.M)] == [
        "norm",
        "blocks.1",
        "blocks.0",
        "tokens",
    ]
    assert re.search(r"models\.py:\d+ +.*addmm.* x = x \+ self\.proj", forward)
    assert str(Path(zerofx.__file__).parent) not in text
    for trace in (record.forward, record.backward):
        for node in trace.after("lower").graph.nodes:
            assert "zerofx/runtime/state/parameter.py" not in (node.meta.get("stack_trace") or "")


def test_each_shape_and_mode_has_a_record(fake_world) -> None:
    fake_world(2)
    model = compiled()
    with torch.no_grad():
        model(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long))
    training, inference = zerofx.graphs(model)
    assert [trace.context.phase for trace in training.traces()] == ["forward", "backward"]
    assert [trace.context.phase for trace in inference.traces()] == ["inference"]


def test_a_module_that_is_not_sharded_has_no_graphs() -> None:
    with pytest.raises(ValueError, match=r"Linear is not sharded: call zerofx\.compile"):
        zerofx.graphs(nn.Linear(2, 2))


def test_bytes_are_printed_in_the_largest_unit() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 12_345_678: "12.3 MB", 7.5e9: "7.5 GB", 2e12: "2.0 TB"}
    for n, text in sizes.items():
        assert printing.format_bytes(n) == text


@quick_if(lambda stage: stage == 0)
@pytest.mark.parametrize("stage", [0, 3])
def test_layers_that_look_alike_are_printed_once_and_no_line_is_wide(stage: int) -> None:
    model, x = GPT(layers=12, dim=16, heads=2, vocab=64, length=16), torch.zeros(2, 16, dtype=torch.long)
    record = zerofx.dry_run(
        model, x, x, world_size=4, executor="eager", stage=stage, groups=zerofx.Grouping(min_bytes=0)
    )
    for trace in record.traces():
        short, long = str(trace).splitlines(), printing.format_trace(trace, fold=False).splitlines()
        assert max(map(len, short[1:])) <= printing.WIDTH and len(short) < len(long)
        (i,) = (i for i, line in enumerate(short) if line.startswith("  ... "))
        alike = re.search(r"(\d+) more like this one", short[i])
        assert alike is not None
        # What is left out are whole layers, and what is there is there as it was.
        missing, rest = len(long) - len(short) + 1, len(short) - i - 1
        assert short[:i] == long[:i] and short[i + 1 :] == long[len(long) - rest :]
        assert missing % int(alike[1]) == 0
        size = missing // int(alike[1])
        layers = [long[i + k * size : i + (k + 1) * size] for k in range(-1, int(alike[1]))]
        assert len({re.sub(r"blocks\.\d+ *", "", "\n".join(layer)) for layer in layers}) == 1
        named = re.findall(r"blocks\.(\d+)", short[i])
        assert len(named) == (0 if (stage, trace.context.phase) == (0, "forward") else 2)
        if named:
            assert abs(int(named[0]) - int(named[1])) == int(alike[1]) - 1


def test_a_layer_unlike_its_neighbours_is_not_folded() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(13))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                x = layer(x).sin() if i != 5 else layer(x).cos()
            return x.sum()

    groups = zerofx.Grouping(min_bytes=0)
    record = zerofx.dry_run(Odd(), torch.ones(2, 8), world_size=4, executor="eager", groups=groups)
    forward = str(record.forward)
    assert "  wait     layers.5\n" in forward and forward.count("more like this one") == 2
