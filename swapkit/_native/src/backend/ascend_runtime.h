/* ascend_runtime.h - the part of ACL, the runtime of Ascend NPUs, that the ascend backend uses.
 *
 * The declarations are our own, of ACL's public binary interface; the library is opened at run
 * time, so the build needs nothing of CANN. SK_ASCEND_CALLS lists every function once; the table of
 * pointers is made from it. */
#ifndef SWAPKIT_BACKEND_ASCEND_RUNTIME_H
#define SWAPKIT_BACKEND_ASCEND_RUNTIME_H

#include "base/base.h"

typedef int sk__acl_error;
typedef struct sk__acl_context sk__acl_context;
typedef struct sk__acl_memory sk__acl_memory; /* a handle of physical memory */

/* The errors that this code interprets; ascend_runtime.c names more. */
enum {
    SK_ACL_SUCCESS = 0,
    SK_ACL_UNINITIALIZED = 100001,
    SK_ACL_REPEAT_INITIALIZE = 100002,
    SK_ACL_INVALID = 107000,
    SK_ACL_NO_CONTEXT = 107002, /* the thread has set no device */
    SK_ACL_HOST_NO_MEMORY = 200000,
    SK_ACL_API_NOT_SUPPORTED = 200001,
    SK_ACL_FEATURE_UNSUPPORTED = 200006,
    SK_ACL_NOT_SUPPORTED = 207000,
    SK_ACL_OUT_OF_MEMORY = 207001,
    SK_ACL_DEVICE_OUT_OF_MEMORY = 207018,
};

enum {
    SK_ACL_HBM = 1, /* attributes of memory */
    SK_ACL_HBM_HUGE = 4,
    SK_ACL_HBM_NORMAL = 5,
    SK_ACL_HBM_GIANT = 10,
    SK_ACL_POLICY_HUGE_FIRST = 0, /* of whole segments */
    SK_ACL_POLICY_HUGE_ONLY = 1,
    SK_ACL_POLICY_NORMAL_ONLY = 2,
    SK_ACL_POLICY_GIANT_ONLY = 6,
    SK_ACL_LOCATION_DEVICE = 1,
    SK_ACL_GRANULARITY_MINIMUM = 0,
    SK_ACL_ACCESS_READ_WRITE = 3,
    SK_ACL_RESERVE_NORMAL = 0, /* pages of reserved addresses */
    SK_ACL_RESERVE_HUGE = 1,
    SK_ACL_REGISTER_MAPPED = 0,
    SK_ACL_STREAM_FAST_LAUNCH = 1, /* torch_npu makes its streams with these two */
    SK_ACL_STREAM_FAST_SYNC = 2,
    SK_ACL_EVENT_SYNC = 1, /* without time */
    SK_ACL_EVENT_RECORDED = 1,
    SK_ACL_HOST_TO_DEVICE = 1, /* kinds of copies */
    SK_ACL_DEVICE_TO_HOST = 2,
    SK_ACL_DEVICE_TO_DEVICE = 3,
};

typedef struct sk__acl_physical {
    int handle_type;
    int allocation_type;
    int attribute;
    uint32_t device;
    int location_type;
    uint64_t reserved;
} sk__acl_physical;

typedef struct sk__acl_access {
    int flags;
    uint32_t device;
    int location_type;
    uint8_t reserved[12];
} sk__acl_access;

_Static_assert(sizeof(sk__acl_physical) == 32, "ACL's aclrtPhysicalMemProp");
_Static_assert(sizeof(sk__acl_access) == 24, "ACL's aclrtMemAccessDesc");

