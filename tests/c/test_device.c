/* test_device.c - streams of any device really are asynchronous, and the gate holds them. */
#include <stdlib.h>

#include "fixture.h"

enum { COPY_BYTES = 64 * KIB };

SK_TEST(device, test_copy_when_gated_then_not_done_until_released) {
    fixture f = fixture_open_gated(0, false);
    sk_stream *stream = make_stream(f.backend);
    sk_event *event = NULL;
    CHECK_OK(sk_event_create(f.backend, &event));
    unsigned char *host = host_take(COPY_BYTES);
    pattern_write(host, COPY_BYTES, 1);
    void *block = take(&f, COPY_BYTES, stream);
    device_fill(block, 0, COPY_BYTES);
    CHECK_OK(sk_copy_async(f.backend, block, host, COPY_BYTES, SK_HOST_TO_DEVICE, stream));
    CHECK_OK(sk_event_record(f.backend, event, stream));
    CHECK_STATUS(SK_NOT_READY, sk_event_query(f.backend, event));
    sk_delay_release(f.gate, 1);
    CHECK_OK(sk_event_sync(f.backend, event));
    CHECK_OK(sk_event_query(f.backend, event));
    CHECK(pattern_holds(block, COPY_BYTES, 1));
    CHECK_OK(sk_event_destroy(f.backend, event));
    give(&f, block);
    drop_used_stream(&f, stream);
    fixture_close(&f);
    host_give(host);
}

SK_TEST(device, test_streams_when_one_is_held_then_the_other_runs_on) {
    fixture f = fixture_open_gated(0, false);
    sk_stream *held = make_stream(f.backend);
    sk_stream *other = make_stream(f.backend);
    unsigned char *first = host_take(COPY_BYTES);
    unsigned char *second = host_take(COPY_BYTES);
    void *block = take(&f, COPY_BYTES, NULL);
    CHECK_OK(sk_copy_async(f.backend, first, block, COPY_BYTES, SK_DEVICE_TO_HOST, held));
    sk_event *event = NULL;
    CHECK_OK(sk_event_create(f.backend, &event));
    CHECK_OK(sk_event_record(f.backend, event, held));
    CHECK_OK(sk_stream_sync(f.backend, other)); /* has no work: returns although `held` waits */
    CHECK_STATUS(SK_NOT_READY, sk_event_query(f.backend, event));
    sk_delay_release(f.gate, UINT64_MAX);
    CHECK_OK(sk_copy_async(f.backend, second, block, COPY_BYTES, SK_DEVICE_TO_HOST, other));
    CHECK_OK(sk_stream_sync(f.backend, other));
    CHECK_OK(sk_stream_sync(f.backend, held));
    CHECK_OK(sk_event_query(f.backend, event));
    CHECK_OK(sk_event_destroy(f.backend, event));
    give(&f, block);
    drop_used_stream(&f, held);
    drop_used_stream(&f, other);
    fixture_close(&f);
    host_give(first);
    host_give(second);
}

SK_TEST(device, test_delay_when_released_before_the_copy_then_credit_counts) {
    fixture f = fixture_open_gated(0, false);
    sk_stream *stream = make_stream(f.backend);
    void *block = take(&f, COPY_BYTES, stream);
    unsigned char *host = host_take(COPY_BYTES);
    sk_delay_release(f.gate, 2);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(sk_copy_async(f.backend, host, block, COPY_BYTES, SK_DEVICE_TO_HOST, stream));
    }
    CHECK_OK(sk_stream_sync(f.backend, stream));
    give(&f, block);
    drop_used_stream(&f, stream);
    fixture_close(&f);
    host_give(host);
}

SK_TEST(device, test_delay_when_stream_destroyed_with_held_copies_then_they_run) {
    sk_backend *gate = make_delay(make_device(CAPACITY));
    sk_stream *stream = make_stream(gate);
    void *from = device_take(COPY_BYTES);
    unsigned char *to = host_take(COPY_BYTES);
    pattern_write(from, COPY_BYTES, 4);
    CHECK_OK(sk_copy_async(gate, to, from, COPY_BYTES, SK_DEVICE_TO_HOST, stream));
    drop_stream(gate, stream); /* waits for its work, so it has to open the gate */
    sk_backend_close(gate);
    CHECK(pattern_holds(to, COPY_BYTES, 4));
    device_give(from, COPY_BYTES);
    host_give(to);
}

SK_TEST(device, test_destroy_when_null_then_nothing) {
    sk_backend *backend = make_device(CAPACITY);
    CHECK_OK(sk_stream_destroy(backend, NULL));
    CHECK_OK(sk_event_destroy(backend, NULL));
    CHECK_OK(sk_stream_sync(backend, NULL));
    sk_backend_close(backend);
}

SK_TEST(device, test_streams_when_many_then_all_work_is_done_in_order) {
    enum { NSTREAMS = 16, NCOPIES = 64 };
    sk_backend *backend = make_device(CAPACITY);
    sk_stream *streams[NSTREAMS];
    int numbers[NCOPIES];
    int *to = host_take(NSTREAMS * sizeof *to);
    for (int i = 0; i < NCOPIES; i++) {
        numbers[i] = i;
    }
    int *from = device_take(sizeof numbers);
    device_write(from, numbers, sizeof numbers);
    for (int s = 0; s < NSTREAMS; s++) {
        streams[s] = make_stream(backend);
    }
    for (int i = 0; i < NCOPIES; i++) {
        for (int s = 0; s < NSTREAMS; s++) {
            CHECK_OK(sk_copy_async(backend, &to[s], &from[i], sizeof to[s], SK_DEVICE_TO_HOST,
                                   streams[s]));
        }
    }
    for (int s = 0; s < NSTREAMS; s++) {
        drop_stream(backend, streams[s]);
        CHECK_EQUAL(NCOPIES - 1, to[s]);
    }
    device_give(from, sizeof numbers);
    host_give(to);
    sk_backend_close(backend);
}
