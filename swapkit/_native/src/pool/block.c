/* block.c - block records, cutting and joining.
 *
 * Records live in host memory, never in the blocks: the host cannot write into device memory. They
 * come from slabs that are freed with the pool; an operation that may cut blocks reserves its
 * records first, so that it cannot fail half-way. */
#include <stdlib.h>

#include "pool/freelist.h"
#include "pool/stats.h"

enum { SLAB_RECORDS = 256 };

struct sk__slab {
    sk__slab *next; /* the records are behind it, and need no more alignment than a pointer */
};

void *sk__slab_add(sk__slab **slabs, size_t nbytes) {
    sk__slab *slab = calloc(1, sizeof *slab + nbytes);
    if (slab == NULL) {
        return NULL;
    }
    slab->next = *slabs;
    *slabs = slab;
    return slab + 1;
}

void sk__slabs_free(sk__slab **slabs) {
    while (*slabs != NULL) {
        sk__slab *slab = *slabs;
        *slabs = slab->next;
        free(slab);
    }
}

sk_status sk__records_reserve(sk_pool *pool, size_t count) {
    while (pool->spare_count < count) {
        sk__block *records = sk__slab_add(&pool->slabs, SLAB_RECORDS * sizeof *records);
        if (records == NULL) {
            return sk__fail(SK_OUT_OF_HOST_MEMORY, "pool: no host memory for block records");
        }
        for (size_t i = 0; i < SLAB_RECORDS; i++) {
            sk__block_recycle(pool, &records[i]);
        }
    }
    return SK_OK;
}

sk__block *sk__block_new(sk_pool *pool) {
    sk__block *block = pool->spare;
    sk_assert(block != NULL && pool->spare_count > 0);
    pool->spare = block->next;
    pool->spare_count--;
    return block;
}

void sk__block_recycle(sk_pool *pool, sk__block *block) {
    sk_assert(block->uses == NULL);
    block->next = pool->spare;
    pool->spare = block;
    pool->spare_count++;
}

/* ---- cutting and joining --------------------------------------------------------------------- */

sk__block *sk__block_split(sk_pool *pool, sk__block *block, size_t nbytes) {
    sk_assert(nbytes > 0 && nbytes < block->nbytes);
    sk__block *rest = sk__block_new(pool);
    *rest = (sk__block){
        .address = block->address + nbytes,
        .nbytes = block->nbytes - nbytes,
        .segment = block->segment,
        .left = block,
        .right = block->right,
        .lane = block->lane,
        .given_at = block->given_at,
        .state = block->state,
    };
    sk_assert(rest->address % SK_ROUND_BYTES == 0);
    if (rest->right != NULL) {
        sk_assert(rest->right->left == block);
        rest->right->left = rest;
    }
    block->right = rest;
    block->nbytes = nbytes;
    if (rest->segment->starts.firsts != NULL) {
        sk__start_add(rest);
    }
    return rest;
}

/* The parts of a block, in no list and in the block's state; NULL: there is no such part. */
typedef struct cut {
    sk__block *left, *middle, *right;
} cut;

/* Cut a block in up to three parts; the middle has `nbytes` at `address`. */
static cut block_cut(sk_pool *pool, sk__block *block, uintptr_t address, size_t nbytes)
    SK_REQUIRES(pool->lock) {
    sk_assert(block->address <= address && nbytes > 0);
    sk_assert(address + nbytes <= block->address + block->nbytes);
    cut parts = {.middle = block};
    if (address > block->address) {
        parts.left = block;
        parts.middle = sk__block_split(pool, block, address - block->address);
    }
    if (nbytes < parts.middle->nbytes) {
        parts.right = sk__block_split(pool, parts.middle, nbytes);
    }
    return parts;
}

/* Join `block` with its right neighbour; neither is in a list. */
static void block_absorb(sk_pool *pool, sk__block *block, sk__block *right)
    SK_REQUIRES(pool->lock) {
    sk_assert(block->right == right && block->address + block->nbytes == right->address);
    sk_assert(block->segment == right->segment && right->prev == NULL && right->next == NULL);
    if (right->segment->starts.firsts != NULL) {
        sk__start_remove(right);
    }
    block->nbytes += right->nbytes;
    block->right = right->right;
    if (block->right != NULL) {
        block->right->left = block;
    }
    if (right->given_at > block->given_at) {
        block->given_at = right->given_at;
    }
    sk__block_recycle(pool, right);
}

static sk__freelist *freelist_of(const sk__block *block) {
    return &block->lane->free[block->segment->arena];
}

static bool is_cached_in(const sk__block *block, const sk__lane *lane) {
    return block != NULL && block->state == SK_CACHED && block->lane == lane;
}

