"""Hooks of modules that are registered, and removed, after a module has been compiled are seen, as in eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.slow import slow
from tests.test_parameters import Layers, mine, same, twins
from tests.workers import Workers

HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward_pre": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 3,)),
    "forward_pre with keywords": lambda m: m.register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] * 3,), kwargs), with_kwargs=True
    ),
    "forward": lambda m: m.register_forward_hook(lambda m, args, result: result * 3),
    "backward_pre": lambda m: m.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 3,)),
    "backward": lambda m: m.register_full_backward_hook(lambda m, grads, outputs: (grads[0] * 3,)),
}


class Around(nn.Module):
    """Backward hooks of the whole, too: its inputs need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(10, 10), Layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x))


def check_hooks(stage: int, executor: str, place: str, kinds: list[str]) -> None:
    module, plain = twins(Around, stage=stage, executor=executor)

    def compare() -> tuple[float, list[float]]:
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
        loss, expected = module(mine(x)), plain(x)
        loss.backward()
        expected.backward()
        same(module, plain)
        norms = [float(p.grad.norm()) for p in plain.parameters()]
        for m in (module, plain):
            m.zero_grad()
        return float(expected), norms

    before = compare()
    for kind in kinds:
        handles = [HOOKS[kind](m.get_submodule(place)) for m in (module, plain)]
        assert compare() != before, f"the {kind} hook does nothing"  # so the comparison can tell
        for handle in handles:
            handle.remove()
        assert compare() == before


@pytest.mark.parametrize(
    ("stage", "executor", "place", "kinds"),
    [
        (0, "eager", "inner", ["forward", "backward"]),
        slow(0, "eager", "inner.layers.1", list(HOOKS)),
        slow(2, "eager", "inner", list(HOOKS)),
        (3, "eager", "inner.layers.1", list(HOOKS)),
        (3, "eager", "", ["forward_pre", "backward_pre"]),  # its input needs no gradient
        slow(3, "inductor", "inner.layers.1", list(HOOKS)),
        slow(3, "inductor", "", ["forward"]),
        slow(3, "eager", "", ["forward"]),
        (1, "inductor", "inner.layers.1", ["forward_pre", "backward"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*outside of a compiled graph:UserWarning")
def test_hooks_come_and_go_after_the_first_call(
    workers2: Workers, stage: int, executor: str, place: str, kinds: list[str]
) -> None:
    workers2.run(check_hooks, stage, executor, place, kinds)
