"""zerofx.AdamW with moments="8bit": who has codes, what state_dict says, and that ranks and runs disturb none."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.slow import quick_if
from tests.workers import Workers
from zerofx.kernels.split import join

BF16 = torch.bfloat16
CODES = {"exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "exp_avg_sq_scales"}


class Net(nn.Module):
    """One group of two neighbours with blocks, a norm without, one more with; and a matrix for some steps alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.square = nn.Linear(512, 384, bias=False), nn.Linear(384, 384, bias=False)
        self.norm, self.second = nn.LayerNorm(384), nn.Linear(384, 512)
        self.extra = nn.Linear(512, 12, bias=False)

    def forward(self, x: torch.Tensor, extra: bool = False) -> torch.Tensor:
        out = self.second(self.norm(self.square(torch.tanh(self.first(x)))))
        loss = (out - x).square().mean()
        return loss + self.extra(out).square().mean() if extra else loss


def rows(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(8, 512, generator=torch.Generator().manual_seed(100 * step + rank))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = net(rows(step), extra=step % 3 == 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parameter(numel: int = 5000, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype))


def stepped(p: nn.Parameter, steps: int = 3, **options: Any) -> zerofx.AdamW:
    optimizer = zerofx.AdamW([p], **{"lr": 0.01, "moments": "8bit", **options})
    for step in range(steps):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + step)).to(p.dtype)
        optimizer.step()
    return optimizer


def assert_same_state(a: zerofx.AdamW, b: zerofx.AdamW) -> None:
    for (p, state), (q, other) in zip(a.state.items(), b.state.items(), strict=True):
        assert p.shape == q.shape and state.keys() == other.keys()
        for name, value in state.items():
            mine, its = (x.to_local() if isinstance(x, zerofx.ShardedTensor) else x for x in (value, other[name]))
            assert mine.dtype == its.dtype and torch.equal(mine, its), name


# -- on plain parameters


def test_of_4096_elements_on_a_parameter_has_codes_and_takes_two_bytes_for_each() -> None:
    large, small, double = parameter(5000), parameter(4095), parameter(5000, torch.float64)
    states = [stepped(p).state[p] for p in (large, small, double)]
    assert states[0].keys() == CODES | {"step"}
    assert [states[0][f"exp_avg{sq}_codes"].dtype for sq in ("", "_sq")] == [torch.int8, torch.uint8]
    assert sum(states[0][name].nbytes for name in CODES) == 2 * 5000 + 2 * 4 * 20
    for state, dtype in zip(states[1:], (torch.float32, torch.float64), strict=True):
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"} and state["exp_avg"].dtype == dtype


@pytest.mark.slow
def test_a_matrix_may_lie_in_memory_in_any_dense_order() -> None:
    a = nn.Parameter(torch.randn(80, 70, generator=torch.Generator().manual_seed(0)))
    b = nn.Parameter(a.detach().t().contiguous().t())
    optimizers = [zerofx.AdamW([p], moments="8bit") for p in (a, b)]
    for p, optimizer in zip((a, b), optimizers, strict=True):
        p.grad = torch.ones(80, 70) * torch.arange(70)
        optimizer.step()
        moments = optimizer.state_dict()["state"][0]
        assert moments["exp_avg"].shape == (80, 70) and moments["exp_avg"].stride() == p.stride()
        torch.testing.assert_close(moments["exp_avg"], 0.1 * p.grad, rtol=0.1, atol=0.01)
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_state_dict_holds_float32_moments_that_torch_and_any_other_optimizer_can_load() -> None:
    p = parameter()
    optimizer = stepped(p)
    saved = optimizer.state_dict()["state"][0]
    assert saved.keys() == {"step", "exp_avg", "exp_avg_sq"} and saved["exp_avg"].dtype == torch.float32
    assert optimizer.state[p].keys() == CODES | {"step"}  # the optimizer's own are what they were
    for other in (torch.optim.AdamW([parameter()]), zerofx.AdamW([parameter()]), zerofx.AdamW([parameter()], lr=1.0)):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        (state,) = other.state.values()
        assert torch.equal(state["exp_avg"], saved["exp_avg"]) and torch.equal(state["exp_avg_sq"], saved["exp_avg_sq"])
        other.param_groups[0]["params"][0].grad = torch.ones(5000)
        other.step()


