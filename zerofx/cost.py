"""What a stage costs a rank, as formulas: bytes it holds, bytes it sends, collectives it starts.

Letters: ``N`` parameters in ``n`` groups, ``M`` ranks, ``k`` micro-batches per optimizer step. Bytes of one element:
``m`` of a master weight, ``w`` of a weight as the model computes with it, ``g`` of a gradient as it is reduced.

At rest between backward and the optimizer's step, with Adam (two moments), in full precision (``m = w = g``):

=====  ========  =========  =======  =========  ==================  =====================
stage  weights   gradients  master   moments    total               for ``m = 4``
=====  ========  =========  =======  =========  ==================  =====================
0      m N       m N        --       2 m N      4 m N               16 N
1, 2   m N       m N/M      --       2 m N/M    m N + 3 m N/M       4 N + 12 N/M
3      m N/M     m N/M      --       2 m N/M    4 m N/M             16 N/M
=====  ========  =========  =======  =========  ==================  =====================

and in mixed precision (`MIXED`), where a dash under weights means that they are there only while they are used:

=====  ========  =========  =======  =========  ==================  =====================
stage  weights   gradients  master   moments    total               for ``m, w, g = 4 2 2``
=====  ========  =========  =======  =========  ==================  =====================
0      --        m N        m N      2 m N      4 m N               16 N
1, 2   w N       m N/M      m N/M    2 m N/M    w N + 4 m N/M       2 N + 16 N/M
3      --        m N/M      m N/M    2 m N/M    4 m N/M             16 N/M
=====  ========  =========  =======  =========  ==================  =====================

While gradients accumulate under `zerofx.no_sync` they take ``g N`` in any stage, whole and not yet averaged. So stage
1, which is meant to be used so, has ``(w + g) N + 3 m N/M``: the paper's 4 N + 12 N/M. Stage 2 is above the paper's
2 N + 14 N/M because a gradient has the dtype of its parameter, which is the master here. A model that is bfloat16
itself, with the masters in `zerofx.AdamW`, holds the paper's table: `zero_table`.

Per optimizer step and rank, in units of ``(M - 1)/M N`` bytes, and in collectives:

=====  =====================  ======================  ===============  ===================
stage  bytes                  bytes, no_sync          collectives      collectives, no_sync
=====  =====================  ======================  ===============  ===================
0      2 k g                  2 g                     k n              n
1, 2   w + k g                w + g                   (1 + k) n        2 n
3      2 k w + k g            2 k w + g               3 k n            (2 k + 1) n
=====  =====================  ======================  ===============  ===================

Stages 1 and 2 bring their replicas up to date once per optimizer step; stage 3 gathers in every forward and every
backward, but for groups that stay gathered in between (``kept=``). An all-reduce is a reduce-scatter and an all-gather,
hence the 2 of stage 0. Activations, gathered buffers and padding (below 1 percent, `zerofx.layout`) are not in the
formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from sympy import Expr, Integer, Symbol

from zerofx.precision import MixedPrecision

N, M, n, k, m, w, g = SYMBOLS = [Symbol(name, positive=True) for name in "N M n k m w g".split()]

_Formulas = TypeVar("_Formulas", bound="Formulas")


@dataclass(frozen=True)
class Formulas:
    """Fields that are expressions, and numbers once every letter has one."""

    def at(self: _Formulas, **values: float) -> _Formulas:
        """The same with numbers for letters: ``memory(2).at(N=7.5e9, M=64, m=4)``."""
        unknown = sorted(set(values) - {symbol.name for symbol in SYMBOLS})
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no letter of the formulas: they have N, M, n, k, m, w and g.")
        known = {symbol: values[symbol.name] for symbol in SYMBOLS if symbol.name in values}
        return replace(self, **{field.name: getattr(self, field.name).subs(known) for field in fields(self)})


@dataclass(frozen=True)
class Sizes(Formulas):
    """Bytes of one element. Where weights have the size of masters they are the masters, and are not held twice."""

    master: Expr = m
    weight: Expr = m
    gradient: Expr = m

    @property
    def mixed(self) -> bool:
        return self.weight != self.master

    @staticmethod
    def of(precision: MixedPrecision | None, dtype: torch.dtype = torch.float32) -> Sizes:
        """The sizes for a module whose parameters have ``dtype``."""
        precision = precision or MixedPrecision()
        weight = precision.param_dtype or dtype
        gradient = precision.reduce_dtype or weight
        return Sizes(Integer(dtype.itemsize), Integer(weight.itemsize), Integer(gradient.itemsize))


FULL = Sizes()
MIXED = Sizes(m, w, g)


@dataclass(frozen=True)
class Memory(Formulas):
    """Bytes on one rank.

    Attributes:
        weights: what the model computes with, where it stays from step to step.
        gradients: ``.grad``; or, while gradients accumulate under `zerofx.no_sync`, what is kept back.
        master: what the optimizer updates, where that is not the weights.
        moments: what the optimizer remembers.
    """

    weights: Expr
    gradients: Expr
    master: Expr
    moments: Expr

    @property
    def total(self) -> Expr:
        return self.weights + self.gradients + self.master + self.moments


@dataclass(frozen=True)
class Traffic(Formulas):
    """Of one optimizer step, on one rank: bytes received (as many are sent), and collectives started."""

    gathered: Expr
    reduced: Expr
    collectives: Expr

    @property
    def total(self) -> Expr:
        return self.gathered + self.reduced


def memory(stage: int, sizes: Sizes = FULL, *, accumulating: bool = False, moments: int = 2) -> Memory:
    """What a rank holds; ``accumulating``: between two backwards under `zerofx.no_sync`."""
    owned = N if _checked(stage) == 0 else N / M  # what this rank's optimizer updates
    if sizes.mixed:
        weights = sizes.weight * N if stage in (1, 2) else Integer(0)
        master = sizes.master * owned
    else:
        weights = sizes.master * (N / M if stage == 3 else N)
        master = Integer(0)
    gradients = sizes.gradient * N if accumulating else sizes.master * owned
    return Memory(weights, gradients, master, moments * sizes.master * owned)


def memory_16_bit(stage: int, *, accumulating: bool = False) -> Memory:
    """What a rank holds of a model that is 16-bit itself, where `zerofx.AdamW` holds float32 masters and moments."""
    owned = N if _checked(stage) == 0 else N / M
    weights = 2 * (N / M if stage == 3 else N)
    return Memory(weights, 2 * (N if accumulating else owned), 4 * owned, 8 * owned)


def traffic(
    stage: int, sizes: Sizes = FULL, *, no_sync: bool = False, kept: tuple[int | Expr, int | Expr] = (0, 0)
) -> Traffic:
    """What a rank sends; ``no_sync``: all but the last of the ``k`` micro-batches run under `zerofx.no_sync`.

    In stage 0 ``n`` is the number of buckets. ``kept``: stage 3, the elements and the number of the groups that stay
    gathered from forward to backward (``memory_budget``).
    """
    gathers = [Integer(0), Integer(1), Integer(1), 2 * k][_checked(stage)]
    spared, spared_groups = (k * x if stage == 3 else Integer(0) for x in kept)
    reductions = Integer(1) if no_sync else k
    there_and_back = 2 if stage == 0 else 1
    share = (M - 1) / M
    return Traffic(
        gathered=share * (N * gathers - spared) * sizes.weight,
        reduced=share * N * reductions * sizes.gradient * there_and_back,
        collectives=n * (gathers + reductions) - spared_groups,
    )


def zero_table() -> list[Memory]:
    """Figure 1 of the ZeRO paper by stage: 16-bit weights and gradients, float32 master weights and Adam's moments."""

    def parts(first: int, stage: int) -> Expr:
        return N / M if stage >= first else N

    return [Memory(2 * parts(3, s), 2 * parts(2, s), 4 * parts(1, s), 8 * parts(1, s)) for s in range(4)]


def _checked(stage: int) -> int:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r}: expected 0, 1, 2 or 3.")
    return stage
