"""Modules of the meta device get the values of one process, while a rank holds its shards and one module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests import models
from tests.memory import allocated_peak
from tests.slow import quick_if, slow_if
from tests.workers import Workers
from zerofx import ShardedTensor

EACH_GROUP = zerofx.Grouping(min_bytes=0)


class Net(nn.Module):
    """What torch.nn draws in constructors: every order of modules, buffers, a parent that draws its child anew."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 12, padding_idx=2)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.norm = nn.BatchNorm1d(12)
        self.attention = nn.ModuleList(nn.MultiheadAttention(12, 3, batch_first=True) for _ in range(2))
        self.bilinear = nn.Bilinear(12, 12, 5)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.rnn = nn.GRU(12, 7)
        self.bilinear.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(self.embedding(x).transpose(1, 2))).transpose(1, 2)
        for attention in self.attention:
            y = attention(y, y, y)[0] + y
        return self.head(y).square().mean() + self.rnn(y)[0].mean() + self.bilinear(y, y).mean()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def full(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor() if isinstance(p, ShardedTensor) else p.detach()


def same(module: nn.Module, plain: nn.Module) -> None:
    state = module.state_dict()
    for name, value in plain.state_dict().items():
        assert not full(state[name]).is_meta and torch.equal(full(state[name]), value), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer), name


def check_construction(stage: int) -> None:
    torch.manual_seed(3)
    plain = Net()
    after = torch.rand(2)
    module = on_meta(Net)
    objects = dict(module.named_parameters())
    torch.manual_seed(3 + dist.get_rank())  # as rank 0's, wherever the others are
    zerofx.shard(module, stage=stage, groups=EACH_GROUP)
    same(module, plain)
    for name, p in module.named_parameters():
        assert p is objects[name] or name.startswith("rnn.")  # torch.nn.RNN has weak references
    assert module.head.weight is module.embedding.weight
    assert not module.bilinear.weight.requires_grad
    if dist.get_rank() == 0:
        assert torch.equal(torch.rand(2), after)  # the generator went on as it would have
    else:
        expected = torch.rand(2, generator=torch.Generator().manual_seed(3 + dist.get_rank()))
        assert torch.equal(torch.rand(2), expected)  # and here it was not touched


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_values_are_bit_by_bit_those_of_ordinary_construction(workers3: Workers, stage: int) -> None:
    workers3.run(check_construction, stage)


def check_training() -> None:
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    module = zerofx.compile(on_meta(Net), executor="eager", groups=EACH_GROUP)
    x = torch.randint(17, (4, 6))
    ours, theirs = models.sgd(module.parameters()), models.sgd(p for p in plain.parameters() if p.requires_grad)
    for _ in range(3):
        loss, expected = module(x), plain(x)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()


def test_it_trains_as_the_module_that_was_built_whole(workers2: Workers) -> None:
    workers2.run(check_training)


def draw(m: nn.Module) -> None:
    """A user's function: by kind, through ``.data``, and at the root over all parameters."""
    if isinstance(m, nn.Linear):
        m.weight.data.normal_(0.0, 0.02)
        if m.bias is not None:
            nn.init.zeros_(m.bias)
    elif isinstance(m, (nn.Embedding, nn.LayerNorm)):
        m.reset_parameters()
    elif isinstance(m, models.GPT):
        for name, p in m.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(p, std=0.02 / 3)
            elif name.endswith("norm1.weight"):
                p.mul_(2)
            elif name.endswith("qkv.weight"):
                nn.init.orthogonal_(m.blocks[0].proj.weight.new_empty(4, 4))


def check_function(stage: int) -> None:
    torch.manual_seed(5)
    plain = on_meta(models.gpt).to_empty(device="cpu")
    with torch.no_grad():
        plain.apply(draw)
    torch.manual_seed(5)
    same(zerofx.shard(on_meta(models.gpt), init=draw, stage=stage, groups=EACH_GROUP), plain)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_function_gives_what_apply_gives_to_the_whole_module(workers3: Workers, stage: int) -> None:
    workers3.run(check_function, stage)


def check_hugging_face(name: str) -> None:
    torch.manual_seed(5)
    plain: Any = on_meta(models.BUILDERS[name]).to_empty(device="cpu")
    plain.init_weights()
    torch.manual_seed(5)
    module = on_meta(models.BUILDERS[name])
    zerofx.shard(module, groups=EACH_GROUP)
    same(module, plain)
    loss = models.loss_of(module, models.make_batch(name, 2))
    torch.testing.assert_close(loss, models.loss_of(plain, models.make_batch(name, 2)))


@slow_if(lambda name: name == "gpt2")
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_hugging_face_models_have_the_values_of_init_weights(workers2: Workers, name: str) -> None:
    workers2.run(check_hugging_face, name)


# -- memory


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(32))


LAYER = (256 * 256 + 256) * 4


def check_memory(path: str | None, stage: int) -> None:
    module, bystander = on_meta(Deep), on_meta(Deep)
    zerofx.shard(bystander)  # what a first call imports
    del bystander
    total = sum(p.numel() for p in module.parameters()) * 4
    peak = allocated_peak(lambda: zerofx.shard(module, stage=stage, init=path))
    peak -= 0 if path is None else (Path(path) / "model.safetensors").stat().st_size  # mapped: counted, and not there
    held = total / dist.get_world_size() if stage == 3 else total
    assert held < peak < held + 2.5 * LAYER, (held / LAYER, peak / LAYER)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_holds_its_shards_and_one_module_at_a_time(make_workers: Callable[[int], Workers], stage: int) -> None:
    make_workers(4).run(check_memory, None, stage)