def test_training_goes_on_from_a_state_dict_bit_for_bit() -> None:
    p = parameter()
    optimizer = stepped(p)
    q = nn.Parameter(p.detach().clone())
    again = zerofx.AdamW([q], lr=0.01, moments="8bit")
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_state(optimizer, again)
    for each, one in ((p, optimizer), (q, again)):
        each.grad = torch.ones(5000)
        one.step()
    assert torch.equal(p, q)
    assert_same_state(optimizer, again)


def test_moments_of_torch_are_loaded_to_the_nearest_code() -> None:
    p, q = parameter(), parameter()
    theirs = torch.optim.AdamW([p])
    for step in range(3):
        p.grad = torch.randn(5000, generator=torch.Generator().manual_seed(step))
        theirs.step()
    mine = zerofx.AdamW([q], moments="8bit")
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert mine.state[q].keys() == CODES | {"step"}
    for name, exact in (("exp_avg", theirs.state[p]["exp_avg"]), ("exp_avg_sq", theirs.state[p]["exp_avg_sq"])):
        error = mine.state_dict()["state"][0][name] - exact
        assert 0 < error.norm() < 0.01 * exact.norm()


def test_it_can_be_saved_whole_and_groups_added() -> None:
    p = parameter()
    optimizer = stepped(p, max_grad_norm=1.0)
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert again.moments == "8bit"
    before = {name: value.clone() for name, value in optimizer.state[p].items()}
    more = parameter(6000)
    optimizer.add_param_group({"params": [more]})
    more.grad, p.grad = torch.ones(6000), None
    optimizer.step()
    for name, value in before.items():
        assert torch.equal(optimizer.state[p][name], value)
    assert optimizer.state[more].keys() == CODES | {"step"}
    (q,) = again.param_groups[0]["params"]
    assert_same_state(again, stepped(parameter(), max_grad_norm=1.0))
    q.grad = torch.ones(5000)
    again.step()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_not_finite_changes_nothing(bad: float) -> None:
    p = parameter()
    optimizer = stepped(p, max_grad_norm=math.inf)
    before = copy.deepcopy((p, optimizer.state[p]))
    p.grad = torch.ones(5000)
    p.grad[7] = bad
    optimizer.step()
    torch.testing.assert_close((p, optimizer.state[p]), before, rtol=0, atol=0)


def test_maximizing_is_minimizing_the_negative() -> None:
    p, q = parameter(), parameter()
    a, b = (zerofx.AdamW([x], lr=0.01, moments="8bit", maximize=x is q) for x in (p, q))
    for step in range(3):
        p.grad = torch.randn(5000, generator=torch.Generator().manual_seed(step))
        q.grad = -p.grad
        a.step()
        b.step()
    assert torch.equal(p, q)
    assert_same_state(a, b)


@quick_if(lambda dtype: dtype == torch.float32)
@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.float32, None), (BF16, None), (BF16, "float32"), (BF16, "split"), (torch.float16, "float32")],
)
def test_weights_of_any_dtype_with_any_master_follow_float32_moments(dtype: torch.dtype, master: Any) -> None:
    p, q = parameter(dtype=dtype), parameter(dtype=dtype)
    start = p.detach().float().clone()
    optimizer = stepped(p, steps=20, master=master, weight_decay=0.0)
    exact = stepped(q, steps=20, master=master, weight_decay=0.0, moments=torch.float32)
    ours, theirs = (weights(o, x) for o, x in ((optimizer, p), (exact, q)))
    error = (ours - theirs).norm() / (theirs - start).norm()
    assert 0 < error < (0.06 if master or dtype == torch.float32 else 0.2)


