/* pending.c - blocks that were given back while other streams still work on them.
 *
 * They wait in the order in which they were given. A thread that waits for one takes it out of the
 * list and releases the lock: the block is then *in transit*, and other threads that are short of
 * memory wait for it to come back before they give up. */
#include <stdlib.h>

#include "pool/freelist.h"
#include "pool/lives.h"
#include "pool/stats.h"
#include "pool/waiting.h"

/* ---- the list -------------------------------------------------------------------------------- */

void sk__pending_add(sk_pool *pool, sk__block *block) {
    sk_assert(block->uses != NULL && block->prev == NULL && block->next == NULL);
    block->state = SK_PENDING;
    block->prev = pool->pending_last;
    *(block->prev != NULL ? &block->prev->next : &pool->pending) = block;
    pool->pending_last = block;
}

static void pending_remove(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock) {
    sk_assert(block->state == SK_PENDING);
    if (pool->pending_last == block) {
        pool->pending_last = block->prev;
    }
    sk__list_pull(&pool->pending, block);
}

static void pending_put_back(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock) {
    sk_assert(block->state == SK_PENDING && block->uses != NULL);
    if (pool->pending == NULL) {
        pool->pending_last = block;
    }
    sk__list_push(&pool->pending, block);
}

/* ---- their events ---------------------------------------------------------------------------- */

/* Free `block`, in no list, after its events have completed. */
static void pending_release(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock) {
    sk_assert(block->state == SK_PENDING && block->uses != NULL);
    sk__uses_free(pool, block);
    sk__given_end(pool, block);
}

void sk__pending_poll(sk_pool *pool, bool all) {
    sk__block *block = pool->pending;
    bool looking = block != NULL;
    while (looking) {
        sk__block *next = block->next;
        bool done = sk__uses_are_done(pool, block);
        if (done) {
            pending_remove(pool, block);
            pending_release(pool, block);
        }
        block = next;
        looking = block != NULL && (done || all);
    }
}

/* ---- waiting --------------------------------------------------------------------------------- */

void sk__transit_enter(sk_pool *pool) {
    pool->in_transit++;
    sk__unlock(&pool->lock);
}

void sk__transit_leave(sk_pool *pool) {
    sk__lock(&pool->lock);
    sk_assert(pool->in_transit > 0);
    pool->in_transit--;
    (void)pthread_cond_broadcast(&pool->settled);
}

sk_status sk__pending_wait_first(sk_pool *pool) {
    sk__block *block = pool->pending;
    if (block == NULL) {
        return SK_NOT_READY;
    }
    pending_remove(pool, block);
    sk__transit_enter(pool);
    sk_status status = sk__uses_sync(pool, block);
    sk__transit_leave(pool);
    if (status == SK_OK) {
        pending_release(pool, block);
    } else {
        pending_put_back(pool, block);
    }
    return status;
}

sk_status sk__transit_wait(sk_pool *pool) {
    if (pool->in_transit == 0) {
        return SK_NOT_READY;
    }
    sk__wait(&pool->settled, &pool->lock);
    return SK_OK;
}

sk_status sk__pending_wait(sk_pool *pool) {
    /* Only for the present blocks: other threads may go on giving forever. */
    size_t waits = pool->in_transit;
    for (const sk__block *block = pool->pending; block != NULL; block = block->next) {
        waits++;
    }
    sk_status status = SK_OK;
    for (; waits > 0 && status == SK_OK; waits--) {
        status = sk__pending_wait_first(pool);
        if (status == SK_NOT_READY) {
            status = sk__transit_wait(pool);
        }
    }
    return status == SK_NOT_READY ? SK_OK : status;
}
