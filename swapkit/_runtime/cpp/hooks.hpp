// hooks.hpp - the hooks of a scope, as what runs below them sees them.
#ifndef SWAPKIT_HOOKS_HPP
#define SWAPKIT_HOOKS_HPP

#include "mover.hpp"

namespace swapkit {

struct Packer {
    PyObject ob_base;
    Mover *mover; // owned
    Terms terms;
    PyObject *observer; // owned: who is told of every event; null or None: nobody
    char follows;       // its calls are the events of the mover's follower
    char is_inert;      // its session has ended: everything that is saved is kept

    bool is_following() const;
};

// The hooks that what this thread saves meets first, if a scope's are these; borrowed. Null: there
// are none, or others.
Packer *innermost_packer();

// What stands for an operand of what is computed again: in its storage's group, as if autograd had
// saved it. None without an exception: it has no plain memory. The lock is held.
Ref<> keep_operand(const Packer *packer, c10::TensorImpl *tensor);
// What stands for memory of a tensor's form, whatever its bytes.
Ref<> scratch_of(c10::TensorImpl *tensor);

// Let a handle have its bytes, whatever that takes; the lock is held. False: an exception is set.
bool handle_bytes(Handle *handle);

} // namespace swapkit

#endif
