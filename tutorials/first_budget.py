"""
First budget
============

Plain training takes the memory that it takes, and fails if there is less. Under a budget you name
the bytes, and the same program trains within them, with the same losses to the last bit.
"""

# %%
# Install first
# -------------
#
# swapkit allocates the memory of tensors itself, so that it can promise a limit. Tensors made
# before ``install`` are outside the budget; so it comes before the model. Without an argument,
# ``install`` takes the accelerator that torch reports, and the CPU if there is none.

import torch

import swapkit

swapkit.install(device="cpu")


def make_training():
    """Return a model with its optimizer; the seed makes each call return the same ones."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(16)]
    model = torch.nn.Sequential(*blocks)
    return model, torch.optim.AdamW(model.parameters())


def train(model, optimizer, steps=40):
    """Train in the usual way; return the losses."""
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(1024, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# %%
# What does the loop need?
# ------------------------
#
# ``memory_stats`` has the names that torch uses for a GPU. *Reserved* bytes are what the device
# is asked for, so they decide whether a run fits.

MIB = 1 << 20
plain_losses = train(*make_training())
plain_bytes = swapkit.memory_stats()["reserved_bytes.all.peak"]
print(f"plain training reserves {plain_bytes / MIB:.1f} MiB")

# %%
# Less than that
# --------------
#
# Half of it. The loop does not change: it only runs inside ``with swapkit.budget(...)``.

limit = plain_bytes // 2
model, optimizer = make_training()
with swapkit.budget(limit, model, optimizer) as session:
    losses = train(model, optimizer)

stats = session.stats
print(f"budget {stats.budget_bytes / MIB:.1f} MiB, most reserved {stats.peak_bytes / MIB:.1f} MiB")
print(f"copied to the host and back: {stats.swapped_out_bytes / MIB:.0f} MiB")

# %%
# The budget held from the first step on, and the losses are the same numbers:

assert stats.peak_bytes <= stats.budget_bytes
assert losses == plain_losses
print(losses[0], losses[-1])

# %%
# What happened?
# --------------
#
# The session watched one step, planned which tensors to keep, to swap out and to recompute, tried
# the plans, and followed the fastest one that held. ``explain`` says what it decided for each
# place of the model that saves tensors, and why.

assert session.plan is not None
print(session.explain())

# %%
# Without the session, in the same memory
# ---------------------------------------
#
# ``install(limit=...)`` limits the whole process and moves nothing. It shows what would have
# happened: plain training does not fit. The error names the largest holders of memory, and
# training can go on afterwards.

del model, optimizer
swapkit.install(limit, device="cpu")
try:
    train(*make_training())
except torch.OutOfMemoryError as error:
    failure = str(error)
print(failure)
swapkit.uninstall()
