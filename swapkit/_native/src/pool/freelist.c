/* freelist.c - free blocks by size, best fit.
 *
 * Bins are sixteenths of a doubling (two-level segregated fit, Masmano et al. 2004), found by a
 * bitmap; inside a bin the search finds the smallest block that fits, so this is exact best fit. */
#include "pool/freelist.h"

static sk__block *bin_best(sk__block *block, size_t nbytes) {
    sk__block *best = NULL;
    for (; block != NULL; block = block->next) {
        if (block->nbytes == nbytes) {
            return block;
        }
        if (block->nbytes > nbytes && (best == NULL || block->nbytes < best->nbytes)) {
            best = block;
        }
    }
    return best;
}

/* Return the first filled bin at or above `bin`, or SK_BIN_COUNT. */
static size_t bin_above(const sk__freelist *list, size_t bin) {
    size_t word = bin / SK_WORD_BITS;
    if (word >= SK_BIN_WORDS) {
        return SK_BIN_COUNT;
    }
    uint64_t bits = list->filled[word] & (~(uint64_t)0 << (bin % SK_WORD_BITS));
    while (bits == 0) {
        if (++word == SK_BIN_WORDS) {
            return SK_BIN_COUNT;
        }
        bits = list->filled[word];
    }
    return word * SK_WORD_BITS + (size_t)__builtin_ctzll(bits);
}

sk__block *sk__freelist_best(const sk__freelist *list, size_t nbytes) {
    size_t bin = sk__bin_of(nbytes);
    sk__block *best = bin_best(list->bins[bin], nbytes);
    if (best != NULL) {
        return best;
    }
    bin = bin_above(list, bin + 1);
    best = bin == SK_BIN_COUNT ? NULL : bin_best(list->bins[bin], nbytes);
    sk_assert(best != NULL || bin == SK_BIN_COUNT); /* all of a higher bin fit */
    return best;
}

sk__block *sk__freelist_next(const sk__freelist *list, const sk__block *block) {
    if (block != NULL && block->next != NULL) {
        return block->next;
    }
    size_t below = block != NULL ? sk__bin_of(block->nbytes) : SK_BIN_COUNT;
    while (below > 0) {
        below--;
        if (list->bins[below] != NULL) {
            return list->bins[below];
        }
    }
    return NULL;
}
