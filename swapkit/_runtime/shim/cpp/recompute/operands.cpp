// operands.cpp - how recipes keep their operands.
#include "memory/streams.hpp"
#include "recompute/recomputed.hpp"
#include "recompute/refills.hpp"
#include "recompute/regions.hpp"
#include "recompute/standby.hpp"
#include "saved/pack_hooks.hpp"
#include "saved/storage_choices.hpp"
#include "saved/weights.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <algorithm>
#include <cstring>

namespace swapkit {

// Copy the operand if it may be the running statistics of a norm: floating point, no gradient, one
// number per channel. Norms update these without a change of version. None: it cannot be that.
static Ref<> copy_statistics(c10::TensorImpl *impl) {
    constexpr std::size_t most_bytes = std::size_t{1} << 16;
    std::int64_t largest = 1;
    for (std::int64_t size : impl->sizes()) {
        largest = std::max(largest, size);
    }
    if (impl->requires_grad() || !c10::isFloatingType(c10::typeMetaToScalarType(impl->dtype())) ||
        impl->numel() != largest ||
        static_cast<std::size_t>(largest) * impl->itemsize() > most_bytes) {
        return {};
    }
    at::AutoDispatchBelowADInplaceOrView unseen;
    at::Tensor copy =
        at::Tensor(
            c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl))
            .clone();
    // Strides can change how an operator computes, and the clone of an expanded tensor has others.
    return copy.strides() == impl->strides()
               ? Ref<>::steal(as_object(handle_new(copy.unsafeGetTensorImpl(), nullptr)))
               : Ref<>();
}

// A handle in the group of the operand's storage, or without a group if the operand is not moved.
static Ref<> keep_in_group(const Keeping &keeping, c10::TensorImpl *impl, Key key, Span span) {
    Mover *mover = keeping.mover;
    // Without a budget, operands of users' choices are not moved.
    bool may_move = keeping.captor != Captor::user || keeping.terms->action == Action::automatic;
    bool is_moved = may_move && impl->device() == mover->device() && !is_trapped(*impl) &&
                    key.storage->nbytes() >= keeping.terms->min_bytes;
    Joined joined = {Ref<Group>(), false};
    if (is_moved) {
        joined = join_group(mover, impl, key, span, *keeping.terms);
    }
    Group *group = joined.group.get();
    if (group == nullptr) {
        return PyErr_Occurred() != nullptr ? Ref<>()
                                           : Ref<>::steal(as_object(handle_new(impl, nullptr)));
    }
    group_cover(group, span);
    if (joined.is_new) {
        group->stream = current_stream(mover->device());
    }
    return Ref<>::steal(as_object(handle_new(impl, group)));
}

// A handle for a weight, which does not move. None without an exception: it is none.
static Ref<> keep_weight(const Region *region, c10::TensorImpl *impl) {
    Handle *weight = region == nullptr ? nullptr : handle_reading(impl);
    if (weight == nullptr && PyErr_Occurred() == nullptr && gathers_gradients(impl)) {
        weight = handle_new(impl, nullptr);
    }
    return Ref<>::steal(as_object(weight));
}

// A handle for what a region has made. None without an exception: it has not made this.
static Ref<> keep_made(Region *region, c10::TensorImpl *impl, Key key, Span span) {
    if (Group *made = region_find(region, key)) {
        return Ref<>::steal(as_object(handle_new(impl, made)));
    }
    const Refill *refill = region_refilled(region, impl, span);
    return refill == nullptr ? Ref<>() : refilled_handle(*refill, impl, false);
}

// A handle for what no region has made.
static Ref<> keep_outside(const Keeping &keeping, c10::TensorImpl *impl, Key key, Span span) {
    Region *region = keeping.region;
    Ref<Group> computed = find_recomputed(keeping.mover, key);
    if (computed && recipe_may_serve(computed.get())) {
        return Ref<>::steal(as_object(handle_new(impl, computed.get())));
    }
    if (region != nullptr) {
        return region_operand(region, impl, key, span);
    }
    if (keeping.captor == Captor::standby && !find_group(keeping.mover, impl, key, span) &&
        may_keep(keeping.mover, key.storage) != 1) {
        return {};
    }
    return keep_in_group(keeping, impl, key, span);
}

