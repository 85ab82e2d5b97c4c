"""zerofx.AdamW on a device: the same numbers through the kernels and their tables."""

from __future__ import annotations

import copy
import math
import os
import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

import zerofx
from tests.slow import slow_if
from zerofx.kernels import adamw, norm
from zerofx.kernels.split import join
from zerofx.runtime.optim import device_step
from zerofx.runtime.optim.device_step import DeviceStep

if os.environ.get("TRITON_INTERPRET") == "1":
    norm.PARTIAL_SUMS = 8  # a program takes milliseconds there, however little it does


def nets(device: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    net = nn.Sequential(nn.Linear(7, 11), nn.LayerNorm(11), nn.Linear(11, 3)).to(device, dtype)
    return net, copy.deepcopy(net).float()


def groups(net: nn.Module, lr: Any = 0.03) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in net.parameters() if p.dim() >= 2], "weight_decay": 0.2, "lr": lr},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0, "betas": (0.8, 0.95)},
    ]


def set_gradients(net: nn.Module, other: nn.Module, step: int, scale: float = 1.0) -> None:
    """The last layer has none in every second step."""
    generator = torch.Generator().manual_seed(step)
    for i, (p, q) in enumerate(zip(net.parameters(), other.parameters(), strict=True)):
        grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        with_gradient = i < 4 or step % 2
        p.grad = grad * scale if with_gradient else None
        q.grad = grad.to(q.dtype) if with_gradient else None


