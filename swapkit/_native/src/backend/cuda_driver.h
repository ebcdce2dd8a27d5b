/* cuda_driver.h - the part of NVIDIA's driver interface that the cuda backend uses.
 *
 * The declarations are our own, of the driver's public binary interface; the library is opened at
 * run time, so the build needs nothing of CUDA. SK_CUDA_CALLS lists every function once, by the
 * versioned name under which the library exports it; the table of pointers is made from it. */
#ifndef SWAPKIT_BACKEND_CUDA_DRIVER_H
#define SWAPKIT_BACKEND_CUDA_DRIVER_H

#include "base/base.h"

typedef int sk__cu_result;
typedef int sk__cu_device;
typedef struct sk__cu_context sk__cu_context;
typedef unsigned long long sk__cu_address; /* of device memory */
typedef unsigned long long sk__cu_memory;  /* a handle of physical memory */

/* The results that this code interprets; the driver names the others. */
enum {
    SK_CU_SUCCESS = 0,
    SK_CU_OUT_OF_MEMORY = 2,
    SK_CU_DEINITIALIZED = 4,
    SK_CU_NO_DEVICE = 100,
    SK_CU_NOT_READY = 600,
};

enum {
    SK_CU_VIRTUAL_MEMORY = 102, /* attributes of a device */
    SK_CU_RDMA_WITH_VIRTUAL_MEMORY = 110,
    SK_CU_LOCATION_DEVICE = 1,
    SK_CU_ALLOCATION_PINNED = 1, /* the only type of physical memory */
    SK_CU_GRANULARITY_MINIMUM = 0,
    SK_CU_ACCESS_READ_WRITE = 3,
    SK_CU_HOST_PORTABLE = 1, /* locked for every context, not only the current one */
    SK_CU_STREAM_NON_BLOCKING = 1,
    SK_CU_EVENT_BLOCKING_SYNC = 1, /* waiting threads sleep */
    SK_CU_EVENT_NO_TIMING = 2,
};

typedef struct sk__cu_location {
    int type;
    int id;
} sk__cu_location;

typedef struct sk__cu_allocation {
    int type;
    int handle_types;
    sk__cu_location location;
    void *windows_metadata;
    unsigned char compression;
    unsigned char rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
} sk__cu_allocation;

typedef struct sk__cu_access {
    sk__cu_location location;
    int flags;
} sk__cu_access;

_Static_assert(sizeof(sk__cu_allocation) == 32, "the driver's CUmemAllocationProp");
_Static_assert(sizeof(sk__cu_access) == 12, "the driver's CUmemAccessDesc");