# -- checkpoints


def check_checkpoint(name: str, folder: str, stage: int) -> None:
    plain = type(models.build(name)).from_pretrained(folder)  # type: ignore[attr-defined]
    plain.loss_type = models.build(name).loss_type
    module = zerofx.compile(on_meta(models.BUILDERS[name]), stage=stage, executor="eager", init=folder)
    same(module, plain)
    batch = models.make_batch(name, 2)
    torch.testing.assert_close(models.loss_of(module, batch), models.loss_of(plain, batch))


@quick_if(lambda stage: stage == 0)
@pytest.mark.parametrize(("name", "stage"), [("gpt2", 3), ("llama", 3), ("llama", 2), ("gpt2", 0)])
def test_a_hugging_face_folder_is_loaded_as_from_pretrained_loads_it(
    workers2: Workers, tmp_path: Path, name: str, stage: int
) -> None:
    size = "20KB" if stage == 3 else "1GB"  # several files and an index, or one
    models.build(name, seed=8).save_pretrained(tmp_path, max_shard_size=size)  # type: ignore[operator]
    assert (tmp_path / "model.safetensors.index.json").exists() == (stage == 3)
    workers2.run(check_checkpoint, name, str(tmp_path), stage)


def test_loading_holds_no_more_than_the_shards(make_workers: Callable[[int], Workers], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(Deep().state_dict(), tmp_path / "model.safetensors")
    make_workers(4).run(check_memory, str(tmp_path), 3)


# -- what is refused


class Frequencies(nn.Module):
    """A buffer that the constructor computes, and ``reset_parameters`` perhaps."""

    def __init__(self, again: bool, kind: str = "buffer") -> None:
        super().__init__()
        self.again, self.kind = again, kind
        self.weight = nn.Parameter(torch.ones(5))
        if kind == "buffer":
            self.register_buffer("steps", torch.arange(5), persistent=False)
            self.register_buffer("mask", torch.ones(5, dtype=torch.bool), persistent=False)
            self.register_buffer("rates", torch.rand(5), persistent=False)
        elif kind == "attribute":
            self.steps = torch.arange(5)
        else:
            self.steps = {"odd": [torch.arange(1, 5, 2)]}

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.again:
            self.steps.copy_(torch.arange(5))  # type: ignore[operator]
            self.mask.fill_(True)  # type: ignore[operator]
            self.rates = torch.arange(5) / 5


def check_leftovers() -> None:
    module = zerofx.shard(on_meta(lambda: nn.Sequential(Frequencies(True), nn.Linear(2, 2))))
    assert module[0].steps.tolist() == [0, 1, 2, 3, 4] and module[0].mask.all() and module[0].rates[1] == 0.2
    cases: list[tuple[str, Callable[[], nn.Module], dict[str, Any]]] = [
        (r"'0\.steps' was built on the meta device.* \(2 more\)", lambda: nn.Sequential(Frequencies(False)), {}),
        (r"'0\.steps' was built on the meta device", lambda: nn.Sequential(Frequencies(False, "attribute")), {}),
        (r"'0\.steps' was built on the meta device", lambda: nn.Sequential(Frequencies(False, "container")), {}),
        (r"'1\.bias' was built", lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), {"init": first_and_weight}),
        ("'bias': write to the parameter in place", lambda: nn.Linear(3, 3), {"init": replace_bias}),
    ]
    for message, build, options in cases:
        with pytest.raises(RuntimeError, match=message):
            zerofx.shard(on_meta(build), **options)
    with pytest.raises(ValueError, match="init= is for modules on the meta device, and 'weight' is on cpu"):
        zerofx.shard(nn.Linear(3, 3), init=replace_bias)
    with pytest.raises(ValueError, match="init=3: expected a function of a module, a path, or None"):
        zerofx.shard(on_meta(lambda: nn.Linear(3, 3)), init=3)
    with pytest.raises(RuntimeError, match="differ in being on the meta device"):
        zerofx.shard(nn.Linear(3, 3) if dist.get_rank() == 0 else on_meta(lambda: nn.Linear(3, 3)))
    with pytest.raises(zerofx.CheckpointError, match=r"nowhere does not exist"):
        zerofx.shard(on_meta(lambda: nn.Linear(3, 3)), init="nowhere")
    with pytest.raises(Exception, match=r"on the meta device.*zerofx\.compile"):
        torch.compile(on_meta(lambda: nn.Linear(3, 3)), backend="zerofx")(torch.ones(3, device="meta"))


def first_and_weight(m: nn.Module) -> None:
    if isinstance(m, nn.Sequential):
        m[0].reset_parameters()
        nn.init.ones_(m[1].weight)


def replace_bias(m: nn.Module) -> None:
    m.bias = nn.Parameter(torch.zeros(3))


def test_what_nothing_has_initialised_is_refused_by_name(workers2: Workers) -> None:
    workers2.run(check_leftovers)


class Counted(nn.Linear):
    """Says how often it was initialised."""

    drawn = 0

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.drawn += 1


def test_a_module_under_two_names_is_initialised_once(fake_world: Callable[..., None]) -> None:
    fake_world(1)
    with torch.device("meta"):
        layer = Counted(4, 4)
        module = nn.Sequential(layer, nn.Sequential(layer))
    layer.drawn = 0
    zerofx.shard(module, stage=3)
    assert layer.drawn == 1
