"""A language model under transformers' Trainer: ``torchrun --nproc-per-node 2 trainer.py FOLDER``."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers import Trainer

folder = sys.argv[1]
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        attention_dropout=0.1,
    )
)
tokens = torch.randint(1, 131, (100, 12), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
args = TrainingArguments(
    output_dir=folder,
    max_steps=20,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    per_device_eval_batch_size=3,
    learning_rate=0.02,
    max_grad_norm=0.5,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=5,
    save_strategy="steps",
    save_steps=5,
    load_best_model_at_end=True,
    use_cpu=True,
    disable_tqdm=True,
    report_to=[],
)
trainer = Trainer(model=model, args=args, train_dataset=data[:80], eval_dataset=data[80:])
trainer.train(resume_from_checkpoint=sys.argv[2] if len(sys.argv) > 2 else None)
trainer.save_model(f"{folder}/final")
history = trainer.state.log_history
result = {
    "losses": [entry["loss"] for entry in history if "loss" in entry],
    "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
    "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    "best": trainer.state.best_model_checkpoint and trainer.state.best_model_checkpoint.rsplit("/", 1)[1],
    "at the end": trainer.evaluate()["eval_loss"],
}
