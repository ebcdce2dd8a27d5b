/* test_check.c - sk_pool_check() can fail: every invariant is broken once, and found, by its text.
 *
 * The only test that knows the pool's structures. Each case changes one field of a sound pool,
 * looks at what the walk says, and changes it back.
 */
#include <string.h>

#include "fixture.h"
#include "pool/freelist.h"

enum { HOLE_BYTES = 4 * KIB };

/* In use, free, in use, free, in use, then free; the free ones in the middle share a bin. Behind
 * them what is not committed, if the segment is a range. */
typedef struct anatomy {
    fixture f;
    void *taken[3];
    sk__segment *segment;
    sk__lane *lane;
    sk__block *first, *hole, *middle, *other_hole, *last, *rest;
} anatomy;

static anatomy anatomy_open(bool whole) {
    anatomy made = {.f = fixture_open(64 * MIB, whole)};
    void *blocks[5];
    for (int i = 0; i < 5; i++) {
        blocks[i] = take(&made.f, HOLE_BYTES, NULL);
    }
    give(&made.f, blocks[1]);
    give(&made.f, blocks[3]);
    for (int i = 0; i < 3; i++) {
        made.taken[i] = blocks[(ptrdiff_t)2 * i];
    }
    made.segment = made.f.pool->segments;
    made.lane = made.f.pool->lanes;
    made.first = made.segment->first;
    made.hole = made.first->right;
    made.middle = made.hole->right;
    made.other_hole = made.middle->right;
    made.last = made.other_hole->right;
    made.rest = made.last->right;
    CHECK_OK(sk_pool_check(made.f.pool));
    return made;
}

static void anatomy_close(anatomy *a) {
    CHECK_OK(sk_pool_check(a->f.pool));
    for (int i = 0; i < 3; i++) {
        give(&a->f, a->taken[i]);
    }
    fixture_close(&a->f);
}

static void check_finds(anatomy *a, void *field, const void *value, size_t nbytes,
                        const char *text) {
    unsigned char saved[sizeof(uint64_t)];
    CHECK(nbytes <= sizeof saved);
    memcpy(saved, field, nbytes);
    memcpy(field, value, nbytes);
    CHECK_STATUS(SK_CORRUPT, sk_pool_check(a->f.pool));
    CHECK_CONTAINS(sk_error_text(), text);
    memcpy(field, saved, nbytes);
    CHECK_OK(sk_pool_check(a->f.pool));
}

#define FINDS(field, wrong, text)                                                                  \
    do {                                                                                           \
        __typeof__(field) value_ = (wrong);                                                        \
        check_finds(&a, &(field), &value_, sizeof value_, (text));                                 \
    } while (0)

SK_TEST(check, test_check_when_a_block_is_wrong_then_found) {
    anatomy a = anatomy_open(false);
    FINDS(a.hole->nbytes, 0, "is empty");
    FINDS(a.hole->left, NULL, "do not agree");
    FINDS(a.first->nbytes, HOLE_BYTES + ROUNDING, "a gap after");
    FINDS(a.middle->state, SK_CACHED, "not merged");
    FINDS(a.first->lane, NULL, "belongs to no stream");
    FINDS(a.first->requested_bytes, HOLE_BYTES + 1, "smaller than requested");
    FINDS(a.middle->segment, NULL, "is lost");
    CHECK_EQUAL(SK_VACANT, a.rest->right->state);
    FINDS(a.rest->right->nbytes, a.rest->right->nbytes - ROUNDING, "not made of granules");
    FINDS(a.rest->right->address, a.rest->right->address + ROUNDING, "a gap after");
    anatomy_close(&a);
    a = anatomy_open(true);
    FINDS(a.rest->nbytes, a.rest->nbytes - 1, "an odd size");
    anatomy_close(&a);
}

SK_TEST(check, test_check_when_a_segment_is_wrong_then_found) {
    anatomy a = anatomy_open(false);
    FINDS(a.segment->address, a.segment->address + ROUNDING, "does not begin");
    FINDS(a.segment->first->left, a.middle, "does not begin");
    FINDS(a.segment->nbytes, a.segment->nbytes + GRANULE, "do not tile");
    FINDS(a.segment->committed_bytes, a.segment->committed_bytes + GRANULE, "committed bytes");
    FINDS(a.segment->arena, SK_LARGE, "in a wrong arena");
    anatomy_close(&a);
}

SK_TEST(check, test_check_when_a_list_is_wrong_then_found) {
    anatomy a = anatomy_open(false);
    sk__freelist *list = &a.lane->free[SK_SMALL];
    size_t bin = sk__bin_of(HOLE_BYTES);
    sk__block *head = list->bins[bin];
    CHECK(head != NULL && head->next != NULL);
    sk__lane stranger = {0};
    FINDS(list->filled[0], list->filled[0] ^ 1, "the bitmap is wrong");
    FINDS(list->bins[bin], NULL, "the bitmap is wrong");
    FINDS(a.hole->lane, &stranger, "in a wrong list");
    FINDS(list->bins[bin], a.rest, "in a wrong bin");
    FINDS(head->next->prev, NULL, "the list breaks");
    FINDS(head->next, NULL, "are listed");
    FINDS(a.lane->synced, a.lane->clock + 1, "synced past its clock");
    FINDS(a.f.pool->vacant[SK_SMALL], a.first, "is listed as vacant");
    FINDS(a.f.pool->vacant[SK_SMALL], NULL, "are vacant");
    anatomy_close(&a);
}

SK_TEST(check, test_check_when_the_table_is_wrong_then_found) {
    anatomy a = anatomy_open(false);
    sk__table *table = &a.f.pool->table;
    for (size_t i = 0; i < table->capacity; i++) {
        if (table->slots[i] == a.middle) {
            FINDS(table->slots[i], NULL, "is not in the table");
        }
    }
    FINDS(table->count, table->count + 1, "in the table");
    anatomy_close(&a);
}

SK_TEST(check, test_check_when_the_figures_are_wrong_then_found) {
    anatomy a = anatomy_open(false);
    sk_pool *pool = a.f.pool;
    FINDS(pool->reserved_bytes, pool->reserved_bytes + 1, "are reserved");
    FINDS(pool->budget_bytes, 1, "the budget is 1");
    FINDS(pool->stats.allocated_bytes[0].current, 1, "bytes in use are wrong");
    FINDS(pool->stats.inactive_split_bytes[0].current, 1, "cached bytes are wrong");
    FINDS(pool->stats.reserved_bytes[0].current, 1, "reserved bytes are wrong");
    anatomy_close(&a);
}
