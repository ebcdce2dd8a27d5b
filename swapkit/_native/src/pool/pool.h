/* pool.h - the structures of the caching allocator, shared by its files.
 *
 * A segment is tiled by blocks in address order. A block is
 *   IN_USE   handed out; in the table of addresses
 *   PENDING  given back, but events of other streams are still to come, or on its way between lanes
 *   CACHED   free and committed; in a free list of its lane, merged with its neighbours
 *   VACANT   address space without memory (segments of virtual memory only); in its arena's list
 *   DORMANT  likewise, but what lies elsewhere is mapped here, too: alias.c
 * A lane is what the pool knows of one stream: the free lists of blocks that were given back in
 * that stream's order and may be used there at once.
 *
 * Invariants (walked by sk_pool_check): blocks tile their segment; neighbours that could be merged
 * are; idle blocks (vacant or dormant) begin and end on granules; reserved = in use + pending +
 * cached <= budget.
 *
 * Everything here is guarded by pool->lock, which every sk__ function below expects to be held.
 * Waiting and calling back happen with it released (reclaim.c). */
#ifndef SWAPKIT_POOL_POOL_H
#define SWAPKIT_POOL_POOL_H

#include <stdatomic.h>

#include "backend/backend.h"
#include "base/base.h"
#include "base/ring.h"
#include "base/thread.h"

enum {
    SK_ROUND_BYTES = 512,               /* block sizes are multiples of this */
    SK_SMALL_BYTES = 1024 * 1024,       /* requests up to this come from small segments */
    SK_SEGMENT_BYTES = 2 * 1024 * 1024, /* unit of whole segments, and a small one's size */
    SK_MIDDLE_BYTES = 20 * 1024 * 1024, /* whole segment for requests below half of this */
    SK_BIN_STEPS = 16,                  /* bins per doubling of the block size */
    SK_BIN_COUNT = 656,                 /* enough for SK_MAX_BYTES */
    SK_WORD_BITS = 64,                  /* of bitmaps */
    SK_BIN_WORDS = (SK_BIN_COUNT + SK_WORD_BITS - 1) / SK_WORD_BITS
};

typedef enum sk__arena { SK_SMALL, SK_LARGE, SK_ARENAS } sk__arena;
typedef enum sk__state { SK_IN_USE, SK_PENDING, SK_CACHED, SK_VACANT, SK_DORMANT } sk__state;

typedef struct sk__block sk__block;
typedef struct sk__segment sk__segment;
typedef struct sk__lane sk__lane;
typedef struct sk__use sk__use;
typedef struct sk__granule sk__granule;
typedef struct sk__slot sk__slot;
typedef struct sk__size sk__size;

struct sk__block {
    uintptr_t address;
    size_t nbytes;
    size_t requested_bytes;
    sk__segment *segment;
    sk__block *left, *right; /* neighbours in the segment */
    sk__block *prev, *next;  /* in the list that goes with the state */
    sk__lane *lane;          /* NULL while idle */
    sk__use *uses;           /* other streams that work on it */
    uint64_t given_at;       /* lane->clock when it was given back */
    uint32_t tag;
    sk__state state;
};

/* Another stream's work on a block in use; the event is recorded when the block is given back. */
struct sk__use {
    sk__use *next;
    sk_stream *stream;
    sk_event *event;
};

struct sk__segment {
    sk__segment *next;
    uintptr_t address;
    size_t nbytes;
    size_t committed_bytes;
    sk__arena arena;
    sk__block *first;
    sk__slot *slots;  /* one for each granule of addresses; NULL: memory has no aliases */
    uint64_t *starts; /* a bit for each slot that a block begins in */
};

/* Granules inside a free block. */
typedef struct sk__span {
    sk__block *block;
    uintptr_t address;
    size_t nbytes;
} sk__span;

/* Free blocks by size; within a bin the most recently freed first. A bit is set for a filled bin.
 */
