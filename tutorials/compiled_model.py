"""
A compiled model
================

``torch.compile`` makes one node of autograd of a model. swapkit moves its saved tensors while the
compiled code runs, so the model trains within a budget that is far below what it saves.
"""

import torch

import swapkit

swapkit.install(device="cpu")

# %%
# The model
# ---------
#
# Compiled as a whole. The backend ``aot_eager`` needs no compiler of C++; ``torch.compile(model)``
# alone uses inductor, and everything below is the same.


class Block(torch.nn.Module):
    """A feed-forward layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(256)
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fed: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + fed


torch.manual_seed(0)
model = torch.nn.Sequential(*[Block() for _ in range(6)])
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
x = torch.randn(1024, 256)


def step() -> float:
    """Train one step; return its loss."""
    loss: torch.Tensor = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


# %%
# Without a budget
# ----------------

step()
swapkit.reset_peak_memory_stats()
step()
between = swapkit.memory_stats()["allocated_bytes.all.current"]
peak = swapkit.memory_stats()["allocated_bytes.all.peak"]
print(f"{(peak - between) / 2**20:.1f} MiB beside parameters and optimizer states")

# %%
# With 40 % of that
# -----------------
#
# Nothing is compiled again, and the loop is the same.

with swapkit.budget(between + (peak - between) * 2 // 5, model, optimizer) as session:
    losses = [step() for _ in range(12)]
print(session)
assert session.stats.peak_bytes <= session.stats.budget_bytes

# %%
# What moves
# ----------
#
# The line of each compiled region says how much moves while it runs, and what does not.

print(next(line for line in session.explain().splitlines() if "compiled region" in line))
