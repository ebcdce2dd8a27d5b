/* stats.c - statistics in torch's terms, and the pool's events in its ring and its history. */
#include <string.h>

#include "pool/stats.h"

/* The share of a budget that operators may need while a storage comes back ahead of its use. */
#define SPARE_SHARE 64

static void note(sk_pool *pool, sk_ring *ring, sk_ring_event event) SK_REQUIRES(pool->lock) {
    event.in_use_bytes = (uint64_t)pool->stats.allocated_bytes[0].current;
    event.reserved_bytes = pool->reserved_bytes;
    if (ring != NULL) {
        sk__ring_add(ring, event);
    }
}

void sk__ring_note(sk_pool *pool, sk_ring_kind kind, uint64_t nbytes, uint32_t tag) {
    sk_ring_event event = {.nbytes = nbytes, .kind = kind, .tag = tag};
    note(pool, pool->ring, event);
    note(pool, pool->history, event);
}

void sk__block_note(sk_pool *pool, sk_ring_kind kind, const sk__block *block) {
    sk_assert(block->lane != NULL && block->nbytes > 0);
    sk_assert(kind == SK_RING_TAKE || kind == SK_RING_GIVE || kind == SK_RING_FREE);
    sk_ring_event event = {
        .nbytes = block->nbytes,
        .requested_bytes = block->requested_bytes,
        .address = block->address,
        .stream = (uintptr_t)block->lane->stream,
        .kind = kind,
        .tag = block->tag,
    };
    if (kind != SK_RING_FREE) {
        note(pool, pool->ring, event);
    }
    note(pool, pool->history, event);
}

static void memory_note(sk_pool *pool, sk_ring_kind kind, uintptr_t address, size_t nbytes)
    SK_REQUIRES(pool->lock) {
    sk_assert(address % SK_ROUND_BYTES == 0 && nbytes > 0);
    note(pool, pool->history, (sk_ring_event){.nbytes = nbytes, .address = address, .kind = kind});
}

void sk__committed_change(sk_pool *pool, sk__segment *segment, uintptr_t address, size_t nbytes,
                          bool growing) {
    bool was_empty = segment->committed_bytes == 0;
    sk_assert(growing || nbytes <= segment->committed_bytes);
    segment->committed_bytes += growing ? nbytes : -nbytes;
    size_t kind = sk__stat_kind(segment->arena);
    size_t segments = was_empty != (segment->committed_bytes == 0) ? 1 : 0;
    if (growing) {
        sk__stats_raise(pool->stats.reserved_bytes, kind, nbytes);
        sk__stats_raise(pool->stats.segment, kind, segments);
    } else {
        sk__stats_lower(pool->stats.reserved_bytes, kind, nbytes);
        sk__stats_lower(pool->stats.segment, kind, segments);
    }
    if (pool->history != NULL) {
        memory_note(pool, growing ? SK_RING_MAP : SK_RING_UNMAP, address, nbytes);
    }
}

bool sk_pool_has_room(sk_pool *pool, size_t nbytes, bool spares) {
    sk__lock(&pool->lock);
    size_t budget_bytes = pool->budget_bytes;
    size_t in_use_bytes = (size_t)pool->stats.allocated_bytes[0].current;
    sk__unlock(&pool->lock);
    size_t limit_bytes = budget_bytes - (spares ? budget_bytes / SPARE_SHARE : 0);
    return budget_bytes == SIZE_MAX ||
           (in_use_bytes <= limit_bytes && nbytes <= limit_bytes - in_use_bytes);
}

void sk_pool_stats_get(sk_pool *pool, sk_pool_stats *out) {
    sk__lock(&pool->lock);
    *out = pool->stats;
    out->budget_bytes = pool->budget_bytes == SIZE_MAX ? 0 : pool->budget_bytes;
    sk__unlock(&pool->lock);
}

static void stats_each(sk_pool *pool, void (*change)(sk_stat *stat)) SK_REQUIRES(pool->lock) {
    sk_pool_stats *stats = &pool->stats;
    sk_stat *const all[] = {
        stats->allocation,      stats->segment,
        stats->active,          stats->inactive_split,
        stats->allocated_bytes, stats->reserved_bytes,
        stats->active_bytes,    stats->inactive_split_bytes,
        stats->requested_bytes,
    };
    const int kinds = 3;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        for (int kind = 0; kind < kinds; kind++) {
            change(&all[i][kind]);
        }
    }
}

static void peak_reset(sk_stat *stat) { stat->peak = stat->current; }

static void accumulated_reset(sk_stat *stat) { stat->allocated = stat->freed = 0; }

void sk_pool_stats_reset_peak(sk_pool *pool) {
    sk__lock(&pool->lock);
    stats_each(pool, peak_reset);
    sk__unlock(&pool->lock);
}

void sk_pool_stats_reset_accumulated(sk_pool *pool) {
    sk__lock(&pool->lock);
    sk_pool_stats *stats = &pool->stats;
    stats_each(pool, accumulated_reset);
    stats->num_alloc_retries = stats->num_ooms = stats->num_sync_all_streams = 0;
    stats->num_device_alloc = stats->num_device_free = 0;
    stats->num_rescues = stats->rescued_bytes = 0;
    stats->num_garbage_collections = stats->garbage_collected_bytes = 0;
    stats->moved_bytes = stats->moving_ns = 0;
    stats->maps = stats->unmaps = 0;
    stats->alias_failures = stats->num_settles = stats->largest_given_bytes = 0;
    stats->num_splits = 0;
    sk__unlock(&pool->lock);
}

size_t sk_pool_peak_take(sk_pool *pool) {
    sk__lock(&pool->lock);
    size_t peak = pool->peak_bytes;
    sk_assert(peak >= pool->reserved_bytes);
    pool->peak_bytes = pool->reserved_bytes;
    sk__unlock(&pool->lock);
    return peak;
}
