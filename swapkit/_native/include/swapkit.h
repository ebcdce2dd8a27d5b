/* swapkit.h - the C interface of swapkit: backends and the caching pool.
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

/* The CPU as a device: a range of host memory, worker threads as streams. */
typedef struct sk_cpu_params {
    size_t capacity_bytes;     /* 0: the limit of the machine or its control group */
    uint64_t copy_bytes_per_s; /* of each stream; 0: no limit */
    uint64_t copy_latency_ns;  /* added to every asynchronous copy */
    uint64_t numa_nodes;       /* bit n: prefer memory of node n; 0: of any node. A hint */
    bool populate;             /* committed memory has its pages at once, not at the first touch */
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

/* ---- ring: recorded events for timelines ----------------------------------------------------- */

typedef struct sk_ring sk_ring;

typedef enum sk_ring_kind {
    SK_RING_TAKE,
    SK_RING_GIVE,
    SK_RING_RESCUE, /* nbytes: freed by the rescue */
    SK_RING_OOM,
    SK_RING_COPY_OUT,
    SK_RING_COPY_IN,
    SK_RING_MARK,     /* the owner's own, such as the end of a step */
    SK_RING_OP_BEGIN, /* a kernel that torch does not run */
    SK_RING_OP_END    /* nbytes: of its operands and outputs */
} sk_ring_kind;

typedef struct sk_ring_event {
    uint64_t time_ns; /* CLOCK_MONOTONIC */
    uint64_t nbytes;
    uint64_t in_use_bytes; /* after the event */
    uint64_t reserved_bytes;
    uint32_t kind; /* sk_ring_kind */
    uint32_t tag;
} sk_ring_event;

/* out  owned: sk_ring_destroy(), after it is detached from every pool. */
SK_API SK_NODISCARD sk_status sk_ring_create(size_t capacity, sk_ring **out);
SK_API void sk_ring_destroy(sk_ring *ring);
/* Take the oldest events out; return how many. `*lost` (may be NULL): overwritten since the last
 * call. Threads: any. */
SK_API size_t sk_ring_read(sk_ring *ring, sk_ring_event *out, size_t capacity, uint64_t *lost);

/* ---- pool: the caching allocator ------------------------------------------------------------- */

typedef struct sk_pool sk_pool;

/* Free memory because `needed_bytes` more are wanted; return the freed bytes, or 0 if nothing more
 * can be freed. The pool calls it until it returns 0. Several threads may be inside it at once. It
 * must not take from another pool whose rescue takes from this one. */
typedef size_t (*sk_rescue_fn)(void *context, size_t needed_bytes);

/* This thread begins or ends making memory for an allocation: growing, moving free memory, waiting,
 * or asking for a rescue. Calls come in pairs on each thread, and pairs do not nest. */
typedef void (*sk_making_fn)(void *context, bool begins);

typedef struct sk_pool_params {
    size_t budget_bytes; /* most bytes reserved; 0: no budget */
    bool whole_segments; /* use memory_alloc even if the backend has virtual memory */
    /* Whole segments only: a larger block serves only larger requests, and only whole. 0: no limit;
     * otherwise more than 20 MiB. Virtual memory does not need it: free memory can be given back
     * granule by granule, wherever it lies. */
    size_t max_split_bytes;
    /* Before the pool grows with more than this share of its budget reserved, it gives cached
     * memory above the share back; that waits for streams, except on a tentative thread. 0: never;
     * otherwise below 1. Without a budget it has no effect. */
    double garbage_collection_threshold;
} sk_pool_params;

typedef struct sk_stat {
    int64_t current, peak, allocated, freed;
} sk_stat;

/* torch's meanings and names. Index 0: all, 1: small blocks, 2: large blocks. */
typedef struct sk_pool_stats {
    sk_stat allocation[3], segment[3], active[3], inactive_split[3];
    sk_stat allocated_bytes[3], reserved_bytes[3], active_bytes[3], inactive_split_bytes[3];
    sk_stat requested_bytes[3];
    int64_t num_alloc_retries, num_ooms, num_sync_all_streams, num_device_alloc, num_device_free;
    int64_t num_rescues; /* callbacks that freed something */
    int64_t rescued_bytes;
    uint64_t budget_bytes;           /* 0: none */
    int64_t max_split_size;          /* bytes; -1: none */
    int64_t expandable_segments;     /* 1: virtual memory, 0: whole segments */
    int64_t num_garbage_collections; /* that gave memory back */
    int64_t garbage_collected_bytes;
    int64_t moved_bytes, moving_ns; /* free memory moved to other addresses; the time, on a CPU */
    int64_t maps, unmaps; /* granules mapped at an address, and granules unmapped from one */
    /* How often the driver failed to map or unmap memory at a second address: free memory is given
     * back and taken anew instead. Tried again later, unless the driver cannot do it at all. */
    int64_t alias_failures;
} sk_pool_stats;

typedef enum sk_block_state { SK_BLOCK_IN_USE, SK_BLOCK_PENDING, SK_BLOCK_CACHED } sk_block_state;

typedef struct sk_block_info {
    uintptr_t address;
    size_t nbytes;
    size_t requested_bytes;
    uintptr_t stream; /* the stream whose order its use follows */
    uint32_t tag;
    uint32_t state; /* sk_block_state */
} sk_block_info;

typedef struct sk_segment_info {
    uintptr_t address;
    size_t nbytes;          /* of address space */
    size_t committed_bytes; /* held by the device */
    bool is_small;          /* holds blocks of up to 1 MiB */
} sk_segment_info;

/* backend  kept open by the pool. Every stream passed to the pool must outlive the pool.
 * out      owned: sk_pool_destroy(). */
SK_API SK_NODISCARD sk_status sk_pool_create(sk_backend *backend, const sk_pool_params *params,
                                             sk_pool **out);
/* Give all memory back to the backend. SK_INVALID, and nothing done, while blocks are in use. If
 * the backend does not take a piece back, return its status and keep the pool: try again. */
SK_API SK_NODISCARD sk_status sk_pool_destroy(sk_pool *pool);

/* Take a block of at least `nbytes` that is safe to use on `stream`.
 *
 * nbytes   > 0.
 * out      owned: give back with sk_pool_give().
 * Returns  SK_OVER_BUDGET or SK_OUT_OF_DEVICE_MEMORY only after pending events were drained, caches
 *          trimmed, and the rescue callback had nothing more to free.
 * Threads  any. May wait for an event or call back; holds no lock while doing so. */
SK_API SK_NODISCARD sk_status sk_pool_take(sk_pool *pool, size_t nbytes, sk_stream *stream,
                                           void **out);
/* SK_INVALID if `address` is no block in use. The block may be handed out again at once on the
 * stream it was taken on, on others only behind an event. Threads: any; allocates nothing. */
SK_API SK_NODISCARD sk_status sk_pool_give(sk_pool *pool, void *address);
/* Note that `stream` also uses the block: reuse waits for the work queued there at the give. */
SK_API SK_NODISCARD sk_status sk_pool_use(sk_pool *pool, void *address, sk_stream *stream);
/* Wait for pending blocks, then give all cached memory that can be spared to the device. */
SK_API SK_NODISCARD sk_status sk_pool_trim(sk_pool *pool);
/* 0: no budget. Trims first; SK_OVER_BUDGET, and nothing changed, if more is still reserved. */
SK_API SK_NODISCARD sk_status sk_pool_set_budget(sk_pool *pool, size_t budget_bytes);
/* Set the callback for allocations that would fail; NULL: none. It is not called from inside
 * itself: there the allocation fails. Threads: any; a call already under way may still end. */
SK_API void sk_pool_set_rescue(sk_pool *pool, sk_rescue_fn rescue, void *context);
/* Set the callback around all work of sk_pool_take() beyond the free lists; NULL: none. Not called
 * on a tentative thread. It may take from a pool only if it is prepared for a rescue to run.
 * Threads: any. `making` and `context` change together, under the pool's lock, and are called
 * without it: after the return a thread may still be between a pair of calls, or about to begin
 * one, and makes both with the values that it read. `context` must stay valid for those. */
SK_API void sk_pool_set_making(sk_pool *pool, sk_making_fn making, void *context);
/* ring  borrowed until detached; NULL detaches. While attached, every event reads the clock. */
SK_API void sk_pool_set_ring(sk_pool *pool, sk_ring *ring);
/* Put an event of the owner's own into the pool's ring, if there is one. A mark also ends a step:
 * the next step is expected to make the same requests. */
SK_API void sk_pool_note(sk_pool *pool, sk_ring_kind kind, uint64_t nbytes);
/* Set the label for this thread's next blocks; return the previous one. 0: none. */
SK_API uint32_t sk_tag_set(uint32_t tag);
/* While it is on, this thread takes only memory that needs no wait and no rescue: for optional
 * memory. Return the previous setting. */
SK_API bool sk_tentative_set(bool on);
/* Return whether `nbytes` more fit in the budget, if any; `spares`: leaving a 64th of it free. */
SK_API bool sk_pool_has_room(sk_pool *pool, size_t nbytes, bool spares);

SK_API void sk_pool_stats_get(sk_pool *pool, sk_pool_stats *out);
SK_API void sk_pool_stats_reset_peak(sk_pool *pool);
/* Set the totals of allocated and freed memory, and the counts of events, to 0. */
SK_API void sk_pool_stats_reset_accumulated(sk_pool *pool);
/* Return the most bytes reserved since the last call; independent of the statistics' peaks. */
SK_API size_t sk_pool_peak_take(sk_pool *pool);
/* Return 1 if `address` lies in one of the pool's segments. */
SK_API int sk_pool_owns(sk_pool *pool, const void *address);
/* Copy up to `capacity` descriptions; return how many there are. */
SK_API size_t sk_pool_blocks(sk_pool *pool, sk_block_info *out, size_t capacity);
SK_API size_t sk_pool_segments(sk_pool *pool, sk_segment_info *out, size_t capacity);
/* SK_INVALID: `address` lies in none of the pool's segments. */
SK_API SK_NODISCARD sk_status sk_pool_segment_at(sk_pool *pool, const void *address,
                                                 sk_segment_info *out);
/* Walk every structure. SK_CORRUPT: sk_error_text() names the broken invariant. */
SK_API SK_NODISCARD sk_status sk_pool_check(sk_pool *pool);

#ifdef SK_CDEF
/* Python's side of the callbacks above (cffi API mode). */
extern "Python" size_t sk_python_rescue(void *context, size_t needed_bytes);
extern "Python" void sk_python_making(void *context, bool begins);
#endif

#endif
