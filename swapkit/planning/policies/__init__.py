"""Policies that plan in ways of their own: thresholds, stages, alike layers, lower budgets."""
