/* cuda_device.h - the driver's functions that tests call themselves, and the simulated driver's. */
#ifndef SWAPKIT_TESTS_CUDA_DEVICE_H
#define SWAPKIT_TESTS_CUDA_DEVICE_H

#include "../cuda/driver/cusim.h"

#define CUDA_TEST_CALLS(X)                                                                         \
    X(cuInit)                                                                                      \
    X(cuDevicePrimaryCtxRetain)                                                                    \
    X(cuDevicePrimaryCtxRelease_v2)                                                                \
    X(cuCtxPushCurrent_v2)                                                                         \
    X(cuCtxPopCurrent_v2)                                                                          \
    X(cuCtxGetCurrent)                                                                             \
    X(cuCtxSetCurrent)                                                                             \
    X(cuPointerGetAttribute)                                                                       \
    X(cuMemcpyHtoD_v2)                                                                             \
    X(cuMemcpyDtoH_v2)                                                                             \
    X(cuMemsetD8Async)                                                                             \
    X(cuStreamSynchronize)                                                                         \
    X(cuMemHostAlloc)                                                                              \
    X(cuMemFreeHost)

#define CUSIM_TEST_CALLS(X)                                                                        \
    X(cusim_options_init)                                                                          \
    X(cusim_configure)                                                                             \
    X(cusim_hold)                                                                                  \
    X(cusim_delay_stream)                                                                          \
    X(cusim_run)                                                                                   \
    X(cusim_fail)                                                                                  \
    X(cusim_break)                                                                                 \
    X(cusim_calls)                                                                                 \
    X(cusim_report)                                                                                \
    X(cusim_last_problem)

#define CUDA_TEST_MEMBER(name) __typeof__(name) *name;
typedef struct cuda_calls {
    CUDA_TEST_CALLS(CUDA_TEST_MEMBER)
    CUSIM_TEST_CALLS(CUDA_TEST_MEMBER) /* all NULL if the driver is a real one */
} cuda_calls;
#undef CUDA_TEST_MEMBER

/* Found at the first call, which also initialises the driver. */
const cuda_calls *cuda(void);
/* The same; skips the test unless the driver is the simulated one. */
const cuda_calls *cusim(void);

#endif