void sk__block_cache(sk_pool *pool, sk__block *block) {
    sk_assert(block->lane != NULL && block->uses == NULL);
    sk_assert(block->prev == NULL && block->next == NULL);
    block->state = SK_CACHED;
    block->requested_bytes = 0;
    sk__freelist *list = freelist_of(block);
    sk__block *right = is_cached_in(block->right, block->lane) ? block->right : NULL;
    sk__block *left = is_cached_in(block->left, block->lane) ? block->left : NULL;
    size_t joined = (left != NULL ? 1 : 0) + (right != NULL ? 1 : 0);
    sk__stats_list(pool, block->segment->arena, block->nbytes, joined);
    if (joined == 0) {
        sk__freelist_add(list, block);
        return;
    }
    if (left == NULL) {
        sk__freelist_replace(list, right, right->nbytes, block, block->nbytes + right->nbytes);
        block_absorb(pool, block, right);
        return;
    }
    if (right != NULL) {
        sk__freelist_remove(list, right);
        block_absorb(pool, block, right);
    }
    sk__freelist_replace(list, left, left->nbytes, left, left->nbytes + block->nbytes);
    block_absorb(pool, left, block);
}

void sk__block_hold(sk_pool *pool, sk__block *block) {
    sk__freelist_remove(freelist_of(block), block);
    sk__stats_unlist(pool, block->segment->arena, block->nbytes, 0);
    block->state = SK_PENDING; /* neighbours must not merge with it */
}

sk__block *sk__block_take(sk_pool *pool, sk__block *block, uintptr_t address, size_t nbytes) {
    sk_assert(block->state == SK_CACHED);
    size_t whole = block->nbytes;
    if (whole == nbytes) {
        sk__block_hold(pool, block);
        return block;
    }
    sk__freelist *list = freelist_of(block);
    cut parts = block_cut(pool, block, address, nbytes);
    size_t listed = 0;
    if (parts.left != NULL) {
        sk__freelist_replace(list, block, whole, parts.left, parts.left->nbytes);
        listed++;
    }
    if (parts.right != NULL) {
        if (listed == 0) {
            sk__freelist_replace(list, block, whole, parts.right, parts.right->nbytes);
        } else {
            sk__freelist_add(list, parts.right);
        }
        listed++;
    }
    sk__stats_unlist(pool, block->segment->arena, nbytes, listed);
    parts.middle->state = SK_PENDING;
    return parts.middle;
}

static sk__block **idle_list(sk_pool *pool, const sk__block *block) SK_REQUIRES(pool->lock) {
    sk__block **lists = block->state == SK_VACANT ? pool->vacant : pool->dormant;
    return &lists[block->segment->arena];
}

void sk__idle_remove(sk_pool *pool, sk__block *block) {
    sk_assert(sk__is_idle(block) && block->lane == NULL);
    sk__list_pull(idle_list(pool, block), block);
}

static void idle_add(sk_pool *pool, sk__block *block, sk__state state) SK_REQUIRES(pool->lock) {
    sk_assert(block->address % pool->granule_bytes == 0);
    sk_assert(block->nbytes % pool->granule_bytes == 0);
    sk_assert(block->uses == NULL && block->requested_bytes == 0);
    block->state = state;
    block->lane = NULL;
    block->given_at = 0;
    if (block->right != NULL && block->right->state == state) {
        sk__idle_remove(pool, block->right);
        block_absorb(pool, block, block->right);
    }
    if (block->left != NULL && block->left->state == state) {
        sk__block *left = block->left;
        sk__idle_remove(pool, left);
        block_absorb(pool, left, block);
        block = left;
    }
    sk__list_push(idle_list(pool, block), block);
}

void sk__block_vacate(sk_pool *pool, sk__block *block) { idle_add(pool, block, SK_VACANT); }

void sk__block_lend(sk_pool *pool, sk__block *block) { idle_add(pool, block, SK_DORMANT); }

sk__block *sk__idle_cut(sk_pool *pool, sk__block *block, uintptr_t address, size_t nbytes) {
    sk__state state = block->state;
    sk__idle_remove(pool, block);
    block->state = SK_PENDING; /* no part may merge with another */
    cut parts = block_cut(pool, block, address, nbytes);
    if (parts.right != NULL) {
        idle_add(pool, parts.right, state);
    }
    if (parts.left != NULL) {
        idle_add(pool, parts.left, state);
    }
    return parts.middle;
}

sk__block *sk__block_carve(sk_pool *pool, sk__block *block, uintptr_t address, size_t nbytes) {
    cut parts = block_cut(pool, block, address, nbytes);
    if (parts.left != NULL) {
        sk__block_cache(pool, parts.left);
    }
    if (parts.right != NULL) {
        sk__block_cache(pool, parts.right);
    }
    return parts.middle;
}
