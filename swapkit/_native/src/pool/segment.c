/* segment.c - memory from and to the backend.
 *
 * With virtual memory a segment is a wide range of addresses in which granules are committed where
 * a request needs them. Free granules move where memory is wanted, and are decommitted where the
 * device wants memory, so free memory can serve any request, wherever it lies. Without virtual
 * memory, segments are whole and are given back only when no block in them is in use. */
#include <stdlib.h>

#include "pool/alias.h"
#include "pool/freelist.h"
#include "pool/lives.h"
#include "pool/stats.h"

enum { ROOM_SHARE = 4 }; /* of a limited address space, for a range of one arena */

/* Bytes that may still be reserved. */
static size_t budget_room(const sk_pool *pool) SK_REQUIRES(pool->lock) {
    return pool->budget_bytes - sk__min(pool->reserved_bytes, pool->budget_bytes);
}

static sk_status budget_check(const sk_pool *pool, size_t nbytes) SK_REQUIRES(pool->lock) {
    if (nbytes > budget_room(pool)) {
        return sk__fail(SK_OVER_BUDGET,
                        "pool: %zu bytes more would exceed the budget of %zu (%zu reserved)",
                        nbytes, pool->budget_bytes, pool->reserved_bytes);
    }
    return SK_OK;
}

static void reserved_change(sk_pool *pool, sk__segment *segment, uintptr_t address, size_t nbytes,
                            bool growing) SK_REQUIRES(pool->lock) {
    if (growing) {
        pool->reserved_bytes += nbytes;
        pool->peak_bytes = sk__max(pool->peak_bytes, pool->reserved_bytes);
        pool->stats.num_device_alloc++;
    } else {
        sk_assert(nbytes <= pool->reserved_bytes);
        pool->reserved_bytes -= nbytes;
        pool->stats.num_device_free++;
    }
    sk_assert(pool->reserved_bytes <= pool->budget_bytes || !growing);
    sk__committed_change(pool, segment, address, nbytes, growing);
}

/* Add a segment with one block over all of it, in no list yet. */
static sk__block *segment_add(sk_pool *pool, sk__segment *segment, void *address, size_t nbytes,
                              sk__arena arena) SK_REQUIRES(pool->lock) {
    sk__block *block = sk__block_new(pool);
    sk_assert((uintptr_t)address % SK_ROUND_BYTES == 0 && nbytes % SK_ROUND_BYTES == 0);
    *segment = (sk__segment){
        .next = pool->segments,
        .address = (uintptr_t)address,
        .nbytes = nbytes,
        .arena = arena,
        .first = block,
    };
    *block = (sk__block){.address = (uintptr_t)address, .nbytes = nbytes, .segment = segment};
    pool->segments = segment;
    return block;
}

/* Undo segment_add, and give the addresses back. */
static void segment_remove(sk_pool *pool, sk__segment *segment) SK_REQUIRES(pool->lock) {
    sk_backend *backend = pool->backend;
    sk_assert(pool->segments == segment && segment->committed_bytes == 0);
    pool->segments = segment->next;
    sk__block_recycle(pool, segment->first);
    sk__ignore(
        backend->ops.range_release(backend->self, (void *)segment->address, segment->nbytes));
    sk__starts_close(segment);
    free(segment);
}

sk__segment *sk__segment_find(const sk_pool *pool, uintptr_t address) {
    sk__segment *segment = pool->segments;
    while (segment != NULL &&
           !(address >= segment->address && address - segment->address < segment->nbytes)) {
        segment = segment->next;
    }
    return segment;
}

static sk__segment *segment_record(void) {
    sk__segment *segment = malloc(sizeof *segment);
    if (segment == NULL) {
        (void)sk__fail(SK_OUT_OF_HOST_MEMORY, "pool: no host memory for a segment record");
    }
    return segment;
}

/* ---- virtual memory -------------------------------------------------------------------------- */

static size_t cached_bytes(const sk__block *block, const sk__lane *lane) {
    bool usable = block != NULL && block->state == SK_CACHED && block->lane == lane;
    return usable ? block->nbytes : 0;
}

/* Return the bytes to commit at the start of `vacant` so that it forms one piece of `nbytes` with
 * the lane's free neighbours; SIZE_MAX if that is not possible. */
