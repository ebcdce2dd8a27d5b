"""Torch's modes, compiler, threads and streams. `internals`, `compilers`: its private names.

Names that are given as strings, which this torch may lack, are in other files here, in
`operators/settings.py`, `saved/existing_graphs.py`, `allocators/torch_allocator.py`,
`model/global_hooks.py` and `compiled/`. The stacks of other threads are read in one go
(`shim/cpp/running/thread_stacks.cpp`): in Python the collector could free a frame meanwhile.
"""
