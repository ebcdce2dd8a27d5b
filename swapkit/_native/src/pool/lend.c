/* lend.c - choosing the free memory that moves to other addresses. */
#include "pool/alias.h"
#include "pool/freelist.h"
#include "pool/lives.h"

/* Blocks that may lend: the bytes of their granules, and the block given back first, whose
 * addresses are the least likely to be needed next. Memory of the request's own stream needs no
 * wait, and small requests keep theirs while there is other memory. */
typedef struct lenders {
    const sk__block *spared; /* lends nothing; NULL: no block is */
    sk__block *first;
    size_t nbytes;
} lenders;

/* The layout's memory is needed soon at its own addresses. */
static int lending_rank(const sk_pool *pool, const sk__block *block) SK_REQUIRES(pool->lock) {
    return block->segment == sk__layout_range(pool) ? -1 : (int)block->segment->arena;
}

static void lenders_add(const sk_pool *pool, const sk__request *request, sk__block *block,
                        lenders *found) SK_REQUIRES(pool->lock) {
    uintptr_t from = sk__round_up(block->address, pool->granule_bytes);
    uintptr_t to = sk__round_down(block->address + block->nbytes, pool->granule_bytes);
    bool usable = block->lane == request->lane || block->given_at <= block->lane->synced;
    if (!usable || block == found->spared || from >= to) {
        return;
    }
    found->nbytes += to - from;
    const sk__block *first = found->first;
    int rank = lending_rank(pool, block);
    bool earlier = first == NULL || rank > lending_rank(pool, first) ||
                   (rank == lending_rank(pool, first) && block->given_at < first->given_at);
    found->first = earlier ? block : found->first;
}

sk__span sk__lender(const sk_pool *pool, const sk__request *request, const sk__block *spared,
                    size_t nbytes, size_t *total) {
    lenders found = {.spared = spared};
    for (const sk__lane *lane = pool->lanes; lane != NULL; lane = lane->next) {
        for (int i = 0; i < SK_ARENAS; i++) {
            const sk__freelist *list = &lane->free[i];
            sk__block *block = sk__freelist_next(list, NULL);
            for (; block != NULL; block = sk__freelist_next(list, block)) {
                lenders_add(pool, request, block, &found);
            }
        }
    }
    *total = found.nbytes;
    return found.first == NULL ? (sk__span){0} : sk__span_of(pool, found.first, nbytes);
}

/* Return the smallest vacant block of at least `nbytes`; NULL: there is none. */
static sk__block *vacant_fitting(const sk_pool *pool, sk__arena arena, size_t nbytes)
    SK_REQUIRES(pool->lock) {
    sk__block *best = NULL;
    for (sk__block *block = pool->vacant[arena]; block != NULL; block = block->next) {
        bool fits = block->nbytes >= nbytes;
        best = fits && (best == NULL || block->nbytes < best->nbytes) ? block : best;
    }
    return best;
}

sk_status sk__lend_at(sk_pool *pool, const sk__request *request, sk__segment *segment,
                      uintptr_t start, size_t nbytes, const sk__segment *kept) {
    /* It may merge with the new memory, which is not lent again. */
    const sk__block *made = sk__block_covering(segment, start)->left;
    sk_status status = SK_OK;
    for (size_t done = 0; done < nbytes && status == SK_OK;) {
        size_t total = 0;
        sk__span lent = sk__lender(pool, request, made, nbytes - done, &total);
        sk_assert(lent.nbytes <= nbytes - done);
        if (lent.nbytes == 0 || lent.block->segment == kept) {
            return SK_NOT_READY;
        }
        status = sk__records_reserve(pool, SK_RECORDS_PER_TAKE);
        if (status == SK_OK) {
            const sk__block *vacant = sk__block_covering(segment, start + done);
            status = sk__span_map(pool, &lent, vacant, start + done, request->lane);
        }
        done += lent.nbytes;
        made = sk__block_covering(segment, start);
    }
    return status;
}

uintptr_t sk__lend_anew(sk_pool *pool, const sk__request *request) {
    size_t nbytes = sk__segment_bytes(pool, request);
    const sk__block *vacant = vacant_fitting(pool, request->arena, nbytes);
    if (vacant == NULL || !sk__aliases_are_on(pool) ||
        pool->budget_bytes - sk__min(pool->reserved_bytes, pool->budget_bytes) >= nbytes) {
        return 0;
    }
    size_t total = 0;
    (void)sk__lender(pool, request, vacant->left, nbytes, &total);
    uintptr_t start = vacant->address;
    bool is_lent = total >= nbytes &&
                   sk__lend_at(pool, request, vacant->segment, start, nbytes, NULL) == SK_OK;
    return is_lent ? start : 0;
}
