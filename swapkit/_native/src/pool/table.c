/* table.c - growing the table of addresses. */
#include "pool/table.h"

#include <stdlib.h>

enum { FIRST_SLOTS = 1024 };

sk_status sk__table_grow(sk__table *table) {
    size_t capacity = table->capacity == 0 ? FIRST_SLOTS : 2 * table->capacity;
    sk__table grown = {.slots = calloc(capacity, sizeof(sk__block *)), .capacity = capacity};
    if (grown.slots == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "pool: no host memory for %zu addresses", capacity);
    }
    for (size_t i = 0; i < table->capacity; i++) {
        if (table->slots[i] != NULL) {
            sk__table_add(&grown, table->slots[i]);
        }
    }
    sk_assert(grown.count == table->count);
    free(table->slots);
    *table = grown;
    return SK_OK;
}
