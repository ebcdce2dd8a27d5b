/* pool.h - the structures of the caching allocator, shared by its files.
 *
 * A segment is tiled by blocks in address order. A block is
 *   IN_USE   handed out; in the table of addresses
 *   PENDING  given back, but events of other streams are outstanding, or in transit between lanes
 *   CACHED   free and committed; in a free list of its lane, merged with its neighbours
 *   VACANT   address space without memory (segments of virtual memory only); in its arena's list
 *   DORMANT  idle like VACANT, but memory that lies elsewhere is also mapped here: alias.c
 * A lane is the pool's record of one stream: the free lists of blocks that were given back in
 * that stream's order and may be used there at once.
 *
 * Invariants (walked by sk_pool_check): blocks tile their segment; neighbours that could be merged
 * are; idle blocks (vacant or dormant) begin and end on granules; reserved = in use + pending +
 * cached <= budget.
 *
 * Everything here is guarded by pool->lock, which every sk__ function below expects to be held.
 * Waits and callbacks run without it (reclaim.c). */
#ifndef SWAPKIT_POOL_POOL_H
#define SWAPKIT_POOL_POOL_H

#include <stdatomic.h>

#include "backend/backend.h"
#include "base/base.h"
#include "base/ring.h"
#include "base/thread.h"
#include "swapkit_lives.h"

enum {
    SK_ROUND_BYTES = 512,               /* block sizes are multiples of this */
    SK_SMALL_BYTES = 1024 * 1024,       /* requests up to this come from small segments */
    SK_ROUNDUP_LOG = 20,                /* of 1 MiB, where the intervals of divisions start */
    SK_ROUNDUP_COUNT = 16,              /* intervals, each a power of two; the last is open */
    SK_SEGMENT_BYTES = 2 * 1024 * 1024, /* unit of whole segments, and a small one's size */
    SK_MIDDLE_BYTES = 20 * 1024 * 1024, /* whole segment for requests below half of this */
    SK_BIN_STEPS = 16,                  /* bins per doubling of the block size */
    SK_BIN_COUNT = 656,                 /* enough for SK_MAX_BYTES */
    SK_WORD_BITS = 64,                  /* of bitmaps */
    SK_START_BYTES = 16 * 1024,         /* unit of the index of blocks by address */
    SK_COMMIT_BYTES = 64 * 1024,        /* least that a large request commits, and its alignment */
    SK_BIN_WORDS = (SK_BIN_COUNT + SK_WORD_BITS - 1) / SK_WORD_BITS
};

/* Each arena has segments of its own. The first two serve whatever the others do not. */
typedef enum sk__arena {
    SK_SMALL,
    SK_LARGE,
    SK_ACTIVATIONS, /* in use from forward to backward */
    SK_OPTIMIZER,   /* an optimizer's states */
    SK_LASTING,     /* in use over several steps, or from one to the next */
    SK_PLANNED,     /* at addresses of the layout */
    SK_ARENAS
} sk__arena;
typedef enum sk__state { SK_IN_USE, SK_PENDING, SK_CACHED, SK_VACANT, SK_DORMANT } sk__state;

typedef struct sk__block sk__block;
typedef struct sk__segment sk__segment;
typedef struct sk__lane sk__lane;
typedef struct sk__use sk__use;
typedef struct sk__granule sk__granule;
typedef struct sk__slot sk__slot;
typedef struct sk__size sk__size;
typedef struct sk__life sk__life;
typedef struct sk__site sk__site;
typedef struct sk__stay sk__stay;
typedef struct sk__slab sk__slab;

struct sk__block {
    uintptr_t address;
    size_t nbytes;
    size_t requested_bytes;
    sk__segment *segment;
    sk__block *left, *right; /* neighbours in the segment */
    sk__block *prev, *next;  /* in the list of its state */
    sk__lane *lane;          /* NULL while idle */
    sk__use *uses;           /* other streams that use it */
    uint64_t given_at;       /* lane->clock when it was given back */
    uint64_t step;           /* pool->steps when it was taken */
    sk__life *life;          /* of the request that took it; NULL: not noted */
    uint32_t tag;
    sk__state state;
};

/* Another stream's use of a block; the event is recorded when the block is given back. */
struct sk__use {
    sk__use *next;
    sk_stream *stream;
    sk_event *event;
};

