"""The demo: one language model trained with and without a memory budget.

`swapkit demo` trains a small byte-level language model on the sources of the Python
standard library. Several runs, each in its own process, train at the same time and are compared:
without a limit, with every block recomputed, and within budgets.
"""