Ref<> keep_operand(const Keeping &keeping, c10::TensorImpl *impl) {
    Region *region = keeping.region;
    Span span = {};
    bool is_empty = impl->numel() == 0;
    if (!is_empty && look(*impl, 0, &span) == nullptr) {
        return {};
    }
    if (is_empty || impl->is_wrapped_number()) {
        return Ref<>::steal(as_object(handle_new(impl, nullptr)));
    }
    Ref<> weight = keep_weight(region, impl);
    if (weight || PyErr_Occurred() != nullptr) {
        return weight;
    }
    Key key = key_of(*impl);
    Ref<> made = region == nullptr ? Ref<>() : keep_made(region, impl, key, span);
    if (made || PyErr_Occurred() != nullptr) {
        return made;
    }
    Ref<> copy = copy_statistics(impl);
    if (copy) {
        return copy;
    }
    if (region != nullptr && region_tells(region)) {
        return region_operand(region, impl, key, span);
    }
    return keep_outside(keeping, impl, key, span);
}

namespace {

// Adds up words, in order.
class Sample {
  public:
    void add(const char *from, std::size_t nbytes) {
        constexpr std::uint64_t mix = 0x9E3779B97F4A7C15; // odd, with an irregular pattern of bits
        std::uint64_t word = 0;
        std::memcpy(&word, from, std::min(nbytes, sizeof(word)));
        sum_ = (sum_ ^ word) * mix;
        sum_ ^= sum_ >> 32;
    }
    std::uint64_t get() const { return sum_ == 0 ? 1 : sum_; }

  private:
    std::uint64_t sum_ = 1;
};

// Of the elements of a tensor with gaps: other code may write to those.
std::uint64_t sample_elements(const c10::TensorImpl &tensor, std::size_t count) {
    Sample sample;
    const auto *bytes = static_cast<const char *>(tensor.unsafe_storage().data());
    auto last = tensor.numel() - 1;
    for (std::size_t at = 0; at < count; at++) {
        std::int64_t place = tensor.storage_offset();
        auto rest = last * static_cast<std::int64_t>(at) / static_cast<std::int64_t>(count - 1);
        for (std::int64_t dim = tensor.dim() - 1; dim >= 0; dim--) {
            place += rest % tensor.size(dim) * tensor.stride(dim);
            rest /= tensor.size(dim);
        }
        sample.add(bytes + static_cast<std::size_t>(place) * tensor.itemsize(), tensor.itemsize());
    }
    return sample.get();
}

} // namespace

std::uint64_t sample_span(const c10::StorageImpl *storage, Span span) {
    constexpr std::size_t count = 512, word = sizeof(std::uint64_t);
    std::size_t nbytes = span.end_bytes - span.begin_bytes;
    if (!storage->device().is_cpu() || nbytes < word || span.end_bytes > storage->nbytes()) {
        return 0;
    }
    Sample sample;
    const auto *bytes = static_cast<const char *>(address_of(storage)) + span.begin_bytes;
    for (std::size_t at = 0; at < count; at++) {
        sample.add(bytes + (nbytes - word) * at / (count - 1), word);
    }
    return sample.get();
}

std::uint64_t sample_operand(PyObject *packed, c10::TensorImpl *tensor, bool is_refill) {
    constexpr std::size_t few = 16; // of each operator's operands
    const Handle *handle = as_handle(packed);
    bool is_made =
        handle != nullptr && handle->group != nullptr && handle->group->recipe != nullptr;
    bool is_weight = handle != nullptr && handle->weight != nullptr;
    Span span = {};
    const c10::StorageImpl *storage = look(*tensor, 0, &span);
    if (is_made || is_weight || is_trapped(*tensor) || storage == nullptr ||
        !storage->device().is_cpu() || gathers_gradients(tensor) ||
        span.end_bytes > storage->nbytes()) {
        return 0;
    }
    return is_refill && tensor->is_non_overlapping_and_dense() ? sample_span(storage, span)
                                                               : sample_elements(*tensor, few);
}

Ref<> scratch_of(c10::TensorImpl *impl) {
    if (plain_storage(*impl, 0) == nullptr) {
        return {};
    }
    Handle *handle = handle_new(impl, nullptr);
    if (handle != nullptr) {
        handle_leave_held(handle);
        exchange_storage(handle->alias, nullptr, 0);
    }
    return Ref<>::steal(as_object(handle));
}

} // namespace swapkit
