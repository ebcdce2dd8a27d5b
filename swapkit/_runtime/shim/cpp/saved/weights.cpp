// weights.cpp - weights that a region reads anew in backward.
#include "saved/weights.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <pthread.h>
#include <unordered_map>
#include <utility>

namespace swapkit {

namespace {

// Weights by their storage in forward. Never freed, as in `readers.cpp`.
auto &weights = *new std::unordered_multimap<const c10::StorageImpl *, Weight *>;
auto &weights_lock = *new std::mutex; // in addition to the GIL: lookups go without that
std::atomic<std::size_t> weights_count{0};

// A forked child looks weights up, too: it must find the lock free. No other lock is taken while
// this one is held.
[[maybe_unused]] const int weights_at_fork = pthread_atfork(
    [] { weights_lock.lock(); }, [] { weights_lock.unlock(); }, [] { weights_lock.unlock(); });

// By how many of its items a view of a weight begins earlier now. The view may have other items.
std::int64_t shift_of(const Weight &weight, const c10::TensorImpl &view) {
    std::int64_t shift = weight.offset - weight.leaf->storage_offset();
    return shift * static_cast<std::int64_t>(weight.leaf->itemsize()) /
           static_cast<std::int64_t>(view.itemsize());
}

} // namespace

Handle *handle_reading(c10::TensorImpl *tensor) {
    c10::TensorImpl *leaf = weight_under(tensor);
    if (leaf == nullptr || plain_storage(*leaf, 0) == nullptr ||
        leaf->unsafe_storage().unsafeGetStorageImpl() !=
            tensor->unsafe_storage().unsafeGetStorageImpl()) {
        return nullptr;
    }
    Handle *handle = handle_new(tensor, nullptr);
    if (handle == nullptr) {
        return nullptr;
    }
    handle_leave_held(handle);
    exchange_storage(handle->alias, nullptr, 0);
    c10::raw::intrusive_ptr::incref(leaf);
    c10::StorageImpl *first = leaf->unsafe_storage().unsafeGetStorageImpl();
    handle->weight = new Weight{.leaf = leaf,
                                .first = c10::raw::intrusive_ptr::make_weak(first),
                                .sizes = leaf->sizes().vec(),
                                .strides = leaf->strides().vec(),
                                .offset = leaf->storage_offset(),
                                .dtype = leaf->dtype(),
                                .is_written = false};
    std::lock_guard lock(weights_lock);
    weights.emplace(first, handle->weight);
    weights_count = weights.size();
    return handle;
}

c10::TensorImpl *handle_read(Handle *handle, PyObject *reader) {
    const Weight &weight = *handle->weight;
    c10::TensorImpl *tensor = detached(handle->alias);
    c10::StorageImpl *first =
        weight.is_written ? nullptr : c10::raw::weak_intrusive_ptr::lock(weight.first);
    bool is_same = true;
    if (first != nullptr) {
        exchange_storage(tensor, first, 0);
        swapkit_storage_drop(first);
    } else {
        const c10::TensorImpl &leaf = *weight.leaf;
        is_same = leaf.has_storage() && leaf.sizes() == weight.sizes &&
                  leaf.strides() == weight.strides && leaf.dtype() == weight.dtype &&
                  leaf.device() == tensor->device();
        if (is_same) {
            exchange_storage(tensor, leaf.unsafe_storage().unsafeGetStorageImpl(),
                             shift_of(weight, *tensor));
        }
    }
    if (!is_same || !has_memory(*tensor)) {
        c10::raw::intrusive_ptr::decref(std::exchange(tensor, nullptr));
        (void)call(links.refuse_emptied, handle, reader);
    }
    return tensor;
}

void weight_free(Weight *weight) {
    if (weight == nullptr) {
        return;
    }
    {
        std::lock_guard lock(weights_lock);
        auto [each, end] = weights.equal_range(weight->first);
        each =
            std::find_if(each, end, [weight](const auto &item) { return item.second == weight; });
        SWAPKIT_ASSERT(each != end);
        weights.erase(each);
        weights_count = weights.size();
    }
    c10::raw::weak_intrusive_ptr::decref(weight->first);
    c10::raw::intrusive_ptr::decref(weight->leaf);
    delete weight;
}

bool is_any_weight() { return weights_count.load(std::memory_order_relaxed) != 0; }

bool is_of_weight(const c10::StorageImpl *storage) {
    std::lock_guard lock(weights_lock);
    return weights.find(storage) != weights.end();
}

void weights_written(const std::vector<c10::StorageImpl *> &changed) {
    std::lock_guard lock(weights_lock);
    for (const c10::StorageImpl *storage : changed) {
        auto [first, last] = weights.equal_range(storage);
        for (auto each = first; each != last; ++each) {
            each->second->is_written = true;
        }
    }
}

} // namespace swapkit
