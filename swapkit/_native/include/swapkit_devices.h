/* swapkit_devices.h - the devices that swapkit itself has a backend for.
 *
 * Rules and words are those of swapkit.h. */
#ifndef SWAPKIT_DEVICES_H
#define SWAPKIT_DEVICES_H

#include "swapkit.h"

/* The CPU as a device: a range of host memory, worker threads as streams. */
typedef struct sk_cpu_params {
    size_t capacity_bytes;     /* 0: the limit of the machine or its control group */
    uint64_t copy_bytes_per_s; /* of each stream; 0: no limit */
    uint64_t copy_latency_ns;  /* added to every asynchronous copy */
    uint64_t numa_nodes;       /* bit n: prefer memory of node n; 0: of any node. A hint */
    bool populate;             /* committed memory has its pages at once, not at the first touch */
    size_t granule_bytes;      /* of virtual memory; 0: the least possible; at most 2 MiB */
} sk_cpu_params;

SK_API SK_NODISCARD sk_status sk_backend_cpu(const sk_cpu_params *params, sk_backend **out);

/* An NVIDIA device, through the driver's library alone: libcuda.so.1, or the library named by the
 * environment variable SWAPKIT_CUDA_DRIVER. An sk_stream is any CUstream and an sk_event any
 * CUevent; NULL is the legacy default stream. Calls leave the thread's own context current. In a
 * forked child, and once the process exits, calls fail, and functions that release do nothing. */
typedef struct sk_cuda_params {
    int32_t device;         /* the driver's index */
    size_t granule_bytes;   /* of virtual memory; 0: 2 MiB. A multiple of the device's minimum */
    bool no_virtual_memory; /* whole segments only */
    uint64_t peer_devices;  /* bit n: give device n access to the virtual memory, if possible */
} sk_cuda_params;

/* SK_UNSUPPORTED: no driver, no device, or too old a driver; the text says what is missing. */
SK_API SK_NODISCARD sk_status sk_backend_cuda(const sk_cuda_params *params, sk_backend **out);
SK_API SK_NODISCARD sk_status sk_cuda_device_count(int32_t *out);

/* An Ascend NPU, through ACL's library alone: libascendcl.so, or the library named by the
 * environment variable SWAPKIT_ASCEND_RUNTIME. An sk_stream is any aclrtStream and an sk_event any
 * aclrtEvent; NULL is the device's default stream. ACL gives events that were never recorded no
 * meaning: those made here count as passed, others must be recorded first. Calls leave the thread's
 * own device current; a thread that had set none keeps this one, since ACL cannot unset it. In a
 * forked child, and once the process exits, calls fail, and functions that release do nothing. */
typedef enum sk_ascend_pages {
    SK_ASCEND_HUGE_FIRST, /* of 2 MiB, where memory is to be had in such pages */
    SK_ASCEND_HUGE_ONLY,
    SK_ASCEND_NORMAL, /* of 4 KiB */
    SK_ASCEND_GIANT   /* of 1 GiB, which are also the least granule */
} sk_ascend_pages;

typedef struct sk_ascend_params {
    int32_t device;         /* ACL's number */
    size_t granule_bytes;   /* of virtual memory; 0: 2 MiB. A multiple of the device's minimum */
    bool no_virtual_memory; /* whole segments only */
    uint32_t pages;         /* sk_ascend_pages: of which device memory is made */
    uint64_t peer_devices;  /* bit n: give device n access to the virtual memory, if possible */
} sk_ascend_params;

/* SK_UNSUPPORTED: no runtime, no device, or too old a runtime; the text says what is missing. */
SK_API SK_NODISCARD sk_status sk_backend_ascend(const sk_ascend_params *params, sk_backend **out);
SK_API SK_NODISCARD sk_status sk_ascend_device_count(int32_t *out);

#endif
