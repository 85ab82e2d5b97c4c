"""Methods besides ``forward``: they gather on demand, are compiled when asked for, and ``generate`` never hangs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerofx
from tests import models
from tests.slow import quick_if, slow, slow_if
from tests.workers import Workers
from zerofx import ShardedTensor
from zerofx.runtime.eager import unshard

EACH_GROUP = zerofx.Grouping(min_bytes=0)


def generator(name: str) -> Any:
    """A language model that keeps its keys and values."""
    model: Any = models.build(name).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    return model


def prompt(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def check_training(name: str) -> None:
    module = models.build(name)
    zerofx.compile(module, executor="eager")
    models.loss_of(module, models.make_batch(name, 2)).backward()
    assert len(zerofx.graphs(module)) == 1


def test_what_keeps_generate_in_step_leaves_the_model_one_graph(workers2: Workers) -> None:
    workers2.run(check_training, "llama", timeout=150)


def check_generate(name: str, stage: int, inside: bool) -> None:
    """Ranks with prompts of different lengths, of which one stops early."""
    rank, plain, module = dist.get_rank(), generator(name), generator(name)
    zerofx.compile(module, stage=stage, executor="eager", dynamic=True)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    asked = prompt(3 + 2 * rank)
    free = plain.generate(**asked, **options, eos_token_id=models.VOCAB + 1)
    if rank == 1:  # its first row stops after two tokens, the second where it will
        asked = {key: value[:1] for key, value in asked.items()}
        options["eos_token_id"] = int(free[0, asked["input_ids"].shape[1] + 1])
    expected = plain.generate(**asked, **options)
    if inside:
        with zerofx.unsharded(module, writeback=False):
            for _ in range(1 + rank):
                found = module.generate(**asked, **options)
    else:
        found = module.generate(**asked, **options)
    assert torch.equal(found, expected), (found, expected)
    if rank == 1:
        assert expected.shape[1] <= 7
    dist.barrier()


CASES = [("llama", 3, False), ("gpt2", 3, True), ("gpt2", 2, False)]


@quick_if(lambda inside: inside)
@pytest.mark.parametrize(("name", "stage", "inside"), CASES)
def test_generate_gives_the_tokens_of_one_process_on_ranks_that_stop_at_different_steps(
    workers2: Workers, name: str, stage: int, inside: bool
) -> None:
    workers2.run(check_generate, name, stage, inside, timeout=150)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.head = nn.Linear(7, 3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(F.linear(x, layer.weight, layer.bias))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


def check_method(stage: int, compiled: bool) -> int:
    torch.manual_seed(0)
    plain = Encoder()
    module = Encoder()
    module.load_state_dict(plain.state_dict())
    zerofx.compile(module, stage=stage, executor="eager", groups=EACH_GROUP)
    x = torch.randn(4, 7)
    if compiled:
        module.encode = torch.compile(module.encode, backend="zerofx", options={"executor": "eager"})  # type: ignore
    unshard._warned.clear()  # each place warns once per process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (module.encode(x).square().mean() + module(x).mean()).backward()
        with torch.no_grad():
            torch.testing.assert_close(module.encode(x), plain.encode(x))
    warned = not compiled and stage > 0 and dist.get_rank() == 0
    assert any("gathered here" in str(w.message) for w in caught) == warned
    (plain.encode(x).square().mean() + plain(x).mean()).backward()
    for p, q in zip(module.parameters(), plain.parameters()):
        gradient = p.grad.full_tensor() if isinstance(p.grad, ShardedTensor) else p.grad
        torch.testing.assert_close(gradient, q.grad)
    return len(zerofx.graphs(module))


@slow_if(lambda stage: stage == 0)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_method_besides_forward_trains_uncompiled_and_compiled(workers2: Workers, stage: int) -> None:
    assert workers2.run(check_method, stage, False) == [1, 1]
    assert workers2.run(check_method, stage, True) == [3, 3]  # forward, encode with gradients and without


def save_on_every_rank(stage: int, folder: str) -> None:
    """As a trainer of others ends: no state is given, and no rank is asked which it is."""
    plain, model = models.build("llama"), models.build("llama")
    zerofx.compile(model, stage=stage, executor="eager")
    model.save_pretrained(folder)
    read = type(plain).from_pretrained(folder).state_dict()
    assert all(torch.equal(read[name], value) for name, value in plain.state_dict().items())
    with zerofx.unsharded(model, writeback=False):
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder} alone")
    dist.barrier()


@pytest.mark.parametrize("stage", [3, slow(1)])
def test_save_pretrained_on_every_rank_writes_whole_weights(stage: int, workers2: Workers, tmp_path: Path) -> None:
    workers2.run(save_on_every_rank, stage, str(tmp_path / "model"))
    assert (tmp_path / "model alone").is_dir()
