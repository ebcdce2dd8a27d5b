"""The C++ module between the native core and torch: build, loading, types.

It is compiled on first use against the installed torch: the allocator, the operator clock, and all
on the path of a saved tensor. It calls Python (`saved/swapper.py`) only for policy. In `cpp/`, by
concept: `memory/` (allocators, streams, storages), `saved/` (groups, hooks), `moves/` (transfers,
prefetch, plans), `recompute/` (recipes, regions), `running/` (the operator clock, threads),
`python/` (the module).
"""
