"""Text generated in evaluation: ``torchrun --nproc-per-node 2 seq2seq.py FOLDER``."""

import sys

import torch
from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration
from transformers import Seq2SeqTrainer

torch.manual_seed(0)
model = T5ForConditionalGeneration(
    T5Config(
        vocab_size=61,
        d_model=32,
        d_kv=8,
        d_ff=44,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
        initializer_factor=5.0,
    )
).eval()
rows = torch.randint(2, 61, (4, 9), generator=torch.Generator().manual_seed(1))
options = {"do_sample": False, "max_new_tokens": 7}
free = model.generate(rows, **options, eos_token_id=60)
model.generation_config.eos_token_id = int(free[0, 3])  # what the first row says early ends it
mine = rows[2 * torch.distributed.get_rank() :][:2]
length = model.generate(mine, **options).shape[1]

args = Seq2SeqTrainingArguments(
    output_dir=sys.argv[1],
    max_steps=1,
    learning_rate=0.0,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    predict_with_generate=True,
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
    report_to=[],
)
data = [{"input_ids": row, "labels": row[:5]} for row in rows]
trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    data_collator=lambda items: {key: torch.stack([item[key] for item in items]) for key in items[0]},
    train_dataset=data,
    eval_dataset=data,
    compute_metrics=lambda found: {"tokens": found.predictions.tolist()},
)
trainer.train()
metrics = trainer.evaluate(**options)
result = {"length": length, "tokens": metrics["eval_tokens"], "loss": metrics["eval_loss"]}
