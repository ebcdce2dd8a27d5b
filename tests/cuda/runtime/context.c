/* Errors, and the device each thread has chosen. */
#include "runtime.h"

#include <pthread.h>

#define RT_MAX_DEVICES 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext primary[RT_MAX_DEVICES];
static _Thread_local int chosen;
static _Thread_local cudaError_t last_error;

cudaError_t rt_done(CUresult result) {
    cudaError_t error = (cudaError_t)result;
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

CUresult rt_primary(int device, CUcontext *out) {
    int count = 0;
    CUresult result = rt_load();
    if (result == CUDA_SUCCESS) {
        result = rt_driver.cuDeviceGetCount(&count);
    }
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (device < 0 || device >= count || device >= RT_MAX_DEVICES) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    (void)pthread_mutex_lock(&lock);
    if (primary[device] == NULL) {
        result = rt_driver.cuDevicePrimaryCtxRetain(&primary[device], device);
    }
    *out = primary[device];
    (void)pthread_mutex_unlock(&lock);
    return result;
}

static CUresult use(int device) {
    CUcontext context = NULL;
    CUresult result = rt_primary(device, &context);
    return result != CUDA_SUCCESS ? result : rt_driver.cuCtxSetCurrent(context);
}

CUresult rt_enter(void) {
    CUcontext current = NULL;
    CUresult result = rt_load();
    if (result == CUDA_SUCCESS) {
        result = rt_driver.cuCtxGetCurrent(&current);
    }
    return result != CUDA_SUCCESS || current != NULL ? result : use(chosen);
}

cudaError_t cudaSetDevice(int device) {
    CUresult result = use(device);
    if (result == CUDA_SUCCESS) {
        chosen = device;
    }
    return rt_done(result);
}

cudaError_t cudaGetDevice(int *device) {
    CUcontext current = NULL;
    CUresult result = rt_load();
    if (result == CUDA_SUCCESS) {
        result = rt_driver.cuCtxGetCurrent(&current);
    }
    if (result == CUDA_SUCCESS && current != NULL) {
        return rt_done(rt_driver.cuCtxGetDevice(device));
    }
    *device = chosen;
    return rt_done(result);
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t error) {
    const char *text = NULL;
    if (rt_load() != CUDA_SUCCESS ||
        rt_driver.cuGetErrorString((CUresult)error, &text) != CUDA_SUCCESS || text == NULL) {
        return "unrecognized error code";
    }
    return text;
}

const char *cudaGetErrorName(cudaError_t error) {
#define RT_NAME(name)                                                                              \
    case name:                                                                                     \
        return #name;
    switch ((int)error) {
        RT_NAME(cudaSuccess)
        RT_NAME(cudaErrorInvalidValue)
        RT_NAME(cudaErrorMemoryAllocation)
        RT_NAME(cudaErrorInitializationError)
        RT_NAME(cudaErrorNoDevice)
        RT_NAME(cudaErrorInvalidDevice)
        RT_NAME(cudaErrorDeviceUninitialized)
        RT_NAME(cudaErrorInvalidResourceHandle)
        RT_NAME(cudaErrorNotReady)
        RT_NAME(cudaErrorIllegalAddress)
        RT_NAME(cudaErrorPeerAccessAlreadyEnabled)
        RT_NAME(cudaErrorHostMemoryAlreadyRegistered)
        RT_NAME(cudaErrorHostMemoryNotRegistered)
        RT_NAME(cudaErrorLaunchFailure)
        RT_NAME(cudaErrorNotSupported)
        RT_NAME(cudaErrorStreamCaptureUnsupported)
    default:
        return "cudaErrorUnknown";
    }
#undef RT_NAME
}
