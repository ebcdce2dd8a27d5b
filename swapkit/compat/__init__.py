"""Other systems' names for what swapkit has; each module is used only if it is imported."""
