"""Deep modules: layers that are alike are found, and what a few of them take says what all do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.slow import quick_if
from tests.test_activation_budget import VOCAB, data
from tests.test_memory import Small
from zerofx.compiler.choices import Search
from zerofx.inspect.choose import alternatives, deep
from zerofx.inspect.choose.alternatives import Question
from zerofx.inspect.choose.deep import SHALLOW, Survey, followed
from zerofx.model.memory import Memory
from zerofx.model.stack import Stack
from zerofx.simulate.clock import ordinary

RATES = ordinary("cpu")
HOW: dict[str, Any] = {"executor": "eager", "groups": zerofx.Grouping(min_bytes=0)}


class Layer(nn.Module):
    """A layer that knows its number."""

    def __init__(self, number: int, rate: float = 0.1) -> None:
        super().__init__()
        self.number, self.rate, self.linear = number, rate, nn.Linear(4, 4)


class Tower(nn.Module):
    def __init__(self, *layers: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.head = head or nn.Linear(4, 2)


def layers(count: int = 5, **settings: Any) -> list[nn.Module]:
    return [Layer(i, **settings) for i in range(count)]


def tied() -> nn.Module:
    tower = Tower(*layers())
    first, second = list(tower.inside["layers"].children())[:2]  # type: ignore[union-attr]
    second.linear = first.linear
    return tower


def test_layers_that_differ_by_their_number_are_a_stack_of_which_a_module_with_few_has_the_first() -> None:
    tower = Tower(*layers())
    stack = Stack.of(tower)
    assert stack is not None and (stack.name, stack.count, stack.nbytes) == ("inside.layers", 5, 80)
    few = stack.of_first(2)
    assert [name for name, _ in few.named_parameters()] == [
        *(f"inside.layers.{i}.linear.{name}" for i in range(2) for name in ("weight", "bias")),
        *("head.weight", "head.bias"),
    ]
    whole = dict(tower.named_parameters())
    assert all(p is whole[name] for name, p in few.named_parameters()) and len(whole) == 12
    row = nn.Sequential(*layers())
    assert len(list(Stack.of(row).of_first(3).children())) == 3 and len(row) == 5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "tower",
    [
        Tower(*layers(4), Layer(4, rate=0.2)),
        Tower(*layers(4), Layer(7)),
        Tower(*layers(4), nn.Linear(4, 4)),
        Tower(*layers(), head=nn.Linear(4, 40)),
        Tower(*layers(1)),
        tied(),
    ],
    ids=["a setting", "another number", "a class", "less than half", "one", "shared"],
)
def test_others_are_none(tower: nn.Module) -> None:
    assert Stack.of(tower) is None


def asked(net: nn.Module, **given: Any) -> Question:
    x, y = data()
    memory = Memory(10**12, rates=RATES)
    return Question(net, (x, y), {}, 2, memory, "gloo", torch.device("cpu"), False, {**HOW, **given})


@quick_if(lambda stage: stage == 3)
@pytest.mark.parametrize("stage", [3, 2, 0])
def test_bytes_of_few_layers_say_what_many_take_to_the_byte(stage: int) -> None:
    question, surveys = asked(Small(12)), {count: Survey(False) for count in (*SHALLOW, 12)}
    stack = Stack.of(question.module)
    assert stack is not None and stack.count == 12
    for count, survey in surveys.items():
        replace(question, module=stack.of_first(count))._dry_run({"stage": stage}, survey)
    few, more, whole = surveys.values()
    part = (12 - SHALLOW[0]) / (SHALLOW[1] - SHALLOW[0])
    assert len(whole.ends) == (3 if stage == 3 else 1)
    for name, ends in whole.ends.items():
        for side in ("all_", "least"):
            found = deep._beyond(getattr(few.ends[name], side), getattr(more.ends[name], side), part)
            tried, saved = getattr(ends, side)
            assert found is not None and (found.needs, found.saved) == (tried.needs, saved)
            assert (found.at_rest, found.left) == (tried.at_rest, tried.price.left)
            assert found.step_s == pytest.approx(tried.price.step_s, rel=0.005)
    plenty = followed(few, more, 12, question.memory)
    assert plenty is not None and plenty.division is not None and plenty.division.tried == 1
    assert plenty.division.peak_bytes == next(ends.all_[0].needs for name, ends in whole.ends.items() if "all" in name)


@pytest.mark.slow
def test_what_is_chosen_for_a_deep_module_is_what_is_chosen_for_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    net, how = Small(12), {"world_size": 2, "rates": RATES, **HOW}
    whole = zerofx.choose(net, x, y, memory=10**9, stage=3, **how)
    monkeypatch.setattr(alternatives, "DEEP", 12)
    runs: list[tuple[int, Search | None]] = []
    run = Question._dry_run

    def seen(self: Question, options: Any, search: Search | None) -> Any:
        runs.append((len(self.module.blocks), search))  # type: ignore[arg-type]
        return run(self, options, search)

    monkeypatch.setattr(Question, "_dry_run", seen)
    choice = zerofx.choose(net, x, y, memory=10**9, stage=3, **how)
    assert [count for count, _ in runs] == [*SHALLOW]
    assert choice.division.peak_bytes == whole.division.peak_bytes and choice.chosen.layers == (*SHALLOW, 12)
    assert "layers     6 and 8 of 12 were traced; all are alike" in str(choice)
    assert choice.options == whole.options and choice.chosen.keeps_all
    least = choice.chosen.offers[0].needs
    tight = zerofx.choose(net, x, y, memory=round((least + choice.division.peak_bytes) / 2), stage=3, **how)
    assert tight.division.peak_bytes <= tight.memory.nbytes and not tight.chosen.keeps_all
    assert tight.chosen.saved <= choice.chosen.whole and tight.division.step_s >= choice.division.step_s
    with pytest.raises(ValueError, match=f"needs least, {least:,} bytes.*What fits: memory={least:,}"):
        zerofx.choose(net, x, y, memory=least - 1, stage=3, **how)


def test_a_module_that_counts_its_layers_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Small):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = self.tokens(x)
            for i in range(9):
                hidden = hidden + self.blocks[i]["down"](self.blocks[i]["up"](hidden))  # type: ignore[index]
            return nn.functional.cross_entropy(self.head(hidden).view(-1, VOCAB), y.flatten())

    monkeypatch.setattr(alternatives, "DEEP", 9)
    x, y = data()
    choice = zerofx.choose(Counted(9), x, y, memory=10**9, stage=2, world_size=2, rates=RATES, **HOW)
    assert not choice.chosen.layers and "were traced" not in str(choice)
