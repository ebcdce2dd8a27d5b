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
#include "backend/visit.h"
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

extern const sk__visitor sk__cuda_visitor;
/* A function's body: one visit with one call of the driver. See SK__VISIT. */
#define SK_CUDA_VISIT(self, leave, function, arguments, then)                                      \
    SK__VISIT(&sk__cuda_visitor, (self), leave, #function,                                         \
              ((const sk__cuda *)(self))->driver->function arguments, then)

/* Memory half: cuda_memory.c. Choose from `params` and the device whether there is virtual memory,
 * its granules, and the devices that may use it. */
sk_status sk__cuda_memory_open(sk__cuda *cuda, const sk_cuda_params *params);
/* Fill in the operations of the memory half; of the stream half: cuda_stream.c. */
void sk__cuda_memory_ops(const sk__cuda *cuda, sk_backend_ops *ops);
void sk__cuda_stream_ops(sk_backend_ops *ops);

#endif