def whole(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor().detach() if isinstance(p, zerofx.ShardedTensor) else p.detach()


def assert_same(net: nn.Module, other: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(whole(p).float(), q.detach(), rtol=rtol, atol=atol, msg=f"{name}: {{}}".format)


def on_device(optimizer: zerofx.AdamW) -> bool:
    return isinstance(optimizer._device_step, DeviceStep)


def six_steps(net: nn.Module, other: nn.Module, clip: float | None) -> tuple[zerofx.AdamW, torch.optim.AdamW]:
    """Steps of both, with some gradients missing: torch's numbers, norms and counts."""
    mine, theirs = zerofx.AdamW(groups(net), max_grad_norm=clip), torch.optim.AdamW(groups(other))
    for step in range(6):
        set_gradients(net, other, step)
        if clip is not None:
            expected = clip_grad_norm_(other.parameters(), clip)
        mine.step()
        theirs.step()
        if clip is not None:
            assert mine.grad_norm is not None and mine.grad_norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert on_device(mine)
    assert_same(net, other)
    steps = [float(mine.state[p]["step"]) for p in net.parameters()]
    assert steps == [float(theirs.state[p]["step"]) for p in other.parameters()] == [6, 6, 6, 6, 3, 3]
    return mine, theirs


@pytest.mark.parametrize("clip", [None, 0.5])
def test_parameter_groups_clipping_and_missing_gradients_give_torchs_numbers(device: str, clip: float | None) -> None:
    net, other = nets(device)
    six_steps(net, other, clip)


def test_a_new_learning_rate_counts_from_the_next_step_on(device: str) -> None:
    net, other = nets(device)
    tensor = torch.tensor(0.03, device=device)
    mine, theirs = zerofx.AdamW(groups(net, lr=tensor)), torch.optim.AdamW(groups(other))
    for step in range(4):
        set_gradients(net, other, step)
        mine.step()
        theirs.step()
        tensor.mul_(0.5)
        theirs.param_groups[0]["lr"] *= 0.5
        for optimizer in (mine, theirs):
            optimizer.param_groups[1]["lr"] *= 0.7
    assert_same(net, other)


@pytest.mark.parametrize("master", ["float32", "split"])
def test_masters_of_bfloat16_weights_are_those_of_a_float32_run(device: str, master: Any) -> None:
    net, other = nets(device, torch.bfloat16)
    mine, theirs = zerofx.AdamW(groups(net, 1e-4), lr=1e-4, master=master), torch.optim.AdamW(groups(other, 1e-4), 1e-4)
    for step in range(20):
        set_gradients(net, other, step)
        mine.step()
        theirs.step()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        state = mine.state[p]
        kept = state["master"] if master == "float32" else join(p.detach(), state["remainder"])
        torch.testing.assert_close(kept, q.detach(), rtol=1e-5, atol=1e-6)
    assert_same(net, other, rtol=2**-8, atol=1e-6)


def test_float64_weights_are_stepped_in_float64(device: str) -> None:
    net, other = nets(device, torch.float64)
    other.double()
    mine, theirs = zerofx.AdamW(groups(net)), torch.optim.AdamW(groups(other))
    for step in range(4):
        set_gradients(net, other, step)
        mine.step()
        theirs.step()
    assert on_device(mine) and all(
        x.dtype == torch.float64 for x in (*net.parameters(), mine.state[net[0].weight]["exp_avg"])
    )
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach().cpu(), rtol=1e-12, atol=1e-12)


def test_any_seed_is_taken_and_no_two_are_alike(device: str) -> None:
    weights = []
    for seed in (0, 1, 2**23, 2**24, 20240101, -1, 2**64 - 2):
        p = nn.Parameter(torch.ones(4096, device=device))
        optimizer = zerofx.AdamW([p], moments=torch.bfloat16, seed=seed)
        for step in range(2):
            p.grad = torch.linspace(1, 2, 4096, device=device) + step
            optimizer.step()
        weights.append(p.detach().clone())
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_a_step_without_gradients_changes_nothing(device: str) -> None:
    net, _ = nets(device)
    before = copy.deepcopy(net)
    zerofx.AdamW(net.parameters(), max_grad_norm=1.0).step()
    assert_same(net, before, 0, 0)


def test_norms_that_were_kept_stay_what_they_were(device: str) -> None:
    p = nn.Parameter(torch.ones(4, device=device))
    optimizer = zerofx.AdamW([p], max_grad_norm=1.0)
    norms = []
    for gradient in (1.0, 2.0, 3.0):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    assert [float(norm) for norm in norms] == [2.0, 4.0, 6.0]  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_not_finite_changes_nothing(device: str, bad: float) -> None:
    net, other = nets(device)
    optimizer = zerofx.AdamW(groups(net), max_grad_norm=math.inf)
    set_gradients(net, other, 1)
    optimizer.step()
    before = copy.deepcopy((list(net.parameters()), optimizer.state_dict()["state"]))
    set_gradients(net, other, 3)
    net[1].bias.grad[2] = bad
    optimizer.step()
    torch.testing.assert_close((list(net.parameters()), optimizer.state_dict()["state"]), before, rtol=0, atol=0)


def test_gradscaler_unscales_inside_the_step_and_skips(device: str) -> None:
    net, other = nets(device)
    mine, theirs = zerofx.AdamW(groups(net), max_grad_norm=0.5), torch.optim.AdamW(groups(other))
    scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=100)
    scaler.scale(torch.zeros((), device=device))  # makes its scale
    for step in (1, 3, 5):
        set_gradients(net, other, step, scale=256.0)
        clip_grad_norm_(other.parameters(), 0.5)
        theirs.step()
        scaler.step(mine)
        scaler.update()
    assert_same(net, other)
    before = copy.deepcopy(list(net.parameters()))
    set_gradients(net, other, 7)
    net[0].weight.grad[0, 0] = math.inf
    scaler.step(mine)
    scaler.update()
    assert scaler.get_scale() == 128.0
    torch.testing.assert_close(list(net.parameters()), before, rtol=0, atol=0)


def test_state_goes_to_torch_and_back(device: str) -> None:
    net, other = nets(device)
    mine, theirs = zerofx.AdamW(groups(net)), torch.optim.AdamW(groups(other))
    set_gradients(net, other, 1)
    theirs.step()
    other_state = copy.deepcopy(theirs.state_dict())
    net.load_state_dict(other.state_dict())
    mine.load_state_dict(other_state)
    for step in (2, 3):
        set_gradients(net, other, step)
        mine.step()
        theirs.step()
    assert_same(net, other)
    _, last = nets(device)
    last.load_state_dict(net.state_dict())
    theirs = torch.optim.AdamW(groups(last))
    theirs.load_state_dict(copy.deepcopy(mine.state_dict()))
    set_gradients(net, last, 5)
    mine.step()
    theirs.step()
    assert_same(net, last)