typedef struct sk__freelist {
    uint64_t filled[SK_BIN_WORDS];
    sk__block *bins[SK_BIN_COUNT];
} sk__freelist;

struct sk__lane {
    sk__lane *next;
    sk_stream *stream;
    uint64_t clock;  /* blocks ever given back to it */
    uint64_t synced; /* those up to here are free of device work */
    size_t free_bytes;
    sk__freelist free[SK_ARENAS];
};

/* Blocks in use by address: open addressing, linear probing, power-of-two capacity. */
typedef struct sk__table {
    sk__block **slots;
    size_t capacity, count;
} sk__table;

struct sk_pool {
    sk__mutex lock;
    sk__fork_node fork_node;
    sk_backend *backend;
    size_t granule_bytes;    /* 0: whole segments */
    size_t span_bytes;       /* of a new range of addresses */
    size_t budget_bytes;     /* SIZE_MAX: none */
    size_t max_split_bytes;  /* SIZE_MAX: none, or virtual memory */
    double collection_share; /* of the budget; 0: no collection */
    size_t reserved_bytes;
    size_t peak_bytes; /* of reserved, since the owner last took it */
    sk_rescue_fn rescue;
    void *rescue_context;
    sk_making_fn making;
    void *making_context;
    sk_ring *ring;
    atomic_bool has_ring; /* for a look without the lock */
    sk__segment *segments;
    sk__lane *lanes;
    sk__block *vacant[SK_ARENAS], *dormant[SK_ARENAS];
    bool has_aliases;               /* granules can be mapped in several slots */
    bool refuses_aliases;           /* the backend has said that it cannot */
    uint32_t alias_pause;           /* reclaims to come without aliases, since one failed */
    uint32_t alias_backoff;         /* how many that is after the next failure, halved */
    size_t alias_count;             /* mappings beyond one for each granule */
    sk__slot *departed, *departing; /* all these: first and last in the order of departures */
    bool is_thinning;               /* aliases were too many, and are not half of that yet */
    uint64_t departures, searches;  /* ever */
    uint64_t idle_departures;       /* those up to here are free of device work */
    sk__granule *spare_granules;
    size_t spare_granule_count;
    struct sk__granule_slab *granule_slabs;
    sk__size **sizes; /* a table by size; NULL: none yet */
    sk__size *newest_size, *oldest_size;
    size_t size_count, turn_count;     /* with room for so many turns in all */
    uint64_t steps;                    /* that have ended */
    sk__block *pending, *pending_last; /* in the order in which they were given back */
    size_t lost_blocks;                /* in a forked child: in transit at the fork */
    size_t in_transit;                 /* blocks that a thread holds while the lock is released */
    pthread_cond_t settled;            /* in_transit fell */
    sk__table table;
    sk__block *spare; /* unused block records, linked by next */
    size_t spare_count;
    struct sk__slab *slabs; /* where block records come from */
    sk_pool_stats stats;
};

/* One allocation on its way. */
typedef struct sk__request {
    size_t nbytes; /* rounded */
    size_t requested_bytes;
    sk__arena arena;
    sk__lane *lane;
} sk__request;

