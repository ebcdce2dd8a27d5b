// reclaimable.cpp - the list of reclaimable storages, and freeing them when torch needs memory.
#include "memory/reclaimable.hpp"

#include "memory/storages.hpp"
#include "memory/streams.hpp"
#include "python/links.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/Registry.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace swapkit {

namespace {

// How long to wait for a copy under way; a slower copy will not help.
constexpr auto patience = std::chrono::seconds(10);
// The least expected request, including torch's rounding.
constexpr std::size_t least_request_bytes = std::size_t{20} << 20;
constexpr int most_devices = 64;

struct Aside {
    c10::StorageImpl *storage;
    sk_group *native;
    c10::Device device;
    bool has_arrived; // the copy is done, and the list holds the storage
};

// Leaked: storages are freed at exit, too, after the static objects.
struct List {
    std::mutex mutex;
    std::condition_variable arrived;
    std::list<Aside> entries; // oldest first
    std::unordered_map<c10::StorageImpl *, std::list<Aside>::iterator> index;
    // Storages whose graph was freed during the copy; the second pile may need Python to be freed.
    std::vector<c10::StorageImpl *> garbage, garbage_of_python;
};
List &list = *new List;
// Storages on both piles; changes only with the mutex held.
std::atomic<std::size_t> garbage_count{0};

// A fork gets a consistent list: it is locked before the core, whose handlers are older.
[[maybe_unused]] const int fork_handlers = pthread_atfork(
    [] { list.mutex.lock(); }, [] { list.mutex.unlock(); }, [] { list.mutex.unlock(); });

// For assertions; the mutex is held.
[[maybe_unused]] bool list_is_sound() {
    return list.entries.size() == list.index.size() &&
           list.garbage.size() + list.garbage_of_python.size() == garbage_count;
}

struct Pressure {
    std::atomic<bool> is_on{false};
    std::atomic<std::size_t> limit_bytes{0};
    std::atomic<std::size_t> request_bytes{least_request_bytes};
    std::atomic<std::uint64_t> rescues{0}, rescued_bytes{0};
};
Pressure pressures[most_devices];

Pressure &pressure_of(std::int8_t index) {
    TORCH_CHECK(0 <= index && index < most_devices, "swapkit: there is no CUDA device ", index);
    return pressures[index];
}

// Return whether a thread may hold the lock of torch's allocator while it waits for the copy
// thread. The copy thread must not wait for that lock then.
bool is_watched(c10::Device device) {
    return device.is_cuda() && pressure_of(device.index()).is_on.load(std::memory_order_relaxed);
}

std::size_t sweep(std::vector<c10::StorageImpl *> &pile) {
    std::vector<c10::StorageImpl *> garbage;
    if (garbage_count == 0) { // the common case: each release checks this
        return 0;
    }
    {
        std::lock_guard lock(list.mutex);
        garbage.swap(pile);
        garbage_count -= garbage.size();
        SWAPKIT_ASSERT(list_is_sound());
    }
    std::size_t freed = 0;
    for (c10::StorageImpl *storage : garbage) {
        freed += storage->nbytes();
        swapkit_storage_drop(storage);
    }
    return freed;
}

// Add a storage to a pile; the mutex is held.
void pile_up(std::vector<c10::StorageImpl *> &pile, c10::StorageImpl *storage) {
    pile.push_back(storage);
    garbage_count++;
    SWAPKIT_ASSERT(list_is_sound());
}

// Return whether this is the only reference and Python is not needed to free the storage.
bool is_ours_alone(c10::StorageImpl *storage) {
    return c10::raw::intrusive_ptr::use_count(storage) == 1 && !is_known_to_python(storage);
}

// Remove and return the first storage that can be freed. `*is_coming`: a copy may free one.
c10::StorageImpl *take_one(c10::Device device, bool *is_coming) {
    *is_coming = false;
    for (auto each = list.entries.begin(); each != list.entries.end(); ++each) {
        if (each->device != device) {
            continue;
        }
        *is_coming = *is_coming || !each->has_arrived;
        bool is_ours = each->has_arrived && is_ours_alone(each->storage);
        if (is_ours && links.sk_group_has_copy(each->native)) {
            c10::StorageImpl *storage = each->storage;
            list.index.erase(storage);
            list.entries.erase(each);
            SWAPKIT_ASSERT(list_is_sound());
            return storage;
        }
    }
    return nullptr;
}

} // namespace

void reclaimable_sweep() {
    SWAPKIT_ASSERT(has_python());
    (void)sweep(list.garbage);
    (void)sweep(list.garbage_of_python);
}

std::size_t reclaimable_garbage() { return garbage_count; }

void reclaimable_expect(c10::StorageImpl *storage, sk_group *native, c10::Device device) {
    reclaimable_sweep();
    std::lock_guard lock(list.mutex);
    Aside entry = {.storage = storage, .native = native, .device = device, .has_arrived = false};
    SWAPKIT_ASSERT(list.index.find(storage) == list.index.end());
    list.index[storage] = list.entries.insert(list.entries.end(), entry);
    SWAPKIT_ASSERT(list_is_sound());
}

void reclaimable_forget(c10::StorageImpl *storage) {
    bool held = false;
    {
        std::lock_guard lock(list.mutex);
        auto found = list.index.find(storage);
        if (found == list.index.end()) {
            return;
        }
        held = found->second->has_arrived;
        list.entries.erase(found->second);
        list.index.erase(found);
        SWAPKIT_ASSERT(list_is_sound());
    }
    if (held) {
        swapkit_storage_drop(storage);
    }
}