def weights(optimizer: zerofx.AdamW, p: nn.Parameter) -> torch.Tensor:
    """In float32, the master where there is one."""
    state = optimizer.state[p]
    if "remainder" in state:
        return join(p.detach(), state["remainder"])
    return state.get("master", p.detach()).float()


def test_a_second_moment_follows_where_rounding_to_nearest_would_stand_still() -> None:
    p = nn.Parameter(torch.zeros(8192))
    optimizer = zerofx.AdamW([p], moments="8bit")
    scale = torch.ones(8192)
    for step in range(200):
        scale[1::2] = 1.0 if step < 100 else 0.0  # the other half keeps the blocks' scales where they are
        p.grad = scale.clone()
        optimizer.step()
    moment = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    expected = (1 - 0.999**100) * 0.999**100
    assert moment[1::2].mean().item() == pytest.approx(expected, rel=0.02)
    assert moment[::2].mean().item() == pytest.approx(1 - 0.999**200, rel=0.01)


def test_the_seed_decides_and_two_runs_agree() -> None:
    def codes(seed: int) -> torch.Tensor:
        p = parameter()
        return stepped(p, seed=seed).state[p]["exp_avg_codes"]

    assert torch.equal(codes(1), codes(1)) and not torch.equal(codes(1), codes(2))


def test_what_it_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match=r"moments='4bit': expected .* or \"8bit\""):
        zerofx.AdamW([parameter()], moments="4bit")  # type: ignore[arg-type]


# -- on sharded parameters


def sharded(stage: int, dtype: torch.dtype = torch.float32) -> Net:
    net = Net().to(dtype)
    zerofx.shard(net, stage=stage, groups=zerofx.Grouping(blocks=lambda name, _: name == "extra", min_bytes=0))
    return net


def set_gradients(net: nn.Module, step: int, only: Callable[[str], bool] = lambda name: True) -> None:
    """The same on every rank and at any world size."""
    generator = torch.Generator().manual_seed(step)
    for name, p in net.named_parameters():
        gradient = torch.randn(p.shape, generator=generator)
        piece = p._group.layout.piece(p._slot, p._group.rank)
        part = gradient.view(-1)[piece.in_parameter : piece.in_parameter + piece.length]
        p.grad = p.like(part.to(p.dtype)) if only(name) else None


def state_of_rank(stage: int, master: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    net = sharded(stage, dtype)
    optimizer = zerofx.AdamW(net.parameters(), lr=0.01, moments="8bit", master=master)
    for step in range(3):
        set_gradients(net, step)
        optimizer.step()
    out = {}
    for name, p in net.named_parameters():
        out[name] = p.full_tensor().detach()
        codes = optimizer.state[p]
        assert ("exp_avg_codes" in codes) == (p.numel() >= 4096), name
        for key in ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg", "exp_avg_sq"):
            if key in codes:
                out[f"{name}.{key}"] = codes[key].full_tensor()
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("master", "dtype"), [("float32", torch.float32), ("split", BF16)])
def test_equal_gradients_give_equal_codes_on_1_2_and_3_ranks(
    make_workers: Callable[[int], Workers], master: Any, dtype: torch.dtype
) -> None:
    found = [
        state
        for world_size, stage in ((1, 3), (2, 3), (3, 3), (3, 1))
        for state in make_workers(world_size).run(state_of_rank, stage, master, dtype, timeout=200)
    ]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, value in other.items():
            assert torch.equal(value, found[0][name]), name


