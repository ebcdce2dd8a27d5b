// allocator.cpp - swapkit's pool as torch's CPU allocator.
//
// Wraps the core's entry in a c10::Allocator, and turns a failed request into torch's own
// OutOfMemoryError. The entry and the core are never unloaded, so they outlive every tensor.
#include "memory/streams.hpp"
#include "python/links.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstddef>

void swapkit::require_memory(const void *address) {
    bool is_broken = address == nullptr && !links.sk_entry_is_out_of_memory();
    TORCH_CHECK(!is_broken, links.sk_entry_error());
    TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, links.sk_entry_error());
}

namespace {

using swapkit::links;

sk_entry *entry = nullptr;
c10::Allocator *previous = nullptr;

void release(void *address) {
    c10::profiledCPUMemoryReporter().Delete(address);
    links.sk_entry_free(entry, address);
}

class PoolAllocator final : public c10::Allocator {
  public:
    c10::DataPtr allocate(std::size_t nbytes) override {
        void *address = nullptr;
        if (nbytes > 0) {
            address = links.sk_entry_alloc(entry, nbytes, nullptr);
            swapkit::require_memory(address);
            c10::profiledCPUMemoryReporter().New(address, nbytes);
        }
        return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }

    void copy_data(void *to, const void *from, std::size_t nbytes) const override {
        default_copy_data(to, from, nbytes);
    }
};

PoolAllocator allocator;

} // namespace

extern "C" {

// Allocate every CPU tensor made from now on in a pool. False: another allocator was registered
// with a higher priority, and torch keeps it.
bool swapkit_shim_install(sk_entry *pool_entry) {
    entry = pool_entry;
    if (c10::GetCPUAllocator() != &allocator) {
        previous = c10::GetCPUAllocator();
        c10::SetCPUAllocator(&allocator);
    }
    return c10::GetCPUAllocator() == &allocator;
}

// Restore the previous allocator; tensors in the pool stay valid.
void swapkit_shim_uninstall() {
    if (previous != nullptr && c10::GetCPUAllocator() == &allocator) {
        c10::SetCPUAllocator(previous);
    }
}

} // extern "C"