std::size_t reclaimable_take(c10::Device device, std::size_t needed_bytes) {
    std::size_t freed = sweep(list.garbage);
    while (freed < needed_bytes) {
        c10::StorageImpl *storage = nullptr;
        {
            std::unique_lock lock(list.mutex);
            bool is_coming = false;
            storage = take_one(device, &is_coming);
            if (storage == nullptr &&
                (!is_coming || list.arrived.wait_for(lock, patience) == std::cv_status::timeout)) {
                break;
            }
        }
        freed += sweep(list.garbage);
        if (storage != nullptr) {
            bool is_last = is_ours_alone(storage); // no group has revived it since
            freed += is_last ? storage->nbytes() : 0;
            swapkit_storage_drop(storage);
        }
    }
    return freed;
}

// ---- torch's own allocator runs out of memory ---------------------------------------------------

void rescue_limit(std::int8_t index, std::size_t limit_bytes) {
    pressure_of(index).limit_bytes = limit_bytes;
}

void rescue_switch(std::int8_t index, bool on) {
    pressure_of(index).is_on = on;
    reclaimable_sweep();
}

void rescue_expect(std::int8_t index, std::size_t nbytes) {
    auto &known = pressure_of(index).request_bytes;
    std::size_t former = known.load(std::memory_order_relaxed);
    while (former < nbytes && !known.compare_exchange_weak(former, nbytes)) {
    }
}

void rescue_counts(std::int8_t index, std::uint64_t *rescues, std::uint64_t *nbytes) {
    *rescues = pressure_of(index).rescues;
    *nbytes = pressure_of(index).rescued_bytes;
}

c10::DataPtr reclaimable_empty(c10::StorageImpl *storage) {
    std::lock_guard lock(list.mutex);
    return storage->set_data_ptr(c10::DataPtr(nullptr, storage->device()));
}

} // namespace swapkit

void swapkit_storage_arrived(void *address) {
    using swapkit::list;
    auto *storage = static_cast<c10::StorageImpl *>(address);
    {
        std::lock_guard lock(list.mutex); // also for what `reclaimable_empty` changes
        auto found = list.index.find(storage);
        if (found != list.index.end() && !found->second->has_arrived) {
            found->second->has_arrived = true; // the list takes over the copy's reference
            list.arrived.notify_all();
            return;
        }
        if (swapkit::is_watched(storage->device())) {
            if (swapkit::is_ours_alone(storage)) {
                swapkit::pile_up(list.garbage, storage);
                list.arrived.notify_all();
                return;
            }
            if (swapkit::is_known_to_python(storage) && // perhaps only by Python
                c10::raw::intrusive_ptr::use_count(storage) <= 2) {
                swapkit::pile_up(list.garbage_of_python, storage);
                return;
            }
        }
    }
    swapkit_storage_drop(storage);
}

// Declared as in c10/cuda/CUDACachingAllocator.h; that header needs the CUDA headers.
namespace c10 {
class FreeMemoryCallback { // NOLINT(misc-use-internal-linkage): torch's own
  public:
    virtual ~FreeMemoryCallback() = default;
    virtual bool Execute() = 0; // NOLINT(readability-identifier-naming)
};
} // namespace c10

namespace swapkit {

namespace {

using Callbacks = c10::Registry<std::string, std::unique_ptr<c10::FreeMemoryCallback>>;

// Torch calls this with its allocator locked, whenever no cached block fits. Mostly the allocator
// can still reserve more.
class Rescue final : public c10::FreeMemoryCallback {
  public:
    bool Execute() override {
        auto index = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice().index();
        if (index < 0 || index >= most_devices) {
            return false; // no session can have limited it
        }
        Pressure &pressure = pressures[index];
        std::size_t limit_bytes = pressure.limit_bytes.load(std::memory_order_relaxed);
        if (!pressure.is_on.load(std::memory_order_relaxed) || limit_bytes == 0) {
            return false;
        }
        c10::Device device(c10::DeviceType::CUDA, index);
        std::size_t request = pressure.request_bytes.load(std::memory_order_relaxed);
        auto reserved = static_cast<std::size_t>(device_usage(device).reserved_bytes);
        if (reserved + request <= limit_bytes) {
            return false;
        }
        std::size_t freed = reclaimable_take(device, request);
        if (freed > 0) {
            pressure.rescues++;
            pressure.rescued_bytes += freed;
        }
        return freed > 0;
    }
};

} // namespace

void rescue_register() {
    static const bool is_registered = [] {
        // The mangled name has an ABI tag for std::string; with the old string ABI there is none.
        void *found =
            torchs_function(cuda_library, "_ZN3c1031FreeCudaMemoryCallbacksRegistryB5cxx11Ev");
        if (found == nullptr) {
            found = torchs_function(cuda_library, "_ZN3c1031FreeCudaMemoryCallbacksRegistryEv");
        }
        TORCH_CHECK(found != nullptr, "swapkit: this torch has no FreeCudaMemoryCallbacksRegistry");
        reinterpret_cast<Callbacks *(*)()>(found)()->Register(
            "swapkit", [] { return std::unique_ptr<c10::FreeMemoryCallback>(new Rescue); });
        return true;
    }();
    (void)is_registered;
}

} // namespace swapkit
