/* test_history.c - the record of a pool's memory with its addresses, and of the times of copies. */
#include <string.h>

#include "sched_fixture.h"

enum { MOST = 64 };

/* Return the number of events of a kind, and the last of them in `*last`. */
static size_t count_kind(const sk_ring_event *events, size_t count, sk_ring_kind kind,
                         sk_ring_event *last) {
    size_t found = 0;
    for (size_t i = 0; i < count; i++) {
        if (events[i].kind == (uint32_t)kind) {
            *last = events[i];
            found++;
        }
    }
    return found;
}

static sk_pool_view view_of(sk_pool *pool, sk_ring_event *events, sk_block_info *blocks,
                            sk_segment_info *segments) {
    sk_pool_view view = {
        .events = events,
        .blocks = blocks,
        .segments = segments,
        .most_events = MOST,
        .most_blocks = MOST,
        .most_segments = MOST,
    };
    sk_pool_view_get(pool, &view);
    CHECK(view.event_count <= MOST && view.block_count <= MOST && view.segment_count <= MOST);
    return view;
}

SK_TEST(history, test_history_when_memory_comes_and_goes_then_where_it_lay) {
    for (int whole = 0; whole < 2; whole++) {
        fixture f = fixture_open(0, whole == 1);
        sk_ring *ring = NULL;
        sk_ring *other = NULL;
        CHECK_OK(sk_ring_create(MOST, &ring));
        CHECK_OK(sk_ring_create(MOST, &other));
        CHECK_OK(sk_pool_set_history(f.pool, ring));
        CHECK_STATUS(SK_INVALID, sk_pool_set_history(f.pool, other));
        /* Of another reader: neither takes events from the other. */
        CHECK_OK(sk_pool_set_ring(f.pool, other));
        CHECK_STATUS(SK_INVALID, sk_pool_set_ring(f.pool, ring));
        void *block = take(&f, 4 * MIB - 1, NULL);
        give(&f, block);
        CHECK_OK(sk_pool_trim(f.pool));
        sk_ring_event events[MOST];
        sk_ring_event last = {0};
        CHECK_EQUAL(2, sk_ring_read(other, events, MOST, NULL));
        sk_block_info blocks[MOST];
        sk_segment_info segments[MOST];
        for (int again = 0; again < 2; again++) { /* looking takes nothing out */
            sk_pool_view view = view_of(f.pool, events, blocks, segments);
            CHECK_EQUAL(0, view.block_count);
            CHECK_EQUAL(0, view.lost_events);
            CHECK_EQUAL(1, count_kind(events, view.event_count, SK_RING_TAKE, &last));
            CHECK_EQUAL((uintptr_t)block, last.address);
            CHECK_EQUAL(4 * MIB - 1, last.requested_bytes);
            CHECK_EQUAL(4 * MIB, last.nbytes);
            CHECK_EQUAL(1, count_kind(events, view.event_count, SK_RING_GIVE, &last));
            CHECK_EQUAL(1, count_kind(events, view.event_count, SK_RING_FREE, &last));
            CHECK_EQUAL((uintptr_t)block, last.address);
            CHECK_EQUAL(1, count_kind(events, view.event_count, SK_RING_MAP, &last));
            CHECK(last.address <= (uintptr_t)block);
            CHECK(last.address + last.nbytes >= (uintptr_t)block + 4 * MIB);
            CHECK_EQUAL(SK_RING_MAP, events[0].kind);
            CHECK(count_kind(events, view.event_count, SK_RING_UNMAP, &last) >= 1);
            CHECK_EQUAL(0, last.reserved_bytes);
        }
        CHECK_OK(sk_pool_set_ring(f.pool, NULL));
        sk_pool_note(f.pool, SK_RING_RESCUE, 3); /* still recorded */
        CHECK_EQUAL(1, count_kind(events, view_of(f.pool, events, blocks, segments).event_count,
                                  SK_RING_RESCUE, &last));
        CHECK_OK(sk_pool_set_history(f.pool, NULL));
        CHECK_EQUAL(0, view_of(f.pool, events, blocks, segments).event_count);
        sk_ring_destroy(ring);
        sk_ring_destroy(other);
        fixture_close(&f);
    }
}

