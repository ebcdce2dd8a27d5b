"""
From MindSpeed and MindFormers
==============================

A configuration document of MindFormers, and the memory flags of MindSpeed and Megatron, work on
ordinary torch models. Both make choices for parts of the model; the table shows which.
"""

import argparse

import torch

import swapkit

swapkit.install(device="cpu")


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            torch.nn.Linear(64, 64, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (each(x).unsqueeze(0) for each in (self.q_proj, self.k_proj, self.v_proj))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(y.squeeze(0))


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = torch.nn.Linear(64, 256, bias=False)
        self.up_proj = torch.nn.Linear(64, 256, bias=False)
        self.down_proj = torch.nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(64)
        self.self_attn = Attention()
        self.post_attention_layernorm = torch.nn.RMSNorm(64)
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


# %%
# A document of MindFormers
# -------------------------
#
# ``configure`` takes a file, a mapping or a dataclass. Layers are those of the largest
# ``ModuleList``. Parts have the usual names besides their own: ``feed_forward`` is ``mlp`` here.
# The last level may be an operator.

model = Model()
configuration = swapkit.configure(
    model,
    {
        "recompute_config": {
            "recompute": [1],
            "select_recompute": {r"feed_forward\.mul": [3], r"feed_forward\.silu": [3]},
        },
        "swap_config": {
            "swap": True,
            "op_swap": [{"op_name": "attention", "backward_prefetch": 4, "layers": [1, 2]}],
        },
    },
)
model(torch.randn(64, 64)).backward()
print(swapkit.choices(model))
assert not configuration.unmatched

# %%
# A mistake is an error that names the key, and nothing is changed. A pattern that matches nothing
# is logged, and listed:

configuration.remove()
try:
    swapkit.configure(
        model,
        {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [9]}]}},
    )
except swapkit.SwapkitError as error:
    print(type(error).__name__, "-", error)
assert len(swapkit.choices(model)) == 0

# %%
# Flags of MindSpeed
# ------------------
#
# ``add_arguments`` adds the flags to the script's parser, ``from_arguments`` reads them;
# ``choose`` makes the choices.

parser = swapkit.add_arguments(argparse.ArgumentParser())
flags = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
arguments = swapkit.from_arguments(parser.parse_args(flags.split()))
print(swapkit.choices(arguments.choose(model)))
swapkit.choices(model).remove()

# %%
# ``budget`` makes the choices and returns a session that plans as the flags say. Other arguments
# override the flags: here the limit, which would be all memory of the device.

arguments = swapkit.from_arguments(parser.parse_args(["--adaptive-memory-optimization"]))
optimizer = torch.optim.AdamW(model.parameters())
with arguments.budget(model, optimizer, limit="9MiB") as session:
    for _ in range(8):
        model(torch.randn(512, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
print(session)
assert session.stats.peak_bytes <= 9 << 20

# %%
# Import paths
# ------------
#
# ``import swapkit.compat.mindspeed`` makes MindSpeed's own import paths lead here, so code
# written for it runs unchanged.

import swapkit.compat.mindspeed

print(f"{len(swapkit.compat.mindspeed.MODULES)} modules of MindSpeed lead to swapkit")

from mindspeed.core.memory.adaptive_memory import adaptive_memory_function

assert adaptive_memory_function.adapt_mem_func_wrapper is swapkit.adapt_mem_func_wrapper