static size_t commit_needed(const sk_pool *pool, const sk__block *vacant,
                            const sk__request *request, bool gathering) SK_REQUIRES(pool->lock) {
    size_t left = cached_bytes(vacant->left, request->lane);
    size_t right = cached_bytes(vacant->right, request->lane);
    sk_assert(vacant->state == SK_VACANT && vacant->segment->arena == request->arena);
    sk_assert(left < request->nbytes && right < request->nbytes);
    size_t needed = sk__round_up(request->nbytes - left, pool->granule_bytes);
    if (needed <= vacant->nbytes) {
        return needed;
    }
    return !gathering && left + vacant->nbytes + right >= request->nbytes ? vacant->nbytes
                                                                          : SIZE_MAX;
}

/* Return the vacant block that needs the fewest bytes committed; on a tie the smallest. */
static sk__block *vacant_best(const sk_pool *pool, const sk__request *request, bool gathering,
                              size_t *needed) SK_REQUIRES(pool->lock) {
    sk__block *best = NULL;
    size_t best_needed = SIZE_MAX;
    for (sk__block *block = pool->vacant[request->arena]; block != NULL; block = block->next) {
        size_t now = commit_needed(pool, block, request, gathering);
        bool better = now < best_needed ||
                      (now == best_needed && best != NULL && block->nbytes < best->nbytes);
        if (now != SIZE_MAX && better) {
            best = block;
            best_needed = now;
        }
    }
    *needed = best_needed;
    return best;
}

sk_status sk__range_add(sk_pool *pool, size_t nbytes, sk__arena arena) {
    sk_backend *backend = pool->backend;
    sk__segment *segment = segment_record();
    if (segment == NULL) {
        return SK_OUT_OF_HOST_MEMORY;
    }
    size_t least = sk__round_up(nbytes, pool->granule_bytes);
    size_t room = sk__round_down(sk__address_room() / ROOM_SHARE, pool->granule_bytes);
    size_t span = sk__max(least, sk__min(pool->span_bytes, room));
    void *address = NULL;
    sk_status status = backend->ops.range_reserve(backend->self, span, &address);
    while (status != SK_OK && span > least) {
        span = sk__max(least, sk__round_down(span / 2, pool->granule_bytes));
        status = backend->ops.range_reserve(backend->self, span, &address);
    }
    if (status != SK_OK) {
        free(segment);
        return status;
    }
    sk__block *block = segment_add(pool, segment, address, span, arena);
    if (pool->has_aliases || arena == SK_PLANNED) {
        status = sk__starts_open(segment);
    }
    if (status == SK_OK && pool->has_aliases) {
        status = sk__slots_open(pool, segment);
    }
    if (status != SK_OK) {
        segment_remove(pool, segment);
        return status;
    }
    if (segment->starts.firsts != NULL) {
        sk__start_add(block);
    }
    sk__block_vacate(pool, block);
    return SK_OK;
}

/* Small requests come in numbers: commit for several at once if the budget has room. Those that a
 * layout leaves are few, and the rest would stay unused. */
static size_t commit_generous(const sk_pool *pool, const sk__block *vacant, size_t needed)
    SK_REQUIRES(pool->lock) {
    if (pool->lives.stats.height_bytes > 0) {
        return needed;
    }
    size_t wanted = vacant->segment->arena == SK_SMALL ? SK_SMALL_BYTES : SK_COMMIT_BYTES;
    wanted = sk__min(sk__round_up(wanted, pool->granule_bytes), vacant->nbytes);
    sk_assert(needed <= vacant->nbytes && needed % pool->granule_bytes == 0);
    bool room = wanted <= budget_room(pool) / 2;
    return room ? sk__max(needed, wanted) : needed;
}

/* Make a part of a vacant block a free block after memory was mapped. Needs two spare records. */
static void vacant_fill(sk_pool *pool, sk__block *vacant, uintptr_t address, size_t nbytes,
                        sk__lane *lane) SK_REQUIRES(pool->lock) {
    sk_assert(nbytes >= pool->granule_bytes && nbytes <= vacant->nbytes);
    sk__block *filled = sk__idle_cut(pool, vacant, address, nbytes);
    filled->lane = lane;
    sk__block_cache(pool, filled);
}

