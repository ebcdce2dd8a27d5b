/* planned.c - blocks at the addresses of a layout.
 *
 * The layout has a range of addresses of its own. A request whose place is free is served there;
 * another in a hole (holes.c), or as if there were no layout, so correctness never depends on the
 * plan. In a step that repeats the planned one, all places are free when their turn comes, and once
 * they have memory nothing is mapped or moved any more. */
#include <stdlib.h>

#include "pool/alias.h"
#include "pool/lives.h"

enum { MOST_RANGES = 8 };

/* ---- taking ---------------------------------------------------------------------------------- */

/* Whether the lane may use a block, or its addresses, now. */
static bool is_open(const sk__block *block, const sk__lane *lane) {
    return sk__is_idle(block) || (block->state == SK_CACHED && block->lane == lane);
}

sk__gap sk__gap_find(const sk_pool *pool, const sk__request *request, uintptr_t from,
                     uintptr_t to) {
    sk__block *first = sk__block_covering(pool->lives.range, from);
    const sk__block *block = first;
    while (request->nbytes <= to - from && block != NULL &&
           block->address < from + request->nbytes) {
        if (!is_open(block, request->lane)) {
            first = block->right;
            from = sk__min(to, block->address + block->nbytes);
        }
        block = block->right;
    }
    bool is_there = request->nbytes <= to - from && first != NULL;
    sk_assert(!is_there || (first->address <= from && from % SK_ROUND_BYTES == 0));
    return (sk__gap){is_there ? from : 0, first};
}

/* Return where the request can be served: in its place, or in a hole. */
static sk__gap spot_find(const sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    const sk__life *life = request->life;
    sk__gap spot = {0, NULL};
    if (life->place != 0) {
        spot = sk__gap_find(pool, request, life->place, life->place + life->room_bytes);
    }
    return spot.address != 0 ? spot : sk__hole_find(pool, request);
}

bool sk__planned_is_open(const sk_pool *pool, const sk__request *request) {
    return spot_find(pool, request).address != 0;
}

/* Whether all of the addresses lie in one free block. */
static bool is_ready(const sk__gap *spot, const sk__request *request) {
    const sk__block *block = spot->block;
    sk_assert(spot->address != 0 && block != NULL);
    return block->state == SK_CACHED && block->lane == request->lane &&
           block->address + block->nbytes >= spot->address + request->nbytes;
}

bool sk__planned_is_ready(const sk_pool *pool, const sk__request *request) {
    sk__gap spot = spot_find(pool, request);
    return spot.address != 0 && is_ready(&spot, request);
}

/* Move free memory from outside the layout to addresses in it that have none. So a new layout gets
 * its memory although the budget is used up, and without a wait: memory of the request's own stream
 * can be mapped at once, but not given back. */
static bool span_borrow(sk_pool *pool, const sk__span *wanted, const sk__request *request)
    SK_REQUIRES(pool->lock) {
    sk__segment *range = pool->lives.range;
    return sk__aliases_are_on(pool) && sk__aliases_are_few(pool) &&
           sk__lend_at(pool, request, range, wanted->address, wanted->nbytes, range) == SK_OK;
}

/* Whether there may be enough memory for the addresses. Else filling a part would only take it from
 * where it serves the request, in each step again. */
