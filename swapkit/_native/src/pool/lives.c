/* lives.c - how long blocks live, by call site.
 *
 * A request is the n-th of its size and tag in its phase of the step. Each has one record with its
 * latest two lives: the latest may still go on when the step ends. Nothing here can fail: without
 * host memory for a record, a request has no life, and is served as if lives were off. */
#include "pool/lives.h"

#include <stdlib.h>

enum {
    SLAB_LIVES = 256,
    FIRST_SITES = 1024, /* a power of two */
    IDLE_STEPS = 8,     /* a site without requests for so long is forgotten, */
    SPARE_RATIO = 4,    /* when there are so many records for each request of a step */
    MOST_LIVES = 1 << 17,
};

/* ---- records --------------------------------------------------------------------------------- */

static sk__life *life_new(sk__lives *lives) {
    if (lives->life_count == MOST_LIVES) {
        return NULL;
    }
    if (lives->spare == NULL) {
        sk__life *records = sk__slab_add(&lives->slabs, SLAB_LIVES * sizeof *records);
        if (records == NULL) {
            return NULL;
        }
        for (size_t i = SLAB_LIVES; i > 0; i--) {
            records[i - 1].next = lives->spare;
            lives->spare = &records[i - 1];
        }
    }
    sk__life *life = lives->spare;
    sk_assert(life->block == NULL);
    lives->spare = life->next;
    lives->life_count++;
    *life = (sk__life){.step = {SK_NO_STEP, SK_NO_STEP}};
    return life;
}

static void life_leave(sk__life *life) {
    if (life->block != NULL) {
        sk_assert(life->block->life == life);
        life->block->life = NULL;
        life->block = NULL;
    }
}

static void lives_recycle(sk__lives *lives, sk__life *life) {
    while (life != NULL) {
        sk__life *next = life->next;
        life_leave(life);
        life->next = lives->spare;
        lives->spare = life;
        sk_assert(lives->life_count > 0);
        lives->life_count--;
        life = next;
    }
}

/* ---- sites ----------------------------------------------------------------------------------- */

static size_t site_slot(const sk__lives *lives, const sk__site *key) {
    const uint64_t golden = 0x9E3779B97F4A7C15; /* Fibonacci hashing (Knuth 6.4) */
    const unsigned half = 32;
    uint64_t hash = (((uint64_t)key->phase << half | key->tag) * golden) ^ key->nbytes;
    return (size_t)((hash * golden) >> half) & (lives->capacity - 1);
}

/* Return the entry of a key, or the unused one where it belongs. The table is never full. */
static sk__site *site_entry(const sk__lives *lives, const sk__site *key) {
    sk_assert(key->nbytes > 0 && lives->count < lives->capacity);
    size_t slot = site_slot(lives, key);
    sk__site *site = &lives->sites[slot];
    while (site->nbytes != 0 &&
           (site->nbytes != key->nbytes || site->tag != key->tag || site->phase != key->phase)) {
        slot = (slot + 1) & (lives->capacity - 1);
        site = &lives->sites[slot];
    }
    return site;
}

sk__site *sk__site_find(const sk_pool *pool, const sk__site *key) {
    const sk__lives *lives = &pool->lives;
    sk__site *site = lives->capacity > 0 ? site_entry(lives, key) : NULL;
    return site != NULL && site->nbytes != 0 ? site : NULL;
}

/* Return the last record of a list that has a place; NULL: none has. */
static sk__life *placed_last(sk__life *life) {
    sk__life *last = NULL;
    for (; life != NULL; life = life->next) {
        last = life->place != 0 ? life : last;
    }
    return last;
}

/* Forget the records behind `life`, or all from `*first` on if it is NULL. */
static void lives_cut(sk__lives *lives, sk__life **first, sk__life *life) {
    sk__life **link = life != NULL ? &life->next : first;
    lives_recycle(lives, *link);
    *link = NULL;
}

/* Rebuild the table with the sites that had a request since `step`, without the records that step
 * `cut` did not need. Those with a place stay: a short step may come between two that need them.
 * False: no host memory. */
