"""A loop under Lightning's Fabric: ``torchrun --nproc-per-node 2 fabric.py FOLDER``."""

import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder = sys.argv[1]
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 29), nn.Tanh(), nn.Linear(29, 7))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = fabric.setup(model, optimizer)
draws = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(160, 13, generator=draws), torch.randn(160, 7, generator=draws))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2))
state = {"model": model, "optimizer": optimizer, "step": 0}
if len(sys.argv) > 2:
    fabric.load(sys.argv[2], state)
losses, norms = [], []
for step, (x, y) in enumerate(loader):
    if step < 2 * state["step"]:
        continue
    accumulates = step % 2 == 0
    with fabric.no_backward_sync(model, enabled=accumulates):
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss / 2)
    losses.append(fabric.all_reduce(loss.detach()).item())
    if not accumulates:
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] == 10:
            fabric.save(f"{folder}/ten.ckpt", state)
result = {"losses": losses, "norms": norms}
