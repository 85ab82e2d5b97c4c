"""Compiled modules and what is around them: other modules, graph breaks, new shapes, the end of the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import zerofx
from tests import models
from tests.counting import count_collectives
from tests.slow import slow
from tests.workers import Workers

EACH_GROUP = zerofx.Grouping(min_bytes=0)
executors = pytest.mark.parametrize("executor", ["eager", slow("inductor")])


def mine(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()].clone()


def same_gradients(module: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(module.named_parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            whole = p.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(whole, q.grad, rtol=1e-4, atol=1e-6, msg=f"{name}: {{}}".format)


def twins(build: Callable[..., nn.Module], *args: Any) -> tuple[nn.Module, nn.Module]:
    module, plain = build(*args), build(*args)
    plain.load_state_dict(module.state_dict())
    return module, plain


# -- graph breaks


class Broken(nn.Module):
    """Two graphs that use the same weights, code between them that no graph holds, and a weight it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(torch.tanh(self.a(x)))
        torch._dynamo.graph_break()
        x = self.between(x)
        return (self.b(torch.relu(self.a(x))) ** 2).mean()

    @torch.compiler.disable
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a.weight + 1


def check_breaks(executor: str) -> int:
    module, plain = twins(Broken)
    zerofx.compile(module, executor=executor)
    batch = torch.randn(6, 7)
    for _ in range(2):
        module(mine(batch)).backward()
        plain(batch).backward()
        same_gradients(module, plain)
    return len(zerofx.graphs(module))


@executors
def test_graphs_that_share_a_group_give_the_sum_of_their_gradients(workers2: Workers, executor: str) -> None:
    assert workers2.run(check_breaks, executor) == [2, 2]


class BrokenLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(5, 5), nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        torch._dynamo.graph_break()
        return x * self.scale


