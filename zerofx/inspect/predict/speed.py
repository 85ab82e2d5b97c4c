"""What a plan's seconds rest on: links between ranks, and the arithmetic of a micro-batch.

::

    ranks 0..7  ── node_bandwidth ── one node          A ring passes all ranks of a node before it leaves it. Each of
         │                                             its links takes (M - 1)/M of a collective's bytes, so the
     bandwidth                                         slowest link says how long it takes: node_bandwidth if all
         │                                             ranks are in one node, else the smaller of the two.
    ranks 8..15 ── node_bandwidth ── the next

``bandwidth`` is a node's, all its network cards together: over several, as many rings run side by side. That is how
NCCL does it. On gloo each rank sends to each (docs/gloo.md): with ``r`` ranks in a node its link takes r times
that much, nearly.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zerofx.inspect.predict.flops import flops_per_token
from zerofx.model.units import format_bytes, format_seconds
from zerofx.runtime.ranks.sharing import Sharing

_NEEDS = {
    "node_bandwidth": ("bandwidth", "ranks_per_node"),
    "ranks_per_node": ("bandwidth", "node_bandwidth"),
    "replica_bandwidth": ("bandwidth",),
    "latency": ("bandwidth",),
    "memory_bandwidth": ("bandwidth",),
    "disk_bandwidth": ("bandwidth",),
    "host_bandwidth": ("bandwidth",),
    "flops": ("bandwidth", "tokens"),
    "tokens": ("bandwidth", "flops"),
    "sequence_length": ("tokens",),
    "flops_per_token": ("tokens",),
}
"""Options that say nothing by themselves."""


@dataclass(frozen=True)
class Speed:
    """The letters of `zerofx.inspect.predict.cost.time` that are no module's.

    Attributes:
        bandwidth: bytes per second that a rank receives while it sends as many.
        latency: seconds that a collective takes without any bytes.
        flops: floating-point operations per second of a rank; None: only the wire takes time.
        forward, backward: operations of a micro-batch on a rank.
        memory: bytes per second that a rank reads or writes; None: what is bound by memory takes no time.
        between: on a mesh of two dimensions, bytes per second that a rank receives from other rows, and ``bandwidth``
            is of its own row; None: all take one link.
        disk: bytes per second that a rank reads and writes, together, in its file of ``offload=``; None: not known.
        host: with ``offload="cpu"``, bytes per second between the device and its host, each way; None: not known.
    """

    bandwidth: float
    latency: float = 0.0
    flops: float | None = None
    forward: float = 0.0
    backward: float = 0.0
    memory: float | None = None
    between: float | None = None
    disk: float | None = None
    host: float | None = None

    @property
    def files(self) -> float | None:
        """What moves by ``offload=`` goes at this rate: the disk's, or the host's each way."""
        return self.disk if self.host is None else self.host

    def codes(self, nbytes: float) -> float:
        """Reading and writing so many bytes, as operations that take as long."""
        return 0.0 if self.memory is None else nbytes / self.memory * (self.flops or 1.0)

    @staticmethod
    def of(
        module: nn.Module,
        sharing: Sharing,
        *,
        bandwidth: float | None = None,
        node_bandwidth: float | None = None,
        ranks_per_node: int | None = None,
        latency: float | None = None,
        replica_bandwidth: float | None = None,
        memory_bandwidth: float | None = None,
        disk_bandwidth: float | None = None,
        host_bandwidth: float | None = None,
        flops: float | None = None,
        tokens: float | None = None,
        sequence_length: int | None = None,
        flops_per_token: float | None = None,
    ) -> Speed | None:
        """What the options of `zerofx.plan` say; None without any.

        Args:
            sharing: the larger of the rings that its weights and its gradients travel in is the slower one.
            bandwidth: bytes per second that a node receives from the others while it sends as many; where each rank
                has a node of its own, that a rank does (``zerofx.Rates.link_bytes_per_s``).
            node_bandwidth: bytes per second that a rank receives inside of its node.
            ranks_per_node: how many ranks share a node; None: one.
            latency: seconds that a collective takes without any bytes.
            replica_bandwidth: on a mesh of two dimensions, bytes per second that a rank receives from other rows while
                all ranks do (``zerofx.Rates.replica_bytes_per_s``). ``bandwidth`` is of a row then.
            memory_bandwidth: bytes per second that a rank reads or writes: how long codes on the wire take it.
            disk_bandwidth: bytes per second that a rank reads and writes, together, while all ranks do
                (``zerofx.Rates.disk_bytes_per_s``).
            host_bandwidth: bytes per second between the device and its host, each way, while all ranks copy
                (``zerofx.Rates.host_copy_bytes_per_s``).
            flops: floating-point operations per second that a rank reaches.
            tokens: of one micro-batch on one rank.
            sequence_length: tokens that attend to each other; None: attention is not counted.
            flops_per_token: forward and backward together; None: by the module's parameters
                (`zerofx.inspect.predict.flops`).

        Raises:
            ValueError: a number that there cannot be, or an option that needs another.
        """
        options = {
            "bandwidth": bandwidth,
            "node_bandwidth": node_bandwidth,
            "ranks_per_node": ranks_per_node,
            "latency": latency,
            "replica_bandwidth": replica_bandwidth,
            "memory_bandwidth": memory_bandwidth,
            "disk_bandwidth": disk_bandwidth,
            "host_bandwidth": host_bandwidth,
            "flops": flops,
            "tokens": tokens,
            "sequence_length": sequence_length,
            "flops_per_token": flops_per_token,
        }
        _check({name: value for name, value in options.items() if value is not None})
        if bandwidth is None:
            return None
        ranks = max(sharing.weights.size, sharing.gradients.size)
        if node_bandwidth is not None and ranks_per_node is not None:
            bandwidth = node_bandwidth if ranks <= ranks_per_node else min(bandwidth, node_bandwidth)
        latency = latency if latency and ranks > 1 else 0.0
        others = memory_bandwidth, replica_bandwidth, disk_bandwidth, host_bandwidth
        if flops is None or tokens is None:
            return Speed(bandwidth, latency, None, 0.0, 0.0, *others)
        forward, backward = _work(module, sequence_length, flops_per_token)
        work = tokens * forward, tokens * backward
        return Speed(bandwidth, latency, flops, *work, *others)

    def __str__(self) -> str:
        far = "" if self.between is None else f" in a row, {format_bytes(self.between)}/s between rows"
        text = f"{format_bytes(self.bandwidth)}/s{far}, {format_seconds(self.latency)} per collective"
        text += "" if self.disk is None else f", a disk of {format_bytes(self.disk)}/s"
        text += "" if self.host is None else f", {format_bytes(self.host)}/s each way to the host"
        if self.flops is None:
            return text
        work = (self.forward + self.backward) / 1e12
        return f"{text}; {work:,.2f} Tflop per micro-batch, {self.flops / 1e12:,.2f} Tflop/s"


def _work(module: nn.Module, sequence_length: int | None, per_token: float | None) -> tuple[float, float]:
    if per_token is not None:
        return per_token / 3, per_token * 2 / 3
    counted = flops_per_token(module, sequence_length)
    return counted.forward, counted.backward


def _check(given: dict[str, float]) -> None:
    for name, value in given.items():
        if not (value > 0 or (value == 0 and name == "latency")):
            raise ValueError(f"{name}={value}: expected {'0 or more' if name == 'latency' else 'more than 0'}.")
        missing = [other for other in _NEEDS.get(name, ()) if other not in given]
        if missing:
            raise ValueError(f"{name}={value} says nothing without {' and '.join(missing)}.")
    if {"sequence_length", "flops_per_token"} <= set(given):
        raise ValueError("sequence_length beside flops_per_token: attention is part of the latter. Give one of them.")
