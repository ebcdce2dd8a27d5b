/* table.h - blocks in use by address. Inline: each take and each give changes the table.
 *
 * Everything here is guarded by pool->lock. */
#ifndef SWAPKIT_POOL_TABLE_H
#define SWAPKIT_POOL_TABLE_H

#include "pool/pool.h"

/* table.c: make room for one more block. */
sk_status sk__table_grow(sk__table *table);

static inline sk_status sk__table_reserve(sk__table *table) {
    return 2 * (table->count + 1) <= table->capacity ? SK_OK : sk__table_grow(table);
}

static inline size_t sk__table_home(const sk__table *table, uintptr_t address) {
    const uint64_t golden = 0x9E3779B97F4A7C15; /* Fibonacci hashing (Knuth 6.4) */
    uint64_t hash = (uint64_t)(address / SK_ROUND_BYTES) * golden;
    return (size_t)(hash >> 32) & (table->capacity - 1);
}

/* Return the slot of the block that begins at `address`; without one, an empty slot. The table must
 * have slots. */
static inline size_t sk__table_slot(const sk__table *table, uintptr_t address) {
    size_t slot = sk__table_home(table, address);
    while (table->slots[slot] != NULL && table->slots[slot]->address != address) {
        slot = (slot + 1) & (table->capacity - 1);
    }
    return slot;
}

/* Needs a reserve. */
static inline void sk__table_add(sk__table *table, sk__block *block) {
    sk_assert(2 * (table->count + 1) <= table->capacity);
    size_t slot = sk__table_slot(table, block->address);
    sk_assert(table->slots[slot] == NULL);
    table->slots[slot] = block;
    table->count++;
}

/* Return the block that begins at `address`; NULL: there is none. */
static inline sk__block *sk__table_find(const sk__table *table, uintptr_t address) {
    return table->capacity == 0 ? NULL : table->slots[sk__table_slot(table, address)];
}

static inline void sk__table_remove(sk__table *table, const sk__block *block) {
    sk_assert(table->count > 0);
    size_t hole = sk__table_slot(table, block->address);
    sk_assert(table->slots[hole] == block);
    size_t mask = table->capacity - 1;
    /* Close the hole with a later entry of the same run, until the run ends (Knuth 6.4, R). */
    for (size_t slot = (hole + 1) & mask; table->slots[slot] != NULL; slot = (slot + 1) & mask) {
        size_t home = sk__table_home(table, table->slots[slot]->address);
        if (((slot - home) & mask) >= ((slot - hole) & mask)) {
            table->slots[hole] = table->slots[slot];
            hole = slot;
        }
    }
    table->slots[hole] = NULL;
    table->count--;
}

#endif
