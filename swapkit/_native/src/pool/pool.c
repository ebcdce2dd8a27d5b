/* pool.c - the pool's life, and taking and giving blocks.
 *
 * The usual take is a lock, a bitmap search in the stream's own free list, and a table entry; all
 * slower work is in segment.c (the backend) and reclaim.c (waiting, rescue). */
#include "pool/alias.h"
#include "pool/freelist.h"
#include "pool/lives.h"
#include "pool/stats.h"
#include "pool/table.h"
#include "pool/waiting.h"

#include <stdlib.h>
#include <string.h>

static _Thread_local uint32_t thread_tag;

static _Thread_local bool thread_is_tentative;

/* The pool for which this thread is between two calls of `making`. */
static _Thread_local const sk_pool *making_for;

bool sk_tentative_set(bool on) {
    bool previous = thread_is_tentative;
    thread_is_tentative = on;
    return previous;
}

bool sk__is_tentative(void) { return thread_is_tentative; }

uint32_t sk_tag_set(uint32_t tag) {
    uint32_t previous = thread_tag;
    thread_tag = tag;
    return previous;
}

/* ---- life ------------------------------------------------------------------------------------ */

/* Make the copy of a forked child usable: the child is the host's helper, not the trainer, so its
 * pool works without budget and never calls back. */
static void pool_after_fork(void *owner) {
    sk_pool *pool = owner;
    pool->budget_bytes = SIZE_MAX;
    pool->rescue = NULL;
    pool->making = NULL;
    pool->ring = NULL;
    pool->settle = NULL;
    pool->settlers = 0;
    for (; pool->parked != NULL; pool->parked = pool->parked->next) {
        pool->lost_blocks++; /* their last work is the parent's */
    }
    pool->lost_blocks += pool->in_transit; /* blocks that other threads held are lost */
    pool->in_transit = 0;
    (void)pthread_cond_init(&pool->settled, NULL);
}

static size_t budget_or_none(size_t budget_bytes) {
    return budget_bytes == 0 ? SIZE_MAX : budget_bytes;
}

static sk_status params_check(const sk_pool_params *params) {
    size_t split = params->max_split_bytes;
    if (split != 0 && split <= SK_MIDDLE_BYTES) {
        return sk__fail(SK_INVALID, "pool: max_split_bytes=%zu: expected more than %d", split,
                        SK_MIDDLE_BYTES);
    }
    double share = params->garbage_collection_threshold;
    if (!(share >= 0.0 && share < 1.0)) {
        return sk__fail(SK_INVALID, "pool: garbage_collection_threshold=%g: expected 0 to below 1",
                        share);
    }
    for (size_t i = 0; i < SK_ROUNDUP_COUNT; i++) {
        uint32_t divisions = params->roundup_divisions[i];
        if ((divisions & (divisions - 1)) != 0) { /* 0 has no bit to clear */
            return sk__fail(SK_INVALID, "pool: roundup_divisions[%zu]=%u: expected a power of 2", i,
                            divisions);
        }
    }
    return SK_OK;
}

static void params_apply(sk_pool *pool, const sk_pool_params *params) {
    pool->budget_bytes = budget_or_none(params->budget_bytes);
    pool->collection_share = params->garbage_collection_threshold;
    memcpy(pool->roundup_divisions, params->roundup_divisions, sizeof pool->roundup_divisions);
    pool->max_split_bytes = SIZE_MAX;
    if (pool->granule_bytes == 0 && params->max_split_bytes != 0) {
        pool->max_split_bytes = sk__round_down(params->max_split_bytes, SK_ROUND_BYTES);
    }
    bool unlimited = pool->max_split_bytes == SIZE_MAX;
    pool->stats.max_split_size = unlimited ? -1 : (int64_t)pool->max_split_bytes;
    pool->stats.expandable_segments = pool->granule_bytes != 0;
}