static bool sites_rebuild(sk__lives *lives, size_t capacity, uint64_t step, uint64_t cut) {
    sk__lives grown = {.sites = calloc(capacity, sizeof(sk__site)), .capacity = capacity};
    if (grown.sites == NULL) {
        return false;
    }
    for (size_t i = 0; i < lives->capacity; i++) {
        sk__site *site = &lives->sites[i];
        if (site->latest != NULL && site->step == cut) {
            sk__life *placed = placed_last(site->latest->next);
            lives_cut(lives, &site->first, placed != NULL ? placed : site->latest);
        }
        if (site->nbytes != 0 && site->step < step) {
            lives_cut(lives, &site->first, placed_last(site->first));
            site->latest = NULL;
        }
        if (site->nbytes != 0 && (site->step >= step || site->first != NULL)) {
            *site_entry(&grown, site) = *site;
            grown.count++;
        }
    }
    sk_assert(grown.count <= lives->count);
    free(lives->sites);
    lives->sites = grown.sites;
    lives->capacity = capacity;
    lives->count = grown.count;
    return true;
}

/* Make room for the two sites that a request may need. False: there is none. */
static bool sites_reserve(sk__lives *lives) {
    const size_t most = 4 * (size_t)MOST_LIVES;
    if (2 * (lives->count + 2) <= lives->capacity) {
        return true;
    }
    return lives->capacity < most &&
           sites_rebuild(lives, sk__max(FIRST_SITES, 2 * lives->capacity), 0, SK_NO_STEP);
}

/* Return the site of a key, new or not, at its next request. Needs a reserve. */
static sk__site *site_of(sk_pool *pool, const sk__site *key) SK_REQUIRES(pool->lock) {
    sk__lives *lives = &pool->lives;
    sk__site *site = site_entry(lives, key);
    if (site->nbytes == 0) {
        *site = *key;
        site->step = pool->steps;
        site->run = pool->steps == lives->since ? SK_STEADY_RUN : 0;
        lives->count++;
    } else if (site->step != pool->steps) {
        bool follows = site->step + 1 == pool->steps;
        site->run = follows ? site->run + (site->run < SK_STEADY_RUN ? 1 : 0) : 0;
        site->step = pool->steps;
        site->latest = NULL;
    }
    return site;
}

/* Return the record of the next request of a site; NULL: it has none yet. */
static sk__life *life_next(const sk__site *site) {
    return site->latest != NULL ? site->latest->next : site->first;
}

static bool has_room(const sk__life *life, size_t nbytes) {
    return life != NULL && life->place != 0 && life->room_bytes >= nbytes;
}

/* Return the site that a request belongs to: its own if its size repeats. But a layout knows the
 * request by the site that it had when the layout was made. Needs a reserve. */
static sk__site *site_choose(sk_pool *pool, sk__site *key) SK_REQUIRES(pool->lock) {
    size_t nbytes = key->nbytes;
    sk__site *own = site_of(pool, key);
    bool repeats = own->run == SK_STEADY_RUN;
    if (has_room(life_next(own), nbytes) || (repeats && pool->lives.stats.height_bytes == 0)) {
        return own;
    }
    key->nbytes = SK_VARYING;
    sk__site *shared = site_of(pool, key);
    return repeats && !has_room(life_next(shared), nbytes) ? own : shared;
}

/* ---- lives ----------------------------------------------------------------------------------- */

static void phase_note(sk__lives *lives, uint32_t tag) {
    bool in_backward = (tag & SK_TAG_BACKWARD) != 0;
    lives->phase += in_backward != lives->in_backward ? 1 : 0;
    lives->in_backward = in_backward;
}

/* Return the class of a block whose life is about to begin. */
static sk_life_class predict(const sk_pool *pool, const sk__life *life, uint32_t tag)
    SK_REQUIRES(pool->lock) {
    if (life->observed != SK_LIFE_UNKNOWN) {
        return life->observed;
    }
    /* First requests: the states of an optimizer, what exists before training, and activations. */
    bool is_before = pool->steps == 0 && life->phase == 0 && tag == 0;
    if ((tag & SK_TAG_OPTIMIZER) != 0 || is_before) {
        return SK_LIFE_LASTING;
    }
    return pool->steps == 0 && life->phase == 0 ? SK_LIFE_ACTIVATION : SK_LIFE_TRANSIENT;
}

