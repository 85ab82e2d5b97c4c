"""`memory=`: a step stays within it, the losses are those without it, and what cannot fit is refused ahead."""

from __future__ import annotations

import functools
import re
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerofx
from tests.memory import held_over_steps
from tests.models import GPT, Block
from tests.test_activation_budget import VOCAB, TwoGraphs, data
from tests.test_offload_costs import offload
from tests.workers import Workers
from zerofx.compiler.runners import BackwardCode
from zerofx.runtime.ranks.agree import publish_choice
from zerofx.runtime.state.group import groups_of
from zerofx.simulate import price
from zerofx.simulate.files import Files

BF16 = zerofx.MixedPrecision(torch.bfloat16)
PLENTY = 10**9


def built(build: Any, memory: Any, executor: str = "eager", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    options.setdefault("groups", zerofx.Grouping(min_bytes=0))
    return zerofx.compile(build(), executor=executor, memory=memory, **options)


class Small(nn.Module):
    """Layers of which a division is tried in a fraction of a second."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = hidden + block["down"](F.gelu(block["up"](hidden)))  # type: ignore[index]
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def gpt() -> nn.Module:
    return GPT(2, 32, 4, VOCAB, 12)


def division(net: nn.Module) -> Any:
    record = next(record for record in zerofx.graphs(net) if record.forward is not None)
    assert record.forward is not None
    return record.forward.division


def needed(build: Any, *, memory: Any = 1, **options: Any) -> int:
    """The least that a refusal names."""
    with pytest.raises(Exception, match="is too small: a step needs at least") as refused:
        net = built(build, memory, **options)
        net(*data())
    assert net.training
    return int(re.search(r"at least ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))  # type: ignore[index]


def trained(
    net: nn.Module,
    micro_batches: int = 1,
    no_sync: bool = False,
    ours: bool = False,
    batch: Sequence[torch.Tensor] | None = None,
) -> Any:
    """Losses of four steps with Adam, or ``ours``; and the most bytes that all but the first held, in all."""
    make = zerofx.AdamW if ours else functools.partial(torch.optim.Adam, foreach=False)
    optimizer, found = make(net.parameters(), lr=1e-2), []
    x, y = batch or data()
    torch.manual_seed(7)

    def step() -> None:
        for i in range(micro_batches):
            if no_sync and i < micro_batches - 1:
                with zerofx.no_sync(net):
                    loss = net(x, y)
                    loss.backward()
            else:
                loss = net(x, y)
                loss.backward()
            found.append(loss.item())
            del loss

    held = held_over_steps(step, net, optimizer, [x, y])
    return found, held


def passing(net: nn.Module) -> int:
    """Buffers of a file, which are not the allocator's."""
    context = zerofx.graphs(net)[0].forward.context
    return price.passing(Files.of_module(context, [group.graph_layout for group in groups_of(net)]), context)


def within(build: Any, budgets: list[float], **options: Any) -> list[dict[str, Any]]:
    """Trains without a budget, and at some from the least (0) to all (1)."""
    how = {k: options.pop(k) for k in ("micro_batches", "no_sync") if k in options}
    ours = "offload" in options and options["offload"].optimizer is not None
    wanted, _ = trained(built(build, None, **options), **how, ours=ours)
    least = needed(build, memory=zerofx.Memory(1, **how), **options)
    whole = built(build, zerofx.Memory(PLENTY, **how), **options)
    whole(*data())
    most, found = division(whole).peak_bytes, []
    for part in budgets:
        nbytes = round(least + part * (most - least))
        net = built(build, zerofx.Memory(nbytes, **how), **options)
        losses, peak = trained(net, **how, ours=ours)
        said = division(net)
        peak += passing(net)
        found.append({"losses": losses, "wanted": wanted, "budget": nbytes, "peak": peak, "said": said})
        found[-1]["chosen"] = zerofx.graphs(net)[0].forward.activations
    return found


def check(rank: list[dict[str, Any]]) -> None:
    for at in rank:
        assert at["losses"] == pytest.approx(at["wanted"], abs=1e-6)
        assert at["peak"] <= at["said"].peak_bytes <= at["budget"]
        assert at["said"].peak_bytes == pytest.approx(at["peak"], rel=0.03)


class Convolved(Small):
    """Backward of its convolution takes more memory inside of itself than any tensor has."""

    def __init__(self) -> None:
        super().__init__(0)
        self.mix = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x).transpose(1, 2).unsqueeze(-1)
        hidden = (hidden + self.mix(hidden.repeat(1, 1, 1, 8)).mean(-1, keepdim=True)).squeeze(-1)
        return F.cross_entropy(self.head(hidden.transpose(1, 2)).flatten(0, 1), y.flatten())


