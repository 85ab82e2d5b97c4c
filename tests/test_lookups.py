"""Of tables that are only looked up rows travel (`lookups=True`): same training, fewer bytes, batches of one shape."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.counting import count_collectives
from tests.memory import allocated_peak
from tests.slow import quick_if, slow
from tests.workers import Workers
from zerofx.passes import edit
from zerofx.runtime.ranks.agree import OutOfStepError
from zerofx.runtime.state.group import groups_of

VOCAB, DIM, LENGTH = 4099, 12, 5
LOW = zerofx.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
EACH = zerofx.Grouping(blocks=(nn.Embedding, nn.Linear), min_bytes=0)


class Net(nn.Module):
    """A table that is looked up, with a row for padding; one that is also read; layers between them."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM, padding_idx=3)
        self.tied = nn.Embedding(11, DIM)
        self.body, self.checkpointed = nn.Linear(DIM, DIM), checkpointed

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(self.words(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)
        logits = (h + self.tied(x % 11)) @ self.tied.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), (x % 11).flatten())


def net(checkpointed: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(checkpointed)


def batches(steps: int = 3, rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    drawn = torch.randint(VOCAB, (steps, 2, rows, LENGTH), generator=generator)
    drawn[:, :, 0, :2] = 3  # the padding's
    return drawn


def train(model: nn.Module, in_backward: bool = False) -> list[torch.Tensor]:
    """Losses, and whole weights, of three steps of two micro-batches, with a look at the loss between two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses = []
    for first, second in batches():
        with zerofx.no_sync(model):
            model(first).backward()
        loss = model(second)
        if in_backward:
            with zerofx.step_in_backward(optimizer):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.detach(), model(second)]
    return [*losses, *(p.full_tensor() for p in model.parameters())]  # type: ignore[operator]


def tables_that_travel(model: nn.Module) -> tuple[set[str], set[str]]:
    """The groups of which rows are exchanged, and those that are gathered, in a forward."""
    record = next(record for record in zerofx.graphs(model) if record.forward is not None)
    graph = record.forward.before_lower().graph  # type: ignore[union-attr]
    exchanged, gathered = (edit.tagged(graph, kind) for kind in ("answer", "all_gather"))
    return {n.meta["zerofx"].group for n in exchanged}, {n.meta["zerofx"].group for n in gathered}


def train_both_ways(
    executor: str, precision: zerofx.MixedPrecision | None, in_backward: bool, checkpointed: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    options: dict[str, Any] = {"executor": executor, "mixed_precision": precision, "groups": EACH}
    wanted = train(zerofx.compile(net(checkpointed), **options), in_backward)
    model = zerofx.compile(net(checkpointed), lookups=True, **options)
    got = train(model, in_backward)
    assert tables_that_travel(model) == ({"words"}, {"tied", "body"})
    return list(zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("world_size", "executor", "precision", "in_backward", "checkpointed"),
    [
        (2, "eager", None, False, False),
        slow(3, "eager", None, False, False),
        slow(2, "inductor", None, False, False),
        slow(2, "eager", LOW, False, False),
        slow(2, "inductor", LOW, False, False),
        slow(2, "eager", None, True, False),
        slow(2, "inductor", None, True, False),
        slow(2, "eager", None, False, True),
        slow(2, "inductor", None, False, True),
        slow(2, "regional", None, False, False),
        slow(2, "regional", None, True, True),
    ],
)
def test_it_trains_as_with_the_table_gathered(
    make_workers, world_size: int, executor: str, precision: Any, in_backward: bool, checkpointed: bool
) -> None:
    case = executor, precision, in_backward, checkpointed
    for pairs in make_workers(world_size).run(train_both_ways, *case, timeout=200):
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted, **({"rtol": 0.02, "atol": 0.02} if precision else {}))


def bytes_of_a_step(executor: str) -> list[dict[str, Any]]:
    """What reaches the process group in a step, and what is predicted of it: with the table, and with rows."""
    found = []
    for lookups in (False, True):
        model = zerofx.compile(net(), executor=executor, lookups=lookups, groups=EACH)

        def step(model: nn.Module = model) -> None:
            model(batches()[0, 0]).backward()

        step()
        model.zero_grad()
        with count_collectives() as log:
            peak = allocated_peak(step)
        told = zerofx.predict(model, zerofx.Rates(1e9, 1e9, 1e9, 0.0))
        starts = Counter(o.nbytes for phase in told.phases for o in phase.operations if o.kind == "start")
        assert starts == Counter(event.bytes for event in log.events if event.bytes)
        assert {o.group for phase in told.phases for o in phase.operations if o.kind == "start"} >= {"words"}
        (table,) = (group.gathered_nbytes for group in groups_of(model) if group.layout.name == "words")
        found.append(
            {
                "table": table,
                "wire": log.total_bytes,
                "predicted": told.wire_bytes,
                "peak": peak,
                "told": told.peak_bytes,
            }
        )
    return found


@quick_if(lambda executor: executor == "eager")
@pytest.mark.parametrize("executor", ["eager", "inductor", "regional"])
def test_rows_and_indices_are_what_is_sent_instead_of_the_table_as_predicted(workers2: Workers, executor: str) -> None:
    tokens = 2 * LENGTH
    for gathered, exchanged in workers2.run(bytes_of_a_step, executor):
        assert gathered["wire"] == gathered["predicted"] and exchanged["wire"] == exchanged["predicted"]
        saved = gathered["wire"] - exchanged["wire"]
        assert saved == gathered["table"] - 2 * tokens * (4 * DIM + 8)  # half of each forward, and half backward
        assert exchanged["told"] == pytest.approx(exchanged["peak"], rel=0.03)
        assert exchanged["peak"] < gathered["peak"]


def other_shapes() -> tuple[list[float], list[set[str]]]:
    """Losses for batches of one shape, of another, and of the first again; what was exchanged in each graph."""
    model, plain = (zerofx.compile(net(), executor="eager", lookups=on, groups=EACH) for on in (True, False))
    found = []
    for rows in (2, 3, 2, 4):
        losses = [m(batches(rows=rows)[0, 0]) for m in (model, plain)]
        for loss in losses:
            loss.backward()
        found.append(abs(losses[0] - losses[1]).item())
    graphs = [record.forward.before_lower().graph for record in zerofx.graphs(model)]  # type: ignore[union-attr]
    return found, [{n.meta["zerofx"].group for n in edit.tagged(g, "answer")} for g in graphs]


def test_where_a_size_became_a_symbol_the_table_is_gathered(workers2: Workers) -> None:
    for differences, exchanged in workers2.run(other_shapes):
        assert differences == [0.0] * 4
        assert exchanged == [{"words"}, set()]


def with_a_table_too_small(executor: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The gradient of an embedding stays whole in the graph, and nothing is done with it."""
    both = []
    for lookups in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
        zerofx.compile(model, executor=executor, lookups=lookups, groups=EACH)
        model(torch.arange(8) + dist.get_rank()).square().sum().backward()
        assert tables_that_travel(model)[0] == set()
        both.append([p.grad.full_tensor() for p in model.parameters()])  # type: ignore[union-attr]
    return list(zip(*both, strict=True))


@quick_if(lambda executor: executor == "eager")
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_table_of_fewer_bytes_than_its_rows_is_gathered(workers2: Workers, executor: str) -> None:
    for pairs in workers2.run(with_a_table_too_small, executor):
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted)


def uneven() -> str:
    """What a rank is told whose batch has another shape than the other's."""
    model = zerofx.compile(net(), executor="eager", lookups=True, groups=EACH, timeout=20)
    with contextlib.suppress(RuntimeError):  # not of this call: of the one that finds out
        try:
            model(batches(rows=2 + dist.get_rank())[0, 0]).backward()
        except OutOfStepError as error:
            return str(error)
    return ""


def test_ranks_with_batches_of_two_shapes_are_told(make_workers) -> None:
    for said in make_workers(2).run(uneven, timeout=100):
        assert "words" in said and "all-gather" in said


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 0}, {"stage": 3, "one_copy": True}])
def test_where_no_table_is_gathered_it_is_refused(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match="lookups=True with"):
        zerofx.dry_run(model, torch.zeros(2, 3, dtype=torch.int64), world_size=2, lookups=True, **options)


def test_what_is_asked_answered_and_given_is_listed_and_explained() -> None:
    with torch.device("meta"):
        model = Net()
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    record = zerofx.dry_run(model, ids, world_size=4, lookups=True, groups=EACH)
    forward, backward = record.forward, record.backward
    assert forward is not None and backward is not None
    rows = 4 * 2 * LENGTH * DIM * 4  # bytes, of all ranks
    assert f"1 exchanges of rows: {rows / 1e3:.1f} kB" in str(forward)
    assert f"1 gathers of their gradients: {rows / 1e3:.1f} kB" in str(backward)
    assert "words.weight" in forward.explain("answer words") and "ahead of other gathers" in forward.explain(
        "answer words"
    )
    assert "which rows this rank looks up" in forward.explain("ask words")
    assert "whose gradients it gives" in backward.explain("ask words")
    assert "words.weight" in backward.explain("give words") and "at the end" in backward.explain("given words")
