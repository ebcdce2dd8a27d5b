/* test_backend.c - the contract of sk_backend_ops, for the cpu backend and for every wrapper.
 *
 * One more backend is one more line in fixture.c.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

enum { COPY_BYTES = 192 * KIB };

/* Device memory comes through a pool: it is the only way in that every backend has. */
static fixture open_kind(const backend_kind *kind) {
    fixture made = {.backend = kind->make()};
    sk_pool_params params = {0};
    CHECK_OK(sk_pool_create(made.backend, &params, &made.pool));
    return made;
}

static void each_kind(void (*scenario)(fixture *fixture)) {
    size_t count = 0;
    const backend_kind *kinds = backend_kinds(&count);
    for (size_t i = 0; i < count; i++) {
        fixture made = open_kind(&kinds[i]);
        scenario(&made);
        fixture_close(&made);
    }
}

static void copy_there_and_back(fixture *fixture) {
    sk_stream *stream = make_stream(fixture->backend);
    unsigned char *host = malloc(COPY_BYTES);
    unsigned char *back = calloc(1, COPY_BYTES);
    CHECK(host != NULL && back != NULL);
    void *first = take(fixture, COPY_BYTES, stream);
    void *second = take(fixture, COPY_BYTES, stream);
    pattern_write(host, COPY_BYTES, 1);
    CHECK_OK(sk_copy_async(fixture->backend, first, host, COPY_BYTES, SK_HOST_TO_DEVICE, stream));
    CHECK_OK(
        sk_copy_async(fixture->backend, second, first, COPY_BYTES, SK_DEVICE_TO_DEVICE, stream));
    CHECK_OK(sk_copy_async(fixture->backend, back, second, COPY_BYTES, SK_DEVICE_TO_HOST, stream));
    CHECK_OK(sk_stream_sync(fixture->backend, stream));
    CHECK(memcmp(host, back, 1) == 0 && pattern_holds(back, COPY_BYTES, 1));
    give(fixture, first);
    give(fixture, second);
    drop_used_stream(fixture, stream);
    free(host);
    free(back);
}

SK_TEST(contract, test_copy_when_there_and_back_then_bytes_are_equal) {
    each_kind(copy_there_and_back);
}

static void copy_nothing(fixture *fixture) {
    sk_stream *stream = make_stream(fixture->backend);
    void *block = take(fixture, 1, stream);
    char byte = 1;
    CHECK_OK(sk_copy_async(fixture->backend, block, &byte, 0, SK_HOST_TO_DEVICE, stream));
    CHECK_OK(sk_stream_sync(fixture->backend, stream));
    give(fixture, block);
    drop_used_stream(fixture, stream);
}

SK_TEST(contract, test_copy_when_zero_bytes_then_ok) { each_kind(copy_nothing); }

static void copy_on_null_stream(fixture *fixture) {
    void *block = take(fixture, COPY_BYTES, NULL);
    unsigned char *host = malloc(COPY_BYTES);
    CHECK(host != NULL);
    pattern_write(host, COPY_BYTES, 2);
    CHECK_OK(sk_copy_async(fixture->backend, block, host, COPY_BYTES, SK_HOST_TO_DEVICE, NULL));
    CHECK_OK(sk_stream_sync(fixture->backend, NULL));
    CHECK(pattern_holds(block, COPY_BYTES, 2));
    give(fixture, block);
    free(host);
}

SK_TEST(contract, test_copy_when_null_stream_then_host_order) { each_kind(copy_on_null_stream); }

static void event_unrecorded(fixture *fixture) {
    sk_stream *stream = make_stream(fixture->backend);
    sk_event *event = NULL;
    CHECK_OK(sk_event_create(fixture->backend, &event));
    CHECK_OK(sk_event_query(fixture->backend, event));
    CHECK_OK(sk_event_sync(fixture->backend, event));
    CHECK_OK(sk_stream_wait(fixture->backend, stream, event));
    CHECK_OK(sk_stream_sync(fixture->backend, stream));
    CHECK_OK(sk_event_destroy(fixture->backend, event));
    drop_stream(fixture->backend, stream);
}

