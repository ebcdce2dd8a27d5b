// cuda.cpp - swapkit's pools as torch's CUDA allocator.
//
// Torch's class for this purpose (CUDAPluggableAllocator) takes these functions by address, so no
// CUDA header is needed: a stream is a pointer. Each device has one pool, made when torch first
// allocates on the device, since opening a device takes some of its memory.
#include "memory/streams.hpp"
#include "python/links.hpp"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>

namespace {

using swapkit::links;
using swapkit::Ref;
using swapkit::WithPython;

constexpr int most_devices = 64;

std::atomic<sk_entry *> entries[most_devices];
PyObject *owner = nullptr; // a Python object: opens devices and sets their limits

// Return the text of the current Python exception, and clear the exception.
std::string take_error() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Ref<> owned[] = {Ref<>::steal(type), Ref<>::steal(value), Ref<>::steal(trace)};
    Ref<> text = Ref<>::steal(value != nullptr ? PyObject_Str(value) : nullptr);
    const char *words = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    std::string error = words != nullptr ? words : "an unknown error";
    PyErr_Clear();
    return error;
}

sk_entry *open_device(int device) {
    TORCH_CHECK(Py_IsInitialized(), "swapkit: device ", device,
                " has no pool, and Python has shut down");
    WithPython python;
    Ref<> index = Ref<>::steal(PyLong_FromLong(device));
    Ref<> address = index ? swapkit::call_method<"open">(owner, index.get()) : Ref<>();
    auto *entry = static_cast<sk_entry *>(address ? PyLong_AsVoidPtr(address.get()) : nullptr);
    TORCH_CHECK(entry != nullptr, "swapkit: no pool for CUDA device ", device, ": ", take_error());
    entries[device].store(entry);
    return entry;
}

sk_entry *entry_of(int device) {
    TORCH_CHECK(0 <= device && device < most_devices, "swapkit: there is no CUDA device ", device);
    sk_entry *entry = entries[device].load(std::memory_order_acquire);
    return entry != nullptr ? entry : open_device(device);
}

} // namespace

// Called by torch; see torch/csrc/cuda/CUDAPluggableAllocator.h.
extern "C" {

void *swapkit_cuda_alloc(std::size_t nbytes, int device, void *stream) {
    if (nbytes == 0) {
        return nullptr;
    }
    void *address =
        links.sk_entry_alloc(entry_of(device), nbytes, static_cast<sk_stream *>(stream));
    swapkit::require_memory(address);
    return address;
}

void swapkit_cuda_free(void *address, std::size_t, int device, void *) {
    links.sk_entry_free(entries[device].load(std::memory_order_acquire), address);
}

void swapkit_cuda_reset() {
    for (auto &each : entries) {
        sk_entry *entry = each.load(std::memory_order_acquire);
        if (entry != nullptr) {
            links.sk_entry_trim(entry);
        }
    }
}

void swapkit_cuda_record_stream(void *address, void *stream) {
    for (auto &each : entries) {
        sk_entry *entry = each.load(std::memory_order_acquire);
        if (entry != nullptr) {
            TORCH_CHECK(links.sk_entry_use(entry, address, static_cast<sk_stream *>(stream)) ==
                            SK_OK,
                        "swapkit: record_stream failed: ", links.sk_error_text());
        }
    }
}

void *swapkit_cuda_base(void *address, std::size_t *nbytes) {
    for (auto &each : entries) {
        sk_segment_info segment = {};
        sk_entry *entry = each.load(std::memory_order_acquire);
        if (entry != nullptr && links.sk_entry_segment_at(entry, address, &segment) == SK_OK) {
            if (nbytes != nullptr) {
                *nbytes = segment.nbytes;
            }
            return reinterpret_cast<void *>(segment.address);
        }
    }
    return address;
}

void swapkit_cuda_fraction(double fraction, int device) {
    WithPython python;
    Ref<> share = Ref<>::steal(PyFloat_FromDouble(fraction));
    Ref<> index = Ref<>::steal(PyLong_FromLong(device));
    Ref<> done = share && index
                     ? swapkit::call_method<"set_fraction">(owner, share.get(), index.get())
                     : Ref<>();
    TORCH_CHECK(done, take_error());
}

void swapkit_cuda_begin_pool(
    int, std::pair<unsigned long long, unsigned long long>,
    std::function<bool(void *)>) { // NOLINT(performance-unnecessary-value-param)
    TORCH_CHECK(false,
                "swapkit's pool does not support private pools (CUDA graphs, MemPool). Use "
                "swapkit.install(device=\"cuda\", allocator=\"torch\"), which leaves torch's "
                "own allocator in place.");
}

// Set the object that opens devices: borrowed, and alive until the process ends.
void swapkit_cuda_owner(PyObject *object) { owner = object; }

} // extern "C"