sk_status sk_pool_create(sk_backend *backend, const sk_pool_params *params, sk_pool **out) {
    if (backend == NULL || params == NULL || out == NULL) {
        return sk__fail(SK_INVALID,
                        "pool: expected a backend, parameters and a pointer for the result");
    }
    sk_status status = params_check(params);
    if (status != SK_OK) {
        return status;
    }
    bool whole = params->whole_segments || backend->ops.granule_bytes == 0;
    if (whole && !backend->has_segments) {
        return sk__fail(SK_UNSUPPORTED, "pool: backend '%s' has no whole segments",
                        backend->ops.name);
    }
    sk_memory_info memory;
    status = sk_memory_info_get(backend, &memory);
    if (status != SK_OK) {
        return status;
    }
    sk_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "pool: no host memory for its state");
    }
    pool->backend = backend;
    pool->granule_bytes = whole ? 0 : backend->ops.granule_bytes;
    if (pool->granule_bytes != 0) {
        pool->has_aliases = backend->has_aliases;
        pool->span_bytes =
            sk__round_up(sk__min(memory.total_bytes, SK_MAX_BYTES), pool->granule_bytes);
    }
    params_apply(pool, params);
    sk__mutex_init(&pool->lock, SK_RANK_POOL);
    (void)pthread_cond_init(&pool->settled, NULL);
    pool->fork_node = (sk__fork_node){.lock = &pool->lock, .child = pool_after_fork, .owner = pool};
    sk__fork_register(&pool->fork_node);
    sk__backend_hold(backend);
    *out = pool;
    return SK_OK;
}

static SK_NO_ANALYSIS void pool_free(sk_pool *pool) { /* there are no other users any more */
    sk__fork_unregister(&pool->fork_node);
    while (pool->lanes != NULL) {
        sk__lane *lane = pool->lanes;
        pool->lanes = lane->next;
        free(lane);
    }
    sk__lives_free(pool);
    sk__slabs_free(&pool->slabs);
    sk__slabs_free(&pool->granule_slabs);
    sk__sizes_free(pool);
    free(pool->table.slots);
    (void)pthread_cond_destroy(&pool->settled);
    sk__mutex_destroy(&pool->lock);
    sk__backend_drop(pool->backend);
    free(pool);
}

sk_status sk_pool_destroy(sk_pool *pool) {
    if (pool == NULL) {
        return SK_OK;
    }
    sk__lock(&pool->lock);
    sk_status status = sk__settlers_enter(pool);
    if (status == SK_OK && pool->table.count > 0) {
        status = sk__fail(SK_INVALID, "pool: cannot be destroyed: %zu blocks are in use",
                          pool->table.count);
    }
    if (status == SK_OK) {
        status = sk__pending_wait(pool);
    }
    if (status == SK_OK) {
        status = sk__lanes_settle(pool, SK_ARENAS);
    }
    if (status == SK_OK) {
        (void)sk__segment_shrink(pool, SIZE_MAX);
        if (pool->reserved_bytes > 0) {
            status = SK_BACKEND_FAILED; /* with the backend's text; the pool stays as it is */
        } else {
            sk__segments_free(pool);
        }
    }
    sk__settlers_leave(pool);
    sk__unlock(&pool->lock);
    if (status == SK_OK) {
        pool_free(pool);
    }
    return status;
}

/* ---- taking ---------------------------------------------------------------------------------- */

sk__block *sk__fit(const sk_pool *pool, const sk__freelist *list, const sk__request *request) {
    sk__block *block = sk__freelist_best(list, request->nbytes);
    if (block == NULL || block->nbytes <= pool->max_split_bytes) {
        return block;
    }
    /* A block above the limit stays whole, so it may be only slightly larger. */
    bool serves = request->nbytes > pool->max_split_bytes &&
                  block->nbytes - request->nbytes < SK_MIDDLE_BYTES;
    return serves ? block : NULL;
}

