"""What the simulated accelerator does: each function asserts it, in the process of a rank."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.accelerator import device
from zerofx.compiler.checks import check_backend
from zerofx.kernels import norm
from zerofx.kernels.segments import make_tiles

N = 64
LATE_US = 20_000


def ones(n: int = N) -> torch.Tensor:
    return torch.ones(n, device="sim")


def streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.accelerator.current_stream(), torch.Stream("sim")


def the_host_goes_on_and_its_waits_are_counted() -> None:
    with device.schedule("slow compute", LATE_US):
        x = ones()
        device.take_host_waits()
        began = time.monotonic()
        for _ in range(5):
            x = x + 1
        assert time.monotonic() - began < 5 * LATE_US / 1e6, "the host has waited for jobs"
        assert device.take_host_waits() == {}
        assert x.sum().item() == 6 * N
        assert device.take_host_waits() == {"item": 1}


def a_stream_does_not_wait_for_another_by_itself() -> None:
    computing, other = streams()
    found = []
    for ordered in (False, True):
        with device.schedule("slow compute", LATE_US):
            x = torch.zeros(N, device="sim")
            torch.accelerator.synchronize()
            x += 1
            if ordered:
                other.wait_event(computing.record_event())
            with other:
                total = x.sum()
                found.append(total.item())
            torch.accelerator.synchronize()
    assert found == [0, N]


def a_freed_block_is_given_away_at_once() -> None:
    computing, other = streams()
    found = []
    for recorded in (False, True):
        x = ones(1 << 14)
        torch.accelerator.synchronize()
        with device.schedule("slow copies", LATE_US), other:
            y = x * 2
            if recorded:
                x.record_stream(other)
            address = x.data_ptr()
            del x
            with computing:
                new = torch.zeros(1 << 14, device="sim")
            assert new.data_ptr() == address
            found.append(y.sum().item())
        torch.accelerator.synchronize()
    assert found[0] != found[0] or found[0] == 0, "it read what it should not have found any more"
    assert found[1] == 2 << 14


def new_memory_is_nan() -> None:
    assert torch.empty(N, device="sim").isnan().all().item()


def copies_to_and_from_pinned_memory_are_late() -> None:
    pinned = torch.zeros(N, pin_memory=True)
    assert pinned.is_pinned() and not torch.zeros(N).is_pinned()
    with device.schedule("slow compute", LATE_US):
        x = ones()
        device.take_host_waits()
        pinned.copy_(x, non_blocking=True)
        assert pinned.sum() == 0, "it is there before the device came to it"
        assert device.take_host_waits() == {}
        torch.accelerator.current_stream().record_event().synchronize()
        assert pinned.sum() == N
        x.copy_(pinned, non_blocking=True)
        pinned.fill_(3)  # too early
        assert x.sum().item() == 3 * N


def other_copies_to_the_host_wait() -> None:
    x = ones()
    device.take_host_waits()
    into = torch.empty(N)
    into.copy_(x, non_blocking=True)  # memory that is not pinned
    assert into.sum() == N and x.cpu().sum() == N
    assert device.take_host_waits() == {"a copy to the host": 2}
    assert x.nonzero().shape == (N, 1)
    assert device.take_host_waits() == {"the size of what aten::nonzero gives": 1}


def there_are_two_devices() -> None:
    assert torch.accelerator.device_count() == device.DEVICES == 2
    with torch.accelerator.device_index(1):
        there = ones()
        assert there.device == torch.empty(0, device="sim").device == torch.device("sim", 1)
    assert torch.empty(0, device="sim").device == torch.device("sim", 0)
    with device.schedule("slow compute", LATE_US):
        there += 1
        here = there.to("sim:0") + 1  # it comes behind what the other device has to do
    assert here.device.index == 0 and here.sum().item() == 3 * N


def parameters_on_another_device_than_the_current_one_are_refused() -> None:
    assert dist.group.WORLD is not None
    check_backend(dist.group.WORLD, torch.device("sim", 0))
    with pytest.raises(ValueError, match=r"parameters on sim:1, while the current device is sim:0: .*set_device\(1\)"):
        check_backend(dist.group.WORLD, torch.device("sim", 1))


def kernels_in_triton_are_jobs() -> None:
    with device.schedule("slow compute", LATE_US):
        gradient, out = ones() * 2, torch.zeros(4, dtype=torch.float64, device="sim")
        tiles = make_tiles([[(0, N, 0)]]).pin_memory().to("sim", non_blocking=True)
        runs = torch.tensor([[0, gradient.data_ptr(), *[0] * 7]]).pin_memory().to("sim", non_blocking=True)
        device.take_host_waits()
        norm.partial_sums(torch.float32, runs, tiles, out)
        assert device.take_host_waits() == {}
        assert out.sum().item() == 4 * N


def errors_of_jobs_come_late() -> None:
    table = torch.ones(3, 2, device="sim")
    beyond = table[torch.tensor([5]).to("sim")]  # the host does not know: its shape is right
    assert beyond.shape == (1, 2)
    with pytest.raises(RuntimeError, match=r"a job of stream 0 has failed: .*out of (bounds|range)"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def collectives_go_by_streams() -> None:
    """The host waits for no collective, and the tensors of one are the group's until it was waited for."""
    size = dist.get_world_size()
    with device.schedule("slow link", LATE_US):
        x = ones()
        device.take_host_waits()
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        early = x.clone()
        work.wait()
        late = x.clone()
        packs = torch.empty(size * N, device="sim")
        dist.all_to_all_single(packs, torch.arange(size, device="sim").repeat_interleave(N).float())
        assert device.take_host_waits() == {}
        assert early.sum().item() == N and late.sum().item() == size * N
        assert packs.eq(dist.get_rank()).all().item()
        dist.barrier()
        assert device.take_host_waits().get("barrier") == 1
