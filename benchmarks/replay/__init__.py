"""The requests of a step through several allocators: `python -m benchmarks.replay`."""
