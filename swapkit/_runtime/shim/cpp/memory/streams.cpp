// streams.cpp - the streams of a device, through the interfaces that torch registers for its type.
#include "memory/streams.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <atomic>

#include <dlfcn.h>

namespace swapkit {

namespace {

c10::Stream stream_of(c10::Device device, std::int64_t stream) {
    return c10::Stream(c10::Stream::UNSAFE, device, stream);
}

// Return the driver's stream; torch_npu first empties its host queue. Torch 2.10 has the stream
// only on its CUDA class, which holds a c10::Stream and nothing else.
template <class Stream> void *handle_of(const Stream &stream) {
    if constexpr (requires { stream.native_handle(); }) {
        return stream.native_handle();
    } else {
        static const auto ask = reinterpret_cast<void *(*)(const Stream *)>(
            torchs_function(cuda_library, "_ZNK3c104cuda10CUDAStream6streamEv"));
        TORCH_CHECK(ask != nullptr, "swapkit: this torch does not expose driver streams");
        return ask(&stream);
    }
}

// Return torch_npu's current allocator; a c10::Allocator is its first base.
c10::Allocator *npu_allocator() {
    static auto *current = static_cast<std::atomic<c10::Allocator *> *>(
        torchs_function(npu_library, "_ZN7c10_npu19NPUCachingAllocator9allocatorE"));
    TORCH_CHECK(current != nullptr, "swapkit: this torch_npu does not expose its allocator");
    return current->load();
}

} // namespace

void *torchs_function(const char *library, const char *name) {
    void *loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    return loaded == nullptr ? nullptr : dlsym(loaded, name);
}

c10::Allocator *allocator_of(c10::DeviceType type) {
    switch (type) {
    case c10::DeviceType::CPU:
        return c10::GetCPUAllocator();
    case c10::DeviceType::CUDA: // the registered allocator is the initial one, not the current one
        return at::detail::getCUDAHooks().getCUDADeviceAllocator();
    case c10::DeviceType::PrivateUse1: // likewise
        return npu_allocator();
    default:
        return c10::GetAllocator(type);
    }
}

bool is_of_allocator(c10::Device device, const c10::StorageImpl &storage) {
    return !has_streams(device) ||
           storage.data_ptr().get_deleter() == allocator_of(device.type())->raw_deleter();
}

std::int64_t current_stream(c10::Device device) {
    return has_streams(device) ? c10::impl::VirtualGuardImpl(device.type()).getStream(device).id()
                               : 0;
}

sk_stream *stream_handle(c10::Device device, std::int64_t stream) {
    return has_streams(device) ? static_cast<sk_stream *>(handle_of(stream_of(device, stream)))
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
            .recordDataPtrOnStream(storage->_mutable_data_ptr_no_checks(),
                                   stream_of(device, stream));
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
