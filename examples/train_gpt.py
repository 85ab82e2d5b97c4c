"""Train a byte-level GPT on the source code of Python's standard library, sharded with ZeRO.

    python examples/train_gpt.py                   # two ranks on this machine, ZeRO stage 3
    python examples/train_gpt.py --stage 0         # plain data parallelism, to compare
    torchrun --nproc-per-node 8 examples/train_gpt.py --layers 24 --dim 1024 --heads 16 --lr 3e-4

Started by ``python``, the program launches one process per rank itself; ``torchrun`` does so on one machine
or many. Each rank takes a GPU where there are enough of them, and a CPU core otherwise.

You see what each rank keeps in memory, against what plain data parallelism keeps; then the loss as it falls;
at the end the loss on text that was held out, in nats per byte. Beside it stands the bigram entropy: a model
that sees only one byte back cannot do better. Last comes a sample of what the model writes.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx

try:
    from rich.progress import Progress
except ImportError:
    Progress = None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: turn pairs of features by angles that grow with the position."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, features of a head]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256)
        frequencies = 1000 ** -torch.linspace(0, 1, dim // heads // 2)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte, [batch, context, 256]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def load_text(path: Path | None) -> tuple[Tensor, Tensor]:
    """Text to train on and text held out: every 20th file of the standard library, or the last 20th of a file."""
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
        files = [f for f in sorted(library.rglob("*.py")) if skipped.isdisjoint(f.relative_to(library).parts)]
        held_out = b"".join(f.read_bytes() for f in files[::20])
        del files[::20]
        text = b"".join(f.read_bytes() for f in files)[:8_000_000]
    else:
        text = path.read_bytes()
        cut = len(text) * 19 // 20
        text, held_out = text[:cut], text[cut:]
    text_bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return text_bytes, torch.frombuffer(bytearray(held_out), dtype=torch.uint8)


def bigram_entropy(text: Tensor) -> float:
    """Entropy of a byte given the one before it, in nats, counted on this very text."""
    pairs = text[:-1].long() * 256 + text[1:]
    joint = torch.bincount(pairs, minlength=256 * 256).view(256, 256) / len(pairs)
    return (torch.special.entr(joint).sum() - torch.special.entr(joint.sum(1)).sum()).item()


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each [len(starts), context]: a target is the byte after its input."""
    positions = (starts[:, None] + torch.arange(context)).to(text.device)
    return text[positions].long(), text[positions + 1].long()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text, held_out = (part.to(device) for part in load_text(args.data))
    if len(held_out) <= args.context:
        raise ValueError(f"a text of {len(text) + len(held_out)} bytes is too short for --context {args.context}")
    torch.manual_seed(args.seed)
    model: nn.Module = GPT(args.layers, args.dim, args.heads, args.context).to(device)
    say(f"text      {len(text):,} bytes to train on, {len(held_out):,} held out")
    say(f"model     {args.layers} layers of {args.dim}, {sum(p.numel() for p in model.parameters()):,} parameters")
    say(f"ranks     {ranks} on {device.type}, backend {dist.get_backend()}, stage {args.stage}")

    model = zerofx.compile(model, stage=args.stage, executor=args.executor)
    optimizer = zerofx.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(  # a linear warm-up, then a cosine down to zero
        optimizer, lambda step: min(10 * (step + 1) / args.steps, (1 + math.cos(math.pi * step / args.steps)) / 2)
    )

    draw = torch.Generator().manual_seed(args.seed + rank)  # each rank draws batches of its own
    began = time.perf_counter()
    with progress(args.steps) as show:
        for step in range(1, args.steps + 1):
            starts = torch.randint(len(text) - args.context, (args.batch,), generator=draw)
            inputs, targets = windows(text, starts, args.context)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            if step == 1:
                say(f"compiled  in {time.perf_counter() - began:.0f} s")
                describe(model, optimizer)
                if args.print_graphs:
                    for record in zerofx.graphs(model):
                        say(str(record))
                began = time.perf_counter()
            elif step % 10 == 0:
                rate = (step - 1) * ranks * inputs.numel() / (time.perf_counter() - began)
                show(step, mean_over_ranks(loss.detach()), rate)
            schedule.step()
            optimizer.zero_grad()

    loss_held_out = evaluate(model, held_out, args)
    sample = generate(model, args.prompt.encode(), 300, args)
    bigram, bigram_held_out = bigram_entropy(torch.cat([text, held_out])), bigram_entropy(held_out)
    say(f"\nheld-out loss   {loss_held_out:.3f} nats per byte")
    say(f"bigram entropy  {bigram:.3f} ({bigram_held_out:.3f} of the held-out text alone)")
    say(f"\n{sample.decode(errors='replace')}")


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What this rank keeps from one step to the next, read off the live tensors after a backward pass."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    moments = [t for state in optimizer.state.values() for t in state.values()]
    kept = sum(storages([*parameters, *gradients, *moments]).values())
    plain = 16 * sum(p.numel() for p in parameters)  # fp32 parameter, gradient and two moments
    if any(isinstance(p, zerofx.ShardedTensor) for p in parameters):
        say(f"groups    {len(storages(parameters))}, each gathered and reduced as one")
    say(f"memory    {kept / 1e6:.1f} MB of parameters, gradients and optimizer state per rank:")
    say(f"          {kept / plain:.2f} of the {plain / 1e6:.1f} MB of plain data parallelism")


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of each distinct storage that holds this rank's part of the tensors."""
    local = [t.to_local() if isinstance(t, zerofx.ShardedTensor) else t for t in tensors]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, args: argparse.Namespace) -> float:
    """Mean loss on windows spaced evenly over the text; each rank takes its part of them."""
    model.eval()
    rank, ranks, batches = dist.get_rank(), dist.get_world_size(), 16
    count = batches * args.batch * ranks
    starts = torch.arange(count) * (len(text) - args.context) // count
    total = torch.zeros((), device=text.device)
    for mine in starts[rank::ranks].split(args.batch):
        inputs, targets = windows(text, mine, args.context)
        total += F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    return mean_over_ranks(total / batches)


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, length: int, args: argparse.Namespace) -> bytes:
    """Continue the prompt. Every rank must call this: it takes all of them to gather the weights."""
    model.eval()
    device = next(model.parameters()).device
    draw = torch.Generator().manual_seed(args.seed)
    written = bytearray(prompt)
    for _ in range(length):
        seen = written[-args.context :]
        window = torch.zeros(1, args.context, dtype=torch.long)  # padded: one shape, compiled once
        window[0, : len(seen)] = torch.tensor(seen)
        logits = model(window.to(device))[0, len(seen) - 1].cpu()
        written.append(int(torch.multinomial(F.softmax(logits / 0.8, dim=0), 1, generator=draw)))
    return bytes(written)


