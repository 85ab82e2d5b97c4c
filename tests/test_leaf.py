"""Leaf modules: ranks that choose other layers by data neither hang nor compute anything else than one process."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.counting import count_collectives
from tests.slow import quick_if, slow
from tests.test_parameters import full, mine, same, twins
from tests.workers import Workers
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.base import make_batch

NONE = -1


ROUTES = [  # the first half is rank 0's. Nobody uses expert 3
    [0, 0, 1, NONE, 0, 1, NONE, NONE, NONE, NONE, NONE, NONE],  # rank 1 uses none
    [NONE, NONE, NONE, NONE, NONE, NONE, 2, 0, 2, 2, 0, NONE],  # rank 0 uses none
    [0, 1, 2, 0, 1, 2, 1, 1, 1, 1, 1, 1],
]


class Experts(nn.Module):
    """Rows go to experts as ``route`` says, or nowhere; an expert that gets no row is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(10, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 10)) for _ in range(4))

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (route == i).nonzero().squeeze(1)
            if rows.numel() == 0:
                continue
            score = self.router(x[rows]).softmax(-1)[:, i, None]
            out = out.index_add(0, rows, expert(x[rows]) * score)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.moe = nn.Linear(10, 10), Experts()

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        return x + self.moe(torch.tanh(self.mix(x)), route)