/* Commit a part of a vacant block; a failure changes nothing. Needs SK_RECORDS_PER_TAKE. */
static sk_status vacant_commit(sk_pool *pool, sk__block *vacant, uintptr_t address, size_t nbytes,
                               sk__lane *lane) SK_REQUIRES(pool->lock) {
    sk_backend *backend = pool->backend;
    sk_status status = budget_check(pool, nbytes);
    if (status == SK_OK && pool->has_aliases) {
        status = sk__granules_reserve(pool, nbytes / pool->granule_bytes);
    }
    if (status == SK_OK) {
        status = backend->ops.range_commit(backend->self, (void *)address, nbytes);
    }
    if (status != SK_OK) {
        return status;
    }
    reserved_change(pool, vacant->segment, address, nbytes, true);
    pool->stats.maps += (int64_t)(nbytes / pool->granule_bytes);
    if (pool->has_aliases) {
        sk__slots_fill(pool, vacant->segment, address, nbytes);
    }
    vacant_fill(pool, vacant, address, nbytes, lane);
    return SK_OK;
}

static sk_status range_grow(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    size_t needed = SIZE_MAX;
    sk__block *vacant = vacant_best(pool, request, false, &needed);
    if (vacant == NULL) {
        sk_status status = sk__range_add(pool, request->nbytes, request->arena);
        if (status != SK_OK) {
            return status;
        }
        vacant = vacant_best(pool, request, false, &needed);
    }
    if (vacant == NULL) {
        return sk__fail(SK_CORRUPT, "pool: a new range has no room for %zu bytes", request->nbytes);
    }
    size_t generous = commit_generous(pool, vacant, needed);
    sk_status status = vacant_commit(pool, vacant, vacant->address, generous, request->lane);
    if (sk__is_memory_failure(status) && generous > needed) {
        status = vacant_commit(pool, vacant, vacant->address, needed, request->lane);
    }
    return status;
}

sk__span sk__span_of(const sk_pool *pool, sk__block *block, size_t nbytes) {
    size_t granule = pool->granule_bytes;
    uintptr_t from = sk__round_up(block->address, granule);
    uintptr_t to = sk__round_down(block->address + block->nbytes, granule);
    size_t amount = sk__min(to - from, sk__round_up(sk__min(nbytes, SK_MAX_BYTES), granule));
    sk_assert(block->state == SK_CACHED);
    sk_assert(amount > 0 && amount % granule == 0 && amount <= to - from);
    bool at_left = block->left != NULL && sk__is_idle(block->left);
    return (sk__span){.block = block, .address = at_left ? from : to - amount, .nbytes = amount};
}

void sk__span_leave(sk_pool *pool, const sk__span *gone, sk__state state) {
    sk__block *leaving = sk__block_carve(pool, gone->block, gone->address, gone->nbytes);
    sk_assert(state == SK_VACANT || state == SK_DORMANT);
    (state == SK_VACANT ? sk__block_vacate : sk__block_lend)(pool, leaving);
}

/* What a search skips: two blocks, and all of a segment; NULL: none. */
typedef struct spared {
    const sk__block *left, *right;
    const sk__segment *segment;
} spared;

/* Return a list's largest free block without outstanding device work that holds a granule. */
static sk__block *list_candidate(const sk_pool *pool, const sk__lane *lane, int arena, spared not)
    SK_REQUIRES(pool->lock) {
    sk__block *block = sk__freelist_next(&lane->free[arena], NULL);
    while (block != NULL) {
        uintptr_t from = sk__round_up(block->address, pool->granule_bytes);
        bool holds = from + pool->granule_bytes <= block->address + block->nbytes;
        bool is_spared = block == not.left || block == not.right || block->segment == not.segment;
        if (holds && !is_spared && block->given_at <= lane->synced) {
            break;
        }
        block = sk__freelist_next(&lane->free[arena], block);
    }
    return block;
}

/* Whether memory is better taken from `block`: its addresses are not of the layout, or it is
 * larger.
 */
static bool is_better(const sk_pool *pool, const sk__block *block, const sk__block *best)
    SK_REQUIRES(pool->lock) {
    const sk__segment *layout = sk__layout_range(pool);
    bool is_planned = block->segment == layout;
    bool was_planned = best->segment == layout;
    return is_planned != was_planned ? was_planned : block->nbytes > best->nbytes;
}