/* block.c: records, the table of addresses, cutting and joining. */
enum { SK_RECORDS_PER_TAKE = 4 }; /* most records one attempt to take a block needs */
sk_status sk__records_reserve(sk_pool *pool, size_t count) SK_REQUIRES(pool->lock);
sk__block *sk__block_new(sk_pool *pool) SK_REQUIRES(pool->lock); /* from the reserve */
void sk__block_recycle(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
void sk__records_free(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Cut `block`, in no list, after `nbytes`; the right part is returned, in the same state. */
sk__block *sk__block_split(sk_pool *pool, sk__block *block, size_t nbytes) SK_REQUIRES(pool->lock);
/* Cut `nbytes` from `address` on out of `block`, in no list, as that part is not; what is left and
 * right of it is free again, in the block's lane. Needs two spare records. */
sk__block *sk__block_carve(sk_pool *pool, sk__block *block, uintptr_t address, size_t nbytes)
    SK_REQUIRES(pool->lock);
/* Make a block free in its lane: merge it with its neighbours and list it. */
void sk__block_cache(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* Make a block without memory vacant, likewise. */
void sk__block_vacate(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* Make a block dormant whose memory lies elsewhere now, likewise. */
void sk__block_lend(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
static inline bool sk__is_idle(const sk__block *block) {
    return block->state == SK_VACANT || block->state == SK_DORMANT;
}
void sk__idle_remove(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* Cut exactly these granules out of an idle block; they are in no list. Needs two spare records. */
sk__block *sk__idle_cut(sk_pool *pool, sk__block *block, uintptr_t address, size_t nbytes)
    SK_REQUIRES(pool->lock);
/* A segment's first block was made. */
void sk__block_begin(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* The block that holds `address`; the segment must have slots. */
sk__block *sk__block_covering(const sk_pool *pool, const sk__segment *segment, uintptr_t address)
    SK_REQUIRES(pool->lock);
sk_status sk__table_reserve(sk__table *table);
void sk__table_add(sk__table *table, sk__block *block);
sk__block *sk__table_find(const sk__table *table, uintptr_t address);
void sk__table_remove(sk__table *table, const sk__block *block);

/* freelist.c */
void sk__freelist_add(sk__freelist *list, sk__block *block);
void sk__freelist_remove(sk__freelist *list, sk__block *block);
sk__block *sk__freelist_best(const sk__freelist *list, size_t nbytes); /* smallest that fits */
/* The block after `block` by falling bins; NULL starts with the largest bin. */
sk__block *sk__freelist_next(const sk__freelist *list, const sk__block *block);
size_t sk__bin_of(size_t nbytes);

/* segment.c: memory from and to the backend. */
sk_status sk__segment_grow(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock);
/* The bytes that `request` takes from the budget if nothing cached can serve it. */
size_t sk__segment_bytes(const sk_pool *pool, const sk__request *request);
/* Give at least `nbytes` of cached memory to the backend, or all there is; returns how much. Only
 * blocks whose lane is synced past them are touched. */
size_t sk__segment_shrink(sk_pool *pool, size_t nbytes) SK_REQUIRES(pool->lock);
/* Let free memory that lies elsewhere serve `request`: it is moved there, or else given back so
 * that it can be taken anew. False: that is not all that is lacking. Touches what
 * sk__segment_shrink does; with aliases also what is behind the stream's own work. `*looked`: that
 * was not enough, so there is no use in waiting for that work. */
bool sk__segment_make_room(sk_pool *pool, const sk__request *request, bool *looked)
    SK_REQUIRES(pool->lock);
/* What `request` lacks if it has to be served by growing, everything cached being given up. */
size_t sk__segment_shortage(const sk_pool *pool, const sk__request *request)
    SK_REQUIRES(pool->lock);
void sk__segments_free(sk_pool *pool) SK_REQUIRES(pool->lock);
sk__segment *sk__segment_find(const sk_pool *pool, uintptr_t address) SK_REQUIRES(pool->lock);
void sk__committed_change(sk_pool *pool, sk__segment *segment, size_t nbytes, bool growing)
    SK_REQUIRES(pool->lock);
/* Up to `nbytes` of a free block, next to an idle neighbour if there is one, so that these stay
 * few.
 */
sk__span sk__span_of(const sk_pool *pool, sk__block *block, size_t nbytes) SK_REQUIRES(pool->lock);
/* Take the block of granules that go elsewhere out of its list; and make them idle, and the rest of
 * the block free again. Needs two spare records. */
void sk__span_unlist(sk_pool *pool, const sk__span *gone) SK_REQUIRES(pool->lock);
void sk__span_leave(sk_pool *pool, const sk__span *gone, sk__state state) SK_REQUIRES(pool->lock);

/* pending.c */
void sk__pending_add(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* Free the pending blocks whose events have come, up to the first whose have not, or `all`. Never
 * waits. */
void sk__pending_poll(sk_pool *pool, bool all) SK_REQUIRES(pool->lock);
/* Wait for the block that was given back first. SK_NOT_READY: none is pending. */
sk_status sk__pending_wait_first(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Wait for all that are pending or in transit now. */
sk_status sk__pending_wait(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Release the lock while the caller holds a block that is in no list; and the way back. */
void sk__transit_enter(sk_pool *pool) SK_RELEASE(pool->lock);
void sk__transit_leave(sk_pool *pool) SK_ACQUIRE(pool->lock);
/* Wait until some thread has brought a block back. SK_NOT_READY: none is in transit. */
sk_status sk__transit_wait(sk_pool *pool) SK_REQUIRES(pool->lock);

/* lane.c */
sk_status sk__lane_of(sk_pool *pool, sk_stream *stream, sk__lane **out) SK_REQUIRES(pool->lock);
/* Wait for the work behind one lane's free blocks. SK_NOT_READY: none is behind any.
 * not  its own may be used behind that work: NULL, or a lane that is passed over. */
sk_status sk__lane_sync_next(sk_pool *pool, const sk__lane * not) SK_REQUIRES(pool->lock);
/* Wait for all work, whether or not it is behind free blocks. */
sk_status sk__lanes_idle(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Let `to` have all free blocks that no work is behind: free memory of several streams can only be
 * joined, and given back, as one's. */
void sk__lanes_join(sk_pool *pool, sk__lane *to) SK_REQUIRES(pool->lock);
/* Wait for all lanes' work behind free blocks. */
sk_status sk__lanes_sync(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Likewise, and join them. */
sk_status sk__lanes_settle(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Move what fits best of another lane's to the request's, behind an event. SK_NOT_READY: nothing
 * fits. */
sk_status sk__lane_adopt(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock);

/* reclaim.c: the way out when a request does not fit. May release and take the lock again. */
/* Before growing: give cached memory back above the share of the budget that is set. */
sk_status sk__collect(sk_pool *pool) SK_REQUIRES(pool->lock);
sk_status sk__reclaim(sk_pool *pool, const sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock);

/* pool.c */
/* Whether this thread only takes what needs no waiting. Any thread, no lock needed. */
bool sk__is_tentative(void);
/* The block of a free list that serves the request best; NULL: none does. */
sk__block *sk__fit(const sk_pool *pool, const sk__freelist *list, const sk__request *request)
    SK_REQUIRES(pool->lock);
/* What serves a request of a block that is in no list; what is not needed is free again. */
sk__block *sk__block_serve(sk_pool *pool, sk__block *block, const sk__request *request)
    SK_REQUIRES(pool->lock);
/* From the free lists, or by growing; the block is in no list afterwards. */
sk_status sk__acquire(sk_pool *pool, const sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock);
static inline bool sk__is_memory_failure(sk_status status) {
    return status == SK_OVER_BUDGET || status == SK_OUT_OF_DEVICE_MEMORY;
}

/* stats.c */
void sk__stats_take(sk_pool *pool, const sk__block *block) SK_REQUIRES(pool->lock);
void sk__stats_give(sk_pool *pool, const sk__block *block) SK_REQUIRES(pool->lock);
/* It became reusable: at once when given, or when its events had come. */
void sk__stats_free(sk_pool *pool, const sk__block *block) SK_REQUIRES(pool->lock);
void sk__stats_cached(sk_pool *pool, const sk__block *block, int sign) SK_REQUIRES(pool->lock);
void sk__stats_reserved(sk_pool *pool, sk__arena arena, int64_t nbytes) SK_REQUIRES(pool->lock);
void sk__stats_segment(sk_pool *pool, sk__arena arena, int sign) SK_REQUIRES(pool->lock);
void sk__ring_note(sk_pool *pool, sk_ring_kind kind, uint64_t nbytes, uint32_t tag)
    SK_REQUIRES(pool->lock);

#endif
