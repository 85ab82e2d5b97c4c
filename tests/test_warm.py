"""Warm starts: what an earlier start left in PyTorch's cache is what would be compiled now, or is not served."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
from torch import nn

import zerofx
from tests.agreement import assert_ranks_agree
from tests.slow import slow
from tests.workers import Workers
from zerofx.compiler import division, warm
from zerofx.compiler.options import Options
from zerofx.compiler.pair import Pair
from zerofx.runtime.state.footprint import Demand, Footprint

BF16 = zerofx.MixedPrecision(torch.bfloat16, torch.float32)
FOLDER = "TORCHINDUCTOR_CACHE_DIR"


class Net(nn.Module):
    """Two equal blocks, dropout, and a buffer that forward writes to."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh, width: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.dropout, self.activation = nn.Dropout(0.25), activation
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = self.dropout(self.activation(block(x)))
        return x.square().mean()


@contextlib.contextmanager
def cache_in(folder: str | Path) -> Iterator[None]:
    """PyTorch's caches are on, and in ``folder``."""
    os.environ[FOLDER] = str(folder)
    try:
        with torch._functorch.config.patch(enable_autograd_cache=True):
            yield
    finally:
        del os.environ[FOLDER]


def counted() -> tuple[int, int]:
    """Of AOTAutograd's cache since the last start: hits, and misses."""
    from torch._dynamo.utils import counters

    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"]


def begin(build: Callable[[], nn.Module] = Net, plain: bool = False, **options: Any) -> Any:
    """A module as in a process that has just started."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net = build()
    if plain:
        net.compile()
        return net
    return zerofx.compile(net, **{"groups": zerofx.Grouping(min_bytes=0), "executor": "eager", **options})


def trained(net: Any, *, no_sync: bool = False, inside: bool = False, steps: int = 2) -> list[float]:
    """Losses of steps, and of an evaluation. ``no_sync``: a micro-batch more in each step but the first."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        if no_sync and step:
            with zerofx.no_sync(net):
                net(x).backward()
        loss = net(x)
        with zerofx.step_in_backward(optimizer) if inside else contextlib.nullcontext():
            loss.backward()
        if not inside:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(net.eval()(x).item())
    return losses


def cold_and_warm(folder: str, options: dict[str, Any], how: dict[str, Any]) -> list[Any]:
    """Of a start without a cache, of one that fills it, and of one that it serves: losses, weights and counts."""
    found = []
    for i in range(3):
        with cache_in(folder) if i else contextlib.nullcontext():
            net = begin(**options)
            losses = trained(net, **how)
            counts = counted()
            assert_ranks_agree(net)
            with zerofx.unsharded(net):
                weights = [p.detach().clone() for p in net.parameters()]
            text = "\n".join([str(zerofx.graphs(net)[0]), zerofx.graphs(net)[0].code])
            for record in zerofx.graphs(net):
                zerofx.verify(record)
        found.append((losses, weights, net.calls.item(), text, counts))
    return found


EXECUTORS = ("eager", "inductor", "regional")
EVERY = [{"stage": stage, "executor": executor} for executor in EXECUTORS for stage in (3, 0, 1, 2)]
QUICK = [{"stage": 3, "executor": "eager"}, {"stage": 3, "executor": "inductor"}, {"stage": 0, "executor": "eager"}]
MORE: dict[str, dict[str, Any]] = {
    "bfloat16": {"mixed_precision": BF16},
    "wire": {"wire": zerofx.Wire(weights="int8", gradients="int8")},
    "all gathered": {"memory_budget": float("inf")},
    "one copy": {"one_copy": True},
    "memory": {"memory": zerofx.Memory(1 << 20, micro_batches=2)},
    "activation_budget": {"activation_budget": 0.4},
    "activation_budget in Inductor": {"activation_budget": 0.4, "executor": "inductor"},
}


def check(workers: Workers, folder: Path, options: dict[str, Any], **how: Any) -> None:
    for rank in workers.run(cold_and_warm, str(folder), options, how, timeout=280):
        (wanted, weights, calls, text, none), *others = rank
        assert none == (0, 0)
        for losses, values, times, said, _ in others:
            assert losses == wanted and times == calls
            assert all(torch.equal(a, b) for a, b in zip(values, weights, strict=True))
            assert said == text, "graphs, or code, of a warm start read otherwise"
        (_, _, _, _, first), (_, _, _, _, second) = others
        # Training and evaluation are two graphs. What zerofx itself has compiled for its wire counts, too.
        assert first[1] >= 2 and second[0] >= 2 and second[1] == 0