class Dropped(Small):
    """Its peak is inside of its dropout, which has the mask in the dtype of the numbers for a while."""

    def __init__(self) -> None:
        super().__init__(0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.tokens(x).repeat(1, 1, 16), 0.1, training=True).unflatten(-1, (16, -1)).mean(-2)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("build", [Convolved, Dropped])
def test_what_kernels_take_inside_of_themselves_is_in_the_budget(workers2: Workers, build: Any) -> None:
    for rank in workers2.run(within, build, [1], timeout=120):
        check(rank)


def test_a_kept_gradient_goes_when_backward_has_read_it() -> None:
    kept = [torch.ones(8), torch.ones(8)]
    weak = [weakref.ref(x) for x in kept]
    group = SimpleNamespace(gradients=SimpleNamespace(take_kept=lambda slot: kept.pop()))
    gone: list[bool] = []

    def graph(inputs: list[Any]) -> list[Any]:
        inputs.clear()
        gone.extend(ref() is None for ref in weak)
        return [None]

    slots: Any = [(lambda: group, None, torch.ones(8))] * 2
    code = BackwardCode(graph, [], [], [], slots, [], [], False, False, False, None, [], lambda outputs: None)
    assert code([], 1) == [None] and gone == [True, True]


def test_no_step_holds_more_than_the_budget_from_the_least_to_all(workers2: Workers) -> None:
    for rank in workers2.run(within, Small, [0, 0.5, 1], timeout=120):
        check(rank)
        needs = [at["said"].peak_bytes for at in rank]
        assert needs == sorted(needs) and needs[0] == rank[0]["budget"] < needs[-1] == rank[-1]["budget"]
        assert [at["said"].step_s for at in rank] == sorted((at["said"].step_s for at in rank), reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "parts"), [(3, "mwg"), (2, "mg")])
def test_what_is_in_a_file_is_not_in_the_budget_and_its_buffers_are(
    workers2: Workers, tmp_path: Path, stage: int, parts: str
) -> None:
    """Two micro-batches: the second one's gradients are added to what the file has."""
    where = offload(str(tmp_path), parts)
    for rank in workers2.run(within, Small, [0, 1], timeout=250, stage=stage, offload=where, micro_batches=2):
        check(rank)


class Long(Small):
    """Activations are most of what it takes: each token's hidden state is there sixteen times."""

    def __init__(self) -> None:
        super().__init__(8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x).repeat(16, 1, 1)
        for block in self.blocks:
            hidden = hidden + block["down"](F.gelu(block["up"](hidden)))  # type: ignore[index]
        return F.cross_entropy(self.head(hidden.unflatten(0, (16, -1)).mean(0)).flatten(0, 1), y.flatten())


DISKS = {"fast": 1e12, "slow": 1e6}
"""Bytes per second: so many that nothing is computed again, and so few that only what has to leaves."""


