/* test_pending.c - blocks that other streams still work on: whose turn it is, and who waits.
 *
 * Copies are held back by a gate: whatever waited for one that is never let go would hang, and the
 * harness would say so. */
#include <pthread.h>
#include <time.h>

#include "fixture.h"
#include "pool/pool.h"

enum { PARTS = 3, PART = 8 * MIB };

/* Blocks of the pool, each with a copy of its own stream; given back, they are pending. */
typedef struct scene {
    fixture f;
    sk_stream *streams[PARTS];
    void *blocks[PARTS];
    unsigned char *host;
} scene;

static void scene_copy(scene *s, int part) {
    CHECK_OK(sk_copy_async(s->f.backend, s->host + (size_t)part * KIB, s->blocks[part], KIB,
                           SK_DEVICE_TO_HOST, s->streams[part]));
}

/* The copy of `done` is over, the others wait at the gate. */
static scene scene_open(int done) {
    scene made = {.f = fixture_open_gated(PARTS * PART, false), .host = host_take(PARTS * KIB)};
    for (int i = 0; i < PARTS; i++) {
        made.streams[i] = make_stream(made.f.backend);
        made.blocks[i] = take(&made.f, PART, NULL);
        CHECK_OK(sk_pool_use(made.f.pool, made.blocks[i], made.streams[i]));
    }
    sk_delay_release(made.f.gate, 1);
    scene_copy(&made, done);
    CHECK_OK(sk_stream_sync(made.f.backend, made.streams[done]));
    for (int i = 0; i < PARTS; i++) {
        if (i != done) {
            scene_copy(&made, i);
        }
        give(&made.f, made.blocks[i]);
    }
    return made;
}

static void scene_close(scene *s) {
    for (int i = 0; i < PARTS; i++) {
        drop_used_stream(&s->f, s->streams[i]);
    }
    fixture_close(&s->f);
    host_give(s->host);
}

SK_TEST(pending, test_take_when_any_of_the_pending_blocks_is_done_then_that_one_serves) {
    need_host_order(); /* else the NULL stream is one that is waited for */
    for (int done = 0; done < PARTS; done++) {
        scene s = scene_open(done);
        void *taken = take(&s.f, PART, NULL);
        CHECK(taken == s.blocks[done]);
        for (int i = 0; i < PARTS; i++) {
            CHECK_EQUAL(i == done ? SK_BLOCK_IN_USE : SK_BLOCK_PENDING,
                        block_at(&s.f, s.blocks[i]).state);
        }
        CHECK_OK(sk_pool_check(s.f.pool));
        give(&s.f, taken);
        scene_close(&s);
    }
}

/* ---- waiting --------------------------------------------------------------------------------- */

static void *trim(void *pool) {
    CHECK_OK(sk_pool_trim(pool));
    return NULL;
}

static void rest(void) { (void)nanosleep(&(struct timespec){.tv_nsec = 10 * 1000 * 1000}, NULL); }

static void *let_go(void *gate) {
    rest();
    sk_delay_release(gate, UINT64_MAX);
    return NULL;
}

/* Until so many blocks are waited for. */
static void wait_for_transit(sk_pool *pool, size_t count) {
    for (bool is_there = false; !is_there;) {
        rest();
        sk__lock(&pool->lock);
        is_there = pool->in_transit == count;
        sk__unlock(&pool->lock);
    }
}

SK_TEST(pending, test_trim_when_another_thread_waits_for_the_last_block_then_it_comes_back_first) {
    fixture f = fixture_open_gated(0, true);
    sk_stream *stream = make_stream(f.backend);
    unsigned char *host = host_take(KIB);
    void *block = take(&f, PART, NULL);
    CHECK_OK(sk_pool_use(f.pool, block, stream));
    CHECK_OK(sk_copy_async(f.backend, host, block, KIB, SK_DEVICE_TO_HOST, stream));
    give(&f, block);
    pthread_t first, opener;
    CHECK(pthread_create(&first, NULL, trim, f.pool) == 0);
    wait_for_transit(f.pool, 1);
    CHECK(pthread_create(&opener, NULL, let_go, f.gate) == 0);
    CHECK_OK(sk_pool_trim(f.pool)); /* nothing is pending: it is the other thread's */
    CHECK_EQUAL(0, stats_of(&f).reserved_bytes[0].current);
    CHECK(pthread_join(first, NULL) == 0);
    CHECK(pthread_join(opener, NULL) == 0);
    drop_used_stream(&f, stream);
    fixture_close(&f);
    host_give(host);
}

