// refills.hpp - memory that a region overwrites, and then reads.
//
// A part may copy weights into a buffer that all parts share. Autograd saves the buffer, but not
// the bytes: the next part overwrites them. So a *refill*, a write to a tensor whose result is the
// tensor, is captured like other operators. Its group is the tensor at the version that the write
// gives it, and has memory of its own from the start: the group never holds the buffer, and later
// writes do not affect it. An operator that also reads what it changes (`mul_`) is captured if the
// region has refilled that.
//
// All functions need the GIL and the runtime's lock.
#ifndef SWAPKIT_REFILLS_HPP
#define SWAPKIT_REFILLS_HPP

#include "recompute/recipes.hpp"

#include <vector>

namespace swapkit {

// One write.
struct Refill {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::VariableVersion counter; // of the tensor,
    std::uint32_t version;        // and its version after the write
    Span span;
    std::uint64_t sample; // of the bytes that it has written (`sample_span`)
    Ref<Group> group;
};

// Return whether the results of an operator are tensors that a recipe can give memory of their own.
bool may_refill(const Named *named, const Stack &stack, Region *region);
// Note the writes of a recipe that has run.
void add_refills(std::vector<Refill> *refills, const std::vector<at::Tensor> &made,
                 std::vector<Ref<Group>> groups);
// Drop the writes to some storages: another write follows that was not captured, perhaps without a
// change of version.
void forget_refills(std::vector<Refill> *refills, const std::vector<c10::StorageImpl *> &changed);
// The latest of these writes to the bytes of a tensor at a version; null: unknown, or only a part
// of the bytes, or a kernel that torch does not see has written to them since. `version` is reduced
// to that before these writes.
Refill *find_refill(std::vector<Refill> *refills, c10::TensorImpl *tensor, Span span,
                    std::uint32_t *version);
// A handle of a tensor that a refill covers. `holds`: with the bytes of now. None: an exception is
// set.
Ref<> refilled_handle(const Refill &refill, c10::TensorImpl *tensor, bool holds);

} // namespace swapkit

#endif
