/* parked.c - freed blocks whose last work may still be queued on the host.
 *
 * A framework may queue work on the host before another thread puts it into the stream. Until then
 * neither an event nor a wait for the stream covers the work. Memory that stays with its stream is
 * safe: its next work is queued behind. Memory that changes streams, or leaves, is not.
 *
 * So a take that needs more than the stream's own free blocks settles first: it waits, with the
 * lock released, until all work queued so far is in its stream. From the beginning of the settle to
 * the end of the take, given blocks are parked: work queued after the settle may still use them.
 * Blocks that other streams use are always parked, since their events must cover queued work. The
 * next settle moves them to the free lists. Hence every free or pending block was given before the
 * latest settle that a thread inside such a take relies on. */
#include "pool/waiting.h"

enum { TEXT_BYTES = 1024 };

bool sk__must_park(const sk_pool *pool, const sk__block *block) {
    return pool->settle != NULL && (pool->settlers > 0 || block->uses != NULL);
}

void sk__park(sk_pool *pool, sk__block *block) {
    sk_assert(block->prev == NULL && block->next == NULL);
    block->state = SK_PENDING;
    block->next = pool->parked;
    pool->parked = block;
}

sk_status sk__settle(sk_pool *pool) {
    sk_settle_fn settle = pool->settle;
    if (settle == NULL) {
        return SK_OK;
    }
    sk__block *blocks = pool->parked; /* in transit: given before the settle */
    pool->parked = NULL;
    size_t count = 0;
    for (const sk__block *block = blocks; block != NULL; block = block->next) {
        count++;
    }
    void *context = pool->settle_context;
    char text[TEXT_BYTES] = "no reason given";
    pool->in_transit += count;
    pool->stats.num_settles++;
    sk__unlock(&pool->lock);
    sk_status status = settle(context, text, sizeof text);
    sk__lock(&pool->lock);
    sk_assert(pool->in_transit >= count);
    pool->in_transit -= count;
    (void)pthread_cond_broadcast(&pool->settled);
    if (status != SK_OK) {
        (void)sk__fail(status, "pool: work that was queued on the host failed: %s", text);
    }
    while (blocks != NULL) {
        sk__block *block = blocks;
        blocks = block->next;
        block->next = NULL;
        status = status == SK_OK ? sk__block_free(pool, block) : status;
        if (status != SK_OK) {
            sk__park(pool, block); /* this one and the rest wait for the next settle */
        }
    }
    return status;
}

sk_status sk__settlers_enter(sk_pool *pool) {
    pool->settlers++;
    return sk__settle(pool);
}

void sk__settlers_leave(sk_pool *pool) {
    sk_assert(pool->settlers > 0);
    pool->settlers--;
}

void sk_pool_set_settle(sk_pool *pool, sk_settle_fn settle, void *context) {
    sk__lock(&pool->lock);
    sk_assert(pool->segments == NULL);
    pool->settle = settle;
    pool->settle_context = context;
    /* Aliases are made and dropped behind work of the streams, also when a free block fits. */
    pool->has_aliases = pool->has_aliases && settle == NULL;
    sk__unlock(&pool->lock);
}
