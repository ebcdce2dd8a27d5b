"""Choices for parts of a model, for layers, for operators, and how a part runs because of them.

- *swap, keep*: the part's `forward` runs in a scope, under a pair of hooks with that placement.
- *recompute*: it runs as a region (`recompute/`).
- *one operator inside*: while the module's own `forward` runs, its thread has a table of choices by
  operator. The results of such an operator are marked by storage and version, and the pack hooks
  swap them wherever they are saved; or the operator is captured, and its results are recomputed
  wherever they are saved, until the model's `forward` ends.
"""
