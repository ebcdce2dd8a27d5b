// cuda.cpp - the functions that torch's CUDAPluggableAllocator takes by address.
//
// No CUDA header is needed: a stream is a pointer. See torch/csrc/cuda/CUDAPluggableAllocator.h.
#include "memory/device_allocator.hpp"

#include <c10/util/Exception.h>

#include <functional>
#include <utility>

extern "C" {

void *swapkit_cuda_alloc(std::size_t nbytes, int device, void *stream) {
    return swapkit::device_alloc(nbytes, device, static_cast<sk_stream *>(stream));
}

void swapkit_cuda_free(void *address, std::size_t, int device, void *) {
    swapkit::device_free(address, device);
}

void swapkit_cuda_reset() { swapkit::device_trim(); }

void swapkit_cuda_record_stream(void *address, void *stream) {
    swapkit::device_use(address, static_cast<sk_stream *>(stream));
}

void *swapkit_cuda_base(void *address, std::size_t *nbytes) {
    return swapkit::device_base(address, nbytes);
}

void swapkit_cuda_fraction(double fraction, int device) { swapkit::device_limit(fraction, device); }

void swapkit_cuda_begin_pool(
    int, std::pair<unsigned long long, unsigned long long>,
    std::function<bool(void *)>) { // NOLINT(performance-unnecessary-value-param)
    TORCH_CHECK(false,
                "swapkit's pool does not support private pools (CUDA graphs, MemPool). Use "
                "swapkit.install(device=\"cuda\", allocator=\"torch\"), which leaves torch's "
                "own allocator in place.");
}

} // extern "C"
