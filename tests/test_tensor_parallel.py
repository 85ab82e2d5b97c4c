"""Parameters that `parallelize_module` made DTensors on a "tp" dimension train on "dp", as with FSDP2."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import zerofx
from tests.pairwise import EXECUTORS, STAGES
from tests.test_foreign_dimensions import Copy, Sum
from zerofx.compiler.apart import check_version

pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="stages 1 to 3 are refused: check_version")

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH, STEPS = 24, 8, 2, 12, 6, 3


class MLP(nn.Module):
    """A head that has no plan stays plain."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(tokens, WIDTH).float()
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """One block; between layers activations are divided along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return F.cross_entropy(self.head(self.norms[2](x)).flatten(0, 1).float(), tokens.flatten())

    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norms.0": SequenceParallel(),
        "norms.1": SequenceParallel(),
        "norms.2": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


MODELS: dict[str, type[Any]] = {"mlp": MLP, "transformer": Transformer}


def mesh_2d() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def build(kind: str, tp: Any = None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = MODELS[kind]()
    return model if tp is None else parallelize_module(model, tp, dict(model.plan))


def compiled(kind: str, mesh: Any, stage: int = 3, executor: str = "eager", **options: Any) -> Any:
    """The first dp rank's weights are taken."""
    model = build(kind, mesh["tp"], seed=mesh["dp"].get_local_rank())
    options.setdefault("groups", zerofx.Grouping(min_bytes=0))
    return zerofx.compile(model, stage=stage, executor=executor, mesh=mesh["dp"], **options)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, (DTensor, zerofx.ShardedTensor)) else x.detach().clone()


def batch(step: int) -> torch.Tensor:
    return torch.randint(WIDTH, (2, 2, LENGTH), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: Any, dp: Any = None, steps: int = STEPS, first: int = 0) -> list[float]:
    """The average losses of the dp ranks."""
    losses = []
    for step in range(first, first + steps):
        tokens = batch(step).flatten(0, 1) if dp is None else batch(step)[dp.get_local_rank()]
        loss = model(tokens)
        loss.backward()
        loss = whole(loss)
        if dp is not None:
            dist.all_reduce(loss, group=dp.get_group())
        losses.append(loss.item() / (1 if dp is None else 2))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_beside(kind: str, stage: int, executor: str) -> None:
    mesh = mesh_2d()
    ours = compiled(kind, mesh, stage, executor)
    theirs = fully_shard(build(kind, mesh["tp"]), mesh=mesh["dp"])
    alone = build(kind)
    found = train(ours, adamw(ours), mesh["dp"])
    assert found == pytest.approx(train(theirs, adamw(theirs), mesh["dp"]), rel=1e-5)
    assert found == pytest.approx(train(alone, adamw(alone)), rel=1e-5)
    ours_whole = zerofx.full_state_dict(ours, rank0_only=False)
    for name, p in alone.named_parameters():
        assert ours_whole[name].shape == p.shape
        torch.testing.assert_close(ours_whole[name], p.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours_whole[name], whole(theirs.get_parameter(name)), rtol=1e-5, atol=1e-5)
    assert len(zerofx.graphs(ours)) == 1


QUICK = [("transformer", 3, "eager"), ("mlp", 2, "eager"), ("transformer", 1, "eager"), ("mlp", 0, "eager")]
QUICK += [("mlp", 3, "inductor")]


def rows(quick: list[Any], *axes: Any) -> list[Any]:
    """All of ``axes``; those that are not ``quick`` are slow."""
    product = list(itertools.product(*axes))
    return [pytest.param(*row, marks=[] if row in quick else [pytest.mark.slow]) for row in product]


@pytest.mark.parametrize(("kind", "stage", "executor"), rows(QUICK, MODELS, STAGES, EXECUTORS))
def test_tensor_parallel_layers_train_as_with_fsdp2_and_in_one_process(
    make_workers: Any, kind: str, stage: int, executor: str
) -> None:
    make_workers(4).run(train_beside, kind, stage, executor, timeout=300)


# ---- norms ----------------------------------------------------------------------------------------------------------


