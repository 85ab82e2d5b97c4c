"""A transformer under FSDP2: ``torchrun --nproc-per-node 2 fsdp.py FOLDER [DTYPE] [CHECKPOINT]``."""

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(131, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 44, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, 131)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


folder, dtype = sys.argv[1], getattr(torch, sys.argv[2]) if sys.argv[2:] else None
torch.manual_seed(0)
model = Transformer()
policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
for layer in model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

rank, start = torch.distributed.get_rank(), 0
tokens = torch.randint(131, (20, 2, 4, 12), generator=torch.Generator().manual_seed(1))
if sys.argv[3:]:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    dcp.load(state, checkpoint_id=sys.argv[3])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    start = 10
losses = []
for step in range(start, 20):
    if step == 10 and start == 0:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=f"{folder}/ten")
    mine = tokens[step, rank]
    loss = nn.functional.cross_entropy(model(mine).flatten(0, 1).float(), mine.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
result = {"losses": losses}