SK_TEST(history, test_history_when_another_stream_works_on_a_block_then_it_is_free_after_that) {
    fixture f = fixture_open(0, false);
    sk_stream *stream = make_stream(f.backend);
    sk_ring *ring = NULL;
    CHECK_OK(sk_ring_create(MOST, &ring));
    CHECK_OK(sk_pool_set_history(f.pool, ring));
    void *block = take(&f, 2 * MIB, NULL);
    CHECK_OK(sk_pool_use(f.pool, block, stream));
    give(&f, block);
    CHECK_OK(sk_pool_trim(f.pool)); /* waits for the stream */
    sk_ring_event events[MOST];
    sk_ring_event given = {0};
    sk_ring_event freed = {0};
    sk_block_info blocks[MOST];
    sk_segment_info segments[MOST];
    sk_pool_view view = view_of(f.pool, events, blocks, segments);
    CHECK_EQUAL(1, count_kind(events, view.event_count, SK_RING_GIVE, &given));
    CHECK_EQUAL(1, count_kind(events, view.event_count, SK_RING_FREE, &freed));
    CHECK_EQUAL(given.address, freed.address);
    CHECK(given.time_ns <= freed.time_ns);
    CHECK_OK(sk_pool_set_history(f.pool, NULL));
    sk_ring_destroy(ring);
    drop_stream(f.backend, stream);
    fixture_close(&f);
}

SK_TEST(history, test_view_when_there_is_no_room_then_counts_and_nothing_written) {
    fixture f = fixture_open(0, false);
    sk_ring *ring = NULL;
    CHECK_OK(sk_ring_create(2, &ring));
    CHECK_OK(sk_pool_set_history(f.pool, ring));
    void *block = take(&f, 2 * MIB, NULL);
    give(&f, block);
    block = take(&f, 2 * MIB, NULL);
    sk_pool_view view = {0};
    sk_pool_view_get(f.pool, &view);
    CHECK_EQUAL(2, view.event_count);
    CHECK(view.lost_events > 0);
    CHECK(view.block_count >= 1);
    CHECK(view.segment_count >= 1);
    give(&f, block);
    CHECK_OK(sk_pool_set_history(f.pool, NULL));
    sk_ring_destroy(ring);
    fixture_close(&f);
}

static size_t read_copies(sk_ring *ring, sk_ring_event *events) {
    return sk_ring_read(ring, events, MOST, NULL);
}

SK_TEST(history, test_copies_when_they_end_then_each_with_its_times) {
    enum { TAG = 7 };
    for (int streams = 0; streams < 2; streams++) {
        scene s;
        scene_open(&s, &(scene_options){.gate = true, .streams = streams == 1});
        sk_ring *ring = NULL;
        CHECK_OK(sk_ring_create(MOST, &ring));
        sk_sched_set_history(s.sched, ring);
        parcel one = parcel_make(&s, MIB, SK_TIER_ANY, 1);
        parcel two = parcel_make(&s, 2 * MIB, SK_TIER_ANY, 2);
        sk_group_label(one.group, TAG);
        CHECK_OK(parcel_out(&one, NULL));
        CHECK_OK(parcel_out(&two, NULL));
        sk_ring_event events[MOST];
        CHECK_EQUAL(0, read_copies(ring, events)); /* held back: neither has ended */
        sk_delay_release(s.gate, UINT64_MAX);
        sk_sched_drain(s.sched);
        CHECK_EQUAL(2, read_copies(ring, events));
        for (int i = 0; i < 2; i++) {
            CHECK_EQUAL(SK_RING_COPIED_OUT, events[i].kind);
            CHECK(events[i].duration_ns < events[i].time_ns);
            CHECK(events[i].address != 0);
        }
        bool first = events[0].nbytes == MIB;
        CHECK_EQUAL(TAG, events[first ? 0 : 1].tag);
        CHECK_EQUAL(0, events[first ? 1 : 0].tag);
        CHECK_EQUAL(1, events[first ? 0 : 1].group);
        CHECK_EQUAL(2, events[first ? 1 : 0].group);
        parcel_recover(&one);
        parcel_recover(&two);
        sk_sched_drain(s.sched);
        (void)read_copies(ring, events);
        sk_sched_set_history(s.sched, NULL);
        parcel three = parcel_make(&s, MIB, SK_TIER_ANY, 1);
        CHECK_OK(parcel_out(&three, NULL));
        sk_sched_drain(s.sched);
        CHECK_EQUAL(0, read_copies(ring, events));
        parcel_drop(&one);
        parcel_drop(&two);
        parcel_recover(&three);
        parcel_drop(&three);
        scene_close(&s);
        sk_ring_destroy(ring);
    }
}

