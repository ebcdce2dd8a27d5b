/* test_stream.c - reuse across streams, with copies that stay pending until the test lets them go.
 */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

enum { NBYTES = 2 * MIB };

/* A pool whose copies are held back, two streams, host memory to copy to. */
typedef struct pair {
    fixture f;
    sk_stream *first;
    sk_stream *second;
    unsigned char *host;
} pair;

static pair pair_open(size_t budget_bytes, bool whole) {
    pair made = {.f = fixture_open_gated(budget_bytes, whole),
                 .host = host_take((size_t)2 * NBYTES)};
    made.first = make_stream(made.f.backend);
    made.second = make_stream(made.f.backend);
    return made;
}

static void pair_close(pair *p) {
    sk_delay_release(p->f.gate, UINT64_MAX);
    CHECK_OK(sk_stream_sync(p->f.backend, p->first));
    CHECK_OK(sk_stream_sync(p->f.backend, p->second));
    CHECK_OK(sk_pool_trim(p->f.pool));
    drop_used_stream(&p->f, p->first);
    drop_used_stream(&p->f, p->second);
    fixture_close(&p->f);
    host_give(p->host);
}

static void copy_out(pair *p, void *to, const void *block, sk_stream *stream) {
    CHECK_OK(sk_copy_async(p->f.backend, to, block, NBYTES, SK_DEVICE_TO_HOST, stream));
}

SK_TEST(stream, test_take_when_given_on_the_same_stream_then_reused_with_copy_pending) {
    pair p = pair_open(0, false);
    void *block = take(&p.f, NBYTES, p.first);
    pattern_write(block, NBYTES, 1);
    copy_out(&p, p.host, block, p.first);
    give(&p.f, block);
    CHECK(take(&p.f, NBYTES, p.first) == block); /* ordered behind the copy by the stream itself */
    give(&p.f, block);
    pair_close(&p);
}

SK_TEST(stream, test_take_when_memory_is_free_then_other_streams_block_is_left_alone) {
    pair p = pair_open(0, false);
    void *block = take(&p.f, NBYTES, p.first);
    copy_out(&p, p.host, block, p.first);
    give(&p.f, block);
    void *other = take(&p.f, NBYTES, p.second);
    CHECK(other != block);
    void *plain = take(&p.f, NBYTES, NULL);
    CHECK(plain != block && plain != other);
    give(&p.f, other);
    give(&p.f, plain);
    pair_close(&p);
}

SK_TEST(stream, test_use_when_copy_pending_then_block_is_not_reused_until_it_is_done) {
    pair p = pair_open(0, false);
    void *block = take(&p.f, NBYTES, p.first);
    CHECK_OK(sk_pool_use(p.f.pool, block, p.second));
    pattern_write(block, NBYTES, 1);
    copy_out(&p, p.host, block, p.second);
    give(&p.f, block);
    CHECK_EQUAL(SK_BLOCK_PENDING, block_at(&p.f, block).state);
    CHECK_EQUAL(0, stats_of(&p.f).allocated_bytes[0].current);
    CHECK_EQUAL(NBYTES, stats_of(&p.f).active_bytes[0].current);
    void *other = take(&p.f, NBYTES, p.first);
    CHECK(other != block);
    pattern_write(other, NBYTES, 2);
    CHECK_OK(sk_pool_check(p.f.pool));
    sk_delay_release(p.f.gate, 1);
    CHECK_OK(sk_stream_sync(p.f.backend, p.second));
    CHECK(pattern_holds(p.host, NBYTES, 1));
    void *again = take(&p.f, NBYTES, p.first);
    CHECK(again == block);
    give(&p.f, other);
    give(&p.f, again);
    pair_close(&p);
}

SK_TEST(stream, test_use_when_same_stream_or_twice_then_one_wait_is_enough) {
    pair p = pair_open(0, false);
    void *block = take(&p.f, NBYTES, p.first);
    CHECK_OK(sk_pool_use(p.f.pool, block, p.first)); /* its own: nothing to remember */
    copy_out(&p, p.host, block, p.first);
    give(&p.f, block);
    CHECK(take(&p.f, NBYTES, p.first) == block);
    CHECK_OK(sk_pool_use(p.f.pool, block, p.second));
    CHECK_OK(sk_pool_use(p.f.pool, block, p.second));
    give(&p.f, block);
    sk_delay_release(p.f.gate, UINT64_MAX);
    CHECK_OK(sk_stream_sync(p.f.backend, p.second));
    CHECK(take(&p.f, NBYTES, p.first) == block);
    give(&p.f, block);
    pair_close(&p);
}

