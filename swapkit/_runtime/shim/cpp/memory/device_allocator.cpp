// device_allocator.cpp - the pools of an accelerator's devices, opened by a Python object.
#include "memory/device_allocator.hpp"

#include "memory/streams.hpp"
#include "python/failures.hpp"
#include "python/links.hpp"

#include <c10/util/Exception.h>

#include <atomic>
#include <string>

namespace swapkit {

namespace {

std::atomic<sk_entry *> entries[most_allocators];
PyObject *opener = nullptr; // a Python object: opens devices and sets their limits

// Return the text of the current Python exception, and clear the exception.
std::string take_error() {
    Ref<> failure = PyErr_Occurred() != nullptr ? take_exception() : Ref<>();
    Ref<> text = Ref<>::steal(failure ? PyObject_Str(failure.get()) : nullptr);
    const char *words = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    std::string error = words != nullptr ? words : "an unknown error";
    PyErr_Clear();
    return error;
}

sk_entry *open_device(int device) {
    TORCH_CHECK(Py_IsInitialized(), "swapkit: device ", device,
                " has no pool, and Python has shut down");
    WithPython python;
    Ref<> address = call_method<"open">(opener, device);
    auto *entry = static_cast<sk_entry *>(address ? PyLong_AsVoidPtr(address.get()) : nullptr);
    TORCH_CHECK(entry != nullptr, "swapkit: no pool for device ", device, ": ", take_error());
    entries[device].store(entry);
    return entry;
}

sk_entry *entry_of(int device) {
    TORCH_CHECK(0 <= device && device < most_allocators, "swapkit: there is no device ", device);
    sk_entry *entry = entries[device].load(std::memory_order_acquire);
    return entry != nullptr ? entry : open_device(device);
}

template <class Function> void each_entry(Function call) {
    for (auto &each : entries) {
        sk_entry *entry = each.load(std::memory_order_acquire);
        if (entry != nullptr) {
            call(entry);
        }
    }
}

// Copy a statistic of all blocks, of the small and of the large ones.
template <class Stats> void fill(Stats &to, const sk_stat (&from)[3]) {
    for (std::size_t i = 0; i < to.size(); i++) {
        to[i].current = from[i].current;
        to[i].peak = from[i].peak;
        to[i].allocated = from[i].allocated;
        to[i].freed = from[i].freed;
    }
}

} // namespace

bool device_is_open(int device) {
    return entries[device].load(std::memory_order_acquire) != nullptr;
}

void *device_alloc(std::size_t nbytes, int device, sk_stream *stream) {
    if (nbytes == 0) {
        return nullptr;
    }
    void *address = links.sk_entry_alloc(entry_of(device), nbytes, stream);
    require_memory(address);
    return address;
}

void device_free(void *address, int device) {
    links.sk_entry_free(entries[device].load(std::memory_order_acquire), address);
}

void device_trim() {
    std::string why;
    each_entry([&](sk_entry *entry) {
        if (links.sk_entry_trim(entry) != SK_OK) {
            why = links.sk_error_text();
        }
    });
    TORCH_CHECK(why.empty(), "swapkit: cached memory could not be returned: ", why);
}

void device_use(void *address, sk_stream *stream) {
    each_entry([&](sk_entry *entry) {
        TORCH_CHECK(links.sk_entry_use(entry, address, stream) == SK_OK,
                    "swapkit: record_stream failed: ", links.sk_error_text());
    });
}

void device_unuse(void *address, sk_stream *stream, sk_stream *current) {
    each_entry([&](sk_entry *entry) { links.sk_entry_unuse(entry, address, stream, current); });
}

void *device_base(void *address, std::size_t *nbytes) {
    void *base = address;
    each_entry([&](sk_entry *entry) {
        sk_segment_info segment = {};
        if (links.sk_entry_segment_at(entry, address, &segment) == SK_OK) {
            if (nbytes != nullptr) {
                *nbytes = segment.nbytes;
            }
            base = reinterpret_cast<void *>(segment.address);
        }
    });
    return base;
}

c10::CachingDeviceAllocator::DeviceStats device_stats(int device) {
    c10::CachingDeviceAllocator::DeviceStats out = {};
    const sk_entry *entry = entries[device].load(std::memory_order_acquire);
    if (entry == nullptr) {
        return out;
    }
    sk_pool_stats stats = {};
    links.sk_pool_stats_get(links.sk_entry_pool(entry), &stats);
    fill(out.allocation, stats.allocation);
    fill(out.segment, stats.segment);
    fill(out.active, stats.active);
    fill(out.inactive_split, stats.inactive_split);
    fill(out.allocated_bytes, stats.allocated_bytes);
    fill(out.reserved_bytes, stats.reserved_bytes);
    fill(out.active_bytes, stats.active_bytes);
    fill(out.inactive_split_bytes, stats.inactive_split_bytes);
    fill(out.requested_bytes, stats.requested_bytes);
    out.num_alloc_retries = stats.num_alloc_retries;
    out.num_ooms = stats.num_ooms;
    out.num_sync_all_streams = stats.num_sync_all_streams;
    out.num_device_alloc = stats.num_device_alloc;
    out.num_device_free = stats.num_device_free;
    out.max_split_size = stats.max_split_size;
    return out;
}

void device_reset_peak(int device) {
    const sk_entry *entry = entries[device].load(std::memory_order_acquire);
    if (entry != nullptr) {
        links.sk_pool_stats_reset_peak(links.sk_entry_pool(entry));
    }
}

void device_limit(double share, int device) {
    WithPython python;
    TORCH_CHECK(call_method<"set_fraction">(opener, share, device), take_error());
}

} // namespace swapkit

// Set the object that opens devices: borrowed, and alive until the process ends.
extern "C" void swapkit_device_owner(PyObject *object) { swapkit::opener = object; }
