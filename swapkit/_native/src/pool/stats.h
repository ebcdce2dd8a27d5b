/* stats.h - counting blocks and bytes. Inline: each take and give counts them several times.
 *
 * Everything here is guarded by pool->lock. */
#ifndef SWAPKIT_POOL_STATS_H
#define SWAPKIT_POOL_STATS_H

#include "pool/lives.h"
#include "pool/pool.h"

static inline void sk__stat_raise(sk_stat *stat, int64_t amount) {
    sk_assert(amount >= 0);
    stat->current += amount;
    stat->allocated += amount;
    stat->peak = stat->current > stat->peak ? stat->current : stat->peak;
}

static inline void sk__stat_lower(sk_stat *stat, int64_t amount) {
    sk_assert(amount >= 0 && stat->current >= amount);
    stat->current -= amount;
    stat->freed += amount;
}

/* Return the entry of a kind of segment, beside that of all. */
static inline size_t sk__stat_kind(sk__arena arena) { return arena == SK_SMALL ? 1 : 2; }

static inline void sk__stats_raise(sk_stat stats[3], size_t kind, size_t amount) {
    sk__stat_raise(&stats[0], (int64_t)amount);
    sk__stat_raise(&stats[kind], (int64_t)amount);
}

static inline void sk__stats_lower(sk_stat stats[3], size_t kind, size_t amount) {
    sk__stat_lower(&stats[0], (int64_t)amount);
    sk__stat_lower(&stats[kind], (int64_t)amount);
}

static inline void sk__stats_take(sk_pool *pool, const sk__block *block) SK_REQUIRES(pool->lock) {
    sk_pool_stats *stats = &pool->stats;
    size_t kind = sk__stat_kind(block->segment->arena);
    sk__stats_raise(stats->allocation, kind, 1);
    sk__stats_raise(stats->active, kind, 1);
    sk__stats_raise(stats->allocated_bytes, kind, block->nbytes);
    sk__stats_raise(stats->active_bytes, kind, block->nbytes);
    sk__stats_raise(stats->requested_bytes, kind, block->requested_bytes);
}

static inline void sk__stats_give(sk_pool *pool, const sk__block *block) SK_REQUIRES(pool->lock) {
    if ((int64_t)block->requested_bytes > pool->stats.largest_given_bytes) {
        pool->stats.largest_given_bytes = (int64_t)block->requested_bytes;
    }
    sk_pool_stats *stats = &pool->stats;
    size_t kind = sk__stat_kind(block->segment->arena);
    sk__stats_lower(stats->allocation, kind, 1);
    sk__stats_lower(stats->allocated_bytes, kind, block->nbytes);
    sk__stats_lower(stats->requested_bytes, kind, block->requested_bytes);
}

/* Count a block that became reusable: at once when given, or when its events completed. */
static inline void sk__stats_free(sk_pool *pool, const sk__block *block) SK_REQUIRES(pool->lock) {
    size_t kind = sk__stat_kind(block->segment->arena);
    sk__stats_lower(pool->stats.active, kind, 1);
    sk__stats_lower(pool->stats.active_bytes, kind, block->nbytes);
}

/* Free a given block that no other stream uses any more. */
static inline void sk__given_end(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock) {
    sk__stats_free(pool, block);
    if (pool->history != NULL) {
        sk__block_note(pool, SK_RING_FREE, block);
    }
    if (block->life != NULL) {
        sk__life_end(pool, block);
    }
    sk__block_cache(pool, block);
}

/* Count `nbytes` that are free now: a block, less those that it joined. */
static inline void sk__stats_list(sk_pool *pool, sk__arena arena, size_t nbytes, size_t joined)
    SK_REQUIRES(pool->lock) {
    size_t kind = sk__stat_kind(arena);
    if (joined == 0) {
        sk__stats_raise(pool->stats.inactive_split, kind, 1);
    } else {
        sk__stats_lower(pool->stats.inactive_split, kind, joined - 1);
    }
    sk__stats_raise(pool->stats.inactive_split_bytes, kind, nbytes);
}

/* Count `nbytes` of a free block that are not free any more, with the number of parts left. */
static inline void sk__stats_unlist(sk_pool *pool, sk__arena arena, size_t nbytes, size_t parts)
    SK_REQUIRES(pool->lock) {
    size_t kind = sk__stat_kind(arena);
    if (parts == 0) {
        sk__stats_lower(pool->stats.inactive_split, kind, 1);
    } else {
        sk__stats_raise(pool->stats.inactive_split, kind, parts - 1);
    }
    sk__stats_lower(pool->stats.inactive_split_bytes, kind, nbytes);
}

#endif
