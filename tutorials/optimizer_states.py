"""
Optimizer states on the host
============================

AdamW keeps two numbers for each parameter, and needs them only during its step. Between steps
they can be on the host.
"""

import torch

import swapkit

swapkit.install(device="cpu")
MIB = 1 << 20


def train(choose):
    """Train some steps; return the parameters, and the memory in use between two steps."""
    before = swapkit.memory_stats()["allocated_bytes.all.current"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    optimizer = choose(torch.optim.AdamW(model.parameters(), lr=1e-3))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    for _ in range(4):
        model(torch.randn(32, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    between = swapkit.memory_stats()["allocated_bytes.all.current"] - before
    return model, optimizer, between


plain, _, plain_bytes = train(lambda optimizer: optimizer)
print(f"plain: {plain_bytes / MIB:.1f} MiB between two steps")

# %%
# One call
# --------
#
# ``swapkit.offload`` returns the same optimizer. During a step its states travel in chunks: while
# one is updated, the next comes in and the last one goes out.

model, optimizer, kept_bytes = train(swapkit.offload)
parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
print(f"offloaded: {kept_bytes / MIB:.1f} MiB; the parameters are {parameters_bytes / MIB:.1f} MiB")
assert kept_bytes < plain_bytes - 1.9 * parameters_bytes
assert all(map(torch.equal, model.parameters(), plain.parameters()))

# %%
# Checkpoints
# -----------
#
# A state on the host is an ordinary CPU tensor. ``state_dict``, ``torch.save`` and
# ``load_state_dict`` need nothing.

state = optimizer.state_dict()["state"][0]
print({name: tuple(tensor.shape) for name, tensor in state.items()})
optimizer.load_state_dict(optimizer.state_dict())

# %%
# Together with a budget
# ----------------------
#
# What the states leave free is room for activations. A budget below parameters, gradients and
# states together is possible now. (``"rescue"`` makes no plan: there is hardly an activation to
# plan for.)

del state, plain, _
limit = int(2.6 * parameters_bytes)  # parameters and gradients take two of these
with swapkit.budget(limit, model, optimizer, policy="rescue") as session:
    for _ in range(4):
        model(torch.randn(32, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(session)
assert session.stats.peak_bytes <= limit < 4 * parameters_bytes
