"""What a stage costs a rank, as formulas: bytes it holds, bytes it sends, collectives it starts, seconds it takes.

Letters: ``N`` parameters in ``n`` groups, ``M`` ranks, ``k`` micro-batches per optimizer step. Where not all ranks
share everything, `Ranks` has a number for each purpose, and the formulas take the one that fits. Bytes of one element:
``m`` of a master weight, ``w`` of a weight as the model computes with it, ``g`` of a gradient as it is reduced. For
seconds: ``F`` and ``B`` floating-point operations of a micro-batch's forward and backward, ``c`` of them in a second; a
collective takes ``a`` seconds, and one more for each ``b`` bytes that a rank receives while it sends as many; a disk
reads and writes ``d`` bytes in a second, memory ``e``.

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
itself, with the masters in `zerofx.AdamW`, holds the paper's table.

Per optimizer step and rank, in units of ``(M - 1)/M N`` bytes, and in collectives:

=====  =====================  ======================  ===============  ===================
stage  bytes                  bytes, no_sync          collectives      collectives, no_sync
=====  =====================  ======================  ===============  ===================
0      2 k g                  2 g                     k n              n
1, 2   w + k g                w + g                   (1 + k) n        2 n
3      2 k w + k g            2 k w + g               3 k n            (2 k + 1) n
=====  =====================  ======================  ===============  ===================

On a mesh of two dimensions, ``R`` replicas of ``M`` ranks each, a gradient that was reduced is summed over replicas:
``2 (R - 1)/R N/M g`` bytes and ``n`` collectives more for each reduction (`Traffic.between`). The seconds below take
both links for one; those of a plan know two, and the other schemes (`zerofx.inspect.predict.schemes`).

In a file (`zerofx.Offload`, docs/offload.md), of the ``D = N/M`` elements whose state moves, or the part of them that
does, with Adam and ``r`` reductions per step (``k``, or 1 with no_sync):

=========  =======  ============  ===========  ==============
kind       at rest  k forwards    k backwards  optimizer
=========  =======  ============  ===========  ==============
moments    2 m D    --            --           4 m D
weights    m D      k m D         k m D        2 m D
gradients  m D      --            (4 r - 3) m D  m D
=========  =======  ============  ===========  ==============

Moments are read and written; so are weights, which each graph of stage 3 reads as well. A gradient is written, and read
by the optimizer; each further one is written, read with the sum so far, and the sum is written. ``max_grad_norm`` reads
gradients once more, and has them written where it scales them; that is not in it. Masters of a model that is 16-bit
itself, 4 D, go with the moments. A disk that reads and writes ``d`` bytes in a second takes the optimizer's step
``max(bytes / d, arithmetic)``, where arithmetic is bound by memory: 28 N/M bytes at ``e`` in a second.

In the host's memory it is the same at rest, and what passes is copied between that and the device. The optimizer steps
there. So it moves the gradient (m D) and weights (2 m D, or m D beside masters) that are not there. Each further
gradient is copied out, comes back with the sum so far, and both leave: 5 m D. The link has a way each: of these 2 m D
come to the device while 3 m D leave it, and weights come. A phase takes as long as the busier way, at ``d`` bytes in a
second.

Stages 1 and 2 bring their replicas up to date once per optimizer step; stage 3 gathers in every forward and every
backward, but for groups that stay gathered in between (``kept=``). An all-reduce is a reduce-scatter and an all-gather,
hence the 2 of stage 0. Activations, gathered buffers and padding (below 1 percent, `zerofx.model.layout`) are not in
the formulas.

Seconds. ``f = F/c`` and ``h = B/c`` are compute, ``G`` and ``R`` the seconds in which all groups are gathered, or their
gradients reduced: bytes / ``b`` + collectives ``a``. Each phase has two resources, and is as long as the busier one:

=====  ==========================  ===============  =================
stage  forward                     backward         backward, no_sync
=====  ==========================  ===============  =================
0      f                           max(h, R)        h
1, 2   max(f, G), the first of k   max(h, R)        h
3      max(f, G)                   max(h, G + R)    max(h, G)
=====  ==========================  ===============  =================

The last backward of an optimizer step reduces in any case. What an optimizer changes cannot travel before it has, nor a
gradient before it is there: so in stages 1 and 2 gathers hide behind forward alone, reductions behind backward alone.
At the ends of a phase nothing can hide: no layer computes before the first group is there, and no gradient travels
before the first layer is through. With groups of one size, each starting one ahead of its use
(`zerofx.passes.prefetch`)::

    compute bound     wire  ▐G▐  ▐G▐  ▐G▐            wire bound     wire  ▐  G  ▐  G  ▐  G  ▐
                   compute     ▐ f  ▐ f  ▐ f  ▐                  compute        ▐f▐   ▐f▐   ▐f▐
                            f + G/n                                       G + f/n

So forward takes max(f + G/n, G + f/n), and that is what ``step`` has (`_pipeline`). Two ahead, the default, is never
slower. Not in it: the optimizer, kernels bound by memory or by launching, recomputed activations, groups of unequal
size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from sympy import Expr, Integer, Max, Symbol, sympify

from zerofx.model.precision import MixedPrecision
from zerofx.runtime.ranks.sharing import Sharing
from zerofx.runtime.state.account import GIVEN, Account, Elements, Terms, at_rest

LETTERS = "N M n k m w g F B c a b d e"
SYMBOLS: list[Symbol] = [Symbol(name, positive=True) for name in LETTERS.split()]
N, M, n, k, m, w, g, F, B, c, a, b, d, e = SYMBOLS

_ONE, _NOTHING = Integer(1), Integer(0)

_Formulas = TypeVar("_Formulas", bound="Formulas")


@dataclass(frozen=True)
class Formulas:
    """Fields that are expressions, and numbers once every letter has one."""

    def at(self: _Formulas, **values: float) -> _Formulas:
        """The same with numbers for letters: ``memory(2).at(N=7.5e9, M=64, m=4)``."""
        unknown = sorted(set(values) - {symbol.name for symbol in SYMBOLS})
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no letter of the formulas: they have {LETTERS.replace(' ', ', ')}.")
        known = {symbol: sympify(values[symbol.name]) for symbol in SYMBOLS if symbol.name in values}
        return replace(self, **{field.name: getattr(self, field.name).xreplace(known) for field in fields(self)})

    def __add__(self: _Formulas, other: _Formulas) -> _Formulas:
        return type(self)(*(getattr(self, x.name) + getattr(other, x.name) for x in fields(self)))


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


@dataclass(frozen=True)
class Ranks(Formulas):
    """How many ranks share what, by purpose (`zerofx.runtime.ranks.sharing`)."""

    weights: Expr = M
    gradients: Expr = M
    optimizer: Expr = M
    replicas: Expr = _ONE

    @staticmethod
    def of(sharing: Sharing) -> Ranks:
        """The numbers of ranks of ``sharing``."""
        shared = (sharing.weights.size, sharing.gradients.size, sharing.optimizer.size, sharing.copies)
        return Ranks(*map(Integer, shared))


ALL = Ranks()
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

    @staticmethod
    def of(held: Account, mixed: bool) -> Memory:
        """An account in these columns; ``mixed``: shards are masters, as they are beside replicas."""
        weights, master = (0, held.shards) if mixed or held.replicas else (held.shards, 0)
        columns = (held.replicas + weights, held.gradients + held.cut_off, master + held.masters, held.moments)
        return Memory(*map(sympify, columns))

    @property
    def total(self) -> Expr:
        return self.weights + self.gradients + self.master + self.moments


@dataclass(frozen=True)
class Traffic(Formulas):
    """Of one optimizer step, on one rank: bytes received (as many are sent), and collectives started.

    ``between``: replicas of the module; the others inside of one.
    """

    gathered: Expr
    reduced: Expr
    collectives: Expr
    between: Expr = _NOTHING

    @property
    def total(self) -> Expr:
        return self.gathered + self.reduced + self.between


@dataclass(frozen=True)
class Filed(Formulas):
    """Bytes that a rank has in its file, and that it reads and writes there in one optimizer step.

    Attributes:
        weights, gradients, master, moments: at rest, of each column of `Memory`.
        forward, backward: in all graphs of the step.
        optimizer: in its step.
        backward_in, optimizer_in: of these, what goes to the device while others leave it: the host's memory has a way
            for each. A file has one for both, and these are 0.
    """

    weights: Expr = _NOTHING
    gradients: Expr = _NOTHING
    master: Expr = _NOTHING
    moments: Expr = _NOTHING
    forward: Expr = _NOTHING
    backward: Expr = _NOTHING
    optimizer: Expr = _NOTHING
    backward_in: Expr = _NOTHING
    optimizer_in: Expr = _NOTHING

    @property
    def backward_longer(self) -> Expr:
        """Of ``backward``, what goes the way that more does."""
        return Max(self.backward - self.backward_in, self.backward_in)

    @property
    def optimizer_longer(self) -> Expr:
        """Of ``optimizer``, what goes the way that more does."""
        return Max(self.optimizer - self.optimizer_in, self.optimizer_in)

    @property
    def at_rest(self) -> Expr:
        return self.weights + self.gradients + self.master + self.moments

    @property
    def per_step(self) -> Expr:
        return self.forward + self.backward + self.optimizer

    def left(self, held: Memory) -> Memory:
        """Of what a rank ``held`` without a file, what stays in memory."""
        return Memory(
            held.weights - self.weights,
            held.gradients - self.gradients,
            held.master - self.master,
            held.moments - self.moments,
        )


@dataclass(frozen=True)
class Time(Formulas):
    """Of one optimizer step, on one rank, in seconds; without the optimizer.

    Attributes:
        compute: of all forwards and backwards.
        wire: of all collectives, one after the other.
        step: from first to last, with each phase's collectives after its compute.
        optimizer: of the optimizer, which comes on top; only known with the rate of a disk, or of the link to the
            host (`Filed`).
    """

    compute: Expr
    wire: Expr
    step: Expr
    optimizer: Expr = _NOTHING

    @property
    def whole(self) -> Expr:
        """``step`` and ``optimizer``."""
        return self.step + self.optimizer

    @property
    def exposed(self) -> Expr:
        """Of ``step``, how long compute waits for the wire."""
        return self.step - self.compute

    @property
    def bound(self) -> Expr:
        """What no schedule can beat: the busier of the two resources, if it never rests."""
        return Max(self.compute, self.wire)


def elements(numel: Expr, ranks: Ranks) -> Elements:
    """Of ``numel`` elements, without padding."""
    owned = numel / ranks.optimizer
    return Elements(numel, numel, numel / ranks.weights, owned, owned)


def memory(
    stage: int, sizes: Sizes = FULL, *, ranks: Ranks = ALL, accumulating: bool = False, moments: int = 2
) -> Memory:
    """What a rank holds; ``accumulating``: between two backwards under `zerofx.no_sync`."""
    given, apart = GIVEN[_checked(stage)], sizes.mixed and stage in (1, 2)
    terms = Terms(given, sizes.master, sizes.weight, sizes.gradient, apart, optimizer=(0, moments * sizes.master))
    return Memory.of(at_rest(elements(N, ranks), terms, accumulating=accumulating), sizes.mixed)


def filed(
    trained: Account,
    frozen: Account,
    kinds: Collection[str],
    mixed: bool,
    *,
    no_sync: bool = False,
    accumulating: bool = False,
    on_host: bool = False,
) -> Filed:
    """What is in a rank's file of groups that move, trained and frozen, and what passes through it.

    Args:
        kinds: what moves of them: "moment", "weights" (stage 3) and "gradient".
        mixed: as for `Memory.of`.
        accumulating: gradients that are kept whole stay in memory.
        on_host: they are in the host's memory. What passes between that and the device for the optimizer's step are
            gradients and weights that are not there: weights back, and out where they are the masters.
    """
    there, still = trained.elsewhere(kinds), frozen.elsewhere(kinds)
    column, weights = Memory.of(there, mixed), there.shards + still.shards
    reductions = Integer(1) if no_sync else k
    optimizer = 2 * (there.moments + there.masters + there.shards) + there.gradients
    backward_in = optimizer_in = _NOTHING
    if on_host:
        leaves = ("gradient" not in kinds) + ("weights" not in kinds and not trained.masters)
        optimizer_in = trained.gradients * int("weights" not in kinds)
        optimizer = trained.gradients * leaves + optimizer_in
        backward_in = k * weights + 2 * (reductions - 1) * there.gradients
    return Filed(
        weights=column.weights + still.shards,
        gradients=_NOTHING if accumulating else column.gradients,
        master=column.master,
        moments=column.moments,
        forward=k * weights,
        backward=k * weights + (5 * reductions - 4 if on_host else 4 * reductions - 3) * there.gradients,
        optimizer=sympify(optimizer),
        backward_in=sympify(backward_in),
        optimizer_in=sympify(optimizer_in),
    )


def traffic(
    stage: int,
    sizes: Sizes = FULL,
    *,
    ranks: Ranks = ALL,
    no_sync: bool = False,
    kept: tuple[int | Expr, int | Expr] = (0, 0),
    frozen: tuple[int | Expr, int | Expr] = (0, 0),
) -> Traffic:
    """What a rank sends; ``no_sync``: all but the last of the ``k`` micro-batches run under `zerofx.no_sync`.

    In stage 0 ``n`` is the number of buckets. ``kept``: stage 3, the elements and the number of the groups that stay
    gathered from forward to backward (``memory_budget``). ``frozen``: those of groups that are not trained, beside
    ``N`` and ``n``; only stage 3 gathers them, for replicas of them never get old.
    """
    gathers = [Integer(0), Integer(1), Integer(1), 2 * k][_checked(stage)]
    spared, spared_groups = (k * x if stage == 3 else Integer(0) for x in kept)
    others, other_groups = frozen if stage == 3 else (Integer(0), Integer(0))
    reductions = Integer(1) if no_sync else k
    there_and_back = 2 if stage == 0 else 1
    return Traffic(
        gathered=_sent(ranks.weights) * ((N + others) * gathers - spared) * sizes.weight,
        reduced=_sent(ranks.gradients) * N * reductions * sizes.gradient * there_and_back,
        collectives=(n + other_groups) * gathers + (1 + _sums(stage, ranks)) * n * reductions - spared_groups,
        between=_between(stage, sizes, ranks) * reductions,
    )


def time(
    stage: int,
    sizes: Sizes = FULL,
    *,
    ranks: Ranks = ALL,
    no_sync: bool = False,
    kept: tuple[int | Expr, int | Expr] = (0, 0),
    frozen: tuple[int | Expr, int | Expr] = (0, 0),
    files: Filed | None = None,
) -> Time:
    """What an optimizer step takes; arguments as in `traffic`. Stage 3 is exact for no or one group ``kept``.

    ``files``: a phase takes at least as long as what passes through the file in it, or on the busier way of the link to
    the host.
    """
    forward, backward = F / c, B / c
    gathered, shared = _sent(ranks.weights), _sent(ranks.gradients)
    groups = n + frozen[1] if _checked(stage) == 3 else n
    reduce = shared * N * sizes.gradient * (2 if stage == 0 else 1) / b + n * a
    reduce += _between(stage, sizes, ranks) / b + _sums(stage, ranks) * n * a
    gather = gathered * (N + (frozen[0] if stage == 3 else 0)) * sizes.weight / b + groups * a
    again = gather - gathered * kept[0] * sizes.weight / b - kept[1] * a
    reductions = Integer(1) if no_sync else k

    computed, reduced = backward, _pipeline(backward, reduce, n)
    forwards = k * forward
    if stage in (1, 2):
        forwards = _pipeline(forward, gather, n) + (k - 1) * forward
    if stage == 3:
        forwards = k * _pipeline(forward, gather, groups)
        first, layer, last = gather / groups, backward / groups, reduce / n
        ahead = Integer(0) if kept[1] else first  # what was kept needs no waiting for
        computed = Max(backward + ahead, again + layer)
        # Each reduction comes between two gathers; the wire rests until the first is there, and before the last.
        rests = Max(0, layer - first) + Max(0, layer - last)
        reduced = Max(backward + ahead + last, again + reduce + rests)
    sent = traffic(stage, sizes, ranks=ranks, no_sync=no_sync, kept=kept, frozen=frozen)
    backwards = reductions * reduced + (k - reductions) * computed
    if files is not None:
        forwards, backwards = Max(forwards, files.forward / d), Max(backwards, files.backward_longer / d)
    return Time(
        compute=k * (forward + backward),
        wire=sent.total / b + sent.collectives * a,
        step=forwards + backwards,
    )


def _sums(stage: int, ranks: Ranks) -> Expr:
    """How often a reduced gradient is summed over replicas: once where there are some. In stage 0 all are one group."""
    return _ONE if stage and ranks.replicas != 1 else _NOTHING


def _between(stage: int, sizes: Sizes, ranks: Ranks) -> Expr:
    """Bytes that a rank receives of other replicas for each reduction: an all-reduce of its shard."""
    return _sums(stage, ranks) * 2 * _sent(ranks.replicas) * N / ranks.gradients * sizes.gradient


def _sent(ranks: Expr) -> Expr:
    """Of a collective's bytes, what a rank receives while it sends as many."""
    return (ranks - 1) / ranks


def _pipeline(compute: Expr, wire: Expr, groups: Expr) -> Expr:
    """``groups`` pass through two resources, one after the other; either waits once for the other, at one end."""
    return Max(compute + wire / groups, wire + compute / groups)


def _checked(stage: int) -> int:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r}: expected 0, 1, 2 or 3.")
    return stage
