/* Memory of the device and of the host, and copies. */
#include "runtime.h"
#include "timed.h"

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    RT_CALL(cuMemGetInfo(free_bytes, total_bytes));
}

cudaError_t cudaMalloc(void **out, size_t nbytes) {
    if (nbytes == 0) {
        *out = NULL;
        return rt_done(rt_enter());
    }
    RT_CALL(cuMemAlloc((CUdeviceptr *)out, nbytes));
}

/* Freeing nothing is the usual way to make the context. */
cudaError_t cudaFree(void *address) {
    if (address == NULL) {
        return rt_done(rt_enter());
    }
    RT_CALL(cuMemFree((CUdeviceptr)address));
}

cudaError_t cudaHostAlloc(void **out, size_t nbytes, unsigned flags) {
    RT_CALL(cuMemHostAlloc(out, nbytes, flags));
}

cudaError_t cudaMallocHost(void **out, size_t nbytes) { return cudaHostAlloc(out, nbytes, 0); }

cudaError_t cudaFreeHost(void *address) {
    if (address == NULL) {
        return rt_done(rt_enter());
    }
    RT_CALL(cuMemFreeHost(address));
}

cudaError_t cudaHostRegister(void *address, size_t nbytes, unsigned flags) {
    RT_CALL(cuMemHostRegister(address, nbytes, flags));
}

cudaError_t cudaHostUnregister(void *address) { RT_CALL(cuMemHostUnregister(address)); }

/* An address the driver does not know is not an error but plain host memory. */
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
    CUresult result = rt_enter();
    if (result != CUDA_SUCCESS) {
        return rt_done(result);
    }
    CUmemorytype kind = 0;
    CUdeviceptr pointer = (CUdeviceptr)address;
    out->type = cudaMemoryTypeUnregistered;
    out->device = cudaInvalidDeviceId;
    out->devicePointer = NULL;
    out->hostPointer = (void *)address;
    if (rt_driver.cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer) !=
        CUDA_SUCCESS) {
        return cudaSuccess;
    }
    bool on_host = kind == CU_MEMORYTYPE_HOST;
    out->type = on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->hostPointer = on_host ? (void *)address : NULL;
    out->devicePointer = (void *)address;
    if (rt_driver.cuPointerGetAttribute(&out->device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                        pointer) != CUDA_SUCCESS) {
        out->device = 0;
    }
    return cudaSuccess;
}

static CUresult copy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind,
                     CUstream stream) {
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return rt_driver.cuMemcpyHtoDAsync((CUdeviceptr)to, from, nbytes, stream);
    case cudaMemcpyDeviceToHost:
        return rt_driver.cuMemcpyDtoHAsync(to, (CUdeviceptr)from, nbytes, stream);
    case cudaMemcpyDeviceToDevice:
        return rt_driver.cuMemcpyDtoDAsync((CUdeviceptr)to, (CUdeviceptr)from, nbytes, stream);
    default:
        return rt_driver.cuMemcpyAsync((CUdeviceptr)to, (CUdeviceptr)from, nbytes, stream);
    }
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    cusimrt_flush();
    CUresult result = rt_enter();
    if (result != CUDA_SUCCESS || nbytes == 0) {
        return rt_done(result);
    }
    return rt_done(copy(to, from, nbytes, kind, stream));
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
    cusimrt_flush();
    CUresult result = rt_enter();
    for (size_t row = 0; row < height && result == CUDA_SUCCESS; row++) {
        result = copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width,
                      kind, stream);
    }
    return rt_done(result);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind) {
    cusimrt_flush();
    CUresult result = rt_enter();
    if (result != CUDA_SUCCESS || nbytes == 0) {
        return rt_done(result);
    }
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return rt_done(rt_driver.cuMemcpyHtoD((CUdeviceptr)to, from, nbytes));
    case cudaMemcpyDeviceToHost:
        return rt_done(rt_driver.cuMemcpyDtoH(to, (CUdeviceptr)from, nbytes));
    case cudaMemcpyDeviceToDevice:
        return rt_done(rt_driver.cuMemcpyDtoD((CUdeviceptr)to, (CUdeviceptr)from, nbytes));
    default:
        result = copy(to, from, nbytes, kind, NULL);
        return rt_done(result != CUDA_SUCCESS ? result : rt_driver.cuStreamSynchronize(NULL));
    }
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t nbytes, cudaStream_t stream) {
    CUcontext target = NULL;
    CUcontext source = NULL;
    cusimrt_flush();
    CUresult result = rt_enter();
    if (result == CUDA_SUCCESS) {
        result = rt_primary(to_device, &target);
    }
    if (result == CUDA_SUCCESS) {
        result = rt_primary(from_device, &source);
    }
    if (result != CUDA_SUCCESS) {
        return rt_done(result);
    }
    return rt_done(rt_driver.cuMemcpyPeerAsync((CUdeviceptr)to, target, (CUdeviceptr)from, source,
                                               nbytes, stream));
}

cudaError_t cudaMemsetAsync(void *address, int value, size_t nbytes, cudaStream_t stream) {
    cusimrt_flush();
    if (nbytes == 0) {
        return rt_done(rt_enter());
    }
    RT_CALL(cuMemsetD8Async((CUdeviceptr)address, (unsigned char)value, nbytes, stream));
}

cudaError_t cudaMemset(void *address, int value, size_t nbytes) {
    RT_CALL_IN_ORDER(cuMemsetD8((CUdeviceptr)address, (unsigned char)value, nbytes));
}
