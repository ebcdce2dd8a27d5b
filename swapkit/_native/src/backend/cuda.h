/* cuda.h - an NVIDIA device: state shared by the backend's memory half and its stream half.
 *
 * A stream is a CUstream of the driver, an event a CUevent: those of other code, such as torch, can
 * be passed in. The NULL stream is the legacy default stream of the device's primary context.
 *
 * Every operation is a visit: enter, call the driver if that worked, leave with the result. Between
 * the backend's visit_begin and visit_end the context stays current, and only the first call
 * asks. */
#ifndef SWAPKIT_BACKEND_CUDA_H
#define SWAPKIT_BACKEND_CUDA_H

#include "backend/backend.h"
#include "backend/cuda_driver.h"
#include "backend/pieces.h"
#include "swapkit_devices.h"

enum { SK_CUDA_DEVICES = 64 }; /* of one process, which may share memory */

typedef struct sk__cuda {
    const sk__cuda_driver *driver;
    sk__cu_context *context; /* the device's primary one, retained */
    sk__cu_device device;
    size_t granule_bytes;                  /* 0: without virtual memory */
    sk__cu_allocation kind;                /* of physical memory */
    sk__cu_access access[SK_CUDA_DEVICES]; /* devices that may use it; the own one first */
    size_t naccess;
    sk__pieces pieces;
} sk__cuda;

/* Make the device's context current on this thread, if it is not; sk__cuda_leave restores the
 * caller's. Calls no driver that is gone: the result is then SK_CU_DEINITIALIZED. */
sk__cu_result sk__cuda_enter(const sk__cuda *cuda, bool *pushed);
/* Undo sk__cuda_enter; return `result` of the driver's function `what` as a status with a text. */
sk_status sk__cuda_leave(const sk__cuda *cuda, bool pushed, const char *what, sk__cu_result result);
/* The same for releases: an object that went with the process or the context counts as released. */
sk_status sk__cuda_leave_released(const sk__cuda *cuda, bool pushed, const char *what,
                                  sk__cu_result result);

/* Memory half: cuda_memory.c. Choose from `params` and the device whether there is virtual memory,
 * its granules, and the devices that may use it. */
sk_status sk__cuda_memory_open(sk__cuda *cuda, const sk_cuda_params *params);
sk_status sk__cuda_memory_info(void *self, sk_memory_info *out);
sk_status sk__cuda_memory_alloc(void *self, size_t nbytes, void **out);
sk_status sk__cuda_memory_free(void *self, void *address, size_t nbytes);
sk_status sk__cuda_range_reserve(void *self, size_t nbytes, void **out);
sk_status sk__cuda_range_release(void *self, void *address, size_t nbytes);
sk_status sk__cuda_range_commit(void *self, void *address, size_t nbytes);
sk_status sk__cuda_range_decommit(void *self, void *address, size_t nbytes);
sk_status sk__cuda_range_alias(void *self, void *from, void *to, size_t nbytes);
sk_status sk__cuda_host_lock(void *self, void *address, size_t nbytes);
sk_status sk__cuda_host_unlock(void *self, void *address, size_t nbytes);

/* Stream half: cuda_stream.c. */
sk_status sk__cuda_stream_create(void *self, sk_stream **out);
sk_status sk__cuda_stream_destroy(void *self, sk_stream *stream);
sk_status sk__cuda_stream_sync(void *self, sk_stream *stream);
sk_status sk__cuda_stream_wait(void *self, sk_stream *stream, sk_event *event);
sk_status sk__cuda_event_create(void *self, sk_event **out);
sk_status sk__cuda_event_destroy(void *self, sk_event *event);
sk_status sk__cuda_event_record(void *self, sk_event *event, sk_stream *stream);
sk_status sk__cuda_event_query(void *self, sk_event *event);
sk_status sk__cuda_event_sync(void *self, sk_event *event);
sk_status sk__cuda_copy_async(void *self, void *to, const void *from, size_t nbytes,
                              sk_copy_kind kind, sk_stream *stream);
sk_status sk__cuda_stream_call(void *self, sk_stream *stream, void (*call)(void *), void *argument);

#endif
