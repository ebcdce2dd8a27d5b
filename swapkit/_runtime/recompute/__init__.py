"""Recomputation in backward: regions, and the results of single operators."""