SK_TEST(contract, test_event_when_never_recorded_then_no_wait) { each_kind(event_unrecorded); }

static void event_recorded(fixture *fixture) {
    sk_stream *stream = make_stream(fixture->backend);
    sk_event *event = NULL;
    CHECK_OK(sk_event_create(fixture->backend, &event));
    for (int again = 0; again < 3; again++) {
        CHECK_OK(sk_event_record(fixture->backend, event, stream));
        CHECK_OK(sk_event_sync(fixture->backend, event));
        CHECK_OK(sk_event_query(fixture->backend, event));
    }
    CHECK_OK(sk_event_record(fixture->backend, event, NULL));
    CHECK_OK(sk_event_sync(fixture->backend, event));
    CHECK_OK(sk_event_destroy(fixture->backend, event));
    drop_stream(fixture->backend, stream);
}

SK_TEST(contract, test_event_when_recorded_again_then_waits_for_the_last) {
    each_kind(event_recorded);
}

/* One stream writes, the other reads behind an event; many times, so that a lost wait shows. */
static void wait_across_streams(fixture *fixture) {
    enum { ROUNDS = 50 };
    sk_stream *writer = make_stream(fixture->backend);
    sk_stream *reader = make_stream(fixture->backend);
    sk_event *event = NULL;
    CHECK_OK(sk_event_create(fixture->backend, &event));
    unsigned char *host = malloc(COPY_BYTES);
    unsigned char *back = malloc(COPY_BYTES);
    CHECK(host != NULL && back != NULL);
    void *block = take(fixture, COPY_BYTES, writer);
    CHECK_OK(sk_pool_use(fixture->pool, block, reader));
    for (unsigned round = 0; round < ROUNDS; round++) {
        pattern_write(host, COPY_BYTES, round);
        CHECK_OK(
            sk_copy_async(fixture->backend, block, host, COPY_BYTES, SK_HOST_TO_DEVICE, writer));
        CHECK_OK(sk_event_record(fixture->backend, event, writer));
        CHECK_OK(sk_stream_wait(fixture->backend, reader, event));
        CHECK_OK(
            sk_copy_async(fixture->backend, back, block, COPY_BYTES, SK_DEVICE_TO_HOST, reader));
        CHECK_OK(sk_stream_sync(fixture->backend, reader));
        CHECK(pattern_holds(back, COPY_BYTES, round));
    }
    give(fixture, block);
    CHECK_OK(sk_event_destroy(fixture->backend, event));
    drop_used_stream(fixture, writer);
    drop_used_stream(fixture, reader);
    free(host);
    free(back);
}

SK_TEST(contract, test_stream_wait_when_other_stream_writes_then_reader_sees_it) {
    each_kind(wait_across_streams);
}

static void destroy_busy_event(fixture *fixture) {
    enum { NCOPIES = 32 };
    sk_stream *stream = make_stream(fixture->backend);
    unsigned char *host = calloc(1, COPY_BYTES);
    CHECK(host != NULL);
    void *block = take(fixture, COPY_BYTES, NULL);
    for (int i = 0; i < NCOPIES; i++) {
        sk_event *event = NULL;
        CHECK_OK(sk_event_create(fixture->backend, &event));
        CHECK_OK(
            sk_copy_async(fixture->backend, block, host, COPY_BYTES, SK_HOST_TO_DEVICE, stream));
        CHECK_OK(sk_event_record(fixture->backend, event, stream));
        CHECK_OK(sk_stream_wait(fixture->backend, stream, event));
        CHECK_OK(sk_event_destroy(fixture->backend, event));
    }
    drop_stream(fixture->backend, stream); /* waits for its work */
    give(fixture, block);
    free(host);
}

SK_TEST(contract, test_event_destroy_when_work_still_runs_then_safe) {
    each_kind(destroy_busy_event);
}

