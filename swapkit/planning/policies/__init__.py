"""Policies as objects, for flags: thresholds, stages, alike layers, lower budgets."""