@pytest.mark.parametrize(
    "options", [x if x in QUICK else slow(x) for x in EVERY], ids=lambda x: "-".join(map(str, x.values()))
)
def test_a_second_start_is_served_and_trains_bit_by_bit_as_the_first(
    workers2: Workers, tmp_path: Path, options: dict[str, Any]
) -> None:
    check(workers2, tmp_path, options)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_so_it_does_with_options(workers2: Workers, tmp_path: Path, name: str) -> None:
    check(workers2, tmp_path, MORE[name])


@pytest.mark.parametrize("executor", ["eager", slow("inductor")])
@pytest.mark.parametrize("how", [{"no_sync": True, "steps": 3}, slow({"inside": True})], ids=["no_sync", "inside"])
def test_so_it_does_where_backward_treats_gradients_in_another_way(
    workers2: Workers, tmp_path: Path, executor: str, how: dict[str, Any]
) -> None:
    check(workers2, tmp_path, {"executor": executor}, **how)


def ways_of_backward(folder: str) -> list[list[float]]:
    """A start with `step_in_backward` after one without, and the other way round; and both without a cache."""
    found = []
    for name, inside in (("a", False), ("a", True), ("b", True), ("b", False), ("", True), ("", False)):
        with cache_in(os.path.join(folder, name)) if name else contextlib.nullcontext():
            found.append(trained(begin(), inside=inside))
            hits, _ = counted()
            assert hits == (2 if name and len(found) in (2, 4) else 0)
    return found


def test_a_backward_that_updates_is_not_served_to_one_that_does_not_nor_the_reverse(
    workers2: Workers, tmp_path: Path
) -> None:
    for plain, inside, inside_2, plain_2, wanted_inside, wanted in workers2.run(ways_of_backward, str(tmp_path)):
        assert plain == plain_2 == wanted
        assert inside == inside_2 == wanted_inside


def started(folder: Path, build: Callable[[], nn.Module] = Net, **options: Any) -> tuple[int, int]:
    """Hits and misses of a forward and a backward in a world that pretends."""
    with cache_in(folder):
        net = begin(build, **options)
        net(torch.ones(4, 24)).backward()
        return counted()