def apart() -> None:
    """Gradients of one parameter at a time, or all together with two parameter groups: the same codes."""
    nets = [sharded(3) for _ in range(2)]
    together, single = (zerofx.AdamW(net.parameters(), moments="8bit", weight_decay=0.0) for net in nets)
    names = [name for name, _ in nets[0].named_parameters()]
    halves = [[p for n, p in nets[0].named_parameters() if (n == "square.weight") == square] for square in (0, 1)]
    together = zerofx.AdamW([{"params": half} for half in halves], moments="8bit", weight_decay=0.0)
    for step in range(2):
        set_gradients(nets[0], step)
        together.step()
        for name in names:
            before = {n: dict(single.state[p]) for n, p in nets[1].named_parameters()}
            kept = {n: {k: local(v).clone() for k, v in state.items()} for n, state in before.items()}
            set_gradients(nets[1], step, only=lambda n, name=name: n == name)  # type: ignore[misc]
            single.step()
            for other, state in kept.items():
                for key, value in state.items():
                    assert other == name or torch.equal(local(before[other][key]), value), (name, other, key)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(local(p), local(q))
        for key, value in together.state[p].items():
            assert torch.equal(local(value), local(single.state[q][key])), key


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, zerofx.ShardedTensor) else x


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_that_share_a_shard_do_not_disturb_each_others_blocks(
    make_workers: Callable[[int], Workers], world_size: int
) -> None:
    make_workers(world_size).run(apart, timeout=200)


def trained_beside_torch(stage: int) -> tuple[list[float], list[float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    net, other = Net(), Net()
    zerofx.compile(net, stage=stage, executor="eager", groups=zerofx.Grouping(min_bytes=0))
    mine = zerofx.AdamW(net.parameters(), lr=1e-3, moments="8bit", max_grad_norm=1.0)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-3)
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(12):
        x = [rows(step, r) for r in range(world)]
        net(x[rank], step % 3 == 1).backward()
        loss = other(torch.cat(x), step % 3 == 1)
        loss.backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        mine.step()
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
        with torch.no_grad():
            losses[0].append(net(rows(0)).item())
            losses[1].append(other(rows(0)).item())
    return losses


@quick_if(lambda stage: stage == 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sharded_training_stays_beside_torchs_float32(workers3: Workers, stage: int) -> None:
    for mine, theirs in workers3.run(trained_beside_torch, stage, timeout=200):
        assert theirs[-1] < 0.9 * theirs[0]
        assert mine == pytest.approx(theirs, rel=0.01) and mine != theirs


def resumed(stage: int, regroup: bool) -> None:
    a, b = Net(), Net()
    zerofx.compile(a, stage=stage, executor="eager", groups=zerofx.Grouping(min_bytes=0))
    blocks: Any = (lambda name, _: name == "extra") if regroup else None
    zerofx.compile(b, stage=stage, executor="eager", groups=zerofx.Grouping(blocks=blocks, min_bytes=0))
    first, second = (zerofx.AdamW(net.parameters(), moments="8bit") for net in (a, b))
    train(a, first, range(3))
    with torch.no_grad():
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            q.copy_(p.full_tensor() if isinstance(p, zerofx.ShardedTensor) else p)
    second.load_state_dict(first.state_dict())
    if not regroup:
        assert_same_state(first, second)
        assert train(a, first, range(3, 6)) == train(b, second, range(3, 6))
        return
    ours, loaded = (optimizer.state_dict()["state"] for optimizer in (first, second))
    for index, state in ours.items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name].full_tensor(), loaded[index][name].full_tensor())


@quick_if(lambda stage: stage == 3)
@pytest.mark.parametrize(("stage", "regroup"), [(0, False), (1, False), (3, False), (3, True)])
def test_training_goes_on_from_a_state_dict_and_in_other_groups(workers2: Workers, stage: int, regroup: bool) -> None:
    workers2.run(resumed, stage, regroup, timeout=200)


def state_dict_of_one_rank() -> int:
    net = sharded(3)
    optimizer = zerofx.AdamW(net.parameters(), moments="8bit")
    set_gradients(net, 0)
    optimizer.step()
    dist.barrier()
    found = 0
    if dist.get_rank() == 1:  # a collective would wait for the others
        found = len(optimizer.state_dict()["state"])
    dist.barrier()
    return found


@pytest.mark.slow
def test_a_state_dict_needs_no_other_rank(workers2: Workers) -> None:
    assert workers2.run(state_dict_of_one_rank, timeout=200) == [0, 7]
