"""A virtual GPU: torch's own CUDA operators take time on it and compute nothing."""
