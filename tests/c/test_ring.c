/* test_ring.c - the ring of recorded events: order, figures, overwriting. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

SK_TEST(ring, test_ring_when_blocks_come_and_go_then_events_in_order_with_figures) {
    enum { TAG = 9 };
    fixture f = fixture_open(0, false);
    sk_ring *ring = NULL;
    CHECK_OK(sk_ring_create(64, &ring));
    CHECK_OK(sk_pool_set_ring(f.pool, ring));
    (void)sk_tag_set(TAG);
    void *block = take(&f, 4 * MIB, NULL);
    (void)sk_tag_set(0);
    give(&f, block);
    sk_pool_note(f.pool, SK_RING_MARK, 5);
    sk_ring_event events[8];
    uint64_t lost = 99;
    CHECK_EQUAL(3, sk_ring_read(ring, events, 8, &lost));
    CHECK_EQUAL(0, lost);
    CHECK_EQUAL(SK_RING_TAKE, events[0].kind);
    CHECK_EQUAL(TAG, events[0].tag);
    CHECK_EQUAL(4 * MIB, events[0].nbytes);
    CHECK_EQUAL(4 * MIB, events[0].in_use_bytes);
    CHECK_EQUAL(4 * MIB, events[0].reserved_bytes);
    CHECK_EQUAL(SK_RING_GIVE, events[1].kind);
    CHECK_EQUAL(TAG, events[1].tag);
    CHECK_EQUAL(4 * MIB, events[1].nbytes);
    CHECK_EQUAL(0, events[1].in_use_bytes);
    CHECK_EQUAL(SK_RING_MARK, events[2].kind);
    CHECK_EQUAL(5, events[2].nbytes);
    CHECK(events[0].time_ns <= events[1].time_ns && events[1].time_ns <= events[2].time_ns);
    CHECK_EQUAL(0, sk_ring_read(ring, events, 8, NULL));
    CHECK_OK(sk_pool_set_ring(f.pool, NULL));
    give(&f, take(&f, MIB, NULL));
    CHECK_EQUAL(0, sk_ring_read(ring, events, 8, NULL));
    fixture_close(&f);
    sk_ring_destroy(ring);
}

SK_TEST(ring, test_ring_when_overfull_then_oldest_are_lost_and_counted) {
    enum { CAPACITY_EVENTS = 16, NMARKS = 100 };
    fixture f = fixture_open(0, false);
    sk_ring *ring = NULL;
    CHECK_OK(sk_ring_create(CAPACITY_EVENTS, &ring));
    CHECK_OK(sk_pool_set_ring(f.pool, ring));
    for (uint64_t i = 0; i < NMARKS; i++) {
        sk_pool_note(f.pool, SK_RING_MARK, i);
    }
    sk_ring_event events[NMARKS];
    uint64_t lost = 0;
    size_t nread = sk_ring_read(ring, events, NMARKS, &lost);
    CHECK_EQUAL(NMARKS, nread + lost);
    CHECK(nread >= CAPACITY_EVENTS && lost > 0);
    for (size_t i = 0; i < nread; i++) {
        CHECK_EQUAL(lost + i, events[i].nbytes);
    }
    CHECK_EQUAL(0, sk_ring_read(ring, events, NMARKS, &lost));
    CHECK_EQUAL(0, lost);
    CHECK_OK(sk_pool_set_ring(f.pool, NULL));
    sk_ring_destroy(ring);
    fixture_close(&f);
}

SK_TEST(ring, test_read_when_in_parts_then_each_event_once) {
    fixture f = fixture_open(0, false);
    sk_ring *ring = NULL;
    CHECK_OK(sk_ring_create(64, &ring));
    CHECK_OK(sk_pool_set_ring(f.pool, ring));
    uint64_t expected = 0;
    uint64_t next = 0;
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < 7; i++) {
            sk_pool_note(f.pool, SK_RING_COPY_OUT, next++);
        }
        sk_ring_event events[3];
        size_t nread = 3;
        while (nread == 3) {
            nread = sk_ring_read(ring, events, 3, NULL);
            for (size_t i = 0; i < nread; i++) {
                CHECK_EQUAL(expected++, events[i].nbytes);
            }
        }
    }
    CHECK_EQUAL(next, expected);
    CHECK_OK(sk_pool_set_ring(f.pool, NULL));
    sk_ring_destroy(ring);
    fixture_close(&f);
}

typedef struct spare {
    sk_pool *pool;
    void *block;
} spare;

static size_t give_spare(void *context, size_t needed_bytes) {
    spare *mine = context;
    (void)needed_bytes;
    if (mine->block == NULL) {
        return 0;
    }
    CHECK_OK(sk_pool_give(mine->pool, mine->block));
    mine->block = NULL;
    return 2 * MIB;
}

SK_TEST(ring, test_ring_when_rescued_and_refused_then_both_are_recorded) {
    fixture f = fixture_open(2 * MIB, false);
    sk_ring *ring = NULL;
    CHECK_OK(sk_ring_create(64, &ring));
    spare mine = {.pool = f.pool, .block = take(&f, 2 * MIB, NULL)};
    sk_pool_set_rescue(f.pool, give_spare, &mine);
    CHECK_OK(sk_pool_set_ring(f.pool, ring));
    void *block = take(&f, 2 * MIB, NULL);
    void *refused = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(f.pool, 2 * MIB, NULL, &refused));
    sk_ring_event events[16];
    size_t nread = sk_ring_read(ring, events, 16, NULL);
    int nrescues = 0;
    int nooms = 0;
    for (size_t i = 0; i < nread; i++) {
        if (events[i].kind == SK_RING_RESCUE && events[i].nbytes > 0) {
            CHECK_EQUAL(2 * MIB, events[i].nbytes);
            nrescues++;
        }
        nooms += events[i].kind == SK_RING_OOM;
        CHECK(events[i].reserved_bytes <= 2 * MIB);
    }
    CHECK_EQUAL(1, nrescues);
    CHECK_EQUAL(1, nooms);
    give(&f, block);
    CHECK_OK(sk_pool_set_ring(f.pool, NULL));
    sk_ring_destroy(ring);
    fixture_close(&f);
}

SK_TEST(ring, test_ring_when_arguments_wrong_then_invalid_or_nothing) {
    sk_ring *ring = NULL;
    CHECK_STATUS(SK_INVALID, sk_ring_create(0, &ring));
    CHECK_STATUS(SK_INVALID, sk_ring_create(SIZE_MAX, &ring));
    CHECK(ring == NULL);
    sk_ring_destroy(NULL);
    fixture f = fixture_open(0, false);
    sk_pool_note(f.pool, SK_RING_MARK, 1); /* no ring: nothing happens */
    sk_pool_note(f.pool, SK_RING_COPY_OUT, 1);
    fixture_close(&f);
}
