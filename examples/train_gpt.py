"""Train a byte-level GPT on the source code of Python's standard library, sharded with ZeRO.

    python examples/train_gpt.py                   # two ranks on this machine, ZeRO stage 3
    python examples/train_gpt.py --stage 0         # plain data parallelism, to compare
    torchrun --nproc-per-node 8 examples/train_gpt.py --layers 24 --dim 1024 --heads 16 --lr 3e-4

Started by ``python``, the program launches one process per rank itself; ``torchrun`` does so on one machine
or many. Each rank takes a GPU where there are enough of them, and a CPU core otherwise. The model and its text are
in gpt.py, the launcher in local_ranks.py.

You see what each rank keeps in memory, against what plain data parallelism keeps; then the loss as it falls;
at the end the loss on text that was held out, in nats per byte. Beside it stands the bigram entropy: a model
that sees only one byte back cannot do better. Last comes a sample of what the model writes.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, bigram_entropy, load_text, windows
from local_ranks import describe, join, launch, mean_over_ranks, progress, say
from torch import Tensor, nn

import zerofx


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
                for record in zerofx.graphs(model) if args.print_graphs else ():
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
    device = join()
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