def clip_beside(stage: int) -> None:
    """Each norm counts a replicated weight once, and a part once for all of its copies; clipping follows from that."""
    mesh = mesh_2d()
    for kind in ("mlp", "transformer"):
        ours, alone = compiled(kind, mesh, stage), build(kind)
        theirs = fully_shard(build(kind, mesh["tp"]), mesh=mesh["dp"])
        optimizers = {m: adamw(m) for m in (ours, alone, theirs)}
        for step in range(2):
            mine = batch(step)[mesh["dp"].get_local_rank()]
            norms = {}
            for m, tokens in ((ours, mine), (theirs, mine), (alone, batch(step).flatten(0, 1))):
                m(tokens).backward()
                if m is not theirs or kind == "transformer":  # FSDP2 does not clip DTensors of two meshes together
                    for order in (2.0, float("inf"), 1.0):
                        norm = torch.nn.utils.get_total_norm([p.grad for p in m.parameters()], order)
                        norms[m, order] = whole(norm).item()
                    norms[m, "clip"] = whole(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)).item()
                    norms[m, "after"] = whole(torch.nn.utils.get_total_norm([p.grad for p in m.parameters()])).item()
                    optimizers[m].step()
                optimizers[m].zero_grad()
            for (m, what), value in norms.items():
                assert value == pytest.approx(norms[alone, what], rel=1e-5), (kind, what, m is ours)
        first = ours.get_parameter("up.weight")
        if stage:
            with torch.no_grad():
                assert first.sum().item() == pytest.approx(alone.up.weight.sum().item(), rel=1e-4, abs=1e-5)
                assert first.max().item() == pytest.approx(alone.up.weight.max().item(), rel=1e-5)
                assert first.mean().item() == pytest.approx(alone.up.weight.mean().item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "stage", [3, 0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_norms_are_of_the_whole_model_and_clip_it_as_fsdp2_does(make_workers: Any, stage: int) -> None:
    make_workers(4).run(clip_beside, stage)


def clip_in_the_step(stages: list[int]) -> None:
    mesh = mesh_2d()
    alone = build("transformer")
    reference = zerofx.AdamW(alone.parameters(), lr=1e-2, max_grad_norm=0.1)
    wanted = train(alone, reference)
    for stage in stages:
        ours = compiled("transformer", mesh, stage)
        optimizer = zerofx.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=0.1)
        assert train(ours, optimizer, mesh["dp"]) == pytest.approx(wanted, rel=1e-5), stage
        assert optimizer.grad_norm.item() == pytest.approx(reference.grad_norm.item(), rel=1e-5), stage


@pytest.mark.parametrize("stages", [[3], pytest.param([0, 1, 2], marks=pytest.mark.slow)])
def test_zerofx_adamw_clips_by_the_norm_of_the_whole_model(make_workers: Any, stages: list[int]) -> None:
    make_workers(4).run(clip_in_the_step, stages)


# ---- whole weights and checkpoints ----------------------------------------------------------------------------------


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def check_whole(model: Any, wanted: dict[str, torch.Tensor]) -> None:
    found = zerofx.full_state_dict(model, rank0_only=False)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def read_and_write(stage: int) -> None:
    mesh = mesh_2d()
    alone = build("transformer")
    ours = compiled("transformer", mesh, stage)
    state = ours.state_dict()
    for name, p in ours.named_parameters():
        value = alone.get_parameter(name).detach()
        assert state[name].shape == value.shape
        torch.testing.assert_close(whole(state[name]), value)
        if stage:
            assert p.shape == value.shape and p.size(0) == len(value) and p.numel() == value.numel()
            assert p.stride() == value.stride() and len(p) == len(value)
            torch.testing.assert_close(p.full_tensor(), value)
    changed = {name: value + 1 for name, value in weights_of(alone).items()}
    ours.load_state_dict(changed)
    check_whole(ours, changed)
    with zerofx.unsharded(ours):
        assert isinstance(ours.up.weight, DTensor)
        torch.testing.assert_close(ours.up.weight.full_tensor(), changed["up.weight"])
        with torch.no_grad():
            ours.up.weight.mul_(2)
            loss = ours(batch(0)[0])
    changed["up.weight"] *= 2
    check_whole(ours, changed)
    alone.load_state_dict(changed)
    assert whole(loss).item() == pytest.approx(alone(batch(0)[0]).item(), rel=1e-5)
    with pytest.raises(RuntimeError, match=r"'up.weight' was edited"), zerofx.unsharded(ours), torch.no_grad():
        if mesh["tp"].get_local_rank() == 0:
            ours.up.weight.mul_(2)
    check_whole(ours, changed)


@pytest.mark.parametrize("stage", [3, 0, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_have_the_shape_of_the_whole_and_are_read_and_written_whole(make_workers: Any, stage: int) -> None:
    make_workers(4).run(read_and_write, stage)


def save_and_go_on(stages: list[int], folder: str, others: bool) -> None:
    """What is saved goes on on the same mesh, and in one process; ``others``: with FSDP2, and through its functions."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = mesh_2d()
    alone = build("transformer")
    reference = adamw(alone)
    train(alone, reference, steps=2)
    wanted = train(alone, reference, first=2)

    def check(model: Any, optimizer: Any, dp: Any = None) -> None:
        assert train(model, optimizer, dp, first=2) == pytest.approx(wanted, rel=1e-5)

    def load(path: str, model: Any) -> Any:
        """PyTorch's way."""
        optimizer = adamw(model)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        return optimizer

    kinds = ["", "dcp"] if others else [""]
    for stage in stages:
        ours = compiled("transformer", mesh, stage)
        optimizer = adamw(ours)
        train(ours, optimizer, mesh["dp"], steps=2)
        zerofx.save(f"{folder}/{stage}", ours, optimizer)
        if others:
            model, optim = get_state_dict(ours, optimizer)
            dcp.save({"model": model, "optim": optim}, checkpoint_id=f"{folder}/dcp{stage}")
        check(ours, optimizer, mesh["dp"])
    for path in [f"{folder}/{kind}{stage}" for stage in stages for kind in kinds]:
        for stage in stages:
            again = compiled("transformer", mesh, stage)
            optimizer = adamw(again)
            zerofx.load(path, again, optimizer)
            check(again, optimizer, mesh["dp"])
        plain = build("transformer", seed=5)
        optimizer = adamw(plain)
        zerofx.load(path, plain, optimizer)
        check(plain, optimizer)
        if others:
            theirs = fully_shard(build("transformer", mesh["tp"], seed=5), mesh=mesh["dp"])
            check(theirs, load(path, theirs), mesh["dp"])
    for stage in stages if others else ():
        again = compiled("transformer", mesh, stage)
        check(again, load(f"{folder}/dcp{stage}", again), mesh["dp"])


CHECKPOINTS = [([3], False), *(pytest.param(stages, True, marks=pytest.mark.slow) for stages in ([0], [2, 1], [3]))]


@pytest.mark.parametrize(("stages", "others"), CHECKPOINTS)
def test_a_checkpoint_is_of_the_whole_and_goes_on_anywhere(
    make_workers: Any, stages: list[int], others: bool, tmp_path: Any
) -> None:
    make_workers(4).run(save_and_go_on, stages, str(tmp_path), others, timeout=300)


def export(folder: str) -> None:
    mesh = mesh_2d()
    ours = compiled("transformer", mesh)
    zerofx.export_safetensors(ours, folder)
    again = compiled("transformer", mesh)
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    zerofx.load(folder, again)
    wanted = weights_of(build("transformer"))
    check_whole(again, wanted)
    plain = build("transformer", seed=5)
    zerofx.load(folder, plain)
    assert all(torch.equal(p, wanted[name]) for name, p in plain.named_parameters())


def test_exported_weights_are_whole(make_workers: Any, tmp_path: Any) -> None:
    make_workers(4).run(export, str(tmp_path))


# ---- code outside of graphs, and options ----------------------------------------------------------------------------


class Broken(MLP):
    """A graph break between layers, and a layer that Dynamo does not trace."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(tokens, WIDTH).float()
        x = self.norm(x)
        torch._dynamo.graph_break()
        x = x + self.untraced(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    @torch.compiler.disable
    def untraced(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).clone()


class Pending(Broken):
    """What the untraced layer returns is still on its way."""

    @torch.compiler.disable
    def untraced(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Halves(MLP):
    """Layers of their own that gather whole: `leaf_modules`."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"up": self.up, "down": self.down})
        del self.up, self.down
        self.leaf = Leaf(self.mlp)
        del self.mlp

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(tokens, WIDTH).float()
        return F.cross_entropy(self.head(x + self.leaf(self.norm(x))).flatten(0, 1), tokens.flatten())

    plan = {"leaf.layers.up": ColwiseParallel(), "leaf.layers.down": RowwiseParallel()}


class Leaf(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["down"](torch.relu(self.layers["up"](x)))


class Uneven(MLP):
    """11 hidden values over 2 ranks. They stay DTensors: of a plain part nobody knows what the whole is."""

    def __init__(self) -> None:
        super().__init__(hidden=11)

    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


MODELS |= {"broken": Broken, "pending": Pending, "leaf": Halves, "uneven": Uneven}


def train_in_other_ways(kind: str, stage: int) -> None:
    mesh = mesh_2d()
    options: dict[str, Any] = {"leaf_modules": [Leaf]} if kind == "leaf" else {}
    ours, alone = compiled(kind, mesh, stage, **options), build(kind)
    wanted = train(alone, adamw(alone))
    assert train(ours, adamw(ours), mesh["dp"]) == pytest.approx(wanted, rel=1e-5)
    check_whole(ours, weights_of(alone))


WAYS = rows([("broken", 3), ("leaf", 2), ("uneven", 0)], ["broken", "leaf", "uneven"], STAGES)


@pytest.mark.parametrize(("kind", "stage"), WAYS)
@pytest.mark.filterwarnings("ignore:.*outside of a compiled graph")
def test_graph_breaks_leaf_modules_and_uneven_parts_train_as_well(make_workers: Any, kind: str, stage: int) -> None:
    make_workers(4).run(train_in_other_ways, kind, stage)


class Logits(Transformer):
    """It returns logits that stay divided over the vocabulary, for `loss_parallel`."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))

    plan = Transformer.plan | {"head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}


MODELS["logits"] = Logits


def lose_in_parallel(stage: int) -> None:
    mesh = mesh_2d()
    ours, alone = compiled("logits", mesh, stage), build("logits")
    optimizers = adamw(ours), adamw(alone)
    for step in range(STEPS):
        tokens = batch(step)[mesh["dp"].get_local_rank()]
        with loss_parallel():
            logits = ours(tokens)
            assert isinstance(logits, DTensor) and logits.placements == (Shard(2),)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
        everyone = batch(step).flatten(0, 1)
        wanted = F.cross_entropy(alone(everyone).flatten(0, 1), everyone.flatten())
        wanted.backward()
        found = whole(loss)
        dist.all_reduce(found, group=mesh["dp"].get_group())
        assert found.item() / 2 == pytest.approx(wanted.item(), rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_whole(ours, weights_of(alone))


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_loss_outside_of_the_model_is_computed_in_parallel(make_workers: Any, stage: int) -> None:
    make_workers(4).run(lose_in_parallel, stage)


def train_with_options(cases: list[dict[str, Any]]) -> None:
    mesh = mesh_2d()
    alone = build("transformer")
    wanted = train(alone, adamw(alone))
    for options in cases:
        given = options | ({"partition_activations": mesh["tp"]} if "partition_activations" in options else {})
        ours = compiled("transformer", mesh, **given)
        near = 2e-2 if "mixed_precision" in options else 1e-5
        assert train(ours, adamw(ours), mesh["dp"]) == pytest.approx(wanted, rel=near), options


LOW = zerofx.MixedPrecision(torch.bfloat16, torch.float32)
OPTIONS: list[dict[str, Any]] = [
    {"mixed_precision": LOW, "stage": 0},
    {"lookups": True},
    {"memory_budget": float("inf")},
    {"activation_budget": 0},
    {"activation_budget": 0, "stage": 1},
    {"partition_activations": "tp"},
]


@pytest.mark.parametrize("cases", [[{"mixed_precision": LOW}], pytest.param(OPTIONS, marks=pytest.mark.slow)])
def test_options_go_with_dtensors(make_workers: Any, cases: list[dict[str, Any]]) -> None:
    make_workers(4).run(train_with_options, cases)


def accumulate(stages: list[int]) -> None:
    """Two micro-batches a step, as one batch of both; with no_sync, and stepping inside of backward."""
    mesh = mesh_2d()
    alone = build("transformer")
    reference, wanted = adamw(alone), []
    for step in range(0, 4, 2):
        loss = (alone(batch(step).flatten(0, 1)) + alone(batch(step + 1).flatten(0, 1))) / 2
        loss.backward()
        wanted.append(loss.item())
        reference.step()
        reference.zero_grad()
    for stage in stages:
        ours = compiled("transformer", mesh, stage)
        optimizer, found = adamw(ours), []
        for step in range(0, 4, 2):
            first, second = (batch(step + i)[mesh["dp"].get_local_rank()] for i in (0, 1))
            with zerofx.no_sync(ours):
                one = ours(first) / 2
                one.backward()
            if stage == 3:
                with zerofx.step_in_backward(optimizer):
                    two = ours(second) / 2
                    two.backward()
            else:
                two = ours(second) / 2
                two.backward()
                optimizer.step()
            optimizer.zero_grad()
            total = whole(one + two)
            dist.all_reduce(total, group=mesh["dp"].get_group())
            found.append(total.item() / 2)
        assert found == pytest.approx(wanted, rel=1e-5), stage


@pytest.mark.parametrize("stages", [[3], pytest.param([0, 1, 2], marks=pytest.mark.slow)])
def test_gradients_that_are_kept_back_and_steps_inside_of_backward_are_right(
    make_workers: Any, stages: list[int]
) -> None:
    make_workers(4).run(accumulate, stages)


def train_beside_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    ours = build("transformer", mesh["tp"])
    zerofx.compile(ours, executor="eager", mesh=mesh["replicate", "shard"])
    alone = build("transformer")
    wanted = train(alone, adamw(alone))
    assert train(ours, adamw(ours), mesh["replicate"]) == pytest.approx(wanted, rel=1e-5)
    check_whole(ours, weights_of(alone))


@pytest.mark.slow
def test_parts_train_on_two_other_dimensions(make_workers: Any) -> None:
    make_workers(4).run(train_beside_replicas)


# ---- experts --------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Every expert sees every token, weighted. As DTensors experts are divided over "ep" and results are summed."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 4)

    def forward(self, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ self.up) @ self.down * share).sum(0)


class LocalExperts(Experts):
    """The same by hand: of a DTensor parameter a rank takes its part."""

    group, rank = "", 0

    def forward(self, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        if not self.group:
            return super().forward(x, share)
        up, down = self.up.to_local(), self.down.to_local()  # type: ignore[operator]
        x, share = Copy.apply(x, self.group), Copy.apply(share, self.group)
        mine = share[self.rank * len(up) :][: len(up)]
        return Sum.apply((torch.relu(x @ up) @ down * mine).sum(0), self.group)


class Mixture(nn.Module):
    def __init__(self, experts: type[Experts]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = experts()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        share = self.router(x).softmax(-1).t().unsqueeze(-1)
        return F.cross_entropy(self.head(x + self.experts(x, share)), tokens.flatten())


def experts_of(kind: type[Experts], ep: Any) -> Mixture:
    torch.manual_seed(0)
    model = Mixture(kind)
    if ep is None:
        return model

    def divide(name: str, module: nn.Module, mesh: Any) -> None:
        for name, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))

    def spread(module: nn.Module, inputs: Any, mesh: Any) -> Any:
        x, share = inputs
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return x, DTensor.from_local(share, mesh, [Replicate()], run_check=False)

    def join(module: nn.Module, output: Any, mesh: Any) -> Any:
        return output.redistribute(mesh, [Replicate()]).to_local()

    if kind is LocalExperts:
        model.experts.group, model.experts.rank = ep.get_group().group_name, ep.get_local_rank()
        divide("", model.experts, ep)
    else:
        distribute_module(model.experts, ep, divide, spread, join)
    return model


def train_experts(stage: int, executor: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    alone = experts_of(Experts, None)
    wanted = train(alone, adamw(alone))
    for kind in (Experts, LocalExperts):
        model = experts_of(kind, mesh["ep"])
        zerofx.compile(model, stage=stage, executor=executor, mesh=mesh["dp"], groups=zerofx.Grouping(min_bytes=0))
        assert train(model, adamw(model), mesh["dp"]) == pytest.approx(wanted, rel=1e-5), kind
        check_whole(model, weights_of(alone))


@pytest.mark.parametrize(("stage", "executor"), rows([(3, "eager"), (0, "eager")], STAGES, EXECUTORS))
def test_experts_divided_over_a_dimension_train_as_in_one_process(make_workers: Any, stage: int, executor: str) -> None:
    make_workers(4).run(train_experts, stage, executor, timeout=300)


# ---- what is refused, and what only tells ---------------------------------------------------------------------------


def refuse() -> None:
    mesh = mesh_2d()
    dp, tp = mesh["dp"], mesh["tp"]

    def refused(match: str, model: nn.Module, error: type[Exception] = ValueError, **options: Any) -> None:
        before = dict(model.named_parameters())
        with pytest.raises(error, match=match):
            zerofx.compile(model, **{"mesh": dp, "executor": "eager", **options})
        assert all(p is before[name] for name, p in model.named_parameters())

    model = build("mlp", tp)
    refused(r"'up.weight' is a DTensor over the ranks .* are in both. .*mesh=mesh\[\"dp\"\]", model, mesh=tp)
    refused(r"'up.weight' is a DTensor over the ranks .* are in both", model, mesh=None)
    with torch.device("meta"):
        meta = MLP()
    refused(r"'up.weight' is a DTensor on the meta device.*to_empty", parallelize_module(meta, tp, dict(MLP.plan)))
    model.up.weight.register_post_accumulate_grad_hook(print)
    refused(r"'up.weight' is a DTensor with a hook on its gradient.*after zerofx.compile", model)
    model = build("mlp", tp)
    model.up.weight.grad = torch.zeros_like(model.up.weight)
    refused(r"'up.weight' has a gradient already", model)
    model = build("mlp", tp)
    both = DTensor.from_local(torch.ones(2, 2), tp, [Partial()])
    model.sum = nn.Parameter(both)
    refused(r"'sum' is a DTensor with the placements .*Partial.*: expected Shard and Replicate alone", model)
    torch.manual_seed(dist.get_rank())  # the plain head is drawn from another seed on each rank
    apart = parallelize_module(MLP(), tp, dict(MLP.plan))
    refused(r"'head.weight' has other values on rank 1 than on rank 0.*from one seed", apart)
    optimizer = adamw(model := build("mlp", tp))
    zerofx.compile(model, executor="eager", mesh=dp)
    model(batch(0)[0]).backward()
    with pytest.raises(RuntimeError, match=r"AdamW has 'up.weight' as the DTensor that it was before zerofx.compile"):
        optimizer.step()
    pending = compiled("pending", mesh)
    with pytest.raises(Exception, match=r"the input .* is the result of a collective .*still on its way.*clone"):
        pending(batch(0)[0])
    traced = torch.compile(build("mlp", tp), backend="zerofx", options={"stage": 3, "executor": "eager"})
    with pytest.raises(Exception, match=r"a DTensor, and the module is being traced already: call zerofx.compile"):
        traced(batch(0)[0])


def test_old_versions_are_refused_but_in_stage_0() -> None:
    for version, stage in [("2.13.0", 3), ("2.15.0+cpu", 1), ("2.11.0", 0)]:
        check_version(stage, version)
    with pytest.raises(ValueError, match=r"DTensor parameters with stage=3 and PyTorch 2.11.0.*Expected PyTorch 2.13"):
        check_version(3, "2.11.0")


def test_what_cannot_be_taken_apart_is_refused_by_name(make_workers: Any) -> None:
    make_workers(4).run(refuse)


def tell(path: str) -> None:
    mesh = mesh_2d()
    ours = compiled("transformer", mesh, 3)
    optimizer = adamw(ours)
    train(ours, optimizer, mesh["dp"], steps=1)
    parts = sum(p.to_local().numel() for p in build("transformer", mesh["tp"]).parameters())
    summary = zerofx.memory_summary(ours, optimizer)
    layouts = {p._group.layout for p in ours.parameters()}
    assert sum(slot.numel for layout in layouts for slot in layout.slots) == parts
    assert summary.nbytes["shards"] == 4 * sum(layout.shard_numel for layout in layouts)
    zerofx.report(ours, f"{path}/{dist.get_rank()}.html")
    planned = zerofx.plan(build("transformer", mesh["tp"]), world_size=2)
    assert planned.parameters == parts
    again = build("transformer", mesh["tp"])
    record = zerofx.dry_run(again, batch(0)[0], world_size=2, executor="eager", groups=zerofx.Grouping(min_bytes=0))
    assert isinstance(again.up.weight, DTensor)
    assert str(record.forward) == str(zerofx.graphs(ours)[0].forward)
    zerofx.predict(record)


def test_what_tells_of_memory_counts_this_ranks_parts(make_workers: Any, tmp_path: Any) -> None:
    make_workers(4).run(tell, str(tmp_path))
