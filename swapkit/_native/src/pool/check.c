/* check.c - descriptions of a pool for users, and checks of its invariants. */
#include "pool/alias.h"
#include "pool/freelist.h"
#include "pool/lives.h"
#include "pool/table.h"

/* ---- descriptions ---------------------------------------------------------------------------- */

int sk_pool_owns(sk_pool *pool, const void *address) {
    sk__lock(&pool->lock);
    int owned = sk__segment_find(pool, (uintptr_t)address) != NULL;
    sk__unlock(&pool->lock);
    return owned;
}

static sk_segment_info segment_show(const sk__segment *segment) {
    return (sk_segment_info){.address = segment->address,
                             .nbytes = segment->nbytes,
                             .committed_bytes = segment->committed_bytes,
                             .is_small = segment->arena == SK_SMALL};
}

sk_status sk_pool_segment_at(sk_pool *pool, const void *address, sk_segment_info *out) {
    sk__lock(&pool->lock);
    const sk__segment *segment = sk__segment_find(pool, (uintptr_t)address);
    sk_status status = SK_OK;
    if (segment == NULL) {
        status = sk__fail(SK_INVALID, "pool: %p is not in any of its segments", address);
    } else {
        *out = segment_show(segment);
    }
    sk__unlock(&pool->lock);
    return status;
}

static uint32_t state_shown(sk__state state) {
    switch (state) {
    case SK_IN_USE:
        return SK_BLOCK_IN_USE;
    case SK_PENDING:
        return SK_BLOCK_PENDING;
    default:
        return SK_BLOCK_CACHED;
    }
}

static size_t blocks_show(const sk_pool *pool, sk_block_info *out, size_t capacity)
    SK_REQUIRES(pool->lock) {
    size_t count = 0;
    for (const sk__segment *segment = pool->segments; segment != NULL; segment = segment->next) {
        for (const sk__block *block = segment->first; block != NULL; block = block->right) {
            if (sk__is_idle(block)) {
                continue;
            }
            if (count < capacity) {
                out[count] = (sk_block_info){
                    .address = block->address,
                    .nbytes = block->nbytes,
                    .requested_bytes = block->requested_bytes,
                    .stream = (uintptr_t)block->lane->stream,
                    .age = pool->steps - block->step,
                    .tag = block->tag,
                    .state = state_shown(block->state),
                };
            }
            count++;
        }
    }
    return count;
}

static size_t segments_show(const sk_pool *pool, sk_segment_info *out, size_t capacity)
    SK_REQUIRES(pool->lock) {
    size_t count = 0;
    for (const sk__segment *segment = pool->segments; segment != NULL; segment = segment->next) {
        if (count < capacity) {
            out[count] = segment_show(segment);
        }
        count++;
    }
    return count;
}

size_t sk_pool_blocks(sk_pool *pool, sk_block_info *out, size_t capacity) {
    sk__lock(&pool->lock);
    size_t count = blocks_show(pool, out, capacity);
    sk__unlock(&pool->lock);
    return count;
}

size_t sk_pool_segments(sk_pool *pool, sk_segment_info *out, size_t capacity) {
    sk__lock(&pool->lock);
    size_t count = segments_show(pool, out, capacity);
    sk__unlock(&pool->lock);
    return count;
}

void sk_pool_view_get(sk_pool *pool, sk_pool_view *view) {
    sk__lock(&pool->lock);
    view->block_count = blocks_show(pool, view->blocks, view->most_blocks);
    view->segment_count = segments_show(pool, view->segments, view->most_segments);
    view->event_count = 0;
    view->lost_events = 0;
    if (pool->history != NULL) {
        view->event_count =
            sk__ring_peek(pool->history, view->events, view->most_events, &view->lost_events);
    }
    sk__unlock(&pool->lock);
}

/* ---- soundness ------------------------------------------------------------------------------- */

/* The counts of the walk over all segments. */
typedef struct census {
    size_t blocks[SK_DORMANT + 1];
    size_t bytes[SK_DORMANT + 1];
    size_t aliases;
} census;

#define ENSURE(condition, ...)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            return sk__fail(SK_CORRUPT, "pool: " __VA_ARGS__);                                     \
        }                                                                                          \
    } while (0)

