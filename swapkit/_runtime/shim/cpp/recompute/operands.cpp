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
    bool is_moved = may_move && impl->device() == mover->device() &&
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
    if (Group *made = region == nullptr ? nullptr : region_find(region, key)) {
        return Ref<>::steal(as_object(handle_new(impl, made)));
    }
    if (Refill *refill = region == nullptr ? nullptr : region_refilled(region, impl, span)) {
        return refilled_handle(*refill, impl, false);
    }
    Ref<> copy = copy_statistics(impl);
    if (copy) {
        return copy;
    }
    if (region != nullptr && region_tells(region)) {
        return region_operand(region, impl, key, span);
    }
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

std::uint64_t sample_operand(PyObject *packed, c10::TensorImpl *tensor) {
    constexpr std::size_t samples = 16, word = sizeof(std::uint64_t);
    constexpr std::uint64_t mix = 0x9E3779B97F4A7C15; // odd, with an irregular pattern of bits
    const auto *handle =
        Py_TYPE(packed) == &handle_type ? reinterpret_cast<const Handle *>(packed) : nullptr;
    bool is_made =
        handle != nullptr && handle->group != nullptr && handle->group->recipe != nullptr;
    bool is_weight = handle != nullptr && handle->weight != nullptr;
    Span span = {};
    if (is_made || is_weight || !tensor->device().is_cpu() || gathers_gradients(tensor) ||
        look(*tensor, 0, &span) == nullptr || span.end_bytes - span.begin_bytes < word) {
        return 0;
    }
    const auto *bytes = static_cast<const char *>(tensor->unsafe_storage().data());
    std::size_t room = span.end_bytes - span.begin_bytes - word, first = span.begin_bytes;
    std::uint64_t sample = 1;
    for (std::size_t at = 0; at < samples; at++) {
        std::uint64_t found;
        std::memcpy(&found, bytes + first + room * at / (samples - 1), word);
        sample = (sample ^ found) * mix;
        sample ^= sample >> 32;
    }
    return sample == 0 ? 1 : sample;
}

Ref<> scratch_of(c10::TensorImpl *impl) {
    if (plain_storage(*impl, 0) == nullptr) {
        return {};
    }
    Handle *handle = handle_new(impl, nullptr);
    if (handle != nullptr) {
        exchange_storage(handle->alias, nullptr, 0);
    }
    return Ref<>::steal(as_object(handle));
}

} // namespace swapkit
