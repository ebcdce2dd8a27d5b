"""
Ascend NPUs
===========

The same program trains on an NVIDIA GPU, on an Ascend NPU and on the CPU. This page explains what
differs on an NPU, with a program that takes whichever accelerator there is; where this page was
made, that was the CPU.
"""

import torch

import swapkit

# %%
# Where does it run?
# ------------------
#
# On an NPU, torch_npu comes with torch: ``pip install swapkit[npu]``, and CANN's runtime library.
# Then torch reports the NPU as its accelerator, and ``install`` without an argument takes it. A
# process can change its allocator once, before torch uses the NPU, so this is the program's first
# line.

swapkit.install()
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
print(device)

# %%
# The loop
# --------
#
# Nothing in it knows about swapkit. On an NPU, operators wait in a queue on the host before they
# are launched; swapkit follows that queue, so a copy never overtakes the operator that it belongs
# to.

torch.manual_seed(0)
blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)]
model = torch.nn.Sequential(*blocks).to(device)
optimizer = torch.optim.AdamW(model.parameters())
with swapkit.budget("20MiB", model, optimizer) as session:
    for _ in range(8):
        model(torch.randn(1024, 256, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(session)
assert session.stats.peak_bytes <= session.stats.budget_bytes

# %%
# Statistics
# ----------
#
# ``torch.npu.memory_allocated`` and its neighbours report swapkit's pool, and so does
# ``swapkit.memory_stats`` on every device. ``num_settles`` counts how often the pool had to wait
# for torch_npu's queue.

stats = swapkit.memory_stats()
print(stats["reserved_bytes.all.peak"], stats["num_rescues"])

# %%
# Settings
# --------
#
# ``PYTORCH_NPU_ALLOC_CONF`` is read, with all of torch_npu's keys. What memory HCCL needs for its
# buffers, it takes from the device itself: ``swapkit.install(reserve="2GiB")`` leaves it there.
# Flags of MindSpeed and documents of MindFormers have a tutorial of their own.
#
# What is tested on which machine is said on the page about Ascend in the guides.
