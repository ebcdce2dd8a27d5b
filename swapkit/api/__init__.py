"""The public API: thin functions and context managers over `_runtime`."""
