"""Ranks that run different layers, or fewer micro-batches, train as DistributedDataParallel with unused parameters."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.counting import count_collectives
from tests.slow import quick_if
from tests.test_leaf import Net as Experts
from tests.test_leaf import batch as routed
from tests.test_parameters import mine, same, twins
from tests.workers import Workers
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.base import make_batch

EACH_GROUP = zerofx.Grouping(min_bytes=0)


class Net(nn.Module):
    """A trunk, a tower that some batches use, heads by task, and what nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(8, 8)
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, has_image: bool, task: int) -> torch.Tensor:
        hidden = self.embed(x)
        if has_image:
            hidden = hidden + self.tower(x)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return (self.heads[task](hidden) * self.scale).square().mean()


Batch = tuple[torch.Tensor, bool, int]


def batches(step: int, accumulate: bool) -> list[Batch]:
    """This rank's micro-batches of a step: of another number than on the next rank."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(10 * step + rank)
    count = 1 + (step + rank) % 3 if accumulate else 1
    return [
        (torch.randn(4, 8, generator=generator), bool((step + rank + i) % 2), (step + 2 * rank + i) % 3)
        for i in range(count)
    ]


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, zerofx.ShardedTensor) else x


def compare(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Gradients, None or not, and weights; and ranks with each other."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(whole(p.grad), q.grad, **tolerance)
        mine = whole(p).detach().contiguous()
        torch.testing.assert_close(mine, q.detach(), **tolerance)
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, mine)
        assert all(torch.equal(mine, other) for other in everyones), name


def backward_plainly(plain: nn.Module, todo: list[Batch]) -> None:
    """DistributedDataParallel knows no rank with fewer micro-batches: those that are missing are worth nothing."""
    dist.all_reduce(most := torch.tensor(len(todo)), op=dist.ReduceOp.MAX)
    for i in range(int(most)):
        (plain(*(todo[i] if i < len(todo) else todo[0])) * (i < len(todo))).backward()


def check_training(stage: int, executor: str, accumulate: bool, **options: Any) -> None:
    model = zerofx.compile(Net(), stage=stage, executor=executor, groups=EACH_GROUP, uneven=True, timeout=60, **options)
    plain = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    for step in range(4):
        todo = batches(step, accumulate)
        backward_plainly(plain, todo)
        for i, args in enumerate(todo):
            with zerofx.no_sync(model) if i < len(todo) - 1 else contextlib.nullcontext():
                model(*args).backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, plain)]
        torch.testing.assert_close(norms[0], norms[1])
        compare(model, plain.module)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(model, plain.module)
    with torch.no_grad():  # one rank evaluates the tower, one does not, and not as often; all ranks save
        for batch in batches(7, accumulate and stage > 0):  # in stage 0 a state dict takes no collective
            loss = model(*batch)
    state = zerofx.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(state["embed.weight"], plain.module.embed.weight.detach())
    dist.all_reduce(loss)
    assert model.never.weight.grad is None and loss.isfinite()


@quick_if(lambda stage, accumulate: accumulate and stage == 3)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_run_other_layers_and_fewer_micro_batches(workers2: Workers, stage: int, accumulate: bool) -> None:
    workers2.run(check_training, stage, "eager", accumulate)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inductor", "regional"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_so_they_do_with_generated_code(workers2: Workers, stage: int, executor: str) -> None:
    workers2.run(check_training, stage, executor, True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"memory_budget": float("inf")}, {"activation_budget": 0.5}], ids=str)
def test_so_they_do_within_budgets(workers2: Workers, options: dict[str, Any]) -> None:
    workers2.run(check_training, 3, "eager", True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_so_do_three_ranks(workers3: Workers, stage: int) -> None:
    workers3.run(check_training, stage, "eager", True)


def check_kept(stage: int) -> None:
    """The last micro-batch of rank 1 is in `no_sync`, and rank 0 has one more: the step has all gradients."""
    model = zerofx.compile(Net(), stage=stage, executor="eager", groups=EACH_GROUP, uneven=True, timeout=60)
    plain = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    for step in range(3):
        todo = [(torch.randn(4, 8), bool((step + i) % 2), (step + i) % 3) for i in range(3 - dist.get_rank())]
        backward_plainly(plain, todo)
        for i, args in enumerate(todo):
            with zerofx.no_sync(model) if i < 2 else contextlib.nullcontext():
                model(*args).backward()
        for optimizer in optimizers:
            optimizer.step()
        compare(model, plain.module)
        for optimizer in optimizers:
            optimizer.zero_grad()


@quick_if(lambda stage: stage == 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_rank_with_fewer_micro_batches_kept_is_in_the_step(workers2: Workers, stage: int) -> None:
    workers2.run(check_kept, stage)


def check_experts(stage: int, executor: str) -> None:
    """Graph breaks by data: experts run uncompiled, and their weights are gathered where a rank uses them."""
    module, plain = twins(Experts, stage=stage, executor=executor, uneven=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, plain)]
    for step in range(3):
        x, route = routed(step)
        (y, other) = routed(step + 1)
        with zerofx.no_sync(module):
            module(mine(y), mine(other)).backward()
        module(mine(x), mine(route)).backward()
        plain(y, other).backward()
        plain(x, route).backward()
        same(module, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same(module, plain)


@quick_if(lambda stage, executor: (stage, executor) == (3, "eager"))
@pytest.mark.parametrize(("stage", "executor"), [(0, "eager"), (1, "eager"), (3, "eager"), (3, "inductor")])
def test_experts_need_no_leaf_modules(workers2: Workers, stage: int, executor: str) -> None:
    workers2.run(check_experts, stage, executor, timeout=300)


def check_hugging_face(name: str, stage: int, executor: str) -> None:
    built = ARCHITECTURES[name]
    dtype = torch.float32 if name == "switch_transformers" else torch.float64  # its router computes in 32 bits
    model, plain = (built.build(0).to(dtype) for _ in range(2))
    if name == "mixtral":  # the loop over the experts that were chosen
        for m in (model, plain):
            m.set_experts_implementation("eager")
    if name == "llava":  # nobody reads what it returns: its gradient is zeros in a graph, and None outside
        for m in (model, plain):
            m.model.vision_tower.post_layernorm.requires_grad_(False)
    zerofx.compile(model, stage=stage, executor=executor, groups=EACH_GROUP, uneven=True, timeout=120)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, ddp)]
    rank = dist.get_rank()
    for step in range(3):
        batch = make_batch(built.batch, 2, 100 * step + rank, dtype)
        if name == "llava" and (step + rank) % 2:  # a text without an image
            del batch["pixel_values"]
            batch["input_ids"][batch["input_ids"] == 3] = 4
        if name == "switch_transformers":  # one token, which one expert gets: another on each rank
            batch = {key: torch.full_like(value, 5 + rank + step) for key, value in batch.items()}
        losses = []
        for m, optimizer in zip((model, ddp), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m(**batch).loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        compare(model, plain, rtol=1e-3, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
        compare(model, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["llava", "mixtral", "switch_transformers"])
def test_models_of_transformers_whose_layers_follow_from_data(workers2: Workers, name: str, stage: int) -> None:
    workers2.run(check_hugging_face, name, stage, "eager", timeout=300)


@pytest.mark.slow
def test_a_model_of_two_modalities_with_inductor(workers2: Workers) -> None:
    workers2.run(check_hugging_face, "llava", 3, "inductor", timeout=500)


def check_messages(stage: int) -> None:
    """Where all ranks run the same, the collectives are those of before, and an offer goes ahead of each graph."""
    x = torch.ones(4, 8)
    seen = []
    for uneven in (False, True):
        model = zerofx.compile(Net(), stage=stage, executor="eager", groups=EACH_GROUP, uneven=uneven)
        optimizer = zerofx.AdamW(model.parameters())
        for _ in range(2):
            with count_collectives() as log:
                model(x, True, 0).backward()
                optimizer.step()
        seen.append(dict(log.calls))
    even, by_turns = seen
    # forward, its end, backward, its end, step; in stage 0 forward has no collectives
    assert by_turns.pop("offer_send") == by_turns.pop("offer_recv") == 5 - (stage == 0)
    assert by_turns == even


def check_together(stage: int) -> None:
    """Heads of one group: graphs differ, collectives do not, so ranks run them at once."""
    model = zerofx.compile(Net(), stage=stage, executor="eager", uneven=True)
    plain = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    for _ in range(2):
        batch = torch.randn(4, 8), True, dist.get_rank()
        plain(*batch).backward()
        with count_collectives() as log:
            model(*batch).backward()
        assert log.calls["offer_send"] == 4 - (stage == 0)
        compare(model, plain.module)
        for optimizer in optimizers:
            optimizer.step()
        compare(model, plain.module)


@quick_if(lambda stage: stage == 3)
@pytest.mark.parametrize("stage", [0, 3])
def test_graphs_with_the_same_collectives_run_at_once(workers2: Workers, stage: int) -> None:
    workers2.run(check_together, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_run_the_same_send_a_message_for_each_graph(workers2: Workers, stage: int) -> None:
    workers2.run(check_messages, stage)


# ---- what cannot be -----------------------------------------------------------------------------------------------


def uneven(model: nn.Module | None = None, **options: Any) -> Any:
    return zerofx.compile(model or Net(), uneven=True, executor="eager", groups=EACH_GROUP, **options)


class Collective(Net):
    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.distributed._functional_collectives.all_reduce(self.embed(x), "sum", dist.group.WORLD).sum()


class Writes(Net):
    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        with torch.no_grad():
            self.embed.weight.data.clamp_(-1, 1)
        return self.embed(x).sum()


def check_refusals() -> None:
    x = torch.ones(4, 8)
    with pytest.raises(ValueError, match=r"uneven=True with lookups=True: ranks do not take part"):
        uneven(stage=3, lookups=True)
    model = uneven()
    optimizer = zerofx.AdamW(model.parameters())
    with pytest.raises(ValueError, match="step_in_backward with uneven=True"), zerofx.step_in_backward(optimizer):
        pass
    loss = model(x, True, 0)
    with pytest.raises(RuntimeError, match=r"backward\(inputs=...\) without .*, with uneven=True"):
        loss.backward(inputs=[model.scale])
    with pytest.raises(Exception, match="uneven=True with a collective of the model's own"):
        uneven(Collective())(x)
    with pytest.raises(Exception, match=r"uneven=True with a forward that writes to 'embed\.weight'"):
        uneven(Writes())(x)


def test_what_does_not_go_with_it_is_refused(workers2: Workers) -> None:
    workers2.run(check_refusals)


def check_out_of_step(path: str) -> None:
    model, rank = uneven(), dist.get_rank()
    optimizer = zerofx.AdamW(model.parameters())
    model(torch.ones(4, 8), True, rank).backward()
    with pytest.raises(zerofx.OutOfStepError, match=r"rank \d is in .*, and rank \d in something else"):
        optimizer.step() if rank else zerofx.save(Path(path), model, optimizer)


def check_read_early() -> None:
    """Rank 0 clips, and rank 1 has one more backward that reduces."""
    model, x = uneven(), torch.ones(4, 8)
    with pytest.raises(zerofx.OutOfStepError, match="rank 0 has read gradients"):
        for _ in range(1 + dist.get_rank()):
            model(x, True, 0).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def check_leaving() -> None:
    """Rank 1 has fewer steps, which is not what this is for."""
    model, x = uneven(timeout=3), torch.ones(4, 8)
    assert model(x, True, 0).isfinite()
    if dist.get_rank() == 0:
        with pytest.raises(zerofx.OutOfStepError, match=r"'what runs next' .*missing: rank 1"):
            model(x, True, 0)


def test_ranks_that_do_not_do_alike_what_all_must_are_told(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_out_of_step, str(tmp_path))


def test_gradients_that_are_not_complete_are_not_clipped(workers2: Workers) -> None:
    workers2.run(check_read_early)


def test_a_rank_that_has_left_is_missed(workers2: Workers) -> None:
    workers2.run(check_leaving)
