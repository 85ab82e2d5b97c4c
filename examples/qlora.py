"""QLoRA, sharded: a base in 4 bits, quantized by bitsandbytes or torchao, and adapters on it.

    pip install transformers peft bitsandbytes torchao
    torchrun --nproc-per-node 2 examples/qlora.py                                # a small Llama that is made here
    torchrun --nproc-per-node 2 examples/qlora.py --quantize int8
    torchrun --nproc-per-node 8 examples/qlora.py --model llama/ --context 1024 --lr 2e-4

The base is sharded as it is: its codes, a byte for two weights. A layer's codes are gathered before it, and
dequantized where they are used. Adapters are what is trained, and what is saved: ``--out`` has them for peft. Text is
read as bytes; give a real model's tokenizer its turn as examples/finetune_hf.py does.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig
from transformers.utils import logging

import zerofx
from zerofx.integrations.peft import save_pretrained


def quantization(kind: str) -> BitsAndBytesConfig | TorchAoConfig:
    """What ``from_pretrained`` is told."""
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig(version=2))
    compute = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    double = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": compute}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **double)


def make_base(folder: Path) -> None:
    """A Llama for bytes that has learnt nothing yet."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, initializer_range=0.1, **sizes)).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with a pretrained model")
    parser.add_argument("--quantize", default="nf4", choices=("nf4", "int8"))
    parser.add_argument("--data", type=Path, default=Path(argparse.__file__), help="a text: Python's argparse, if none")
    parser.add_argument("--out", type=Path, default=Path("runs/qlora"))
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--executor", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=64, help="bytes of a sequence")
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    logging.disable_progress_bar()
    base = args.model or args.out / "base"
    if args.model is None and rank == 0:
        make_base(base)
    dist.barrier()

    options = {"quantization_config": quantization(args.quantize), "dtype": torch.float32, "device_map": str(device)}
    model = AutoModelForCausalLM.from_pretrained(base, **options)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    model = zerofx.compile(model, stage=args.stage, executor=args.executor)
    optimizer = zerofx.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr, max_grad_norm=1.0)
    if rank == 0:
        held = sum(zerofx.memory_summary(model).nbytes.values())
        print(f"a rank holds {held / 1e6:.2f} MB of codes and adapters")

    text = torch.frombuffer(bytearray(args.data.read_bytes()), dtype=torch.uint8).long().to(device)
    for step in range(1, args.steps + 1):
        draw = torch.Generator().manual_seed(step * ranks + rank)
        starts = torch.randint(len(text) - args.context, (args.batch,), generator=draw)
        ids = torch.stack([text[i : i + args.context] for i in starts.tolist()])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            dist.all_reduce(mean := loss.detach() / ranks)
            if rank == 0:
                print(f"step {step:4}  loss {mean.item():.3f}", flush=True)

    save_pretrained(model, args.out / "adapter")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