static bool could_merge(const sk__block *left, const sk__block *right) {
    if (sk__is_idle(left) || left->state == SK_CACHED) {
        return left->state == right->state && left->lane == right->lane;
    }
    return false;
}

static sk_status block_check(const sk_pool *pool, const sk__block *block) SK_REQUIRES(pool->lock) {
    void *at = (void *)block->address;
    ENSURE(block->nbytes > 0, "the block at %p is empty", at);
    if (block->right != NULL) {
        ENSURE(block->right->left == block, "neighbours of %p do not agree", at);
        ENSURE(block->address + block->nbytes == block->right->address, "a gap after %p", at);
        ENSURE(!could_merge(block, block->right), "%p and its right neighbour are not merged", at);
    }
    if (sk__is_idle(block)) {
        bool aligned =
            block->address % pool->granule_bytes == 0 && block->nbytes % pool->granule_bytes == 0;
        ENSURE(aligned, "the idle block at %p is not made of granules", at);
    } else {
        ENSURE(block->lane != NULL, "the block at %p belongs to no stream", at);
        ENSURE(block->nbytes % SK_ROUND_BYTES == 0, "the block at %p has an odd size", at);
    }
    bool is_held = block->state == SK_IN_USE || block->state == SK_PENDING;
    ENSURE(block->life == NULL || (is_held && block->life->block == block),
           "the block at %p has the life of another", at);
    if (block->state == SK_IN_USE) {
        ENSURE(sk__table_find(&pool->table, block->address) == block, "%p is not in the table", at);
        ENSURE(block->requested_bytes == 0 ||
                   block->requested_bytes + pool->backend->ops.over_read_bytes <= block->nbytes,
               "%p is smaller than requested", at);
    }
    return SK_OK;
}

/* Whether the mapping of a slot agrees with the block that covers its beginning. */
static sk_status slot_check(const sk_pool *pool, const sk__slot *slot, const sk__block *block,
                            census *count) SK_REQUIRES(pool->lock) {
    void *at = (void *)sk__slot_address(pool, slot);
    const sk__granule *granule = slot->granule;
    bool listed = false;
    for (const sk__slot *each = granule->slots; each != NULL; each = each->next) {
        ENSURE(each->granule == granule, "a slot of another granule is listed at %p", at);
        listed = listed || each == slot;
    }
    ENSURE(listed, "%p is not among the slots of its granule", at);
    ENSURE(block->state != SK_VACANT, "%p is vacant but mapped", at);
    ENSURE((granule->home == slot) == (block->state != SK_DORMANT), "%p is not at home", at);
    ENSURE((granule->home == slot) == (slot->left_at == 0), "%p has a wrong departure time", at);
    count->aliases += granule->home == slot ? 0 : 1;
    return SK_OK;
}

static sk_status slots_check(const sk_pool *pool, const sk__segment *segment, census *count)
    SK_REQUIRES(pool->lock) {
    const size_t granule = pool->granule_bytes;
    const sk__block *covering = segment->first;
    for (size_t i = 0; i < segment->nbytes / granule; i++) {
        uintptr_t address = segment->address + i * granule;
        const sk__slot *slot = &segment->slots[i];
        while (covering->right != NULL && covering->address + covering->nbytes <= address) {
            covering = covering->right;
        }
        ENSURE(slot->granule != NULL || covering->state == SK_VACANT, "%p is not mapped",
               (void *)address);
        sk_status status = slot->granule != NULL ? slot_check(pool, slot, covering, count) : SK_OK;
        if (status != SK_OK) {
            return status;
        }
    }
    return SK_OK;
}

static bool has_bit(const uint64_t *words, size_t index) {
    return (words[index / SK_WORD_BITS] >> (index % SK_WORD_BITS)) & 1;
}

