"""A ``LightningModule`` under Lightning's Trainer: ``torchrun --nproc-per-node 2 lightning_trainer.py FOLDER``."""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 29), nn.Tanh())
        self.head = nn.Linear(29, 7)
        self.losses, self.evaluations = [], []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.body(x)), y)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("validation", nn.functional.mse_loss(self.head(self.body(x)), y), sync_dist=True)

    def on_validation_epoch_end(self):
        self.evaluations.append(self.trainer.callback_metrics["validation"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


folder = sys.argv[1]
torch.manual_seed(0)
draws = torch.Generator().manual_seed(1)
data = [TensorDataset(torch.randn(n, 13, generator=draws), torch.randn(n, 7, generator=draws)) for n in (80, 12)]
module = Regression()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    callbacks=[ModelCheckpoint(folder, filename="{epoch}", monitor="validation", save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
loaders = [DataLoader(part, batch_size=2) for part in data]
trainer.fit(module, *loaders, ckpt_path=sys.argv[2] if len(sys.argv) > 2 else None)
best = trainer.checkpoint_callback.best_model_path
result = {
    "losses": module.losses,
    "evaluations": list(module.evaluations),
    "best": best.rsplit("/", 1)[1],
    "tested": trainer.validate(module, loaders[1], ckpt_path=best, verbose=False)[0]["validation"],
}
