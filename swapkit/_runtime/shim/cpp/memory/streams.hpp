// streams.hpp - the streams of a device, and the stream order in which storages are used.
//
// Memory goes back to its allocator in the order of the stream it was allocated on. Code that uses
// the memory on another stream waits for the first stream and notifies the allocator, which waits
// for the other stream before it reuses the memory. The CPU has no streams: calls there are
// synchronous.
#ifndef SWAPKIT_STREAMS_HPP
#define SWAPKIT_STREAMS_HPP

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>

struct sk_stream;

namespace swapkit {

// Raise the error of a request that the pool refused: torch's own error if memory is out.
void require_memory(const void *address);

// Return torch's current allocator for a device type, whether ours or torch's own.
c10::Allocator *allocator_of(c10::DeviceType type);

// Torch libraries that the shim is not linked with.
constexpr const char *cuda_library = "libc10_cuda.so", *npu_library = "libtorch_npu.so",
                     *python_library = "libtorch_python.so";
// Return a symbol of such a library by its mangled name; null: the symbol or the library is not
// there.
void *torchs_function(const char *library, const char *name);

// Return whether a storage's memory came from torch's allocator, not from another library.
bool is_of_allocator(c10::Device device, const c10::StorageImpl &storage);

inline bool has_streams(c10::Device device) { return !device.is_cpu(); }

// Return the id of this thread's current stream.
std::int64_t current_stream(c10::Device device);
// Return the driver's handle of a stream, once work that torch has queued for the stream on the
// host is in the stream (torch_npu's task queue): a call with the handle is ordered behind that
// work.
sk_stream *stream_handle(c10::Device device, std::int64_t stream);
// Let work queued on `later` from now on wait for the work already queued on `earlier`.
void order_streams(c10::Device device, std::int64_t earlier, std::int64_t later);
// Notify the allocator that a storage is also used on a stream.
void note_use(c10::StorageImpl *storage, c10::Device device, std::int64_t stream);

// The bytes that torch's own allocator has handed out and reserved on a device.
struct Usage {
    std::ptrdiff_t in_use_bytes, reserved_bytes;
};
Usage device_usage(c10::Device device);

} // namespace swapkit

#endif
