/* swapkit_pool.h - the C interface of the caching allocator, and the ring that records its events.
 *
 * The words and rules are those of swapkit.h. */
#ifndef SWAPKIT_POOL_H
#define SWAPKIT_POOL_H

#include "swapkit.h"

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
    SK_RING_OP_END,   /* nbytes: of its operands and outputs */
    /* Only in a history: sk_pool_set_history(), sk_sched_set_history(). */
    SK_RING_FREE,  /* the memory of a given block may serve any request */
    SK_RING_MAP,   /* the device's memory lies at these addresses from now on */
    SK_RING_UNMAP, /* and no longer lies at these */
    SK_RING_COPIED_OUT,
    SK_RING_COPIED_IN
} sk_ring_kind;

/* What an event does not have is 0. */
typedef struct sk_ring_event {
    uint64_t time_ns;     /* CLOCK_MONOTONIC; of a copy: when it ended */
    uint64_t duration_ns; /* of a copy */
    uint64_t nbytes;
    uint64_t requested_bytes; /* of a block */
    uint64_t in_use_bytes;    /* after the event */
    uint64_t reserved_bytes;
    uint64_t address; /* of the block, of what was mapped, or of the copied bytes on the device */
    uint64_t stream;  /* of the block */
    uint64_t group;   /* number of the copied group in its scheduler, from 1 */
    uint32_t kind;    /* sk_ring_kind */
    uint32_t tag;     /* of the block; of a copy: the label of its group */
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

/* Wait until the work that the program has queued is in its streams. Called on threads that take
 * memory or give cached memory back, with no lock held; must not call the pool. If queued work has
 * failed, return SK_BACKEND_FAILED and write why to `text`: the pool changes nothing then. */
typedef sk_status (*sk_settle_fn)(void *context, char *text, size_t capacity);

typedef struct sk_pool_params {
    size_t budget_bytes; /* most bytes reserved; 0: no budget */
    bool whole_segments; /* use memory_alloc even if the backend has virtual memory */
    /* Whole segments only: a larger block serves only larger requests, and only whole. 0: no limit;
     * otherwise more than 20 MiB. Virtual memory does not need it: free memory can be given back
     * granule by granule, wherever it lies. */
    size_t max_split_bytes;
    /* Share of the budget, below 1, above which the pool gives cached memory back before it grows
     * (and waits for streams, except on a tentative thread). 0: never, as without a budget. */
    double garbage_collection_threshold;
    /* torch's roundup_power2_divisions: [k] is for requests from 1 << k MiB. 0, 1: no rounding. */
    uint32_t roundup_divisions[16];
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
    int64_t num_settles;         /* waits for work that was queued on the host */
    int64_t largest_given_bytes; /* requested, of the largest block that was given back */
    int64_t num_splits;          /* requests served by a part of a cached block, unplanned */
} sk_pool_stats;

typedef enum sk_block_state { SK_BLOCK_IN_USE, SK_BLOCK_PENDING, SK_BLOCK_CACHED } sk_block_state;

typedef struct sk_block_info {
    uintptr_t address;
    size_t nbytes;
    size_t requested_bytes;
    uintptr_t stream; /* the stream whose order its use follows */
    uint64_t age;     /* steps that have ended since it was taken */
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
/* Forget that `stream` uses the block, since `current` waits for that use. Does nothing if the
 * block was taken on another stream than `current`: that stream does not wait. Nor if no block in
 * use begins at `address`, or the use is not noted. */
SK_API void sk_pool_unuse(sk_pool *pool, void *address, sk_stream *stream, sk_stream *current);
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
/* For frameworks that queue work on the host before they put it into a stream (torch_npu's task
 * queue): set the callback that returns once all work queued so far is in its stream. Set it before
 * the first block is taken; NULL: work is in its stream as soon as it was queued.
 *
 * With it, freed memory changes streams or goes back to the device only after a settle that began
 * after its sk_pool_give(), which itself never settles: threads that bring work into the streams
 * may call it. sk_pool_take() settles, unless a free block of the stream fits or the thread is
 * tentative (it then takes only such blocks, or new memory); so do sk_pool_trim(),
 * sk_pool_set_budget() and sk_pool_destroy(). Memory then has one address only. */
SK_API void sk_pool_set_settle(sk_pool *pool, sk_settle_fn settle, void *context);
/* ring  borrowed until detached; NULL detaches. While attached, every event reads the clock.
 * SK_INVALID: `ring` is not NULL, and the pool has a ring already, that of another reader. */
SK_API SK_NODISCARD sk_status sk_pool_set_ring(sk_pool *pool, sk_ring *ring);
/* As sk_pool_set_ring, beside it: for a record that another reader does not empty, read with
 * sk_pool_view_get(). */
SK_API SK_NODISCARD sk_status sk_pool_set_history(sk_pool *pool, sk_ring *ring);
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
/* The pool and its history at one moment. Each `most_` is the capacity of its array; each count
 * says how many there are. The arrays are filled up to the smaller of both. */
typedef struct sk_pool_view {
    sk_ring_event *events; /* oldest first; they stay in the history */
    sk_block_info *blocks; /* of one segment after the other, by address */
    sk_segment_info *segments;
    size_t most_events, most_blocks, most_segments;
    size_t event_count, block_count, segment_count;
    uint64_t lost_events; /* overwritten */
} sk_pool_view;

SK_API void sk_pool_view_get(sk_pool *pool, sk_pool_view *view);
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
