/* reclaim.c - what happens when a request does not fit.
 *
 * In this order, retrying after each: adopt a free block of another stream, behind an event; wait
 * for blocks that other streams still use; give cached memory to the device and grow elsewhere; ask
 * the owner to rescue the request, again and again until it frees nothing more. Backend calls that
 * may wait and the rescue callback run with the lock released, so everything is looked up afresh
 * afterwards. */
#include "pool/pool.h"

#include <stdio.h>
#include <stdlib.h>

/* The pool whose rescue callback runs on this thread: inside it an allocation simply fails. */
static _Thread_local const sk_pool *rescuing;

/* ---- pending blocks -------------------------------------------------------------------------- */

static void pending_remove(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock) {
    sk_assert(block->state == SK_PENDING);
    if (block->next != NULL) {
        block->next->prev = block->prev;
    } else {
        pool->pending_last = block->prev;
    }
    if (block->prev != NULL) {
        block->prev->next = block->next;
    } else {
        pool->pending = block->next;
    }
    block->prev = NULL;
    block->next = NULL;
}

/* An event that cannot be destroyed is the backend's to report, not a reason to stop here. */
static void event_release(sk_backend *backend, sk_event *event) {
    sk_status status = sk_event_destroy(backend, event);
    (void)status;
}

void sk__uses_free(sk_pool *pool, sk__block *block) {
    while (block->uses != NULL) {
        sk__use *use = block->uses;
        block->uses = use->next;
        event_release(pool->backend, use->event);
        free(use);
    }
}

/* Its events have come: `block`, in no list, is free. */
static void pending_release(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock) {
    sk_assert(block->state == SK_PENDING && block->uses != NULL);
    sk__uses_free(pool, block);
    sk__stats_free(pool, block);
    sk__block_cache(pool, block);
}

static bool uses_are_done(const sk_pool *pool, const sk__block *block) {
    for (const sk__use *use = block->uses; use != NULL; use = use->next) {
        if (sk_event_query(pool->backend, use->event) != SK_OK) {
            return false;
        }
    }
    return true;
}

void sk__pending_poll(sk_pool *pool) {
    sk__block *block = pool->pending;
    while (block != NULL) {
        sk__block *next = block->next;
        if (uses_are_done(pool, block)) {
            pending_remove(pool, block);
            pending_release(pool, block);
        }
        block = next;
    }
}

static sk_status uses_sync(const sk_pool *pool, const sk__block *block) {
    for (const sk__use *use = block->uses; use != NULL; use = use->next) {
        sk_status status = sk_event_sync(pool->backend, use->event);
        if (status != SK_OK) {
            return status;
        }
    }
    return SK_OK;
}

/* A block that is in no list while the lock is released: whoever else is short of memory waits for
 * it to come back before giving up. */
static void transit_enter(sk_pool *pool) SK_RELEASE(pool->lock) {
    pool->in_transit++;
    sk__unlock(&pool->lock);
}

static void transit_leave(sk_pool *pool) SK_ACQUIRE(pool->lock) {
    sk__lock(&pool->lock);
    sk_assert(pool->in_transit > 0);
    pool->in_transit--;
    (void)pthread_cond_broadcast(&pool->settled);
}

static void pending_put_back(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock) {
    sk_assert(block->state == SK_PENDING && block->uses != NULL);
    block->prev = NULL;
    block->next = pool->pending;
    *(pool->pending != NULL ? &pool->pending->prev : &pool->pending_last) = block;
    pool->pending = block;
}

/* Wait for the block that was given back first. SK_NOT_READY: none is pending. */
static sk_status pending_wait_first(sk_pool *pool) SK_REQUIRES(pool->lock) {
    sk__block *block = pool->pending;
    if (block == NULL) {
        return SK_NOT_READY;
    }
    pending_remove(pool, block);
    transit_enter(pool);
    sk_status status = uses_sync(pool, block);
    transit_leave(pool);
    if (status == SK_OK) {
        pending_release(pool, block);
    } else {
        pending_put_back(pool, block);
    }
    return status;
}