/* Return the address in a free block for a request. A large request of whole granules begins at a
 * granule if possible, so that the free memory beside it is whole granules, too, which can move. */
static uintptr_t address_in(const sk_pool *pool, const sk__block *block, const sk__request *request)
    SK_REQUIRES(pool->lock) {
    size_t unit = sk__max(pool->granule_bytes, SK_COMMIT_BYTES);
    if (pool->granule_bytes == 0 || request->nbytes % unit != 0) {
        return block->address;
    }
    uintptr_t start = sk__round_up(block->address, unit);
    return start + request->nbytes <= block->address + block->nbytes ? start : block->address;
}

sk__block *sk__block_serve(sk_pool *pool, sk__block *block, const sk__request *request) {
    sk_assert(block->nbytes >= request->nbytes);
    size_t rest = block->nbytes - request->nbytes;
    /* A whole large segment keeps small rests: they are too small to use, and split it forever. */
    bool keep =
        pool->granule_bytes == 0 && block->segment->arena == SK_LARGE && rest <= SK_SMALL_BYTES;
    if (keep || block->nbytes > pool->max_split_bytes) {
        sk__block_hold(pool, block);
        return block;
    }
    return sk__block_take(pool, block, address_in(pool, block, request), request->nbytes);
}

/* Return a free block of another arena; NULL: none fits. */
static sk__block *fit_elsewhere(const sk_pool *pool, const sk__request *request)
    SK_REQUIRES(pool->lock) {
    sk__block *block = NULL;
    /* Without a layout nothing is in the way. Without lives, only those noted before left memory.
     */
    bool is_free = request->may_squat || pool->lives.stats.height_bytes == 0;
    int first = pool->lives.mode != SK_LIVES_OFF ? SK_SMALL : SK_ACTIVATIONS;
    int arenas = is_free ? SK_ARENAS : SK_PLANNED;
    for (int arena = first; arena < arenas && block == NULL; arena++) {
        block = sk__fit(pool, &request->lane->free[arena], request);
    }
    return block;
}

/* Serve from the place that is planned for the request, or where it was served before. NULL: there
 * is none, or it is not free. */
static sk__block *placed_take(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    sk__block *block = sk__is_planned(pool, request) ? sk__planned_take(pool, request) : NULL;
    bool places = block == NULL && sk__has_place(pool, request) &&
                  sk__records_reserve(pool, SK_RECORDS_PER_TAKE) == SK_OK;
    return places ? sk__place_take(pool, request) : block;
}

/* Serve from the free lists, or by growing. Needs SK_RECORDS_PER_TAKE. */
static sk_status listed_take(sk_pool *pool, const sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock) {
    sk__block *block = sk__fit(pool, &request->lane->free[request->arena], request);
    sk_status status = SK_OK;
    bool has_grown = false;
    if (block == NULL) {
        status = sk__segment_grow(pool, request);
        has_grown = status == SK_OK;
        block = sk__is_memory_failure(status)
                    ? fit_elsewhere(pool, request)
                    : sk__fit(pool, &request->lane->free[request->arena], request);
    }
    if (block == NULL) {
        return status != SK_OK
                   ? status
                   : sk__fail(SK_CORRUPT, "pool: grown memory has no room for %zu bytes",
                              request->nbytes);
    }
    size_t found_bytes = block->nbytes;
    block = sk__block_serve(pool, block, request);
    pool->stats.num_splits += !has_grown && block->nbytes < found_bytes;
    sk_assert(block->lane == request->lane && block->nbytes >= request->nbytes);
    sk_assert(block->uses == NULL && block->prev == NULL && block->next == NULL);
    *out = block;
    return SK_OK;
}

/* Whether the request needs memory made: its planned place needs some, or no free block of the
 * stream fits. */
static bool is_lacking(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    if (pool->pending != NULL) {
        sk__pending_poll(pool, false);
    }
    if (sk__is_planned(pool, request) && sk__planned_is_ready(pool, request)) {
        return false;
    }
    return (sk__is_planned(pool, request) && sk__planned_is_open(pool, request)) ||
           sk__fit(pool, &request->lane->free[request->arena], request) == NULL;
}