SK_TEST(pending, test_trim_when_other_threads_free_all_that_it_was_to_wait_for_then_it_ends) {
    fixture f = fixture_open_gated(0, true);
    sk_stream *stream = make_stream(f.backend);
    unsigned char *host = host_take(KIB);
    for (int i = 0; i < 2; i++) { /* in the order of the stream */
        void *block = take(&f, PART, NULL);
        CHECK_OK(sk_pool_use(f.pool, block, stream));
        CHECK_OK(sk_copy_async(f.backend, host, block, KIB, SK_DEVICE_TO_HOST, stream));
        give(&f, block);
    }
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) { /* each waits for one, and then for the other's */
        CHECK(pthread_create(&threads[i], NULL, trim, f.pool) == 0);
        wait_for_transit(f.pool, (size_t)i + 1);
    }
    sk_delay_release(f.gate, 1);
    wait_for_transit(f.pool, 1);
    sk_delay_release(f.gate, 1);
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK_EQUAL(0, stats_of(&f).reserved_bytes[0].current);
    drop_used_stream(&f, stream);
    fixture_close(&f);
    host_give(host);
}

SK_TEST(pending, test_trim_when_waiting_fails_then_said_and_the_blocks_stay_pending_in_order) {
    for (int count = 1; count <= 2; count++) {
        fixture f = {.backend = make_fault(make_device(CAPACITY))};
        sk_pool_params params = {.whole_segments = true};
        CHECK_OK(sk_pool_create(f.backend, &params, &f.pool));
        sk_stream *stream = make_stream(f.backend);
        void *blocks[2];
        for (int i = 0; i < count; i++) {
            blocks[i] = take(&f, PART, NULL);
            CHECK_OK(sk_pool_use(f.pool, blocks[i], stream));
        }
        for (int i = 0; i < count; i++) {
            give(&f, blocks[i]);
        }
        sk_fault_arm(f.backend, 1, false, SK_BACKEND_FAILED);
        CHECK_STATUS(SK_BACKEND_FAILED, sk_pool_trim(f.pool));
        sk_fault_arm(f.backend, 0, false, SK_OK);
        CHECK_OK(sk_pool_check(f.pool));
        for (int i = 0; i < count; i++) {
            CHECK_EQUAL(SK_BLOCK_PENDING, block_at(&f, blocks[i]).state);
        }
        CHECK(f.pool->pending->address == (uintptr_t)blocks[0]);
        CHECK(f.pool->pending_last->address == (uintptr_t)blocks[count - 1]);
        CHECK_OK(sk_pool_trim(f.pool));
        CHECK_EQUAL(0, stats_of(&f).reserved_bytes[0].current);
        drop_used_stream(&f, stream);
        fixture_close(&f);
    }
}

/* ---- with other things ----------------------------------------------------------------------- */

static void count_making(void *context, bool begins) { *(int *)context += begins ? 1 : 0; }

SK_TEST(pending, test_making_when_a_pending_block_is_done_and_fits_then_not_told) {
    fixture f = fixture_open(0, false);
    sk_stream *stream = make_stream(f.backend);
    void *block = take(&f, PART, NULL);
    CHECK_OK(sk_pool_use(f.pool, block, stream));
    give(&f, block);
    CHECK_EQUAL(SK_BLOCK_PENDING, block_at(&f, block).state);
    CHECK_OK(sk_stream_sync(f.backend, stream));
    int nmade = 0;
    sk_pool_set_making(f.pool, count_making, &nmade);
    CHECK(take(&f, PART, NULL) == block);
    CHECK_EQUAL(0, nmade);
    sk_pool_set_making(f.pool, NULL, NULL);
    give(&f, block);
    drop_used_stream(&f, stream);
    fixture_close(&f);
}

