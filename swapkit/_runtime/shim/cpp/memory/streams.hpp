// streams.hpp - the streams of a device, and in whose order a storage is used.
//
// Memory goes back to its allocator in the order of the stream it was taken on. Whoever uses it on
// another stream waits for that one, and tells the allocator, which then waits in its turn before
// it hands the memory out again. The CPU has no streams: what is called there is done.
#ifndef SWAPKIT_STREAMS_HPP
#define SWAPKIT_STREAMS_HPP

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>

struct sk_stream;

namespace swapkit {

// Raise what a request that the pool refused deserves: torch's own error if memory is out.
void require_memory(const void *address);

// Torch's allocator for a kind of device, whoever stands below it.
c10::Allocator *allocator_of(c10::DeviceType type);

// Torch's libraries that the shim is not linked with.
constexpr const char *cuda_library = "libc10_cuda.so", *python_library = "libtorch_python.so";
// What such a library has by the name that the compiler gave it; null: it, or the library, is not
// there.
void *torchs_function(const char *library, const char *name);

// Whether a storage's memory came from torch's allocator, rather than from another library.
bool is_of_allocator(c10::Device device, const c10::StorageImpl &storage);

inline bool has_streams(c10::Device device) { return !device.is_cpu(); }

// This thread's current stream, as torch numbers it.
std::int64_t current_stream(c10::Device device);
// The driver's own handle of a stream.
sk_stream *stream_handle(c10::Device device, std::int64_t stream);
// Let what is queued on `later` from now on wait for what `earlier` has been given.
void order_streams(c10::Device device, std::int64_t earlier, std::int64_t later);
// Let the allocator know that a storage is used on a stream, too.
void note_use(c10::StorageImpl *storage, c10::Device device, std::int64_t stream);

// What torch's own allocator has handed out and reserved on a device.
struct Usage {
    std::ptrdiff_t in_use_bytes, reserved_bytes;
};
Usage device_usage(c10::Device device);

} // namespace swapkit

#endif