SK_TEST(stream, test_use_when_many_streams_then_waits_for_each) {
    enum { NSTREAMS = 12 };
    pair p = pair_open(0, false);
    sk_stream *streams[NSTREAMS];
    void *block = take(&p.f, NBYTES, p.first);
    for (int i = 0; i < NSTREAMS; i++) {
        streams[i] = make_stream(p.f.backend);
        CHECK_OK(sk_pool_use(p.f.pool, block, streams[i]));
    }
    copy_out(&p, p.host, block, streams[NSTREAMS - 1]); /* only the last is held */
    give(&p.f, block);
    for (int i = 0; i < NSTREAMS - 1; i++) {
        CHECK_OK(sk_stream_sync(p.f.backend, streams[i]));
    }
    void *other = take(&p.f, NBYTES, p.first);
    CHECK(other != block);
    sk_delay_release(p.f.gate, UINT64_MAX);
    CHECK_OK(sk_stream_sync(p.f.backend, streams[NSTREAMS - 1]));
    CHECK(take(&p.f, NBYTES, p.first) == block);
    give(&p.f, block);
    give(&p.f, other);
    CHECK_OK(sk_pool_trim(p.f.pool));
    for (int i = 0; i < NSTREAMS; i++) {
        drop_used_stream(&p.f, streams[i]);
    }
    pair_close(&p);
}

/* A thread that waits for `stream`, then says whether the gate had been opened before. */
typedef struct waiter {
    pair *pair;
    sk_stream *stream;
    void *taken;
    atomic_bool started;
    atomic_bool opened;
    bool was_opened;
} waiter;

static void *wait_for_stream(void *argument) {
    waiter *mine = argument;
    atomic_store(&mine->started, true);
    CHECK_OK(sk_stream_sync(mine->pair->f.backend, mine->stream));
    mine->was_opened = atomic_load(&mine->opened);
    return NULL;
}

static void *wait_for_take(void *argument) {
    waiter *mine = argument;
    atomic_store(&mine->started, true);
    CHECK_OK(sk_pool_take(mine->pair->f.pool, NBYTES, mine->stream, &mine->taken));
    mine->was_opened = atomic_load(&mine->opened);
    return NULL;
}

/* Start `run`, give it every chance to go wrong, let `ncopies` copies go. */
static void race_for(waiter *mine, void *(*run)(void *), uint64_t ncopies) {
    enum { CHANCES = 100 };
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, run, mine) == 0);
    while (!atomic_load(&mine->started)) {
        (void)sched_yield();
    }
    for (int i = 0; i < CHANCES; i++) {
        (void)sched_yield();
    }
    atomic_store(&mine->opened, true);
    sk_delay_release(mine->pair->f.gate, ncopies);
    (void)pthread_join(thread, NULL);
    CHECK(mine->was_opened);
}

static void race(waiter *mine, void *(*run)(void *)) { race_for(mine, run, UINT64_MAX); }

/* The budget is one block: the other stream must adopt it, behind an event. */
static void adopt(bool whole) {
    pair p = pair_open(NBYTES, whole);
    void *block = take(&p.f, NBYTES, p.first);
    pattern_write(block, NBYTES, 1);
    copy_out(&p, p.host, block, p.first);
    give(&p.f, block);
    void *adopted = take(&p.f, NBYTES, p.second); /* does not wait: the stream will */
    CHECK(adopted == block);
    CHECK_EQUAL(0, p.host[NBYTES - 1]); /* the copy is still held */
    waiter mine = {.pair = &p, .stream = p.second};
    race(&mine, wait_for_stream);
    CHECK(pattern_holds(p.host, NBYTES, 1));
    give(&p.f, adopted);
    CHECK_OK(sk_pool_check(p.f.pool));
    pair_close(&p);
}

