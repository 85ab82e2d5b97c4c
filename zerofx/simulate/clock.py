"""What a rehearsed step takes: its operations on a clock, by rates; and its live bytes.

::

    compute   ▐ embed ▐ wait ░▐ block 0     ▐ wait ▐ block 1     ▐        a kernel: max(flops / rate, bytes / rate)
    wire      ▐▐ gather b.0  ▐▐ gather b.1 ▐                              a collective: latency + bytes / rate
    file      ▐▐ fetch b.1  ▐ fetch b.2    ▐                              a transfer: bytes / rate; or the host's memory
                             ▲░ exposed: compute stands

Kernels run one after the other in the code's order; collectives queue in the order they are started, those between
replicas at a link of their own where `Rates` have one; a wait blocks compute until its collective is through. What a
file gives and takes (`zerofx.Offload`) has a queue of its own: one thread reads and writes for graphs, in the order in
which they ask. The host's memory has two, one each way. Every exchange uses both directions of a link at once, so that
what counts is what a rank receives.

Where gloo has no core of its own, compute is slower by ``core_share`` while anything travels. The roofline model of a
kernel is Williams, Waterman and Patterson, 2009.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace

from zerofx.model.units import format_bytes, format_seconds
from zerofx.simulate.files import Files
from zerofx.simulate.hosted import Hosted
from zerofx.simulate.recorder import KINDS, Kind, Operation, Phase

HOST_BYTES_PER_S = 2e10
"""Between an accelerator and pinned memory of its host, each way: most of PCIe 4.0 with 16 lanes."""


@dataclass(frozen=True)
class Rates:
    """How fast one rank is; `zerofx.calibrate` measures them.

    Attributes:
        flops_per_s: floating-point operations per second in large matrix products.
        memory_bytes_per_s: read and written together, in a large copy.
        link_bytes_per_s: received by one rank while it sends as many.
        link_latency_s: seconds that a collective takes without any bytes.
        core_share: of the rank's cores, what a collective takes from compute while it travels; less than 1.
        replica_bytes_per_s, replica_latency_s: the same of the link between the rows of a mesh, where that is another
            link, with a queue of its own; None: it is the same link. What goes both ways takes as long as on this one.
        disk_bytes_per_s: read and written together, of a disk where `zerofx.Offload` keeps state, while it does both
            and all ranks do; None: it was not measured.
        host_copy_bytes_per_s: between the device and pinned memory of its host, where `zerofx.Offload` keeps state:
            one way, while as many go the other way. None: `HOST_BYTES_PER_S`, which is a default.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float = 0.0
    core_share: float = 0.0
    replica_bytes_per_s: float | None = None
    replica_latency_s: float = 0.0
    disk_bytes_per_s: float | None = None
    host_copy_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.default is None:
                continue
            if not (value > 0 or (value == 0 and each.name not in _ABOVE_ZERO)):
                raise ValueError(f"Rates: {each.name}={value!r}, expected a positive number.")
        if not self.core_share < 1:
            raise ValueError(f"Rates: core_share={self.core_share!r}, expected less than 1.")

    def seconds(self, operation: Operation) -> float:
        """How long ``operation`` takes, by itself; nothing for a wait."""
        if operation.kind == "kernel":
            return max(operation.flops / self.flops_per_s, operation.nbytes / self.memory_bytes_per_s)
        if operation.through_file and operation.on_host:
            return max(operation.read, operation.written) / self.of_host()
        if operation.through_file:
            return operation.through_file / self.of_disk()
        if operation.kind == "start" and self.link_of(operation):
            return self.replica_latency_s + operation.far / (self.replica_bytes_per_s or self.link_bytes_per_s)
        if operation.kind == "start":
            return self.link_latency_s + operation.nbytes / self.link_bytes_per_s
        return 0.0

    def of_disk(self) -> float:
        """`disk_bytes_per_s`, which must be known.

        Raises:
            ValueError: it is not.
        """
        if self.disk_bytes_per_s is None:
            raise ValueError(
                "rates without disk_bytes_per_s, for graphs that read and write a file (offload=): how long that takes "
                "is not known. zerofx.calibrate(path=...) measures it; or give it: "
                "dataclasses.replace(rates, disk_bytes_per_s=1e9)."
            )
        return self.disk_bytes_per_s

    def of_host(self) -> float:
        """`host_copy_bytes_per_s`, or the default."""
        return HOST_BYTES_PER_S if self.host_copy_bytes_per_s is None else self.host_copy_bytes_per_s

    def link_of(self, operation: Operation) -> int:
        """Which link a collective takes: 0, or 1 where there is another one between replicas."""
        return int(operation.far > 0 and self.replica_bytes_per_s is not None)


