"""Several sharded modules in one program: students and teachers, actors and critics, one save, one optimizer or two."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.slow import slow
from tests.workers import Workers
from zerofx.runtime.state import backends


def net(seed: int, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def distilled(student: nn.Module, teacher: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (student(x) - teacher(x)).square().mean() + student(x).mean()


def same(module: nn.Module, plain: nn.Module) -> None:
    found = zerofx.full_state_dict(module, rank0_only=False)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def check_one_loss(stages: tuple[int, int], executor: str, frozen: bool) -> None:
    student, teacher = net(0), net(1)
    plain = [net(0), net(1)]
    for module in (teacher, plain[1]):
        module.requires_grad_(not frozen)
    zerofx.compile(student, stage=stages[0], executor=executor)
    zerofx.compile(teacher, stage=stages[1], executor=executor, mixed_precision=None)
    loss_of = torch.compile(distilled, backend="zerofx", options={"stage": stages[0], "executor": executor})
    modules = [student] if frozen else [student, teacher]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in modules]
    others = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in plain[: len(modules)]]
    backends._uncompiled.clear()  # what was said before, in this process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            loss_of(student, teacher, rows(step, dist.get_rank())).backward()
            world = range(dist.get_world_size())
            torch.stack([distilled(*plain, rows(step, rank)) for rank in world]).mean().backward()
            for optimizer in (*optimizers, *others):
                optimizer.step()
                optimizer.zero_grad()
    for module, reference in zip((student, teacher), plain, strict=True):
        same(module, reference)
        assert zerofx.graphs(module)  # each in graphs of its own
    said = [str(w.message) for w in caught if "of two modules that were sharded one by one" in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)
    assert all("'distilled' reads '0.weight' and '0.weight'" in text for text in said)


@pytest.mark.parametrize("stages", [(3, 3), (3, 0), (2, 3), slow((0, 1))])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_compiled_loss_of_two_modules_trains_both(workers2: Workers, stages: tuple[int, int], frozen: bool) -> None:
    workers2.run(check_one_loss, stages, "eager", frozen)


@pytest.mark.slow
def test_and_with_inductor_on_three_ranks(workers3: Workers) -> None:
    for stages in ((3, 3), (0, 2)):
        workers3.run(check_one_loss, stages, "inductor", False, timeout=300)


class Tower(nn.Module):
    def __init__(self, table: nn.Embedding, seed: int) -> None:
        super().__init__()
        self.table, self.head = table, net(seed)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(ids))
        return out


def towers() -> tuple[Tower, Tower]:
    torch.manual_seed(0)
    table = nn.Embedding(10, 6)
    return Tower(table, 1), Tower(table, 2)


def check_shared(stage: int, executor: str) -> None:
    query, document = towers()
    with pytest.raises(ValueError, match="is sharded already"):
        zerofx.compile(query, stage=stage, executor=executor)
        zerofx.compile(document, stage=stage, executor=executor)
    query, document = towers()
    plain = nn.ModuleList(towers())
    both = zerofx.shard(nn.ModuleList([query, document]), stage=stage, executor=executor)
    for tower in (query, document):
        tower.compile(backend="zerofx", options={"stage": stage, "executor": executor})
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (both, plain))
    ids = torch.arange(10).view(2, 5)
    for _ in range(2):
        mine = ids[dist.get_rank() % 2]
        (query(mine) * document(mine.flip(0))).mean().backward()
        parts = [(plain[0](i) * plain[1](i.flip(0))).mean() for i in (ids[r % 2] for r in range(dist.get_world_size()))]
        torch.stack(parts).mean().backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    same(both, plain)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_modules_that_share_a_weight_are_sharded_as_one_and_compiled_apart(workers2: Workers, stage: int) -> None:
    workers2.run(check_shared, stage, "eager")


def pair(stages: tuple[int, int], seed: int) -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
    actor = zerofx.compile(net(seed), stage=stages[0], executor="eager")
    critic = zerofx.compile(net(seed + 1, width=12), stage=stages[1], executor="eager")
    optimizers: list[Any] = [torch.optim.AdamW(actor.parameters(), lr=0.01), zerofx.AdamW(critic.parameters(), lr=0.02)]
    return nn.ModuleDict({"actor": actor, "critic": critic}), optimizers


def train(both: nn.ModuleDict, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        x = rows(step, dist.get_rank())
        (both["actor"](x) * both["critic"](x)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check_saved(folder: str) -> None:
    both, optimizers = pair((3, 2), 0)
    train(both, optimizers, range(2))
    zerofx.save(folder, both, optimizers)
    again, others = pair((1, 3), 5)
    zerofx.load(folder, again, others)
    for modules, its in ((both, optimizers), (again, others)):
        train(modules, its, range(2, 4))
    for (name, value), other in zip(
        zerofx.full_state_dict(both, rank0_only=False).items(),
        zerofx.full_state_dict(again, rank0_only=False).values(),
        strict=True,
    ):
        torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-5, msg=name)


class Counting(torch.optim.SGD):
    """Keeps a number beside its state."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 3}


def check_not_saved(folder: str) -> None:
    both, optimizers = pair((3, 3), 0)
    twice = [optimizers[0], torch.optim.SGD(both.parameters(), lr=0.1)]
    with pytest.raises(zerofx.CheckpointError, match=r"is a parameter of two of these optimizers, the second a SGD"):
        zerofx.save(folder, both, twice)
    beside = [optimizers[0], Counting(both["critic"].parameters(), lr=0.1)]
    with pytest.raises(zerofx.CheckpointError, match=r"Counting keeps 'count' beside the state of its parameters"):
        zerofx.save(folder, both, beside)
    train(both, optimizers, range(1))
    zerofx.save(folder, both, optimizers)
    with pytest.raises(zerofx.CheckpointError, match="is of an optimizer of other parameters"):
        zerofx.load(folder, both, optimizers[0])


def test_optimizers_that_cannot_be_told_apart_are_refused(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_not_saved, str(tmp_path / "saved"))


def test_two_modules_and_two_optimizers_are_saved_in_one_folder(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_saved, str(tmp_path / "saved"))


def check_head(stage: int, averaged: bool) -> None:
    body, head = zerofx.compile(net(0), stage=stage, executor="eager"), nn.Linear(3, 1)
    for _ in range(2):  # another optimizer asks anew, another step does not
        optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()])
        for step in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                head(body(rows(step, dist.get_rank()))).mean().backward()
                for p in head.parameters():
                    if averaged and p.grad is not None:
                        dist.all_reduce(p.grad)
                optimizer.step()
            said = [str(w.message) for w in caught if "beside sharded ones" in str(w.message)]
            assert len(said) == (dist.get_rank() == 0 and step == 0 and not averaged)
            assert all("1 plain parameters" in text and "of shape (1, 3)" in text for text in said)  # bias's are equal
            optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_plain_head_beside_a_sharded_body_whose_gradients_nobody_averages_is_warned_of(
    workers2: Workers, stage: int
) -> None:
    for averaged in (False, True):
        workers2.run(check_head, stage, averaged)
