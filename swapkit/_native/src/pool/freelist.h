/* freelist.h - lists of blocks, and free blocks by size. Inline: each take and give changes several
 * of them.
 *
 * Everything here is guarded by pool->lock. */
#ifndef SWAPKIT_POOL_FREELIST_H
#define SWAPKIT_POOL_FREELIST_H

#include "pool/pool.h"

/* Put a block that is in no list first into one; take it out of the list that it is in. */
static inline void sk__list_push(sk__block **first, sk__block *block) {
    block->prev = NULL;
    block->next = *first;
    if (block->next != NULL) {
        block->next->prev = block;
    }
    *first = block;
}
static inline void sk__list_pull(sk__block **first, sk__block *block) {
    sk_assert((block->prev == NULL) == (*first == block));
    sk_assert(block->next == NULL || block->next->prev == block);
    if (block->next != NULL) {
        block->next->prev = block->prev;
    }
    *(block->prev != NULL ? &block->prev->next : first) = block->next;
    block->prev = block->next = NULL;
}

enum { SK_BIN_STEP_BITS = 4 };

static inline size_t sk__bin_of(size_t nbytes) {
    size_t units = nbytes / SK_ROUND_BYTES;
    if (units < SK_BIN_STEPS) {
        return units;
    }
    size_t exponent = (size_t)(SK_WORD_BITS - 1 - __builtin_clzll(units));
    size_t step = (units >> (exponent - SK_BIN_STEP_BITS)) & (SK_BIN_STEPS - 1);
    size_t bin = (exponent - SK_BIN_STEP_BITS + 1) * SK_BIN_STEPS + step;
    sk_assert(bin < SK_BIN_COUNT);
    return bin;
}

static inline void sk__bin_link(sk__freelist *list, size_t bin, sk__block *block) {
    sk__list_push(&list->bins[bin], block);
    list->filled[bin / SK_WORD_BITS] |= (uint64_t)1 << (bin % SK_WORD_BITS);
}

static inline void sk__bin_unlink(sk__freelist *list, size_t bin, sk__block *block) {
    sk__list_pull(&list->bins[bin], block);
    if (list->bins[bin] == NULL) {
        list->filled[bin / SK_WORD_BITS] &= ~((uint64_t)1 << (bin % SK_WORD_BITS));
    }
}

static inline void sk__freelist_add(sk__freelist *list, sk__block *block) {
    sk_assert(block->state == SK_CACHED);
    sk_assert(block->nbytes % SK_ROUND_BYTES == 0 && block->nbytes > 0);
    sk__bin_link(list, sk__bin_of(block->nbytes), block);
    block->lane->free_bytes += block->nbytes;
}

static inline void sk__freelist_remove(sk__freelist *list, sk__block *block) {
    sk_assert(block->state == SK_CACHED && block->lane->free_bytes >= block->nbytes);
    sk__bin_unlink(list, sk__bin_of(block->nbytes), block);
    block->lane->free_bytes -= block->nbytes;
}

/* Let a block of `nbytes` take the place of a listed one of `listed_bytes`; they may be the same
 * block. A large block that changes by a little stays in its bin. */
static inline void sk__freelist_replace(sk__freelist *list, sk__block *listed, size_t listed_bytes,
                                        sk__block *block, size_t nbytes) {
    size_t bin = sk__bin_of(listed_bytes);
    size_t next_bin = sk__bin_of(nbytes);
    sk_assert(listed->lane == block->lane && listed->lane->free_bytes >= listed_bytes);
    listed->lane->free_bytes += nbytes - listed_bytes;
    if (listed != block || bin != next_bin) {
        sk__bin_unlink(list, bin, listed);
        sk__bin_link(list, next_bin, block);
    }
}

/* freelist.c */
sk__block *sk__freelist_best(const sk__freelist *list, size_t nbytes); /* smallest that fits */
/* Return the block after `block` in falling order of bins; NULL starts with the largest bin. */
sk__block *sk__freelist_next(const sk__freelist *list, const sk__block *block);

#endif
