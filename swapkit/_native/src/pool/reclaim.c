/* reclaim.c - making a request fit.
 *
 * Cheapest first, and from the start again after each step that changed anything. First without
 * waiting: blocks whose events have completed, other streams' blocks behind an event, free memory
 * that can be given back and grown elsewhere. Then one wait at a time. Then the owner, whose rescue
 * is called until it frees nothing more. Waits and the rescue callback run with the lock released,
 * so everything is looked up again afterwards. */
#include "pool/alias.h"
#include "pool/waiting.h"

#include <stdio.h>

/* The pool whose rescue callback runs on this thread: inside it an allocation simply fails. */
static _Thread_local const sk_pool *rescuing;

/* Return the bytes reserved above the set share of the budget. Without a budget: 0. */
static size_t collection_excess(const sk_pool *pool) SK_REQUIRES(pool->lock) {
    size_t share = (size_t)(pool->collection_share * (double)pool->budget_bytes);
    return pool->reserved_bytes > share ? pool->reserved_bytes - share : 0;
}

sk_status sk__collect(sk_pool *pool) {
    size_t excess = collection_excess(pool);
    if (excess > 0 && !sk__is_tentative()) {
        sk_status status = sk__lanes_sync(pool);
        if (status != SK_OK) {
            return status;
        }
        excess = collection_excess(pool);
    }
    size_t freed = excess > 0 ? sk__segment_shrink(pool, excess) : 0;
    if (freed > 0) {
        pool->stats.num_garbage_collections++;
        pool->stats.garbage_collected_bytes += (int64_t)freed;
    }
    return SK_OK;
}

/* Try everything that needs no wait. A memory failure: not enough; `*looked`: nor would it be
 * enough if the stream's own work was done. */
static sk_status acquire_now(sk_pool *pool, const sk__request *request, sk__block **out,
                             bool *looked) SK_REQUIRES(pool->lock) {
    *looked = false;
    sk__pending_poll(pool, true);
    sk_status status = sk__acquire(pool, request, out);
    if (!sk__is_memory_failure(status)) {
        return status;
    }
    sk_status adopted = sk__lane_adopt(pool, request);
    if (adopted != SK_NOT_READY) {
        return adopted == SK_OK ? sk__acquire(pool, request, out) : adopted;
    }
    if (!sk__segment_make_room(pool, request, looked)) {
        /* Neighbours in several lanes may share a granule that no lane could give back alone. */
        bool is_planned = pool->lives.stats.height_bytes > 0;
        sk__lanes_join(pool, request->lane, is_planned ? SK_PLANNED : SK_ARENAS);
        (void)sk__segment_make_room(pool, request, looked);
    }
    status = sk__acquire(pool, request, out);
    if (!sk__is_memory_failure(status) || pool->lives.stats.height_bytes == 0) {
        return status;
    }
    sk__request squatter = *request;
    squatter.may_squat = true;
    return sk__acquire(pool, &squatter, out);
}

/* When there is nothing left to wait for: free memory of the layout serves any stream. Its streams
 * keep it until then, since each needs its own places again. `status`: if that is not enough. */
static sk_status acquire_last(sk_pool *pool, const sk__request *request, sk_status status,
                              sk__block **out) SK_REQUIRES(pool->lock) {
    sk_assert(sk__is_memory_failure(status));
    if (pool->lives.stats.height_bytes == 0) {
        return status;
    }
    bool looked = false;
    sk__lanes_join(pool, request->lane, SK_ARENAS);
    (void)sk__segment_make_room(pool, request, &looked);
    sk__request squatter = *request;
    squatter.may_squat = true;
    return sk__acquire(pool, &squatter, out);
}

/* Wait once for work that may free memory; skip the request's own lane if it was `looked` at.
 * SK_NOT_READY: there is nothing to wait for. */