static bool can_fill(const sk_pool *pool, const sk__request *request, uintptr_t start)
    SK_REQUIRES(pool->lock) {
    uintptr_t last = start + request->nbytes;
    size_t lacking = 0;
    size_t inside = 0; /* free already */
    const sk__block *block = sk__block_covering(pool->lives.range, start);
    for (; block != NULL && block->address < last; block = block->right) {
        uintptr_t from = sk__max(block->address, sk__round_down(start, pool->granule_bytes));
        uintptr_t to =
            sk__min(block->address + block->nbytes, sk__round_up(last, pool->granule_bytes));
        if (block->state == SK_VACANT) {
            lacking += to - from;
        } else if (block->state == SK_CACHED) {
            from = sk__round_up(from, pool->granule_bytes);
            to = sk__round_down(to, pool->granule_bytes);
            inside += to > from ? to - from : 0;
        }
    }
    sk_assert(lacking + inside <=
              sk__round_up(last, pool->granule_bytes) - sk__round_down(start, pool->granule_bytes));
    size_t room = pool->budget_bytes - sk__min(pool->reserved_bytes, pool->budget_bytes);
    if (lacking <= room) {
        return true;
    }
    size_t total = 0;
    (void)sk__lender(pool, request, NULL, SIZE_MAX, &total);
    return total >= inside && lacking - room <= total - inside;
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
        sk_assert(end > address);
        if (!is_open(block, request->lane)) {
            return false;
        }
        is_dormant = is_dormant || block->state == SK_DORMANT;
        if (block->state == SK_VACANT) { /* another record covers the addresses afterwards */
            uintptr_t from = sk__round_down(address, pool->granule_bytes);
            end = sk__min(end, sk__round_up(last, pool->granule_bytes));
            sk__span part = {block, from, end - from};
            if (sk__range_fill(pool, &part, request->lane) != SK_OK &&
                !span_borrow(pool, &part, request)) {
                return false;
            }
        }
        address = end;
    }
    sk_assert(address >= last);
    sk__request there = *request;
    there.arena = SK_PLANNED;
    return !is_dormant || sk__alias_open(pool, start, &there);
}

/* Follow the times of the layout. */
static void times_follow(sk__lives *lives, const sk__life *life, const sk__gap *spot) {
    bool crosses = life->begin == 0 && life->end == UINT64_MAX;
    if (life->place != 0 && !crosses) {
        lives->planned_at = life->begin;
    }
    if (spot->address - life->place >= life->room_bytes && sk__hole_is_sought(lives, life)) {
        lives->searches++;
    }
}

sk__block *sk__planned_take(sk_pool *pool, const sk__request *request) {
    sk__gap spot = spot_find(pool, request);
    times_follow(&pool->lives, request->life, &spot);
    if (spot.address == 0) {
        return NULL;
    }
    if (!is_ready(&spot, request)) {
        bool is_filled =
            can_fill(pool, request, spot.address) && gap_fill(pool, request, spot.address);
        spot.block = sk__block_covering(pool->lives.range, spot.address);
        if (!is_filled || !is_ready(&spot, request)) {
            return NULL; /* a part may have been given up for another */
        }
    }
    if (sk__records_reserve(pool, SK_RECORDS_PER_TAKE) != SK_OK) {
        return NULL;
    }
    sk_assert(spot.block->segment->arena == SK_PLANNED && spot.block->life == NULL);
    return sk__block_take(pool, spot.block, spot.address, request->nbytes);
}