sk__life *sk__life_begin(sk_pool *pool, const sk__request *request, uint32_t tag) {
    sk__lives *lives = &pool->lives;
    phase_note(lives, tag);
    if (!sites_reserve(lives)) {
        return NULL;
    }
    sk__site key = {.nbytes = request->nbytes, .phase = lives->phase, .tag = tag};
    sk__site *site = site_choose(pool, &key);
    sk__life **link = site->latest != NULL ? &site->latest->next : &site->first;
    if (*link == NULL) {
        *link = life_new(lives);
    }
    sk__life *life = *link;
    if (life == NULL) {
        return NULL;
    }
    site->latest = life;
    if (life->step[0] != SK_NO_STEP) {
        life->observed = life->freed_at[0] == 0 ? SK_LIFE_LASTING : life->ended;
    }
    life_leave(life);
    life->step[1] = life->step[0];
    life->taken_at[1] = life->taken_at[0];
    life->freed_at[1] = life->freed_at[0];
    life->nbytes[1] = life->nbytes[0];
    life->step[0] = pool->steps;
    life->taken_at[0] = ++lives->clock;
    life->freed_at[0] = 0;
    life->nbytes[0] = request->nbytes;
    life->phase = lives->phase;
    life->stream = request->lane->stream;
    life->requested_bytes = request->requested_bytes;
    life->predicted = predict(pool, life, tag);
    lives->living++;
    lives->pins++;
    return life;
}

void sk__life_serve(sk_pool *pool, const sk__request *request, sk__block *block) {
    sk__life *life = request->life;
    sk_assert(pool->lives.pins > 0);
    pool->lives.pins--;
    if (life->taken_at[0] != request->begun_at) {
        return; /* the next step has made the request, while this one released the lock */
    }
    sk_assert(life->block == NULL);
    if (block == NULL) {
        life->freed_at[0] = ++pool->lives.clock;
        life->ended = SK_LIFE_UNKNOWN;
        return;
    }
    sk_assert(block->state == SK_IN_USE && block->life == NULL);
    life->block = block;
    block->life = life;
}

/* Note how long a block lived, and its size. The ends of lives vary by the times of copies. */
static void most_note(const sk_pool *pool, sk__life *life) SK_REQUIRES(pool->lock) {
    const sk__lives *lives = &pool->lives;
    uint64_t window = lives->windows + (pool->steps - lives->since) / SK_LIFE_WINDOW;
    if (life->window != window) {
        life->longest[1] = life->window + 1 == window ? life->longest[0] : 0;
        life->longest[0] = 0;
        life->most_bytes[1] = life->window + 1 == window ? life->most_bytes[0] : 0;
        life->most_bytes[0] = 0;
        life->window = window;
    }
    life->most_bytes[0] = sk__max(life->most_bytes[0], life->nbytes[0]);
    life->longest[0] = sk__max(life->longest[0], life->freed_at[0] - life->taken_at[0]);
}

void sk__life_end(sk_pool *pool, sk__block *block) {
    sk__lives *lives = &pool->lives;
    sk__life *life = block->life;
    sk_assert(life != NULL && life->block == block);
    life_leave(life);
    life->freed_at[0] = ++lives->clock;
    most_note(pool, life);
    if (life->step[0] != pool->steps) {
        life->ended = SK_LIFE_CROSSING;
    } else {
        life->ended = life->phase == lives->phase ? SK_LIFE_TRANSIENT : SK_LIFE_ACTIVATION;
    }
}

void sk__lives_mark(sk_pool *pool) {
    sk__lives *lives = &pool->lives;
    lives->began_at[2] = lives->began_at[1];
    lives->began_at[1] = lives->began_at[0];
    lives->began_at[0] = ++lives->clock;
    lives->phase = 0;
    lives->in_backward = false;
    lives->searches = 0;
    size_t needed = sk__max(lives->living, (size_t)lives->stats.places);
    size_t most = SPARE_RATIO * needed + FIRST_SITES;
    if (lives->pins == 0 && (lives->life_count > most || lives->count > most)) {
        uint64_t oldest = pool->steps > IDLE_STEPS ? pool->steps - IDLE_STEPS : 0;
        (void)sites_rebuild(lives, lives->capacity, oldest, pool->steps - 1);
    }
    lives->living = 0;
}

