"""Inductor's kernels run after the waits that they read behind, whatever they are fused with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch._C import FileCheck

from tests.test_packs import generated
from zerofx._torch import inductor


def other_loops(x: torch.Tensor, y: torch.Tensor, shard: torch.Tensor) -> list[torch.Tensor]:
    """The sum has loops of its own, (2, 3), the product behind the wait (6,)."""
    h = x + y.t()
    arrived = torch.ops._c10d_functional.wait_tensor.default(shard)
    return [h, h * arrived[:1]]


def other_loops_of_rows(x: torch.Tensor, y: torch.Tensor, shard: torch.Tensor) -> list[torch.Tensor]:
    """The sum has loops (2, 3, 4), the product (6, 4): a weight per feature, behind a transposed batch."""
    h = x + y.transpose(0, 1)
    arrived = torch.ops._c10d_functional.wait_tensor.default(shard)
    return [h, h * arrived[:4]]


CASES = {
    other_loops: (torch.randn(2, 3), torch.randn(3, 2), torch.randn(16)),
    other_loops_of_rows: (torch.randn(2, 3, 4), torch.randn(3, 2, 4), torch.randn(16)),
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_a_kernel_waits_for_what_it_reads_though_its_loops_were_made_anew(function: Callable) -> None:
    compiled, code = generated(function, *CASES[function])
    FileCheck().check_count("wait_tensor", 1, exactly=True).check_count("cpp_fused", 1, exactly=True).run(code)
    for got, wanted in zip(compiled(list(CASES[function])), function(*CASES[function]), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="Inductor keeps the names by itself")
def test_inductor_by_itself_reads_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, a version does without `dependences_kept`."""
    monkeypatch.setattr(inductor, "dependences_kept", contextlib.nullcontext)
    with torch._inductor.config.patch(fx_graph_cache=False):  # the key does not know that something was taken out
        _, code = generated(other_loops, *CASES[other_loops])
    FileCheck().check("cpp_fused").check("wait_tensor").run(code)