/* Check the index of blocks by address. */
static sk_status starts_check(const sk__segment *segment) {
    const sk__starts *starts = &segment->starts;
    const sk__block *begun = segment->first; /* the first that does not begin before the unit */
    size_t count = (segment->nbytes + SK_START_BYTES - 1) / SK_START_BYTES;
    for (size_t i = 0; i < count; i++) {
        uintptr_t address = segment->address + i * SK_START_BYTES;
        while (begun != NULL && begun->address < address) {
            begun = begun->right;
        }
        bool here = begun != NULL && begun->address < address + SK_START_BYTES;
        ENSURE(starts->firsts[i] == (here ? begun : NULL), "%p has the wrong first block",
               (void *)address);
        ENSURE(has_bit(starts->filled, i) == here, "the index is wrong at %p", (void *)address);
        ENSURE(has_bit(starts->words, i / SK_WORD_BITS) == (starts->filled[i / SK_WORD_BITS] != 0),
               "the index's second level is wrong at %p", (void *)address);
    }
    return SK_OK;
}

static sk_status segment_check(const sk_pool *pool, const sk__segment *segment, census *count)
    SK_REQUIRES(pool->lock) {
    size_t bytes = 0;
    size_t vacant = 0;
    ENSURE(segment->first->address == segment->address && segment->first->left == NULL,
           "the segment at %p does not begin with its first block", (void *)segment->address);
    for (const sk__block *block = segment->first; block != NULL; block = block->right) {
        ENSURE(block->segment == segment, "a block at %p is lost", (void *)block->address);
        sk_status status = block_check(pool, block);
        if (status != SK_OK) {
            return status;
        }
        count->blocks[block->state]++;
        count->bytes[block->state] += block->nbytes;
        bytes += block->nbytes;
        vacant += sk__is_idle(block) ? block->nbytes : 0;
    }
    ENSURE(bytes == segment->nbytes, "blocks do not tile the segment at %p",
           (void *)segment->address);
    ENSURE(bytes - vacant == segment->committed_bytes, "committed bytes of the segment at %p",
           (void *)segment->address);
    sk_status status = segment->starts.firsts != NULL ? starts_check(segment) : SK_OK;
    return status == SK_OK && segment->slots != NULL ? slots_check(pool, segment, count) : status;
}

static sk_status freelist_check(const sk__lane *lane, int arena, size_t *listed) {
    const sk__freelist *list = &lane->free[arena];
    for (size_t bin = 0; bin < SK_BIN_COUNT; bin++) {
        bool filled = (list->filled[bin / SK_WORD_BITS] >> (bin % SK_WORD_BITS)) & 1;
        ENSURE(filled == (list->bins[bin] != NULL), "the bitmap is wrong at bin %zu", bin);
        for (const sk__block *block = list->bins[bin]; block != NULL; block = block->next) {
            void *at = (void *)block->address;
            ENSURE(block->state == SK_CACHED && block->lane == lane, "%p is in a wrong list", at);
            ENSURE(sk__bin_of(block->nbytes) == bin, "%p is in a wrong bin", at);
            ENSURE((int)block->segment->arena == arena, "%p is in a wrong arena", at);
            ENSURE(block->next == NULL || block->next->prev == block, "the list breaks at %p", at);
            (*listed)++;
        }
    }
    return SK_OK;
}

/* Check that departed slots are all aliases, the one that was left first at the front. */
static sk_status departed_check(const sk_pool *pool, size_t aliases) SK_REQUIRES(pool->lock) {
    size_t count = 0;
    const sk__slot *before = NULL;
    for (const sk__slot *slot = pool->departed; slot != NULL; slot = slot->later) {
        bool follows = slot->left_at > (before != NULL ? before->left_at : 0);
        ENSURE(slot->earlier == before && follows && slot->left_at <= pool->departures,
               "the order of departures breaks at %p", (void *)sk__slot_address(pool, slot));
        before = slot;
        count++;
    }
    ENSURE(pool->departing == before, "the end of the order of departures is lost");
    ENSURE(aliases == pool->alias_count && aliases == count, "%zu aliases, %zu counted, %zu left",
           pool->alias_count, aliases, count);
    return SK_OK;
}