sk_status sk__acquire(sk_pool *pool, const sk__request *request, sk__block **out) {
    sk_status status = SK_OK;
    if (pool->collection_share > 0.0 && is_lacking(pool, request)) {
        status = sk__collect(pool); /* may release the lock: look everything up again */
    }
    if (status != SK_OK) {
        return status;
    }
    sk__block *placed = placed_take(pool, request);
    if (placed != NULL) {
        *out = placed;
        return SK_OK;
    }
    status = sk__records_reserve(pool, SK_RECORDS_PER_TAKE);
    return status == SK_OK ? listed_take(pool, request, out) : status;
}

static sk_status take_locked(sk_pool *pool, const sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock) {
    if (pool->pending != NULL) {
        sk__pending_poll(pool, false);
    }
    sk_status status = sk__acquire(pool, request, out);
    if (sk__is_memory_failure(status)) {
        status = sk__reclaim(pool, request, out);
    }
    if (status != SK_OK) {
        return status;
    }
    status = sk__table_reserve(&pool->table);
    if (status != SK_OK) {
        sk__block_cache(pool, *out);
        return status;
    }
    sk__block *block = *out;
    sk_assert(pool->reserved_bytes <= pool->budget_bytes);
    /* Whatever succeeds sets it. NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    block->state = SK_IN_USE;
    block->requested_bytes = request->requested_bytes;
    block->tag = thread_tag;
    block->step = pool->steps;
    bool is_planned = block->segment->arena == SK_PLANNED;
    if (!is_planned && sk__has_place(pool, request)) {
        sk__place_note(pool, request, block->address);
    }
    sk__table_add(&pool->table, block);
    sk__stats_take(pool, block);
    if (pool->lives.stats.height_bytes > 0) {
        sk__layout_count(pool, request, block);
    }
    if (sk__is_recorded(pool)) {
        sk__block_note(pool, SK_RING_TAKE, block);
    }
    return SK_OK;
}

/* Return the callback for making memory; NULL: there is none, or a free block fits. */
static sk_making_fn making_of(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    bool is_told = pool->making != NULL && making_for != pool && !sk__is_tentative();
    return is_told && is_lacking(pool, request) ? pool->making : NULL;
}

static bool needs_settle(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    return pool->settle != NULL && !sk__is_tentative() && is_lacking(pool, request);
}

/* Return the size of the block for a request. Its power of two is split into divisions, and the
 * size is rounded up to the end of one, where divisions are larger than the usual rounding. */
static size_t block_bytes(const sk_pool *pool, size_t nbytes) {
    size_t log = (size_t)(SK_WORD_BITS - 1 - __builtin_clzll(nbytes));
    size_t interval = log > SK_ROUNDUP_LOG ? log - SK_ROUNDUP_LOG : 0;
    size_t divisions = pool->roundup_divisions[sk__min(interval, SK_ROUNDUP_COUNT - 1)];
    if (divisions > 1 && nbytes > SK_ROUND_BYTES * divisions) {
        return sk__round_up(nbytes, ((size_t)1 << log) / divisions);
    }
    return sk__round_up(nbytes, SK_ROUND_BYTES);
}

/* Call the owner, without the lock: this thread begins or ends making memory. */
static void making_call(sk_pool *pool, sk_making_fn making, void *context, bool begins)
    SK_REQUIRES(pool->lock) {
    sk__unlock(&pool->lock);
    making(context, begins);
    sk__lock(&pool->lock);
}

/* Serve a request whose lane is known. The lock may be released meanwhile. */
static sk_status request_serve(sk_pool *pool, sk__request *request, sk__block **out)
    SK_REQUIRES(pool->lock) {
    const sk_pool *outer = making_for;
    request->arena = request->nbytes <= SK_SMALL_BYTES ? SK_SMALL : SK_LARGE;
    if (pool->lives.mode != SK_LIVES_OFF) {
        uint32_t tag = sk__lives_tag(pool, thread_tag);
        request->life = sk__life_begin(pool, request, tag);
        request->begun_at = pool->lives.clock;
        request->arena = sk__arena_of(pool, request, tag);
    }
    sk_making_fn making = making_of(pool, request);
    void *context = pool->making_context;
    if (making != NULL) {
        making_for = pool;
        making_call(pool, making, context, true); /* everything is looked up again */
    }
    bool settles = needs_settle(pool, request);
    sk_status status = settles ? sk__settlers_enter(pool) : SK_OK;
    if (status == SK_OK) {
        status = take_locked(pool, request, out);
    }
    if (settles) {
        sk__settlers_leave(pool);
    }
    if (request->life != NULL) {
        sk__life_serve(pool, request, status == SK_OK ? *out : NULL);
    }
    if (making != NULL) {
        making_call(pool, making, context, false);
        making_for = outer;
    }
    return status;
}

sk_status sk_pool_take(sk_pool *pool, size_t nbytes, sk_stream *stream, void **out) {
    if (nbytes == 0 || nbytes > SK_MAX_BYTES) {
        return sk__fail(SK_INVALID, "pool: a block of %zu bytes: expected 1 to %zu", nbytes,
                        SK_MAX_BYTES);
    }
    sk__request request = {
        .nbytes = block_bytes(pool, nbytes + pool->backend->ops.over_read_bytes),
        .requested_bytes = nbytes,
    };
    sk__block *block = NULL;
    sk__lock(&pool->lock);
    sk_status status = sk__lane_of(pool, stream, &request.lane);
    if (status == SK_OK) {
        status = request_serve(pool, &request, &block);
    }
    sk__unlock(&pool->lock);
    if (status == SK_OK) {
        *out = (void *)block->address;
    }
    return status;
}

/* ---- giving ---------------------------------------------------------------------------------- */

/* Free a given block, at once or once the events of its other streams have completed. */
static void block_release(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock) {
    block->given_at = ++block->lane->clock;
    if (block->uses != NULL) {
        sk__pending_add(pool, block);
    } else {
        sk__given_end(pool, block);
    }
}

static sk_status give_locked(sk_pool *pool, uintptr_t address) SK_REQUIRES(pool->lock) {
    sk__block *block = sk__table_find(&pool->table, address);
    if (block == NULL) {
        return sk__fail(SK_INVALID, "pool: no block in use begins at %p", (void *)address);
    }
    sk_assert(block->state == SK_IN_USE && block->lane != NULL);
    bool parks = sk__must_park(pool, block);
    sk_status status = parks ? SK_OK : sk__uses_record(pool, block);
    if (status != SK_OK) {
        return status;
    }
    sk__table_remove(&pool->table, block);
    sk__stats_give(pool, block);
    if (sk__is_recorded(pool)) {
        sk__block_note(pool, SK_RING_GIVE, block);
    }
    if (parks) {
        sk__park(pool, block);
    } else {
        block_release(pool, block);
    }
    return SK_OK;
}

sk_status sk__block_free(sk_pool *pool, sk__block *block) {
    sk_assert(block->state == SK_PENDING && block->next == NULL);
    sk_status status = sk__uses_record(pool, block);
    if (status == SK_OK) {
        block_release(pool, block);
    }
    return status;
}

sk_status sk_pool_give(sk_pool *pool, void *address) {
    sk__lock(&pool->lock);
    sk_status status = give_locked(pool, (uintptr_t)address);
    sk__unlock(&pool->lock);
    return status;
}

/* ---- settings -------------------------------------------------------------------------------- */

/* Wait until all free memory of the arenas below `arenas` may be given back. */
static sk_status trim_begin(sk_pool *pool, int arenas) SK_REQUIRES(pool->lock) {
    sk_status status = sk__settlers_enter(pool);
    if (status == SK_OK) {
        status = sk__pending_wait(pool);
    }
    return status == SK_OK ? sk__lanes_settle(pool, arenas) : status;
}

/* Wait for pending blocks, then give back cached memory until `reserved_bytes` are left. */
static sk_status trim_to(sk_pool *pool, size_t reserved_bytes) SK_REQUIRES(pool->lock) {
    sk_status status = trim_begin(pool, SK_ARENAS);
    if (status == SK_OK && pool->reserved_bytes > reserved_bytes) {
        (void)sk__segment_shrink(pool, pool->reserved_bytes - reserved_bytes);
    }
    sk__settlers_leave(pool);
    return status;
}

sk_status sk_pool_trim(sk_pool *pool) {
    sk__lock(&pool->lock);
    sk_status status = trim_to(pool, 0);
    sk__unlock(&pool->lock);
    return status;
}

sk_status sk_pool_trim_unplanned(sk_pool *pool) {
    sk__lock(&pool->lock);
    sk_status status = trim_begin(pool, SK_PLANNED);
    if (status == SK_OK) {
        sk__segment_shrink_unplanned(pool);
    }
    sk__settlers_leave(pool);
    sk__unlock(&pool->lock);
    return status;
}

sk_status sk_pool_set_budget(sk_pool *pool, size_t budget_bytes) {
    size_t budget = budget_or_none(budget_bytes);
    sk_status status = SK_OK;
    sk__lock(&pool->lock);
    if (pool->reserved_bytes > budget) {
        status = trim_to(pool, budget);
    }
    if (status == SK_OK && pool->reserved_bytes > budget) {
        status = sk__fail(SK_OVER_BUDGET,
                          "pool: a budget of %zu bytes is too small: %zu are still reserved",
                          budget, pool->reserved_bytes);
    }
    if (status == SK_OK) {
        pool->budget_bytes = budget;
    }
    sk__unlock(&pool->lock);
    return status;
}

void sk_pool_set_rescue(sk_pool *pool, sk_rescue_fn rescue, void *context) {
    sk__lock(&pool->lock);
    pool->rescue = rescue;
    pool->rescue_context = context;
    sk__unlock(&pool->lock);
}

void sk_pool_set_making(sk_pool *pool, sk_making_fn making, void *context) {
    sk__lock(&pool->lock);
    pool->making = making;
    pool->making_context = context;
    sk__unlock(&pool->lock);
}

static sk_status set_ring(sk_pool *pool, sk_ring **place, sk_ring *ring, const char *name) {
    sk_status status = SK_OK;
    sk__lock(&pool->lock);
    if (ring != NULL && *place != NULL) {
        status = sk__fail(SK_INVALID, "pool: its %s recorded already", name);
    } else {
        *place = ring;
        atomic_store_explicit(&pool->has_ring, sk__is_recorded(pool), memory_order_relaxed);
    }
    sk__unlock(&pool->lock);
    return status;
}

sk_status sk_pool_set_ring(sk_pool *pool, sk_ring *ring) {
    return set_ring(pool, &pool->ring, ring, "events are");
}

sk_status sk_pool_set_history(sk_pool *pool, sk_ring *ring) {
    return set_ring(pool, &pool->history, ring, "history is");
}

void sk_pool_note(sk_pool *pool, sk_ring_kind kind, uint64_t nbytes) {
    bool step = kind == SK_RING_MARK;
    if (!step && !atomic_load_explicit(&pool->has_ring, memory_order_relaxed)) {
        return;
    }
    sk__lock(&pool->lock);
    if (step) {
        sk__places_mark(pool);
        sk__lives_mark(pool);
    }
    if (sk__is_recorded(pool)) {
        sk__ring_note(pool, kind, nbytes, thread_tag);
    }
    sk__unlock(&pool->lock);
}