/* clang-format off */
#define SK_CUDA_CALLS(X)                                                                           \
    X(cuInit, (unsigned flags))                                                                    \
    X(cuDriverGetVersion, (int *version))                                                          \
    X(cuGetErrorName, (sk__cu_result result, const char **out))                                    \
    X(cuGetErrorString, (sk__cu_result result, const char **out))                                  \
    X(cuDeviceGetCount, (int *out))                                                                \
    X(cuDeviceGet, (sk__cu_device *out, int ordinal))                                              \
    X(cuDeviceGetAttribute, (int *out, int attribute, sk__cu_device device))                       \
    X(cuDeviceCanAccessPeer, (int *out, sk__cu_device device, sk__cu_device peer))                 \
    X(cuDevicePrimaryCtxRetain, (sk__cu_context **out, sk__cu_device device))                      \
    X(cuDevicePrimaryCtxRelease_v2, (sk__cu_device device))                                        \
    X(cuCtxGetCurrent, (sk__cu_context **out))                                                     \
    X(cuCtxPushCurrent_v2, (sk__cu_context *context))                                              \
    X(cuCtxPopCurrent_v2, (sk__cu_context **out))                                                  \
    X(cuMemGetInfo_v2, (size_t *free_bytes, size_t *total_bytes))                                  \
    X(cuMemAlloc_v2, (sk__cu_address *out, size_t nbytes))                                         \
    X(cuMemFree_v2, (sk__cu_address address))                                                      \
    X(cuMemGetAllocationGranularity, (size_t *out, const sk__cu_allocation *kind, int which))      \
    X(cuMemAddressReserve, (sk__cu_address *out, size_t nbytes, size_t alignment,                  \
                            sk__cu_address wish, unsigned long long flags))                        \
    X(cuMemAddressFree, (sk__cu_address address, size_t nbytes))                                   \
    X(cuMemCreate, (sk__cu_memory *out, size_t nbytes, const sk__cu_allocation *kind,              \
                    unsigned long long flags))                                                     \
    X(cuMemRelease, (sk__cu_memory memory))                                                        \
    X(cuMemMap, (sk__cu_address address, size_t nbytes, size_t offset, sk__cu_memory memory,       \
                 unsigned long long flags))                                                        \
    X(cuMemUnmap, (sk__cu_address address, size_t nbytes))                                         \
    X(cuMemSetAccess, (sk__cu_address address, size_t nbytes, const sk__cu_access *access,         \
                       size_t count))                                                              \
    X(cuMemHostRegister_v2, (void *address, size_t nbytes, unsigned flags))                        \
    X(cuMemHostUnregister, (void *address))                                                        \
    X(cuStreamCreate, (sk_stream **out, unsigned flags))                                           \
    X(cuStreamDestroy_v2, (sk_stream *stream))                                                     \
    X(cuStreamSynchronize, (sk_stream *stream))                                                    \
    X(cuStreamWaitEvent, (sk_stream *stream, sk_event *event, unsigned flags))                     \
    X(cuEventCreate, (sk_event **out, unsigned flags))                                             \
    X(cuEventDestroy_v2, (sk_event *event))                                                        \
    X(cuEventRecord, (sk_event *event, sk_stream *stream))                                         \
    X(cuEventQuery, (sk_event *event))                                                             \
    X(cuEventSynchronize, (sk_event *event))                                                       \
    X(cuMemcpyHtoDAsync_v2, (sk__cu_address to, const void *from, size_t nbytes,                   \
                             sk_stream *stream))                                                   \
    X(cuMemcpyDtoHAsync_v2, (void *to, sk__cu_address from, size_t nbytes, sk_stream *stream))     \
    X(cuMemcpyDtoDAsync_v2, (sk__cu_address to, sk__cu_address from, size_t nbytes,                \
                             sk_stream *stream))                                                   \
    X(cuLaunchHostFunc, (sk_stream *stream, void (*call)(void *), void *argument))
/* clang-format on */

/* clang-format off */
/* These may be NULL: the features that need them are then off. */
#define SK_CUDA_OPTIONAL_CALLS(X)                                                                  \
    X(cuMemRetainAllocationHandle, (sk__cu_memory *out, void *address)) /* CUDA 11.0 */
/* clang-format on */

#define SK_CUDA_MEMBER(name, arguments) sk__cu_result(*name) arguments;
typedef struct sk__cuda_driver {
    SK_CUDA_CALLS(SK_CUDA_MEMBER)
    SK_CUDA_OPTIONAL_CALLS(SK_CUDA_MEMBER)
} sk__cuda_driver;
#undef SK_CUDA_MEMBER

/* Open the library at `path` and find every function in it. SK_UNSUPPORTED: it is missing or too
 * old; the text says what was looked for. The library stays open until the process ends. */
sk_status sk__cuda_driver_open(const char *path, sk__cuda_driver *out);
/* Return the process's driver, opened and initialised by the first call that succeeds.
 * out  borrowed forever.   SK_UNSUPPORTED: there is none, or no device. Threads: any. */
sk_status sk__cuda_driver_get(const sk__cuda_driver **out);

/* Return why the driver can no longer be called: the process exits, or is a fork of the one that
 * called it. NULL: the driver can be called. Threads: any. */
const char *sk__cuda_gone(void);
/* Note that the driver reported its own shutdown: no more calls. */
void sk__cuda_shut_down(void);

/* Fail with the name of the function, and the driver's text for `result`. */
sk_status sk__cuda_fail(const sk__cuda_driver *driver, sk_status status, const char *what,
                        sk__cu_result result);
/* Whether `result` is sticky: the context is unusable from now on, and its memory is lost. */
bool sk__cuda_is_sticky(sk__cu_result result);

#endif
