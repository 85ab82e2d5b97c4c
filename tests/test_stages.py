"""What stages 0, 1 and 2 must do besides training exactly: replicas are fresh, nothing is lost, errors stay errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.counting import count_collectives
from zerofx.compiler.compilers import Compilers
from zerofx.runtime.state.group import groups_of

EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)
STAGES = [0, 1, 2, 3]
stages = pytest.mark.parametrize("stage", STAGES)


class Net(nn.Module):
    """Two layers, and one that is used only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 11), nn.Linear(11, 3)
        self.extra = nn.Linear(11, 3)

    def forward(self, x: torch.Tensor, extra: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out = self.second(hidden)
        if extra:
            out = out + self.extra(hidden)
        return (out**2).mean()


def pair(stage: int, **options: Any) -> tuple[Net, Net]:
    """A compiled net and a plain one with the same weights."""
    torch.manual_seed(0)
    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    zerofx.compile(net, stage=stage, executor="eager", groups=EACH_LAYER, **options)
    return net, plain


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, zerofx.ShardedTensor) else tensor


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' rows, and this rank's."""
    x = torch.randn(2 * dist.get_world_size(), 7, generator=torch.Generator().manual_seed(1))
    return x, x.chunk(dist.get_world_size())[dist.get_rank()]


def assert_same_gradients(net: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(net.named_parameters(), plain.named_parameters()):
        wanted = q[1].grad
        assert (p.grad is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(whole(p.grad), wanted, rtol=1e-5, atol=1e-7)


def check_kept_of_absent(stage: int) -> None:
    net, plain = pair(stage)
    x, mine = batches()
    with zerofx.no_sync(net):
        net(mine, extra=True).backward()
    assert all(p.grad is None for p in net.parameters()), "reduced too early"
    net(mine).backward()  # `extra` has no part in this one
    (plain(x, extra=True) + plain(x)).backward()
    assert_same_gradients(net, plain)
    assert not any(group.has_kept() for group in groups_of(net))


@stages
def test_what_no_sync_kept_of_an_absent_parameter_is_reduced_after_the_next_backward(workers2, stage: int) -> None:
    workers2.run(check_kept_of_absent, stage, timeout=120)


def check_no_sync_is_silent(stage: int) -> tuple[dict[str, int], dict[str, int]]:
    net, _ = pair(stage)
    _, mine = batches()
    net(mine).backward()  # compiles
    with count_collectives() as inside, zerofx.no_sync(net):
        loss = net(mine)
        inside.events.clear()  # stage 3 gathers in forward
        loss.backward()
    with count_collectives() as outside:
        net(mine).backward()
    return dict(inside.calls), dict(outside.calls)


@stages
def test_no_sync_has_no_collective_for_gradients(workers2, stage: int) -> None:
    inside, outside = workers2.run(check_no_sync_is_silent, stage, timeout=120)[0]
    assert set(inside) <= ({"all_gather_send", "all_gather_recv"} if stage == 3 else set())
    assert ("all_reduce" if stage == 0 else "all_to_all_recv") in outside


def variants_compiled(stage: int, dynamic: bool) -> list[str]:
    """What was compiled of the one backward graph, over steps of several lengths."""
    compiled, compile_variant = [], Compilers._backward_variant

    def counted(self: Any, gm: Any, sync: str, *args: Any) -> Any:
        compiled.append(sync)
        return compile_variant(self, gm, sync, *args)

    Compilers._backward_variant = counted  # type: ignore[method-assign, assignment]
    try:
        net, _ = pair(stage, dynamic=dynamic)
        for rows in (4, 6, 10) if dynamic else (4, 4, 4):
            x = torch.ones(rows, 7)
            with zerofx.no_sync(net):
                net(x).backward()
                net(x).backward()
            net(x).backward()
            net(x).backward()
    finally:
        Compilers._backward_variant = compile_variant  # type: ignore[method-assign]
    return compiled


@pytest.mark.parametrize("dynamic", [False, True])
@stages
def test_each_variant_of_a_backward_is_compiled_once(workers2, stage: int, dynamic: bool) -> None:
    assert workers2.run(variants_compiled, stage, dynamic, timeout=120) == [["reduce", "keep", "merge"]] * 2


def check_step_while_kept(stage: int) -> None:
    net, plain = pair(stage)
    x, mine = batches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with zerofx.no_sync(net):
        net(mine).backward()
    with pytest.raises(
        RuntimeError, match=r"SGD\.step\(\) while zerofx\.no_sync keeps gradients back \(of 'first.weight'"
    ):
        optimizer.step()
    for closure in (lambda: None, None):
        with pytest.raises(RuntimeError, match="keeps gradients back"):
            optimizer.step(closure)
    zerofx.drop_kept(net)
    net(mine).backward()
    plain(x).backward()
    assert_same_gradients(net, plain)
    optimizer.step()


def check_closure(stage: int) -> None:
    net, plain = pair(stage)
    x, mine = batches()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, plain)]
    with zerofx.no_sync(net):
        net(mine).backward()
    optimizers[0].step(lambda: net(mine).backward())
    (plain(x) + plain(x)).backward()
    optimizers[1].step()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor() if stage else p, q)


@stages
def test_a_closure_may_reduce_the_gradients_that_were_kept(workers2, stage: int) -> None:
    workers2.run(check_closure, stage, timeout=120)


@stages
def test_a_step_while_gradients_are_kept_is_refused_and_they_can_be_dropped(workers2, stage: int) -> None:
    workers2.run(check_step_while_kept, stage, timeout=120)


def check_no_sync_nests_and_survives(stage: int) -> None:
    net, plain = pair(stage)
    x, mine = batches()
    with zerofx.no_sync(net):
        with zerofx.no_sync(net):
            net(mine).backward()
        net(mine).backward()
    with pytest.raises(ZeroDivisionError), zerofx.no_sync(net):
        raise ZeroDivisionError
    net(mine).backward()
    for _ in range(3):
        plain(x).backward()
    assert_same_gradients(net, plain)


@stages
def test_no_sync_nests_and_ends_with_an_exception(workers2, stage: int) -> None:
    workers2.run(check_no_sync_nests_and_survives, stage, timeout=120)


def check_written_weights_reach_the_replicas(stage: int) -> None:
    net, plain = pair(stage)
    x, mine = batches()
    net(mine).backward()
    for model in (net, plain):
        with torch.no_grad():
            model.first.weight.mul_(0.5)
            model.second.bias.add_(1.0)
    dist.all_reduce(loss := net(mine).detach().clone())
    torch.testing.assert_close(loss / dist.get_world_size(), plain(x).detach())
    net.load_state_dict({k: v + 0.25 for k, v in plain.state_dict().items()})
    plain.load_state_dict({k: v + 0.25 for k, v in plain.state_dict().items()})
    net.eval()
    with torch.no_grad():
        dist.all_reduce(loss := net(mine).clone())
        torch.testing.assert_close(loss / dist.get_world_size(), plain(x))
    for (name, p), q in zip(net.named_parameters(), plain.parameters()):
        torch.testing.assert_close(whole(p).detach(), q.detach(), msg=name)


@stages
def test_weights_written_by_hand_are_what_the_next_forward_uses(workers2, stage: int) -> None:
    workers2.run(check_written_weights_reach_the_replicas, stage, timeout=120)


def count_refreshes(stage: int, fused: bool) -> list[int]:
    net, _ = pair(stage)
    _, mine = batches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    counts = []
    for step in range(3):
        with count_collectives() as log:
            net(mine)
            net(mine).backward()
        counts.append(log.calls["all_gather_recv"] // (dist.get_world_size() - 1))
        if step:
            optimizer.step()
    return counts


@pytest.mark.parametrize("fused", [False, True])  # PyTorch's fused optimizers do not count their writes
@pytest.mark.parametrize("stage", [1, 2])
def test_replicas_are_refreshed_once_after_each_optimizer_step_and_never_else(
    workers3, stage: int, fused: bool
) -> None:
    used = 2  # groups of the parameters that this forward uses: `extra` has one of its own
    for counts in workers3.run(count_refreshes, stage, fused, timeout=120):
        assert counts == [0, 0, used]


def check_write_before_backward(stage: int) -> str:
    net, _ = pair(stage)
    _, mine = batches()
    loss = net(mine)
    with torch.no_grad():
        net.second.weight.add_(1.0)
    try:
        loss.backward()
    except RuntimeError as e:
        return str(e)
    return "no error"


@stages
def test_a_weight_changed_between_forward_and_backward_is_an_error(workers2, stage: int) -> None:
    for message in workers2.run(check_write_before_backward, stage, timeout=120):
        assert "modified by an inplace operation" in message


def check_eager_code(stage: int) -> None:
    """A loss that uses a weight outside of any graph besides the compiled forward."""
    net, plain = pair(stage)
    x, mine = batches()

    def penalty(model: Net) -> torch.Tensor:
        return (model.second.weight @ torch.ones(11)).square().sum()

    with zerofx.no_sync(net):
        (net(mine) + penalty(net)).backward()
    (net(mine) + penalty(net)).backward()
    for _ in range(2):
        (plain(x) + penalty(plain)).backward()
    assert_same_gradients(net, plain)


@stages
@pytest.mark.filterwarnings("ignore:.*needs the whole of")
def test_code_outside_of_graphs_gets_averaged_gradients_too(workers2, stage: int) -> None:
    workers2.run(check_eager_code, stage, timeout=120)


def check_clip_by_value(stage: int) -> None:
    net, plain = pair(stage)
    x, mine = batches()
    net(mine).backward()
    plain(x).backward()
    for model in (net, plain):
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)
    assert_same_gradients(net, plain)
    for model in (net, plain):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
    net(mine).backward()
    plain(x).backward()
    assert_same_gradients(net, plain)


@stages
def test_gradients_are_clipped_by_value_and_zeroed_in_place(workers2, stage: int) -> None:
    workers2.run(check_clip_by_value, stage, timeout=120)


def check_frozen(stage: int) -> None:
    torch.manual_seed(0)
    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    for model in (plain, net):
        model.first.requires_grad_(False)
    zerofx.compile(net, stage=stage, executor="eager", groups=EACH_LAYER)
    x, mine = batches()
    net(mine).backward()
    plain(x).backward()
    assert_same_gradients(net, plain)


@stages
def test_frozen_parameters_have_no_gradient(workers2, stage: int) -> None:
    workers2.run(check_frozen, stage, timeout=120)


def alone(stage: int) -> int:
    net, plain = pair(stage)
    x, _ = batches()
    with count_collectives() as log:
        for model in (net, plain):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(3):
                model(x, extra=True).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    for p, q in zip(net.parameters(), plain.parameters()):
        torch.testing.assert_close(whole(p).detach(), q.detach())
    return sum(log.calls.values())


@stages
def test_one_rank_alone_issues_no_collective_in_any_stage(make_workers, stage: int) -> None:
    assert make_workers(1).run(alone, stage, timeout=120) == [0]


def test_no_sync_of_a_plain_module_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"call zerofx\.compile on it first"), zerofx.no_sync(Net()):
        pass
