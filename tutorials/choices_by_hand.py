"""
Choices by hand
===============

A session decides by itself. Where you know better, you say so: keep, swap or recompute a part of
the model. Plans follow such choices, and without a budget they work alone. Results have the same
bits.
"""

import torch

import swapkit

swapkit.install(device="cpu")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(128)
        self.up = torch.nn.Linear(128, 512)
        self.down = torch.nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def run(model):
    """Return the gradients of a step, and the most memory that the step took."""
    model.zero_grad()
    swapkit.reset_peak_memory_stats()
    torch.manual_seed(1)
    model(torch.randn(1024, 128)).backward()
    peak = swapkit.memory_stats()["allocated_bytes.all.peak"]
    return [parameter.grad.clone() for parameter in model.parameters()], peak


MIB = 1 << 20
torch.manual_seed(0)
model = Model()
plain, plain_peak = run(model)
print(f"no choices: {plain_peak / MIB:.0f} MiB")

# %%
# Swap
# ----
#
# ``offload`` sends what a part saves to the host, and brings it back for backward. A pattern
# names submodules by their whole path. Memory is free once its copy is done, and without a budget
# nothing waits for copies: on a slow link the peak hardly falls. With ``prefetch=1`` the step
# waits, and memory is free after three operators.

swapkit.offload(model, r"layers\.[0-3]", prefetch=1)
gradients, peak = run(model)
print(f"swap four layers: {peak / MIB:.0f} MiB")
assert peak < plain_peak
assert all(torch.equal(one, other) for one, other in zip(gradients, plain, strict=True))

# %%
# Recompute
# ---------
#
# ``checkpoint`` keeps only the inputs of a part, and computes the rest again in backward.

swapkit.choices(model).remove()
swapkit.checkpoint(model, r"layers\.\d+")
gradients, peak = run(model)
print(f"recompute all layers: {peak / MIB:.0f} MiB")
assert peak < plain_peak
assert all(torch.equal(one, other) for one, other in zip(gradients, plain, strict=True))

# %%
# Which choice holds
# ------------------
#
# Several choices may meet at one part. The table shows each with its source, whether it holds,
# and why not.

swapkit.choices(model).remove()
swapkit.checkpoint(model, r"layers\.[01]")
swapkit.offload(model, r"layers\.[123]", prefetch=4)
swapkit.keep(model.layers[3].down)
print(swapkit.choices(model))

# %%
# As a decorator and as a scope
# -----------------------------
#
# Classes, instances and functions can be decorated; ``offload`` and ``keep`` are scopes, too.


@swapkit.checkpoint
def activation(x):
    return torch.nn.functional.gelu(x).square()


with swapkit.offload(min_bytes="64KiB"):
    loss = activation(torch.randn(512, 512, requires_grad=True)).sum()
loss.backward()
print(swapkit.choices(activation))

# %%
# Under a budget
# --------------
#
# The session plans around the choices: what is kept by hand is never moved, what is recomputed by
# hand is not part of the plan.

optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with swapkit.budget(int(0.7 * plain_peak), model, optimizer) as session:
    for _ in range(6):
        model(torch.randn(1024, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()
print(session)
assert session.stats.peak_bytes <= session.stats.budget_bytes
