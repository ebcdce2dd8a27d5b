// pack_hooks.hpp - the hooks of a scope, as what runs below them sees them.
#ifndef SWAPKIT_PACK_HOOKS_HPP
#define SWAPKIT_PACK_HOOKS_HPP

#include "moves/mover.hpp"

namespace swapkit {

struct Region;

struct Packer {
    PyObject ob_base;
    Mover *mover; // owned
    Terms terms;
    PyObject *observer;  // owned: who is told of every event; null or None: nobody
    char follows;        // its calls are the events of the mover's follower
    char is_inert;       // its session has ended: everything that is saved is kept
    char has_saved_late; // something was saved in a backward pass
    char rests;     // nothing is saved in backward passes: they go without it (`saved/hooks.py`)
    char stands_by; // every operator that can be repeated is captured (`standby.hpp`)

    bool is_following() const;
};

// The hooks that what this thread saves meets first, if a scope's are these; borrowed. Null: there
// are none, or others.
Packer *innermost_packer();

struct Joined {
    Ref<Group> group; // null without an exception: the tensor stays where it is
    bool is_new;
};
// Let a tensor that is saved join the group of its storage. The lock is held.
Joined join_group(Mover *mover, c10::TensorImpl *impl, Key key, Span span, const Terms &terms);

// Who captures a run of an operator.
enum class Captor : std::uint8_t { plan, standby, region, user };

// How the operands of what is captured are kept.
struct Keeping {
    Mover *mover; // both borrowed
    const Terms *terms;
    Captor captor;
    Region *region; // null: it is no region's
};

// What stands for an operand of what is computed again: in its storage's group, as if autograd had
// saved it. None without an exception: it has no plain memory; or, for hooks that stand by, nobody
// else would keep it. The lock is held.
Ref<> keep_operand(const Keeping &keeping, c10::TensorImpl *tensor);
// What stands for memory of a tensor's form, whatever its bytes.
Ref<> scratch_of(c10::TensorImpl *tensor);

// Who moves the tensors of a device; null: nobody, or an exception is set.
Ref<Mover> mover_for(Mover *mover, c10::Device device);

// The unpack hook of a `Packer`.
PyObject *packer_use(PyObject *packer, PyObject *packed);
// The hooks whose pack hook this is, borrowed; null: it is no scope's.
Packer *packer_of(PyObject *pack);

// Who is told where somebody else than its hooks gives out what was saved, borrowed; null: nobody.
inline Packer *teller_of(PyObject *packed) {
    return Py_TYPE(packed) == &handle_type ? reinterpret_cast<Handle *>(packed)->teller : nullptr;
}

// Let a handle have its bytes, whatever that takes; the lock is held. False: an exception is set.
bool handle_bytes(Handle *handle);

} // namespace swapkit

#endif
