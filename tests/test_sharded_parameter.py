"""A sharded parameter is the whole parameter to whoever looks at it, and a flat slice of it in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.workers import Workers
from zerofx import ShardedParameter, ShardedTensor

WORLD_SIZES = [2, 3]
EACH_GROUP = zerofx.Grouping(min_bytes=0)


class Odd(nn.Module):
    """Every shape that is hard to cut: a scalar, one element, none, primes, two dtypes, frozen, transposed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(()))
        self.one = nn.Parameter(torch.randn(1))
        self.single = nn.Parameter(torch.randn(1, 1, 1))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.layers = nn.ModuleList([nn.Linear(7, 11), nn.Linear(11, 13)])
        self.cube = nn.Parameter(torch.randn(5, 3, 2))
        self.bfloat = nn.Parameter(torch.randn(37).bfloat16())
        self.doubles = nn.Parameter(torch.randn(41, 3).double(), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(6, 17).t())
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.register_buffer("mask", torch.rand(5) > 0.5)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


def same(a: Any, b: Any) -> None:
    a, b = full(a), full(b)
    assert a.dtype == b.dtype and torch.equal(a, b), (a, b)


def by_rank(local: torch.Tensor) -> list[Any]:
    """The elements that all ranks hold, rank 0's first."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local.tolist())
    return [x for part in parts for x in part]


# -- what it looks like, and what it holds


def check_looks(groups: Any) -> None:
    module, plain = Odd(), Odd()
    objects, names = dict(module.named_parameters()), list(module.state_dict())
    ids = {name: id(p) for name, p in objects.items()}
    assert zerofx.shard(module, groups=groups) is module
    assert {name: id(p) for name, p in module.named_parameters()} == ids and list(module.state_dict()) == names
    rank, held = dist.get_rank(), 0
    for name, before in plain.named_parameters():
        p = objects[name]
        assert isinstance(p, ShardedParameter) and isinstance(p, nn.Parameter) and isinstance(p, ShardedTensor), name
        assert (p.shape, p.dtype, p.requires_grad) == (before.shape, before.dtype, before.requires_grad), name
        assert p.is_leaf and p.grad is None and p.device == before.device and p.numel() == before.numel()
        assert p.untyped_storage().nbytes() == 0, name
        local = p.to_local()
        assert local.ndim == 1 and local.dtype == p.dtype
        held += local.numel()
        assert by_rank(local) == before.flatten().tolist(), name  # the slices, by rank, are the whole
        same(p, before.detach())
        assert type(p.full_tensor()) is torch.Tensor and not p.full_tensor().requires_grad
        text = repr(p)
        for word in (repr(name), str(list(p.shape)), str(p.dtype), f"rank {rank} of", f"holds {local.numel():,}"):
            assert word in text, text
    total = sum(p.numel() for p in plain.parameters())
    assert held < total == sum(by_rank(torch.tensor([held])))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_full_shape_outside_and_a_flat_slice_inside(make_workers: Callable[[int], Workers], world_size: int) -> None:
    make_workers(world_size).run(check_looks, None)
    make_workers(world_size).run(check_looks, EACH_GROUP)


def check_start(init_sync: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    module, all_starts = Odd(seed=rank), [Odd(seed=r) for r in range(world)]
    mine = {name: b.clone() for name, b in module.named_buffers()}
    zerofx.shard(module, groups=EACH_GROUP, init_sync=init_sync)
    for name, p in module.named_parameters():
        starts = [dict(m.named_parameters())[name].detach() for m in all_starts]
        if init_sync:
            same(p, starts[0])
            continue
        owner = torch.tensor(by_rank(torch.full_like(p.to_local(), rank)), dtype=torch.long).reshape(p.shape)
        same(p, torch.stack(starts).gather(0, owner[None])[0])  # each element is that of the rank that holds it
    for name, b in module.named_buffers():
        same(b, dict(all_starts[0].named_buffers())[name] if init_sync else mine[name])


def test_ranks_that_start_different_get_the_weights_and_buffers_of_rank_0(workers3: Workers) -> None:
    workers3.run(check_start, True)


def test_without_init_sync_every_rank_keeps_what_it_had(workers3: Workers) -> None:
    workers3.run(check_start, False)


def check_strided_buffers() -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.Linear(3, 3)
        module.register_buffer("transposed", torch.randn(5, 4).t())
        module.register_buffer("stepped", torch.randn(10)[::3])
        module.register_buffer("expanded", torch.randn(1, 3).expand(400, 3))
        module.register_buffer("count", torch.tensor(seed))
        return module

    module = zerofx.shard(build(dist.get_rank()))
    for name, buffer in build(0).named_buffers():
        same(module.get_buffer(name), buffer)


def test_buffers_of_any_strides_come_from_rank_0(workers3: Workers) -> None:
    workers3.run(check_strided_buffers)


def check_mesh() -> None:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for dim, size in (("shard", 2), ("replicate", 1)):
        module, plain = nn.Linear(9, 7), nn.Linear(9, 7)
        plain.load_state_dict(module.state_dict())
        zerofx.shard(module, mesh=mesh[dim])
        assert f"of {size} " in repr(module.weight)
        same(module.weight, plain.weight.detach())
        torch.testing.assert_close(module.weight.detach().norm(), plain.weight.detach().norm())


def test_a_one_dimensional_mesh_says_over_which_ranks_to_shard(workers2: Workers) -> None:
    workers2.run(check_mesh)


# -- optimizers and state dicts hold the same objects


def check_optimizers_and_state() -> None:
    module, plain = Odd(), Odd()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    before = torch.optim.SGD(module.parameters(), lr=0.1)
    zerofx.shard(module)
    after = torch.optim.SGD(module.parameters(), lr=0.1)
    assert [id(p) for p in before.param_groups[0]["params"]] == [id(p) for p in after.param_groups[0]["params"]]
    for optimizer in (before, after):
        for p, q in zip(module.parameters(), plain.parameters()):
            if q.requires_grad:
                q.grad = torch.randn(q.shape, dtype=q.dtype)
                p.grad = q.grad.clone()  # a whole plain tensor: the parameter keeps its slice
                assert isinstance(p.grad, ShardedTensor) and p.grad.to_local().numel() == p.to_local().numel()
                assert p.grad.shape == q.shape and not isinstance(p.grad, ShardedParameter)
                same(p.grad, q.grad)
        optimizer.step()
        reference.step()
        for p, q in zip(module.parameters(), plain.parameters()):
            same(p, q.detach())

    state, other = module.state_dict(), Odd(seed=5)
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        same(state[name], value)
    saved = {name: full(value).clone() for name, value in state.items()}  # plain, as it would come from a file
    assert module.load_state_dict(other.state_dict()) == ([], [])
    for p, q in zip(module.parameters(), other.parameters()):
        assert isinstance(p, ShardedParameter)
        same(p, q.detach())
    plain.load_state_dict(saved)  # a plain module takes it
    module.load_state_dict(saved)
    module.load_state_dict(module.state_dict())  # its own, sharded
    for p, q in zip(module.parameters(), plain.parameters()):
        same(p, q.detach())
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0\.weight"):
        module.load_state_dict({**saved, "layers.0.weight": torch.zeros(3, 3)})


def check_a_replica_of_a_sharded_state() -> None:
    sharded, replica = zerofx.shard(Odd()), zerofx.shard(Odd(seed=5), stage=0)
    replica.load_state_dict(sharded.state_dict())
    for p, q in zip(replica.parameters(), Odd().parameters()):
        assert torch.equal(p, q)
    with torch.no_grad():
        same(replica.one * sharded.one, Odd().one.detach() ** 2)
        same(sharded.one * replica.one, Odd().one.detach() ** 2)


def test_a_module_of_stage_0_takes_the_state_of_a_sharded_one(workers2: Workers) -> None:
    workers2.run(check_a_replica_of_a_sharded_state)


def check_wrong_gradients() -> None:
    module = zerofx.shard(nn.Linear(7, 11))
    for wrong in (torch.zeros(7, 11), torch.zeros(77), torch.zeros(12, 7), torch.zeros(11, 7).double()):
        with pytest.raises(RuntimeError, match=r"shape|size|dtype|type"):
            module.weight.grad = wrong
    assert module.weight.grad is None


def test_a_gradient_of_another_shape_or_dtype_is_refused(workers2: Workers) -> None:
    workers2.run(check_wrong_gradients)


def test_optimizers_made_before_and_after_and_state_dicts_stay_valid(workers3: Workers) -> None:
    workers3.run(check_optimizers_and_state)


# -- writes


def check_writes() -> None:
    module = nn.Linear(7, 11)
    start = weights(module)["weight"]
    zerofx.shard(module)
    p = module.weight

    def bumps(write: Callable[[], Any]) -> None:
        version = p._version
        with torch.no_grad():
            write()
        assert p._version > version

    for alias in (p.detach(), p.data):
        assert isinstance(alias, ShardedTensor) and not isinstance(alias, ShardedParameter)
        assert not alias.requires_grad and alias.to_local().data_ptr() == p.to_local().data_ptr()
    bumps(lambda: p.detach().add_(1))  # an alias writes to the parameter, and is seen to
    same(p, start + 1)
    bumps(lambda: p.mul_(2))
    bumps(lambda: torch._foreach_add_([p], 1))
    bumps(lambda: p.copy_(start))
    bumps(lambda: p.add_(p).sub_(start))
    bumps(lambda: p.__setitem__(p > 10, 0.0))
    bumps(lambda: nn.init.zeros_(p))
    bumps(lambda: torch._fused_sgd_([p], [torch.ones_like(p)], [], weight_decay=0, momentum=0, lr=1, dampening=0,
                                    nesterov=False, maximize=True, is_first_step=True))  # fmt: skip
    bumps(lambda: p.copy_(start))
    same(p, start)
    for write in (lambda: p.mul_(2), lambda: p.copy_(start), lambda: p.zero_()):
        with pytest.raises(RuntimeError, match=r"requires.grad"):  # as for any leaf
            write()
    bumps(lambda: p[0].zero_())
    bumps(lambda: p.cumsum_(0))
    bumps(lambda: p.__setitem__(0, 1.0))
    with torch.no_grad():
        view = p.t()
        p.copy_(start)
        with pytest.raises(RuntimeError, match=r"'zero_' writes to a view of a sharded weight"):
            view.zero_()
        with pytest.raises(RuntimeError, match=r"'t_' of the sharded tensor 'weight'"):
            p.t_()
    same(p, start)


def test_writes_are_counted_and_those_that_would_be_lost_refused(workers2: Workers) -> None:
    workers2.run(check_writes)


def check_out() -> None:
    module = zerofx.shard(nn.Linear(7, 11))
    p, start, other = module.weight, module.weight.full_tensor(), torch.empty_like(module.weight)
    with torch.no_grad():
        assert torch.add(p, 1, out=other) is other
        same(other, start + 1)
        version = p._version
        torch.add(p, 1, out=p)
        same(p, start + 1)
        assert p._version > version
    with pytest.raises(RuntimeError):  # as for any leaf
        torch.add(p, 1, out=p)
    same(p, start + 1)


def test_writes_through_out_are_counted_too(workers2: Workers) -> None:
    workers2.run(check_out)


def check_list_of_leaves() -> None:
    module = zerofx.shard(nn.Linear(7, 11))
    start = module.weight.full_tensor()
    with pytest.raises(RuntimeError, match=r"weight.*requires.grad"):
        torch._foreach_mul_([module.weight], 2)
    same(module.weight, start)


def test_a_list_of_leaves_is_not_written_to_in_grad_mode(workers2: Workers) -> None:
    workers2.run(check_list_of_leaves)