OTHERS: dict[str, dict[str, Any]] = {
    "stage": {"stage": 2},
    "mixed_precision": {"mixed_precision": BF16},
    "param_dtype": {"mixed_precision": zerofx.MixedPrecision(torch.bfloat16, torch.bfloat16)},
    "wire": {"wire": zerofx.Wire(weights="int8")},
    "memory_budget": {"memory_budget": float("inf")},
    "groups": {"groups": zerofx.Grouping(min_bytes=1 << 20)},
    "lookups": {"lookups": True},
    "executor": {"executor": "inductor"},
    "regions": {"executor": "regional"},
    "activation": {"build": lambda: Net(torch.sigmoid)},
    "memory": {"memory": 1 << 30},
    "activation_budget": {"activation_budget": 0.5},
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_thing_that_decides_a_rewrite_is_in_the_key(fake_world: Any, tmp_path: Path, name: str) -> None:
    fake_world(2)
    assert started(tmp_path) == (0, 1)
    assert started(tmp_path) == (1, 0)
    hits, misses = started(tmp_path, **OTHERS[name])
    assert not hits and misses, f"another {name} was served what was compiled without it"
    assert started(tmp_path) == (1, 0)


def test_the_world_and_the_rank_are_in_the_key(fake_world: Any, tmp_path: Path) -> None:
    for world, rank in ((2, 0), (4, 0), (4, 1)):
        fake_world(world, rank)
        assert started(tmp_path) == (0, 1)


class Unread(Net):
    """One of its layers is read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(24, 24)


@pytest.mark.parametrize("stage", [0, 3])
def test_whether_a_parameter_that_no_graph_reads_is_trained_is_in_the_key(
    fake_world: Any, tmp_path: Path, stage: int
) -> None:
    fake_world(2)
    for freeze, expected in ((False, (0, 1)), (True, (0, 1)), (False, (1, 0))):
        with cache_in(tmp_path):
            net = begin(Unread, stage=stage, groups=zerofx.Grouping(min_bytes=1 << 20))
            net.spare.weight.requires_grad_(not freeze)
            net(torch.ones(4, 24)).backward()
            assert counted() == expected


def test_zerofx_itself_is_in_the_key(fake_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_world(2)
    assert started(tmp_path) == (0, 1)
    monkeypatch.setattr(warm, "source_digest", lambda: "another version")
    assert started(tmp_path) == (0, 1)


def test_every_file_of_zerofx_is_in_the_key_passes_and_kernels_too() -> None:
    found = {str(path.relative_to(warm.ROOT)) for path in warm.source_files()}
    assert {"passes/gather.py", "passes/proof/code/rules.py", "kernels/adamw.py", "features/wire/proof.py"} <= found


BY_ITSELF = {"stage", "executor", "memory_budget", "lookups", "one_copy", "buckets", "activation_budget", "memory"}
BY_WHAT_FOLLOWS = {
    "groups",
    "leaf_modules",
    "mesh",
    "sharding",
    "reduce_group",
    "device",
    "mixed_precision",
    "wire",
    "offload",
    "ignored",  # which inputs are parameters that are sharded
}
NEVER_CACHED = {"partition_activations", "passes", "uneven"}
DECIDES_NO_REWRITE = {"init_sync", "init", "timeout", "progress", "cache"}


def test_of_every_option_it_is_known_how_the_key_has_it() -> None:
    known = BY_ITSELF | BY_WHAT_FOLLOWS | NEVER_CACHED | DECIDES_NO_REWRITE
    assert {field.name for field in dataclasses.fields(Options)} == known, (
        "say in `tag_of` how a new option is in the key"
    )


def test_plain_torch_compile_gets_nothing_of_ours_and_gives_nothing(fake_world: Any, tmp_path: Path) -> None:
    fake_world(2)
    assert started(tmp_path, executor="inductor") == (0, 1)
    with cache_in(tmp_path):
        for expected in ((0, 1), (1, 0)):
            net = begin(plain=True)
            net(torch.ones(4, 24)).backward()
            assert counted() == expected
    assert started(tmp_path, executor="inductor", stage=0) == (0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"offload": "activations"},
        {"passes": [lambda gm, ctx: None]},
    ],
    ids=lambda x: next(iter(x)),
)
def test_what_follows_from_other_ranks_or_from_unknown_source_is_always_compiled(
    fake_world: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    fake_world(2)
    if "offload" in options:
        options = {"offload": zerofx.Offload(activations=tmp_path / "activations")}
    for _ in range(2):
        assert started(tmp_path, **options) == (0, 0)


@pytest.mark.parametrize("damage", [lambda x: x[: len(x) // 2], lambda x: b"", lambda x: x[:-9] + b"no pickle"])
def test_a_damaged_entry_is_compiled_anew(fake_world: Any, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    fake_world(2)
    assert started(tmp_path) == (0, 1)
    entries = [path for path in (tmp_path / "aotautograd").rglob("*") if path.is_file()]
    assert entries
    for path in entries:
        path.write_bytes(damage(path.read_bytes()))
    assert started(tmp_path) == (0, 1)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_graph_beside_others_that_hold_more_than_when_it_was_written_is_compiled_anew(
    fake_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    fake_world(2)
    started(tmp_path)
    theirs = Pair.elsewhere

    def more(self: Pair, asked: Any) -> Any:
        found = theirs(self, asked)
        return found._replace(held=found.held + 1000) if asked == phase else found

    monkeypatch.setattr(Pair, "elsewhere", more)
    with cache_in(tmp_path):
        net = begin()
        net(torch.ones(4, 24)).backward()
        (record,) = zerofx.graphs(net)
        trace = getattr(record, phase)
        assert trace.context.elsewhere.held == 1000


def sizes(folder: str) -> list[Any]:
    """Losses of batches of three sizes, which Dynamo makes two graphs of; cold, then warm."""
    found = []
    for _ in range(2):
        with cache_in(folder):
            net = begin()
            losses = []
            for rows in (4, 6, 9):
                loss = net(torch.ones(rows, 24))
                loss.backward()
                losses.append(loss.item())
            found.append((losses, *counted()))
    return found


def test_sizes_that_are_symbols_are_served_too(workers2: Workers, tmp_path: Path) -> None:
    for cold, again in workers2.run(sizes, str(tmp_path)):
        assert cold[0] == again[0]
        assert cold[1:] == (0, 2) and again[1:] == (2, 0)


def retained(folder: str, executor: str) -> list[float]:
    """Gradients of a backward that keeps its graph, and of another through it: cold without, warm with."""
    found = []
    for keeps in (False, True):
        with cache_in(folder):
            net = begin(lambda: Net(torch.nn.functional.gelu), executor=executor)
            loss = net.eval()(torch.ones(4, 24))
            loss.backward(retain_graph=keeps)
            if keeps:
                net.zero_grad()
                loss.backward()
            found.append(next(net.parameters()).grad.sum().item())
            assert counted()[0] == keeps
    return found


@pytest.mark.parametrize("executor", ["eager", slow("inductor")])
def test_a_graph_is_kept_though_what_was_written_frees_it(workers2: Workers, tmp_path: Path, executor: str) -> None:
    for once, again in workers2.run(retained, str(tmp_path), executor):
        assert once == again


def effects(folder: str) -> list[Any]:
    """A loss, a gradient and hits of a model that solves, which may fail: its graphs have a token. Cold, then warm."""
    found: list[Any] = []
    for _ in range(2):
        with cache_in(folder):
            net = begin(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley"))
            loss = net(torch.ones(4, 6)).square().mean()
            loss.backward()
            found.append((loss.item(), next(net.parameters()).grad.full_tensor().tolist(), counted()))
    return found


def test_graphs_with_tokens_of_effects_are_served(workers2: Workers, tmp_path: Path) -> None:
    for cold, again in workers2.run(effects, str(tmp_path)):
        assert cold[:2] == again[:2]
        assert cold[2] == (0, 1) and again[2] == (1, 0)


class Wide(Net):
    """Saves much, so that there is something to divide."""

    def __init__(self) -> None:
        super().__init__(torch.tanh, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.expand(64, 4, 24).reshape(256, 24))


TIGHT = {"eager": 150_000, "inductor": 140_000, "regional": 140_000}
"""Bytes for `Wide` that hold a step, and not one that saves all."""


def divided(folder: str, memory: Any, executor: str) -> list[Any]:
    """Of two starts: losses, what was decided, how often divisions were tried; the budgets that others are told."""
    found = []
    for _ in range(2):
        tried: list[int] = []
        theirs = division.Trials.choose

        def choose(self: Any, theirs: Any = theirs, tried: list[int] = tried) -> Any:
            tried.append(1)
            return theirs(self)

        with cache_in(folder), mock.patch.object(division.Trials, "choose", choose):
            net = begin(Wide, memory=memory, executor=executor)
            losses = trained(net)
            searches, served = len(tried), counted()
            assert_ranks_agree(net)
            footprint = net.blocks[0].weight._group.family.footprint
            told = (footprint._taken, footprint._saved, footprint._budgets)
            record = next(r for r in zerofx.graphs(net) if r.forward is not None)
            found.append((losses, record.forward.division, record.forward.activations, told, searches, served))
            assert len(tried) == searches, "to be read it was divided anew"
    return found


@pytest.mark.parametrize("executor", ["eager", slow("inductor"), slow("regional")])
def test_a_second_start_takes_the_division_of_the_first_and_tries_none(
    workers2: Workers, tmp_path: Path, executor: str
) -> None:
    for cold, again in workers2.run(divided, str(tmp_path), TIGHT[executor], executor, timeout=280):
        assert cold[1].tried > 1 and cold[2].saved_bytes < cold[2].whole_bytes, "nothing was divided"
        assert cold[:4] == again[:4]
        assert (cold[4], again[4]) == (1, 0)
        assert cold[5][0] == 0 and again[5][1] == 0 and again[5][0] >= 2


OF_BUDGETS: dict[str, tuple[Any, Any]] = {
    "bytes": (1 << 30, 1 << 29),
    "moments": (zerofx.Memory(1 << 30), zerofx.Memory(1 << 30, moments=1)),
    "rates": (zerofx.Memory(1 << 30), zerofx.Memory(1 << 30, rates=zerofx.Rates(1e9, 1e9, 1e9))),
}


@pytest.mark.parametrize("name", OF_BUDGETS)
def test_each_thing_that_decides_a_division_is_in_the_key(fake_world: Any, tmp_path: Path, name: str) -> None:
    fake_world(2)
    one, other = OF_BUDGETS[name]
    assert started(tmp_path, memory=one) == (0, 1)
    assert started(tmp_path, memory=other) == (0, 1)
    assert started(tmp_path, memory=one) == (1, 0)


def test_what_other_graphs_take_and_the_threads_of_kernels_are_in_the_key_of_a_division(
    fake_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)
    assert started(tmp_path, memory=1 << 30) == (0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Footprint, "taken_elsewhere", lambda self, names: [Demand(100, 0, 0)])
        assert started(tmp_path, memory=1 << 30) == (0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert started(tmp_path, memory=1 << 30) == (0, 1)
    assert started(tmp_path, memory=1 << 30) == (1, 0)


def longer(folder: str) -> list[Any]:
    """A budget with sizes that are symbols: a start that meets short batches, and one that meets longer ones, too."""
    found = []
    for batches in ((4, 6), (4, 6, 9, 7)):
        with cache_in(folder):
            net = begin(memory=1 << 30)
            for rows in batches:
                net(torch.ones(rows, 24)).backward()
            found.append(counted())
    return found


def test_a_division_for_shorter_batches_is_not_served_to_longer_ones(workers2: Workers, tmp_path: Path) -> None:
    for short, long in workers2.run(longer, str(tmp_path)):
        assert short == (0, 2) and long == (2, 1)
