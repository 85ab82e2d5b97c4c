"""Sharded weights in eager code: views beside weights, writes by position, two models, closures."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofx
from tests.slow import slow
from tests.test_parameters import full, twins
from tests.workers import Workers

ROWS = torch.tensor([0, 3, 8])
MASK = torch.arange(81).view(9, 9) % 3 == 0
VALUES = torch.arange(27.0).view(3, 9)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 2))


READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "a view, then the weight": lambda w: w.t() + w,
    "a row, then the weight": lambda w: w[0] * w,
    "a product": lambda w: w.T @ w,
    "a product the other way": lambda w: w @ w.T,
    "linear": lambda w: F.linear(w[:2], w),
    "cosine_similarity": lambda w: F.cosine_similarity(w[:1], w),
    "in a list": lambda w: torch.cat([w[1:], w, w.t()]),
    "where": lambda w: torch.where(w.t() > 0, w, w[0]),
    "a view of a view": lambda w: (w.t()[1:] @ w).sum(0) - w[0],
    "keywords": lambda w: torch.addmm(input=w.t(), mat1=w, mat2=w[:, :9]),
    "broadcast": lambda w: torch.stack(torch.broadcast_tensors(w[0], w)),
}

WRITES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda w: w.__setitem__(ROWS, VALUES),
    "a slice": lambda w: w.__setitem__((slice(2, 4), 1), 5.0),
    "index_fill_": lambda w: w.index_fill_(0, ROWS, 2.0),
    "index_add_": lambda w: w.index_add_(0, ROWS, VALUES),
    "index_copy_": lambda w: w.index_copy_(0, ROWS, VALUES),
    "a mask of rows": lambda w: w.mul_(torch.arange(9).view(9, 1) % 2),
    "a mask of columns": lambda w: w.mul_(torch.arange(9) % 2),
    "masked_fill_": lambda w: w.masked_fill_(MASK[:1], 3.0),
    "scatter_": lambda w: w.scatter_(0, ROWS.view(1, 3), VALUES[:1, :3]),
    "a row's zero_": lambda w: w[0].zero_(),
    "views, twice": lambda w: [w[0].mul_(2), w.t()[1].mul_(2), w[3:5].mul_(2)],
    "one view, twice": lambda w: [view.add_(1) for view in [w[2]] * 2],
    "a view of the weight's own": lambda w: w[0].copy_(w[1]),
    "fill_diagonal_": lambda w: w.fill_diagonal_(7.0),
    "a row of itself": lambda w: w.add_(w[0].clone()),
    "its own product": lambda w: w.addmm_(w.clone(), w.t().clone()),
    "embedding": lambda w: F.embedding(ROWS, w, max_norm=0.3),
    "out": lambda w: torch.eye(9, out=w),
    "constant_": lambda w: nn.init.constant_(w, 2.0),
    "eye_": nn.init.eye_,
    "data": lambda w: setattr(w, "data", torch.ones(9, 9)),
    "data of its own": lambda w: setattr(w, "data", w.data * 2 + 1),
    "set_": lambda w: w.set_(torch.ones(9, 9)),
}


def put_back(weight: Any) -> None:
    """What it was is read after it is another: an average that is swapped in to evaluate, and out again."""
    old, flat, again = weight.data, weight.data.view(-1), weight.detach()
    weight.data = old * 2
    weight.add_(full(old) + full(flat).view_as(weight))
    assert torch.equal(full(old), full(again))
    again.mul_(3)  # one memory, as ever
    weight.data = old


def swapped(weight: Any) -> None:
    other = weight.data.clone().mul_(3)
    weight.data, other.data = other.data, weight.data
    weight.sub_(full(other), alpha=0.5)


def data_of_data(weight: Any) -> None:
    """The tensor that is given other memory is not the weight."""
    alias = weight.data
    alias.data = torch.ones(9, 9)
    alias.add_(1)
    weight.add_(full(alias))


WRITES |= {"what data was": put_back, "data, swapped": swapped, "data of data": data_of_data}


def check_eager(what: str, stage: int) -> None:
    for name, run in (READS if what == "reads" else WRITES).items():
        module, plain = twins(net, stage=stage)
        with torch.no_grad():
            got, want = run(module[0].weight), run(plain[0].weight)
            if what == "reads":
                torch.testing.assert_close(full(got), want, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(
                full(module[0].weight), plain[0].weight.detach(), msg=lambda m, n=name: f"{n}: {m}"
            )
        # A write is one for compiled code, too.
        torch.testing.assert_close(module(VALUES), plain(VALUES), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("stage", [slow(1), 3])
@pytest.mark.parametrize("what", ["reads", "writes"])
def test_eager_code_on_sharded_weights_is_right(workers2: Workers, what: str, stage: int) -> None:
    workers2.run(check_eager, what, stage)


def check_masters() -> None:
    for name in ("a row's zero_", "views, twice", "one view, twice", "a view of the weight's own"):
        module, plain = twins(net, stage=3, mixed_precision=zerofx.MixedPrecision(torch.bfloat16))
        with torch.no_grad():
            WRITES[name](module[0].weight)
            WRITES[name](plain[0].weight)
        assert torch.equal(full(module[0].weight), plain[0].weight.detach()), name


def test_what_is_written_to_a_view_in_16_bits_is_in_the_master(workers2: Workers) -> None:
    workers2.run(check_masters)


def check_copies(stage: int) -> None:
    module, plain = twins(net, stage=stage, mixed_precision=zerofx.MixedPrecision(torch.bfloat16))
    for copied in (lambda w: w.clone().detach(), lambda w: w.detach().clone(), lambda w: w.data.clone()):
        assert torch.equal(full(copied(module[0].weight)), plain[0].weight.detach())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_copy_of_a_weight_that_computes_in_16_bits_is_of_the_master(workers2: Workers, stage: int) -> None:
    workers2.run(check_copies, stage)


def check_random(stage: int) -> None:
    elementwise = (nn.init.normal_, nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.trunc_normal_)
    for init in (*elementwise, nn.init.orthogonal_, functools.partial(nn.init.sparse_, sparsity=0.4)):
        module, plain = twins(net, stage=stage)
        torch.manual_seed(5 + torch.distributed.get_rank())  # rank 0's numbers are taken
        found = []
        for m in (module, plain):
            for layer in m:  # the second is wide: orthogonal_ transposes it
                init(layer.weight)
            found.append([*(full(layer.weight).detach() for layer in m), torch.rand(1)])
            torch.manual_seed(5)
        alike = 3 if torch.distributed.get_rank() == 0 else 2  # other ranks' generators go their own way
        torch.testing.assert_close(found[0][:alike], found[1][:alike])


def test_a_weight_is_initialised_again_with_rank_0s_numbers(workers2: Workers) -> None:
    workers2.run(check_random, 3)


def blend(teacher: nn.Module, student: nn.Module) -> None:
    with torch.no_grad():
        for q, p in zip(teacher.parameters(), student.parameters(), strict=True):
            q.mul_(0.5).add_(p, alpha=0.5)
            q.lerp_(p, 0.25)
            q.data.mul_(0.9).add_(0.1 * p.data)
            torch._foreach_lerp_([q], [p], 0.5)


def of_lists(teacher: nn.Module, student: nn.Module) -> None:
    ours, theirs = list(teacher.parameters()), list(student.parameters())
    with torch.no_grad():
        torch._foreach_mul_(ours, 0.5)
        torch._foreach_add_(ours, torch._foreach_mul(theirs, 0.5))
        largest = torch._foreach_max(ours)
        torch._foreach_mul_(ours, list(largest))


TWO: dict[str, Callable[[Any, Any], Any]] = {
    "load_state_dict": lambda q, p: q.load_state_dict(p.state_dict()),
    "of a copy": lambda q, p: q.load_state_dict(copy.deepcopy(p.state_dict())),
    "copy_": lambda q, p: [a.data.copy_(b) for a, b in zip(q.parameters(), p.parameters(), strict=True)],
    "an average": blend,
    "lists": of_lists,
}


def check_two(other_groups: bool) -> None:
    for name, run in TWO.items():
        student, plain_student = twins(net, stage=3)
        # Of other groups the slices are others.
        options = {"groups": None} if other_groups else {}
        teacher, plain_teacher = twins(lambda: net().requires_grad_(False), stage=3, **options)
        with torch.no_grad():
            for m in (teacher, plain_teacher):
                for p in m.parameters():
                    p.mul_(3)
        run(teacher, student)
        run(plain_teacher, plain_student)
        for p, q in zip(teacher.parameters(), plain_teacher.parameters(), strict=True):
            torch.testing.assert_close(full(p), q.detach(), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("other_groups", [False, True])
def test_a_teacher_follows_a_student(workers2: Workers, other_groups: bool) -> None:
    workers2.run(check_two, other_groups)


def check_averaged() -> None:
    torch.manual_seed(0)
    module, plain = net(), net()
    plain.load_state_dict(module.state_dict())
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (module, plain)]
    zerofx.compile(module, stage=3, executor="eager")
    for _ in range(3):
        for m, average in zip((module, plain), averages, strict=True):
            with torch.no_grad():
                for p in m.parameters():
                    p.add_(1.0)
            average.update_parameters(m)
    for p, q in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_an_average_that_was_made_before_compile(workers2: Workers) -> None:
    workers2.run(check_averaged)


def check_vectors_and_masks() -> None:
    module, plain = twins(net, stage=3)
    results = []
    for m in (module, plain):
        vector = torch.arange(sum(p.numel() for p in m.parameters()), dtype=torch.float32)
        nn.utils.vector_to_parameters(vector, m.parameters())
        for p in m.parameters():  # as SAM does
            old = p.data.clone()
            with torch.no_grad():
                p.add_(1.0)
            p.data = old
        results.append([full(p).detach() for p in m.parameters()])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_what_puts_whole_tensors_in_the_place_of_parameters(workers2: Workers) -> None:
    workers2.run(check_vectors_and_masks)


def check_closure() -> None:
    x = torch.ones(2, 9)
    module, plain = twins(net, stage=3)
    for m in (module, plain):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

        def closure(m: Any = m, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = m(x).square().mean() + (2.0 * m[0].weight.t()).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach())


@pytest.mark.filterwarnings("ignore:.*needs the whole of")
def test_a_weight_in_a_closure_is_not_the_optimizers(workers2: Workers) -> None:
    workers2.run(check_closure)
