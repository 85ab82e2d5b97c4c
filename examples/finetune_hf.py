"""Fine-tune a Hugging Face model with LoRA, sharded with ZeRO; then load what was saved with plain transformers.

    pip install transformers peft
    torchrun --nproc-per-node 2 examples/finetune_hf.py                              # a small Llama that is made here
    torchrun --nproc-per-node 8 examples/finetune_hf.py --model llama/ --data notes.txt --context 1024 --lr 2e-4

Without ``--model`` nothing is downloaded: rank 0 trains a tokenizer on the text, makes a Llama of random weights, and
saves both as a pretrained model. The rest is the same for a real one. What is there afterwards, in ``--out``:
``adapter/`` for peft, and ``merged/`` for ``from_pretrained``, which the program reads again and compares.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

import zerofx


def make_base(folder: Path, text: str) -> None:
    """What a hub would give: a tokenizer, learnt from the text, and a Llama that has learnt nothing yet."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1023, show_progress=False, initial_alphabet=alphabet)
    bpe.train_from_iterator(text.splitlines(keepends=True), trainer)
    bpe.add_special_tokens(["<eos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<eos>")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.15,  # wide: an adapter has to do with the embeddings that it finds
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value := value.detach().clone())
    return value.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Tensor) -> float:
    """Mean loss; each rank has batches of its own, as many as the others."""
    model.eval()
    losses = torch.stack([model(input_ids=ids, labels=ids).loss for ids in batches])
    model.train()
    return mean_over_ranks(losses.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with a pretrained model and its tokenizer")
    parser.add_argument("--data", type=Path, default=Path(argparse.__file__), help="a text: Python's argparse, if none")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_hf"))
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--executor", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    logging.disable_progress_bar()
    torch.manual_seed(rank)  # what dropout draws is each rank's own; weights are rank 0's

    text = args.data.read_text()
    base = args.model or args.out / "base"
    if args.model is None and rank == 0:
        make_base(base, text)
    dist.barrier()
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0].to(device)
    size = args.batch * args.context
    batches = ids[: len(ids) // (ranks * size) * ranks * size].view(-1, ranks, args.batch, args.context)[:, rank]
    held_out, batches = batches[:2], batches[2:]
    if not len(batches):
        raise ValueError(f"{args.data} has {len(ids):,} tokens; expected {3 * ranks * size:,} at least: three steps")

    model = AutoModelForCausalLM.from_pretrained(base).to(device)
    if hasattr(model, "activation_checkpointing_enable"):  # what later versions of transformers call it
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.05))
    model = zerofx.compile(model, stage=args.stage, executor=args.executor)
    optimizer = zerofx.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr, max_grad_norm=1.0)
    if rank == 0:
        model.print_trainable_parameters()

    before = evaluate(model, held_out)
    for epoch in range(args.epochs):
        for mine in batches:
            loss = model(input_ids=mine, labels=mine).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = mean_over_ranks(loss)
        if rank == 0:
            print(f"epoch {epoch + 1}  {len(batches)} steps  loss {mean:.3f}", flush=True)
    after = evaluate(model, held_out)

    model.eval()
    torch.set_grad_enabled(False)
    expected = model(input_ids=held_out[0]).logits
    # Inside the model is whole on every rank, and an ordinary one: it generates without a collective, copies and saves.
    with zerofx.unsharded(model, writeback=False):
        if rank == 0:
            prompt = tokenizer("def add_argument(self", return_tensors="pt").to(device)
            written = model.generate(**prompt, max_new_tokens=20, do_sample=False)
            model.save_pretrained(args.out / "adapter")
            copy.deepcopy(model).merge_and_unload().save_pretrained(args.out / "merged")
            tokenizer.save_pretrained(args.out / "merged")

    if rank == 0:
        print(f"held-out loss {before:.3f} before, {after:.3f} after")
        print(f"written: {tokenizer.decode(written[0])!r}")
        loaded = AutoModelForCausalLM.from_pretrained(args.out / "merged").to(device).eval()
        difference = (loaded(input_ids=held_out[0]).logits - expected).abs().max()
        print(f"{args.out / 'merged'}: logits differ by {difference:.1e} from those of the model that was trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
