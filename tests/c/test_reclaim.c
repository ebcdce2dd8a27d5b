/* test_reclaim.c - what a request that does not fit waits for, and what it does not.
 *
 * Copies are held back by a gate: whatever waited for them would hang, and the harness would say
 * so. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

static void copy_out(fixture *f, void *to, const void *from, size_t nbytes, sk_stream *stream) {
    CHECK_OK(sk_copy_async(f->backend, to, from, nbytes, SK_DEVICE_TO_HOST, stream));
}

enum { PIECES = 4 };

/* Free every other one of four pieces of 4 MiB: 8 MiB that only fit together elsewhere. */
static void pieces_take(fixture *f, void *pieces[PIECES]) {
    for (int i = 0; i < PIECES; i++) {
        pieces[i] = take(f, 4 * MIB, NULL);
    }
}

static void pieces_take_and_free_two(fixture *f, void *pieces[PIECES]) {
    pieces_take(f, pieces);
    give(f, pieces[0]);
    give(f, pieces[2]);
}

SK_TEST(reclaim, test_take_when_free_memory_lies_apart_then_it_is_moved_together) {
    fixture f = fixture_open(16 * MIB, false);
    void *pieces[PIECES];
    pieces_take(&f, pieces);
    pattern_write(pieces[1], 4 * MIB, 1);
    pattern_write(pieces[3], 4 * MIB, 3);
    give(&f, pieces[0]);
    give(&f, pieces[2]);
    sk_pool_stats before = stats_of(&f);
    void *taken = take(&f, 8 * MIB, NULL);
    sk_pool_stats after = stats_of(&f);
    pattern_write(taken, 8 * MIB, 8);
    CHECK_EQUAL(8 * MIB, after.moved_bytes);
    CHECK_EQUAL(before.num_device_free, after.num_device_free);
    CHECK_EQUAL(8 * MIB / granule_of(), after.maps - before.maps);
    CHECK_EQUAL(device_is_remote() ? 0 : 8 * MIB / granule_of(), after.unmaps - before.unmaps);
    CHECK_EQUAL(16 * MIB, after.reserved_bytes[0].peak);
    CHECK(pattern_holds(pieces[1], 4 * MIB, 1) && pattern_holds(pieces[3], 4 * MIB, 3));
    CHECK(pattern_holds(taken, 8 * MIB, 8));
    give(&f, taken);
    give(&f, pieces[1]);
    give(&f, pieces[3]);
    fixture_close(&f);
}

SK_TEST(reclaim, test_take_when_idle_memory_is_enough_then_copies_in_flight_are_not_awaited) {
    need_host_order(); /* else nobody knows that the NULL stream is idle */
    fixture f = fixture_open_gated(24 * MIB, false);
    sk_stream *copies = make_stream(f.backend);
    unsigned char *host = host_take(8 * MIB);
    void *pieces[PIECES];
    void *leaving = take(&f, 8 * MIB, NULL);
    pieces_take(&f, pieces);
    CHECK_OK(sk_pool_use(f.pool, leaving, copies));
    copy_out(&f, host, leaving, 8 * MIB, copies);
    give(&f, leaving);
    give(&f, pieces[0]);
    give(&f, pieces[2]);
    void *taken = take(&f, 8 * MIB, NULL);
    CHECK_EQUAL(SK_BLOCK_PENDING, block_at(&f, leaving).state);
    give(&f, taken);
    give(&f, pieces[1]);
    give(&f, pieces[3]);
    drop_used_stream(&f, copies);
    fixture_close(&f);
    host_give(host);
}

SK_TEST(reclaim, test_take_when_a_busy_stream_owns_nothing_free_then_not_awaited) {
    fixture f = fixture_open_gated(24 * MIB, false);
    sk_stream *busy = make_stream(f.backend);
    unsigned char *host = host_take(8 * MIB);
    void *pieces[PIECES];
    give(&f, take(&f, 8 * MIB, busy));
    void *used = take(&f, 8 * MIB, busy); /* its lane has seen a give, and has nothing free */
    copy_out(&f, host, used, 8 * MIB, busy);
    pieces_take_and_free_two(&f, pieces);
    void *taken = take(&f, 8 * MIB, NULL);
    give(&f, taken);
    give(&f, pieces[1]);
    give(&f, pieces[3]);
    give(&f, used);
    drop_used_stream(&f, busy);
    fixture_close(&f);
    host_give(host);
}

