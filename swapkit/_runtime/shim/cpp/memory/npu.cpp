// npu.cpp - the functions that torch_npu's NPUPluggableAllocator takes by address.
//
// torch_npu queues operators on the host (TASK_QUEUE_ENABLE): a thread of its own puts them into
// their stream. So an operator may not be in its stream yet when memory that it uses is freed. The
// pool therefore settles (`sk_pool_set_settle`) before memory leaves its stream: it waits here for
// the queues of all streams that allocated or used memory.
//
// Torch_npu's headers need CANN's, so its functions are looked up by name. A stream object is that
// of `c10_npu/NPUStream.h`: a c10::Stream, passed by reference.
#include "memory/device_allocator.hpp"
#include "memory/streams.hpp"
#include "python/links.hpp"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr auto npu = c10::DeviceType::PrivateUse1;

constexpr c10::StreamId no_id = -1;

struct Known {
    void *handle;
    int device;
    c10::StreamId id;
};

// The streams that a device's pool knows: a few, and never fewer. Most belong to the device.
struct Streams {
    std::atomic<void *> latest{nullptr}; // handle: the usual one, found without the lock
    std::mutex mutex;
    std::vector<Known> known;
};
Streams streams[swapkit::most_allocators];

Streams &streams_of(int device) {
    TORCH_CHECK(0 <= device && device < swapkit::most_allocators, "swapkit: there is no device ",
                device);
    return streams[device];
}

// Note that a device's pool knows a stream; `no_id`: only its handle is known.
void note_stream(int device, const Known &stream) {
    Streams &all = streams_of(device);
    std::lock_guard lock(all.mutex);
    auto found = std::find_if(all.known.begin(), all.known.end(), [&](const Known &each) {
        return each.handle == stream.handle && each.device == stream.device;
    });
    if (found == all.known.end()) {
        all.known.push_back(stream);
    } else if (stream.id != no_id) {
        found->id = stream.id;
    }
    if (stream.id != no_id && stream.device == device) {
        all.latest = stream.handle;
    }
}

// Return the runtime's stream without waiting for the stream's queue.
void *handle_of(const c10::Stream *stream) {
    static const auto ask = reinterpret_cast<void *(*)(const c10::Stream *, bool)>(
        swapkit::torchs_function(swapkit::npu_library, "_ZNK7c10_npu9NPUStream6streamEb"));
    TORCH_CHECK(ask != nullptr, "swapkit: this torch_npu does not expose its streams");
    return ask(stream, false);
}

c10::Stream current_of(int device) {
    c10::Device name(npu, static_cast<c10::DeviceIndex>(device));
    return c10::impl::VirtualGuardImpl(npu).getStream(name);
}

// Note the stream of a request: nearly always this thread's current one.
void note_requested(int device, void *handle) {
    if (streams_of(device).latest.load(std::memory_order_relaxed) != handle) {
        c10::Stream current = current_of(device);
        c10::StreamId id = handle_of(&current) == handle ? current.id() : no_id;
        note_stream(device, {.handle = handle, .device = device, .id = id});
    }
}

// Wait for the host queues of all streams of a device, and for the device.
void synchronize_current_device() {
    static const auto synchronize = reinterpret_cast<bool (*)(bool)>(
        swapkit::torchs_function(swapkit::npu_library, "_ZN7c10_npu20npuSynchronizeDeviceEb"));
    TORCH_CHECK(synchronize != nullptr, "swapkit: this torch_npu does not expose its queues");
    (void)synchronize(true);
}

// Wait until all operators queued on the streams that a device's pool knows are in these streams.
void settle(int index) {
    std::vector<Known> known;
    {
        std::lock_guard lock(streams[index].mutex);
        known = streams[index].known;
    }
    for (const Known &stream : known) {
        c10::Device device(npu, static_cast<c10::DeviceIndex>(stream.device));
        c10::OptionalDeviceGuard current;
        if (c10::impl::VirtualGuardImpl(npu).getDevice() != device) { // it has the queue
            current.reset_device(device);
        }
        if (stream.id == no_id) {
            synchronize_current_device();
        } else {
            (void)swapkit::stream_handle(device, stream.id);
        }
    }
}