static sk_status wait_once(sk_pool *pool, const sk__request *request, bool looked)
    SK_REQUIRES(pool->lock) {
    sk_status status = sk__pending_wait_first(pool);
    if (status == SK_NOT_READY) {
        status = sk__lane_sync_next(pool, looked ? request->lane : NULL);
    }
    if (status == SK_NOT_READY) {
        status = sk__transit_wait(pool);
    }
    return status;
}

/* Try everything that the pool can do by itself. Any failure other than lack of memory means a
 * broken device; the caller gets its status. */
static sk_status reclaim_own(sk_pool *pool, const sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock) {
    bool looked = false;
    sk_status status = acquire_now(pool, request, out, &looked);
    while (sk__is_memory_failure(status)) {
        sk_status waited = wait_once(pool, request, looked);
        if (waited != SK_OK) {
            return waited == SK_NOT_READY ? acquire_last(pool, request, status, out) : waited;
        }
        status = acquire_now(pool, request, out, &looked);
    }
    return status;
}

/* Call the owner's rescue; `out`: the bytes that it freed. Fails if queued work has failed. */
static sk_status rescue_call(sk_pool *pool, const sk__request *request, size_t *out)
    SK_REQUIRES(pool->lock) {
    sk_rescue_fn rescue = pool->rescue;
    void *context = pool->rescue_context;
    *out = 0;
    if (rescue == NULL || rescuing == pool) {
        return SK_OK;
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
    *out = freed;
    return sk__settle(pool);
}

static sk_status request_fail(sk_pool *pool, const sk__request *request, sk_status status)
    SK_REQUIRES(pool->lock) {
    pool->stats.num_ooms++;
    if (pool->ring != NULL) {
        sk__ring_note(pool, SK_RING_OOM, request->requested_bytes, 0);
    }
    /* That there is a budget left does not help: say what else there was too little of. */
    char refusal[256] = "";
    if (status == SK_OUT_OF_DEVICE_MEMORY) {
        (void)snprintf(refusal, sizeof refusal, "; the device refused: %s", sk_error_text());
    }
    char budget[64] = "no budget";
    if (pool->budget_bytes != SIZE_MAX) {
        (void)snprintf(budget, sizeof budget, "the budget is %zu", pool->budget_bytes);
    }
    return sk__fail(status, "pool: %zu bytes requested; %lld in use, %zu reserved, %s%s",
                    request->requested_bytes, (long long)pool->stats.allocated_bytes[0].current,
                    pool->reserved_bytes, budget, refusal);
}

sk_status sk__reclaim(sk_pool *pool, const sk__request *request, sk__block **out) {
    bool looked = false;
    pool->alias_pause -= pool->alias_pause > 0 ? 1 : 0;
    if (sk__is_tentative()) {
        return pool->settle == NULL ? acquire_now(pool, request, out, &looked) : SK_OVER_BUDGET;
    }
    pool->stats.num_alloc_retries++;
    sk_status status = SK_OVER_BUDGET;
    /* A request larger than the whole budget is not worth giving anything up for. */
    bool asking = sk__segment_bytes(pool, request) <= pool->budget_bytes;
    if (asking) {
        status = reclaim_own(pool, request, out);
        asking = sk__is_memory_failure(status);
    }
    while (asking) {
        size_t freed = 0;
        status = rescue_call(pool, request, &freed);
        if (status == SK_OK) {
            /* Even if it freed nothing: another thread may have given memory back meanwhile. */
            status = reclaim_own(pool, request, out);
        }
        asking = freed > 0 && sk__is_memory_failure(status);
    }
    if (status == SK_OUT_OF_DEVICE_MEMORY && pool->alias_count > 0) {
        /* It may lack addresses or mappings. Not earlier: the next steps have to map again. */
        sk__aliases_drop_all(pool);
        status = reclaim_own(pool, request, out);
    }
    return sk__is_memory_failure(status) ? request_fail(pool, request, status) : status;
}