def check_many_broken_layers() -> int:
    """Rank 1 alone meets other lengths, for which it compiles layers anew before it has seen the last of them."""
    module, plain = twins(lambda: nn.Sequential(*(BrokenLayer() for _ in range(10))))
    zerofx.compile(module, executor="eager", dynamic=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*outside of a compiled graph")
        for width in (2, 2 + dist.get_rank()):
            module(torch.ones(width, 5)).mean().backward()
            plain(torch.ones(2, 5)).mean().backward()  # rows are alike, so that their number does not matter
    same_gradients(module, plain)
    return len(zerofx.graphs(module))


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch.compile has no recompile_limit")
def test_more_than_eight_layers_of_one_code_are_compiled_on_every_rank(workers2: Workers) -> None:
    assert workers2.run(check_many_broken_layers) == [20, 40]


# -- several modules


class Views(nn.Module):
    """Returns a product, a view of its weight and the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ self.weight, self.weight.t()[1:], self.weight


def check_returned_views(executor: str) -> None:
    module, plain = twins(Views)
    zerofx.compile(module, executor=executor)
    x = torch.randn(2 * dist.get_world_size(), 7)
    with torch.no_grad():
        for mine_, whole in zip(module(mine(x)), plain(mine(x))):
            got = mine_.full_tensor() if isinstance(mine_, zerofx.ShardedTensor) else mine_
            torch.testing.assert_close(got, whole)
    for net, batch in ((module, mine(x)), (plain, x)):
        product, view, _ = net(batch)
        (product.mean() + view.square().sum()).backward()
    same_gradients(module, plain)


@executors
def test_a_returned_view_of_a_weight_outlives_the_gathered_memory(workers2: Workers, executor: str) -> None:
    workers2.run(check_returned_views, executor, timeout=120)


def check_sequential(executor: str) -> tuple[int, int]:
    module, plain = twins(
        lambda: nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Sequential(nn.Linear(11, 3), nn.Tanh()))
    )
    zerofx.compile(module, executor=executor, groups=EACH_GROUP)
    x = torch.randn(2 * dist.get_world_size(), 7)
    for net, batch in ((module, mine(x)), (plain, x)):
        net(batch).mean().backward()
    same_gradients(module, plain)
    records = zerofx.graphs(module)
    return len(records), len(records[0].forward.context.found.shards)


@executors
def test_a_module_of_pytorch_s_own_is_compiled_whole(workers2: Workers, executor: str) -> None:
    assert workers2.run(check_sequential, executor, timeout=120) == [(1, 2)] * 2


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(torch.tanh(self.first(x))) ** 2).mean()


def check_two(executor: str) -> None:
    (one, plain_one), (two, plain_two) = twins(Small), twins(Small)
    batch = torch.randn(4, 7)
    zerofx.compile(one, executor=executor)
    one(mine(batch)).backward()
    zerofx.compile(two, executor=executor)
    two(mine(batch * 2)).backward()
    one(mine(batch * 3)).backward()
    plain_one(batch).backward()
    plain_one(batch * 3).backward()
    plain_two(batch * 2).backward()
    same_gradients(one, plain_one)
    same_gradients(two, plain_two)
    assert not {id(r) for r in zerofx.graphs(one)} & {id(r) for r in zerofx.graphs(two)}
    for module, plain in ((one, plain_one), (two, plain_two)):
        torch.testing.assert_close(module(batch), plain(batch))


@executors
def test_two_models_of_one_class_do_not_mix(workers2: Workers, executor: str) -> None:
    workers2.run(check_two, executor)


def test_many_models_of_one_class_are_all_compiled(fake_world: Callable[..., None]) -> None:
    fake_world(1)
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        module = zerofx.compile(Small(), executor="eager")
        module(torch.ones(2, 7)).sum().backward()
        assert len(zerofx.graphs(module)) == 1


def check_freed(executor: str) -> str:
    """What it took until the shards were gone: deleting, collecting cycles, or resetting Dynamo."""
    module, batch = zerofx.compile(Small(), executor=executor), torch.randn(4, 7)
    module(mine(batch)).backward()
    with torch.no_grad():
        module(mine(batch))
    groups = [weakref.ref(p._group) for p in module.parameters()]  # type: ignore[attr-defined]
    shards = [weakref.ref(p._group.shard.untyped_storage()) for p in module.parameters()]  # type: ignore[attr-defined]
    parameters = [weakref.ref(p) for p in module.parameters()]
    del module
    for needed in ("del", "gc.collect", "torch._dynamo.reset"):
        if needed == "torch._dynamo.reset":
            torch._dynamo.reset()
        if needed != "del":
            gc.collect()
        if all(ref() is None for ref in (*groups, *shards, *parameters)):
            return needed
    return "nothing helped"


@executors
def test_a_deleted_model_frees_its_shards(workers2: Workers, executor: str) -> None:
    assert set(workers2.run(check_freed, executor)) <= {"del", "gc.collect"}


def check_alone(executor: str) -> None:
    module, plain = twins(Small)
    batch = torch.randn(4, 7)
    with count_collectives() as log:
        zerofx.compile(module, executor=executor)
        optimizer, reference = models.sgd(module.parameters()), models.sgd(plain.parameters())
        for _ in range(2):
            torch.testing.assert_close(module(batch), plain(batch))
            module(batch).backward()
            plain(batch).backward()
            same_gradients(module, plain)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        module.state_dict()["first.weight"].full_tensor()
        (module.first.weight * 2).detach().amax()  # type: ignore[union-attr, operator]
    assert not log.events, str(log)


@executors
def test_one_rank_alone_issues_no_collective(make_workers: Callable[[int], Workers], executor: str) -> None:
    make_workers(1).run(check_alone, executor)


# -- torch.compile


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def check_backend(executor: str) -> list[float]:
    model = models.build("mlp")
    optimizer = adamw(model.parameters())  # before anything is sharded
    compiled = torch.compile(model, backend="zerofx", options={"stage": 3, "executor": executor})
    losses = []
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for step in range(3):
            batch = {key: mine(value) for key, value in models.make_batch("mlp", 12, seed=step).items()}
            loss = compiled(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
    assert counters["stats"]["unique_graphs"] == 1 and counters["frames"] == {"total": 1, "ok": 1}, counters
    assert all(isinstance(p, zerofx.ShardedParameter) for p in model.parameters())
    assert len(zerofx.graphs(model)) == 1
    return losses


@executors
def test_the_named_backend_trains_alike_and_compiles_once(workers3: Workers, executor: str) -> None:
    expected, _ = models.reference_run("mlp", 3, adamw)
    for losses in workers3.run(check_backend, executor):
        assert losses == pytest.approx(expected, rel=1e-5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 6)
        self.project, self.head = nn.Linear(6, 18), nn.Linear(6, 19)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(self.embedding(tokens)).chunk(3, dim=-1)
        logits = self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def check_lengths(executor: str, dynamic: bool | None) -> int:
    module, plain = twins(Attention)
    zerofx.compile(module, executor=executor, groups=EACH_GROUP, dynamic=dynamic)
    for length in (5, 8, 13, 5, 31, 2):
        tokens = torch.randint(19, (4, length))
        module(mine(tokens)).backward()
        plain(tokens).backward()
        same_gradients(module, plain)
    with torch.no_grad():
        torch.testing.assert_close(module(tokens), plain(tokens))
    return counters["frames"]["ok"]


@executors
def test_new_sequence_lengths_never_give_wrong_numbers(workers2: Workers, executor: str) -> None:
    assert max(workers2.run(check_lengths, executor, None)) <= 3  # one length, any length, no_grad


def test_dynamic_from_the_start_compiles_once_for_all_lengths(workers2: Workers) -> None:
    assert workers2.run(check_lengths, "eager", True) == [2, 2]  # training, no_grad


# -- the end

PROGRAM = """
import os, sys, warnings
import torch, torch.distributed as dist, zerofx
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
model = zerofx.compile(torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Tanh()), executor=sys.argv[3])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(2, 7)).sum().backward()
    optimizer.step()
loss = model(torch.randn(2, 7)).sum()  # its backward never comes
print("done", flush=True)
if sys.argv[4] == "error":
    raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("executor", "end"), [("eager", "return"), ("eager", "error"), ("inductor", "return")])
def test_leaving_without_destroying_the_process_group_leaves_nothing_hanging(
    tmp_path: Path, executor: str, end: str
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(rank), executor, end],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=270)
            assert out == "done\n" and rank.returncode == (3 if end == "error" else 0), err
            assert "Traceback" not in err, err
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


class Gate(nn.Module):
    """Backward of its softplus gets a transposed gradient: the kernel keeps that layout, and its fake one does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(self.linear(x)).transpose(1, 2).contiguous().square().sum()


def check_layouts(executor: str) -> None:
    torch.manual_seed(0)
    net, plain, x = Gate(), Gate(), torch.randn(2, 3, 4)
    plain.load_state_dict(net.state_dict())
    zerofx.compile(net, stage=3, executor=executor)
    for each in (net, plain):
        each(x).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_kernel_that_lays_out_its_result_in_another_way_than_was_foretold(workers2: Workers, executor: str) -> None:
    workers2.run(check_layouts, executor)
