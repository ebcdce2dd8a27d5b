"""Saved tensors of one device: hooks, transfers, eviction.

Scopes that swap release groups when their transfers are done; with `prefetch=n` 3n operators later,
and bring them back n operators before their first use in the previous pass. A budget copies early
while memory fills up (*write-behind*). A rescue first takes groups that leave anyway, then drops
clean ones; as a last resort it gives hooks to graphs recorded without any (`existing_graphs`).

Autograd saves a leaf itself, so code that assigns a leaf's `.data`, or reads its attributes, means
the saved tensor. A leaf that does not move is kept itself; a handle in a group holds its leaf
weakly and returns it for as long as the program does. Regions read weights anew
(`shim/cpp/saved/weights.hpp`). Torch makes a new tensor for each saved leaf that requires grad,
whatever hooks return. Torch counts changes in place of a wrapper only, so the handles inside watch
its version. A tensor that a collective may still be writing to is packed at the first event after
the program has waited for it.
"""