SK_TEST(stream, test_take_when_only_other_streams_block_is_left_then_adopted_behind_an_event) {
    adopt(false);
    adopt(true);
}

SK_TEST(stream, test_take_when_block_adopted_then_old_copy_reads_old_bytes) {
    pair p = pair_open(NBYTES, false);
    void *block = take(&p.f, NBYTES, p.first);
    pattern_write(block, NBYTES, 1);
    copy_out(&p, p.host, block, p.first);
    give(&p.f, block);
    void *adopted = take(&p.f, NBYTES, p.second);
    unsigned char *fresh = p.host + NBYTES;
    pattern_write(fresh, NBYTES, 2);
    CHECK_OK(sk_copy_async(p.f.backend, adopted, fresh, NBYTES, SK_HOST_TO_DEVICE, p.second));
    sk_delay_release(p.f.gate, UINT64_MAX);
    CHECK_OK(sk_stream_sync(p.f.backend, p.second));
    CHECK(pattern_holds(p.host, NBYTES, 1));
    CHECK(pattern_holds(adopted, NBYTES, 2));
    give(&p.f, adopted);
    pair_close(&p);
}

/* The host has no stream that could wait: the call itself must. */
static void adopt_on_host(bool whole) {
    pair p = pair_open(NBYTES, whole);
    void *block = take(&p.f, NBYTES, p.first);
    pattern_write(block, NBYTES, 1);
    copy_out(&p, p.host, block, p.first);
    give(&p.f, block);
    waiter mine = {.pair = &p, .stream = NULL};
    race(&mine, wait_for_take);
    CHECK(mine.taken == block);
    CHECK(pattern_holds(p.host, NBYTES, 1));
    give(&p.f, mine.taken);
    pair_close(&p);
}

SK_TEST(stream, test_take_when_host_adopts_then_waits_for_the_copy) {
    need_host_order(); /* a stream waits, not the call */
    adopt_on_host(false);
    adopt_on_host(true);
}

/* Pending blocks count as reserved; the failing take waits for them instead of failing. */
static void pending(bool whole) {
    pair p = pair_open(NBYTES, whole);
    void *block = take(&p.f, NBYTES, NULL);
    CHECK_OK(sk_pool_use(p.f.pool, block, p.first));
    pattern_write(block, NBYTES, 3);
    copy_out(&p, p.host, block, p.first);
    give(&p.f, block);
    waiter mine = {.pair = &p, .stream = p.second};
    race(&mine, wait_for_take);
    CHECK(mine.taken == block);
    CHECK(pattern_holds(p.host, NBYTES, 3));
    give(&p.f, mine.taken);
    pair_close(&p);
}

SK_TEST(stream, test_take_when_all_is_pending_then_waits_for_the_event) {
    pending(false);
    pending(true);
}

SK_TEST(stream, test_take_when_the_first_pending_block_is_enough_then_the_next_is_not_awaited) {
    pair p = pair_open(2 * NBYTES, false);
    void *blocks[2];
    for (int i = 0; i < 2; i++) {
        blocks[i] = take(&p.f, NBYTES, NULL);
        CHECK_OK(sk_pool_use(p.f.pool, blocks[i], p.first));
    }
    for (int i = 0; i < 2; i++) {
        copy_out(&p, p.host, blocks[i], p.first);
        give(&p.f, blocks[i]);
    }
    waiter mine = {.pair = &p, .stream = p.second};
    race_for(&mine, wait_for_take, 1); /* the second copy is held: waiting for it would hang */
    CHECK(mine.taken == blocks[0]);
    CHECK_EQUAL(SK_BLOCK_PENDING, block_at(&p.f, blocks[1]).state);
    give(&p.f, mine.taken);
    pair_close(&p);
}

static void *wait_for_trim(void *argument) {
    waiter *mine = argument;
    atomic_store(&mine->started, true);
    CHECK_OK(sk_pool_trim(mine->pair->f.pool));
    mine->was_opened = atomic_load(&mine->opened);
    return NULL;
}

