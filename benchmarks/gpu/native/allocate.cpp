// How long one allocation and its release take, called as tensors call: through the allocator that
// a storage of torch names as its own. Only c10's headers, so that it compiles in seconds.

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <chrono>
#include <cstdint>
#include <vector>

// Nanoseconds for each pair of taking `nbytes` and giving them back; `held` blocks of the same size
// are held meanwhile. Negative: the storage names no allocator, or it failed.
extern "C" double pair_ns(std::uintptr_t storage, std::size_t nbytes, long pairs, long held) {
    auto *const impl = reinterpret_cast<c10::StorageImpl *>(storage);
    c10::Allocator *const allocator = impl->allocator();
    if (allocator == nullptr) {
        return -1;
    }
    try {
        std::vector<c10::DataPtr> blocks;
        for (long index = 0; index < held; ++index) {
            blocks.push_back(allocator->allocate(nbytes));
        }
        const auto begin = std::chrono::steady_clock::now();
        for (long index = 0; index < pairs; ++index) {
            const c10::DataPtr block = allocator->allocate(nbytes);
        }
        const auto end = std::chrono::steady_clock::now();
        return std::chrono::duration<double, std::nano>(end - begin).count() / double(pairs);
    } catch (...) {
        return -1;
    }
}