static void stream_destroy_waits(fixture *fixture) {
    sk_stream *stream = make_stream(fixture->backend);
    unsigned char *host = malloc(COPY_BYTES);
    CHECK(host != NULL);
    void *block = take(fixture, COPY_BYTES, NULL);
    pattern_write(host, COPY_BYTES, 3);
    CHECK_OK(sk_copy_async(fixture->backend, block, host, COPY_BYTES, SK_HOST_TO_DEVICE, stream));
    drop_stream(fixture->backend, stream);
    CHECK(pattern_holds(block, COPY_BYTES, 3));
    give(fixture, block);
    free(host);
}

SK_TEST(contract, test_stream_destroy_when_copy_queued_then_it_is_done) {
    each_kind(stream_destroy_waits);
}

static void memory_info_follows(fixture *fixture) {
    CHECK_EQUAL(0, device_bytes(fixture->backend));
    void *block = take(fixture, 32 * MIB, NULL);
    CHECK(device_bytes(fixture->backend) >= 32 * MIB);
    CHECK_EQUAL(stats_of(fixture).reserved_bytes[0].current, device_bytes(fixture->backend));
    give(fixture, block);
    CHECK_OK(sk_pool_trim(fixture->pool));
    CHECK_EQUAL(0, device_bytes(fixture->backend));
}

SK_TEST(contract, test_memory_info_when_pool_grows_and_trims_then_equals_reserved) {
    each_kind(memory_info_follows);
}

static void too_much(fixture *fixture) {
    void *block = NULL;
    sk_status status = sk_pool_take(fixture->pool, (size_t)CAPACITY + MIB, NULL, &block);
    CHECK_STATUS(SK_OUT_OF_DEVICE_MEMORY, status);
    CHECK(block == NULL);
    CHECK_OK(sk_pool_check(fixture->pool));
    give(fixture, take(fixture, 8 * MIB, NULL));
}

SK_TEST(contract, test_take_when_device_too_small_then_out_of_device_memory) {
    each_kind(too_much);
}

typedef struct hammer {
    fixture *fixture;
    unsigned seed;
} hammer;

static void *hammer_copies(void *argument) {
    enum { ROUNDS = 40 };
    hammer *mine = argument;
    sk_backend *backend = mine->fixture->backend;
    sk_stream *stream = make_stream(backend);
    unsigned char *host = malloc(COPY_BYTES);
    unsigned char *back = malloc(COPY_BYTES);
    CHECK(host != NULL && back != NULL);
    for (unsigned round = 0; round < ROUNDS; round++) {
        void *block = take(mine->fixture, COPY_BYTES, stream);
        pattern_write(host, COPY_BYTES, mine->seed + round);
        CHECK_OK(sk_copy_async(backend, block, host, COPY_BYTES, SK_HOST_TO_DEVICE, stream));
        CHECK_OK(sk_copy_async(backend, back, block, COPY_BYTES, SK_DEVICE_TO_HOST, stream));
        give(mine->fixture, block);
        CHECK_OK(sk_stream_sync(backend, stream));
        CHECK(pattern_holds(back, COPY_BYTES, mine->seed + round));
    }
    drop_used_stream(mine->fixture, stream);
    free(host);
    free(back);
    return NULL;
}

static void many_threads(fixture *fixture) {
    enum { NTHREADS = 4, SEEDS_APART = 1000 };
    pthread_t threads[NTHREADS];
    hammer hammers[NTHREADS];
    for (unsigned i = 0; i < NTHREADS; i++) {
        hammers[i] = (hammer){.fixture = fixture, .seed = i * SEEDS_APART};
        CHECK(pthread_create(&threads[i], NULL, hammer_copies, &hammers[i]) == 0);
    }
    for (int i = 0; i < NTHREADS; i++) {
        (void)pthread_join(threads[i], NULL);
    }
}

SK_TEST(contract, test_streams_when_used_from_threads_then_each_sees_its_own_bytes) {
    each_kind(many_threads);
}