static sk_status lists_check(const sk_pool *pool, const census *count) SK_REQUIRES(pool->lock) {
    size_t cached = 0;
    for (const sk__lane *lane = pool->lanes; lane != NULL; lane = lane->next) {
        bool never_behind = lane->synced == UINT64_MAX;
        ENSURE(never_behind || lane->synced <= lane->clock, "a lane is synced past its clock");
        for (int arena = 0; arena < SK_ARENAS; arena++) {
            sk_status status = freelist_check(lane, arena, &cached);
            if (status != SK_OK) {
                return status;
            }
        }
    }
    ENSURE(cached == count->blocks[SK_CACHED], "%zu blocks are free, %zu are listed",
           count->blocks[SK_CACHED], cached);
    size_t vacant = 0;
    size_t dormant = 0;
    for (int arena = 0; arena < SK_ARENAS; arena++) {
        for (const sk__block *block = pool->vacant[arena]; block != NULL; block = block->next) {
            ENSURE(block->state == SK_VACANT, "%p is listed as vacant", (void *)block->address);
            vacant++;
        }
        for (const sk__block *block = pool->dormant[arena]; block != NULL; block = block->next) {
            ENSURE(block->state == SK_DORMANT, "%p is listed as dormant", (void *)block->address);
            dormant++;
        }
    }
    size_t pending = pool->in_transit + pool->lost_blocks;
    for (const sk__block *block = pool->pending; block != NULL; block = block->next) {
        void *at = (void *)block->address;
        ENSURE(block->state == SK_PENDING && block->uses != NULL, "%p is listed as pending", at);
        ENSURE(block->next != NULL ? block->next->prev == block : pool->pending_last == block,
               "the list of pending blocks breaks at %p", at);
        pending++;
    }
    for (const sk__block *block = pool->parked; block != NULL; block = block->next) {
        ENSURE(block->state == SK_PENDING, "%p is parked", (void *)block->address);
        pending++;
    }
    ENSURE(pending == count->blocks[SK_PENDING], "%zu blocks are pending, %zu are accounted for",
           count->blocks[SK_PENDING], pending);
    ENSURE(vacant == count->blocks[SK_VACANT], "%zu blocks are vacant, %zu are listed",
           count->blocks[SK_VACANT], vacant);
    ENSURE(dormant == count->blocks[SK_DORMANT], "%zu blocks are dormant, %zu are listed",
           count->blocks[SK_DORMANT], dormant);
    return departed_check(pool, count->aliases);
}

static sk_status totals_check(const sk_pool *pool, const census *count) SK_REQUIRES(pool->lock) {
    const sk_pool_stats *stats = &pool->stats;
    size_t reserved = count->bytes[SK_IN_USE] + count->bytes[SK_PENDING] + count->bytes[SK_CACHED];
    ENSURE(reserved == pool->reserved_bytes, "%zu bytes are reserved, %zu counted", reserved,
           pool->reserved_bytes);
    ENSURE(pool->reserved_bytes <= pool->budget_bytes, "%zu bytes are reserved, the budget is %zu",
           pool->reserved_bytes, pool->budget_bytes);
    ENSURE(count->blocks[SK_IN_USE] == pool->table.count, "%zu blocks in use, %zu in the table",
           count->blocks[SK_IN_USE], pool->table.count);
    ENSURE(stats->allocated_bytes[0].current == (int64_t)count->bytes[SK_IN_USE],
           "the statistics of bytes in use are wrong");
    ENSURE(stats->inactive_split_bytes[0].current == (int64_t)count->bytes[SK_CACHED],
           "the statistics of cached bytes are wrong");
    ENSURE(stats->reserved_bytes[0].current == (int64_t)pool->reserved_bytes,
           "the statistics of reserved bytes are wrong");
    return SK_OK;
}

static sk_status pool_check(const sk_pool *pool) SK_REQUIRES(pool->lock) {
    census count = {0};
    for (const sk__segment *segment = pool->segments; segment != NULL; segment = segment->next) {
        sk_status status = segment_check(pool, segment, &count);
        if (status != SK_OK) {
            return status;
        }
    }
    sk_status status = lists_check(pool, &count);
    return status == SK_OK ? totals_check(pool, &count) : status;
}

sk_status sk_pool_check(sk_pool *pool) {
    sk__lock(&pool->lock);
    sk_status status = pool_check(pool);
    sk__unlock(&pool->lock);
    return status;
}