_ABOVE_ZERO = (
    *("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "replica_bytes_per_s", "disk_bytes_per_s"),
    "host_copy_bytes_per_s",
)


def ordinary(device: str) -> Rates:
    """The rates of an ordinary machine, for who gives none: a core or two and 8 Gbit/s, or a GPU; and an SSD.

    A GPU computes in bfloat16, and has a link to others of its machine.
    """
    rates = Rates(5e10, 1e10, 1e9, 1e-4) if device == "cpu" else Rates(2e14, 2e12, 5e10, 2e-5)
    return replace(rates, disk_bytes_per_s=1e9)


@dataclass(frozen=True)
class Span:
    """An operation on the clock, in seconds since the step began. A start's is when its bytes travel."""

    operation: Operation
    start: float
    end: float


LiveBytes = dict[Kind, int]


@dataclass(frozen=True)
class PhasePrediction:
    """One graph, forward or backward.

    Attributes:
        graph: which of the module's graphs.
        name: "forward" or "backward".
        operations: kernels, starts and waits, in order.
        live: bytes by class while each operation runs (the most, where buffers come and go in between); allocated by
            the step, on top of what is held at rest. One entry per operation and one for the end.
        spans: the operations on the clock; empty without rates.
        time_s, exposed_s: seconds of compute from the graph's start to its end, and of these, waiting. None without
            rates.
        file_exposed_s: of ``exposed_s``, waiting for a file.
    """

    graph: int
    name: str
    operations: tuple[Operation, ...]
    live: tuple[LiveBytes, ...]
    spans: tuple[Span, ...] = ()
    time_s: float | None = None
    exposed_s: float | None = None
    file_exposed_s: float | None = None

    @property
    def file_read(self) -> int:
        """Bytes that this rank reads from its file; whole pages, as they are read."""
        return sum(operation.read for operation in self.operations)

    @property
    def file_written(self) -> int:
        """Bytes that it writes there."""
        return sum(operation.written for operation in self.operations)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank receives; it sends as many."""
        return sum(operation.nbytes for operation in self.operations if operation.kind == "start")

    @property
    def replica_bytes(self) -> int:
        """Of these, what comes from other rows of a mesh: from other replicas of the module, where there are some."""
        return sum(operation.far for operation in self.operations)

    @property
    def peak(self) -> LiveBytes:
        """Live bytes by class at the moment that there are most."""
        return max(self.live, key=lambda live: sum(live.values()))


@dataclass(frozen=True)
class Prediction:
    """One training step: every graph's forward in order, every graph's backward in reverse; ``print`` it.

    Attributes:
        phases: the graphs, in the order they run.
        held_bytes: parameters, shards and replicas at rest: what is there before the step and after it.
        rates: what the times rest on.
        files: what is in this rank's file, and what an optimizer's step moves there; None: there is none.
        hosted: what an optimizer's step copies, whose state is in the host's memory; None: it is not.
    """

    phases: tuple[PhasePrediction, ...]
    held_bytes: int
    rates: Rates | None = field(default=None)
    files: Files | None = None
    hosted: Hosted | None = None

    @property
    def time_s(self) -> float | None:
        """Seconds of forward and backward; the optimizer is not in it."""
        return None if self.rates is None else sum(phase.time_s or 0.0 for phase in self.phases)

    @property
    def exposed_s(self) -> float | None:
        """Seconds of it that compute waits for collectives, and for a file."""
        return None if self.rates is None else sum(phase.exposed_s or 0.0 for phase in self.phases)

    @property
    def file_exposed_s(self) -> float | None:
        """Of these, for a file."""
        return None if self.rates is None else sum(phase.file_exposed_s or 0.0 for phase in self.phases)

    @property
    def optimizer_s(self) -> float | None:
        """Seconds that a step of `zerofx.AdamW` takes through a file, or with state on the host.

        None: there is neither, or a rate is not known.
        """
        rates, files = self.rates, self.files
        if rates is not None and self.hosted is not None:
            return self.hosted.seconds(rates.of_host(), rates.memory_bytes_per_s)
        if rates is None or files is None or rates.disk_bytes_per_s is None:
            return None
        return max((files.read + files.written) / rates.disk_bytes_per_s, files.touched / rates.memory_bytes_per_s)

    @property
    def file_read(self) -> int:
        """Bytes that graphs read from this rank's file; what the optimizer reads is in `files`."""
        return sum(phase.file_read for phase in self.phases)

    @property
    def file_written(self) -> int:
        """Bytes that graphs write there."""
        return sum(phase.file_written for phase in self.phases)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank receives in a step; it sends as many."""
        return sum(phase.wire_bytes for phase in self.phases)

    @property
    def replica_bytes(self) -> int:
        """Of these, what comes from other rows of a mesh: from other replicas of the module, where there are some."""
        return sum(phase.replica_bytes for phase in self.phases)

    @property
    def peak(self) -> LiveBytes:
        """Bytes that the step has allocated at its peak, by class; ``held_bytes`` come on top."""
        return max((phase.peak for phase in self.phases), key=lambda live: sum(live.values()))

    @property
    def peak_bytes(self) -> int:
        """The sum of `peak`."""
        return sum(self.peak.values())

    def summary(self) -> dict[str, float | int | dict[str, float] | LiveBytes | None]:
        """The numbers of the whole step, for JSON."""
        return {
            "time_s": self.time_s,
            "exposed_s": self.exposed_s,
            "wire_bytes": self.wire_bytes,
            "replica_bytes": self.replica_bytes,
            "held_bytes": self.held_bytes,
            "peak_bytes": self.peak_bytes,
            "peak": self.peak,
            "disk_bytes": 0 if self.files is None else sum(self.files.at_rest.values()),
            "file_read": self.file_read,
            "file_written": self.file_written,
            "file_exposed_s": self.file_exposed_s,
            "optimizer_s": self.optimizer_s,
            "rates": asdict(self.rates) if self.rates else None,
        }

    def __str__(self) -> str:
        head = ("graph", "phase", "time", "exposed", "received", "peak live", *KINDS)
        rows: list[tuple[str, ...]] = [head]
        for phase in self.phases:
            rows.append((str(phase.graph), phase.name, *_cells(phase, phase.peak)))
        rows.append(("step", "", *_cells(self, self.peak)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        lines.append(f"held at rest: {format_bytes(self.held_bytes)} of parameters")
        if self.hosted is not None or self.files is not None or self.file_read or self.file_written:
            lines += self._of_files(self.files)
        if self.replica_bytes:
            lines.append(f"received from other rows of the mesh: {format_bytes(self.replica_bytes)} of it")
        graphs = len({phase.graph for phase in self.phases})
        if graphs > 1:  # else all of the model may be in it
            lines.append(f"not in it: what is computed outside of the {graphs} graphs, and what that holds")
        return "\n".join(lines)

    def _of_files(self, files: Files | None) -> list[str]:
        read, written, waits = format_bytes(self.file_read), format_bytes(self.file_written), ""
        took = "" if self.optimizer_s is None else f", in {format_seconds(self.optimizer_s)}"
        if self.file_exposed_s:
            waits = f", for which compute waits {format_seconds(self.file_exposed_s)}"
        if self.hosted is not None or any(o.on_host for phase in self.phases for o in phase.operations):
            at = ""
            if self.rates is not None:
                default = ", a default" * (self.rates.host_copy_bytes_per_s is None)
                at = f", at {format_bytes(self.rates.of_host())}/s{default}"
            step = [] if self.hosted is None else self.hosted.moving(took)
            return [*step, f"graphs copy {read} from the host and {written} to it{waits}{at}"]
        if files is None:  # activations alone, which are gone at rest
            return [f"graphs read {read} from a file and write {written} to it{waits}"]
        return [
            f"on disk: {files}",
            f"graphs read {read} of it and write {written}{waits}",
            *files.moving(took),
        ]


def on_the_clock(phases: list[Phase], rates: Rates | None = None, held_bytes: int = 0) -> Prediction:
    """``phases``, which are one step, with times by ``rates`` and live bytes. Linear in the number of operations."""
    clock, live, predicted = _Clock(), dict.fromkeys(KINDS, 0), []
    for phase in phases:
        over_graph = tuple(_live(phase, live))
        operations = tuple(phase.operations)
        if rates is None:
            predicted.append(PhasePrediction(phase.graph, phase.name, operations, over_graph))
            continue
        began, waited, for_file = clock.compute, clock.exposed, clock.for_file
        spans = tuple(clock.run(operation, rates) for operation in operations)
        predicted.append(
            PhasePrediction(
                phase.graph,
                phase.name,
                operations,
                over_graph,
                spans,
                time_s=clock.compute - began,
                exposed_s=clock.exposed - waited,
                file_exposed_s=clock.for_file - for_file,
            )
        )
    return Prediction(tuple(predicted), held_bytes, rates)


class _Clock:
    """When compute, the links and what transfers go by are next free, and what compute waited so far (for a file)."""

    def __init__(self) -> None:
        self.compute = self.exposed = self.for_file = 0.0
        self._free = [0.0, 0.0]  # when each link is
        self._transfers = {"file": 0.0, "from the host": 0.0, "to the host": 0.0}
        self._done: dict[int, float] = {}
        self._of_file: set[int] = set()

    def run(self, operation: Operation, rates: Rates) -> Span:
        seconds = rates.seconds(operation)
        if operation.through_file:
            way = "file" if not operation.on_host else "from the host" if operation.read else "to the host"
            start = max(self.compute, self._transfers[way])
            self._transfers[way] = self._done[operation.collective] = start + seconds
            self._of_file.add(operation.collective)
            return Span(operation, start, start + seconds)
        if operation.kind == "start":
            link = rates.link_of(operation)
            start = max(self.compute, self._free[link])
            self._free[link] = self._done[operation.collective] = start + seconds
            return Span(operation, start, start + seconds)
        start = self.compute
        if operation.kind == "wait":
            self.compute = max(start, self._done.pop(operation.collective))
            self.exposed += self.compute - start
            self.for_file += (self.compute - start) * (operation.collective in self._of_file)
        else:
            self.compute = self._through(seconds, 1 - rates.core_share)
        return Span(operation, start, self.compute)

    def _through(self, seconds: float, pace: float) -> float:
        """When a kernel of so many seconds is through that starts now, at ``pace`` while something travels."""
        travels = max(
            0.0, max(self._free) - self.compute
        )  # without a gap: what was started queues, and no more is meanwhile
        if seconds <= travels * pace:
            return self.compute + seconds / pace
        return self.compute + travels + (seconds - travels * pace)


def _live(phase: Phase, live: LiveBytes) -> Iterable[LiveBytes]:
    """Live bytes by class while each operation runs, and after the last; ``live`` is carried on from phase to phase.

    Of all that is freed and made between two operations, the moment with most bytes counts for the second.
    """
    changes = iter(phase.changes)
    change = next(changes, None)
    for i in range(len(phase.operations) + 1):
        most: LiveBytes | None = None
        while change is not None and change.before <= i:
            live[change.buffer.kind] += change.buffer.nbytes if change.made else -change.buffer.nbytes
            if most is None or sum(live.values()) > sum(most.values()):
                most = dict(live)
            change = next(changes, None)
        yield most or dict(live)


def _cells(what: PhasePrediction | Prediction, peak: LiveBytes) -> list[str]:
    times = ["" if x is None else f"{1e3 * x:.1f} ms" for x in (what.time_s, what.exposed_s)]
    sizes = [what.wire_bytes, sum(peak.values()), *(peak[kind] for kind in KINDS)]
    return [*times, *map(format_bytes, sizes)]
