"""
A policy of your own
====================

A policy is an object with a method ``plan(trace, machine)``. It gets one recorded step and what
the machine can do, and returns a decision for each storage that is to move. swapkit checks the
plan, simulates it, and follows it in training; the budget and the bits are safe whatever the
policy says.
"""

import torch

import swapkit
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.simulation.lowering import lower

swapkit.install(device="cpu")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(128)
        self.up = torch.nn.Linear(128, 512)
        self.down = torch.nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = torch.nn.Sequential(*[Block() for _ in range(6)])
optimizer = torch.optim.AdamW(model.parameters())


def step():
    loss = model(torch.randn(512, 128)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# %%
# What a policy sees
# ------------------
#
# A trace lists the operators in their order with their times, and the storages with their
# lifetimes. ``lower`` picks the storages that can move at all: those that autograd saved, and
# that nothing needs between forward and backward.

step()  # the first step makes the optimizer's states
trace = swapkit.record(step, model, optimizer)
idle = lower(trace).item_storages.tolist()
print(trace)
print(len(idle), "storages are idle between forward and backward, such as")
for number in idle[:3]:
    storage = trace.storages[number]
    made_by = trace.operators[storage.birth]
    print(f"  {storage.module:8} {storage.nbytes:>8} bytes, by {made_by.name}")

# %%
# The policy
# ----------
#
# This one recomputes what cheap operators made, because running them again costs little, and
# swaps other storages from the largest on, until the step fits. Whether it fits, the simulator
# says: a recomputed result needs memory again while it is used. Some results cannot be recomputed
# from what is kept; ``lower`` knows which.

CHEAP = ("aten.native_layer_norm.default", "aten.gelu.default", "aten.add.Tensor")


class CheapFirst:
    """Recompute results of cheap operators first, then swap from the largest storage on."""

    def plan(self, trace, machine):
        problem = lower(trace)
        possible = dict(
            zip(problem.item_storages.tolist(), problem.can_recompute.tolist(), strict=True)
        )

        def is_cheap(number):
            name = trace.operators[trace.storages[number].birth].name
            return possible[number] and name in CHEAP

        def in_order(number):
            return not is_cheap(number), -trace.storages[number].nbytes

        decisions = []
        for number in sorted(possible, key=in_order):
            action = Action.RECOMPUTE if is_cheap(number) else Action.SWAP
            decisions.append(Decision(storage=number, action=action))
            plan = Plan(
                decisions=tuple(sorted(decisions, key=lambda each: each.storage)),
                budget_bytes=machine.budget_bytes,
                policy="cheap first",
                signature=trace.signature,
            )
            if fits(trace, plan, machine):
                break
        return plan


def fits(trace, plan, machine):
    try:
        swapkit.simulate(trace, plan, machine=machine)
    except swapkit.errors.InfeasibleBudget:
        return False
    return True


# %%
# Without training
# ----------------
#
# ``swapkit.plan`` takes a policy, and predicts what becomes of the step. The bound is the least
# time that any plan could reach; ``"auto"`` is usually close to it.

MIB = 1 << 20
budget = int(0.75 * trace.peak_bytes)
for policy in (CheapFirst(), "auto"):
    made = swapkit.plan(trace, budget, policy=policy)
    swapped, recomputed = made.count_moved()
    print(f"{made.policy:12} {swapped:2} swapped, {recomputed:2} recomputed,", end=" ")
    print(f"{made.prediction.peak_bytes / MIB:.1f} of {budget / MIB:.1f} MiB,", end=" ")
    print(f"{made.prediction.seconds / trace.seconds:.3f} times the step")
    assert made.prediction.peak_bytes <= budget

# %%
# In training
# -----------
#
# The session asks the policy after the recorded step. Times do not count there: your policy
# decides alone, on the training thread, between two steps.

with swapkit.budget(budget, model, optimizer, policy=CheapFirst()) as session:
    for _ in range(6):
        step()
print(session.plan)
print(session)
assert session.plan.policy == "cheap first"
assert session.stats.peak_bytes <= budget
