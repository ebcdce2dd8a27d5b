/* ascend.h - an Ascend NPU: state shared by the backend's memory half and its stream half.
 *
 * A stream is an aclrtStream, an event an aclrtEvent: those of other code, such as torch_npu, can
 * be passed in, once they are recorded. The NULL stream is the default one of the device.
 *
 * Every operation is a visit (visit.h). The device's default context is what is made current: a
 * thread that has another one, of whichever device, gets it back. */
#ifndef SWAPKIT_BACKEND_ASCEND_H
#define SWAPKIT_BACKEND_ASCEND_H

#include "backend/ascend_runtime.h"
#include "backend/backend.h"
#include "backend/pieces.h"
#include "base/thread.h"
#include "swapkit_devices.h"

enum {
    SK_ASCEND_OVER_READ_BYTES = 32, /* what kernels may read past a tensor */
    SK_ASCEND_DEVICES = 64          /* of one process, which may share memory */
};

typedef struct sk__ascend_range sk__ascend_range;

typedef struct sk__ascend {
    const sk__ascend_runtime *runtime;
    int32_t device;
    sk__acl_context *context;                 /* the device's default one */
    sk_stream *idle;                          /* nothing but new events is queued here */
    size_t granule_bytes;                     /* 0: without virtual memory */
    sk__acl_physical kind;                    /* of physical memory */
    uint64_t reserve_flags;                   /* of addresses */
    sk__acl_access access[SK_ASCEND_DEVICES]; /* other devices that may use mapped memory */
    size_t naccess;
    int policy; /* of whole segments */
    bool locks_host;
    sk__pieces pieces;
    sk__mutex lock;
    sk__fork_node fork_node;
    sk__ascend_range *ranges SK_GUARDED_BY(lock); /* all reserved ones */
} sk__ascend;

/* Make the device current on this thread, if it is not; sk__ascend_leave restores the caller's.
 * Calls no runtime that is gone: the error is then SK_ACL_UNINITIALIZED. */
sk__acl_error sk__ascend_enter(const sk__ascend *ascend, void **undo);
/* Undo sk__ascend_enter; return `error` of ACL's function `what` as a status with a text. */
sk_status sk__ascend_leave(const sk__ascend *ascend, void *undo, const char *what,
                           sk__acl_error error);
/* The same for releases: an object that went with the process or the device counts as released. */
sk_status sk__ascend_leave_released(const sk__ascend *ascend, void *undo, const char *what,
                                    sk__acl_error error);
/* Return the status of one call of the runtime, as a visit of its own. */
#define SK_ASCEND_VISIT(ascend, leave, function, arguments)                                        \
    do {                                                                                           \
        void *undo_ = NULL;                                                                        \
        sk__acl_error error_ = sk__ascend_enter((ascend), &undo_);                                 \
        if (error_ == SK_ACL_SUCCESS) {                                                            \
            error_ = (ascend)->runtime->function arguments;                                        \
        }                                                                                          \
        return leave((ascend), undo_, #function, error_);                                          \
    } while (0)

/* Memory half: ascend_memory.c. Choose from `params` and the device the pages, whether there is
 * virtual memory, its granules, and whether host memory can be locked. The device is current. */
sk_status sk__ascend_memory_open(sk__ascend *ascend, const sk_ascend_params *params);
void sk__ascend_memory_close(sk__ascend *ascend);
sk_status sk__ascend_memory_info(void *self, sk_memory_info *out);
sk_status sk__ascend_memory_alloc(void *self, size_t nbytes, void **out);
sk_status sk__ascend_memory_free(void *self, void *address, size_t nbytes);
sk_status sk__ascend_range_reserve(void *self, size_t nbytes, void **out);
sk_status sk__ascend_range_release(void *self, void *address, size_t nbytes);
sk_status sk__ascend_range_commit(void *self, void *address, size_t nbytes);
sk_status sk__ascend_range_decommit(void *self, void *address, size_t nbytes);
sk_status sk__ascend_range_alias(void *self, void *from, void *to, size_t nbytes);
sk_status sk__ascend_host_lock(void *self, void *address, size_t nbytes);
sk_status sk__ascend_host_unlock(void *self, void *address, size_t nbytes);

/* Stream half: ascend_stream.c. */
sk__acl_error sk__ascend_stream_make(const sk__ascend *ascend, sk_stream **out);
sk_status sk__ascend_stream_create(void *self, sk_stream **out);
sk_status sk__ascend_stream_destroy(void *self, sk_stream *stream);
sk_status sk__ascend_stream_sync(void *self, sk_stream *stream);
sk_status sk__ascend_stream_wait(void *self, sk_stream *stream, sk_event *event);
sk_status sk__ascend_event_create(void *self, sk_event **out);
sk_status sk__ascend_event_destroy(void *self, sk_event *event);
sk_status sk__ascend_event_record(void *self, sk_event *event, sk_stream *stream);
sk_status sk__ascend_event_query(void *self, sk_event *event);
sk_status sk__ascend_event_sync(void *self, sk_event *event);
sk_status sk__ascend_copy_async(void *self, void *to, const void *from, size_t nbytes,
                                sk_copy_kind kind, sk_stream *stream);
sk_status sk__ascend_stream_call(void *self, sk_stream *stream, void (*call)(void *),
                                 void *argument);

#endif
