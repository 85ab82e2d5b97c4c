"""Every view that aten has may be taken of a parameter: it is not saved whole, and gradients are as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.slow import quick_if
from tests.workers import Workers
from zerofx import ShardedTensor

aten = torch.ops.aten


def paired(p: torch.Tensor) -> torch.Tensor:
    """A (4, 6) parameter as a (4, 3) complex one."""
    return torch.view_as_complex(p.view(*p.shape[:-1], -1, 2))


CASES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    # Operator, and what sets the case apart -> the view that is taken of a parameter of (4, 6).
    "_conj.default": lambda op, p: op(paired(p)),
    "_neg_view.default": lambda op, p: op(p),
    "_reshape_alias.default": lambda op, p: op(p, [3, 8], [8, 1]),
    "adjoint.default": lambda op, p: op(paired(p)),
    "alias.default": lambda op, p: op(p),
    "as_strided.default": lambda op, p: op(p, [2, 3], [6, 2]),
    "as_strided.default from an element": lambda op, p: op(p, [2, 3], [6, 2], 1),
    "as_strided.default of itself": lambda op, p: op(op(p, [2, 3], [6, 2], 1), [2, 2], [3, 1], 7),
    "as_strided.default of a copy": lambda op, p: op(p.clone(), [2, 3], [6, 2], 1),
    "as_strided.default of a slice": lambda op, p: op(p[1:], [3, 2], [2, 1]),
    "as_strided.default of complex numbers": lambda op, p: op(paired(p), [2, 3], [1, 2], 3),
    "as_strided.default that overlaps": lambda op, p: op(p, [7, 3], [2, 1], 2),
    "broadcast_to.default": lambda op, p: op(p, [2, 4, 6]),
    "chunk.default": lambda op, p: op(p, 2)[1],
    "conj.default": lambda op, p: op(paired(p)),
    "contiguous.default": lambda op, p: op(p.t()),
    "detach.default": lambda op, p: op(p),
    "diagonal.default": lambda op, p: op(p, 1),
    "dsplit.array": lambda op, p: op(p.view(2, 2, 6), [2])[1],
    "dsplit.int": lambda op, p: op(p.view(2, 2, 6), 2)[1],
    "expand.default": lambda op, p: op(p, [2, 4, 6]),
    "expand_as.default": lambda op, p: op(p, p.new_empty(2, 4, 6)),
    "flatten.using_ints": lambda op, p: op(p),
    "hsplit.array": lambda op, p: op(p, [2])[1],
    "hsplit.int": lambda op, p: op(p, 2)[1],
    "imag.default": lambda op, p: op(paired(p)),
    "imag.default of a conjugate": lambda op, p: op(paired(p).conj()),
    "linalg_diagonal.default": lambda op, p: op(p),
    "mH.default": lambda op, p: op(paired(p)),
    "mT.default": lambda op, p: op(p),
    "matrix_H.default": lambda op, p: op(paired(p)),
    "moveaxis.int": lambda op, p: op(p, 0, 1),
    "moveaxis.intlist": lambda op, p: op(p, [0], [1]),
    "movedim.int": lambda op, p: op(p, 0, 1),
    "movedim.intlist": lambda op, p: op(p, [0], [1]),
    "narrow.Tensor": lambda op, p: op(p, 1, torch.tensor(1), 4),
    "narrow.default": lambda op, p: op(p, 1, 1, 4),
    "numpy_T.default": lambda op, p: op(p),
    "permute.default": lambda op, p: op(p, [1, 0]),
    "positive.default": lambda op, p: op(p),
    "ravel.default": lambda op, p: op(p),
    "real.default": lambda op, p: op(paired(p)),
    "reshape.default": lambda op, p: op(p, [3, 8]),
    "reshape_as.default": lambda op, p: op(p, p.new_empty(3, 8)),
    "resolve_conj.default": lambda op, p: op(paired(p).conj()),
    "resolve_neg.default": lambda op, p: op(paired(p).conj().imag),
    "select.int": lambda op, p: op(p, 0, 1),
    "slice.Tensor": lambda op, p: op(p, 1, 1, 5, 2),
    "split.Tensor": lambda op, p: op(p, 3, 1)[1],
    "split.sizes": lambda op, p: op(p, [1, 5], 1)[1],
    "split_with_sizes.default": lambda op, p: op(p, [1, 5], 1)[1],
    "squeeze.default": lambda op, p: op(p.view(4, 1, 6)),
    "squeeze.dim": lambda op, p: op(p.view(4, 1, 6), 1),
    "squeeze.dims": lambda op, p: op(p.view(4, 1, 6), [1]),
    "swapaxes.default": lambda op, p: op(p, 0, 1),
    "swapdims.default": lambda op, p: op(p, 0, 1),
    "t.default": lambda op, p: op(p),
    "tensor_split.indices": lambda op, p: op(p, [1])[1],
    "tensor_split.sections": lambda op, p: op(p, 3)[1],
    "tensor_split.tensor_indices_or_sections": lambda op, p: op(p, torch.tensor(3))[1],
    "to.device": lambda op, p: op(p, "cpu", torch.float32),
    "to.dtype": lambda op, p: op(p, torch.float32),
    "to.dtype_layout": lambda op, p: op(p, dtype=torch.float32),
    "to.other": lambda op, p: op(p, p.new_empty(1)),
    "transpose.int": lambda op, p: op(p, 0, 1),
    "unbind.int": lambda op, p: op(p)[1],
    "unflatten.int": lambda op, p: op(p, 1, [2, 3]),
    "unfold.default": lambda op, p: op(p, 1, 3, 2),
    "unsqueeze.default": lambda op, p: op(p, 1),
    "view.default": lambda op, p: op(p, [3, 8]),
    "view.dtype": lambda op, p: op(p, torch.complex64),
    "view.dtype to whole numbers": lambda op, p: op(p.detach(), torch.int32),
    "view_as.default": lambda op, p: op(p, p.new_empty(3, 8)),
    "view_as_complex.default": lambda op, p: op(p.view(4, 3, 2)),
    "view_as_real.default": lambda op, p: op(paired(p)),
    "vsplit.array": lambda op, p: op(p, [1])[1],
    "vsplit.int": lambda op, p: op(p, 2)[1],
    # Copies, which need not be saved either.
    "diagonal_copy.default": lambda op, p: op(p),
    "permute_copy.default": lambda op, p: op(p, [1, 0]),
    "unfold_copy.default": lambda op, p: op(p, 1, 3, 2),
    "clone.default of a transpose": lambda op, p: op(p.t()),
    "conj_physical.default": lambda op, p: op(paired(p)),
}

NOT_OF_A_PARAMETER = {
    "sparse tensors": """
        _indices.default _sparse_broadcast_to.default _values.default ccol_indices.default coalesce.default
        col_indices.default crow_indices.default indices.default row_indices.default values.default
        """,
    "nested tensors": """
        _nested_get_values.default _nested_view_from_buffer.default _nested_view_from_jagged.default
        """,
    "named dimensions, which 2.11 still has and torch.compile never took": """
        align_to.default align_to.ellipsis_idx diagonal.Dimname flatten.DimnameList flatten.named_out_dim
        flatten.using_names refine_names.default rename.default select.Dimname squeeze.dimname transpose.Dimname
        unbind.Dimname unflatten.Dimname
        """,
    "forward-mode differentiation": "_fw_primal.default _make_dual.default _unpack_dual.default",
    "what autocast, TorchScript and tests do": """
        _autocast_to_full_precision.default _autocast_to_reduced_precision.default
        _test_autograd_multiple_dispatch_view.default
        """,
    "autograd refuses it of a leaf": "lift_fresh.default",
    "gradients of slices, which Python has no name for": "slice_inverse.default",
    "moves to pinned memory of an accelerator": "pin_memory.default",
}


def views_of_aten() -> set[str]:
    """All operators whose result shares memory with what they are given, and that write nothing: by their schemas."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace == "aten":
            schema = getattr(getattr(aten, base), overload or "default")._schema
            if not schema.is_mutable and any(r.alias_info is not None for r in schema.returns):
                found.add(f"{base}.{overload or 'default'}")
    return found


