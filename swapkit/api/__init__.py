"""What users call: thin functions and context managers over `_runtime`."""
