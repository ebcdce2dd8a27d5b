// device_allocator.hpp - swapkit's pools as the allocator of torch's accelerator.
//
// `cuda.cpp` and `npu.cpp` export these functions in the form that torch expects for each type of
// device; a process has one type. Each device has one pool, made when torch first allocates on the
// device, since opening a device takes some of its memory. Any thread may call them.
#ifndef SWAPKIT_DEVICE_ALLOCATOR_HPP
#define SWAPKIT_DEVICE_ALLOCATOR_HPP

#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>

struct sk_stream;

namespace swapkit {

constexpr int most_allocators = 64;

// Whether torch has allocated on a device.
bool device_is_open(int device);
// Return memory for work on `stream`; null only for 0 bytes.
void *device_alloc(std::size_t nbytes, int device, sk_stream *stream);
void device_free(void *address, int device);
// Return cached memory to the devices. Raises if the devices' work has failed.
void device_trim();
// Note that `stream` uses the memory, or that `current` waits for that use.
void device_use(void *address, sk_stream *stream);
void device_unuse(void *address, sk_stream *stream, sk_stream *current);
// Return the beginning of the segment that holds an address, and its bytes.
void *device_base(void *address, std::size_t *nbytes);
// Return the statistics of a device's pool; reset its peaks. Nothing for a device without a pool.
c10::CachingDeviceAllocator::DeviceStats device_stats(int device);
void device_reset_peak(int device);
// Limit a device's pool to a share of the device's memory.
void device_limit(double share, int device);

} // namespace swapkit

#endif
