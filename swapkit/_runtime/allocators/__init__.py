"""The allocators below torch, their planned addresses, and texts for out of memory.

`installation` puts our pool below torch: on the CPU as its allocator
(`shim/cpp/memory/allocator.cpp`), on an accelerator as its pluggable allocator, in the forms that
torch expects for CUDA and Ascend, with the statistics that torch lacks there. `torch_allocator`
leaves torch's own allocator in place.

Planned addresses: `pool_layout` waits for two steps in a row whose blocks live alike, lets
`planning/layout` place those lives on a thread beside the training, gives cached memory back, and
hands the layout to the pool. The layout goes when the session plans anew, or after three steps in a
row that miss it or map more than before; the next one waits longer, and leaves room for the longest
lives seen. Memory that lasts over steps has ranges of its own while lives are noted. Without a
session, `lifetimes` ends steps with the optimizers of the process, and the pool asks autograd for
the phase (`shim/cpp/running/backward.cpp`). On a CPU memory has one address at a time: without a
layout the pool moves pages (`mremap`), again in each step.
"""