SK_TEST(pending, test_making_when_there_is_no_memory_for_a_lane_then_refused_and_not_told) {
    fixture f = fixture_open(0, true);
    sk_stream *stream = make_stream(f.backend);
    int nmade = 0;
    sk_pool_set_making(f.pool, count_making, &nmade);
    void *block = NULL;
    host_memory_fail(1, true);
    sk_status status = sk_pool_take(f.pool, PART, stream, &block);
    host_memory_fail(0, false);
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, status);
    CHECK_EQUAL(0, nmade);
    give(&f, take(&f, PART, stream));
    CHECK_EQUAL(1, nmade);
    sk_pool_set_making(f.pool, NULL, NULL);
    drop_used_stream(&f, stream);
    fixture_close(&f);
}

SK_TEST(pending, test_take_when_collecting_and_a_stream_cannot_be_waited_for_then_refused) {
    fixture f = {.backend = make_fault(make_device(CAPACITY))};
    sk_pool_params params = {
        .budget_bytes = 100 * MIB, .whole_segments = true, .garbage_collection_threshold = 0.5};
    CHECK_OK(sk_pool_create(f.backend, &params, &f.pool));
    sk_stream *busy = make_stream(f.backend);
    give(&f, take(&f, 60 * MIB, busy));
    void *block = NULL;
    sk_fault_arm(f.backend, 1, false, SK_BACKEND_FAILED);
    CHECK_STATUS(SK_BACKEND_FAILED, sk_pool_take(f.pool, 20 * MIB, NULL, &block));
    sk_fault_arm(f.backend, 0, false, SK_OK);
    CHECK(block == NULL);
    CHECK_EQUAL(0, stats_of(&f).num_garbage_collections);
    CHECK_OK(sk_pool_check(f.pool));
    give(&f, take(&f, 20 * MIB, NULL));
    CHECK_EQUAL(1, stats_of(&f).num_garbage_collections);
    drop_used_stream(&f, busy);
    fixture_close(&f);
}

/* Each allocation of the host's memory fails in turn while a range of addresses is opened. If it is
 * the backend's own, the pool may open a smaller range instead. */
SK_TEST(pending, test_take_when_host_memory_fails_in_a_new_range_then_nothing_of_it_is_left) {
    for (int forever = 0; forever < 2; forever++) {
        uint64_t nth = 0;
        int refusals = 0;
        for (bool failed = true; failed;) {
            nth++;
            fixture f = fixture_open_aliasing(0);
            void *block = NULL;
            host_memory_fail(nth, forever == 1);
            sk_status status = sk_pool_take(f.pool, PART, NULL, &block);
            failed = host_memory_calls() >= nth;
            host_memory_fail(0, false);
            CHECK_STATUS(status == SK_OK ? SK_OK : SK_OUT_OF_HOST_MEMORY, status);
            CHECK(failed || status == SK_OK);
            CHECK_OK(sk_pool_check(f.pool));
            if (status != SK_OK) {
                refusals++;
                CHECK_EQUAL(0, stats_of(&f).allocated_bytes[0].current);
                CHECK_OK(sk_pool_trim(f.pool));
                CHECK_EQUAL(0, device_bytes(f.backend));
                block = take(&f, PART, NULL);
            }
            pattern_write(block, PART, 1);
            CHECK(pattern_holds(block, PART, 1));
            give(&f, block);
            fixture_close(&f);
        }
        CHECK(refusals > 2);
    }
}

SK_TEST(pending, test_create_when_something_is_missing_then_refused) {
    sk_backend *backend = make_device(CAPACITY);
    sk_pool_params params = {0};
    sk_pool *pool = NULL;
    CHECK_STATUS(SK_INVALID, sk_pool_create(NULL, &params, &pool));
    CHECK_STATUS(SK_INVALID, sk_pool_create(backend, NULL, &pool));
    CHECK_STATUS(SK_INVALID, sk_pool_create(backend, &params, NULL));
    CHECK(pool == NULL);
    sk_backend_close(backend);
}
