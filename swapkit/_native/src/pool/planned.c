/* planned.c - blocks at the addresses of a layout.
 *
 * The layout has a range of addresses of its own. A request whose place is free is served there;
 * any other is served as if there were no layout, so correctness never depends on the plan. In a
 * step that repeats the planned one, all places are free when their turn comes, and once they have
 * memory nothing is mapped or moved any more. */
#include "pool/alias.h"
#include "pool/lives.h"

/* ---- taking ---------------------------------------------------------------------------------- */

/* Whether the lane may use a block, or its addresses, now. */
static bool is_open(const sk__block *block, const sk__lane *lane) {
    return sk__is_idle(block) || (block->state == SK_CACHED && block->lane == lane);
}

/* The first of a place's addresses where a request can be served, and the block there. */
typedef struct gap {
    uintptr_t address; /* 0: there is none, */
    sk__block *block;  /* and then undefined */
} gap;

static gap gap_find(const sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    uintptr_t address = request->life->place;
    uintptr_t end = address + request->life->room_bytes;
    sk__block *first = sk__block_covering(pool->lives.range, address);
    const sk__block *block = first;
    while (request->nbytes <= end - address && block != NULL &&
           block->address < address + request->nbytes) {
        if (!is_open(block, request->lane)) {
            first = block->right;
            address = sk__min(end, block->address + block->nbytes);
        }
        block = block->right;
    }
    bool is_there = request->nbytes <= end - address && first != NULL;
    return (gap){is_there ? address : 0, first};
}

bool sk__planned_is_open(const sk_pool *pool, const sk__request *request) {
    return gap_find(pool, request).address != 0;
}

/* Whether all of the addresses lie in one free block. */
static bool is_ready(const gap *place, const sk__request *request) {
    const sk__block *block = place->block;
    sk_assert(place->address != 0 && block != NULL);
    return block->state == SK_CACHED && block->lane == request->lane &&
           block->address + block->nbytes >= place->address + request->nbytes;
}

bool sk__planned_is_ready(const sk_pool *pool, const sk__request *request) {
    gap place = gap_find(pool, request);
    return place.address != 0 && is_ready(&place, request);
}

/* Give the addresses memory where they have none. False: there is not enough. */
static bool gap_fill(sk_pool *pool, const sk__request *request, uintptr_t start)
    SK_REQUIRES(pool->lock) {
    bool is_dormant = false;
    uintptr_t address = start;
    uintptr_t last = start + request->nbytes;
    while (address < last) {
        sk__block *block = sk__block_covering(pool->lives.range, address);
        uintptr_t end = block->address + block->nbytes;
        if (!is_open(block, request->lane)) {
            return false;
        }
        if (block->state == SK_VACANT) {
            uintptr_t from = sk__round_down(address, pool->granule_bytes);
            end = sk__min(end, sk__round_up(last, pool->granule_bytes));
            sk__span part = {block, from, end - from};
            if (sk__range_fill(pool, &part, request->lane) != SK_OK) {
                return false;
            }
        }
        is_dormant = is_dormant || block->state == SK_DORMANT;
        address = end;
    }
    sk_assert(address >= last);
    sk__request there = *request;
    there.arena = SK_PLANNED;
    return !is_dormant || sk__alias_open(pool, start, &there);
}

sk__block *sk__planned_take(sk_pool *pool, const sk__request *request) {
    gap place = gap_find(pool, request);
    if (place.address == 0) {
        return NULL;
    }
    if (!is_ready(&place, request)) {
        bool is_filled = gap_fill(pool, request, place.address);
        place.block = sk__block_covering(pool->lives.range, place.address);
        if (!is_filled || !is_ready(&place, request)) {
            return NULL; /* a part may have been given up for another */
        }
    }
    if (sk__records_reserve(pool, SK_RECORDS_PER_TAKE) != SK_OK) {
        return NULL;
    }
    sk_assert(place.block->segment->arena == SK_PLANNED && place.block->life == NULL);
    return sk__block_take(pool, place.block, place.address, request->nbytes);
}

void sk__layout_count(sk_pool *pool, const sk__request *request, const sk__block *block) {
    sk_layout_stats *stats = &pool->lives.stats;
    if (!sk__is_planned(request)) {
        stats->unplanned++;
        stats->unplanned_bytes += block->nbytes;
    } else if (block->address - request->life->place < request->life->room_bytes) {
        stats->hits++;
        stats->hit_bytes += block->nbytes;
    } else {
        stats->misses++;
        stats->missed_bytes += block->nbytes;
    }
}

