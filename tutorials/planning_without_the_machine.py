"""
Planning without the machine
============================

How much memory would a step of a large model take, and what would a budget cost? A model on
torch's ``meta`` device has shapes and no memory. swapkit records its step as if on an H100 and
plans for it, on a laptop.
"""

import torch

import swapkit
from swapkit.ir.machines import Machine

GIB = 1 << 30


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = torch.nn.RMSNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.norm2 = torch.nn.RMSNorm(width)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        rows, words, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, words, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, words, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


# %%
# The step
# --------
#
# 3.2 billion parameters in bfloat16, eight sequences of 4,096 words. Nothing of it exists.

with torch.device("meta"):
    model = torch.nn.Sequential(*[Block(4096, 32) for _ in range(16)]).bfloat16()
    batch = torch.empty(8, 4096, 4096, dtype=torch.bfloat16)
print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.1f} billion parameters")


def step():
    model(batch).float().square().mean().backward()
    model.zero_grad()


trace = swapkit.record(step, model, hardware="H100")
print(trace)

# %%
# Budgets
# -------
#
# A machine is a budget and the links to the host. ``swapkit machine --json`` writes that of a
# real one; here it is PCIe 5, for a card of 80 GB. The last column compares with the least time
# that any plan could reach.

link = Machine(budget_bytes=70 * GIB, out_bytes_per_second=50e9, in_bytes_per_second=50e9)
print(f"plain: {trace.peak_bytes / GIB:.0f} GiB, {trace.seconds:.2f} s")
for gib in (70, 50, 35, 25):
    plan = swapkit.plan(trace, gib * GIB, machine=link)
    swapped, recomputed = plan.count_moved()
    found = plan.prediction
    print(
        f"{gib} GiB: {found.seconds / trace.seconds:.3f} times the step, "
        f"{swapped} swapped, {recomputed} recomputed, host {found.host_peak_bytes / GIB:.0f} GiB, "
        f"{found.seconds / plan.bound_seconds - 1:.1%} above the bound"
    )
    assert found.peak_bytes <= gib * GIB

# %%
# The smallest one
# ----------------

try:
    swapkit.plan(trace, 1 * GIB, machine=link)
except swapkit.errors.InfeasibleBudget as error:
    print(error)
    assert trace.peak_bytes > error.least_bytes > GIB

# %%
# A slower link
# -------------
#
# Over a tenth of the speed, copies are scarce, and plans recompute instead.

slow = Machine(budget_bytes=35 * GIB, out_bytes_per_second=5e9, in_bytes_per_second=5e9)
plan = swapkit.plan(trace, machine=slow)
print(plan)
schedule = swapkit.simulate(trace, plan, machine=slow)
print(f"{len(schedule.transfers)} transfers, {len(schedule.recomputations)} recomputations")

# %%
# ``session.save_plan`` and :func:`swapkit.plan` make plans of the same kind: a session on the
# machine can follow them from the first step on, if it does the same step.
