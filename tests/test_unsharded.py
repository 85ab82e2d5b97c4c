"""Inside of `zerofx.unsharded` a module is an ordinary one; afterwards the slices hold what rank 0 made of it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests import models
from tests.slow import slow_if
from tests.workers import Workers
from zerofx import MixedPrecision, ShardedParameter, ShardedTensor

EACH_GROUP = zerofx.Grouping(min_bytes=0)


def full(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor() if isinstance(p, ShardedTensor) else p.detach()


def same(module: nn.Module, plain: nn.Module) -> None:
    for name, p in plain.named_parameters():
        assert torch.equal(full(module.get_parameter(name)), p), name


def edit(module: nn.Module) -> None:
    """One row, through ``.data``, and the whole of a parameter, in the ways that users have."""
    with torch.no_grad():
        module.embedding.weight[3] = 5.0  # type: ignore[union-attr,index]
        module.body.bias.copy_(torch.arange(models.HIDDEN))  # type: ignore[union-attr,operator,arg-type]
    module.body.weight.data.mul_(2)  # type: ignore[union-attr,operator]


def check_edits(stage: int, only_rank_0: bool) -> None:
    module, plain = models.build("tied"), models.build("tied")
    objects = dict(module.named_parameters())
    zerofx.shard(module, stage=stage, groups=EACH_GROUP)
    with zerofx.unsharded(module) as entered:
        assert entered is module and list(module.state_dict()) == list(plain.state_dict())
        assert module.head.weight is module.embedding.weight  # tied under both names
        for name, p in module.named_parameters():
            assert p.requires_grad and not isinstance(p, ShardedTensor) and torch.equal(p, plain.get_parameter(name))
        if not only_rank_0 or dist.get_rank() == 0:
            edit(module)
    edit(plain)
    same(module, plain)
    assert dict(module.named_parameters()) == objects  # the same objects as ever
    with zerofx.unsharded(module, writeback=False):
        edit(module)
    same(module, plain)
    with zerofx.unsharded(module.body):  # a submodule: the rest stays as it is
        edit_body = module.body.weight
        assert not isinstance(edit_body, ShardedTensor)
        assert isinstance(module.embedding.weight, ShardedTensor) == (stage > 0)
        with torch.no_grad():
            edit_body[0] = 7
            plain.body.weight[0] = 7  # type: ignore[union-attr,index]
    same(module, plain)
    with zerofx.unsharded([module.body.bias, module.head.weight]) as (bias, weight):
        with torch.no_grad():
            bias[0] = weight[0, 0] = 9
            plain.body.bias[0] = plain.head.weight[0, 0] = 9  # type: ignore[union-attr,index]
    with zerofx.unsharded(module.body.bias) as bias, torch.no_grad():
        bias[1] = plain.body.bias[1] = 11  # type: ignore[union-attr,index]
    same(module, plain)
    batch = models.make_batch("tied", 3)
    torch.testing.assert_close(models.loss_of(module, batch), models.loss_of(plain, batch))  # replicas know


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_whole_inside_and_edits_of_rank_0_are_kept(workers3: Workers, stage: int) -> None:
    workers3.run(check_edits, stage, True)
    workers3.run(check_edits, stage, False)


def refused(module: nn.Module, action: Callable[[], None]) -> str:
    before = {name: full(p).clone() for name, p in module.named_parameters()}
    objects = dict(module.named_parameters())
    with pytest.raises(RuntimeError) as caught, zerofx.unsharded(module):
        action()
    assert dict(module.named_parameters()) == objects
    for name, p in module.named_parameters():
        assert torch.equal(full(p), before[name]), name
    return str(caught.value)


def check_refusals() -> None:
    rank = dist.get_rank()

    def on_rank_1() -> None:
        if rank == 1:
            nn.init.ones_(module.body.bias)

    def replace() -> None:
        if rank == 1:
            module.body.bias = nn.Parameter(torch.zeros(models.HIDDEN))

    def fail() -> None:
        nn.init.ones_(module.body.bias)
        raise RuntimeError("of the user's own")

    def backward() -> None:
        models.loss_of(module, models.make_batch("tied", 2)).backward()

    module = zerofx.shard(models.build("tied"), groups=EACH_GROUP)
    assert "rank 1: 'body.bias' was edited there and not on rank 0" in refused(module, on_rank_1)
    assert "rank 1: 'body.bias' was replaced by another parameter: edit it in place" in refused(module, replace)
    assert refused(module, fail) == "of the user's own"
    assert "this gradient would be lost" in refused(module, backward)
    assert all(p.grad is None for p in module.parameters())

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for p in module.parameters():
        p.grad = torch.ones(p.shape)
    with pytest.raises(RuntimeError, match=r"was written where it is sharded .by an optimizer's step"):
        with zerofx.unsharded(module):
            optimizer.step()
    with zerofx.unsharded(module, writeback=False):  # nothing to lose
        optimizer.step()
    torch.testing.assert_close(full(module.body.bias), models.build("tied").body.bias - 0.2)  # type: ignore

    plain = nn.Linear(2, 2)
    for nothing in (plain, plain.weight, [plain.weight], []):
        with pytest.raises(ValueError, match="sharded"), zerofx.unsharded(nothing):  # type: ignore[arg-type]
            pass


def test_what_cannot_be_written_back_is_refused_on_every_rank_and_changes_nothing(workers2: Workers) -> None:
    workers2.run(check_refusals)


def check_runs(stage: int, precision: MixedPrecision | None) -> int:
    """Ranks run it on batches, and as often as they like."""
    module, plain, rank = models.build("gpt"), models.build("gpt"), dist.get_rank()
    zerofx.compile(module, stage=stage, executor="eager", mixed_precision=precision)
    batches = [models.make_batch("gpt", 2 + n, seed=n) for n in range(1 + 2 * rank)]
    loss = models.loss_of(module, batches[0])
    with zerofx.unsharded(module, writeback=False), torch.no_grad():
        for batch in batches:
            torch.testing.assert_close(models.loss_of(module, batch), models.loss_of(plain, batch))
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        torch.save(module, file := io.BytesIO())
        copies.append(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
        for made in copies:
            assert {type(p) for p in made.parameters()} == {nn.Parameter} and made.head.weight.requires_grad
            torch.testing.assert_close(models.loss_of(made, batches[0]), models.loss_of(plain, batches[0]))
        with zerofx.unsharded(module):  # within another: it is whole already
            module.head.weight.zero_()
        assert not module.head.weight.any()
    loss.backward()  # of a forward before: as if nothing had been
    models.loss_of(plain, batches[0]).backward()
    tolerance = {} if precision is None else {"rtol": 0.1, "atol": 0.01}
    average = plain.head.weight.grad.clone()  # type: ignore[union-attr]
    dist.all_reduce(average)
    torch.testing.assert_close(full(module.head.weight.grad), average / dist.get_world_size(), **tolerance)
    torch.testing.assert_close(models.loss_of(module, batches[0]), models.loss_of(plain, batches[0]), **tolerance)
    return len(zerofx.graphs(module))


@slow_if(lambda stage: stage == 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_module_runs_and_is_copied_inside_and_its_compiled_code_is_untouched(workers2: Workers, stage: int) -> None:
    assert workers2.run(check_runs, stage, None) == [1, 1]


def test_with_mixed_precision_it_runs_on_the_masters_inside(workers2: Workers) -> None:
    assert workers2.run(check_runs, 3, MixedPrecision(torch.bfloat16, output_dtype=torch.float32)) == [1, 1]


def check_partly(executor: str) -> None:
    """Compiled code of the whole model while one of its blocks is whole."""
    module, plain = models.build("gpt"), models.build("gpt")
    zerofx.compile(module, executor=executor)
    batch = models.make_batch("gpt", 2)
    expected = models.loss_of(plain, batch)
    torch.testing.assert_close(models.loss_of(module, batch), expected)
    with zerofx.unsharded(module.blocks[0]):
        torch.testing.assert_close(models.loss_of(module, batch), expected)
        loss = models.loss_of(module, batch)
        with pytest.raises(RuntimeError, match=r"blocks\.0\..*would be lost"):
            loss.backward()
    assert isinstance(module.blocks[0].up.weight, ShardedParameter)
    torch.testing.assert_close(models.loss_of(module, batch), expected)


def test_a_model_of_which_a_part_is_whole_runs_compiled(workers2: Workers) -> None:
    workers2.run(check_partly, "eager")


class Floats(nn.Module):
    """One weight under two names of one module, another frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4), requires_grad=False)
        self.again = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.bias) @ self.again


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_inside_nothing_is_cast_or_compiled_and_what_was_frozen_is(fake_world: Callable[..., None], stage: int) -> None:
    fake_world(1)
    torch._dynamo.reset()
    precision = MixedPrecision(torch.bfloat16, output_dtype=torch.bfloat16)
    module = zerofx.compile(Floats(), stage=stage, executor="eager", mixed_precision=precision)
    x = torch.randn(3, 4)
    before = torch._dynamo.utils.counters["frames"]["total"]
    with zerofx.unsharded(module, writeback=False):
        assert module.again is module.weight and not isinstance(module.weight, ShardedTensor)
        assert module.weight.requires_grad and not module.bias.requires_grad
        out = module(x)
        torch.testing.assert_close(out, torch.tanh(x @ module.weight + module.bias) @ module.weight)
    assert torch._dynamo.utils.counters["frames"]["total"] == before
    assert module.again is module.weight and module(x).dtype == torch.bfloat16


def test_an_edit_between_forward_and_backward_is_noticed(fake_world: Callable[..., None]) -> None:
    fake_world(1)
    torch._dynamo.reset()
    module = zerofx.compile(Floats(), stage=3, executor="eager")
    out = module(torch.randn(3, 4)).sum()
    with zerofx.unsharded(module):
        module.weight.data.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


class PreTrainedModel(nn.Linear):
    """What is known of transformers' class: its name, and that it generates."""

    def generate(self, synced_gpus: bool | None = None) -> bool | None:
        return synced_gpus


def test_inside_ranks_generate_by_themselves(fake_world: Callable[..., None]) -> None:
    fake_world(2)
    module = zerofx.shard(nn.Sequential(PreTrainedModel(4, 4)), stage=3)
    assert module[0].generate() is True
    with zerofx.unsharded(module, writeback=False):
        assert module[0].generate() is None
    assert module[0].generate() is True and module[0].generate(synced_gpus=False) is False
