/* swapkit.h - the C interface of swapkit: backends; swapkit_pool.h has the caching pool.
 *
 * Words.  A *backend* serves one device through a table of operations. A *segment* is one
 * contiguous range obtained from the backend by one call; a *block* is a part of a segment, in use
 * or free. *Reserved* bytes are those the device holds for us (in use + cached); they never exceed
 * the pool's *budget*. A *stream* is an ordered queue of device work (NULL: the backend's default
 * one; on the cpu backend the host's own program order). An *event* is a mark in a stream that
 * threads and streams can wait for. In a *rescue* a pool asks its owner to free memory.
 *
 * Rules.  Every fallible function returns an sk_status and leaves its `out` arguments untouched on
 * failure; sk_error_text() then says why, per thread. Ownership is one of: owned (released with the
 * function named), borrowed, transferred. Destroy functions accept NULL. "Threads: any" means that
 * the function may be called from any thread at the same time as any other. Callbacks run on the
 * calling thread with no lock of ours held. Nothing here touches a driver while the process exits.
 *
 * The headers of this folder are the only source of the Python bindings: with SK_CDEF defined they
 * must preprocess to plain declarations. */
#ifndef SWAPKIT_H
#define SWAPKIT_H

#ifdef SK_CDEF
#define SK_API
#define SK_NODISCARD
#else
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#define SK_API __attribute__((visibility("default")))
#include "swapkit_hooks.h"
#define SK_NODISCARD __attribute__((warn_unused_result))
#endif

/* ---- status ---------------------------------------------------------------------------------- */

/* One list gives the codes, their names (sk_status_name) and the Python exceptions. */
#define SK_STATUS_LIST(X)                                                                          \
    X(SK_OK, 0)                                                                                    \
    X(SK_NOT_READY, 1)            /* a query that does not wait; the work is still under way */    \
    X(SK_INVALID, 2)              /* an argument is wrong; nothing was done */                     \
    X(SK_UNSUPPORTED, 3)          /* this backend cannot do that */                                \
    X(SK_OVER_BUDGET, 4)          /* would exceed the budget; the device was not asked */          \
    X(SK_OUT_OF_DEVICE_MEMORY, 5) /* the device refused */                                         \
    X(SK_OUT_OF_HOST_MEMORY, 6)   /* the host refused */                                           \
    X(SK_BACKEND_FAILED, 7)       /* the driver reported an error */                               \
    X(SK_CORRUPT, 8)              /* a structure broke its invariants: a bug */                    \
    X(SK_OUT_OF_DISK, 9)          /* the disk, or its limit, has no more room */                   \
    X(SK_DISK_FAILED, 10)         /* a file could not be read or written */

#define SK_STATUS_ENTRY(name, value) name = value,
typedef enum sk_status { SK_STATUS_LIST(SK_STATUS_ENTRY) } sk_status;

/* Name of a code, "SK_OK" and so on. Borrowed, static. Threads: any. */
SK_API const char *sk_status_name(sk_status status);
/* Describe this thread's most recent failure. Borrowed until its next failure. */
SK_API const char *sk_error_text(void);

/* ---- backend --------------------------------------------------------------------------------- */

typedef struct sk_backend sk_backend;
typedef struct sk_stream sk_stream; /* the backend's own; opaque to all other code */
typedef struct sk_event sk_event;

typedef enum sk_copy_kind {
    SK_DEVICE_TO_HOST,
    SK_HOST_TO_DEVICE,
    SK_DEVICE_TO_DEVICE
} sk_copy_kind;

typedef struct sk_memory_info {
    size_t free_bytes;
    size_t total_bytes;
} sk_memory_info;

/* The table that a backend implements. Any thread may call any function, also with a pool's lock
 * held: a function and its callbacks must not call a pool. Mandatory unless marked optional. */
