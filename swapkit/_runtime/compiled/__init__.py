"""Saved tensors of compiled graphs: packed and unpacked inside of the graphs.

A compiled region is one node of autograd. Torch packs all that it saves when its forward returns,
and unpacks all of it when its backward begins: hooks alone could move nothing while it runs. So the
hooks move into the graphs. After torch's own partitioner has split a joint graph, `graphs.py` puts
an operator `pack_saved` behind the last use of each saved storage in the forward, and
`unpack_saved` before its first use in the backward (`shim/cpp/saved/late_hooks.cpp`). Autograd
keeps handles without memory instead. Sessions and scopes see the events of eager code, and need
nothing else.

Inductor gets the forward as torch has split it, with the names of the outputs to pack: it lowers
the graph, chooses strides and fuses kernels as without us, and packs then. Other compilers get the
operators in the graph.

Only tensors that a graph makes itself and does not return are packed there, if they are not small:
the operator takes their memory away. Others, such as inputs, are packed by autograd as before. No
hook sees the handles, of graphs inside of graphs neither.

`registration.py` waits until torch's compilers are imported; `partitioner.py` is what they call.
`torch_compat/compilers.py` has the private names.
"""

NAMESPACE = "swapkit"  # of the operators in the graphs