@contextmanager
def progress(steps: int) -> Iterator[Callable[[int, float, float], None]]:
    """Gives ``show(step, loss, tokens_per_second)``: a bar on a terminal where rich is installed, else lines."""
    if dist.get_rank() == 0 and Progress is not None and sys.stdout.isatty():
        with Progress() as bar:
            task = bar.add_task("compiling", total=steps)
            yield lambda step, loss, rate: bar.update(
                task, completed=step, description=f"loss {loss:.3f}  {rate:,.0f} tokens/s"
            )
    else:
        yield lambda step, loss, rate: say(f"step {step:5}  loss {loss:.3f}  {rate:,.0f} tokens/s")


def launch(ranks: int) -> None:
    """Run this program once per rank on this machine. The first rank to fail, or Ctrl-C, ends them all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # a free one
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks inherit this: Ctrl-C is for the launcher alone
    workers = [
        subprocess.Popen([sys.executable, *sys.argv], env=environment | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(ranks))
    ]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while None in (codes := [worker.poll() for worker in workers]) and not any(codes):
            time.sleep(0.1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()
        if sys.stdout.isatty():
            print("\033[?25h", end="")  # show the cursor, which a progress bar hides
    if any(codes):
        sys.exit(", ".join(f"rank {rank} failed with exit status {code}" for rank, code in enumerate(codes) if code))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes to launch on this machine")
    add("--stage", type=int, default=3, choices=range(4), help="ZeRO stage; 0: plain data parallelism")
    add("--executor", default="inductor", choices=["inductor", "eager"])
    add("--steps", type=int, default=300)
    add("--layers", type=int, default=8)
    add("--dim", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--batch", type=int, default=8, help="windows of text per rank and step")
    add("--context", type=int, default=128, help="bytes in a window")
    add("--lr", type=float, default=4e-3)
    add("--seed", type=int, default=0)
    add("--data", type=Path, help="a file to train on instead of the standard library")
    add("--prompt", default="def ", help="what the sample at the end starts with")
    add("--print-graphs", action="store_true", help="print the rewritten graphs after the first step")
    args = parser.parse_args()
    if args.dim % (2 * args.heads):
        parser.error("--dim must be a multiple of 2 * --heads")
    if args.data is not None and not args.data.is_file():
        parser.error(f"--data: no file {args.data}")
    return args


def main() -> None:
    args = parse()
    if "RANK" not in os.environ:
        launch(args.ranks)
        return
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
