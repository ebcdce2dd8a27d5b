// pack_hooks.hpp - the hooks of a scope, for the code below them.
#ifndef SWAPKIT_PACK_HOOKS_HPP
#define SWAPKIT_PACK_HOOKS_HPP

#include "moves/mover.hpp"
#include "running/operator_clock.hpp"

namespace swapkit {

struct Region;

struct Packer {
    PyObject ob_base;
    Mover *mover; // owned
    Terms terms;
    PyObject *observer;  // owned: notified of every event; null or None: there is none
    PyObject *awaited;   // owned: a list of what waits for collectives (`wrappers.hpp`)
    char follows;        // its calls are the events of the mover's follower
    char is_inert;       // its session has ended: every saved tensor is kept
    char has_saved_late; // a tensor was saved in a backward pass
    char skips_backward; // off the stack in backward passes (`saved/hooks.py`)
    char stands_by;      // every operator that can be repeated is captured (`standby.hpp`)

    bool is_following() const;
};

// Return whether hooks may move a tensor that is saved now.
bool packs_any(const Packer *packer);
// Return whether a tensor's memory may move, judging by the tensor. -1: an exception is set.
int may_move(Mover *mover, c10::TensorImpl *impl, const Terms &terms);

// Return the hooks that a tensor saved on this thread meets first, if they are a scope's; borrowed.
// Null: there are none, or they are not a scope's.
Packer *innermost_packer();

struct Joined {
    Ref<Group> group; // null without an exception: the tensor stays where it is
    bool is_new;
};
// Let a saved tensor join the group of its storage. The lock is held.
Joined join_group(Mover *mover, c10::TensorImpl *impl, Key key, Span span, const Terms &terms);

// The reason why the run of an operator is captured.
enum class Captor : std::uint8_t { plan, standby, region, user };

// How the operands of a captured operator are kept.
struct Keeping {
    Mover *mover; // both borrowed
    const Terms *terms;
    Captor captor;
    Region *region; // null: the operator is in no region
};

// Return the object that stands for an operand of a recomputed operator: in its storage's group, as
// if autograd had saved the operand. None without an exception: the operand has no plain memory;
// or, for hooks that stand by, nothing else would keep it alive. The lock is held.
Ref<> keep_operand(const Keeping &keeping, c10::TensorImpl *tensor);
// Return a sample of the bytes of an operand that a region has not made, to notice that other code
// has written to it without a change of version: numpy, or a file that is read into it. Only of
// host memory: a sample of device memory would wait for the device. 0: no sample. `is_refill`: more
// samples, of what a region copies into memory of others.
std::uint64_t sample_operand(PyObject *packed, c10::TensorImpl *tensor, bool is_refill);
// Likewise, of all bytes of a span.
std::uint64_t sample_span(const c10::StorageImpl *storage, Span span);
// Return a handle for memory with a tensor's layout; its bytes do not matter.
Ref<> scratch_of(c10::TensorImpl *tensor);

// Return whether a budget counts a storage, and freeing the storage does not need Python.
bool is_counted(const Mover *mover, const c10::StorageImpl &storage);
// Return whether a storage holds a module's parameter or buffer. -1: an exception is set.
int is_state(const Mover *mover, const c10::StorageImpl *storage);

// Call a method with operators hidden from modes.
template <Text name, class... Args> Ref<> call_unseen(PyObject *object, Args... args) {
    OwnOperators ours;
    return is_observed() ? call(links.hide, attribute<name>(object).get(), args...)
                         : call_method<name>(object, args...);
}

// Return the mover for the tensors of a device; null: there is none, or an exception is set.
Ref<Mover> mover_for(Mover *mover, c10::Device device);

// The pack hook of a `Packer`,
PyObject *packer_pack(Packer *packer, PyObject *tensor);
// and its unpack hook.
PyObject *packer_use(Packer *packer, PyObject *packed);
// Return the hooks that have this pack hook, borrowed; null: it is not a scope's.
Packer *packer_of(PyObject *pack);

// Return the hooks to notify when other code unpacks a saved tensor, borrowed; null: none.
inline Packer *teller_of(PyObject *packed) {
    const Handle *handle = as_handle(packed);
    return handle == nullptr ? nullptr : handle->teller;
}

// Bring a handle's bytes back by any means; the lock is held. False: an exception is set.
bool handle_bytes(Handle *handle);
// Return the handle, in a group, of a tensor that autograd saves. None: an exception is set.
Ref<> new_handle(c10::TensorImpl *tensor, Group *group);
// Return the tensor of a handle. The lock of its group, if any, is held. Null: an exception is set.
PyObject *tensor_of(Handle *handle);

} // namespace swapkit

#endif