SK_TEST(stream, test_trim_when_block_is_pending_then_waits_and_gives_it_back) {
    pair p = pair_open(0, false);
    void *block = take(&p.f, NBYTES, NULL);
    CHECK_OK(sk_pool_use(p.f.pool, block, p.first));
    pattern_write(block, NBYTES, 4);
    copy_out(&p, p.host, block, p.first);
    give(&p.f, block);
    waiter mine = {.pair = &p};
    race(&mine, wait_for_trim);
    CHECK(pattern_holds(p.host, NBYTES, 4));
    CHECK_EQUAL(0, stats_of(&p.f).reserved_bytes[0].current);
    pair_close(&p);
}

/* A free block whose stream has a copy queued must not lose its memory under that copy. */
static void trim_behind_copy(bool whole) {
    pair p = pair_open(0, whole);
    enum { LARGE = 24 * MIB };
    unsigned char *host = host_take(LARGE);
    void *block = take(&p.f, LARGE, p.first);
    pattern_write(block, LARGE, 5);
    CHECK_OK(sk_copy_async(p.f.backend, host, block, LARGE, SK_DEVICE_TO_HOST, p.first));
    give(&p.f, block); /* free on its own stream at once, the copy has not begun */
    waiter mine = {.pair = &p};
    race(&mine, wait_for_trim);
    CHECK_OK(sk_stream_sync(p.f.backend, p.first));
    CHECK(pattern_holds(host, LARGE, 5));
    CHECK_EQUAL(0, stats_of(&p.f).reserved_bytes[0].current);
    host_give(host);
    pair_close(&p);
}

SK_TEST(stream, test_trim_when_free_block_is_still_read_then_waits_for_the_copy) {
    trim_behind_copy(false);
    trim_behind_copy(true);
}

/* A take that fails and grows elsewhere trims by itself: the same danger on that path. */
static void grow_behind_copy(bool whole) {
    pair p = pair_open((size_t)2 * NBYTES, whole);
    void *block = take(&p.f, NBYTES, p.first);
    pattern_write(block, NBYTES, 6);
    copy_out(&p, p.host, block, p.first);
    give(&p.f, block);
    waiter mine = {.pair = &p, .stream = p.second};
    pthread_t thread;
    sk_delay_release(p.f.gate, UINT64_MAX); /* in any order: the bytes must be right */
    CHECK(pthread_create(&thread, NULL, wait_for_stream, &mine) == 0);
    void *large = take(&p.f, (size_t)2 * NBYTES, p.second);
    (void)pthread_join(thread, NULL);
    CHECK_OK(sk_stream_sync(p.f.backend, p.first));
    CHECK_OK(sk_stream_sync(p.f.backend, p.second));
    CHECK(pattern_holds(p.host, NBYTES, 6));
    pattern_write(large, (size_t)2 * NBYTES, 7);
    CHECK(pattern_holds(p.host, NBYTES, 6));
    give(&p.f, large);
    pair_close(&p);
}

SK_TEST(stream, test_take_when_it_must_trim_a_block_being_read_then_copy_is_whole) {
    grow_behind_copy(false);
    grow_behind_copy(true);
}

SK_TEST(stream, test_trace_when_adopted_then_record_and_wait_are_called) {
    sk_backend *trace = make_trace(make_device(CAPACITY), KIB);
    fixture f = {.backend = trace};
    sk_pool_params params = {.budget_bytes = NBYTES};
    CHECK_OK(sk_pool_create(trace, &params, &f.pool));
    sk_stream *first = make_stream(trace);
    sk_stream *second = make_stream(trace);
    give(&f, take(&f, NBYTES, first));
    void *block = take(&f, NBYTES, second);
    sk_trace_call calls[KIB];
    size_t ncalls = sk_trace_read(trace, calls, KIB);
    int nwaits = 0;
    int nrecords = 0;
    for (size_t i = 0; i < ncalls; i++) {
        nrecords += strcmp(calls[i].name, "event_record") == 0;
        nwaits += strcmp(calls[i].name, "stream_wait") == 0;
    }
    CHECK(nrecords >= 1);
    CHECK(nwaits >= 1);
    give(&f, block);
    drop_used_stream(&f, first);
    drop_used_stream(&f, second);
    fixture_close(&f);
}

