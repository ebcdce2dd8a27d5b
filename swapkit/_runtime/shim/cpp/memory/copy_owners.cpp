// copy_owners.cpp - memory shared by a storage and the owners of its copies.
#include "memory/copy_owners.hpp"

#include "python/links.hpp"

#include <c10/core/Allocator.h>
#include <c10/util/intrusive_ptr.h>

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace {

std::atomic<std::uint64_t> serials{0};

// Replaces the storage's own memory in the storage; each copy under way also holds a reference.
struct Shared {
    c10::DataPtr memory;
    std::uint64_t serial; // smaller than any address
    std::atomic<std::size_t> holders;
};

void drop(void *context) {
    auto *shared = static_cast<Shared *>(context);
    if (shared->holders.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        delete shared;
    }
}

// How often, of all such writes, a storage was last written to by a kernel that announced itself.
// An entry may outlive its storage: it is as good as any other number for the next one at that
// address. Never freed.
auto &written = *new std::unordered_map<const c10::StorageImpl *, std::uint64_t>;
auto &written_lock = *new std::mutex;
std::atomic<bool> is_any_written{false};
// Forgetting the entries costs copies that are made anew.
constexpr std::size_t most_written = 1 << 16;

[[maybe_unused]] const int written_at_fork = pthread_atfork(
    [] { written_lock.lock(); }, [] { written_lock.unlock(); }, [] { written_lock.unlock(); });

// Return a number that changes with each announced write to a storage; 0: there was none.
std::uint64_t writes_of(const c10::StorageImpl *storage) {
    if (!is_any_written.load(std::memory_order_relaxed)) {
        return 0;
    }
    std::lock_guard lock(written_lock);
    auto found = written.find(storage);
    return found == written.end() ? 0 : found->second;
}

// Memory's identifiers are far apart in this multiple of a serial number.
constexpr std::uint64_t scatter = 0x9e3779b97f4a7c15;

// The context of an owner's memory.
struct Held {
    Shared *shared;
    c10::intrusive_ptr<c10::StorageImpl> storage;
};

void end(void *context) {
    auto *held = static_cast<Held *>(context);
    drop(held->shared);
    delete held;
}

// Return whether torch does not read the context of this memory. Torch reads the context of memory
// mapped from a file or another process to find the map. Such memory cannot be exchanged: torch
// neither resizes it nor shares it again.
bool may_share(const c10::DataPtr &memory) {
    static const c10::DeleterFnPtr of_blobs =
        c10::InefficientStdFunctionContext::makeDataPtr(
            nullptr, [](void *) {}, c10::Device(c10::DeviceType::CPU))
            .get_deleter();
    bool is_simple = memory.get_context() == memory.get();
    return memory.get() != nullptr && (is_simple || memory.get_deleter() == of_blobs);
}

// Return the shared memory of a storage, made if needed; null: the storage has to keep its memory.
Shared *share(c10::StorageImpl *storage) {
    c10::DataPtr &memory = storage->_mutable_data_ptr_no_checks();
    if (memory.get_deleter() == &drop) {
        return static_cast<Shared *>(memory.get_context());
    }
    if (!may_share(memory)) {
        return nullptr;
    }
    void *data = memory.get(); // unchanged: other threads may read it meanwhile
    auto *shared = new Shared{.memory = std::move(memory), .serial = ++serials, .holders = 1};
    memory = c10::DataPtr(data, shared, &drop, shared->memory.device());
    return shared;
}

} // namespace

std::uint64_t swapkit::memory_of(const c10::StorageImpl *storage) {
    const c10::DataPtr &memory =
        const_cast<c10::StorageImpl *>(storage)->_mutable_data_ptr_no_checks();
    std::uint64_t writes = writes_of(storage) * scatter;
    if (memory.get_deleter() == &drop) {
        return static_cast<const Shared *>(memory.get_context())->serial + writes;
    }
    return reinterpret_cast<std::uint64_t>(memory.get()) + writes;
}

void swapkit::note_written(const c10::StorageImpl *storage) {
    std::lock_guard lock(written_lock);
    if (written.size() >= most_written) {
        written.clear();
    }
    written[storage] = ++serials;
    is_any_written = true;
}

c10::StorageImpl *swapkit_owner_new(c10::StorageImpl *storage) {
    SWAPKIT_ASSERT(swapkit::has_python());
    Shared *shared = storage->device().is_cpu() ? share(storage) : nullptr;
    if (shared == nullptr) {
        c10::raw::intrusive_ptr::incref(storage);
        return storage;
    }
    auto *held = new Held{shared, c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)};
    shared->holders.fetch_add(1, std::memory_order_relaxed);
    return c10::make_intrusive<c10::StorageImpl>(
               c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
               c10::DataPtr(shared->memory.get(), held, &end, storage->device()), nullptr, false)
        .release();
}
