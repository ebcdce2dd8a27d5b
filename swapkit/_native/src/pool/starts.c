/* starts.c - an index of a segment's blocks by address.
 *
 * Segments with planned addresses or aliases have one. It finds the block that holds an address by
 * two levels of bitmaps, whatever lies before it. */
#include <stdlib.h>

#include "pool/pool.h"

static size_t words_for(size_t bits) { return (bits + SK_WORD_BITS - 1) / SK_WORD_BITS; }

sk_status sk__starts_open(sk__segment *segment) {
    size_t count = (segment->nbytes + SK_START_BYTES - 1) / SK_START_BYTES;
    sk__starts *starts = &segment->starts;
    *starts = (sk__starts){
        .firsts = calloc(count, sizeof(sk__block *)),
        .filled = calloc(words_for(count), sizeof(uint64_t)),
        .words = calloc(words_for(words_for(count)), sizeof(uint64_t)),
    };
    if (starts->firsts == NULL || starts->filled == NULL || starts->words == NULL) {
        sk__starts_close(segment);
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "pool: no host memory for an index of %zu bytes",
                        count);
    }
    return SK_OK;
}

void sk__starts_close(sk__segment *segment) {
    free(segment->starts.firsts);
    free(segment->starts.filled);
    free(segment->starts.words);
    segment->starts = (sk__starts){0};
}

static size_t index_of(const sk__segment *segment, uintptr_t address) {
    sk_assert(address >= segment->address && address - segment->address < segment->nbytes);
    return (address - segment->address) / SK_START_BYTES;
}

static void bit_set(uint64_t *words, size_t index) {
    words[index / SK_WORD_BITS] |= (uint64_t)1 << (index % SK_WORD_BITS);
}

static void bit_clear(uint64_t *words, size_t index) {
    words[index / SK_WORD_BITS] &= ~((uint64_t)1 << (index % SK_WORD_BITS));
}

void sk__start_add(sk__block *block) {
    sk__starts *starts = &block->segment->starts;
    size_t index = index_of(block->segment, block->address);
    sk_assert(starts->firsts != NULL);
    const sk__block *first = starts->firsts[index];
    if (first == NULL || first->address > block->address) {
        starts->firsts[index] = block;
        bit_set(starts->filled, index);
        bit_set(starts->words, index / SK_WORD_BITS);
    }
}

void sk__start_remove(const sk__block *block) {
    sk__starts *starts = &block->segment->starts;
    size_t index = index_of(block->segment, block->address);
    if (starts->firsts[index] != block) {
        return;
    }
    sk__block *right = block->right;
    bool same = right != NULL && index_of(block->segment, right->address) == index;
    starts->firsts[index] = same ? right : NULL;
    if (!same) {
        bit_clear(starts->filled, index);
    }
    if (starts->filled[index / SK_WORD_BITS] == 0) {
        bit_clear(starts->words, index / SK_WORD_BITS);
    }
}

/* Return the last set bit up to `index` in a word; SK_WORD_BITS: there is none. */
static size_t bit_before(uint64_t word, size_t index) {
    uint64_t bits = word & (~(uint64_t)0 >> (SK_WORD_BITS - 1 - index));
    return bits == 0 ? SK_WORD_BITS : (size_t)(SK_WORD_BITS - 1 - __builtin_clzll(bits));
}

/* Return the last filled entry up to `index`. The first entry of a segment is always filled. */
static size_t start_before(const sk__starts *starts, size_t index) {
    size_t word = index / SK_WORD_BITS;
    size_t bit = bit_before(starts->filled[word], index % SK_WORD_BITS);
    if (bit < SK_WORD_BITS) {
        return word * SK_WORD_BITS + bit;
    }
    sk_assert(word > 0);
    size_t group = (word - 1) / SK_WORD_BITS;
    bit = bit_before(starts->words[group], (word - 1) % SK_WORD_BITS);
    while (bit == SK_WORD_BITS) {
        sk_assert(group > 0);
        bit = bit_before(starts->words[--group], SK_WORD_BITS - 1);
    }
    word = group * SK_WORD_BITS + bit;
    sk_assert(starts->filled[word] != 0);
    return word * SK_WORD_BITS + bit_before(starts->filled[word], SK_WORD_BITS - 1);
}

sk__block *sk__block_covering(const sk__segment *segment, uintptr_t address) {
    const sk__starts *starts = &segment->starts;
    size_t index = index_of(segment, address);
    sk__block *block = starts->firsts[index];
    sk_assert(starts->firsts[0] == segment->first);
    if (block == NULL || block->address > address) {
        sk_assert(index > 0);
        block = starts->firsts[start_before(starts, index - 1)];
    }
    while (block->address + block->nbytes <= address) {
        block = block->right;
    }
    sk_assert(block->address <= address && block->segment == segment);
    return block;
}
