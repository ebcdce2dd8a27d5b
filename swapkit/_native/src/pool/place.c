/* place.c - where requests were served before.
 *
 * A step of training repeats its requests in the same order, although memory comes back from copies
 * at varying times. Each request is served where the request of its size at the same turn was
 * served a step ago. This leaves the other places as they were: in the end every place that a step
 * needs is mapped, and nothing moves any more. If that place is not free, any other place of the
 * size serves. Only large requests have places, and only once memory was mapped twice (alias.c):
 * until then the free lists serve as well. */
#include "pool/alias.h"

enum {
    MOST_TURNS = 4096, /* of one size in a step */
    MOST_TURNS_OF_ALL = 1 << 20,
    MOST_PLACES = 256, /* of one size, the latest */
};

static uintptr_t turn_place(const sk__size *size) {
    return size->turn < size->turns.room ? size->turns.at[size->turn] : 0;
}

static void turn_note(sk_pool *pool, sk__size *size, uintptr_t address) SK_REQUIRES(pool->lock) {
    size_t room = size->turns.room;
    size_t most = pool->turn_count < MOST_TURNS_OF_ALL ? MOST_TURNS : room;
    if (sk__places_reserve(&size->turns, size->turn, most)) {
        size->turns.at[size->turn] = address;
    }
    pool->turn_count += size->turns.room - room;
    size->turn++;
}

/* Cut exactly the requested part out of the free block that holds it. */
static sk__block *place_cut(sk_pool *pool, uintptr_t address, const sk__request *request)
    SK_REQUIRES(pool->lock) {
    const sk__segment *segment = sk__segment_find(pool, address);
    sk__block *block = sk__block_covering(segment, address);
    sk_assert(block->state == SK_CACHED && block->lane == request->lane);
    sk_assert(block->address + block->nbytes >= address + request->nbytes);
    return sk__block_take(pool, block, address, request->nbytes);
}

static bool place_open(sk_pool *pool, uintptr_t address, const sk__request *request)
    SK_REQUIRES(pool->lock) {
    return address != 0 && sk__alias_open(pool, address, request) &&
           sk__records_reserve(pool, SK_RECORDS_PER_TAKE) == SK_OK;
}

sk__block *sk__place_take(sk_pool *pool, const sk__request *request) {
    const sk__size *size = sk__size_find(pool, request->nbytes);
    if (size == NULL) {
        return NULL;
    }
    uintptr_t expected = turn_place(size);
    uintptr_t address = expected;
    bool opened = place_open(pool, address, request);
    size_t kept = sk__min(size->nplaces, MOST_PLACES);
    for (size_t i = 0; i < kept && !opened; i++) {
        address = size->places.at[(size->nplaces - 1 - i) % MOST_PLACES];
        opened = place_open(pool, address, request);
    }
    /* Not with a `making` callback: a take that finds a free block must not make memory. */
    if (!opened && expected != 0 && pool->making == NULL && sk__aliases_are_few(pool)) {
        address = sk__lend_anew(pool, request);
        opened = address != 0 && sk__records_reserve(pool, SK_RECORDS_PER_TAKE) == SK_OK;
    }
    return opened ? place_cut(pool, address, request) : NULL;
}

void sk__place_note(sk_pool *pool, const sk__request *request, uintptr_t address) {
    sk_assert(sk__has_place(pool, request));
    sk__size *size = sk__size_find(pool, request->nbytes);
    size = size != NULL ? size : sk__size_add(pool, request->nbytes);
    if (size == NULL) {
        return;
    }
    bool known = turn_place(size) == address;
    turn_note(pool, size, address);
    for (size_t i = 0; i < sk__min(size->nplaces, MOST_PLACES) && !known; i++) {
        known = size->places.at[i] == address;
    }
    size_t slot = size->nplaces % MOST_PLACES;
    if (!known && sk__places_reserve(&size->places, slot, MOST_PLACES)) {
        size->places.at[slot] = address;
        size->nplaces++;
    }
}

void sk__places_mark(sk_pool *pool) { pool->steps++; }
