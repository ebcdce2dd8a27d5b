/* holes.c - free addresses of a layout for a request that does not go as planned.
 *
 * Its own place is in use, or it has none. The layout knows when other requests need each address,
 * so the request is served where none does as long as its block lives. Else one additional block in
 * a busy place would put off all those planned there, one after another. */
#include <stdlib.h>

#include "pool/alias.h"
#include "pool/lives.h"

enum { LEAST_SEARCHES = 64, SEARCH_SHARE = 16 };

/* ---- the list -------------------------------------------------------------------------------- */

static int by_offset(const void *a, const void *b) {
    const sk__stay *left = a;
    const sk__stay *right = b;
    return (left->offset > right->offset) - (left->offset < right->offset);
}

sk__stay *sk__stays_make(const sk_place *places, size_t count) {
    sk__stay *stays = calloc(count, sizeof *stays);
    if (stays == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        sk_assert(places[i].room_bytes > 0 && places[i].room_bytes >= places[i].nbytes);
        stays[i] = (sk__stay){
            .offset = places[i].offset,
            .room_bytes = places[i].room_bytes,
            .begin = places[i].begin,
            .end = places[i].end == 0 ? UINT64_MAX : places[i].end,
        };
    }
    qsort(stays, count, sizeof *stays, by_offset);
    return stays;
}

void sk__stays_set(sk_pool *pool, sk__stay *stays, size_t count) {
    sk_assert((stays != NULL) == (count > 0));
    free(pool->lives.stays);
    pool->lives.stays = stays;
    pool->lives.stay_count = count;
    pool->lives.planned_at = 0;
    pool->lives.searches = 0;
    pool->lives.planned_length = 0;
    for (size_t i = 0; i < count; i++) {
        sk_assert(stays[i].begin < stays[i].end);
        sk_assert(i == 0 || stays[i - 1].offset <= stays[i].offset);
        uint64_t end = stays[i].end != UINT64_MAX ? stays[i].end : 0;
        pool->lives.planned_length = sk__max(pool->lives.planned_length, end);
    }
}

/* ---- times ----------------------------------------------------------------------------------- */

/* The time in which addresses are needed. */
typedef struct span {
    uint64_t begin, end;
} span;

/* Return when the request's block lives: as planned, or as long as those before. */
static span span_expected(const sk__lives *lives, const sk__life *life) {
    if (life->place != 0) {
        return (span){life->begin, life->end};
    }
    uint64_t longest = sk__max(life->longest[0], life->longest[1]);
    return (span){lives->planned_at,
                  lives->planned_at + (longest > 0 ? longest : lives->planned_length)};
}

/* Whether the layout needs the addresses meanwhile. Steps repeat: times beyond the end are those of
 * the next step. */
static bool is_needed(const sk__lives *lives, const sk__stay *stay, const span *time) {
    uint64_t length = lives->planned_length;
    sk_assert(time->begin <= time->end);
    bool wraps = time->end > length && stay->begin < time->end - length;
    bool meets = stay->begin < time->end && time->begin < stay->end;
    return stay->end == UINT64_MAX || meets || wraps;
}

/* ---- holes ----------------------------------------------------------------------------------- */

bool sk__hole_is_sought(const sk__lives *lives, const sk__life *life) {
    size_t most = sk__max(LEAST_SEARCHES, lives->stay_count / SEARCH_SHARE);
    bool lasts = life->place == 0 &&
                 (life->predicted == SK_LIFE_LASTING || life->predicted == SK_LIFE_CROSSING);
    return lives->searches < most && !lasts;
}

sk__gap sk__hole_find(const sk_pool *pool, const sk__request *request) {
    const sk__lives *lives = &pool->lives;
    sk__gap gap = {0, NULL};
    if (!sk__hole_is_sought(lives, request->life)) {
        return gap;
    }
    span time = span_expected(lives, request->life);
    sk_assert(lives->range != NULL && lives->stats.height_bytes <= lives->range->nbytes);
    uintptr_t base = lives->range->address;
    size_t from = 0;
    for (size_t i = 0; i < lives->stay_count && gap.address == 0; i++) {
        const sk__stay *stay = &lives->stays[i];
        if (is_needed(lives, stay, &time)) {
            if (stay->offset >= from + request->nbytes) {
                gap = sk__gap_find(pool, request, base + from, base + stay->offset);
            }
            from = sk__max(from, stay->offset + stay->room_bytes);
        }
    }
    size_t height = (size_t)lives->stats.height_bytes;
    bool fits_above = gap.address == 0 && height >= from + request->nbytes;
    return fits_above ? sk__gap_find(pool, request, base + from, base + height) : gap;
}