/* ---- the layout ------------------------------------------------------------------------------ */

void sk__layout_forget(sk_pool *pool) {
    sk__lives *lives = &pool->lives;
    for (size_t i = 0; i < lives->capacity; i++) {
        for (sk__life *life = lives->sites[i].first; life != NULL; life = life->next) {
            life->place = 0;
            life->room_bytes = 0;
        }
    }
    lives->stats = (sk_layout_stats){0};
}

static sk_status places_check(const sk_place *places, size_t count, size_t height_bytes) {
    if (height_bytes > SK_MAX_BYTES) {
        return sk__fail(SK_INVALID, "pool: a layout of %zu bytes: expected up to %zu", height_bytes,
                        SK_MAX_BYTES);
    }
    for (size_t i = 0; i < count; i++) {
        const sk_place *each = &places[i];
        size_t room = each->room_bytes;
        bool inside = each->offset <= height_bytes && room <= height_bytes - each->offset;
        if (room == 0 || room < each->nbytes || each->offset % SK_ROUND_BYTES != 0 || !inside) {
            return sk__fail(SK_INVALID,
                            "pool: place %zu: room for %zu of %zu bytes at %zu: expected all of "
                            "them, at a multiple of %d inside the height of %zu",
                            i, room, each->nbytes, each->offset, SK_ROUND_BYTES, height_bytes);
        }
    }
    return SK_OK;
}

/* Return the life of a request, given that of the place before; NULL: it is not noted any more. */
static sk__life *life_of(const sk_pool *pool, const sk_place *wanted, const sk_place *before,
                         sk__life *life) SK_REQUIRES(pool->lock) {
    bool follows = before != NULL && life != NULL && before->nbytes == wanted->nbytes &&
                   before->tag == wanted->tag && before->phase == wanted->phase &&
                   before->turn < wanted->turn;
    uint32_t turn = follows ? before->turn : 0;
    if (!follows) {
        size_t nbytes = wanted->nbytes != 0 ? wanted->nbytes : SK_VARYING;
        sk__site key = {.nbytes = nbytes, .phase = wanted->phase, .tag = wanted->tag};
        const sk__site *site = sk__site_find(pool, &key);
        life = site != NULL ? site->first : NULL;
    }
    for (; turn < wanted->turn && life != NULL; turn++) {
        life = life->next;
    }
    return life;
}

static void places_set(sk_pool *pool, const sk_place *places, size_t count)
    SK_REQUIRES(pool->lock) {
    sk__life *life = NULL;
    for (size_t i = 0; i < count; i++) {
        life = life_of(pool, &places[i], i > 0 ? &places[i - 1] : NULL, life);
        if (life != NULL) {
            sk_assert(pool->lives.range->nbytes >= places[i].offset + places[i].room_bytes);
            life->place = pool->lives.range->address + places[i].offset;
            life->room_bytes = places[i].room_bytes;
            pool->lives.stats.places++;
        }
    }
}

static sk_status range_open(sk_pool *pool, size_t height_bytes) SK_REQUIRES(pool->lock) {
    if (pool->granule_bytes == 0) {
        return sk__fail(SK_UNSUPPORTED, "pool: a layout needs virtual memory");
    }
    sk_status status = sk__records_reserve(pool, SK_RECORDS_PER_TAKE);
    status = status == SK_OK ? sk__range_add(pool, height_bytes, SK_PLANNED) : status;
    pool->lives.range = status == SK_OK ? pool->segments : pool->lives.range;
    return status;
}

sk_status sk_pool_set_layout(sk_pool *pool, const sk_place *places, size_t count,
                             size_t height_bytes) {
    sk_status status = places_check(places, count, height_bytes);
    if (status != SK_OK) {
        return status;
    }
    sk__lock(&pool->lock);
    sk__lives *lives = &pool->lives;
    if (count > 0 && lives->mode == SK_LIVES_OFF) {
        status = sk__fail(SK_INVALID, "pool: a layout of %zu places: lives are off", count);
    }
    bool is_short = lives->range == NULL || lives->range->nbytes < height_bytes;
    if (status == SK_OK && count > 0 && is_short) {
        status = range_open(pool, height_bytes);
    }
    if (status == SK_OK) {
        sk__layout_forget(pool);
        lives->stats.height_bytes = height_bytes;
        places_set(pool, places, count);
    }
    sk__unlock(&pool->lock);
    return status;
}

void sk_pool_layout_stats(sk_pool *pool, sk_layout_stats *out) {
    sk__lock(&pool->lock);
    *out = pool->lives.stats;
    sk__unlock(&pool->lock);
}
