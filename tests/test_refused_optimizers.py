"""Optimizers that look at whole tensors are refused, with the reason, before they change anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.workers import Workers


class OwnMuon(torch.optim.Optimizer):
    """Written by hand; looks at rows and columns."""

    def __init__(self, params: Iterable[Any], how: str) -> None:
        super().__init__(params, {"how": how})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if group["how"] == "matmul":
                    update = p.grad @ p.grad.T @ p.grad
                elif group["how"] == "mean":
                    update = p.grad - p.grad.mean(dim=0, keepdim=True)
                else:
                    update = self.helper(p.grad)
                p.add_(update, alpha=-0.1)

    def helper(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svd(gradient, full_matrices=False)[0]


class DecayingAdafactor(torch.optim.Adafactor):
    """A subclass is as little elementwise as what it derives from."""


def optimizers() -> dict[str, tuple[str, Callable[[list[Any]], torch.optim.Optimizer]]]:
    optim = torch.optim
    return {
        "Muon": ("matrix products", lambda params: optim.Muon(params, weight_decay=0.5)),
        "LBFGS": ("dot products", lambda params: optim.LBFGS(params)),
        "Adafactor": ("row and column means", lambda params: optim.Adafactor(params, weight_decay=0.5)),
        "SparseAdam": ("sparse gradients", lambda params: optim.SparseAdam(params)),
        "DecayingAdafactor": ("means|'mean'|'norm'", lambda params: DecayingAdafactor(params, weight_decay=0.5)),
        "OwnMuon": ("'matmul'|'__matmul__'|'T'|'mm'", lambda params: OwnMuon(params, "matmul")),
        "OwnMuon mean": ("'mean'", lambda params: OwnMuon(params, "mean")),
        "OwnMuon svd": ("svd'", lambda params: OwnMuon(params, "svd")),
    }


def check_refused(name: str) -> None:
    reason, make = optimizers()[name]
    module = zerofx.shard(nn.Sequential(nn.Linear(7, 11, bias=False), nn.Linear(11, 7, bias=False)))
    params = list(module.parameters())
    for p in params:
        p.grad = torch.randn(p.shape)
    before = [(p.full_tensor(), p.grad.full_tensor()) for p in params]  # type: ignore
    optimizer = make(params)

    def closure() -> torch.Tensor:
        raise AssertionError("not even the closure runs")

    pattern = rf"{name.split()[0]} is not elementwise: .*({reason}).*'0\.weight'.*only optimizers that"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=pattern):
            optimizer.step(closure)
    assert all(not state for state in optimizer.state.values()), dict(optimizer.state)
    for p, (value, gradient) in zip(params, before):
        assert torch.equal(p.full_tensor(), value) and torch.equal(p.grad.full_tensor(), gradient)

    plain = nn.Linear(3, 5, bias=False)  # the same optimizer on parameters that are whole
    plain.weight.grad = torch.randn(5, 3)
    if name not in ("LBFGS", "SparseAdam"):
        make([plain.weight]).step()


@pytest.mark.parametrize("name", optimizers())
def test_an_optimizer_that_is_not_elementwise_is_refused_and_changes_nothing(workers2: Workers, name: str) -> None:
    workers2.run(check_refused, name)
