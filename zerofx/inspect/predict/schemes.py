"""A plan of a mesh of two dimensions: what each scheme (`zerofx.Sharding`) sends over which link, and how long.

``R`` rows of ``S`` ranks. A rank receives, of ``x`` bytes, from its row and from other rows::

    row(x)   inside of a row       (S - 1)/S x      -
    col(x)   between rows          -                (R - 1)/R x
    all(x)   over all ranks        (S - 1)/(R S) x  (R - 1)/R x

Of ``N`` elements, ``w``, ``g`` and ``m`` bytes of a weight, a gradient and a master:

========================  ===================  ==========  ==========================  =====================
scheme                    each forward         backward    each reduction              before a step's first
========================  ===================  ==========  ==========================  =====================
HSDP, stage 3             row(w N)             row(w N)    row(g N) + col(2 g N/S)
HSDP, stages 1 and 2                                       row(g N) + col(2 g N/S)     row(w N)
ZeRO-1 between replicas   row(w N)             row(w N)    row(g N) + col(g N/S)       col(m N/S)
hpZ                       two(w N)             row(w N)    row(g N) + col(g N/S)
one dimension, stage 3    two(w N)             two(w N)    row(g N) + col(g N/S)
stage 0                                                    all(2 g N)
========================  ===================  ==========  ==========================  =====================

``two(x)`` is a gather in two hops, ``row(x) + col(x/S)`` (`two_hop_gather`). In codes of which some stay in a row
(``between="all"``) it is one exchange, ``all(x)``, and so is the reduction.

In codes (``Wire(between="nodes")``) what crosses rows has other sizes of elements (`zerofx.inspect.predict.wires`), and
HSDP sends ``(R - 1) g N/S`` between rows: all replicas add up all that was sent.

Seconds. Forward and backward have three resources each, the processor and two links. ``n`` groups pass through them one
after the other. A phase is as long as its busiest resource, and waits for each of the others once, at one end::

    max over resources i of   t_i + (sum of the other two) / n
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sympy import Float

from zerofx.inspect.predict import cost
from zerofx.inspect.predict.speed import Speed
from zerofx.inspect.predict.wires import Crossing
from zerofx.model.sharding import Sharding


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank receives, from its row and from other rows, and collectives."""

    near: float = 0.0
    far: float = 0.0
    collectives: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.near + other.near, self.far + other.far, self.collectives + other.collectives)

    def times(self, n: float) -> Sent:
        """So often."""
        return Sent(n * self.near, n * self.far, n * self.collectives)


class Held(NamedTuple):
    """Elements, and how many groups they are in."""

    numel: int
    groups: int


@dataclass(frozen=True)
class Mesh:
    """``rows`` of ``ranks`` ranks, divided by ``sharding``; ``two_hops``: see `zerofx.runtime.ranks.sharing`."""

    rows: int
    ranks: int
    sharding: Sharding
    two_hops: bool = False

    def _row(self, nbytes: float, n: int) -> Sent:
        return Sent(near=(self.ranks - 1) / self.ranks * nbytes, collectives=n if self.ranks > 1 else 0)

    def _col(self, nbytes: float, n: int) -> Sent:
        return Sent(far=(self.rows - 1) / self.rows * nbytes, collectives=n)

    def _all(self, nbytes: float, n: int) -> Sent:
        return Sent((self.ranks - 1) / (self.rows * self.ranks) * nbytes, (self.rows - 1) / self.rows * nbytes, n)

    def sent(self, stage: int, sizes: cost.Sizes, far: Crossing, trained: Held, frozen: Held) -> Phases:
        """What is sent of groups that are ``trained``, and of those that are ``frozen``, in bytes of ``sizes``."""
        numel, n = trained
        every, count, shard = numel + frozen.numel, n + frozen.groups, numel / self.ranks
        gathered = self._row(float(sizes.weight) * every, count)
        if stage == 0:
            return Phases(reduction=self._all(2 * float(sizes.gradient) * numel, n))
        over_all = self.sharding.one_dimension or self.sharding.has_secondary
        if over_all and not self.two_hops:
            forward, reduction = self._all(far.weight * every, count), self._all(far.gradient * numel, n)
            return Phases(forward, forward if self.sharding.one_dimension else gathered, reduction)
        reduction = self._row(float(sizes.gradient) * numel, n)
        if over_all:
            forward = gathered + self._col(far.weight * every / self.ranks, count)
            backward = forward if self.sharding.one_dimension else gathered
            return Phases(forward, backward, reduction + self._col(far.gradient * shard, n))
        if self.sharding.divides_optimizer:
            reduction += self._col(far.gradient * shard, n)
            return Phases(gathered, gathered, reduction, self._col(far.refreshed * shard, n))
        reduction += self._col(2 * far.summed * shard, n)
        if stage != 3:
            return Phases(reduction=reduction, first=self._row(float(sizes.weight) * numel, n))
        return Phases(gathered, gathered, reduction)


@dataclass(frozen=True)
class Phases:
    """What is sent in each forward, in each backward, for each reduction, and once in a step's first forward."""

    forward: Sent = Sent()
    backward: Sent = Sent()
    reduction: Sent = Sent()
    first: Sent = Sent()

    def traffic(self, micro_batches: int, reductions: int) -> cost.Traffic:
        """Of a step. ``between``: all that comes from other rows."""
        gathered = (self.forward + self.backward).times(micro_batches) + self.first
        reduced = self.reduction.times(reductions)
        total = gathered + reduced
        return cost.Traffic(*map(Float, (gathered.near, reduced.near, total.collectives, total.far)))

    def time(self, speed: Speed, codes: Crossing, micro_batches: int, reductions: int, groups: int) -> cost.Time:
        """Of a step; ``codes`` are written and read beside the model's arithmetic."""
        gather = codes.gather  # in forward; and in backward, where that gathers over all ranks too
        again = gather if self.backward == self.forward else 0.0
        forward, backward = (
            (x + speed.codes(y)) / (speed.flops or 1.0) for x, y in ((speed.forward, gather), (speed.backward, again))
        )
        first, reducing = (speed.codes(x) / (speed.flops or 1.0) for x in (codes.first, codes.reduction))
        phases = [
            (1, forward + first, self.forward + self.first),
            (micro_batches - 1, forward, self.forward),
            (reductions, backward + reducing, self.backward + self.reduction),
            (micro_batches - reductions, backward, self.backward),
        ]
        compute = sum(times * work for times, work, _ in phases)
        wire = sum(times * sum(_seconds(sent, speed)) for times, _, sent in phases)
        step = sum(times * _phase(work, sent, speed, groups) for times, work, sent in phases)
        return cost.Time(Float(compute), Float(wire), Float(step))


def _seconds(sent: Sent, speed: Speed) -> tuple[float, float]:
    """Of each link; with one rate for both, all on the first."""
    latency = sent.collectives * speed.latency
    if speed.between is None:
        return (sent.near + sent.far) / speed.bandwidth + latency, 0.0
    share = sent.far / (sent.near + sent.far) if sent.far else 0.0
    return sent.near / speed.bandwidth + (1 - share) * latency, sent.far / speed.between + share * latency


def _phase(compute: float, sent: Sent, speed: Speed, groups: int) -> float:
    resources = (compute, *_seconds(sent, speed))
    return max(each + (sum(resources) - each) / groups for each in resources)
