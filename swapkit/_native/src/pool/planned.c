/* planned.c - blocks at the addresses of a layout.
 *
 * The layout has a range of addresses of its own. A request whose place is free is served there;
 * any other is served as if there were no layout, so correctness never depends on the plan. In a
 * step that repeats the planned one, all places are free when their turn comes, and once they have
 * memory nothing is mapped or moved any more. */
#include "pool/alias.h"
#include "pool/lives.h"

/* ---- taking ---------------------------------------------------------------------------------- */

static uintptr_t place_end(const sk__request *request) {
    return request->life->place + request->nbytes;
}

/* Return the free block of the lane that holds all of the place; NULL: there is none. */
static sk__block *block_ready(const sk_pool *pool, const sk__request *request)
    SK_REQUIRES(pool->lock) {
    sk__block *block = sk__block_covering(pool->lives.range, request->life->place);
    bool serves = block->state == SK_CACHED && block->lane == request->lane &&
                  block->address + block->nbytes >= place_end(request);
    return serves ? block : NULL;
}

bool sk__planned_is_ready(const sk_pool *pool, const sk__request *request) {
    return block_ready(pool, request) != NULL;
}

/* Whether the lane may use a block, or its addresses, now. */
static bool is_open(const sk__block *block, const sk__lane *lane) {
    return sk__is_idle(block) || (block->state == SK_CACHED && block->lane == lane);
}

bool sk__planned_is_open(const sk_pool *pool, const sk__request *request) {
    const sk__block *block = sk__block_covering(pool->lives.range, request->life->place);
    while (block != NULL && block->address < place_end(request) && is_open(block, request->lane)) {
        block = block->right;
    }
    return block == NULL || block->address >= place_end(request);
}

/* Give the addresses memory where they have none. False: there is not enough. */
static bool place_fill(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    bool is_dormant = false;
    uintptr_t address = request->life->place;
    while (address < place_end(request)) {
        sk__block *block = sk__block_covering(pool->lives.range, address);
        uintptr_t end = block->address + block->nbytes;
        if (!is_open(block, request->lane)) {
            return false;
        }
        if (block->state == SK_VACANT) {
            uintptr_t from = sk__round_down(address, pool->granule_bytes);
            end = sk__min(end, sk__round_up(place_end(request), pool->granule_bytes));
            sk__span part = {block, from, end - from};
            if (sk__range_fill(pool, &part, request->lane) != SK_OK) {
                return false;
            }
        }
        is_dormant = is_dormant || block->state == SK_DORMANT;
        address = end;
    }
    sk_assert(address >= place_end(request));
    sk__request there = *request;
    there.arena = SK_PLANNED;
    return !is_dormant || sk__alias_open(pool, request->life->place, &there);
}

sk__block *sk__planned_take(sk_pool *pool, const sk__request *request) {
    sk__block *block = block_ready(pool, request);
    if (block == NULL && sk__planned_is_open(pool, request) && place_fill(pool, request)) {
        block = block_ready(pool, request); /* unless a part was given up for another */
    }
    if (block == NULL || sk__records_reserve(pool, SK_RECORDS_PER_TAKE) != SK_OK) {
        return NULL;
    }
    sk_assert(block->segment->arena == SK_PLANNED && block->life == NULL);
    return sk__block_take(pool, block, request->life->place, request->nbytes);
}

void sk__layout_count(sk_pool *pool, const sk__request *request, const sk__block *block) {
    sk_layout_stats *stats = &pool->lives.stats;
    if (!sk__is_planned(request)) {
        stats->unplanned++;
        stats->unplanned_bytes += block->nbytes;
    } else if (request->life->place == block->address) {
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
        bool inside = each->offset <= height_bytes && each->nbytes <= height_bytes - each->offset;
        if (each->nbytes == 0 || each->offset % SK_ROUND_BYTES != 0 || !inside) {
            return sk__fail(SK_INVALID,
                            "pool: place %zu: %zu bytes at %zu: expected a multiple of %d inside "
                            "the height of %zu",
                            i, each->nbytes, each->offset, SK_ROUND_BYTES, height_bytes);
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
        sk__site key = {wanted->nbytes, wanted->phase, wanted->tag, 0, NULL, NULL};
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
            sk_assert(pool->lives.range->nbytes >= places[i].offset + places[i].nbytes);
            life->place = pool->lives.range->address + places[i].offset;
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
