/* lives.h - the lives of blocks by call site, and planned addresses: lives.c, planned.c and
 * holes.c.
 *
 * Everything here is guarded by pool->lock. */
#ifndef SWAPKIT_POOL_LIVES_H
#define SWAPKIT_POOL_LIVES_H

#include "pool/pool.h"

/* One request of each step, and the latest two lives of its blocks; [0] is the latest. A block
 * refers to the life, and the life to the block, until the block is free or the next step makes
 * the request. */
struct sk__life {
    sk__life *next; /* of the same site, later in the step; or an unused record */
    sk__block *block;
    sk_stream *stream;
    size_t requested_bytes;
    size_t nbytes[2];
    uint64_t step[2]; /* NO_STEP: none yet */
    uint64_t taken_at[2], freed_at[2];
    uint64_t longest[2]; /* in the window of steps, and in the one before */
    size_t most_bytes[2];
    uint64_t window;
    uintptr_t place; /* planned address; 0: none */
    size_t room_bytes;
    uint64_t begin, end; /* when the layout expects it */
    sk_life_class predicted, ended, observed;
    uint32_t phase;
};

/* The requests of one size from one place of the program in one phase of each step; or those of
 * sizes that do not repeat. */
struct sk__site {
    size_t nbytes; /* 0: an unused entry; SK_VARYING */
    uint32_t phase, tag;
    uint64_t step; /* of the latest request */
    uint32_t run;  /* steps without a gap before it, up to SK_STEADY_RUN */
    sk__life *first;
    sk__life *latest; /* of the latest request; NULL: none in its step */
};

#define SK_NO_STEP UINT64_MAX
enum {
    SK_VARYING = 1, /* as a size: it is none, as sizes are multiples of SK_ROUND_BYTES */
    SK_STEADY_RUN = 2
};

/* The tag of a request whose thread has the tag `tag`. */
static inline uint32_t sk__lives_tag(const sk_pool *pool, uint32_t tag) SK_REQUIRES(pool->lock) {
    sk_backward_fn backward = tag == 0 ? pool->lives.backward : NULL;
    return backward != NULL && backward() ? SK_TAG_BACKWARD : tag;
}

/* lives.c */
/* Return the life that a request begins, for sk__life_serve(); NULL: there is no host memory. Lives
 * must be on. */
sk__life *sk__life_begin(sk_pool *pool, const sk__request *request, uint32_t tag)
    SK_REQUIRES(pool->lock);
/* Note the block that serves a request with a life; NULL: the request failed. */
void sk__life_serve(sk_pool *pool, const sk__request *request, sk__block *block)
    SK_REQUIRES(pool->lock);
/* Note that a block with a life is free. */
void sk__life_end(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* End a step. */
void sk__lives_mark(sk_pool *pool) SK_REQUIRES(pool->lock);
void sk__lives_free(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Return the arena that serves a request if it has no place, or its place is not free. */
sk__arena sk__arena_of(const sk_pool *pool, const sk__request *request, uint32_t tag)
    SK_REQUIRES(pool->lock);
sk__site *sk__site_find(const sk_pool *pool, const sk__site *key) SK_REQUIRES(pool->lock);

/* When a layout needs addresses, in takes and frees of the step. */
struct sk__stay {
    size_t offset, room_bytes;
    uint64_t begin, end; /* UINT64_MAX: any time */
};

/* Addresses where a request can be served, and the block at their beginning. */
typedef struct sk__gap {
    uintptr_t address; /* 0: there are none, */
    sk__block *block;  /* and this is undefined */
} sk__gap;

/* holes.c */
/* Make a list of stays, for sk__stays_set(); NULL: no host memory. */
sk__stay *sk__stays_make(const sk_place *places, size_t count);
/* Use a list of stays, or none; frees the one before. */
void sk__stays_set(sk_pool *pool, sk__stay *stays, size_t count) SK_REQUIRES(pool->lock);
/* Whether a request that is not served in its place may be served in a hole. */
bool sk__hole_is_sought(const sk__lives *lives, const sk__life *life);
/* Return addresses of the layout that no other request needs while the request's block lives. */
sk__gap sk__hole_find(const sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock);

/* planned.c */
/* Return the first addresses in [from, to) of the layout where a request can be served now. */
sk__gap sk__gap_find(const sk_pool *pool, const sk__request *request, uintptr_t from, uintptr_t to)
    SK_REQUIRES(pool->lock);
/* Whether a request may be served by a layout. */
static inline bool sk__is_planned(const sk_pool *pool, const sk__request *request)
    SK_REQUIRES(pool->lock) {
    return request->life != NULL && pool->lives.stats.height_bytes > 0;
}
/* Return the range of the present layout, whose memory is needed soon at its own addresses; NULL:
 * there is no layout. Ranges of former layouts are as other segments. */
static inline const sk__segment *sk__layout_range(const sk_pool *pool) SK_REQUIRES(pool->lock) {
    return pool->lives.stats.height_bytes > 0 ? pool->lives.range : NULL;
}
/* For such a request: take its place, or a hole; the block is in no list. NULL: none is free. */
sk__block *sk__planned_take(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock);
/* For such a request: whether a place for it is free and has memory; and whether it is free. */
bool sk__planned_is_ready(const sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock);
bool sk__planned_is_open(const sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock);
/* Count a request and the block that serves it. */
void sk__layout_count(sk_pool *pool, const sk__request *request, const sk__block *block)
    SK_REQUIRES(pool->lock);
void sk__layout_forget(sk_pool *pool) SK_REQUIRES(pool->lock);

#endif
