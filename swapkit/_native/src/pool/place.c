/* place.c - where requests were served before.
 *
 * A step of training repeats its requests in the same order, though memory comes back from copies
 * at times of its own. A request that is served where the one of its size at the same turn was
 * served a step ago leaves the others' places as they were: in the end every place that a step
 * needs is mapped, and nothing is moved any more. If something lies in the way, any other place of
 * that size does. Only large requests have places, and only once memory was mapped twice (alias.c):
 * until then the free lists do as well. */
#include <stdlib.h>
#include <string.h>

#include "pool/alias.h"

enum {
    SIZE_SLOTS = 512, /* of the table; a power of two */
    MOST_SIZES = 256, /* different ones; whoever has more begins anew */
    MOST_TURNS = 4096,
    MOST_PLACES = 256, /* of one size, the latest */
};

static sk__size *size_slot(sk__size *sizes, size_t nbytes) {
    const uint64_t golden = 0x9E3779B97F4A7C15; /* Fibonacci hashing (Knuth 6.4) */
    size_t slot = (size_t)(((uint64_t)(nbytes / SK_ROUND_BYTES) * golden) >> 32) & (SIZE_SLOTS - 1);
    while (sizes[slot].nbytes != 0 && sizes[slot].nbytes != nbytes) {
        slot = (slot + 1) & (SIZE_SLOTS - 1);
    }
    return &sizes[slot];
}

static void sizes_clear(sk_pool *pool) SK_REQUIRES(pool->lock) {
    for (size_t i = 0; pool->sizes != NULL && i < SIZE_SLOTS; i++) {
        free(pool->sizes[i].turns);
        free(pool->sizes[i].places);
        pool->sizes[i] = (sk__size){0};
    }
    pool->size_count = 0;
}

void sk__places_free(sk_pool *pool) {
    sizes_clear(pool);
    free(pool->sizes);
    pool->sizes = NULL;
}

/* Without host memory for it nothing is remembered: NULL. */
static sk__size *size_of(sk_pool *pool, size_t nbytes) SK_REQUIRES(pool->lock) {
    if (pool->sizes == NULL) {
        pool->sizes = calloc(SIZE_SLOTS, sizeof *pool->sizes);
        if (pool->sizes == NULL) {
            return NULL;
        }
    }
    sk__size *size = size_slot(pool->sizes, nbytes);
    if (size->nbytes != 0) {
        return size;
    }
    if (pool->size_count == MOST_SIZES) {
        sizes_clear(pool);
        size = size_slot(pool->sizes, nbytes);
    }
    uintptr_t *turns = calloc(MOST_TURNS, sizeof *turns);
    uintptr_t *places = calloc(MOST_PLACES, sizeof *places);
    if (turns == NULL || places == NULL) {
        free(turns);
        free(places);
        return NULL;
    }
    *size = (sk__size){.nbytes = nbytes, .turns = turns, .places = places};
    pool->size_count++;
    return size;
}

/* Take exactly what is wanted out of the free block that has it. */
static sk__block *place_cut(sk_pool *pool, uintptr_t address, const sk__request *request)
    SK_REQUIRES(pool->lock) {
    const sk__segment *segment = sk__segment_find(pool, address);
    sk__block *block = sk__block_covering(pool, segment, address);
    sk_assert(block->state == SK_CACHED && block->lane == request->lane);
    sk_assert(block->address + block->nbytes >= address + request->nbytes);
    sk__freelist_remove(&block->lane->free[segment->arena], block);
    sk__stats_cached(pool, block, -1);
    block->state = SK_PENDING; /* ours: neither free nor handed out yet */
    sk__cut cut = sk__block_cut(pool, block, address, request->nbytes);
    if (cut.left != NULL) {
        sk__block_cache(pool, cut.left);
    }
    if (cut.right != NULL) {
        sk__block_cache(pool, cut.right);
    }
    return cut.middle;
}

static bool place_open(sk_pool *pool, uintptr_t address, const sk__request *request)
    SK_REQUIRES(pool->lock) {
    return address != 0 && sk__alias_open(pool, address, request) &&
           sk__records_reserve(pool, SK_RECORDS_PER_TAKE) == SK_OK;
}

sk__block *sk__place_take(sk_pool *pool, const sk__request *request) {
    const sk__size *size = size_of(pool, request->nbytes);
    if (size == NULL) {
        return NULL;
    }
    uintptr_t address = size->turn < MOST_TURNS ? size->turns[size->turn] : 0;
    bool opened = place_open(pool, address, request);
    size_t kept = sk__min(size->nplaces, MOST_PLACES);
    for (size_t i = 0; i < kept && !opened; i++) {
        address = size->places[(size->nplaces - 1 - i) % MOST_PLACES];
        opened = place_open(pool, address, request);
    }
    /* Who is told of memory that is made was told that some is at hand. */
    bool expected = size->turn < MOST_TURNS && size->turns[size->turn] != 0 && pool->making == NULL;
    if (!opened && expected && sk__aliases_are_few(pool)) {
        address = sk__lend_anew(pool, request);
        opened = address != 0 && sk__records_reserve(pool, SK_RECORDS_PER_TAKE) == SK_OK;
    }
    return opened ? place_cut(pool, address, request) : NULL;
}

void sk__place_note(sk_pool *pool, const sk__request *request, uintptr_t address) {
    sk__size *size = size_of(pool, request->nbytes);
    sk_assert(sk__has_place(pool, request));
    if (size == NULL) {
        return;
    }
    bool known = size->turn < MOST_TURNS && size->turns[size->turn] == address;
    if (size->turn < MOST_TURNS) {
        size->turns[size->turn] = address;
    }
    size->turn++;
    for (size_t i = 0; i < sk__min(size->nplaces, MOST_PLACES) && !known; i++) {
        known = size->places[i] == address;
    }
    if (!known) {
        size->places[size->nplaces++ % MOST_PLACES] = address;
    }
}

void sk__places_mark(sk_pool *pool) {
    for (size_t i = 0; pool->sizes != NULL && i < SIZE_SLOTS; i++) {
        pool->sizes[i].turn = 0;
    }
}
