/* size.c - a table of the latest request sizes and their places.
 *
 * A program may ask for any number of different sizes. When the table is full, the least recently
 * requested size is forgotten; a new size costs no more than its record. */
#include <stdlib.h>
#include <string.h>

#include "pool/alias.h"

enum {
    MOST_SIZES = 4096, /* a power of two */
    FIRST_ROOM = 4     /* for places; doubled as needed */
};

static sk__size **size_bucket(const sk_pool *pool, size_t nbytes) SK_REQUIRES(pool->lock) {
    const uint64_t golden = 0x9E3779B97F4A7C15; /* Fibonacci hashing (Knuth 6.4) */
    size_t bucket = (size_t)(((uint64_t)(nbytes / SK_ROUND_BYTES) * golden) >> 32);
    return &pool->sizes[bucket & (MOST_SIZES - 1)];
}

static void size_list(sk_pool *pool, sk__size *size) SK_REQUIRES(pool->lock) {
    size->newer = NULL;
    size->older = pool->newest_size;
    *(size->older != NULL ? &size->older->newer : &pool->oldest_size) = size;
    pool->newest_size = size;
}

static void size_unlist(sk_pool *pool, sk__size *size) SK_REQUIRES(pool->lock) {
    *(size->newer != NULL ? &size->newer->older : &pool->newest_size) = size->older;
    *(size->older != NULL ? &size->older->newer : &pool->oldest_size) = size->newer;
}

/* Forget the least recently requested size; the caller may reuse or free the record. */
static sk__size *size_evict(sk_pool *pool) SK_REQUIRES(pool->lock) {
    sk__size *size = pool->oldest_size;
    sk__size **link = size_bucket(pool, size->nbytes);
    while (*link != size) {
        link = &(*link)->same;
    }
    *link = size->same;
    size_unlist(pool, size);
    sk_assert(pool->size_count > 0 && pool->turn_count >= size->turns.room);
    pool->size_count--;
    pool->turn_count -= size->turns.room;
    free(size->turns.at);
    free(size->places.at);
    return size;
}

void sk__sizes_free(sk_pool *pool) {
    while (pool->oldest_size != NULL) {
        free(size_evict(pool));
    }
    free(pool->sizes);
    pool->sizes = NULL;
}

sk__size *sk__size_find(sk_pool *pool, size_t nbytes) {
    sk__size *size = pool->sizes != NULL ? *size_bucket(pool, nbytes) : NULL;
    while (size != NULL && size->nbytes != nbytes) {
        size = size->same;
    }
    if (size == NULL) {
        return NULL;
    }
    size_unlist(pool, size);
    size_list(pool, size);
    size->turn = size->step == pool->steps ? size->turn : 0;
    size->step = pool->steps;
    return size;
}

sk__size *sk__size_add(sk_pool *pool, size_t nbytes) {
    if (pool->sizes == NULL) {
        pool->sizes = calloc(MOST_SIZES, sizeof(sk__size *));
    }
    if (pool->sizes == NULL) {
        return NULL;
    }
    sk__size *size = pool->size_count == MOST_SIZES ? size_evict(pool) : malloc(sizeof(sk__size));
    if (size == NULL) {
        return NULL;
    }
    sk__size **bucket = size_bucket(pool, nbytes);
    *size = (sk__size){.nbytes = nbytes, .step = pool->steps, .same = *bucket};
    *bucket = size;
    size_list(pool, size);
    pool->size_count++;
    return size;
}

bool sk__places_reserve(sk__places *places, size_t index, size_t most) {
    if (index < places->room) {
        return true;
    }
    size_t room = sk__min(most, sk__max(sk__max(FIRST_ROOM, 2 * places->room), index + 1));
    uintptr_t *grown = index < most ? calloc(room, sizeof *grown) : NULL;
    if (grown == NULL) {
        return false;
    }
    if (places->room > 0) {
        memcpy(grown, places->at, places->room * sizeof *grown);
    }
    free(places->at);
    *places = (sk__places){grown, room};
    return true;
}
