"""One call that decides: what it chooses fits and is alike everywhere, and what is given is kept."""

from __future__ import annotations

import copy
import html
import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerofx
from tests.integrations.launched import as_torchrun_would
from tests.slow import quick_if
from tests.test_memory import PLENTY, Small, built, data, division, trained
from tests.workers import Workers
from zerofx.compiler.choices import Division, Offer
from zerofx.inspect.choose.alternatives import Question
from zerofx.inspect.choose.choice import Alternative, best_first
from zerofx.inspect.predict.kept import keep_rates, kept_rates
from zerofx.integrations.states import checked_options
from zerofx.model.sharding import SCHEMES
from zerofx.runtime.state.group import groups_of

RATES = zerofx.Rates(5e10, 1e10, 1e9, 1e-4, disk_bytes_per_s=1e9)
HOW: dict[str, Any] = {"executor": "eager", "groups": zerofx.Grouping(min_bytes=0)}


STATE = "optimizer and gradients and weights"
EVERYTHING = STATE + " and activations"


def small(nbytes: int | str, net: nn.Module | None = None, **options: Any) -> zerofx.Choice:
    """What is chosen for a small model on two ranks."""
    torch.manual_seed(0)
    x, y = data()
    return zerofx.choose(net or Small(1), x, y, world_size=2, memory=nbytes, **{"rates": RATES, **HOW, **options})


def tight(stage: int, part: float) -> int:
    """Bytes between the least and all that a stage can use."""
    x, y = data()
    with pytest.raises(Exception, match="is too small: a step needs at least") as refused:
        zerofx.dry_run(Small(1), x, y, world_size=2, stage=stage, memory=1, probe=True, **HOW)
    least = int(re.search(r"at least ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))  # type: ignore[index]
    return round(least + part * (small(PLENTY, stage=stage).division.peak_bytes - least))


def test_with_room_for_all_nothing_is_computed_again_and_the_screen_says_so() -> None:
    choice = small("1GB")
    assert choice.chosen.keeps_all and choice.options["memory"].nbytes == 10**9
    said = str(choice)
    assert said.startswith(f"{choice.chosen.name} for Small on 2 ranks within 1.0 GB\n")
    assert "all that forward makes for backward" in said and "rates      as they were given" in said
    assert choice.better_with() == []
    assert {each.stage for each in choice.alternatives} == {0, 2, 3}


def test_with_less_it_fits_and_what_more_would_buy_is_said() -> None:
    nbytes = tight(3, 0.3)
    choice = small(nbytes)
    assert choice.division.peak_bytes <= nbytes
    assert all(each.division is None or each.division.peak_bytes <= nbytes for each in choice.alternatives)
    fitting = [each.step_s for each in choice.alternatives if each.division is not None]
    assert choice.chosen.step_s <= 1.01 * min(fitting)
    more, name, seconds = choice.better_with()[0]
    assert f"{name}, " in str(choice) and seconds < choice.chosen.step_s
    richer = small(nbytes + more)
    assert richer.chosen.step_s <= seconds * 1.001


def test_equal_inputs_give_equal_choices() -> None:
    nbytes = tight(3, 0.5)
    assert str(small(nbytes, stage=3)) == str(small(nbytes, stage=3))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_that_is_given_is_kept(stage: int) -> None:
    choice = small(PLENTY, stage=stage)
    assert [each.stage for each in choice.alternatives] == [stage]
    assert choice.options["stage"] == stage


@pytest.mark.parametrize(
    ("given", "stages"),
    [
        ({"lookups": True}, {3}),
        ({"buckets": "all"}, {0}),
        ({"wire": zerofx.Wire(gradients="int8")}, {2, 3}),
        ({"mixed_precision": zerofx.MixedPrecision(torch.bfloat16)}, {0, 2, 3}),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_options_that_are_given_are_kept_and_leave_the_stages_that_go_with_them(
    given: dict[str, Any], stages: set[int]
) -> None:
    choice = small(PLENTY, **given)
    assert {each.stage for each in choice.alternatives if not each.impossible} == stages
    assert choice.options.items() >= given.items()


@pytest.mark.parametrize(("rate", "quantized"), [(1e11, False), (1e6, True)])
def test_collectives_are_quantized_where_that_is_allowed_and_worth_it(rate: float, quantized: bool) -> None:
    rates = replace(RATES, link_bytes_per_s=rate)
    wide = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 1))  # parameters small enough travel as they are
    call: dict[str, Any] = {"world_size": 2, "memory": PLENTY, "rates": rates, "executor": "eager"}
    choice = zerofx.choose(wide, torch.ones(2, 64), wire="auto", **call)
    assert (choice.options["wire"] is not None) == quantized
    assert {each.options["wire"] is not None for each in choice.alternatives} == {False, True}
    unasked = zerofx.choose(wide, torch.ones(2, 64), **call)
    assert not any(each.options.get("wire") for each in unasked.alternatives)
    if quantized:
        assert choice.chosen.step_s < 0.95 * unasked.chosen.step_s and "quantized on the wire" in str(choice)


def test_a_place_is_used_only_where_nothing_fits_without_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "never made")
    assert small(PLENTY, stage=3, offload=folder).options["offload"] is None
    kept_ = zerofx.Offload(optimizer=folder)
    assert small(PLENTY, stage=3, offload=kept_).options["offload"] is kept_
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("device", "place", "expected"),
    [
        ("cpu", "cpu", ["stage 3"]),
        ("cpu", "/x", ["stage 3", "optimizer on disk", STATE + " on disk", EVERYTHING + " on disk"]),
        ("cuda", "cpu", ["stage 3", "optimizer on the host", STATE + " on the host", EVERYTHING + " on the host"]),
    ],
)
def test_where_nothing_fits_more_and_more_leaves_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, place: str, expected: list[str]
) -> None:
    """With room for nothing all of them are predicted; with room for two of three, those of the host at once."""
    asked = Question(Small(1), (), {}, 2, zerofx.Memory(10**9), "gloo", torch.device(device), False, {"offload": place})
    monkeypatch.setattr(Question, "predicted", lambda self, options: Alternative(options))
    found = [each.name.removeprefix("stage 3, ") for each in asked.alternatives() if each.stage == 3]
    assert found == expected
    stage2 = [each.name for each in asked.alternatives() if each.stage == 2]
    assert len(stage2) == len(expected) and not any("weights" in name for name in stage2)
    fits = Division(**dict.fromkeys((field.name for field in fields(Division)), None))
    state = {"offload": zerofx.Offload(place), "stage": 2}
    monkeypatch.setattr(
        Question, "predicted", lambda self, options: Alternative(options, fits if options == state else None)
    )
    found = [each.name.removeprefix("stage 3, ") for each in asked.alternatives() if each.stage == 3]
    assert found == expected[: 3 if device == "cuda" else 2]


