/* table.c - sorted tables of ranges. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

bool sim_range_contains(const sim_range *range, uintptr_t base, size_t size) {
    return base >= range->base && size <= range->size && base - range->base <= range->size - size;
}

bool sim_range_overlaps(const sim_range *range, uintptr_t base, size_t size) {
    return base < range->base + range->size && range->base < base + size;
}

size_t sim_table_first(const sim_table *table, uintptr_t address) {
    size_t low = 0;
    size_t high = table->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table->items[middle]->base + table->items[middle]->size > address) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

void *sim_table_find(const sim_table *table, uintptr_t address) {
    size_t index = sim_table_first(table, address);
    if (index == table->count || table->items[index]->base > address) {
        return NULL;
    }
    return table->items[index];
}

void *sim_table_at(const sim_table *table, uintptr_t address) {
    sim_range *range = sim_table_find(table, address);
    return range != NULL && range->base == address ? range : NULL;
}

bool sim_table_overlaps(const sim_table *table, uintptr_t base, size_t size) {
    size_t index = sim_table_first(table, base);
    return index < table->count && sim_range_overlaps(table->items[index], base, size);
}

bool sim_table_insert(sim_table *table, sim_range *range) {
    if (table->count == table->capacity) {
        size_t capacity = table->capacity == 0 ? 64 : 2 * table->capacity;
        sim_range **items = realloc(table->items, capacity * sizeof(sim_range *));
        if (items == NULL) {
            return false;
        }
        table->items = items;
        table->capacity = capacity;
    }
    size_t index = sim_table_first(table, range->base);
    sim_range **place = table->items + index;
    memmove(place + 1, place, (table->count - index) * sizeof *place);
    *place = range;
    table->count++;
    return true;
}

void sim_table_remove(sim_table *table, const sim_range *range) {
    size_t index = sim_table_first(table, range->base);
    sim_range **place = table->items + index;
    table->count--;
    memmove(place, place + 1, (table->count - index) * sizeof *place);
    if (table->count == 0) {
        free(table->items);
        *table = (sim_table){0};
    }
}

size_t sim_table_bytes(const sim_table *table) {
    size_t bytes = 0;
    for (size_t i = 0; i < table->count; i++) {
        bytes += table->items[i]->size;
    }
    return bytes;
}