/* An index of blocks by address: for each SK_START_BYTES of a segment the first block that begins
 * there. */
typedef struct sk__starts {
    sk__block **firsts; /* NULL: the segment has no index */
    uint64_t *filled;   /* a bit for each that is not NULL */
    uint64_t *words;    /* a bit for each word of `filled` that is not 0 */
} sk__starts;

struct sk__segment {
    sk__segment *next;
    uintptr_t address;
    size_t nbytes;
    size_t committed_bytes;
    sk__arena arena;
    sk__block *first;
    sk__slot *slots; /* one for each granule of addresses; NULL: memory has no aliases */
    sk__starts starts;
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
    uint64_t synced; /* blocks given at or before this are free of device work */
    size_t free_bytes;
    sk__freelist free[SK_ARENAS];
};

/* Blocks in use by address: open addressing, linear probing, power-of-two capacity. */
typedef struct sk__table {
    sk__block **slots;
    size_t capacity, count;
} sk__table;

/* The lives of blocks by call site, and the layout (lives.h). */
typedef struct sk__lives {
    sk_lives_mode mode;
    bool in_backward;        /* the phase, as of the latest request */
    uint32_t phase;          /* number in the step */
    sk_backward_fn backward; /* NULL: not to be asked */
    uint64_t clock;          /* takes and frees, ever */
    uint64_t since, windows; /* the longest lives count from this step on; windows before it */
    uint64_t began_at[3];    /* this step, the last one, and the one before */
    sk__site *sites;         /* open addressing, linear probing, power-of-two capacity */
    size_t capacity, count;  /* of sites */
    sk__life *spare;         /* unused records */
    sk__slab *slabs;
    size_t life_count, living; /* records in sites; requests since the last mark */
    size_t pins;               /* requests under way that hold a record */
    sk__segment *range;        /* the layout's; NULL: none was ever needed */
    sk__stay *stays;           /* of its places, by offset */
    size_t stay_count;
    uint64_t planned_at;     /* when the layout expected the latest planned request, */
    uint64_t planned_length; /* in a step of this length */
    size_t searches;         /* for holes in this step */
    sk_layout_stats stats;
} sk__lives;

struct sk_pool {
    sk__mutex lock;
    sk__fork_node fork_node;
    sk_backend *backend;
    size_t granule_bytes;                         /* 0: whole segments */
    size_t span_bytes;                            /* of a new range of addresses */
    size_t budget_bytes;                          /* SIZE_MAX: none */
    size_t max_split_bytes;                       /* SIZE_MAX: none, or virtual memory */
    double collection_share;                      /* of the budget; 0: no collection */
    uint32_t roundup_divisions[SK_ROUNDUP_COUNT]; /* set once */
    size_t reserved_bytes;
    size_t peak_bytes; /* of reserved, since the owner last read it */
    sk_rescue_fn rescue;
    void *rescue_context;
    sk_making_fn making;
    void *making_context;
    sk_ring *ring, *history; /* NULL: none */
    atomic_bool has_ring;    /* either; for a check without the lock */
    sk__segment *segments;
    sk__lane *lanes;
    sk__block *vacant[SK_ARENAS], *dormant[SK_ARENAS];
    bool has_aliases;               /* granules can be mapped in several slots */
    bool refuses_aliases;           /* the backend does not support them */
    uint32_t alias_pause;           /* reclaims left without aliases after a failure */
    uint32_t alias_backoff;         /* half of the pause after the next failure */
    size_t alias_count;             /* mappings beyond one for each granule */
    sk__slot *departed, *departing; /* dormant slots: first and last in the order of departures */
    bool is_thinning;               /* aliases were too many, and are not yet down to half */
    uint64_t departures, searches;  /* ever */
    uint64_t idle_departures;       /* departures at or before this are free of device work */
    sk__granule *spare_granules;
    size_t spare_granule_count;
    sk__slab *granule_slabs;
    sk__size **sizes; /* a table by size; NULL: none yet */
    sk__size *newest_size, *oldest_size;
    size_t size_count, turn_count; /* turn_count: room for turns, in total */
    uint64_t steps;                /* that have ended */
    sk__lives lives;
    sk__block *pending, *pending_last; /* in the order in which they were given back */
    sk_settle_fn settle;               /* NULL: work is in its stream as soon as it is queued */
    void *settle_context;
    size_t settlers;        /* threads that rely on a settle */
    sk__block *parked;      /* given blocks that wait for the next settle, linked by next */
    size_t lost_blocks;     /* in a forked child: in transit at the fork */
    size_t in_transit;      /* blocks that threads hold while the lock is released */
    pthread_cond_t settled; /* in_transit fell */
    sk__table table;
    sk__block *spare; /* unused block records, linked by next */
    size_t spare_count;
    sk__slab *slabs; /* memory of the block records */
    sk_pool_stats stats;
};