/* clang-format off */
#define SK_ASCEND_CALLS(X)                                                                         \
    X(sk__acl_error, aclInit, (const char *path))                                                  \
    X(const char *, aclGetRecentErrMsg, (void))                                                    \
    X(sk__acl_error, aclrtGetDeviceCount, (uint32_t *out))                                         \
    X(sk__acl_error, aclrtSetDevice, (int32_t device))                                             \
    X(sk__acl_error, aclrtGetCurrentContext, (sk__acl_context **out))                              \
    X(sk__acl_error, aclrtSetCurrentContext, (sk__acl_context *context))                           \
    X(sk__acl_error, aclrtGetMemInfo, (int attribute, size_t *free_bytes, size_t *total_bytes))    \
    X(sk__acl_error, aclrtMallocAlign32, (void **out, size_t nbytes, int policy))                  \
    X(sk__acl_error, aclrtFree, (void *address))                                                   \
    X(sk__acl_error, aclrtMemGetAllocationGranularity, (sk__acl_physical *kind, int which,         \
                                                        size_t *out))                              \
    X(sk__acl_error, aclrtReserveMemAddress, (void **out, size_t nbytes, size_t alignment,         \
                                              void *wish, uint64_t flags))                         \
    X(sk__acl_error, aclrtReleaseMemAddress, (void *address))                                      \
    X(sk__acl_error, aclrtMallocPhysical, (sk__acl_memory **out, size_t nbytes,                    \
                                           const sk__acl_physical *kind, uint64_t flags))          \
    X(sk__acl_error, aclrtFreePhysical, (sk__acl_memory *memory))                                  \
    X(sk__acl_error, aclrtMapMem, (void *address, size_t nbytes, size_t offset,                    \
                                   sk__acl_memory *memory, uint64_t flags))                        \
    X(sk__acl_error, aclrtUnmapMem, (void *address))                                               \
    X(sk__acl_error, aclrtCreateStreamWithConfig, (sk_stream **out, uint32_t priority,             \
                                                   uint32_t flags))                                \
    X(sk__acl_error, aclrtDestroyStream, (sk_stream *stream))                                      \
    X(sk__acl_error, aclrtSynchronizeStream, (sk_stream *stream))                                  \
    X(sk__acl_error, aclrtStreamWaitEvent, (sk_stream *stream, sk_event *event))                   \
    X(sk__acl_error, aclrtCreateEventExWithFlag, (sk_event **out, uint32_t flags))                 \
    X(sk__acl_error, aclrtDestroyEvent, (sk_event *event))                                         \
    X(sk__acl_error, aclrtRecordEvent, (sk_event *event, sk_stream *stream))                       \
    X(sk__acl_error, aclrtQueryEventStatus, (sk_event *event, int *status))                        \
    X(sk__acl_error, aclrtSynchronizeEvent, (sk_event *event))                                     \
    X(sk__acl_error, aclrtMemcpyAsync, (void *to, size_t room, const void *from, size_t nbytes,    \
                                        int kind, sk_stream *stream))

/* These may be NULL: the features that need them are then off. */
#define SK_ASCEND_OPTIONAL_CALLS(X)                                                                \
    X(sk__acl_error, aclrtHostRegister, (void *address, uint64_t nbytes, int type, void **out))    \
    X(sk__acl_error, aclrtHostUnregister, (void *address))                                         \
    X(sk__acl_error, aclrtLaunchHostFunc, (sk_stream *stream, void (*call)(void *),                \
                                           void *argument))                                        \
    X(sk__acl_error, aclrtMemSetAccess, (void *address, size_t nbytes, sk__acl_access *access,     \
                                         size_t count))
/* clang-format on */

#define SK_ASCEND_MEMBER(type, name, arguments) type(*name) arguments;
typedef struct sk__ascend_runtime {
    SK_ASCEND_CALLS(SK_ASCEND_MEMBER)
    SK_ASCEND_OPTIONAL_CALLS(SK_ASCEND_MEMBER)
} sk__ascend_runtime;
#undef SK_ASCEND_MEMBER

/* Open the library at `path` and find every function in it. SK_UNSUPPORTED: it is missing or too
 * old; the text says what was looked for. The library stays open until the process ends. */
sk_status sk__ascend_runtime_open(const char *path, sk__ascend_runtime *out);
/* Return the process's runtime, opened and initialised by the first call that succeeds.
 * out  borrowed forever.   SK_UNSUPPORTED: there is none. Threads: any. */
sk_status sk__ascend_runtime_get(const sk__ascend_runtime **out);

/* Return why the runtime can no longer be called; NULL: it can be called. Threads: any. */
const char *sk__ascend_gone(void);
/* Note that the runtime reported its own end: no more calls. */
void sk__ascend_shut_down(void);

/* Fail with the name of the function, and ACL's own message for `error`. */
sk_status sk__ascend_fail(const sk__ascend_runtime *runtime, sk_status status, const char *what,
                          sk__acl_error error);
/* Whether `error` is sticky: the device has failed, and what was queued on it is lost. */
bool sk__ascend_is_sticky(sk__acl_error error);
/* Whether ACL says that this device, or its driver, cannot do such a thing at all. */
bool sk__ascend_is_unsupported(sk__acl_error error);

#endif