// While it exists, other threads can have the GIL that this thread may hold.
class WithoutGil {
  public:
    WithoutGil() {
        if (Py_IsInitialized() != 0 && swapkit::has_python()) {
            others_.emplace();
        }
    }

  private:
    std::optional<swapkit::WithoutPython> others_;
};

} // namespace

extern "C" {

// Without the GIL: the take may wait for torch_npu's queue, or for a thread that does and holds
// blocks, and those may need it.
void *swapkit_npu_alloc(std::size_t nbytes, int device, void *stream) {
    if (nbytes == 0) { // often: torch_npu allocates for tensors without data, too
        return nullptr;
    }
    note_requested(device, stream);
    WithoutGil others;
    return swapkit::device_alloc(nbytes, device, static_cast<sk_stream *>(stream));
}

// Called by any thread, also by those that empty the queues.
void swapkit_npu_free(void *address, std::size_t, int device, void *) {
    swapkit::device_free(address, device);
}

// Also called when the interpreter exits, without `check_error`.
void swapkit_npu_reset(bool check_error) {
    try {
        swapkit::device_trim();
    } catch (const c10::Error &) {
        if (check_error) {
            throw;
        }
    }
}

void swapkit_npu_record_stream(void *address, const c10::Stream *stream) {
    void *handle = handle_of(stream);
    Known noted = {.handle = handle, .device = stream->device_index(), .id = stream->id()};
    for (int device = 0; device < swapkit::most_allocators; device++) {
        if (swapkit::device_is_open(device)) { // the memory may be of another device
            note_stream(device, noted);
        }
    }
    swapkit::device_use(address, static_cast<sk_stream *>(handle));
}

// Torch_npu calls this when the current stream has waited for the work on `stream`.
void swapkit_npu_erase_stream(void *address, const c10::Stream *stream) {
    c10::Stream current = current_of(stream->device_index());
    swapkit::device_unuse(address, static_cast<sk_stream *>(handle_of(stream)),
                          static_cast<sk_stream *>(handle_of(&current)));
}

void *swapkit_npu_base(void *address, std::size_t *nbytes) {
    return swapkit::device_base(address, nbytes);
}

void swapkit_npu_fraction(double fraction, int device) { swapkit::device_limit(fraction, device); }

void swapkit_npu_begin_pool(
    int, std::pair<unsigned long long, unsigned long long>,
    std::function<bool(void *)>) { // NOLINT(performance-unnecessary-value-param)
    TORCH_CHECK(false, "swapkit's pool does not support private pools (NPU graphs, MemPool). "
                       "Do not install swapkit in a program that needs them.");
}

// The statistics that torch_npu itself asks for in C++: without this function it aborts. It calls
// the function as one of C++; the name has to be found without mangling.
// NOLINTNEXTLINE(clang-diagnostic-return-type-c-linkage)
c10::CachingDeviceAllocator::DeviceStats swapkit_npu_stats(c10::DeviceIndex device) {
    return swapkit::device_stats(device);
}

void swapkit_npu_reset_peak(c10::DeviceIndex device) { swapkit::device_reset_peak(device); }

// The pool's callback (`sk_settle_fn`); `context`: the device's index. Torch_npu raises the errors
// of queued operators here.
sk_status swapkit_npu_settle(void *context, char *text, std::size_t capacity) {
    std::string why;
    try {
        settle(static_cast<int>(reinterpret_cast<std::intptr_t>(context)));
        return SK_OK;
    } catch (const c10::Error &error) {
        why = error.what_without_backtrace();
    } catch (const std::exception &error) {
        why = error.what();
    }
    (void)std::snprintf(text, capacity, "%s", why.c_str());
    return SK_BACKEND_FAILED;
}

} // extern "C"