/* A copy that cannot start has no time, and its stamp goes with the scheduler. */
SK_TEST(history, test_copies_when_calls_or_memory_fail_then_they_still_run) {
    scene s;
    scene_open(&s, &(scene_options){.fault = true});
    sk_ring *ring = NULL;
    CHECK_OK(sk_ring_create(MOST, &ring));
    sk_sched_set_history(s.sched, ring);
    sk_ring_event events[MOST];
    size_t copies = 0;
    for (uint64_t nth = 1; nth < 12; nth++) {
        parcel mine = parcel_make(&s, MIB, SK_TIER_ANY, 1);
        sk_fault_arm(s.fault, nth, false, SK_BACKEND_FAILED);
        sk_status status = parcel_out(&mine, NULL);
        sk_sched_drain(s.sched);
        sk_fault_arm(s.fault, 0, false, SK_OK);
        size_t noted = read_copies(ring, events);
        CHECK(noted <= 1);
        bool is_out = status == SK_OK && sk_group_finish_out(mine.group, NULL, false) == SK_OK;
        CHECK(!is_out || noted == 1);
        copies += noted;
        parcel_drop(&mine);
    }
    CHECK(copies > 0);
    sk_sched_set_history(s.sched, NULL);
    scene_close(&s);
    sk_ring_destroy(ring);
}

SK_TEST(history, test_history_when_free_memory_moves_then_both_places) {
    for (int aliasing = 0; aliasing < 2; aliasing++) {
        fixture f = aliasing == 1 ? fixture_open_aliasing(8 * MIB) : fixture_open(8 * MIB, false);
        sk_ring *ring = NULL;
        CHECK_OK(sk_ring_create(MOST, &ring));
        CHECK_OK(sk_pool_set_history(f.pool, ring));
        void *parts[4];
        for (int i = 0; i < 4; i++) {
            parts[i] = take(&f, 2 * MIB, NULL);
        }
        give(&f, parts[0]);
        give(&f, parts[2]);
        sk_pool_stats before;
        sk_pool_stats_get(f.pool, &before);
        void *whole = take(&f, 4 * MIB, NULL);
        sk_pool_stats after;
        sk_pool_stats_get(f.pool, &after);
        sk_ring_event events[MOST];
        sk_block_info blocks[MOST];
        sk_segment_info segments[MOST];
        sk_pool_view view = view_of(f.pool, events, blocks, segments);
        uint64_t mapped = 0;
        size_t moved = 0;
        for (size_t i = 0; i < view.event_count; i++) {
            mapped += events[i].kind == SK_RING_MAP ? events[i].nbytes : 0;
            mapped -= events[i].kind == SK_RING_UNMAP ? events[i].nbytes : 0;
            moved += events[i].kind == SK_RING_UNMAP ? events[i].nbytes : 0;
        }
        CHECK_EQUAL(after.reserved_bytes[0].current, mapped);
        CHECK_EQUAL(after.moved_bytes - before.moved_bytes, moved);
        CHECK(moved >= 2 * MIB);
        give(&f, whole);
        give(&f, parts[1]);
        give(&f, parts[3]);
        CHECK_OK(sk_pool_set_history(f.pool, NULL));
        sk_ring_destroy(ring);
        fixture_close(&f);
    }
}