/* Neighbours free on different streams must not be merged into one block of either. */
SK_TEST(stream, test_give_when_neighbour_is_another_streams_then_not_handed_out_as_one) {
    pair p = pair_open(0, false);
    char *left = take(&p.f, 64 * KIB, p.first);
    give(&p.f, left);
    sk_delay_release(p.f.gate, UINT64_MAX);
    char *blocks[4];
    for (int i = 0; i < 4; i++) {
        blocks[i] = take(&p.f, 64 * KIB, i % 2 == 0 ? p.first : p.second);
        pattern_write(blocks[i], 64 * KIB, (unsigned)i);
    }
    for (int i = 0; i < 4; i++) {
        CHECK(pattern_holds(blocks[i], 64 * KIB, (unsigned)i));
        give(&p.f, blocks[i]);
        CHECK_OK(sk_pool_check(p.f.pool));
    }
    pair_close(&p);
}

/* What a thread wants from the pool in the test below. */
typedef struct taker {
    pair *pair;
    size_t nbytes;
    sk_status status;
    void *taken;
    atomic_int *nstarted;
} taker;

static void *take_one(void *argument) {
    taker *mine = argument;
    atomic_fetch_add(mine->nstarted, 1);
    mine->status = sk_pool_take(mine->pair->f.pool, mine->nbytes, NULL, &mine->taken);
    return NULL;
}

/* One pending block has room for all; whoever waits for it first, nobody may be refused. */
SK_TEST(stream, test_take_when_another_thread_waits_for_the_pending_block_then_it_waits_too) {
    enum { NTAKERS = 3, CHANCES = 100, EACH = 512 * KIB };
    pair p = pair_open(NBYTES, false);
    void *block = take(&p.f, NBYTES, NULL);
    CHECK_OK(sk_pool_use(p.f.pool, block, p.first));
    copy_out(&p, p.host, block, p.first);
    give(&p.f, block);
    atomic_int nstarted = 0;
    taker takers[NTAKERS];
    pthread_t threads[NTAKERS];
    for (int i = 0; i < NTAKERS; i++) {
        takers[i] = (taker){.pair = &p, .nbytes = EACH, .nstarted = &nstarted};
        CHECK(pthread_create(&threads[i], NULL, take_one, &takers[i]) == 0);
    }
    while (atomic_load(&nstarted) < NTAKERS) {
        (void)sched_yield();
    }
    for (int i = 0; i < CHANCES; i++) {
        (void)sched_yield();
    }
    sk_delay_release(p.f.gate, UINT64_MAX);
    for (int i = 0; i < NTAKERS; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    for (int i = 0; i < NTAKERS; i++) {
        CHECK_OK(takers[i].status);
        give(&p.f, takers[i].taken);
    }
    pair_close(&p);
}

/* Free blocks of two streams in turn, each smaller than a granule: once both streams are idle
 * nothing may keep them apart. */
static void two_streams_neighbours(bool whole) {
    enum { EACH = 40 * KIB, BUDGET = 2 * MIB, NBLOCKS = BUDGET / EACH };
    pair p = pair_open(BUDGET, whole);
    void *blocks[NBLOCKS];
    for (int i = 0; i < NBLOCKS; i++) {
        blocks[i] = take(&p.f, EACH, p.first);
    }
    for (int i = 0; i < NBLOCKS; i += 2) {
        give(&p.f, blocks[i]);
    }
    for (int i = 0; i < NBLOCKS; i += 2) {
        blocks[i] = take(&p.f, EACH, p.second); /* adopted: the budget is full */
    }
    for (int i = 0; i < NBLOCKS; i++) {
        give(&p.f, blocks[i]);
    }
    CHECK_OK(sk_pool_check(p.f.pool));
    void *all = take(&p.f, BUDGET, NULL);
    CHECK_EQUAL(BUDGET, stats_of(&p.f).reserved_bytes[0].current);
    give(&p.f, all);
    pair_close(&p);
}

SK_TEST(stream, test_take_when_free_neighbours_belong_to_two_streams_then_all_can_be_used) {
    two_streams_neighbours(false);
}

SK_TEST(stream, test_take_when_segment_is_shared_by_two_streams_then_all_can_be_used) {
    two_streams_neighbours(true);
}