static sk__block *largest_candidate(const sk_pool *pool, spared not) SK_REQUIRES(pool->lock) {
    sk__block *best = NULL;
    for (const sk__lane *lane = pool->lanes; lane != NULL; lane = lane->next) {
        for (int arena = 0; arena < SK_ARENAS; arena++) {
            sk__block *block = list_candidate(pool, lane, arena, not);
            if (block != NULL && (best == NULL || is_better(pool, block, best))) {
                best = block;
            }
        }
    }
    return best;
}

/* Give free memory back, of any segment but `kept`. */
static size_t range_shrink(sk_pool *pool, size_t nbytes, const sk__segment *kept)
    SK_REQUIRES(pool->lock) {
    sk_backend *backend = pool->backend;
    size_t freed = 0;
    while (freed < nbytes) {
        sk__block *block = largest_candidate(pool, (spared){.segment = kept});
        if (block == NULL || sk__records_reserve(pool, SK_RECORDS_PER_TAKE) != SK_OK) {
            break;
        }
        sk__span gone = sk__span_of(pool, block, nbytes - freed);
        if ((pool->has_aliases && sk__aliases_drop(pool, &gone) != SK_OK) ||
            backend->ops.range_decommit(backend->self, (void *)gone.address, gone.nbytes) !=
                SK_OK) {
            break; /* other blocks would only fail the same way */
        }
        reserved_change(pool, block->segment, gone.address, gone.nbytes, false);
        pool->stats.unmaps += (int64_t)(gone.nbytes / pool->granule_bytes);
        if (pool->has_aliases) {
            sk__slots_empty(pool, block->segment, gone.address, gone.nbytes);
        }
        sk__block_hold(pool, gone.block);
        sk__span_leave(pool, &gone, SK_VACANT);
        freed += gone.nbytes;
    }
    sk_assert(freed % pool->granule_bytes == 0);
    return freed;
}

sk_status sk__range_fill(sk_pool *pool, const sk__span *wanted, sk__lane *lane) {
    const sk__segment *segment = wanted->block->segment;
    size_t room = budget_room(pool);
    /* Memory goes back only after a settle, and a tentative thread did none. */
    if (wanted->nbytes > room && !(pool->settle != NULL && sk__is_tentative())) {
        (void)range_shrink(pool, wanted->nbytes - room, NULL);
    }
    sk_status status = sk__records_reserve(pool, SK_RECORDS_PER_TAKE);
    if (status != SK_OK) {
        return status;
    }
    /* What shrank may have become one block with the vacant one. */
    sk__block *vacant = sk__block_covering(segment, wanted->address);
    sk_assert(vacant->state == SK_VACANT);
    sk_assert(vacant->address + vacant->nbytes >= wanted->address + wanted->nbytes);
    return vacant_commit(pool, vacant, wanted->address, wanted->nbytes, lane);
}

/* The result of moving memory together. */
typedef enum gathering {
    GATHERED,
    TOO_LITTLE, /* nothing more is free */
    REFUSED     /* the backend cannot */
} gathering;

/* Move up to `nbytes` of free memory into a vacant block, beside the free memory that serves the
 * request there. */
static gathering range_move(sk_pool *pool, sk__block *vacant, const sk__request *request,
                            size_t nbytes) SK_REQUIRES(pool->lock) {
    sk_backend *backend = pool->backend;
    size_t left = cached_bytes(vacant->left, request->lane);
    bool needs_right = left + vacant->nbytes < request->nbytes;
    spared neighbours = {left > 0 ? vacant->left : NULL, needs_right ? vacant->right : NULL, NULL};
    if (sk__records_reserve(pool, SK_RECORDS_PER_TAKE) != SK_OK) {
        return REFUSED;
    }
    if (pool->has_aliases) {
        size_t total = 0;
        sk__span lent = sk__lender(pool, request, neighbours.left, nbytes, &total);
        if (total < nbytes) {
            return TOO_LITTLE;
        }
        sk_status status = sk__span_map(pool, &lent, vacant, vacant->address, request->lane);
        return status == SK_OK ? GATHERED : REFUSED;
    }
    sk__block *block = largest_candidate(pool, neighbours);
    if (block == NULL) {
        return TOO_LITTLE;
    }
    sk__span gone = sk__span_of(pool, block, nbytes);
    uint64_t begin_ns = sk__now_ns();
    sk_status status = backend->ops.range_move(backend->self, (void *)gone.address,
                                               (void *)vacant->address, gone.nbytes);
    pool->stats.moving_ns += (int64_t)(sk__now_ns() - begin_ns);
    if (status != SK_OK) {
        return REFUSED;
    }
    sk__committed_change(pool, block->segment, gone.address, gone.nbytes, false);
    sk__committed_change(pool, vacant->segment, vacant->address, gone.nbytes, true);
    pool->stats.moved_bytes += (int64_t)gone.nbytes;
    pool->stats.maps += (int64_t)(gone.nbytes / pool->granule_bytes);
    pool->stats.unmaps += (int64_t)(gone.nbytes / pool->granule_bytes);
    sk__block_hold(pool, gone.block);
    vacant_fill(pool, vacant, vacant->address, gone.nbytes, request->lane);
    sk__span_leave(pool, &gone, SK_VACANT);
    return GATHERED;
}

