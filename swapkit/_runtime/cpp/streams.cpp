// streams.cpp - the streams of a device, by way of what torch registers for its kind.
#include "streams.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace swapkit {

namespace {

c10::Stream stream_of(c10::Device device, std::int64_t stream) {
    return c10::Stream(c10::Stream::UNSAFE, device, stream);
}

} // namespace

c10::Allocator *allocator_of(c10::DeviceType type) {
    switch (type) {
    case c10::DeviceType::CPU:
        return c10::GetCPUAllocator();
    case c10::DeviceType::CUDA: // the registered one is that of the start, not the present one
        return at::detail::getCUDAHooks().getCUDADeviceAllocator();
    default:
        return c10::GetAllocator(type);
    }
}

std::int64_t current_stream(c10::Device device) {
    return has_streams(device) ? c10::impl::VirtualGuardImpl(device.type()).getStream(device).id()
                               : 0;
}

sk_stream *stream_handle(c10::Device device, std::int64_t stream) {
    return has_streams(device) ? static_cast<sk_stream *>(stream_of(device, stream).native_handle())
                               : nullptr;
}

void order_streams(c10::Device device, std::int64_t earlier, std::int64_t later) {
    if (earlier != later) {
        c10::Event event(device.type());
        event.record(stream_of(device, earlier));
        event.block(stream_of(device, later));
    }
}

void note_use(c10::StorageImpl *storage, c10::Device device, std::int64_t stream) {
    if (has_streams(device)) {
        c10::impl::VirtualGuardImpl(device.type())
            .recordDataPtrOnStream(storage->data_ptr(), stream_of(device, stream));
    }
}

Usage device_usage(c10::Device device) {
    auto *allocator = dynamic_cast<c10::DeviceAllocator *>(allocator_of(device.type()));
    TORCH_CHECK(allocator != nullptr, "swapkit: ", device, " has no statistics");
    if (!allocator->initialized()) {
        return {};
    }
    auto stats = allocator->getDeviceStats(device.index());
    return {.in_use_bytes = stats.allocated_bytes[0].current,
            .reserved_bytes = stats.reserved_bytes[0].current};
}

} // namespace swapkit
