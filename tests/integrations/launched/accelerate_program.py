"""An unchanged script of accelerate; run by `test_launchers.py`, in a budget and without."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from tests.integrations.launched.digests import tell_digest

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
blocks = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(6)]
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.AdamW(model.parameters())
rows = torch.randn(2048, 128, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=1024)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(16):
    for (batch,) in loader:
        accelerator.backward((model(batch) - batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
tell_digest(accelerator.process_index, accelerator.unwrap_model(model))
accelerator.end_training()
