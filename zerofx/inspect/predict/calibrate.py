"""Measures the rates that predictions rest on: a matrix product, copies, a collective of several sizes, a disk.

Of arithmetic the fastest of several runs counts: what the machine does beside makes the others slower. Of a collective
it is the median, and its time is fitted as ``latency + bytes / rate``. What it takes from compute on the way is the
processor's time in it, where this process has no core to spare: no more cores than threads that compute. Each number is
that of the slowest rank, and all ranks get the same ones: they come out of one all-reduce.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from zerofx._torch import backend_name
from zerofx.inspect.predict.disk import seconds_per_byte
from zerofx.inspect.predict.kept import keep_rates
from zerofx.passes.pairwise import under_way
from zerofx.passes.travel import travel_of
from zerofx.runtime.ranks.sharing import RankGroup
from zerofx.runtime.state.copies import copies_of
from zerofx.simulate.clock import Rates

_c10d = torch.ops._c10d_functional
SIZES = (1 << 16, 1 << 20, 1 << 23)
"""Bytes that a rank receives in the collectives that are timed."""
_UNDISTURBED = 0.7
"""The least share of its cores that a process has where nothing else runs: not all of a product is on all threads."""


def calibrate(
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    replica_group: dist.ProcessGroup | None = None,
    path: str | Path | None = None,
    keep: bool = False,
) -> Rates:
    """The rates of this machine and network; takes about a second, and another for a disk.

    On an accelerator the link to its host is among them.

    A collective: call it on every rank. Do so where nothing else runs, and with the number of threads that training
    will have.

    Args:
        process_group: whose link is timed; None: all ranks. With one rank the link is taken to be infinitely fast.
        device: where the model is.
        replica_group: of a mesh of two dimensions, the process group of the first: its link is timed too, while all its
            columns use it. ``process_group`` is that of the second then.
        path: a folder, as for ``offload=``: its disk is timed, while all ranks of ``process_group`` read and write
            there (`zerofx.inspect.predict.disk`). Each takes 64 MB of it meanwhile.
        keep: write the rates to a file of this user (`zerofx.inspect.predict.kept`), where `zerofx.choose` finds those
            for as many ranks.

    Returns:
        Rates for `zerofx.predict`, the same on every rank.

    Raises:
        RuntimeError: there is no process group.
        OffloadError: a rank cannot make, read or write a file in ``path``; on every rank.
    """
    if process_group is None and not dist.is_initialized():
        raise RuntimeError("zerofx.calibrate: no process group. Call torch.distributed.init_process_group first.")
    group, device = process_group or dist.group.WORLD, torch.device(device)
    assert group is not None
    travel_of(backend_name(group, device)).connect(group.group_name)
    if replica_group is not None:
        travel_of(backend_name(replica_group, device)).connect(replica_group.group_name)
    disk = seconds_per_byte(Path(path), RankGroup(group)) if path is not None else 0.0
    began, worked = time.perf_counter(), time.process_time()
    before = _product(device), _copy(device)
    _note_other_work(device, time.perf_counter() - began, time.process_time() - worked)
    began, worked = time.perf_counter(), time.process_time()
    gathers = [_gather(group, device, nbytes) for nbytes in SIZES]
    core_share = _core_share(device, time.perf_counter() - began, time.process_time() - worked)
    between = [_gather(replica_group, device, nbytes) for nbytes in SIZES] if replica_group is not None else []
    host = _to_and_from_host(device)
    # Again: what slows a shared machine down lasts longer than a series of runs takes.
    after = _product(device), _copy(device)
    found = [*map(min, before, after), core_share, disk, host, *gathers, *between]
    slowest = torch.tensor(found, dtype=torch.float64, device=device)
    for each in (group, replica_group):
        if each is not None and each.size() > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=each)
    product, copy, core_share, disk, host, *times = slowest.tolist()
    rate, latency = _link(times[: len(SIZES)], group)
    rates = Rates(1 / product, 1 / copy, rate, latency, core_share)
    rates = replace(
        rates, disk_bytes_per_s=1 / disk if disk else None, host_copy_bytes_per_s=1 / host if host else None
    )
    ranks = group.size()
    if replica_group is not None and replica_group.size() > 1:
        rate, latency = _link(times[len(SIZES) :], replica_group)
        rates, ranks = replace(rates, replica_bytes_per_s=rate, replica_latency_s=latency), ranks * replica_group.size()
    if keep:
        keep_rates(rates, device.type, ranks)
    return rates


def _note_other_work(device: torch.device, took: float, worked: float) -> None:
    """Warn where threads that had to compute for ``took`` seconds, ``worked`` for much less: others had their cores."""
    threads = torch.get_num_threads()
    share = worked / max(took, 1e-9) / threads
    if device.type == "cpu" and share < _UNDISTURBED:
        warnings.warn(
            f"zerofx.calibrate: this process had {share:.0%} of the {threads} cores that it computes on. Other "
            "programs had the rest, so rates are too low. Calibrate where nothing else runs; with several ranks on a "
            "host, give each torch.set_num_threads(cores / ranks).",
            stacklevel=3,
        )


def _link(times: list[float], group: dist.ProcessGroup) -> tuple[float, float]:
    """Bytes per second and latency, of the seconds that gathers of `SIZES` took."""
    if group.size() == 1:
        return float("inf"), 0.0
    rate = (SIZES[-1] - SIZES[0]) / max(times[-1] - times[0], 1e-9)
    return rate, max(0.0, min(t - nbytes / rate for t, nbytes in zip(times, SIZES, strict=True)))


def _product(device: torch.device, n: int = 768) -> float:
    """Seconds per floating-point operation."""
    a, b, out = (torch.ones(n, n, device=device) for _ in range(3))
    return min(_seconds(lambda: torch.mm(a, b, out=out), device)) / (2 * n**3)


def _copy(device: torch.device, nbytes: int = 1 << 26) -> float:
    """Seconds per byte read or written."""
    source, target = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    return min(_seconds(lambda: target.copy_(source), device)) / (2 * nbytes)


def _to_and_from_host(device: torch.device, nbytes: int = 1 << 26) -> float:
    """Seconds per byte that goes each way at once, as `zerofx.Offload` copies; 0: the device's memory is the host's."""
    copies = copies_of(device)
    if copies is None:
        return 0.0
    leaving, coming = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    left, to_come = (copies.pinned(nbytes) for _ in range(2))

    def run() -> None:
        copies.begin()
        copies.begin_back()
        copies.out(left, leaving)
        copies.back(coming, to_come)
        copies.end()

    return min(_seconds(run, device)) / nbytes


def _gather(group: dist.ProcessGroup, device: torch.device, received: int) -> float:
    """Seconds of an all-gather that brings this rank ``received`` bytes, as buffers travel (`zerofx.passes.travel`)."""
    world_size = group.size()
    if world_size == 1:
        return 0.0
    shard = torch.ones(received // (world_size - 1), dtype=torch.uint8, device=device)
    out, travel = shard.new_empty(world_size * shard.numel()), travel_of(backend_name(group, device))

    def run() -> object:
        return _c10d.wait_tensor(under_way(out, travel.gather_into(out, shard, group.group_name)))

    return statistics.median(_seconds(run, device))


def _core_share(device: torch.device, took: float, worked: float) -> float:
    """What collectives that took so long, and so much of the processor, take of this process's cores from compute."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device.type != "cpu" or cores > torch.get_num_threads():
        return 0.0
    return min(worked / cores / max(took, 1e-9), 0.95)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 9) -> list[float]:
    """Of each run, once warm."""
    times = []
    for _ in range(repeats + 2):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return times[2:]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
