"""Special policies: thresholds, stages, alike layers, lower budgets."""