def operator_of(case: str) -> Any:
    base, _, overload = case.split()[0].partition(".")
    return getattr(getattr(aten, base), overload)


def test_every_view_of_aten_is_tried_or_cannot_be_taken_of_a_parameter() -> None:
    tried = {case.split()[0] for case in CASES}
    left_out = {name for names in NOT_OF_A_PARAMETER.values() for name in names.split()}
    assert not tried & left_out
    assert views_of_aten() - tried == left_out & views_of_aten()


class Views(nn.Module):
    """A parameter per case, and a product with a view of it, whose gradient needs that view."""

    def __init__(self, cases: list[str]) -> None:
        super().__init__()
        self.cases = cases
        self.scale = nn.Linear(3, len(cases))
        self.weights = nn.ParameterList(torch.randn(4, 6) for _ in cases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = self.scale(x).mean(0).unbind()
        loss = x.new_zeros(())
        for case, scale, p in zip(self.cases, scales, self.weights):
            view = CASES[case](operator_of(case), p)
            view = view.remainder(101) if not (view.is_floating_point() or view.is_complex()) else view
            loss = loss + (scale * view).abs().sin().mean() + p.square().sum()
        return loss


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


def check(cases: list[str], **options: Any) -> None:
    torch.manual_seed(0)
    plain, module = Views(cases), Views(cases)
    module.load_state_dict(plain.state_dict())
    zerofx.compile(module, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, module)]
    for seed in range(2):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
        mine = x.chunk(dist.get_world_size())[dist.get_rank()]
        torch.testing.assert_close(scattered := module(mine), plain(mine))
        scattered.backward()
        losses = [plain(part) for part in x.chunk(dist.get_world_size())]
        torch.stack(losses).mean().backward()
        for case, p, q in zip(cases, module.weights, plain.weights):
            torch.testing.assert_close(full(p.grad), q.grad, msg=f"{case}: {{}}".format, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(zerofx.graphs(module)) == 1


def here(cases: dict[str, Any]) -> list[str]:
    """The cases whose operator this PyTorch has."""
    return [case for case in cases if hasattr(aten, case.partition(".")[0])]


@quick_if(lambda stage: stage == 0)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_view_of_a_parameter_trains_as_on_one_process(workers2: Workers, stage: int) -> None:
    workers2.run(check, here(CASES), stage=stage, executor="eager")


GENERATED = """
    _conj.default; _neg_view.default; as_strided.default from an element; as_strided.default of a copy;
    as_strided.default of complex numbers; chunk.default; diagonal.default; imag.default of a conjugate;
    resolve_conj.default; squeeze.dim; unfold.default; view.dtype; view_as_complex.default; view_as_real.default
    """.split(";")
"""A selection: every way in which a kernel may find elements, once."""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_with_generated_code_it_does_so_too(workers2: Workers, stage: int) -> None:
    workers2.run(check, here({case.strip(): None for case in GENERATED}), stage=stage, timeout=300)
