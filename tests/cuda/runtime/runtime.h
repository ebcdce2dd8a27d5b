/* A CUDA runtime on top of whatever driver `libcuda.so.1` is: here the simulated one.
 *
 * It is compiled against the headers in the wheel that torch uses, so that every prototype and
 * every structure is the one torch was built with; nothing of them is kept here. A stream, an event
 * and an address mean the same to the runtime and to the driver, and error codes have the same
 * numbers.
 *
 * Device code cannot run: a launch fails with cudaErrorNotSupported and says once which kernel it
 * was. `tests/cuda/kernels` computes in its place. */
#ifndef SIMULATED_RUNTIME_H
#define SIMULATED_RUNTIME_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>

#define RT_DRIVER_FUNCTIONS(X)                                                                     \
    X(cuInit)                                                                                      \
    X(cuDriverGetVersion)                                                                          \
    X(cuGetErrorString)                                                                            \
    X(cuDeviceGetCount)                                                                            \
    X(cuDeviceGet)                                                                                 \
    X(cuDeviceGetName)                                                                             \
    X(cuDeviceTotalMem)                                                                            \
    X(cuDeviceGetAttribute)                                                                        \
    X(cuDeviceGetUuid)                                                                             \
    X(cuDeviceCanAccessPeer)                                                                       \
    X(cuDevicePrimaryCtxRetain)                                                                    \
    X(cuCtxGetCurrent)                                                                             \
    X(cuCtxSetCurrent)                                                                             \
    X(cuCtxGetDevice)                                                                              \
    X(cuCtxSynchronize)                                                                            \
    X(cuCtxEnablePeerAccess)                                                                       \
    X(cuCtxGetStreamPriorityRange)                                                                 \
    X(cuMemGetInfo)                                                                                \
    X(cuMemAlloc)                                                                                  \
    X(cuMemFree)                                                                                   \
    X(cuMemHostAlloc)                                                                              \
    X(cuMemFreeHost)                                                                               \
    X(cuMemHostRegister)                                                                           \
    X(cuMemHostUnregister)                                                                         \
    X(cuPointerGetAttribute)                                                                       \
    X(cuStreamCreateWithPriority)                                                                  \
    X(cuStreamDestroy)                                                                             \
    X(cuStreamSynchronize)                                                                         \
    X(cuStreamQuery)                                                                               \
    X(cuStreamWaitEvent)                                                                           \
    X(cuStreamIsCapturing)                                                                         \
    X(cuEventCreate)                                                                               \
    X(cuEventDestroy)                                                                              \
    X(cuEventRecord)                                                                               \
    X(cuEventQuery)                                                                                \
    X(cuEventSynchronize)                                                                          \
    X(cuEventElapsedTime)                                                                          \
    X(cuMemcpyAsync)                                                                               \
    X(cuMemcpyHtoDAsync)                                                                           \
    X(cuMemcpyDtoHAsync)                                                                           \
    X(cuMemcpyDtoDAsync)                                                                           \
    X(cuMemcpyPeerAsync)                                                                           \
    X(cuMemcpyHtoD)                                                                                \
    X(cuMemcpyDtoH)                                                                                \
    X(cuMemcpyDtoD)                                                                                \
    X(cuMemsetD8Async)                                                                             \
    X(cuMemsetD8)                                                                                  \
    X(cuLaunchHostFunc)

struct rt_driver {
#define RT_MEMBER(name) __typeof__(name) *name;
    RT_DRIVER_FUNCTIONS(RT_MEMBER)
#undef RT_MEMBER
};

/* Valid after rt_load or rt_enter returned CUDA_SUCCESS. */
extern struct rt_driver rt_driver;

/* Load and initialise the driver; once a process. */
CUresult rt_load(void);

/* The address of a driver function by its public name, newest version first; NULL if absent. */
void *rt_driver_symbol(const char *name);

/* Load the driver and see to it that the calling thread has a context. */
CUresult rt_enter(void);

/* The primary context of a device, retained for the rest of the process. */
CUresult rt_primary(int device, CUcontext *out);

/* Note the calling thread's last error and return it as the runtime's code. */
cudaError_t rt_done(CUresult result);

/* What most functions are: enter, one call of the driver, done. */
#define RT_CALL(call)                                                                              \
    do {                                                                                           \
        CUresult entered = rt_enter();                                                             \
        return rt_done(entered != CUDA_SUCCESS ? entered : rt_driver.call);                        \
    } while (0)

#endif
