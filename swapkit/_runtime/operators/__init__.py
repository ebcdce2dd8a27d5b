"""Names and effects of operators, and the settings and random states that their bits depend on.

`effects` decides for choices and plans alike which operators may run twice: none that communicates
with other ranks, keeps state of its own or changes its arguments. A batch norm in training runs
again with scratch memory for its running statistics. Checksums show which results an unseen kernel
overwrites: while a step is recorded, and in the first run of a captured region.
"""
