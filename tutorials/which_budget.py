"""
Which budget?
=============

A budget can be anything between what plain training takes and the smallest one with which the
step can run at all. ``swapkit.estimate`` finds both from one recorded step, and what the budgets
between them cost.
"""

import torch

import swapkit

swapkit.install(device="cpu")
MIB = 1 << 20


class Block(torch.nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = torch.nn.Sequential(*[Block() for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())


def step(batch_size=512):
    loss = model(torch.randn(batch_size, 128)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# %%
# The range
# ---------
#
# The step runs twice; afterwards model and optimizer are as before, bit for bit. On the ``meta``
# device nothing needs to fit: see the tutorial about planning without the machine.

before = [parameter.clone() for parameter in model.parameters()]
found = swapkit.estimate(step, model, optimizer)
assert all(map(torch.equal, model.parameters(), before))
print(found)

# %%
# The values are attributes, too. The *floor* stays on the device whatever the budget: parameters,
# gradients, the optimizer's states. Between plain and smallest lies what swapping and recomputing
# can save.

print(f"plain     {found.plain_bytes / MIB:5.1f} MiB")
print(f"smallest  {found.smallest_budget_bytes / MIB:5.1f} MiB")
print(f"floor     {found.floor_bytes / MIB:5.1f} MiB")
assert found.floor_bytes < found.smallest_budget_bytes < found.plain_bytes

# %%
# Is it true?
# -----------
#
# With a few per cent of room the smallest budget trains, and the session reserves no more:

del before
budget = int(1.04 * found.smallest_budget_bytes)
with swapkit.budget(budget, model, optimizer) as session:
    for _ in range(8):
        step()
print(session)
assert session.stats.peak_bytes <= budget

# %%
# The largest batch
# -----------------
#
# With two sizes recorded, the estimate tells for a budget how large the batch can be. Memory
# grows evenly with the batch, so two sizes are enough.

limit = int(0.9 * found.plain_bytes)
larger = swapkit.estimate(step, model, optimizer, budget=limit, batch_sizes=(256, 512))
print(f"within {limit / MIB:.1f} MiB: up to {larger.largest_batch} samples; plain training: 512")
assert larger.largest_batch > 512

with swapkit.budget(limit, model, optimizer) as session:
    for _ in range(2):
        step(larger.largest_batch)
print(session)
assert session.stats.peak_bytes <= limit

# %%
# Or whatever is free
# -------------------
#
# ``swapkit.budget("auto")`` takes what is free on the device when the session begins, less a
# reserve.