/* Wait until the threads that hold blocks now have brought them back; not for later comers. */
static void transit_wait(sk_pool *pool) SK_REQUIRES(pool->lock) {
    for (size_t holders = pool->in_transit; holders > 0 && pool->in_transit > 0; holders--) {
        sk__wait(&pool->settled, &pool->lock);
    }
}

sk_status sk__pending_wait(sk_pool *pool) {
    sk_status status = SK_OK;
    while (status == SK_OK) {
        status = pending_wait_first(pool);
    }
    transit_wait(pool);
    return status == SK_NOT_READY ? SK_OK : status;
}

/* ---- other streams' blocks ------------------------------------------------------------------- */

static sk_status lanes_sync(sk_pool *pool) SK_REQUIRES(pool->lock) {
    /* Lanes are never removed while the pool lives, so the walk survives the unlocked waits. */
    for (sk__lane *lane = pool->lanes; lane != NULL; lane = lane->next) {
        uint64_t clock = lane->clock;
        if (clock == lane->synced) {
            continue;
        }
        sk__unlock(&pool->lock);
        sk_status status = sk_stream_sync(pool->backend, lane->stream);
        sk__lock(&pool->lock);
        if (status != SK_OK) {
            return status;
        }
        lane->synced = clock > lane->synced ? clock : lane->synced;
        pool->stats.num_sync_all_streams++;
    }
    return SK_OK;
}

/* Move the free blocks of `from` that no device work is behind any more. */
static void lane_move(sk_pool *pool, sk__lane *from, sk__lane *to) SK_REQUIRES(pool->lock) {
    for (int arena = 0; arena < SK_ARENAS; arena++) {
        sk__block *block = sk__freelist_next(&from->free[arena], NULL);
        while (block != NULL) {
            sk__block *next = sk__freelist_next(&from->free[arena], block);
            if (block->given_at <= from->synced) {
                sk__freelist_remove(&from->free[arena], block);
                sk__stats_cached(pool, block, -1);
                sk_assert(block->lane == from);
                block->lane = to;
                block->given_at = 0;
                sk__block_cache(pool, block); /* merges only with blocks of `to` */
            }
            block = next;
        }
    }
}

sk_status sk__lanes_join(sk_pool *pool, sk__lane *lane) {
    sk_status status = lanes_sync(pool);
    if (status != SK_OK) {
        return status;
    }
    sk__lane *to = lane != NULL ? lane : pool->lanes;
    for (sk__lane *from = pool->lanes; from != NULL; from = from->next) {
        if (from != to) {
            lane_move(pool, from, to);
        }
    }
    return SK_OK;
}

