"""Addresses for the lifetimes of a planned step, known in advance."""
