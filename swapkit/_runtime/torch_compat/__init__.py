"""Torch's modes, compiler, threads and streams. `internals`: the door to its private names.

Names that are given as strings, which this torch may lack, are in `operators/settings.py`,
`saved/existing_graphs.py` and `allocators/torch_allocator.py`. The stacks of other threads are read
in one go (`shim/cpp/running/thread_stacks.cpp`): in Python the collector could free a frame
meanwhile.
"""
