/* What there is: versions, devices, their properties. */
#include "runtime.h"
#include "timed.h"

#include <stdio.h>
#include <string.h>

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = 0;
    CUresult result = rt_load();
    return result != CUDA_SUCCESS ? cudaSuccess : rt_done(rt_driver.cuDriverGetVersion(version));
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    CUresult result = rt_load();
    return rt_done(result != CUDA_SUCCESS ? result : rt_driver.cuDeviceGetCount(count));
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    CUresult result = rt_load();
    return rt_done(result != CUDA_SUCCESS ? result
                                          : rt_driver.cuDeviceGetAttribute(
                                                value, (CUdevice_attribute)attribute, device));
}

static int attribute(int device, CUdevice_attribute which, int otherwise) {
    int value = 0;
    CUresult result = rt_driver.cuDeviceGetAttribute(&value, which, device);
    return result == CUDA_SUCCESS && value != 0 ? value : otherwise;
}

/* The limits of every device of the last ten years stand in for what the driver does not know. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    memset(out, 0, sizeof(*out));
    CUresult result = rt_load();
    if (result == CUDA_SUCCESS) {
        result = rt_driver.cuDeviceGetName(out->name, (int)sizeof(out->name), device);
    }
    if (result == CUDA_SUCCESS) {
        result = rt_driver.cuDeviceTotalMem(&out->totalGlobalMem, device);
    }
    if (result == CUDA_SUCCESS) {
        result = rt_driver.cuDeviceGetUuid((CUuuid *)&out->uuid, device);
    }
    if (result != CUDA_SUCCESS) {
        return rt_done(result);
    }
    out->major = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 8);
    out->minor = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0);
    out->multiProcessorCount = attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 8);
    out->l2CacheSize = attribute(device, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 4 << 20);
    out->asyncEngineCount = attribute(device, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2);
    out->pciBusID = attribute(device, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, device + 1);
    out->pciDeviceID = attribute(device, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0);
    out->warpSize = 32;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->sharedMemPerBlock = 48 << 10;
    out->sharedMemPerBlockOptin = out->sharedMemPerMultiprocessor = 96 << 10;
    out->totalConstMem = 64 << 10;
    out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
    out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 0x7fffffff;
    out->maxGridSize[1] = out->maxGridSize[2] = 65535;
    out->maxThreadsPerMultiProcessor =
        attribute(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048);
    out->maxBlocksPerMultiProcessor = 32;
    out->textureAlignment = 512;
    out->memPitch = 0x7fffffff;
    out->concurrentKernels = out->unifiedAddressing = out->canMapHostMemory = 1;
    out->streamPrioritiesSupported = out->hostRegisterSupported = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int nbytes, int device) {
    int bus = 0;
    cudaError_t error = cudaDeviceGetAttribute(&bus, cudaDevAttrPciBusId, device);
    if (error == cudaSuccess) {
        (void)snprintf(text, (size_t)nbytes, "0000:%02X:00.0", (unsigned)bus & 0xffU);
    }
    return error;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    RT_CALL(cuDeviceCanAccessPeer(can, device, peer));
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    CUcontext context = NULL;
    CUresult result = rt_enter();
    if (result == CUDA_SUCCESS) {
        result = rt_primary(peer, &context);
    }
    return rt_done(result != CUDA_SUCCESS ? result
                                          : rt_driver.cuCtxEnablePeerAccess(context, flags));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    RT_CALL(cuCtxGetStreamPriorityRange(least, greatest));
}

cudaError_t cudaDeviceSynchronize(void) { RT_CALL_IN_ORDER(cuCtxSynchronize()); }

static CUresult unsupported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

/* c10 wants every driver function it knows; those the driver lacks refuse when they are called. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    (void)version;
    (void)flags;
    CUresult result = rt_load();
    if (result != CUDA_SUCCESS) {
        return rt_done(result);
    }
    *out = rt_driver_symbol(name);
    if (*out == NULL) {
        *out = (void *)(uintptr_t)unsupported;
    }
    if (status != NULL) {
        *status = cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
}