def test_moments_in_bfloat16_take_the_seed(device: str) -> None:
    def trained(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        net, other = nets(device)
        optimizer = zerofx.AdamW(groups(net), moments=torch.bfloat16, seed=seed)
        for step in range(3):
            set_gradients(net, other, step)
            optimizer.step()
        return optimizer.state[net[0].weight]["exp_avg"]

    assert trained(1).dtype == torch.bfloat16
    assert torch.equal(trained(1), trained(1)) and not torch.equal(trained(1), trained(2))


def with_codes(device: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """As `nets`, with matrices of 8000 and 9600 elements; the first norm between them keeps float32 moments."""
    net = nn.Sequential(nn.Linear(100, 80), nn.LayerNorm(80), nn.Linear(80, 120)).to(device, dtype)
    return net, copy.deepcopy(net).float()


@slow_if(lambda device: device == "cpu")
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, None), (torch.bfloat16, "split")])
def test_moments_in_8_bits_stay_beside_torchs_and_are_saved_bit_for_bit(
    device: str, dtype: torch.dtype, master: Any
) -> None:
    net, other = with_codes(device, dtype)
    start = [p.detach().clone().float() for p in net.parameters()]
    mine = zerofx.AdamW(groups(net), moments="8bit", max_grad_norm=0.5, master=master)
    theirs = torch.optim.AdamW(groups(other))
    for step in range(6):
        set_gradients(net, other, step)
        clip_grad_norm_(other.parameters(), 0.5)
        mine.step()
        theirs.step()
    assert on_device(mine)
    for p, q, first in zip(net.parameters(), other.parameters(), start, strict=True):
        state = mine.state[p]
        assert ("exp_avg_codes" in state) == (p.numel() >= 4096)
        ours = join(p.detach(), state["remainder"]) if master else p.detach()
        assert (ours - q.detach()).norm() < 0.05 * (q.detach() - first).norm()
    again = zerofx.AdamW(groups(copy.deepcopy(net)), moments="8bit", master=master)
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    for state, loaded in zip(mine.state.values(), again.state.values(), strict=True):
        assert state.keys() == loaded.keys()
        for name, value in state.items():
            assert value.dtype == loaded[name].dtype and torch.equal(value, loaded[name]), name


