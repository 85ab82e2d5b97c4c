"""Inductor writes matrix products where they are packed: which ones, with the same numbers, and in less memory."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.memory import allocated_peak
from tests.slow import slow
from zerofx import _torch


def generated(function: Callable, *inputs: torch.Tensor) -> tuple[Callable, str]:
    """What Inductor makes of ``function`` for zerofx, and its code."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.utils import run_and_get_code

    gm = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with torch.compiler.config.patch(force_disable_caches=True), _torch.fake_mode_of(fakes):
        compiled, (code,) = run_and_get_code(lambda: _torch.generate_code(gm, fakes))
    return compiled, code.partition("def call")[2]


def in_packs(code: str) -> list[bool]:
    """Of each product, in order, whether its result is a part of another buffer."""
    aliases = set(re.findall(r"(\w+) = reinterpret_tensor\(.*# alias", code))
    return [out in aliases for out in re.findall(r"extern_kernels\.mm\(.*out=(\w+)\)", code)]


def pack(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Two gradients of products, a small one between them, and padding."""
    return [torch.cat([(a @ b).view(-1), a.sum(0), (b @ a).view(-1), a.new_zeros(4)])]


def read_beside(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """The product is read by another, which is packed, too; and by a kernel."""
    first = a @ b
    return [torch.cat([first.view(-1), (first @ b).view(-1)]), first.relu()]


def twice(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """It can lie in one place."""
    first = a @ b
    return [torch.cat([first.view(-1), a.sum(0)]), torch.cat([b.sum(0), first.view(-1)])]


def transposed(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Its memory is not in the pack's order."""
    return [torch.cat([(a @ b).t().reshape(-1), a.sum(0)])]


def a_part(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """The rest of it has no place in the pack."""
    return [torch.cat([(a @ b).view(-1)[:32], a.sum(0)])]


def unaligned(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Kernels may count on addresses that are multiples of 16 bytes."""
    return [torch.cat([a.sum(0)[:3], (a @ b).view(-1)])]


def not_flat(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Rows of two products lie side by side."""
    return [torch.cat([a @ b, b @ a], dim=1)]


def inputs(n: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, n, n, generator=generator)
    return a, b


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        slow(pack, [True, True]),
        (read_beside, [True, True]),
        (twice, [True]),
        (transposed, [False]),
        (a_part, [False]),
        (unaligned, [False]),
        (not_flat, [False, False]),
    ],
)
def test_products_that_are_whole_parts_of_a_pack_are_written_there(function: Callable, wanted: list[bool]) -> None:
    compiled, code = generated(function, *inputs())
    assert in_packs(code) == wanted
    for got, expected in zip(compiled(list(inputs())), function(*inputs()), strict=True):
        assert got.equal(expected) or (got - expected).abs().max() < 1e-5


def test_what_others_compile_is_left_alone() -> None:
    from torch._inductor.utils import run_and_get_code

    generated(pack, *inputs())
    with torch.compiler.config.patch(force_disable_caches=True):
        _, (code,) = run_and_get_code(torch.compile(lambda a, b: pack(a, b)[0]), *inputs())
    assert in_packs(code.partition("def call")[2]) == [False, False]
    assert "zerofx" not in torch.compiler.config.cache_key_tag  # type: ignore[attr-defined]


def test_a_packed_product_is_not_there_twice() -> None:
    n = 128
    compiled, _ = generated(pack, *inputs(n))
    compiled(list(inputs(n)))
    given = list(inputs(n))
    packed = 4 * (2 * n * n + n + 4)
    assert packed <= allocated_peak(lambda: compiled(given)) < packed + n * n