class Net(nn.Module):
    """Blocks, and experts by themselves: a rank that uses none of these depends on nothing in front of them."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.moe, self.last = Experts(), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, route)
        return self.last(self.moe(x, route)).square().mean()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(12, 10, generator=torch.Generator().manual_seed(step)), torch.tensor(ROUTES[step % 3])


def check_training(stage: int, **options: Any) -> None:
    module, plain = twins(Net, stage=stage, leaf_modules=[Experts], **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, plain)]
    for step in range(4):
        x, route = batch(step)
        loss, expected = module(mine(x), mine(route)), plain(x, route)
        loss.backward()
        expected.backward()
        dist.all_reduce(mean := loss.detach().clone())
        torch.testing.assert_close(mean / dist.get_world_size(), expected.detach())
        same(module, plain)  # a gradient that one process has not, nobody has
        assert module.moe.experts[3][0].weight.grad is None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same(module, plain)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x, route), plain.eval()(x, route))


@quick_if(lambda stage: stage == 0)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_use_other_experts_or_none_train_as_one_process(workers2: Workers, stage: int) -> None:
    workers2.run(check_training, stage, timeout=60)


def check_habits(stage: int, **options: Any) -> None:
    """Accumulation, several calls before one backward, frozen experts, no gradients for weights."""
    module, plain = twins(Net, stage=stage, leaf_modules=["*moe"], **options)
    (x, route), (y, other) = batch(0), batch(1)
    for m, a, b in ((plain, (x, route), (y, other)), (module, (mine(x), mine(route)), (mine(y), mine(other)))):
        with zerofx.no_sync(m) if m is module else torch.enable_grad():
            m(*a).backward()
        (m(*a) + m(*b) * 2).backward()
    same(module, plain)
    for m in (module, plain):
        m.zero_grad()
        m.moe.experts.requires_grad_(False)
        m.blocks[0].moe.requires_grad_(False)
    for m, a in ((module, (mine(x), mine(route))), (plain, (x, route))):
        m(*a).backward()
    same(module, plain)
    with zerofx.no_sync(module):  # and then a backward in which the leaf modules have no part
        module(mine(x), mine(route)).backward()
    module.last(mine(x)).mean().backward()
    plain(x, route).backward()
    plain.last(x).mean().backward()
    same(module, plain)
    with zerofx.no_sync(module):  # and the other way around
        module.last(mine(x)).mean().backward()
    module.moe(mine(x), mine(route)).square().mean().backward()
    plain.last(x).mean().backward()
    plain.moe(x, route).square().mean().backward()
    same(module, plain)


@pytest.mark.parametrize("stage", [slow(0), slow(2), 3])
def test_leaf_modules_accumulate_and_freeze_as_one_process(workers2: Workers, stage: int) -> None:
    workers2.run(check_habits, stage, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_so_they_do_with_regions_between_them(workers2: Workers, stage: int) -> None:
    workers2.run(check_habits, stage, executor="regional", timeout=240)


class Remembered(Net):
    """Checkpoints around blocks, or around each expert inside of the leaf modules."""

    inside = False
    reentrant = False

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, route) if self.inside else checkpoint(block, x, route, use_reentrant=self.reentrant)
        return self.last(self.moe(x, route)).square().mean()


class Checkpointed(nn.Sequential):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def check_checkpoint(stage: int, reentrant: bool, inside: bool) -> None:
    def build() -> nn.Module:
        net = Remembered()
        net.inside, net.reentrant = inside, reentrant
        if inside:
            for m in [m for m in net.modules() if isinstance(m, nn.Sequential)]:
                m.__class__ = type("Checkpointed", (Checkpointed,), {"reentrant": reentrant})
        return net

    module, plain = twins(build, stage=stage, leaf_modules=[Experts])
    for step in range(2):
        x, route = batch(step)
        module(mine(x), mine(route)).backward()
        plain(x, route).backward()
        same(module, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, slow(True)])
@pytest.mark.parametrize("stage", [slow(0), 3])
def test_leaf_modules_in_checkpoints_and_with_checkpoints_inside(
    workers2: Workers, stage: int, reentrant: bool, inside: bool
) -> None:
    workers2.run(check_checkpoint, stage, reentrant, inside, timeout=60)


def collectives(log: Any) -> dict[str, int]:
    return {name: n for name, n in log.calls.items() if not name.endswith("_recv")}


def check_costs(keep: bool) -> None:
    """A gather for each leaf module and direction, a reduction for each; nothing whole in between."""
    budget = {"memory_budget": math.inf} if keep else {}
    module, _ = twins(Net, stage=3, leaf_modules=[Experts], **budget)
    x, route = batch(2)
    moe, (x, route) = module.moe, (mine(x).requires_grad_(), mine(route))
    assert {p._group.layout.name for p in moe.parameters()} == {"moe"}
    kept: list[Any] = []

    def watch(weight: torch.Tensor, *_: Any) -> None:
        kept.append(weakref.ref(weight.untyped_storage()))

    moe.experts[1][0].register_forward_hook(lambda m, *_: watch(m.weight))
    with count_collectives() as log:
        out = moe(x, route)
    assert collectives(log) == {"all_gather_send": 1}
    assert isinstance(moe.router.weight, zerofx.ShardedParameter)
    gc.collect()
    assert (kept[0]() is not None) == keep
    with count_collectives() as log:
        out.sum().backward()
    assert collectives(log) == {"all_to_all_send": 1} | ({} if keep else {"all_gather_send": 1})
    gc.collect()
    assert kept[0]() is None
    with torch.no_grad(), count_collectives() as log:
        assert not moe(x, route).requires_grad
    assert collectives(log) == {"all_gather_send": 1}
    with count_collectives() as log:
        checkpoint(moe, x, route, use_reentrant=False).sum().backward()  # type: ignore[union-attr]
    assert collectives(log) == {"all_gather_send": 2, "all_to_all_send": 1}  # the second is the checkpoint's
    moe.requires_grad_(False)
    with count_collectives() as log:
        moe(x, route).sum().backward()
    assert collectives(log) == {"all_gather_send": 1 if keep else 2}


@pytest.mark.parametrize("keep", [False, True])
def test_a_leaf_module_takes_one_gather_each_way_and_one_reduction(workers2: Workers, keep: bool) -> None:
    workers2.run(check_costs, keep, timeout=60)


def check_low_precision(stage: int) -> None:
    """Weights compute in bfloat16, as fully_shard's do; gradients come in float32."""
    precision = zerofx.MixedPrecision(torch.bfloat16, torch.float32)
    module, plain = twins(Experts, stage=stage, leaf_modules=[Experts], mixed_precision=precision)
    seen = []
    module.experts[1].register_forward_hook(lambda m, args, out: seen.append((m[0].weight.dtype, out.dtype)))
    x, route = batch(2)
    module(mine(x), mine(route)).square().mean().backward()
    low = plain.to(torch.bfloat16)
    torch.stack(
        [low(part.bfloat16(), r).square().mean() for part, r in zip(x.chunk(2), route.chunk(2))]
    ).mean().backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    for p, q in zip(module.parameters(), low.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(full(p.grad), q.grad.float(), rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("stage", [0, slow(2), slow(3)])
def test_leaf_modules_compute_in_low_precision(workers2: Workers, stage: int) -> None:
    workers2.run(check_low_precision, stage, timeout=60)


@dataclasses.dataclass
class Routed:
    hidden: torch.Tensor
    parts: dict[str, Any]


class Odd(nn.Module):
    """Nested outputs, a keyword, a tied weight that is outside too, weights that a module keeps in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rnn = nn.Linear(10, 10), nn.GRU(10, 10)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, *, scale: float, use: bool) -> Routed:
        self.count += 1  # type: ignore[operator]
        hidden = self.linear(self.rnn(x)[0]) * scale if use else torch.zeros_like(x)
        return Routed(hidden, {"same": hidden, "rows": x.shape[0], "which": torch.arange(3), "none": None})


class OddNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd = nn.Linear(10, 10), Odd()
        self.first.weight = self.odd.linear.weight

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        out = self.odd(torch.tanh(self.first(x)), scale=2.0, use=use)
        assert (
            out.parts["rows"] == x.shape[0] and out.parts["which"].tolist() == [0, 1, 2] and out.parts["none"] is None
        )
        return (out.hidden.add_(1).square() + out.parts["same"] * x).mean()  # written in place


def check_odd(stage: int) -> None:
    module, plain = twins(OddNet, stage=stage, leaf_modules=["odd"])
    x = torch.randn(2, 6, 10)
    rank = dist.get_rank()
    for uses in ([True, True], [True, False], [False, True]):
        module(x[rank], uses[rank]).backward()
        torch.stack([plain(x[r], uses[r]) for r in range(2)]).mean().backward()
        same(module, plain)
    assert module.odd.count == 3
    with zerofx.unsharded(module, writeback=False):
        with count_collectives() as log:
            torch.testing.assert_close(module(x[0], True), plain(x[0], True))
        twin, thawed = copy.deepcopy(module), pickle.loads(pickle.dumps(module, protocol=2))
    assert not log.calls
    for m in (twin, thawed):
        assert type(m.odd) is Odd and all(type(p) is nn.Parameter for p in m.parameters())
        torch.testing.assert_close(m(x[0], True), plain(x[0], True))
    alike = copy.deepcopy(module)  # outside it is sharded, and its leaf is one
    assert type(alike.odd) is not Odd and isinstance(alike.odd, Odd)
    torch.testing.assert_close(alike(x[rank], True), plain(x[rank], True))
    alike(x[rank], True).backward()
    assert all(p.grad is not None for p in alike.parameters() if p.requires_grad)
    weight = torch.randn(10, 10).requires_grad_()
    outs = [torch.func.functional_call(m, {"odd.linear.bias": weight[0]}, (x[rank], True)) for m in (module, plain)]
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("stage", [slow(0), slow(2), 3])
def test_leaf_modules_return_anything_tie_weights_and_are_copied(workers2: Workers, stage: int) -> None:
    workers2.run(check_odd, stage, timeout=60)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(10, 10), ""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        if self.how == "weight":
            with torch.no_grad():
                self.linear.weight.mul_(2)
        if self.how == "activation":
            y = y.exp()
            z = y * 2
            y.detach().zero_()
            return z + y
        return Opaque(y) if self.how == "opaque" else y


class Opaque:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


def refused(error: type[Exception], text: str, run: Callable[[], Any]) -> None:
    with pytest.raises(error, match=text):
        run()


def check_refusals() -> None:
    module = zerofx.shard(Writes(), stage=3, leaf_modules=[Writes])
    x = torch.randn(3, 10)
    out = module(x).square().sum()
    refused(RuntimeError, "double backward.*leaf module 'Writes'", lambda: out.backward(create_graph=True))
    out = module(x).square().sum()
    with torch.no_grad():
        module.linear.bias.add_(1)
    refused(RuntimeError, "a parameter of the leaf module 'Writes', between forward", out.backward)
    module.how = "activation"
    refused(RuntimeError, "a tensor that is needed.*leaf module 'Writes'", module(x).sum().backward)
    module.how = "weight"
    refused(RuntimeError, "leaf module 'Writes' writes to one of its parameters", lambda: module(x))
    module.how = "opaque"
    refused(TypeError, "leaf module 'Writes' returns a Opaque", lambda: module(x))
    module.how = ""
    before = full(module.linear.weight).clone()
    module(x).sum().backward()  # and it works as before
    assert isinstance(module.linear.weight, zerofx.ShardedParameter)
    torch.testing.assert_close(full(module.linear.weight), before)


def test_what_a_leaf_module_cannot_do_is_refused_by_name(workers2: Workers) -> None:
    workers2.run(check_refusals, timeout=60)


def check_options() -> None:
    own = Net()
    own.moe.forward = own.moe.forward  # type: ignore[method-assign]
    for net, rules, error, text in [
        (Net(), ["no.such"], ValueError, "'no.such' matches no module of this Net"),
        (Net(), [nn.Conv2d], ValueError, "Conv2d'> matches no module"),
        (Net(), "moe", TypeError, "expected a list"),
        (Net(), [], TypeError, "expected a list"),
        (Net(), [3], TypeError, "expected a list"),
        (own, [Experts], ValueError, "'moe' has a forward of its own"),
    ]:
        with count_collectives() as log:
            refused(error, text, lambda net=net, rules=rules: zerofx.compile(net, leaf_modules=rules))
        assert all(type(p) is nn.Parameter for p in net.parameters())
        assert set(log.calls) <= {"all_gather"}, log  # what every rank has to say
    leaves = {"leaf_modules": [Experts]}
    refused(ValueError, "fullgraph=True with leaf_modules", lambda: zerofx.compile(Net(), fullgraph=True, **leaves))
    late = torch.compile(Net(), backend="zerofx", options=leaves)
    refused(Exception, "leaf_modules in torch.compile", lambda: late(*batch(0)))
    refused(ValueError, "leaf_modules in a dry run", lambda: zerofx.dry_run(Net(), world_size=2, **leaves))
    nested = zerofx.shard(Net(), leaf_modules=["blocks.*", Experts], groups=zerofx.Grouping(max_bytes=400))
    assert [type(m).forward is not cls.forward for m, cls in ((nested.blocks[0], Block), (nested.moe, Experts))] == [
        True
    ] * 2
    assert type(nested.blocks[0].moe) is Experts  # within a leaf module
    assert len({p._group for p in nested.blocks[0].parameters()}) == 1


def test_leaf_modules_that_are_none_are_refused(workers2: Workers) -> None:
    workers2.run(check_options, timeout=60)


def check_frames() -> None:
    """Code around leaf modules is compiled in each of ten layers, though Dynamo keeps eight versions of one code."""
    module, plain = twins(lambda: Net(10), stage=3, leaf_modules=["blocks.*.moe", "moe"])
    x, route = batch(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(mine(x), mine(route)).backward()
    plain(x, route).backward()
    same(module, plain)
    on_demand = [str(w.message) for w in caught if "gathered here" in str(w.message)]
    assert not any("blocks" in text for text in on_demand), on_demand
    assert len(zerofx.graphs(module)) == 10


@pytest.mark.slow
def test_the_layers_around_leaf_modules_are_all_compiled(workers2: Workers) -> None:
    workers2.run(check_frames, timeout=60)


def check_warning() -> list[str]:
    module, _ = twins(Net, stage=3)
    x, route = batch(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(x, route)  # the same on both ranks
    told = [w for w in caught if "leaf_modules" in str(w.message)]
    lines, first = inspect.getsourcelines(Experts.forward)
    assert all(w.filename == __file__ and "route == i" in lines[w.lineno - first] for w in told)
    return [str(w.message) for w in told]


def test_without_the_option_the_line_that_looks_at_data_is_named_at_the_first_call(workers2: Workers) -> None:
    told, others = workers2.run(check_warning, timeout=60)
    assert told and all("leaf_modules=[Experts]" in text for text in told)
    assert not others, "one rank speaks for all"


def check_hugging_face(name: str, stage: int) -> None:
    """transformers' blocks in their eager implementation, which loops over the experts that were hit."""
    plain, model = ARCHITECTURES[name].build(0), ARCHITECTURES[name].build(0)
    for m in (plain, model):
        m.set_experts_implementation("eager")  # type: ignore[operator]
        m.config.output_router_logits = True  # and its loss: a second output
    zerofx.compile(model, stage=stage, executor="eager", leaf_modules=["model.layers.*.mlp"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(2):
        batches = [make_batch("text", 2, seed=10 * step + rank) for rank in range(2)]
        loss = model(**batches[dist.get_rank()]).loss
        loss.backward()
        expected = torch.stack([plain(**b).loss for b in batches]).mean()
        expected.backward()
        dist.all_reduce(mean := loss.detach().clone())
        torch.testing.assert_close(mean / 2, expected.detach())
        same(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if stage == 3:
        prompt = batches[dist.get_rank()]["input_ids"][:, :4]
        told = [m.generate(prompt, max_new_tokens=2, do_sample=False) for m in (model.eval(), plain.eval())]
        assert torch.equal(*told)


@pytest.mark.parametrize(
    ("name", "stage"),
    [slow("mixtral", 3), slow("mixtral", 0), slow("qwen2_moe", 2)],
)
def test_blocks_of_transformers_are_leaf_modules(workers2: Workers, name: str, stage: int) -> None:
    workers2.run(check_hugging_face, name, stage, timeout=100)
