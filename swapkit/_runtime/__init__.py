"""What runs under a training step: the installed pool, saved tensors, swapping, sessions."""
