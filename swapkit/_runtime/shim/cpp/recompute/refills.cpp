// refills.cpp - memory that a region overwrites, and then reads.
#include "recompute/refills.hpp"

#include "memory/streams.hpp"
#include "recompute/regions.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>

#include <algorithm>
#include <utility>

namespace swapkit {

namespace {

bool is_within(Span inner, Span outer) {
    return outer.begin_bytes <= inner.begin_bytes && inner.end_bytes <= outer.end_bytes;
}

bool overlaps(Span one, Span other) {
    return one.begin_bytes < other.end_bytes && other.begin_bytes < one.end_bytes;
}

// Whether a write to a tensor can be made again in memory of its own. A weight is read anew.
bool is_refillable(const at::Tensor &tensor, const Region *region, Span *span) {
    if (!tensor.defined()) {
        return false;
    }
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    c10::StorageImpl *storage = look(*impl, 1, span);
    return storage != nullptr && !impl->is_inference() && impl->is_non_overlapping_and_dense() &&
           !impl->is_conj() && !impl->is_neg() &&
           impl->device() == region_kept(region)->mover->device() && has_plain_format(storage) &&
           weight_under(impl) == nullptr;
}

// The bytes of a group as its operator has just left them in the tensor's storage.
c10::StorageImpl *bytes_of(const Refill &refill, c10::StorageImpl *storage) {
    using Impl = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    const Group *group = refill.group.get();
    const Recipe *recipe = group->recipe;
    std::size_t argument = recipe->named->declared[group->result];
    auto operand =
        std::find_if(recipe->operands.begin(), recipe->operands.end(),
                     [argument](const Operand &each) { return each.argument == argument; });
    SWAPKIT_ASSERT(operand != recipe->operands.end());
    const auto *handle = reinterpret_cast<const Handle *>(operand->packed.get());
    at::Tensor written(Impl::reclaim(detached(handle->alias)));
    auto begin = static_cast<std::int64_t>(refill.span.begin_bytes / written.itemsize());
    exchange_storage(written.unsafeGetTensorImpl(), storage, written.storage_offset() - begin);
    Deeper ours;
    at::AutoDispatchBelowADInplaceOrView unseen;
    at::Tensor copy = written.clone();
    c10::StorageImpl *bytes = copy.storage().unsafeGetStorageImpl();
    swapkit_storage_hold(bytes);
    return bytes;
}

// Take some writes out of the list. The caller drops them last, since this may end recipes.
template <class Some> std::vector<Refill> take_out(std::vector<Refill> *refills, Some is_one) {
    std::vector<Refill> out, rest;
    for (Refill &each : *refills) {
        (is_one(each) ? out : rest).push_back(std::move(each));
    }
    *refills = std::move(rest);
    return out;
}

} // namespace

bool may_refill(const Named *named, const Stack &stack, Region *region) {
    const c10::IValue *arguments = named->given(stack);
    return std::all_of(named->declared.begin(), named->declared.end(), [&](std::size_t at) {
        Span span = {};
        return arguments[at].isTensor() && is_refillable(arguments[at].toTensor(), region, &span) &&
               (!named->reads_written ||
                region_refilled(region, arguments[at].toTensor().unsafeGetTensorImpl(), span) !=
                    nullptr);
    });
}

void add_refills(std::vector<Refill> *refills, const std::vector<at::Tensor> &made,
                 std::vector<Ref<Group>> groups) {
    for (Ref<Group> &group : groups) {
        c10::TensorImpl *impl = made[group->result].unsafeGetTensorImpl();
        Span span = {};
        c10::StorageImpl *storage = look(*impl, 0, &span);
        auto covered = take_out(refills, [&](const Refill &each) {
            return each.storage._unsafe_get_target() == storage && is_within(each.span, span);
        });
        using Strong = c10::intrusive_ptr<c10::StorageImpl>;
        refills->push_back(
            {.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(Strong::reclaim_copy(storage)),
             .counter = impl->version_counter(),
             // Autograd counts the write once the kernels have run.
             .version = impl->version_counter().current_version() + 1,
             .span = span,
             .sample = sample_span(storage, span),
             .group = std::move(group)});
    }
}

void forget_refills(std::vector<Refill> *refills, const std::vector<c10::StorageImpl *> &changed) {
    auto gone = take_out(refills, [&](const Refill &each) {
        auto *storage = each.storage._unsafe_get_target();
        return std::find(changed.begin(), changed.end(), storage) != changed.end();
    });
}

Refill *find_refill(std::vector<Refill> *refills, c10::TensorImpl *tensor, Span span,
                    std::uint32_t *version) {
    const c10::StorageImpl *storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    for (auto each = refills->rbegin(); each != refills->rend(); ++each) {
        if (each->storage._unsafe_get_target() != storage) {
            continue;
        }
        // Another counter, or a version that no write here has given: there was another write.
        if (each->version != *version ||
            !is_same_counter(each->counter, tensor->version_counter())) {
            return nullptr;
        }
        if (overlaps(each->span, span)) {
            bool has_bytes = is_within(span, each->span) && each->group->recipe != nullptr &&
                             each->sample == sample_span(storage, each->span);
            return has_bytes ? &*each : nullptr;
        }
        --*version;
    }
    return nullptr;
}

Ref<> refilled_handle(const Refill &refill, c10::TensorImpl *tensor, bool holds) {
    Group *group = refill.group.get();
    if (holds && group->storage == nullptr) {
        c10::StorageImpl *storage = tensor->unsafe_storage().unsafeGetStorageImpl();
        group_restore(group, bytes_of(refill, storage));
        group->stream = current_stream(group->mover->device());
        group->standby = Standby::held;
        if (group->terms.action == Action::automatic) {
            enroll_again(group->mover, group);
        }
    }
    Handle *handle = handle_new(tensor, group);
    if (handle != nullptr) {
        auto begin = static_cast<std::int64_t>(refill.span.begin_bytes / tensor->itemsize());
        handle->alias->set_version_counter(c10::VariableVersion(handle->version));
        exchange_storage(handle->alias, nullptr, begin);
        handle->is_stripped = true;
        handle->shift = 0;
        handle_fill(handle);
    }
    return Ref<>::steal(as_object(handle));
}

} // namespace swapkit
