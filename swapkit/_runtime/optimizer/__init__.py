"""Optimizer states that stay on the host between steps, and come to the device chunk by chunk."""