/* Return the vacant block to fill for a request; NULL: there is none, or nothing is needed. */
static sk__block *vacant_wanted(sk_pool *pool, const sk__request *request, size_t *needed)
    SK_REQUIRES(pool->lock) {
    *needed = 0;
    if (sk__fit(pool, &request->lane->free[request->arena], request) != NULL) {
        return NULL;
    }
    /* With aliases a vacant block can hold all of it: the right neighbour is not needed. */
    sk__block *vacant = vacant_best(pool, request, pool->has_aliases, needed);
    bool add = vacant == NULL && pool->has_aliases &&
               sk__records_reserve(pool, SK_RECORDS_PER_TAKE) == SK_OK &&
               sk__range_add(pool, request->nbytes, request->arena) == SK_OK;
    return add ? vacant_best(pool, request, true, needed) : vacant;
}

/* Whether aliases may be made for a request now. */
static bool aliases_are_ready(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    if (!sk__aliases_are_on(pool)) {
        return false;
    }
    sk_status status = sk__aliases_settle(pool, request->nbytes);
    if (status != SK_OK && status != SK_NOT_READY) {
        sk__aliases_failed(pool, status);
    }
    return status == SK_OK;
}

/* Move free memory together until the request fits, or its remaining need has room in the budget.
 * Each move reduces the need. */
static gathering range_gather(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    if (pool->has_aliases && !aliases_are_ready(pool, request)) {
        return REFUSED;
    }
    if (pool->has_aliases && request->arena == SK_SMALL && sk__alias_reopen(pool, request)) {
        return GATHERED;
    }
    size_t room = budget_room(pool);
    size_t needed = 0;
    sk__block *vacant = vacant_wanted(pool, request, &needed);
    /* If there is room, it is the device that has no memory. */
    size_t grown = needed > room ? sk__round_down(room, pool->granule_bytes) : 0;
    gathering result = GATHERED;
    while (vacant != NULL && needed > grown && result == GATHERED) {
        result = range_move(pool, vacant, request, needed - grown);
        vacant = result == GATHERED ? vacant_wanted(pool, request, &needed) : NULL;
    }
    return needed == SIZE_MAX ? REFUSED : result; /* there are no more addresses */
}

/* ---- whole segments -------------------------------------------------------------------------- */

static size_t whole_bytes(const sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    if (request->arena == SK_SMALL) {
        return SK_SEGMENT_BYTES;
    }
    if (request->nbytes < SK_MIDDLE_BYTES / 2) {
        return SK_MIDDLE_BYTES;
    }
    size_t rounded = sk__round_up(request->nbytes, SK_SEGMENT_BYTES);
    /* A segment that must stay whole must not be made for a request that may not have it. */
    bool oversize = request->nbytes > pool->max_split_bytes;
    return oversize ? rounded : sk__min(rounded, pool->max_split_bytes);
}

static sk_status whole_add(sk_pool *pool, const sk__request *request, size_t nbytes)
    SK_REQUIRES(pool->lock) {
    sk_backend *backend = pool->backend;
    sk_status status = budget_check(pool, nbytes);
    if (status != SK_OK) {
        return status;
    }
    sk__segment *segment = segment_record();
    if (segment == NULL) {
        return SK_OUT_OF_HOST_MEMORY;
    }
    void *address = NULL;
    status = backend->ops.memory_alloc(backend->self, nbytes, &address);
    if (status != SK_OK) {
        free(segment);
        return status;
    }
    sk__block *block = segment_add(pool, segment, address, nbytes, request->arena);
    sk_assert(block->nbytes >= request->nbytes);
    reserved_change(pool, segment, segment->address, nbytes, true);
    block->lane = request->lane;
    sk__block_cache(pool, block);
    return SK_OK;
}