SK_TEST(reclaim, test_take_when_another_streams_block_is_larger_then_only_a_part_is_adopted) {
    fixture f = fixture_open_gated(64 * MIB, false);
    sk_stream *copies = make_stream(f.backend);
    sk_stream *compute = make_stream(f.backend);
    unsigned char *host = host_take(2 * MIB);
    give(&f, take(&f, 64 * MIB, compute));
    void *adopted = take(&f, 2 * MIB, copies);
    copy_out(&f, host, adopted, 2 * MIB, copies); /* held: `copies` is busy from here on */
    void *own = take(&f, 32 * MIB, compute);
    sk_event *event = NULL;
    CHECK_OK(sk_event_create(f.backend, &event));
    CHECK_OK(sk_event_record(f.backend, event, compute));
    CHECK_OK(sk_event_sync(f.backend, event)); /* would hang had it to wait for `copies` */
    CHECK_OK(sk_event_destroy(f.backend, event));
    give(&f, adopted);
    give(&f, own);
    drop_used_stream(&f, copies);
    drop_used_stream(&f, compute);
    fixture_close(&f);
    host_give(host);
}

SK_TEST(reclaim, test_give_when_its_event_cannot_be_recorded_then_waits_for_the_stream_instead) {
    fixture f = fixture_open(0, false);
    sk_stream *stream = make_stream(f.backend);
    void *block = take(&f, MIB, NULL);
    CHECK_OK(sk_pool_use(f.pool, block, stream));
    host_memory_fail(1, true); /* no queue, no thread: nothing can be recorded */
    sk_status status = sk_pool_give(f.pool, block);
    host_memory_fail(0, false);
    CHECK_OK(status);
    CHECK_EQUAL(0, stats_of(&f).allocated_bytes[0].current);
    drop_used_stream(&f, stream);
    fixture_close(&f);
}

SK_TEST(reclaim,
        test_destroy_when_the_device_takes_memory_not_back_then_says_so_and_can_be_repeated) {
    sk_backend *backend = make_fault(make_device(CAPACITY));
    sk_pool_params params = {0};
    sk_pool *pool = NULL;
    void *block = NULL;
    CHECK_OK(sk_pool_create(backend, &params, &pool));
    CHECK_OK(sk_pool_take(pool, 4 * MIB, NULL, &block));
    CHECK_OK(sk_pool_give(pool, block));
    sk_fault_arm(backend, 1, true, SK_BACKEND_FAILED);
    CHECK_STATUS(SK_BACKEND_FAILED, sk_pool_destroy(pool));
    sk_fault_arm(backend, 0, false, SK_OK);
    CHECK_OK(sk_pool_check(pool));
    CHECK_OK(sk_pool_destroy(pool));
    CHECK_EQUAL(0, device_bytes(backend));
    sk_backend_close(backend);
}

SK_TEST(reclaim, test_event_when_recorded_again_then_earlier_waits_keep_their_recording) {
    sk_backend *gate = make_delay(make_device(CAPACITY));
    sk_stream *slow = make_stream(gate);
    sk_stream *idle = make_stream(gate);
    sk_stream *waiter = make_stream(gate);
    enum { NBYTES = 64 };
    char *to = host_take(NBYTES);
    void *from = device_take(NBYTES);
    device_fill(from, 7, NBYTES);
    sk_event *event = NULL;
    sk_event *passed = NULL;
    CHECK_OK(sk_event_create(gate, &event));
    CHECK_OK(sk_event_create(gate, &passed));
    CHECK_OK(sk_copy_async(gate, to, from, NBYTES, SK_DEVICE_TO_HOST, slow));
    CHECK_OK(sk_event_record(gate, event, slow));
    CHECK_OK(sk_stream_wait(gate, waiter, event));
    CHECK_OK(sk_event_record(gate, passed, waiter));
    CHECK_OK(sk_event_record(gate, event, idle));
    CHECK_OK(sk_event_sync(gate, event)); /* the latest recording: nothing to wait for */
    CHECK_STATUS(SK_NOT_READY, sk_event_query(gate, passed));
    sk_delay_release(gate, 1);
    CHECK_OK(sk_event_sync(gate, passed));
    CHECK_EQUAL(7, to[0]);
    CHECK_OK(sk_event_destroy(gate, event));
    CHECK_OK(sk_event_destroy(gate, passed));
    drop_stream(gate, slow);
    drop_stream(gate, idle);
    drop_stream(gate, waiter);
    device_give(from, NBYTES);
    host_give(to);
    sk_backend_close(gate);
}
