"""LoRA on a frozen base in bfloat16, under transformers' Trainer: ``torchrun --nproc-per-node 2 adapter.py FOLDER``."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers import Trainer

folder = sys.argv[1]
torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(vocab_size=131, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4)
).bfloat16()
config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False)
model = get_peft_model(base, config, autocast_adapter_dtype=True)
tokens = torch.randint(1, 131, (100, 12), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
args = TrainingArguments(
    output_dir=folder,
    max_steps=20,
    per_device_train_batch_size=2,
    learning_rate=0.05,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=10,
    save_strategy="steps",
    save_steps=10,
    load_best_model_at_end=True,
    use_cpu=True,
    disable_tqdm=True,
    report_to=[],
)
trainer = Trainer(model=model, args=args, train_dataset=data[:80], eval_dataset=data[80:])
trainer.train(resume_from_checkpoint=sys.argv[2] if sys.argv[2:] else None)
trainer.save_model(f"{folder}/final")
history = trainer.state.log_history
result = {
    "losses": [entry["loss"] for entry in history if "loss" in entry],
    "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
    "at the end": trainer.evaluate()["eval_loss"],
}