def test_sharded_parameters_have_the_codes_of_plain_ones(device: str) -> None:
    """One rank, whose shard holds padding: each parameter's codes are those it would have by itself."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Linear(128, 200, bias=False), nn.Linear(200, 250, bias=False)).to(device)
        alone = nn.Linear(128, 200, bias=False).to(device)
        alone.load_state_dict({"weight": net[0].weight.detach()})
        zerofx.shard(net)
        ours, its = (zerofx.AdamW(module.parameters(), moments="8bit") for module in (net, alone))
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            for p in net.parameters():
                p.grad = p.like(torch.randn(p.numel(), generator=generator).to(device))
            alone.weight.grad = net[0].weight.grad.to_local().view(200, 128)
            ours.step()
            its.step()
        assert "exp_avg_codes" in its.state[alone.weight]
        assert torch.equal(net[0].weight.full_tensor(), alone.weight)
        for name, value in its.state[alone.weight].items():
            mine = ours.state[net[0].weight][name]
            mine = mine.to_local().view(value.shape) if isinstance(mine, zerofx.ShardedTensor) else mine
            assert torch.equal(mine, value), name
    finally:
        dist.destroy_process_group()


def test_sharded_parameters_are_one_launch_per_group(device: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        net, other = nets(device)
        zerofx.shard(net)
        mine, theirs = zerofx.AdamW(groups(net), max_grad_norm=0.5), torch.optim.AdamW(groups(other))
        for step in range(4):
            set_gradients(net, other, step)
            clip_grad_norm_(other.parameters(), 0.5)
            mine.step()
            theirs.step()
        assert on_device(mine)
        assert_same(net, other)
    finally:
        dist.destroy_process_group()


def test_steps_in_backward_are_those_behind_it(device: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        net, other = nets(device)
        zerofx.compile(net, stage=3, executor="eager", groups=zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0))
        mine, theirs = zerofx.AdamW(net.parameters()), torch.optim.AdamW(other.parameters())
        for step in range(2):
            x = torch.randn(5, 7, generator=torch.Generator().manual_seed(step)).to(device)
            loss = net(x).square().mean()
            with zerofx.step_in_backward(mine):
                loss.backward()
            other(x).square().mean().backward()
            theirs.step()
            theirs.zero_grad()
        assert on_device(mine)
        assert_same(net, other)
    finally:
        dist.destroy_process_group()


def test_one_launch_does_all_runs_of_a_kind_and_its_tables_stay_as_many(device: str) -> None:
    """Whatever parameters have gradients: others in every step."""
    net = nn.ModuleList(nn.Linear(32, 8).to(device, torch.bfloat16 if i % 2 else torch.float32) for i in range(8))
    other = copy.deepcopy(net)
    mine = zerofx.AdamW(net.parameters(), max_grad_norm=1.0, moments=torch.float32)
    every = zerofx.AdamW(other.parameters(), max_grad_norm=1.0, moments=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with unittest.mock.patch.object(adamw, "adamw", wraps=adamw.adamw) as launches:
        for step in range(12):
            for p, q in zip(net.parameters(), other.parameters(), strict=True):
                grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
                p.grad = q.grad = grad if step == 0 or torch.rand(1, generator=generator) < 0.7 else None
            launches.reset_mock()
            mine.step()
            assert launches.call_count == 2
            every._device_step = None  # tables of its own in every step
            every._flatten()
            every.step()
    kept = mine._device_step
    assert isinstance(kept, DeviceStep) and sum(map(len, kept._tiles.values())) <= kept._most_tiles
    assert set(kept._runs) == set(kept._tiles) and len(kept._runs) < 24
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def test_gradients_that_lie_where_they_lay_are_read_anew(device: str) -> None:
    net, other = nets(device)
    mine, theirs = zerofx.AdamW(groups(net), max_grad_norm=1.0), torch.optim.AdamW(groups(other))
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    with unittest.mock.patch.object(
        DeviceStep, "_new_batches", autospec=True, side_effect=DeviceStep._new_batches
    ) as found:
        for step in range(4):
            for p, q in zip(net.parameters(), other.parameters(), strict=True):
                assert p.grad is not None
                p.grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(step)))
                q.grad = p.grad.clone()
            if step == 2:
                net[0].weight.grad = net[0].weight.grad.clone()
            clip_grad_norm_(other.parameters(), 1.0)
            mine.step()
            theirs.step()
    assert found.call_count == 2
    assert_same(net, other)


def test_a_captured_step_has_tables_of_its_own_and_leaves_none_to_the_next(device: str) -> None:
    """A replay writes its table once more, and no other step may have that one."""
    net, other = nets(device)
    mine, theirs = zerofx.AdamW(groups(net), max_grad_norm=1.0), torch.optim.AdamW(groups(other))
    tables: list[set[int]] = []
    for step in range(1, 6, 2):  # all have gradients
        set_gradients(net, other, step)
        clip_grad_norm_(other.parameters(), 1.0)
        with unittest.mock.patch.object(device_step, "is_captured", lambda device: step == 3):  # noqa: B023
            mine.step()
        theirs.step()
        kept = mine._device_step
        assert isinstance(kept, DeviceStep)
        tables.append({id(table) for _, table, _ in kept._runs.values()})
    assert len(kept._captured) == len(tables[0]) and not tables[1] and len(tables[2]) == len(tables[0])
    assert not {id(pinned) for pinned in kept._captured} & tables[2]
    assert_same(net, other)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp32", "bf16", "split"])
def test_a_whole_step_is_captured_in_a_graph_and_copies_nothing_to_the_host(kind: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    net, _ = nets("cuda", torch.float32 if kind == "fp32" else torch.bfloat16)
    master: Any = "split" if kind == "split" else "float32"
    mine, theirs = (zerofx.AdamW(groups(x), max_grad_norm=0.5, master=master) for x in (net, copy.deepcopy(net)))
    copies = [p for group in theirs.param_groups for p in group["params"]]
    originals = [p for group in mine.param_groups for p in group["params"]]
    for p, q in zip(originals, copies, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    mine.step()  # warms up: state and tables are made, kernels compiled
    theirs.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.step()
    with torch.profiler.profile() as profile:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    assert not [event.name for event in profile.events() if "DtoH" in event.name]
    for _ in range(3):
        theirs.step()
    for p, q in zip(originals, copies, strict=True):
        assert torch.equal(p, q)
        assert float(mine.state[p]["step"]) == float(theirs.state[q]["step"]) == 4
