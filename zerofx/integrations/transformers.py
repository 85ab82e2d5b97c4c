"""``Trainer`` of transformers, with zerofx in the place of DistributedDataParallel.

::

    from zerofx.integrations.transformers import Trainer      # was: from transformers import Trainer

    trainer = Trainer(model=model, args=args, ...)            # stage 3; or zerofx={"stage": 2, ...}

For a trainer of somebody else's, put `Sharded` in front: ``class MyTrainer(Sharded, SFTTrainer): pass``.

A checkpoint of its, beside what every Trainer writes::

    checkpoint-500/
        model.safetensors ...     whole weights, by rank 0: for from_pretrained
        zerofx/                   weights and optimizer as shards, for resuming: any stage, any number of ranks
        scheduler.pt, rng_state_0.pth, trainer_state.json      as ever
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from zerofx.checkpoint import full_state_dict, latest, load, save
from zerofx.integrations.accelerate import FOLDER, Accelerator
from zerofx.integrations.peft import adapter_state_dict, checkpointed, is_adapted
from zerofx.integrations.states import checked_options, is_sharded, load_optimizer_state, stage_of, unwrapped_optimizer

_REFUSED = {
    "deepspeed": "zerofx is what shards the model: leave deepspeed= out, and choose a stage with zerofx={'stage': 3}",
    "fsdp": "zerofx is what shards the model: leave fsdp= out, and choose a stage with zerofx={'stage': 3}",
    "torch_compile": "zerofx compiles the model itself: leave torch_compile= and torch_compile_backend= out",
    "parallelism_config": "zerofx shards over one dimension of ranks, data parallelism: leave it out",
    "auto_find_batch_size": "a rank that is out of memory leaves the others inside of a collective: set a batch size",
    "fp16_full_eval": "sharded weights are not converted: evaluate with the precision of training (bf16=, fp16=)",
    "bf16_full_eval": "sharded weights are not converted: evaluate with the precision of training (bf16=, fp16=)",
}
"""Arguments that cannot be met, and what to do."""


class Sharded:
    """What makes a Trainer shard its model with zerofx. To stand before a class of ``transformers.Trainer``.

    In one process that is not distributed it changes nothing: there is nothing to shard.

    Args:
        zerofx: options of ``zerofx.compile``, such as ``{"stage": 2}``.

    Raises:
        ValueError: arguments that do not go together with zerofx.
    """

    def __init__(self, *args: Any, zerofx: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._zerofx_options = checked_options(zerofx, "Trainer(zerofx=...)", loads=True)
        self._zerofx_resumed: str | None = None
        arguments = kwargs.get("args", next((a for a in args if isinstance(a, transformers.TrainingArguments)), None))
        for name, way_out in _REFUSED.items():
            value = getattr(arguments, name, None)
            if value:
                raise ValueError(f"TrainingArguments({name}={value!r}): expected it unset with zerofx. {way_out}.")
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self: Any) -> None:
        """The accelerator that the Trainer makes becomes zerofx's."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = Accelerator.of(self.accelerator, self._zerofx_options)

    def _save(self: Any, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Whole weights come to rank 0, which writes them; every rank is called."""
        if state_dict is None and is_sharded(self.model):
            state_dict = adapter_state_dict(self.model) if is_adapted(self.model) else full_state_dict(self.model)
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        """Weights and optimizer go to a folder of shards; the scheduler to its file."""
        optimizer = self.optimizer
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        save(Path(output_dir) / FOLDER, checkpointed(self.model), unwrapped_optimizer(optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights that are there as shards are read when the model is sharded, not before and whole."""
        if self.accelerator.use_distributed and latest(Path(resume_from_checkpoint) / FOLDER) is not None:
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """Weights, optimizer and scheduler; of a plain Trainer's checkpoint the whole state of its optimizer."""
        if checkpoint is None or not is_sharded(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        folder, whole = Path(checkpoint) / FOLDER, Path(checkpoint) / "optimizer.pt"
        if latest(folder) is not None:
            load(folder, checkpointed(self.model), unwrapped_optimizer(self.optimizer), rng=False)
        elif whole.exists():
            load_optimizer_state(
                unwrapped_optimizer(self.optimizer), torch.load(whole, map_location="cpu", weights_only=True)
            )
        scheduler = Path(checkpoint) / "scheduler.pt"
        if scheduler.exists():
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


class Trainer(Sharded, transformers.Trainer):
    """``transformers.Trainer`` on sharded weights; see `Sharded`."""


class Seq2SeqTrainer(Sharded, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` on sharded weights; see `Sharded`."""

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **gen_kwargs: Any
    ) -> Any:
        """In stage 3 every forward is a collective: a rank that has its text goes on until all have."""
        if stage_of(model) == 3:
            gen_kwargs = gen_kwargs or dict(getattr(self, "_gen_kwargs", {}))  # those of ``evaluate``
            gen_kwargs.setdefault("synced_gpus", True)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
