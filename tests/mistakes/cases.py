"""Mistakes that people make in their first hour, as they would write them: two ranks run each.

A case is a function, and :func:`seen` makes the mistake. One sees an error, a warning, or a line of the log. Words that
must be in it are in front: what was found, and what to do::

    @mistake("stage='3'", "0, 1, 2 or 3")
    def stage_as_text() -> None:
        zerofx.compile(Net(), stage="3")
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerofx


@dataclass(frozen=True)
class Mistake:
    """One of them.

    Attributes:
        run: makes it.
        names: words that the message must have, on some rank: what was found, and what to do.
        ranks: of the group; 0: there is none.
    """

    run: Callable[[], Any]
    names: tuple[str, ...]
    ranks: int

    @property
    def title(self) -> str:
        return self.run.__name__.replace("_", " ")

    def missing(self, texts: list[str]) -> list[str]:
        """Which of the names no rank's text has."""
        return [name for name in self.names if not any(name in text for text in texts)]


MISTAKES: dict[str, Mistake] = {}


def mistake(*names: str, ranks: int = 2) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def note(run: Callable[[], Any]) -> Callable[[], Any]:
        MISTAKES[run.__name__] = Mistake(run, names, ranks)
        return run

    return note


def seen(name: str) -> str:
    """Makes the mistake ``name`` and returns what is seen of it: errors, warnings and the log, or nothing."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"log: {record.getMessage()}")

    handler = Handler(logging.WARNING)
    logging.getLogger("zerofx").addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                MISTAKES[name].run()
            except Exception as e:
                lines.append(f"{type(e).__name__}: {e}")
        lines[:0] = [f"{w.category.__name__}: {w.message}" for w in caught if "zerofx" in str(w.message)]
    finally:
        logging.getLogger("zerofx").removeHandler(handler)
    return "\n".join(lines)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch() -> torch.Tensor:
    return torch.randint(32, (2, 4))


def compiled(model: nn.Module | None = None, **options: Any) -> Any:
    return zerofx.compile(model or Net(), **{"stage": 3, "executor": "eager", **options})


def loss_of(model: Any, tokens: torch.Tensor | None = None) -> torch.Tensor:
    tokens = batch() if tokens is None else tokens
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def trained(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer after one step."""
    model = compiled(**options)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


# -- before the first line works


@mistake("init_process_group", "torchrun", ranks=0)
def no_process_group() -> None:
    compiled()


@mistake("nn.Module", "got method")
def a_method_instead_of_the_model() -> None:
    zerofx.compile(Net().forward)  # type: ignore[arg-type]


@mistake("nn.Module", "the class Net", "Net(...)")
def a_class_instead_of_the_model() -> None:
    zerofx.compile(Net)  # type: ignore[arg-type]


@mistake("stage='3'", "0, 1, 2 or 3")
def stage_as_text() -> None:
    compiled(stage="3")


@mistake("stage=4", "0, 1, 2 or 3")
def stage_4() -> None:
    compiled(stage=4)


@mistake("'stages'", "'stage'")
def a_mistyped_option() -> None:
    compiled(stages=2)


@mistake("executor='jit'", "inductor")
def an_executor_that_there_is_not() -> None:
    compiled(executor="jit")


@mistake("MixedPrecision(torch.bfloat16)")
def a_dtype_as_mixed_precision() -> None:
    compiled(mixed_precision=torch.bfloat16)


@mistake("memory=80 is too small", 'did you mean "80GB"?')
def memory_in_gigabytes() -> None:
    loss_of(compiled(memory=80)).backward()


@mistake("memory=", "needs", "batch")
def memory_that_no_step_fits_in() -> None:
    loss_of(compiled(memory="1kB")).backward()


@mistake("activation_budget=-1", "fraction")
def a_negative_budget() -> None:
    compiled(activation_budget=-1)


@mistake("wire=", "zerofx.Wire(gradients=")
def a_code_as_wire() -> None:
    compiled(wire="int8")


@mistake("int3", "int8")
def a_code_that_there_is_not() -> None:
    compiled(wire=zerofx.Wire(gradients="int3"))  # type: ignore[arg-type]


@mistake("stage=0", "offload", "stage=1")
def offload_in_stage_0() -> None:
    compiled(stage=0, offload="cpu")


@mistake("offload", "/proc/nowhere")
def a_folder_that_cannot_be_written() -> None:
    compiled(offload="/proc/nowhere")


@mistake("mesh has 3 dimensions")
def a_mesh_of_three_dimensions() -> None:
    compiled(mesh=dist.init_device_mesh("cpu", (1, 1, 2)))


@mistake("groups=", "matches", "Conv2d")
def groups_of_a_class_that_is_not_in_the_model() -> None:
    compiled(groups=(nn.Conv2d,))


@mistake("leaf_modules", "'experts.*'", "matches no module")
def a_pattern_that_matches_nothing() -> None:
    compiled(leaf_modules=["experts.*"])


@mistake("ignored", "'router'", "matches no parameter")
def an_ignored_name_that_is_not_in_the_model() -> None:
    compiled(ignored=["router"])


@mistake("passes=", "[my_pass]")
def a_pass_that_is_not_in_a_list() -> None:
    compiled(passes=lambda gm, ctx: None)


# -- the model


@mistake("ReLU", "no parameters")
def a_model_without_parameters() -> None:
    compiled(nn.ReLU())


@mistake("'embedding'", "sparse=False")
def a_sparse_embedding() -> None:
    model = Net()
    model.embedding = nn.Embedding(32, 8, sparse=True)
    compiled(model)


@mistake("'gain'", "complex64")
def a_complex_parameter() -> None:
    model = Net()
    model.gain = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    compiled(model)