def within_a_file(folder: str, disk: str, state: bool, budgets: list[float], **options: Any) -> list[dict[str, Any]]:
    """``state``: all of a rank's state is in the file as well."""
    rates = zerofx.Rates(5e10, 1e10, 1e9, 1e-4, disk_bytes_per_s=DISKS[disk])
    where = zerofx.Offload(activations=folder, smallest=256, rates=rates)
    if state:
        where = replace(where, optimizer=folder, weights=folder, gradients=folder)
    found = within(Long, budgets, offload=where, **options)
    without = None if where.optimizer is None else replace(where, activations=None)
    how = {k: options[k] for k in ("micro_batches", "no_sync") if k in options}
    others = {k: v for k, v in options.items() if k not in how}
    least = needed(Long, memory=zerofx.Memory(1, **how), offload=without, **others)
    for at in found:
        assert at["losses"] == at["wanted"]  # bit for bit
        at["least without"] = least
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("disk", "state"), [("fast", False), ("slow", False), ("fast", True)])
def test_activations_that_leave_for_a_file_are_taken_off(
    workers2: Workers, tmp_path: Path, disk: str, state: bool
) -> None:
    """The least is less than without a file; and where the disk is slow, what fits by recomputing stays off it."""
    for rank in workers2.run(within_a_file, str(tmp_path), disk, state, [0, 0.4, 1], timeout=250, micro_batches=2):
        check(rank)
        needs = [at["said"].peak_bytes for at in rank]
        assert needs == sorted(needs)
        gone = [at["chosen"].offloaded_bytes for at in rank]
        assert gone[0] > 0 == gone[-1]
        assert (gone[1] > 0) == (disk != "slow")
        assert rank[0]["budget"] < rank[0]["least without"]


COMBINED: dict[str, tuple[float, dict[str, Any]]] = {
    "attention": (0, {}),
    "accumulated": (0, {"micro_batches": 2}),
    "no_sync": (0.5, {"micro_batches": 3, "no_sync": True, "stage": 2}),
    "bfloat16": (0.5, {"mixed_precision": BF16, "stage": 1}),
    "stage 0": (0, {"stage": 0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINED)
def test_it_goes_with_attention_stages_accumulation_and_mixed_precision(workers2: Workers, name: str) -> None:
    part, options = COMBINED[name]
    for rank in workers2.run(within, gpt, [part], timeout=280, **options):
        check(rank)


def test_what_cannot_fit_is_refused_with_what_would_and_how_long_it_takes(fake_world: Any) -> None:
    fake_world(2)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="is too small: a step needs at least") as refused:
        built(Small, 1)(*data())
    said = str(refused.value)
    least, *offers = (int(n.replace(",", "")) for n in re.findall(r"at (?:least )?([\d,]+) ", said))
    assert offers[0] == least and offers == sorted(offers) and len(offers) > 1
    assert "a step takes about" in said and "at rest" in said


def test_generated_code_that_takes_more_is_refused(fake_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_world(2)
    monkeypatch.setattr("zerofx.compiler.division.of_code", lambda record: PLENTY)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"the code that Inductor wrote takes [0-9,]+ bytes"):
        built(lambda: nn.Linear(8, 2), PLENTY, "inductor")(torch.ones(2, 8))


@pytest.mark.slow
def test_generated_code_stays_within_the_budget(workers2: Workers) -> None:
    for rank in workers2.run(within, gpt, [0, 0.5, 1], executor="inductor", timeout=550):
        for at in rank:
            assert at["losses"] == pytest.approx(at["wanted"], abs=1e-5)
            assert at["peak"] <= at["budget"]


def test_the_division_is_shown(fake_world: Any) -> None:
    fake_world(2)
    torch._dynamo.reset()
    net = built(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), PLENTY)
    net(torch.ones(2, 8)).sum().backward()
    (record,) = zerofx.graphs(net)
    assert "of memory=1.0 GB" in str(record)
    assert division(net).peak_bytes > division(net).at_rest > 0


