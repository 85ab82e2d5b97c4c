"""A loop under accelerate: ``torchrun --nproc-per-node 2 accelerator.py FOLDER [CHECKPOINT]``."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator

folder = sys.argv[1]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Dropout(0.1), nn.Linear(29, 29), nn.Tanh(), nn.Linear(29, 7))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)
draws = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(160, 13, generator=draws), torch.randn(160, 7, generator=draws))
loader = DataLoader(data, batch_size=2, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
torch.manual_seed(accelerator.process_index)
losses, norms, start = [], [], 0
if sys.argv[2:]:
    accelerator.load_state(sys.argv[2])
    start = 20
for step, (x, y) in enumerate(accelerator.skip_first_batches(loader, start)):
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(loss.item())
    if start == 0 and step == 19:
        accelerator.save_state(f"{folder}/ten")
accelerator.wait_for_everyone()
accelerator.save_model(model, f"{folder}/weights")
result = {"losses": losses, "norms": norms, "rate": scheduler.get_last_lr()}