sk__arena sk__arena_of(const sk_pool *pool, const sk__request *request, uint32_t tag) {
    sk__arena usual = request->arena;
    if (request->life == NULL || request->life->place != 0) {
        return usual;
    }
    bool separate = pool->lives.mode == SK_LIVES_SEPARATE;
    switch (request->life->predicted) {
    case SK_LIFE_LASTING:
        return (tag & SK_TAG_OPTIMIZER) != 0 ? SK_OPTIMIZER : SK_LASTING;
    case SK_LIFE_CROSSING:
        return separate ? SK_LASTING : usual;
    case SK_LIFE_ACTIVATION:
        return separate ? SK_ACTIVATIONS : usual;
    default:
        return usual;
    }
}

void sk__lives_free(sk_pool *pool) {
    sk__lives *lives = &pool->lives;
    sk__stays_set(pool, NULL, 0);
    for (size_t i = 0; i < lives->capacity; i++) {
        lives_recycle(lives, lives->sites[i].first);
    }
    sk__slabs_free(&lives->slabs);
    free(lives->sites);
    *lives = (sk__lives){
        .backward = lives->backward,
        .clock = lives->clock,
        .since = lives->since,
        .windows = lives->windows,
        .range = lives->range,
    };
}

/* ---- for the owner --------------------------------------------------------------------------- */

void sk_pool_set_lives(sk_pool *pool, sk_lives_mode mode) {
    sk__lock(&pool->lock);
    if (mode == SK_LIVES_OFF && pool->lives.pins == 0) {
        sk__lives_free(pool);
    } else if (mode == SK_LIVES_OFF) {
        sk__layout_forget(pool); /* the records stay for the requests under way */
    }
    pool->lives.mode = mode;
    pool->lives.windows += 2 + (pool->steps - pool->lives.since) / SK_LIFE_WINDOW;
    pool->lives.since = pool->steps;
    sk__unlock(&pool->lock);
}

void sk_pool_set_backward(sk_pool *pool, sk_backward_fn backward) {
    sk__lock(&pool->lock);
    pool->lives.backward = backward;
    sk__unlock(&pool->lock);
}

static sk_life life_show(const sk__site *site, const sk__life *life, uint32_t turn) {
    return (sk_life){
        .nbytes = life->nbytes[0],
        .former_bytes = life->nbytes[1],
        .most_bytes = sk__max(life->most_bytes[0], life->most_bytes[1]),
        .requested_bytes = life->requested_bytes,
        .step = {life->step[0], life->step[1]},
        .taken_at = {life->taken_at[0], life->taken_at[1]},
        .freed_at = {life->freed_at[0], life->freed_at[1]},
        .longest = sk__max(life->longest[0], life->longest[1]),
        .stream = (uintptr_t)life->stream,
        .phase = site->phase,
        .tag = site->tag,
        .turn = turn,
        .varies = site->nbytes == SK_VARYING ? 1 : 0,
        .predicted = life->predicted,
        .observed = life->observed,
    };
}

size_t sk_pool_lives(sk_pool *pool, sk_life *out, size_t capacity, sk_step_times *times) {
    size_t count = 0;
    sk__lock(&pool->lock);
    const sk__lives *lives = &pool->lives;
    for (size_t i = 0; i < lives->capacity; i++) {
        uint32_t turn = 0;
        const sk__site *site = &lives->sites[i];
        for (const sk__life *life = site->first; life != NULL; life = life->next) {
            if (count < capacity) {
                out[count] = life_show(site, life, turn);
            }
            turn++;
            count++;
        }
    }
    if (times != NULL) {
        *times = (sk_step_times){
            .step = pool->steps,
            .began_at = {lives->began_at[0], lives->began_at[1], lives->began_at[2]},
            .now = lives->clock,
        };
    }
    sk__unlock(&pool->lock);
    return count;
}