class Recurrent(nn.Module):
    """Dynamo leaves all of it to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0].sum()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_runs_outside_of_any_graph_is_not_counted_and_a_warning_says_so_once(fake_world: Any, stage: int) -> None:
    fake_world(2)
    torch._dynamo.reset()
    net = built(Recurrent, PLENTY, stage=stage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            net(torch.ones(3, 1, 8)).backward()
    said = [str(w.message) for w in caught if "memory=" in str(w.message)]
    assert len(said) == 1 and re.match(r"memory=1,000,000,000: 'cell\.\w+' is read outside of any compiled", said[0])
    free = built(Recurrent, None, stage=stage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        free(torch.ones(3, 1, 8)).backward()
    assert not [w for w in caught if "memory=" in str(w.message)]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_dry_run_divides_as_compile_does(fake_world: Any, stage: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

    options: dict[str, Any] = {"stage": stage, "groups": zerofx.Grouping(min_bytes=0)}
    batch = torch.ones(16, 8, device="meta")
    record = zerofx.dry_run(build(), batch, world_size=2, executor="eager", memory=PLENTY, **options)
    assert record.forward is not None
    foretold: Any = record.forward.division
    assert str(foretold).startswith(f"a step takes {foretold.peak_bytes:,} bytes of memory={PLENTY:,}\n")
    assert ("all stay gathered" in str(foretold)) is (stage == 3)
    fake_world(2)
    torch._dynamo.reset()
    net = built(build, PLENTY, **options)
    net(torch.ones(16, 8)).sum().backward()
    found = division(net)
    assert (foretold.at_rest, foretold.memory_budget, foretold.left) == (found.at_rest, found.memory_budget, found.left)
    inside = found.peak_bytes - foretold.peak_bytes  # workspaces of kernels, which a dry run does not run
    assert 0 <= inside <= 0.1 * found.peak_bytes
    with pytest.raises(Exception, match="is too small: a step needs at least"):
        zerofx.dry_run(build(), batch, world_size=2, executor="eager", memory=1, **options)


def several(build: Any, parts: list[float], **options: Any) -> list[dict[str, Any]]:
    """As `within`, for a module of several graphs: the least is what the last of them asks for."""
    ours = "offload" in options and options["offload"].optimizer is not None
    wanted, _ = trained(built(build, None, **options), ours=ours)
    whole = built(build, PLENTY, **options)
    whole(*data())
    most = max(record.forward.division.peak_bytes for record in zerofx.graphs(whole))
    least, found = needed(build, **options), []
    while True:
        try:
            built(build, least, **options)(*data())
        except Exception as refused:  # by the next graph, which is known then
            more = re.search(r"at least ([\d,]+) bytes", str(refused))
            assert more is not None and int(more[1].replace(",", "")) > least, refused
            least = int(more[1].replace(",", ""))
        else:
            break
    for part in parts:
        nbytes = round(least + part * (most - least))
        net = built(build, nbytes, **options)
        losses, peak = trained(net, ours=ours)
        peak += passing(net)
        said = [record.forward.division for record in zerofx.graphs(net) if record.forward is not None]
        found.append({"losses": losses, "wanted": wanted, "budget": nbytes, "peak": peak, "said": said})
        found[-1]["chosen"] = zerofx.graphs(net)[0].forward.activations
    return found


class Broken(Small):
    """A break in the middle of four layers."""

    def __init__(self) -> None:
        super().__init__(8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x)
        for block in self.blocks[:2]:
            hidden = hidden + block["down"](F.gelu(block["up"](hidden)))  # type: ignore[index]
        torch._dynamo.graph_break()
        for block in self.blocks[2:]:
            hidden = hidden + block["down"](F.gelu(block["up"](hidden)))  # type: ignore[index]
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["", "mwg"])
def test_several_graphs_stay_within_the_budget_together(workers2: Workers, tmp_path: Path, parts: str) -> None:
    options = {"offload": offload(str(tmp_path), parts)} if parts else {}
    for rank in workers2.run(several, Broken, [0, 1], timeout=200, **options):
        for at in rank:
            assert len(at["said"]) == 2
            assert at["losses"] == pytest.approx(at["wanted"], abs=1e-6)
            assert at["peak"] <= max(each.peak_bytes for each in at["said"]) <= at["budget"]
        least, most = rank
        assert least["peak"] < most["peak"]
        assert sum(each.left for each in least["said"]) < sum(each.left for each in most["said"])


class TwoInputs(nn.Module):
    """Each of its graphs is given a tensor of the batch that the other does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, images: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](images.mean(0))
        torch._dynamo.graph_break()
        return (self.blocks[1](hidden) * weights.mean(0)).sum()


