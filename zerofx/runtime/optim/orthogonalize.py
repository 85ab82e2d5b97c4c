"""Newton-Schulz: each matrix becomes the nearest one whose rows, or columns, are orthonormal, or nearly so.

::

    orthogonalize([q, k, v, up, down])   # q, k, v: one batch; up and down, which is its transpose's shape: another

A matrix ``U S V^T`` becomes ``U f(S) V^T``, where ``f`` brings all singular values near 1: the direction of steepest
descent under the spectral norm (Bernstein & Newhouse 2024), for which Muon takes it (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/). ``f`` is an odd polynomial, applied several times; it takes nothing but
matrix products::

    X <- X / ||X||                                    singular values are at most 1
    A = X X^T;  X <- a X + (b A + c A A) X            f(s) = a s + b s^3 + c s^5, ``steps`` times

==================  ===============  ================================================================
coefficients        singular values  source
==================  ===============  ================================================================
"quintic"           0.47 to 1.21     Jordan et al.: steepest at 0, so small ones grow fast; one triple
"polar_express"     0.84 to 1.13     Amsel et al. 2025 (arXiv 2505.16932): the best triple for each step
==================  ===============  ================================================================

(After five steps, of singular values from a thousandth of the norm.) `Coefficients` may be a name, a triple, or one for
each step; the last is for all steps that follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Triple = tuple[float, float, float]
Coefficients = Triple | Sequence[Triple] | str

QUINTIC: Triple = (3.4445, -4.7750, 2.0315)
"""Of Jordan et al., and of ``torch.optim.Muon``."""

# Remez's algorithm step by step, for singular values from 0.001 (algorithm 1 of the paper). Converged, it is the
# Newton-Schulz iteration of fifth degree, (15, -10, 3) / 8.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_CUSHION = 1.01  # rounding in 16 bits may bring a singular value above 1, where these polynomials soon leave all bounds
POLAR_EXPRESS: tuple[Triple, ...] = (
    *((a / _CUSHION, b / _CUSHION**3, c / _CUSHION**5) for a, b, c in _POLAR_EXPRESS),
    (1.875, -1.25, 0.375),
)
NAMED: dict[str, tuple[Triple, ...]] = {"quintic": (QUINTIC,), "polar_express": POLAR_EXPRESS}

_BATCH, _BATCH_ON_CPU = 1 << 26, 1 << 17
"""Elements of a batch: beyond that a product keeps the device busy, and a batch takes memory. On a CPU time as well:
eight matrices of 512 x 512 in bfloat16 take 187 ms in one batch and 161 ms one by one, 32 of 64 x 64 take 3 and 14."""


def orthogonalize(
    matrices: Sequence[torch.Tensor],
    *,
    steps: int = 5,
    coefficients: Coefficients = QUINTIC,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> list[torch.Tensor]:
    """``matrices``, orthogonalized, in ``dtype``; those of equal shape, or one the other's transpose, in one batch.

    Args:
        matrices: of two dimensions; of three, as many matrices as the first is long (experts); of more, a convolution's
            weight, whose output channels are rows.
        steps: of the iteration.
        coefficients: a triple, one for each step, or a name of `NAMED`.
        eps: the least norm that is divided by.
        dtype: of the iteration.
    """
    triples = triples_of(coefficients, steps)
    wide = [_wide(matrix) for matrix in matrices]
    batches: dict[tuple[torch.device, torch.Size], list[int]] = {}
    for i, x in enumerate(wide):
        batches.setdefault((x.device, x.shape[-2:]), []).append(i)
    results: list[torch.Tensor | None] = [None] * len(wide)
    for together in batches.values():
        most = _BATCH_ON_CPU if wide[together[0]].is_cpu else _BATCH
        for some in _cut(together, [wide[i].numel() for i in together], most):
            values = _iterate([wide[i].to(dtype) for i in some], triples, eps)
            for i, value in zip(some, values, strict=True):
                results[i] = _like(value, matrices[i])
    return [x for x in results if x is not None]


def matrix_shape(shape: torch.Size, flat: bool = False) -> tuple[int, int, int]:
    """How many matrices a tensor of this ``shape`` is, and their rows and columns; ``flat``: one, in any case."""
    if len(shape) == 3 and not flat:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], math.prod(shape[1:])


def operations(shape: Sequence[int]) -> float:
    """Floating-point operations of one step, to balance owners by."""
    count, rows, columns = matrix_shape(torch.Size(shape))
    short, long = min(rows, columns), max(rows, columns)
    return count * (4.0 * short * short * long + 2.0 * short**3)


def triples_of(coefficients: Coefficients, steps: int) -> list[Triple]:
    """A triple for each step.

    Raises:
        ValueError: an unknown name, or what are no triples.
    """
    given = NAMED.get(coefficients, ()) if isinstance(coefficients, str) else coefficients
    if len(given) == 3 and all(isinstance(x, (int, float)) for x in given):
        given = (given,)  # type: ignore[assignment]
    if not given or any(isinstance(x, (str, int, float)) or len(x) != 3 for x in given):
        raise ValueError(
            f'ns_coefficients={coefficients!r}: expected three numbers, three for each step, or one of "quintic" and '
            '"polar_express".'
        )
    triples: list[Triple] = [tuple(map(float, x)) for x in given]  # type: ignore[arg-type,misc]
    return [triples[min(i, len(triples) - 1)] for i in range(steps)]


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    """A view with no more rows than columns: ``X X^T`` is the smaller product then."""
    x = matrix if matrix.ndim == 3 else matrix.flatten(1)
    return x.mT if x.shape[-2] > x.shape[-1] else x


def _like(value: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``value``, of the shape that `_wide` gave, in the shape of ``matrix``."""
    rows, columns = (matrix if matrix.ndim == 3 else matrix.flatten(1)).shape[-2:]
    return (value.mT if rows > columns else value).reshape(matrix.shape)


def _cut(indices: list[int], sizes: list[int], most: int) -> list[list[int]]:
    """``indices`` in batches of at most ``most`` elements, or of one."""
    batches: list[list[int]] = []
    room = 0
    for index, size in zip(indices, sizes, strict=True):
        if size > room or not batches:
            batches.append([])
            room = most
        batches[-1].append(index)
        room -= size
    return batches


def _iterate(wide: list[torch.Tensor], triples: list[Triple], eps: float) -> list[torch.Tensor]:
    """Of matrices of one shape, of two dimensions or three."""
    counts = [x.shape[0] if x.ndim == 3 else 0 for x in wide]
    if counts == [0]:
        return [_newton_schulz(wide[0], triples, eps)]  # without a batch's dimension: what torch.optim.Muon computes
    x = torch.cat([x if x.ndim == 3 else x.unsqueeze(0) for x in wide])
    parts = _newton_schulz(x, triples, eps).split([max(count, 1) for count in counts])
    return [part if count else part.squeeze(0) for part, count in zip(parts, counts, strict=True)]


def _newton_schulz(x: torch.Tensor, triples: list[Triple], eps: float) -> torch.Tensor:
    times_plus = torch.baddbmm if x.ndim == 3 else torch.addmm
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for a, b, c in triples:
        gram = x @ x.mT
        x = times_plus(x, times_plus(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
