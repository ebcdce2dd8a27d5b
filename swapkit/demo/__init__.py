"""The demonstration: one language model trained with and without a memory budget.

`python -m swapkit demo` trains a small byte-level language model on the Python standard library's
own sources, several times at once, each run in a process of its own, and compares them: without a
limit, with every block recomputed, and within budgets.
"""
