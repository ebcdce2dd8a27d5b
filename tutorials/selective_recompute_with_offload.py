"""
Selective recompute with offload
================================

Recomputing a whole block costs a third of its time. Most of that goes into a few operators:
matrix products and attention. *Selective* recomputation keeps their results, on the device or on
the host, and recomputes only what is cheap.
"""

import torch

import swapkit

swapkit.install(device="cpu")


class Attention(torch.nn.Module):
    def __init__(self, width=128, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):
        rows, words, width = x.shape
        qkv = self.qkv(self.norm(x)).view(rows, words, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(rows, words, width))


MIB = 1 << 20


def measure(name, choose):
    """Train one step with a choice; print its memory, and return its gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Attention() for _ in range(4)])
    choose(model)
    x = torch.randn(4, 128, 128)
    for _ in range(2):  # a choice checks itself in the first run of a part
        model.zero_grad()
        swapkit.reset_peak_memory_stats()
        before = swapkit.memory_stats()["allocated_bytes.all.current"]
        loss = model(x).square().mean()
        held = swapkit.memory_stats()["allocated_bytes.all.current"] - before
        loss.backward()
    print(f"{name:38} {held / MIB:5.1f} MiB between forward and backward")
    return held, [parameter.grad for parameter in model.parameters()]


# %%
# Nothing, everything, and in between
# -----------------------------------
#
# ``save=`` names operators whose results stay on the device; ``offload=`` those whose results go
# to the host. A name is torch's (``"mm"``, ``"aten.mm.default"``) or a word for a group of
# operators, such as ``"matmul"`` or ``"flash_attention"``.

plain, expected = measure("plain", lambda model: model)
ways = {
    "recompute all": lambda model: swapkit.checkpoint(model, r"\d+"),
    "recompute, keep matrix products": lambda model: swapkit.checkpoint(
        model, r"\d+", save=["matmul"]
    ),
    "recompute, matrix products to the host": lambda model: swapkit.checkpoint(
        model, r"\d+", offload=["matmul"]
    ),
    "recompute, attention to the host": lambda model: swapkit.checkpoint(
        model, r"\d+", offload=["attention"]
    ),
}
held = {}
for name, choose in ways.items():
    held[name], gradients = measure(name, choose)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))

assert held["recompute all"] < held["recompute, keep matrix products"] < plain
assert held["recompute, matrix products to the host"] < held["recompute, keep matrix products"]

# %%
# A wrong name raises an error that suggests similar ones:

try:
    swapkit.checkpoint(save=["flash_atention"])
except swapkit.SwapkitError as error:
    print(error)

# %%
# A policy of torch
# -----------------
#
# ``policy=`` takes a function as torch's selective checkpointing does. ``MUST_CPU_OFFLOAD``,
# which torch itself silently recomputes, moves the result to the host.

from torch.utils.checkpoint import CheckpointPolicy


def policy(context, operator, *args, **kwargs):
    if operator is torch.ops.aten.addmm.default:
        return CheckpointPolicy.MUST_CPU_OFFLOAD
    return CheckpointPolicy.PREFER_RECOMPUTE


_, gradients = measure(
    "by a policy of torch", lambda model: swapkit.checkpoint(model, r"\d+", policy=policy)
)
assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))

# %%
# Is it the same?
# ---------------
#
# ``check_values=True`` compares everything that is recomputed with its first result, bit by bit,
# and names the first operator that differs. Here a function that is not the same twice:

scale = [1.0]


@swapkit.checkpoint(check_values=True)
def drifting(x):
    scale[0] += 1
    return (x * scale[0]).exp()


try:
    drifting(torch.ones(64, 64, requires_grad=True)).sum().backward()
    raise AssertionError("the difference was not seen")
except swapkit.errors.RecomputeMismatch as error:
    print(error)
