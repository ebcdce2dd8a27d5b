"""Recording one step as a trace. `tables`: its operators, storages, the pool's blocks, times.

The pool reports when memory comes and goes, so that what a trace has at an operator is what the
pool had in use: a storage that loses its memory and lives on, as those of FSDP2's gathered weights
do, has one life each time, and memory that no operator was seen to take has one, too. Torch has no
hook for waits for other ranks and for the jobs of a pipeline: during the recorded step, methods of
its classes are replaced, and a wait is an operator without operands. A recorder listens to its own
thread, and to autograd's threads that work for it.
"""