typedef struct sk_backend_ops {
    uint32_t struct_size;         /* sizeof(sk_backend_ops) of the version compiled against */
    uint32_t null_stream_is_host; /* 1: work on the NULL stream is done when the call returns */
    const char *name;             /* static */
    void (*destroy)(void *self);  /* optional */
    sk_status (*memory_info)(void *self, sk_memory_info *out);
    /* Whole segments: both, or neither if the virtual memory group is present. */
    sk_status (*memory_alloc)(void *self, size_t nbytes, void **out);
    sk_status (*memory_free)(void *self, void *address, size_t nbytes);
    /* Virtual memory: all four or none. Multiples of granule_bytes; only committed bytes count as
     * device memory. Committed ranges may be read and written, others must fault or be unreachable.
     */
    size_t granule_bytes;
    sk_status (*range_reserve)(void *self, size_t nbytes, void **out);
    sk_status (*range_release)(void *self, void *address, size_t nbytes);
    sk_status (*range_commit)(void *self, void *address, size_t nbytes);
    sk_status (*range_decommit)(void *self, void *address, size_t nbytes);
    /* Streams and events. An event may be recorded again: a wait is for the latest recording at the
     * time of the call. A wait for an event that was never recorded returns. */
    sk_status (*stream_create)(void *self, sk_stream **out);
    sk_status (*stream_destroy)(void *self, sk_stream *stream); /* waits for its work */
    sk_status (*stream_sync)(void *self, sk_stream *stream);
    sk_status (*stream_wait)(void *self, sk_stream *stream, sk_event *event);
    sk_status (*event_create)(void *self, sk_event **out);
    sk_status (*event_destroy)(void *self, sk_event *event); /* also while recorded work runs */
    sk_status (*event_record)(void *self, sk_event *event, sk_stream *stream);
    sk_status (*event_query)(void *self, sk_event *event); /* SK_OK or SK_NOT_READY */
    sk_status (*event_sync)(void *self, sk_event *event);
    sk_status (*copy_async)(void *self, void *to, const void *from, size_t nbytes,
                            sk_copy_kind kind, sk_stream *stream);
    /* Optional: run `call(argument)` on the host, in stream order. It must not call the backend. */
    sk_status (*stream_call)(void *self, sk_stream *stream, void (*call)(void *), void *argument);
    /* Page-locked host memory, for devices with slow or blocking copies without it: both or none. A
     * piece is a power of two at a multiple of itself, best of host_lock_bytes; copy_async takes
     * ranges over several pieces. A failed lock: SK_OUT_OF_HOST_MEMORY. */
    size_t host_lock_bytes;
    sk_status (*host_lock)(void *self, void *address, size_t nbytes);
    sk_status (*host_unlock)(void *self, void *address, size_t nbytes);
    /* Optional: move memory committed at `from` to `to`, like a decommit there and a commit here,
     * but faster. Its contents are lost. A failure changes nothing. */
    sk_status (*range_move)(void *self, void *from, void *to, size_t nbytes);
    /* Optional: also map memory committed at `from` at `to`. It counts once; each place is
     * decommitted separately, and the last decommit frees the memory. A write at one place is
     * visible at the other to work that is queued behind it. */
    sk_status (*range_alias)(void *self, void *from, void *to, size_t nbytes);
    /* Optional, both or none; they nest. Between them, per-call work on this thread (making the
     * context current) is done once; end undoes it. No other code may change it in between. */
    void (*visit_begin)(void *self), (*visit_end)(void *self);
    /* Kernels may read this many bytes past a block. The pool keeps them inside the block. */
    size_t over_read_bytes;
} sk_backend_ops;

/* Validate `ops` (sizes, mandatory members, both-or-none groups) and make a backend of them; absent
 * optional members become functions that return SK_UNSUPPORTED.
 * self  transferred on success: ops->destroy gets it.   out  owned: sk_backend_close().
 * Returns SK_INVALID with the name of the member at fault. Threads: any. */
SK_API SK_NODISCARD sk_status sk_backend_open(const sk_backend_ops *ops, void *self,
                                              sk_backend **out);
/* Close the handle. The backend is destroyed after the last pool, stream and event over it. */
SK_API void sk_backend_close(sk_backend *backend);
/* The table in force, after validation. Borrowed until the backend is closed. */
SK_API const sk_backend_ops *sk_backend_table(const sk_backend *backend);

/* The functions of a backend's table, called through the handle. Threads: any. */
SK_API SK_NODISCARD sk_status sk_memory_info_get(sk_backend *backend, sk_memory_info *out);
SK_API SK_NODISCARD sk_status sk_stream_create(sk_backend *backend, sk_stream **out);
SK_API SK_NODISCARD sk_status sk_stream_destroy(sk_backend *backend, sk_stream *stream);
SK_API SK_NODISCARD sk_status sk_stream_sync(sk_backend *backend, sk_stream *stream);
SK_API SK_NODISCARD sk_status sk_stream_wait(sk_backend *backend, sk_stream *stream,
                                             sk_event *event);
SK_API SK_NODISCARD sk_status sk_event_create(sk_backend *backend, sk_event **out);
SK_API SK_NODISCARD sk_status sk_event_destroy(sk_backend *backend, sk_event *event);
SK_API SK_NODISCARD sk_status sk_event_record(sk_backend *backend, sk_event *event,
                                              sk_stream *stream);
SK_API SK_NODISCARD sk_status sk_event_query(sk_backend *backend, sk_event *event);
SK_API SK_NODISCARD sk_status sk_event_sync(sk_backend *backend, sk_event *event);
SK_API SK_NODISCARD sk_status sk_copy_async(sk_backend *backend, void *to, const void *from,
                                            size_t nbytes, sk_copy_kind kind, sk_stream *stream);

#endif
