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
#include "backend/visit.h"
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

extern const sk__visitor sk__ascend_visitor;
/* A function's body: one visit with one call of the runtime. See SK__VISIT. */
#define SK_ASCEND_VISIT(self, leave, function, arguments, then)                                    \
    SK__VISIT(&sk__ascend_visitor, (self), leave, #function,                                       \
              ((const sk__ascend *)(self))->runtime->function arguments, then)

/* Memory half: ascend_memory.c. Choose from `params` and the device the pages, whether there is
 * virtual memory, its granules, and whether host memory can be locked. The device is current. */
sk_status sk__ascend_memory_open(sk__ascend *ascend, const sk_ascend_params *params);
void sk__ascend_memory_close(sk__ascend *ascend);
/* Fill in the operations of the memory half; of the stream half: ascend_stream.c. */
void sk__ascend_memory_ops(const sk__ascend *ascend, sk_backend_ops *ops);
void sk__ascend_stream_ops(const sk__ascend *ascend, sk_backend_ops *ops);
sk__acl_error sk__ascend_stream_make(const sk__ascend *ascend, sk_stream **out);

#endif
