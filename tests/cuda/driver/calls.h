/* calls.h - what every driver call does first and last, and the list of all calls.
 *
 * Included by sim.h.
 */
#ifndef CUSIM_CALLS_H
#define CUSIM_CALLS_H

typedef enum sim_need {
    SIM_NEEDS_NOTHING, /* not even cuInit() */
    SIM_NEEDS_INIT,
    SIM_NEEDS_CONTEXT,     /* a current one without a sticky error */
    SIM_NEEDS_ANY_CONTEXT, /* does its work in spite of a sticky error, and then returns it */
} sim_need;

#define SIM_FUNCTIONS(X)                                                                           \
    X(cuInit, NOTHING)                                                                             \
    X(cuDriverGetVersion, NOTHING)                                                                 \
    X(cuGetErrorName, NOTHING)                                                                     \
    X(cuGetErrorString, NOTHING)                                                                   \
    X(cuDeviceGetCount, INIT)                                                                      \
    X(cuDeviceGet, INIT)                                                                           \
    X(cuDeviceGetName, INIT)                                                                       \
    X(cuDeviceTotalMem_v2, INIT)                                                                   \
    X(cuDeviceGetAttribute, INIT)                                                                  \
    X(cuDeviceGetUuid_v2, INIT)                                                                    \
    X(cuDeviceCanAccessPeer, INIT)                                                                 \
    X(cuDevicePrimaryCtxRetain, INIT)                                                              \
    X(cuDevicePrimaryCtxRelease_v2, INIT)                                                          \
    X(cuDevicePrimaryCtxReset_v2, INIT)                                                            \
    X(cuDevicePrimaryCtxGetState, INIT)                                                            \
    X(cuCtxGetCurrent, INIT)                                                                       \
    X(cuCtxSetCurrent, INIT)                                                                       \
    X(cuCtxPushCurrent_v2, INIT)                                                                   \
    X(cuCtxPopCurrent_v2, INIT)                                                                    \
    X(cuCtxGetDevice, ANY_CONTEXT)                                                                 \
    X(cuCtxSynchronize, CONTEXT)                                                                   \
    X(cuCtxEnablePeerAccess, CONTEXT)                                                              \
    X(cuCtxGetStreamPriorityRange, CONTEXT)                                                        \
    X(cuMemGetInfo_v2, CONTEXT)                                                                    \
    X(cuMemAlloc_v2, CONTEXT)                                                                      \
    X(cuMemFree_v2, ANY_CONTEXT)                                                                   \
    X(cuMemGetAddressRange_v2, CONTEXT)                                                            \
    X(cuPointerGetAttribute, INIT)                                                                 \
    X(cuMemAddressReserve, INIT)                                                                   \
    X(cuMemAddressFree, INIT)                                                                      \
    X(cuMemCreate, INIT)                                                                           \
    X(cuMemRelease, INIT)                                                                          \
    X(cuMemRetainAllocationHandle, INIT)                                                           \
    X(cuMemMap, INIT)                                                                              \
    X(cuMemUnmap, INIT)                                                                            \
    X(cuMemSetAccess, INIT)                                                                        \
    X(cuMemGetAllocationGranularity, INIT)                                                         \
    X(cuMemHostAlloc, CONTEXT)                                                                     \
    X(cuMemFreeHost, ANY_CONTEXT)                                                                  \
    X(cuMemHostRegister_v2, CONTEXT)                                                               \
    X(cuMemHostUnregister, ANY_CONTEXT)                                                            \
    X(cuStreamCreate, CONTEXT)                                                                     \
    X(cuStreamCreateWithPriority, CONTEXT)                                                         \
    X(cuStreamDestroy_v2, ANY_CONTEXT)                                                             \
    X(cuStreamSynchronize, CONTEXT)                                                                \
    X(cuStreamQuery, CONTEXT)                                                                      \
    X(cuStreamWaitEvent, CONTEXT)                                                                  \
    X(cuStreamIsCapturing, CONTEXT)                                                                \
    X(cuLaunchHostFunc, CONTEXT)                                                                   \
    X(cuEventCreate, CONTEXT)                                                                      \
    X(cuEventDestroy_v2, ANY_CONTEXT)                                                              \
    X(cuEventRecord, CONTEXT)                                                                      \
    X(cuEventQuery, CONTEXT)                                                                       \
    X(cuEventSynchronize, CONTEXT)                                                                 \
    X(cuEventElapsedTime, CONTEXT)                                                                 \
    X(cuMemcpyAsync, CONTEXT)                                                                      \
    X(cuMemcpyHtoDAsync_v2, CONTEXT)                                                               \
    X(cuMemcpyDtoHAsync_v2, CONTEXT)                                                               \
    X(cuMemcpyDtoDAsync_v2, CONTEXT)                                                               \
    X(cuMemcpyPeerAsync, CONTEXT)                                                                  \
    X(cuMemcpyHtoD_v2, CONTEXT)                                                                    \
    X(cuMemcpyDtoH_v2, CONTEXT)                                                                    \
    X(cuMemcpyDtoD_v2, CONTEXT)                                                                    \
    X(cuMemsetD8Async, CONTEXT)                                                                    \
    X(cuMemsetD8_v2, CONTEXT)

#define SIM_FUNCTION_MEMBER(name, need) SIM_##name,
typedef enum sim_function { SIM_FUNCTIONS(SIM_FUNCTION_MEMBER) SIM_FUNCTION_COUNT } sim_function;

/* Count the call, check what the function needs and take the lock. On any error the lock is not
 * held, and the error is what the function returns. `context` may be NULL if none is needed. */
CUresult sim_enter(sim_function function, sim_context **context);
/* Give the lock back. CUDA_SUCCESS becomes the context's sticky error, if it has one; `context` may
 * be NULL. */
CUresult sim_leave(const sim_context *context, CUresult result);
/* Only count the call: for functions that never fail. */
void sim_count(sim_function function);
void sim_calls_reset(void);
/* Set in workers that call functions of the program: those must not call the driver. */
void sim_forbid_calls(bool forbid);

/* Remember why arguments were wrong. Returns `result`. */
CUresult sim_refuse(CUresult result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Inside. Count a fault and make it the context's sticky error. */
void sim_problem(sim_context *context, CUresult result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Inside. Wait for `changed`; notify wakes everybody who does. */
void sim_wait(void);
void sim_notify(void);

#endif