@pytest.mark.slow
def test_weights_and_gradients_leave_for_a_file_where_the_optimizers_state_is_not_enough() -> None:
    with torch.device("meta"):
        net, x = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))), torch.ones(1, 1024)
    asked: dict[str, Any] = {"world_size": 1, "rates": RATES, "stage": 3, **HOW}

    def least(offload: zerofx.Offload) -> int:
        with pytest.raises(ValueError, match=r"needs least, ([\d,]+) bytes") as refused:
            zerofx.choose(net, x, memory=1000, offload=offload, **asked)
        return int(re.search(r"needs least, ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))  # type: ignore[index]

    moments, state = least(zerofx.Offload("/x")), least(zerofx.Offload("/x", "/x", "/x"))
    assert state < moments
    choice = zerofx.choose(net, x, memory=(state + moments) // 2, offload="/x", **asked)
    assert choice.options["offload"] == zerofx.Offload("/x", "/x", "/x")


def chosen_and_trained(budgets: list[int], folder: str) -> list[dict[str, Any]]:
    """What `choose` and `compile` choose on this rank, the most that training with it holds, and what a save says."""
    found = []
    for nbytes in budgets:
        torch.manual_seed(0)
        x, y = data()
        memory = zerofx.Memory(nbytes, rates=RATES)
        net = zerofx.compile(Small(1), memory=memory, batch=(x, y), **HOW)
        choice = zerofx.explain(net)
        losses, peak = trained(net)
        wanted, _ = trained(built(partial(Small, 1), None, stage=choice.chosen.stage))
        said = zerofx.save(folder, net) / "choice.txt"
        found.append({"said": str(choice), "saved": said.read_text(), "losses": losses, "peak": peak})
        found[-1] |= {"wanted": wanted, "budget": nbytes, "chosen": choice.division, "divided": division(net)}
    return found


@quick_if(lambda parts: parts == [(3, 0.4)])
@pytest.mark.parametrize("parts", [[(3, 0.4)], [(0, 0.5), (3, 1), (3, 0)]], ids=str)
def test_compile_chooses_as_choose_does_alike_on_all_ranks_and_stays_within_the_budget(
    workers2: Workers, parts: list[tuple[int, float]], tmp_path: Path
) -> None:
    budgets = [tight(*part) for part in parts]
    ranks = workers2.run(chosen_and_trained, budgets, str(tmp_path / "saved"), timeout=250)
    for nbytes, one, other in zip(budgets, *ranks, strict=True):
        assert one["said"] == other["said"] == one["saved"] == str(small(nbytes))
        assert one["chosen"] == one["divided"]
        assert one["losses"] == pytest.approx(one["wanted"], abs=1e-6)
        for at in (one, other):
            assert at["peak"] <= at["chosen"].peak_bytes <= at["budget"]


class TwoGraphs(Small):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = hidden + block["down"](F.gelu(block["up"](hidden)))  # type: ignore[index]
        torch._dynamo.graph_break()
        return F.cross_entropy(self.of(hidden).flatten(0, 1), y.flatten())

    def of(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


class OutsideOfGraphs(TwoGraphs):
    @torch._dynamo.disable
    def of(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


class SharedByGraphs(Small):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = self.head(self.tokens(x))
        torch._dynamo.graph_break()
        return F.cross_entropy((first + self.head(self.tokens(first.argmax(-1)))).flatten(0, 1), y.flatten())


def apart() -> list[torch.Tensor]:
    """As `data`, which are views of one tensor: a graph that is given one of them is given all of it."""
    return [x.clone() for x in data()]


def chosen_and_trained_in_two_graphs(budgets: list[int]) -> list[dict[str, Any]]:
    """As `chosen_and_trained`, of a module with a graph break."""
    found = []
    x, y = batch = apart()
    for nbytes in budgets:
        torch.manual_seed(0)
        net = zerofx.compile(TwoGraphs(1), memory=zerofx.Memory(nbytes, rates=RATES), batch=(x, y), **HOW)
        choice = zerofx.explain(net)
        losses, peak = trained(net, batch=batch)
        wanted, _ = trained(built(partial(TwoGraphs, 1), None, stage=choice.chosen.stage))
        divided = [record.forward.division for record in zerofx.graphs(net) if record.forward is not None]
        found.append({"said": str(choice), "losses": losses, "wanted": wanted, "peak": peak, "budget": nbytes})
        found[-1] |= {"chosen": choice.division, "divided": Division.of_step(divided), "graphs": len(divided)}
    return found


@pytest.mark.slow
def test_two_graphs_are_chosen_for_alike_and_stay_within_the_budget(workers2: Workers) -> None:
    """With room for the whole of stage 3, and with what a refusal says is enough."""
    with pytest.raises(ValueError, match=r"What fits: memory=([\d,]+)") as refused:
        small(60_000, TwoGraphs(1))
    least = int(re.search(r"memory=([\d,]+)(?:;|\.)", str(refused.value))[1].replace(",", ""))  # type: ignore[index]
    whole = small(PLENTY, TwoGraphs(1), stage=3).division.peak_bytes
    ranks = workers2.run(chosen_and_trained_in_two_graphs, [least, whole], timeout=250)
    for nbytes, one, other in zip([least, whole], *ranks, strict=True):
        assert one["said"] == other["said"] == str(small(nbytes, TwoGraphs(1)))
        assert "graphs     2; what runs outside of these is not counted" in one["said"]
        assert one["graphs"] == 2 and one["chosen"] == one["divided"]
        assert one["losses"] == pytest.approx(one["wanted"], abs=1e-6)
        for at in (one, other):
            assert at["peak"] <= at["chosen"].peak_bytes <= at["budget"]


def test_what_one_of_two_graphs_needs_says_nothing_of_seconds() -> None:
    """Where an alternative fails at its first graph, the screen names no time for more memory."""
    peak = small(PLENTY, TwoGraphs(1), stage=3).division.peak_bytes
    choice = small(peak, TwoGraphs(1))
    assert any(each.offers and each.division is None for each in choice.alternatives), str(choice)
    assert choice.better_with() == []


REFUSED: dict[str, Callable[[], object]] = {
    'stage="auto" without batch=: what a step takes': lambda: zerofx.compile(Small(), stage="auto", memory=PLENTY),
    'wire="auto" without batch=: what a step takes': lambda: zerofx.compile(Small(), wire="auto", memory=PLENTY),
    "batch= without memory=: what is fastest": lambda: zerofx.compile(Small(), batch=tuple(data())),
    "stage=4: expected 0, 1, 2 or 3": lambda: zerofx.compile(Small(), stage=4, memory=PLENTY, batch=tuple(data())),
    "buckets='bucket': expected one of": lambda: zerofx.compile(
        Small(), buckets="bucket", memory=PLENTY, batch=tuple(data())
    ),
    "memory=None: expected bytes of each rank's device": lambda: small(None),  # type: ignore[arg-type]
    "OutsideOfGraphs is not one graph, and what stands between": lambda: small(PLENTY, OutsideOfGraphs(1)),
    "memory= and a graph that is compiled while another": lambda: small(PLENTY, SharedByGraphs(1)),
    "Linear leaves nothing for a backward": lambda: zerofx.choose(
        nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2), world_size=2, memory=PLENTY, stage=3, **HOW
    ),
    "nothing was chosen for this Small: all its options were given": lambda: zerofx.explain(
        zerofx.compile(Small(), memory=PLENTY, **HOW)
    ),
    "probe=True with device='cuda': there is no such device": lambda: zerofx.dry_run(
        Small(), *data(), world_size=2, probe=True, device="cuda"
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_leaves_nothing_to_choose_by_is_refused(fake_world: Any, message: str) -> None:
    fake_world(2)
    with pytest.raises(ValueError, match=re.escape(message)):
        REFUSED[message]()


@pytest.mark.parametrize("where", ["Trainer(zerofx=...)"])
def test_integrations_take_it_and_refuse_what_it_refuses(where: str) -> None:
    given = {"memory": "80GB", "batch": {"x": torch.ones(1, device="meta")}}
    assert checked_options(given, where) == given
    assert checked_options({**given, "stage": "auto", "dynamic": False}, where)["stage"] == "auto"
    with pytest.raises(ValueError, match=r'Trainer\(zerofx=...\): stage="auto" without batch='):
        checked_options({"memory": "80GB", "stage": "auto"}, where)


def test_what_fits_nowhere_is_refused_with_what_would_fit_and_that_does() -> None:
    """So many ranks, a batch of so many, or that memory."""
    net, x = Small(1), data()[0].repeat(4, 1)
    asked: dict[str, Any] = {"rates": RATES, "stage": 3, **HOW}
    with pytest.raises(ValueError, match=r"is too small for Small on 2 ranks: stage 3 needs least") as refused:
        zerofx.choose(net, x, x, world_size=2, memory=tight(3, 0), **asked)
    said = str(refused.value)
    memory = re.search(r"What fits: memory=([\d,]+); or", said)
    batch = re.search(r"a batch of (\d+) instead of 16", said)
    assert memory is not None and batch is not None, said
    nbytes = int(memory[1].replace(",", ""))
    assert zerofx.choose(net, x, x, world_size=2, memory=nbytes, **asked).division.peak_bytes <= nbytes
    fewer = x[: int(batch[1])]
    assert zerofx.choose(net, fewer, fewer, world_size=2, memory=tight(3, 0), **asked).chosen.stage == 3


@pytest.mark.slow
def test_more_ranks_and_a_place_are_named_where_bytes_at_rest_are_what_is_too_much() -> None:
    with torch.device("meta"):
        net, x = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))), torch.ones(1, 4096)
    asked: dict[str, Any] = {"rates": RATES, "stage": 3, "memory": "350MB", **HOW}
    with pytest.raises(ValueError, match=r'; or (\d+) ranks; or offload="a folder", which leaves') as refused:
        zerofx.choose(net, x, world_size=2, **asked)
    ranks = int(re.search(r"or (\d+) ranks", str(refused.value))[1])  # type: ignore[index]
    assert zerofx.choose(net, x, world_size=ranks, **asked).chosen.stage == 3
    offloaded = zerofx.choose(net, x, world_size=2, offload="/nowhere", **asked)
    assert "optimizer" in offloaded.chosen.name and offloaded.division.peak_bytes <= 350 * 10**6


def test_on_a_mesh_of_two_dimensions_every_scheme_is_an_alternative() -> None:
    torch.manual_seed(0)
    x, y = data()
    choice = zerofx.choose(Small(1), x, y, world_size=(2, 2), memory=PLENTY, rates=RATES, stage=3, **HOW)
    assert {each.options["sharding"].name for each in choice.alternatives} == {scheme.name for scheme in SCHEMES}
    sharding = zerofx.Sharding()
    kept_ = zerofx.choose(
        Small(1), x, y, world_size=(2, 2), memory=PLENTY, rates=RATES, stage=3, sharding=sharding, **HOW
    )
    assert kept_.options["sharding"] is sharding and len(kept_.alternatives) == 1


def test_of_equally_fast_ones_that_with_the_lower_peak_is_chosen() -> None:
    def of(stage: int, seconds: float, peak: int) -> Alternative:
        return Alternative(
            {"stage": stage}, Division(100, peak, {}, 0, None, seconds, offers=(Offer(peak, 0, seconds, 0.0),))
        )

    too_large = Alternative({"stage": 1}, offers=(Offer(120, 0, 0.5, 0.0),))
    unknown = Alternative({"stage": 0}, why="needs more than 1 TB at rest alone")
    found = best_first([unknown, too_large, of(3, 1.2, 10), of(2, 1.0, 60), of(0, 1.005, 50)])
    assert [each.stage for each in found] == [0, 2, 3, 1, 0]
    choice = zerofx.Choice({}, found, zerofx.Memory(100), "a model on 2 ranks", "as they were given")
    said = str(choice)
    assert "next best  stage 2: 1.00 s, as fast, and takes 60 B" in said
    assert "then       stage 3: 1.20 s, 19 percent slower, and takes 10 B" in said
    assert "with       20 B more: stage 1, 101 percent faster" in said


def test_rates_that_were_kept_count_and_a_broken_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_rates("cpu", 2) is None
    assert "rates      of an ordinary machine" in str(small(PLENTY, stage=0, rates=None))
    path = keep_rates(RATES, "cpu", 2)
    assert kept_rates("cpu", 2) == RATES and kept_rates("cpu", 3) is None
    assert "rates      of this machine, kept by zerofx.calibrate" in str(small(PLENTY, stage=0, rates=None))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"not what zerofx.calibrate\(keep=True\) writes"):
        small(PLENTY, stage=0, rates=None)


def chosen_by_a_larger_batch(nbytes: int) -> str:
    x, y = (data() if dist.get_rank() == 0 else data(64)).unbind()
    try:
        zerofx.compile(Small(1), memory=nbytes, batch={"x": x, "y": y}, stage=0, **HOW)
    except (ValueError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"
    return "went well"


def test_what_does_not_fit_on_one_rank_is_refused_on_all(workers2: Workers) -> None:
    one, other = workers2.run(chosen_by_a_larger_batch, tight(0, 1) + 4096)
    assert one.startswith("RuntimeError: rank 1 cannot choose for this Small: memory=")
    assert other.startswith("ValueError: memory=") and "is too small for Small on 2 ranks" in other


def test_a_report_has_the_choice_and_a_copy_keeps_it(fake_world: Any, tmp_path: Path) -> None:
    fake_world(2)
    x, y = data()
    net = zerofx.compile(Small(1), memory=PLENTY, batch={"x": x, "y": y}, stage="auto", **HOW)
    net(x, y).backward()
    page = zerofx.report(net, tmp_path / "page.html").read_text()
    assert html.escape(str(zerofx.explain(net))) in page
    assert str(zerofx.explain(copy.deepcopy(net))) == str(zerofx.explain(net))


def test_a_strategy_of_lightning_compiles_layers_by_what_was_chosen_for_the_module(fake_world: Any) -> None:
    lightning = pytest.importorskip("zerofx.integrations.lightning", exc_type=ImportError)
    fake_world(2)
    x, y = data()
    strategy = lightning.FabricStrategy(zerofx={"memory": PLENTY, "batch": (x, y), **HOW})
    net = strategy._compile(Small(1))
    stage = zerofx.explain(net).chosen.stage
    assert groups_of(net)[0].family.stage == stage
    assert net.tokens(x).shape == (*x.shape, 32) and net(x, y).dim() == 0
    assert {record.forward.context.stage for record in zerofx.graphs(net) if record.forward} == {stage}


def prepared(nbytes: int) -> tuple[int, str]:
    from zerofx.integrations.accelerate import Accelerator

    x, y = data()
    with as_torchrun_would():
        options = {"memory": nbytes, "batch": (x, y), **HOW}
        net = Accelerator(cpu=True, zerofx=options).prepare(Small(1))
        net(x, y).backward()
    return groups_of(net)[0].family.stage, str(zerofx.explain(net))


@pytest.mark.slow
def test_accelerate_passes_it_through(workers2: Workers) -> None:
    pytest.importorskip("accelerate")
    one, other = workers2.run(prepared, PLENTY, timeout=200)
    assert one == other and one[1].startswith(f"stage {one[0]} for Small on 2 ranks within 1.0 GB")