static sk_status whole_grow(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock) {
    size_t nbytes = whole_bytes(pool, request);
    sk_status status = whole_add(pool, request, nbytes);
    if (sk__is_memory_failure(status) && nbytes > request->nbytes) {
        status = whole_add(pool, request, request->nbytes);
    }
    return status;
}

static bool segment_is_idle(const sk__segment *segment) {
    const sk__block *block = segment->first;
    return block->right == NULL && block->state == SK_CACHED &&
           block->given_at <= block->lane->synced;
}

static size_t whole_shrink(sk_pool *pool, size_t nbytes) SK_REQUIRES(pool->lock) {
    sk_backend *backend = pool->backend;
    size_t freed = 0;
    sk__segment **link = &pool->segments;
    while (*link != NULL && freed < nbytes) {
        sk__segment *segment = *link;
        bool released = segment_is_idle(segment) &&
                        backend->ops.memory_free(backend->self, (void *)segment->address,
                                                 segment->nbytes) == SK_OK;
        if (!released) {
            link = &segment->next;
            continue;
        }
        sk__block *block = segment->first;
        sk_assert(block->nbytes == segment->nbytes && segment->committed_bytes == block->nbytes);
        sk__block_hold(pool, block);
        reserved_change(pool, segment, segment->address, segment->nbytes, false);
        sk__block_recycle(pool, block);
        freed += segment->nbytes;
        *link = segment->next;
        free(segment);
    }
    return freed;
}

/* ---- both kinds ------------------------------------------------------------------------------ */

size_t sk__segment_bytes(const sk_pool *pool, const sk__request *request) {
    bool whole = pool->granule_bytes == 0;
    return whole ? request->nbytes : sk__round_up(request->nbytes, pool->granule_bytes);
}

sk_status sk__segment_grow(sk_pool *pool, const sk__request *request) {
    if (sk__segment_bytes(pool, request) > pool->budget_bytes) {
        return sk__fail(SK_OVER_BUDGET, "pool: %zu bytes are more than the whole budget of %zu",
                        request->nbytes, pool->budget_bytes);
    }
    return pool->granule_bytes != 0 ? range_grow(pool, request) : whole_grow(pool, request);
}

size_t sk__segment_shrink(sk_pool *pool, size_t nbytes) {
    return pool->granule_bytes != 0 ? range_shrink(pool, nbytes, NULL) : whole_shrink(pool, nbytes);
}

void sk__segment_shrink_unplanned(sk_pool *pool) {
    if (pool->granule_bytes != 0) {
        (void)range_shrink(pool, SIZE_MAX, sk__layout_range(pool));
    }
}

bool sk__segment_make_room(sk_pool *pool, const sk__request *request, bool *looked) {
    gathering gathered = pool->granule_bytes != 0 ? range_gather(pool, request) : REFUSED;
    *looked = false;
    if (gathered == GATHERED) {
        return true;
    }
    /* Memory that is too little to map together is also too little to give back for the budget. If
     * the budget has room, the device may have more of its own to add. */
    bool is_short = sk__segment_bytes(pool, request) > budget_room(pool);
    *looked = gathered == TOO_LITTLE && pool->has_aliases && is_short;
    if (*looked) {
        return false;
    }
    size_t shortage = sk__segment_shortage(pool, request);
    return sk__segment_shrink(pool, shortage) >= shortage;
}

size_t sk__segment_shortage(const sk_pool *pool, const sk__request *request) {
    size_t nbytes = sk__segment_bytes(pool, request);
    size_t room = budget_room(pool);
    return nbytes > room ? nbytes - room : nbytes;
}

void sk__segments_free(sk_pool *pool) {
    sk_backend *backend = pool->backend;
    sk_assert(pool->table.count == 0 && pool->pending == NULL);
    while (pool->segments != NULL) {
        sk__segment *segment = pool->segments;
        void *address = (void *)segment->address;
        pool->segments = segment->next;
        if (pool->granule_bytes != 0) {
            (void)backend->ops.range_release(backend->self, address, segment->nbytes);
        } else {
            (void)backend->ops.memory_free(backend->self, address, segment->nbytes);
        }
        sk__slots_close(segment);
        sk__starts_close(segment);
        free(segment);
    }
}