def test_what_another_graph_is_given_is_there_as_well(fake_world: Any) -> None:
    fake_world(2)
    torch._dynamo.reset()
    net, images, weights = built(TwoInputs, PLENTY), torch.ones(1000, 4, 8), torch.ones(500, 4, 8)
    net(images, weights).backward()
    first, second = (record.forward.division for record in zerofx.graphs(net) if record.forward is not None)
    assert first is not None and second is not None
    assert first.at_rest > images.nbytes > second.at_rest > weights.nbytes  # its own inputs are among these
    assert second.elsewhere >= images.nbytes and second.peak_bytes > images.nbytes + weights.nbytes


class CastsFirst(nn.Module):
    """Its first graph reads no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        smaller = images.mean(0)
        torch._dynamo.graph_break()
        return self.block(smaller).sum()


def test_what_a_graph_without_parameters_is_given_is_there_as_well(fake_world: Any) -> None:
    fake_world(2)
    torch._dynamo.reset()
    net, images = built(CastsFirst, PLENTY), torch.ones(1000, 4, 8)
    net(images).backward()
    (said,) = (record.forward.division for record in zerofx.graphs(net) if record.forward is not None)
    assert said is not None and said.at_rest < images.nbytes <= said.elsewhere < 1.1 * images.nbytes


def test_two_graphs_of_the_same_groups_are_refused(fake_world: Any) -> None:
    fake_world(2)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="memory= and a graph that is compiled while another that reads the same"):
        built(TwoGraphs, PLENTY, groups=zerofx.Grouping(min_bytes=1 << 30))(*data())


@pytest.mark.parametrize("memory", [PLENTY, None])
def test_a_graph_that_ran_once_may_be_kept_as_no_code_writes_over_what_it_saves(fake_world: Any, memory: Any) -> None:
    fake_world(1)
    torch._dynamo.reset()
    model, (x, y) = built(Small, memory), data()
    model(x, y).backward()
    once = [p.grad.full_tensor().clone() for p in model.parameters()]
    model.zero_grad()
    loss = model(x, y)
    loss.backward(retain_graph=True)
    loss.backward()
    for p, gradient in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), 2 * gradient)


class Squashed(Small):
    """What it returns is saved for backward, too."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y).tanh()


def test_another_shape_is_divided_though_the_caller_keeps_what_was_saved(fake_world: Any) -> None:
    fake_world(2)
    torch._dynamo.reset()
    model, (x, y) = built(Squashed, PLENTY), data()
    kept = model(x, y)
    kept.backward()
    model(x[:1], y[:1]).backward()
    assert kept.isfinite()


REFUSED = {
    "memory=0: expected a number of bytes above 0": lambda: zerofx.Memory(0),
    "memory='8G': expected a number of bytes above 0": lambda: built(gpt, "8G"),
    r"Memory\(moments=-1\): expected a number from 0 on": lambda: zerofx.Memory(8, moments=-1),
    r"Memory\(micro_batches=0\): expected a whole number": lambda: zerofx.Memory(8, micro_batches=0),
    r"Memory\(no_sync=True\) with micro_batches=1: expected how many": lambda: zerofx.Memory(8, no_sync=True),
    r"Memory\(rates=1\): expected the zerofx.Rates": lambda: zerofx.Memory(8, rates=1),
    "memory= with memory_budget=5: memory= divides itself": lambda: built(gpt, 8, memory_budget=5),
    "memory= with leaf_modules=: what these take": lambda: built(gpt, 8, leaf_modules=[Block]),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_no_budget_for_all_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        REFUSED[said]()


class Store(dict):  # type: ignore[type-arg]
    """As much of a store as is used."""

    set = dict.__setitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()


def test_ranks_that_divide_differently_are_told() -> None:
    store: Any = Store()
    publish_choice(store, "graph", "one", 0, 2)
    publish_choice(store, "other graph", "two", 1, 2)
    with pytest.raises(zerofx.OutOfStepError, match="ranks 1 and 0 divided memory= differently for one graph"):
        publish_choice(store, "graph", "two", 1, 2)