/* One allocation under way. */
typedef struct sk__request {
    size_t nbytes; /* rounded */
    size_t requested_bytes;
    sk__arena arena;
    sk__lane *lane;
    sk__life *life;    /* NULL: not noted */
    uint64_t begun_at; /* of the life: pool->lives.clock */
    bool may_squat;    /* in memory of the layout, where it may be in the way */
} sk__request;

/* block.c: memory of records of any kind, in slabs that are freed together. */
/* Return zeroed memory; NULL: there is none. */
void *sk__slab_add(sk__slab **slabs, size_t nbytes);
void sk__slabs_free(sk__slab **slabs);

/* block.c: records, cutting and joining. */
enum { SK_RECORDS_PER_TAKE = 4 }; /* most records that one attempt to take a block needs */
sk_status sk__records_reserve(sk_pool *pool, size_t count) SK_REQUIRES(pool->lock);
/* Return a record of the reserve; its contents are undefined. */
sk__block *sk__block_new(sk_pool *pool) SK_REQUIRES(pool->lock);
void sk__block_recycle(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* Cut `block`, in no list, after `nbytes`; return the right part, in the same state. */
sk__block *sk__block_split(sk_pool *pool, sk__block *block, size_t nbytes) SK_REQUIRES(pool->lock);
/* Cut `nbytes` at `address` out of a free block: the part is neither free nor handed out, the rest
 * is free. Needs two spare records. */
sk__block *sk__block_take(sk_pool *pool, sk__block *block, uintptr_t address, size_t nbytes)
    SK_REQUIRES(pool->lock);
/* Cut `nbytes` at `address` out of a held `block`; both are in no list. The parts on the left and
 * right are free again, in the block's lane. Needs two spare records. */
sk__block *sk__block_carve(sk_pool *pool, sk__block *block, uintptr_t address, size_t nbytes)
    SK_REQUIRES(pool->lock);
/* Make a block free in its lane: merge it with its neighbours and list it. */
void sk__block_cache(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* Take a free block out of its list: it is neither free nor handed out then. */
void sk__block_hold(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* As sk__block_cache, for a block without memory: make it vacant. */
void sk__block_vacate(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* As sk__block_cache, for a block whose memory lies elsewhere now: make it dormant. */
void sk__block_lend(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
static inline bool sk__is_idle(const sk__block *block) {
    return block->state == SK_VACANT || block->state == SK_DORMANT;
}
void sk__idle_remove(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* Cut exactly these granules out of an idle block; the result is in no list. Needs two spare
 * records. */
sk__block *sk__idle_cut(sk_pool *pool, sk__block *block, uintptr_t address, size_t nbytes)
    SK_REQUIRES(pool->lock);

/* starts.c: blocks by address. All but the first two functions need a segment with an index. */
sk_status sk__starts_open(sk__segment *segment);
void sk__starts_close(sk__segment *segment);
void sk__start_add(sk__block *block);
/* Remove `block`, which is about to become a part of its left neighbour. */
void sk__start_remove(const sk__block *block);
/* Return the block that holds `address`. */
sk__block *sk__block_covering(const sk__segment *segment, uintptr_t address);

/* segment.c: memory from and to the backend. */
sk_status sk__segment_grow(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock);
/* Return the bytes that `request` takes from the budget if no cached block serves it. */
size_t sk__segment_bytes(const sk_pool *pool, const sk__request *request);
/* Give at least `nbytes` of cached memory to the backend, or all there is; return how much. Touches
 * only blocks whose lane is synced past them. */
size_t sk__segment_shrink(sk_pool *pool, size_t nbytes) SK_REQUIRES(pool->lock);
/* Give all of it that no layout needs. */
void sk__segment_shrink_unplanned(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Let free memory that lies elsewhere serve `request`: move it, or give it back so that it can be
 * taken anew. False: more than this is lacking. Touches the same blocks as sk__segment_shrink; with
 * aliases also blocks behind the stream's own work. `*looked`: these were not enough, so waiting
 * for that work does not help. */
bool sk__segment_make_room(sk_pool *pool, const sk__request *request, bool *looked)
    SK_REQUIRES(pool->lock);
/* Return the bytes that `request` lacks to be served by growing with all cached memory given up. */
size_t sk__segment_shortage(const sk_pool *pool, const sk__request *request)
    SK_REQUIRES(pool->lock);
/* Commit granules of a vacant block, with memory taken from elsewhere if the budget is full; they
 * are free in `lane` then. The segment must have an index. */
sk_status sk__range_fill(sk_pool *pool, const sk__span *wanted, sk__lane *lane)
    SK_REQUIRES(pool->lock);
/* Reserve a range of addresses for at least `nbytes`; a smaller one where the process's address
 * space is limited. It is the first of the segments then. Needs SK_RECORDS_PER_TAKE. */
sk_status sk__range_add(sk_pool *pool, size_t nbytes, sk__arena arena) SK_REQUIRES(pool->lock);
void sk__segments_free(sk_pool *pool) SK_REQUIRES(pool->lock);
sk__segment *sk__segment_find(const sk_pool *pool, uintptr_t address) SK_REQUIRES(pool->lock);
/* Return up to `nbytes` of a free block, next to an idle neighbour if there is one, to keep idle
 * blocks few. */
sk__span sk__span_of(const sk_pool *pool, sk__block *block, size_t nbytes) SK_REQUIRES(pool->lock);
/* Make granules idle that leave their block, which is held; the rest of it is free again. Needs two
 * spare records. */
void sk__span_leave(sk_pool *pool, const sk__span *gone, sk__state state) SK_REQUIRES(pool->lock);

/* reclaim.c: when a request does not fit. May release and take the lock again. */
/* Before growing: give cached memory above the set share of the budget back. */
sk_status sk__collect(sk_pool *pool) SK_REQUIRES(pool->lock);
sk_status sk__reclaim(sk_pool *pool, const sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock);

/* pool.c */
/* Whether this thread only takes memory that needs no wait. Any thread, no lock needed. */
bool sk__is_tentative(void);
/* Return the best block of a free list for the request; NULL: none fits. */
sk__block *sk__fit(const sk_pool *pool, const sk__freelist *list, const sk__request *request)
    SK_REQUIRES(pool->lock);
/* Cut the request's part out of a free block; it is in no list, and the rest is free. */
sk__block *sk__block_serve(sk_pool *pool, sk__block *block, const sk__request *request)
    SK_REQUIRES(pool->lock);
/* Free a given block, in no list: at once, or once the events of its other streams' work, recorded
 * here, have completed. On failure the block stays as it is. */
sk_status sk__block_free(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* Serve from the free lists, or by growing; the block is in no list afterwards. */
sk_status sk__acquire(sk_pool *pool, const sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock);
static inline bool sk__is_memory_failure(sk_status status) {
    return status == SK_OVER_BUDGET || status == SK_OUT_OF_DEVICE_MEMORY;
}

/* stats.c */
/* Count `nbytes` that were committed or decommitted at `address`, and note them in the history. */
void sk__committed_change(sk_pool *pool, sk__segment *segment, uintptr_t address, size_t nbytes,
                          bool growing) SK_REQUIRES(pool->lock);
/* Note events in the ring and the history; SK_RING_FREE only in the history. */
void sk__ring_note(sk_pool *pool, sk_ring_kind kind, uint64_t nbytes, uint32_t tag)
    SK_REQUIRES(pool->lock);
void sk__block_note(sk_pool *pool, sk_ring_kind kind, const sk__block *block)
    SK_REQUIRES(pool->lock);
static inline bool sk__is_recorded(const sk_pool *pool) SK_REQUIRES(pool->lock) {
    return pool->ring != NULL || pool->history != NULL;
}

#endif
