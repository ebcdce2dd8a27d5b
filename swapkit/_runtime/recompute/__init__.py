"""Recomputed parts, as regions: backward runs their operators again, or the function.

A captured region keeps no storage of a captured result, and finds the recipe by storage and
version. A write to memory from outside is such a result, too. Results that escape the region are
ordinary tensors after its end. Other tensors that it saves, operands included, are events of a
session's step. The first run of a region keeps everything until its end, under a mode that looks
for writes it cannot see (`operators/evidence.py`). A region that would keep much, or memory that a
hidden kernel writes to, runs twice, with a warning, unless its first runs have changed what is
outside of it (`surroundings`): then it keeps what it saves. If a region cannot be captured (ranks,
policies, such a finding), it is torch's checkpoint with every tensor handed over as a saved tensor;
inside, a dispatch mode keeps selected results and handles collectives (`watchers`).
"""