void sk__layout_count(sk_pool *pool, const sk__request *request, const sk__block *block) {
    sk_layout_stats *stats = &pool->lives.stats;
    const sk__life *life = request->life;
    if (life != NULL && block->address - life->place < life->room_bytes) {
        stats->hits++;
        stats->hit_bytes += block->nbytes;
    } else if (block->segment == pool->lives.range) {
        stats->holes++;
        stats->hole_bytes += block->nbytes;
    } else if (life != NULL && life->place != 0) {
        stats->misses++;
        stats->missed_bytes += block->nbytes;
    } else {
        stats->unplanned++;
        stats->unplanned_bytes += block->nbytes;
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
    sk__stays_set(pool, NULL, 0);
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
        if (each->end != 0 && each->end <= each->begin) {
            return sk__fail(SK_INVALID, "pool: place %zu: needed from %llu to %llu", i,
                            (unsigned long long)each->begin, (unsigned long long)each->end);
        }
        bool aligned = each->offset % SK_ROUND_BYTES == 0 && room % SK_ROUND_BYTES == 0;
        if (room == 0 || room < each->nbytes || !aligned || !inside) {
            return sk__fail(SK_INVALID,
                            "pool: place %zu: room for %zu of %zu bytes at %zu: expected all of "
                            "them, in multiples of %d inside the height of %zu",
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
            life->begin = places[i].begin;
            life->end = places[i].end == 0 ? UINT64_MAX : places[i].end;
            pool->lives.stats.places++;
        }
    }
}

static sk_status range_open(sk_pool *pool, size_t height_bytes) SK_REQUIRES(pool->lock) {
    if (pool->granule_bytes == 0) {
        return sk__fail(SK_UNSUPPORTED, "pool: a layout needs virtual memory");
    }
    sk_status status = sk__records_reserve(pool, SK_RECORDS_PER_TAKE);
    return status == SK_OK ? sk__range_add(pool, height_bytes, SK_PLANNED) : status;
}

/* Return the bytes of a segment that a layout cannot have: in use, or dormant, since what is mapped
 * there may be in use elsewhere. */
static size_t bytes_used(const sk__segment *segment) {
    const sk__block *block = segment->first;
    size_t used = 0;
    sk_assert(block != NULL && block->address == segment->address && block->left == NULL);
    for (; block != NULL; block = block->right) {
        bool is_free = block->state == SK_VACANT || block->state == SK_CACHED;
        used += is_free ? 0 : block->nbytes;
    }
    return used;
}

/* Choose the layout's range. What is in use in one may stay for long, such as the weights of a
 * model that was made while there was a layout: it would be in the way in each step. But addresses
 * are not endless: of many ranges, the one with the least in use serves. */
static sk_status range_choose(sk_pool *pool, size_t height_bytes) SK_REQUIRES(pool->lock) {
    sk__segment *best = NULL;
    size_t least = SIZE_MAX;
    size_t count = 0;
    for (sk__segment *each = pool->segments; each != NULL; each = each->next) {
        if (each->arena == SK_PLANNED && each->nbytes >= height_bytes) {
            size_t used = bytes_used(each);
            best = used < least ? each : best;
            least = sk__min(least, used);
            count++;
        }
    }
    sk_status status = SK_OK;
    if (least > 0 && count < MOST_RANGES) {
        status = range_open(pool, height_bytes);
        best = status == SK_OK ? pool->segments : best;
    }
    if (best == NULL) {
        return status;
    }
    sk_assert(best->nbytes >= height_bytes);
    sk_assert(best->starts.firsts != NULL); /* places are looked up by address */
    pool->lives.range = best;               /* also without more addresses */
    return SK_OK;
}

sk_status sk_pool_set_layout(sk_pool *pool, const sk_place *places, size_t count,
                             size_t height_bytes) {
    sk_status status = places_check(places, count, height_bytes);
    if (status != SK_OK) {
        return status;
    }
    sk__stay *stays = count > 0 ? sk__stays_make(places, count) : NULL;
    if (stays == NULL && count > 0) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "pool: no host memory for a layout of %zu places",
                        count);
    }
    sk__lock(&pool->lock);
    sk__lives *lives = &pool->lives;
    if (count > 0 && lives->mode == SK_LIVES_OFF) {
        status = sk__fail(SK_INVALID, "pool: a layout of %zu places: lives are off", count);
    }
    if (status == SK_OK && count > 0) {
        sk__aliases_allow(pool, height_bytes); /* else no memory could move to the layout */
        status = range_choose(pool, height_bytes);
    }
    if (status == SK_OK) {
        sk__layout_forget(pool);
        lives->stats.height_bytes = count > 0 ? height_bytes : 0;
        places_set(pool, places, count);
        sk__stays_set(pool, stays, count);
        stays = NULL;
    }
    sk__unlock(&pool->lock);
    free(stays);
    return status;
}

void sk_pool_layout_stats(sk_pool *pool, sk_layout_stats *out) {
    sk__lock(&pool->lock);
    *out = pool->lives.stats;
    sk__unlock(&pool->lock);
}