static sk__block *foreign_best(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    sk__block *best = NULL;
    for (sk__lane *lane = pool->lanes; lane != NULL; lane = lane->next) {
        if (lane == request->lane) {
            continue;
        }
        sk__block *block = sk__freelist_best(&lane->free[request->arena], request->nbytes);
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
    event_release(backend, event);
    return status;
}

/* Move the best block of another lane to the request's. SK_OVER_BUDGET: there is none. */
static sk_status adopt(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    sk__block *block = foreign_best(pool, request);
    if (block == NULL) {
        return SK_OVER_BUDGET;
    }
    sk__lane *owner = block->lane;
    sk_assert(owner != request->lane && block->nbytes >= request->nbytes);
    sk__freelist_remove(&owner->free[request->arena], block);
    sk__stats_cached(pool, block, -1);
    block->state = SK_PENDING; /* on its way between lanes */
    transit_enter(pool);
    sk_status status = streams_order(pool->backend, owner->stream, request->lane->stream);
    transit_leave(pool);
    if (status == SK_OK) {
        block->lane = request->lane;
        block->given_at = ++request->lane->clock;
    }
    sk__block_cache(pool, block);
    return status;
}

/* ---- in order -------------------------------------------------------------------------------- */

static sk_status adopt_and_acquire(sk_pool *pool, const sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock) {
    sk_status status = adopt(pool, request);
    return status == SK_OK ? sk__acquire(pool, request, out) : status;
}

/* Until the request is met: wait for one pending block after the other, then for the blocks that
 * other threads hold. SK_OVER_BUDGET: nothing is left to wait for. */
static sk_status wait_and_acquire(sk_pool *pool, const sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock) {
    sk_status status = SK_OVER_BUDGET;
    bool waiting = true;
    while (waiting && sk__is_memory_failure(status)) {
        sk_status waited = pending_wait_first(pool);
        if (waited == SK_NOT_READY) {
            transit_wait(pool);
            waiting = false;
        } else if (waited != SK_OK) {
            return waited;
        }
        status = sk__acquire(pool, request, out);
        if (sk__is_memory_failure(status)) {
            status = adopt_and_acquire(pool, request, out);
        }
    }
    return status;
}

static sk_status shrink_and_acquire(sk_pool *pool, const sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock) {
    sk_status status = sk__lanes_join(pool, request->lane);
    if (status == SK_OK) {
        (void)sk__segment_shrink(pool, sk__segment_shortage(pool, request));
        status = sk__acquire(pool, request, out);
    }
    return status;
}

/* Everything the pool can do by itself. A step that has nothing to offer is followed by the next;
 * one that fails otherwise met a broken device, and that is what the caller is told. */
static sk_status reclaim_own(sk_pool *pool, const sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock) {
    sk_status status = adopt_and_acquire(pool, request, out);
    if (sk__is_memory_failure(status)) {
        status = wait_and_acquire(pool, request, out);
    }
    if (sk__is_memory_failure(status)) {
        status = shrink_and_acquire(pool, request, out);
    }
    return status;
}

/* Ask the owner; returns what it freed. */
static size_t rescue_call(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    sk_rescue_fn rescue = pool->rescue;
    void *context = pool->rescue_context;
    if (rescue == NULL || rescuing == pool) {
        return 0;
    }
    size_t needed = sk__segment_shortage(pool, request);
    sk_assert(needed > 0);
    const sk_pool *outer = rescuing;
    sk__unlock(&pool->lock);
    rescuing = pool;
    size_t freed = rescue(context, needed);
    rescuing = outer;
    sk__lock(&pool->lock);
    if (freed > 0) {
        pool->stats.num_rescues++;
        pool->stats.rescued_bytes += (int64_t)freed;
    }
    if (pool->ring != NULL) {
        sk__ring_note(pool, SK_RING_RESCUE, freed, 0);
    }
    return freed;
}

static sk_status request_fail(sk_pool *pool, const sk__request *request, sk_status status)
    SK_REQUIRES(pool->lock) {
    pool->stats.num_ooms++;
    if (pool->ring != NULL) {
        sk__ring_note(pool, SK_RING_OOM, request->requested_bytes, 0);
    }
    char budget[64] = "there is no budget";
    if (pool->budget_bytes != SIZE_MAX) {
        (void)snprintf(budget, sizeof budget, "the budget is %zu", pool->budget_bytes);
    }
    return sk__fail(status, "pool: %zu bytes asked; %lld in use, %zu reserved, %s",
                    request->requested_bytes, (long long)pool->stats.allocated_bytes[0].current,
                    pool->reserved_bytes, budget);
}

sk_status sk__reclaim(sk_pool *pool, const sk__request *request, sk__block **out) {
    pool->stats.num_alloc_retries++;
    sk_status status = SK_OVER_BUDGET;
    /* What is larger than the whole budget is not worth giving anything up for. */
    bool asking = sk__segment_bytes(pool, request) <= pool->budget_bytes;
    if (asking) {
        status = reclaim_own(pool, request, out);
        asking = sk__is_memory_failure(status);
    }
    while (asking) {
        asking = rescue_call(pool, request) > 0;
        /* Even after a last "nothing": another thread may have given something back meanwhile. */
        status = sk__acquire(pool, request, out);
        if (sk__is_memory_failure(status)) {
            status = reclaim_own(pool, request, out);
        }
        asking = asking && sk__is_memory_failure(status);
    }
    return sk__is_memory_failure(status) ? request_fail(pool, request, status) : status;
}
