"""Which way an optimizer steps: on slices, by owners, or refused, alike on every rank."""

from __future__ import annotations

import pytest
import torch

import zerofx
from tests.test_by_owner import Dependent, Net, Rows, check_alike, set_gradients, sharded
from tests.workers import Workers
from zerofx.runtime.optim.hooks import way_of


def depend(how: str, stage: int) -> str:
    module, plain = sharded(stage), Net()
    names = [name for name, _ in plain.named_parameters() if name not in ("unused", "frozen")]
    mine, theirs = (Dependent([dict(m.named_parameters())[n] for n in names], how) for m in (module, plain))
    kinds = ""
    for step in range(4):
        set_gradients(module, plain, seed=step)
        if how == "rows":
            with pytest.raises(
                RuntimeError,
                match="Dependent is not elementwise: it uses 'reshape' while the update of one parameter depends on",
            ):
                mine.step()
            check_alike(module, Net())
        else:
            mine.step()
            theirs.step()
            kinds = str(way_of(mine).kind)
    if how != "rows":
        check_alike(module, plain)
    return kinds


@pytest.mark.parametrize("stage", [1, 3])
def test_numbers_of_all_parameters_are_computed_on_slices(workers2: Workers, stage: int) -> None:
    assert workers2.run(depend, "numbers", stage) == ["slices"] * 2


def test_rows_of_parameters_that_depend_on_each_other_are_refused_and_nothing_changes(workers2: Workers) -> None:
    workers2.run(depend, "rows", 3)


def ways() -> dict[str, str | None]:
    module = sharded(3)
    made = {
        "AdamW": torch.optim.AdamW(module.parameters()),
        "zerofx.AdamW": zerofx.AdamW(module.parameters()),
        "a subclass of SGD": type("Mine", (torch.optim.SGD,), {})(module.parameters(), lr=0.1),
        "LBFGS": torch.optim.LBFGS(module.parameters()),
        "Adafactor": torch.optim.Adafactor(module.parameters()),
    }
    return {name: way_of(optimizer, closure=name == "LBFGS").kind for name, optimizer in made.items()}


def test_every_rank_goes_the_same_way(workers2: Workers) -> None:
    one, other = workers2.run(ways)
    assert one == other
    expected = {"AdamW": "slices", "zerofx.AdamW": "slices", "a subclass of SGD": "slices", "LBFGS": None}
    assert one == {**expected, "Adafactor": "owner"}


def fail() -> None:
    module, plain = sharded(3), Net()
    mine, theirs = Rows(module.parameters()), Rows(plain.parameters())
    for step in range(3):
        set_gradients(module, plain, seed=step)
        if step == 1:
            mine.param_groups[0]["how"] = "fails"
            with pytest.raises(ArithmeticError):
                mine.step()
            mine.param_groups[0]["how"] = "product"
            continue
        mine.step()
        theirs.step()
    check_alike(module, plain)


def test_a_step_that_raises_changes_no_weights_and_the_next_one_goes_on(workers2: Workers) -> None:
    workers2.run(fail)
