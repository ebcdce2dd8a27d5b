/* lane.c - free blocks of several streams.
 *
 * A free block may be used at once only on the stream of its lane, in whose order it was given
 * back. It can change lanes in two ways: at no cost after a wait for its stream, or behind an event
 * that the other stream waits for (adoption). Lanes are never removed while the pool lives, so
 * loops over them survive waits without the lock. */
#include <stdlib.h>

#include "pool/freelist.h"
#include "pool/waiting.h"

sk_status sk__lane_of(sk_pool *pool, sk_stream *stream, sk__lane **out) {
    sk__lane *lane = pool->lanes;
    while (lane != NULL && lane->stream != stream) {
        lane = lane->next;
    }
    if (lane == NULL) {
        lane = calloc(1, sizeof *lane);
        if (lane == NULL) {
            return sk__fail(SK_OUT_OF_HOST_MEMORY, "pool: no host memory for a stream's lists");
        }
        lane->stream = stream;
        bool never_behind = stream == NULL && pool->backend->ops.null_stream_is_host != 0;
        lane->synced = never_behind ? UINT64_MAX : 0;
        lane->next = pool->lanes;
        pool->lanes = lane;
    }
    *out = lane;
    return SK_OK;
}

/* ---- at no cost, after waiting --------------------------------------------------------------- */

static bool is_unsynced(const sk__lane *lane) {
    return lane->clock > lane->synced && lane->free_bytes > 0;
}

static sk_status lane_sync(sk_pool *pool, sk__lane *lane) SK_REQUIRES(pool->lock) {
    uint64_t clock = lane->clock;
    sk__unlock(&pool->lock);
    sk_status status = sk_stream_sync(pool->backend, lane->stream);
    sk__lock(&pool->lock);
    if (status == SK_OK) {
        lane->synced = clock > lane->synced ? clock : lane->synced;
        pool->stats.num_sync_all_streams++;
    }
    return status;
}

sk_status sk__lane_sync_next(sk_pool *pool, const sk__lane *not) {
    for (sk__lane *lane = pool->lanes; lane != NULL; lane = lane->next) {
        if (lane != not && is_unsynced(lane)) {
            return lane_sync(pool, lane);
        }
    }
    return SK_NOT_READY;
}

static void lane_move(sk_pool *pool, sk__lane *from, sk__lane *to, int arenas)
    SK_REQUIRES(pool->lock) {
    for (int arena = 0; arena < arenas; arena++) {
        sk__block *block = sk__freelist_next(&from->free[arena], NULL);
        while (block != NULL) {
            sk__block *next = sk__freelist_next(&from->free[arena], block);
            if (block->given_at <= from->synced) {
                sk__block_hold(pool, block);
                sk_assert(block->lane == from);
                block->lane = to;
                block->given_at = 0;
                sk__block_cache(pool, block); /* merges only with blocks of `to` */
            }
            block = next;
        }
    }
}

void sk__lanes_join(sk_pool *pool, sk__lane *to, int arenas) {
    for (sk__lane *from = pool->lanes; from != NULL; from = from->next) {
        if (from != to && from->free_bytes > 0) {
            lane_move(pool, from, to, arenas);
        }
    }
}

/* Return the lane with the most free bytes: moving the others' blocks to it moves least. */
static sk__lane *lane_richest(const sk_pool *pool) SK_REQUIRES(pool->lock) {
    sk__lane *best = pool->lanes;
    for (sk__lane *lane = pool->lanes; lane != NULL; lane = lane->next) {
        if (lane->free_bytes > best->free_bytes) {
            best = lane;
        }
    }
    return best;
}

sk_status sk__lanes_sync(sk_pool *pool) {
    sk_status status = SK_OK;
    for (sk__lane *lane = pool->lanes; lane != NULL && status == SK_OK; lane = lane->next) {
        status = is_unsynced(lane) ? lane_sync(pool, lane) : SK_OK;
    }
    return status;
}

sk_status sk__lanes_idle(sk_pool *pool) {
    sk_status status = SK_OK;
    for (sk__lane *lane = pool->lanes; lane != NULL && status == SK_OK; lane = lane->next) {
        bool behind = lane->clock > lane->synced;
        status = behind ? lane_sync(pool, lane) : SK_OK;
    }
    return status;
}

sk_status sk__lanes_settle(sk_pool *pool, int arenas) {
    sk_status status = sk__lanes_sync(pool);
    if (status == SK_OK) {
        sk__lanes_join(pool, lane_richest(pool), arenas);
    }
    return status;
}

/* ---- behind an event ------------------------------------------------------------------------- */

static sk__block *foreign_best(const sk_pool *pool, const sk__request *request)
    SK_REQUIRES(pool->lock) {
    sk__block *best = NULL;
    for (const sk__lane *lane = pool->lanes; lane != NULL; lane = lane->next) {
        if (lane == request->lane || lane->free_bytes < request->nbytes) {
            continue;
        }
        sk__block *block = sk__fit(pool, &lane->free[request->arena], request);
        if (block != NULL && (best == NULL || block->nbytes < best->nbytes)) {
            best = block;
        }
    }
    return best;
}

/* Make `to` wait for all work queued on `from` so far. */
static sk_status streams_order(sk_backend *backend, sk_stream *from, sk_stream *to) {
    sk_event *event = NULL;
    sk_status status = sk_event_create(backend, &event);
    if (status != SK_OK) {
        return status;
    }
    status = sk_event_record(backend, event, from);
    if (status == SK_OK) {
        status = sk_stream_wait(backend, to, event);
    }
    sk_status destroyed = sk_event_destroy(backend, event);
    return status == SK_OK ? destroyed : status;
}

sk_status sk__lane_adopt(sk_pool *pool, const sk__request *request) {
    sk_status status = sk__records_reserve(pool, SK_RECORDS_PER_TAKE);
    if (status != SK_OK) {
        return status;
    }
    sk__block *block = foreign_best(pool, request);
    if (block == NULL) {
        return SK_NOT_READY;
    }
    sk__lane *owner = block->lane;
    sk_assert(owner != request->lane && block->nbytes >= request->nbytes);
    /* In transit between lanes; the rest stays with its owner. */
    block = sk__block_serve(pool, block, request);
    bool ordered = block->given_at <= owner->synced; /* no work is outstanding */
    if (!ordered) {
        sk__transit_enter(pool);
        status = streams_order(pool->backend, owner->stream, request->lane->stream);
        sk__transit_leave(pool);
    }
    if (status == SK_OK) {
        block->lane = request->lane;
        block->given_at = ordered ? 0 : ++request->lane->clock;
    }
    sk__block_cache(pool, block);
    return status;
}
