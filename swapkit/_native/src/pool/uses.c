/* uses.c - the work of other streams on a block.
 *
 * A block follows the order of the stream it was taken on. For each other stream that uses it, an
 * event is recorded when the block is given back; it is free once all have completed. */
#include <stdlib.h>

#include "pool/table.h"
#include "pool/waiting.h"

/* gcc 12 loses track of blocks that a table holds, and takes what these hold for leaks. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wanalyzer-malloc-leak"
#endif

/* Record events behind the other streams' work on the block. If an event cannot be recorded, wait
 * for the stream instead, with the lock held: the device is failing, and a block that could not be
 * given back would be lost. */
sk_status sk__uses_record(sk_pool *pool, const sk__block *block) {
    for (const sk__use *use = block->uses; use != NULL; use = use->next) {
        sk_status status = sk_event_record(pool->backend, use->event, use->stream);
        if (status != SK_OK) {
            status = sk_stream_sync(pool->backend, use->stream);
        }
        if (status != SK_OK) {
            return status;
        }
    }
    return SK_OK;
}

void sk__uses_free(sk_pool *pool, sk__block *block) {
    while (block->uses != NULL) {
        sk__use *use = block->uses;
        block->uses = use->next;
        /* Reporting an event that cannot be destroyed is the backend's task; go on. */
        sk_status status = sk_event_destroy(pool->backend, use->event);
        (void)status;
        free(use);
    }
}

bool sk__uses_are_done(const sk_pool *pool, const sk__block *block) {
    for (const sk__use *use = block->uses; use != NULL; use = use->next) {
        if (sk_event_query(pool->backend, use->event) != SK_OK) {
            return false; /* or the query failed: the thread that waits for the block gets it */
        }
    }
    return true;
}

sk_status sk__uses_sync(const sk_pool *pool, const sk__block *block) {
    for (const sk__use *use = block->uses; use != NULL; use = use->next) {
        sk_status status = sk_event_sync(pool->backend, use->event);
        if (status != SK_OK) {
            return status;
        }
    }
    return SK_OK;
}

static sk_status use_add(sk_pool *pool, sk__block *block, sk_stream *stream)
    SK_REQUIRES(pool->lock) {
    sk__use *use = malloc(sizeof *use);
    if (use == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "pool: no host memory to note a stream");
    }
    *use = (sk__use){.next = block->uses, .stream = stream};
    sk_status status = sk_event_create(pool->backend, &use->event);
    if (status != SK_OK) {
        free(use);
        return status;
    }
    block->uses = use;
    return SK_OK;
}

sk_status sk_pool_use(sk_pool *pool, void *address, sk_stream *stream) {
    sk__lock(&pool->lock);
    sk__block *block = sk__table_find(&pool->table, (uintptr_t)address);
    sk_status status = SK_OK;
    if (block == NULL) {
        status = sk__fail(SK_INVALID, "pool: no block in use begins at %p", address);
    } else if (block->lane->stream != stream) {
        const sk__use *use = block->uses;
        while (use != NULL && use->stream != stream) {
            use = use->next;
        }
        status = use != NULL ? SK_OK : use_add(pool, block, stream);
    }
    sk__unlock(&pool->lock);
    return status;
}

void sk_pool_unuse(sk_pool *pool, void *address, sk_stream *stream, sk_stream *current) {
    sk__lock(&pool->lock);
    sk__block *block = sk__table_find(&pool->table, (uintptr_t)address);
    bool waits = block != NULL && block->lane->stream == current;
    sk__use **link = waits ? &block->uses : NULL;
    while (link != NULL && *link != NULL && (*link)->stream != stream) {
        link = &(*link)->next;
    }
    if (link != NULL && *link != NULL) {
        sk__use *use = *link;
        *link = use->next;
        sk__ignore(sk_event_destroy(pool->backend, use->event));
        free(use);
    }
    sk__unlock(&pool->lock);
}