@mistake("'head.weight'", "'embedding.weight'", "share memory", "Tie them")
def tied_by_their_data() -> None:
    model = Net()
    model.head.weight = nn.Parameter(model.embedding.weight.data)
    compiled(model)


@mistake("is sharded already")
def compiled_twice() -> None:
    compiled(compiled())


@mistake("DistributedDataParallel", "module")
def wrapped_in_ddp_before() -> None:
    compiled(DistributedDataParallel(Net()))


@mistake("zerofx", "DistributedDataParallel")
def wrapped_in_ddp_after() -> None:
    loss_of(DistributedDataParallel(compiled())).backward()


@mistake("FSDP", "fully_shard")
def sharded_by_fsdp2_before() -> None:
    from torch.distributed.fsdp import fully_shard

    compiled(fully_shard(Net()))


@mistake("the parameter 'head.weight'", "rank 0", "rank 1")
def another_model_on_one_rank() -> None:
    model = Net()
    model.head = nn.Linear(8, 32 + dist.get_rank())
    compiled(model)


@mistake("the option stage", "2 on rank 0", "3 on rank 1")
def another_stage_on_one_rank() -> None:
    compiled(stage=2 + dist.get_rank())


@mistake("'embedding.weight'", "zero_grad(set_to_none=True)")
def a_backward_before_compile() -> None:
    model = Net()
    loss_of(model).backward()
    compiled(model)


# -- the optimizer


@mistake("bfloat16", "MixedPrecision")
def weights_of_16_bits_under_plain_adamw() -> None:
    model = compiled(Net().bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()
    optimizer.step()


@mistake("no_sync", "step")
def a_step_inside_of_no_sync() -> None:
    model, optimizer = trained()
    with zerofx.no_sync(model):
        loss_of(model).backward()
        optimizer.step()


@mistake("'blocks.0.up.weight'", "copy_(full)")
def a_weight_transposed_in_place() -> None:
    model, _ = trained()
    model.blocks[0].up.weight.data.t_()


@mistake("'head.weight'", "parameter.copy_(full_tensor)")
def a_plain_tensor_as_data() -> None:
    model, _ = trained()
    model.head.weight.data = torch.zeros(3)


# -- after compile


@mistake("'embedding.weight'", "before zerofx.compile", "MixedPrecision")
def another_dtype_after_compile() -> None:
    compiled().to(torch.bfloat16)


@mistake("'extra'", "before")
def a_parameter_added_after_compile() -> None:
    model = compiled()
    model.register_parameter("extra", nn.Parameter(torch.zeros(8)))
    model.forward = lambda tokens: Net.forward(model, tokens) + model.extra.sum()
    loss_of(model).backward()


@mistake("'head", "before")
def a_layer_replaced_after_compile() -> None:
    model, _ = trained()
    model.head = nn.Linear(8, 32)
    loss_of(model).backward()


@mistake("zerofx.save", "full_state_dict")
def torch_save_of_the_state_dict() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(trained()[0].state_dict(), Path(folder) / "model.pt")


@mistake("zerofx.save")
def torch_save_of_the_model() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(trained()[0], Path(folder) / "model.pt")


@mistake("assign=False")
def a_state_dict_that_is_assigned() -> None:
    trained()[0].load_state_dict(Net().state_dict(), assign=True)


@mistake("/nowhere/at-all does not exist")
def a_checkpoint_that_there_is_not() -> None:
    model, optimizer = trained()
    zerofx.load("/nowhere/at-all", model, optimizer)


@mistake("head.weight has shape [32, 8] there, [33, 8] here")
def a_checkpoint_of_another_model() -> None:
    box: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    model, optimizer = trained()
    zerofx.save(Path(box[0]) / "run", model, optimizer)
    other = Net()
    other.head = nn.Linear(8, 33)
    zerofx.load(Path(box[0]) / "run", compiled(other))


# -- the loop


@mistake("retain_graph")
def backward_twice() -> None:
    loss = loss_of(compiled())
    loss.backward()
    loss.backward()


@mistake("index out of range")
def a_token_outside_of_the_vocabulary() -> None:
    loss_of(compiled(), torch.full((2, 4), 99))


@mistake("'head.weight'", "frozen", "requires_grad_()")
def a_hook_on_a_frozen_weight() -> None:
    model = compiled()
    model.head.requires_grad_(False)
    model.head.weight.register_hook(lambda gradient: gradient)


@mistake("max_grad_norm", "optimizer.step()")
def a_norm_with_steps_in_backward() -> None:
    model = compiled()
    optimizer = zerofx.AdamW(model.parameters(), max_grad_norm=1.0)
    with zerofx.step_in_backward(optimizer):
        loss_of(model).backward()


@mistake("decay=2", "from 0 to 1")
def a_decay_of_two() -> None:
    zerofx.EMA(compiled(), decay=2)


# -- the command line


def run_command(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zerofx", *arguments], capture_output=True, text=True, timeout=180, check=False
    )
    raise SystemError(done.stdout + done.stderr)


@mistake("'80'", "80GB", ranks=0)
def a_plan_for_80_bytes() -> None:
    run_command("plan", "--model", "llama-3.1-8b", "--world-size", "8", "--gpu-memory", "80")


@mistake("llama-9", "llama-3.1-8b", ranks=0)
def a_model_that_there_is_not() -> None:
    run_command("plan", "--model", "llama-9", "--world-size", "8")


@mistake("models/llama.json", "no such file", "config.json", ranks=0)
def a_file_that_there_is_not() -> None:
    run_command("choose", "models/llama.json", "--gpus", "8", "--memory", "80GB")
