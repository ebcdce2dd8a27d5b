/* test_parked.c - a pool whose program queues work on the host first: what settles, and when.
 *
 * A queue stands for the framework's: work in it is in no stream yet, and the pool's callback puts
 * all of it there. The work is a write of a pattern to a block and a read of it, so that memory
 * that another stream gets too early shows as a wrong pattern. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

enum { BLOCK = 4 * MIB, PROBE = 4 * KIB, MOST_WORK = 64, TRACED = 4096 };

typedef struct work {
    sk_stream *stream;
    void *block;
    unsigned char *host; /* the pattern, then what was read */
} work;

typedef struct scene {
    fixture f;
    sk_backend *trace; /* inside f.backend */
    sk_stream *one, *two;
    pthread_mutex_t mutex;
    work queue[MOST_WORK];
    unsigned char *host[MOST_WORK]; /* of all work ever queued */
    unsigned seeds[MOST_WORK];
    size_t nqueued, nhosts;
    int nsettles;
    bool fails;               /* the next settles */
    void *rescued;            /* what a rescue gives, once */
    void *given;              /* what another thread gives during the next settle */
    size_t nqueued_at_rescue; /* work that was queued before the rescue ran */
} scene;

static void queue_run(scene *s) {
    (void)pthread_mutex_lock(&s->mutex);
    for (size_t i = 0; i < s->nqueued; i++) {
        work *each = &s->queue[i];
        CHECK_OK(sk_copy_async(s->f.backend, each->block, each->host, PROBE, SK_HOST_TO_DEVICE,
                               each->stream));
        CHECK_OK(sk_copy_async(s->f.backend, each->host + PROBE, each->block, PROBE,
                               SK_DEVICE_TO_HOST, each->stream));
    }
    s->nqueued = 0;
    (void)pthread_mutex_unlock(&s->mutex);
}

static void *give_on_a_thread(void *context) {
    scene *s = context;
    give(&s->f, s->given);
    return NULL;
}

static sk_status settle(void *context, char *text, size_t capacity) {
    scene *s = context;
    if (s->fails) {
        (void)snprintf(text, capacity, "an operator failed");
        return SK_BACKEND_FAILED;
    }
    CHECK_OK(sk_pool_check(s->f.pool)); /* no lock is held */
    s->nsettles++;
    queue_run(s);
    if (s->given != NULL) {
        pthread_t thread;
        CHECK_EQUAL(0, pthread_create(&thread, NULL, give_on_a_thread, s));
        (void)pthread_join(thread, NULL);
        s->given = NULL;
    }
    return SK_OK;
}

static scene *scene_open(size_t budget_bytes, bool whole_segments) {
    scene *s = calloc(1, sizeof *s);
    s->f.fault = make_fault(make_device(CAPACITY));
    s->trace = make_trace(s->f.fault, TRACED);
    s->f.backend = s->trace;
    sk_pool_params params = {.budget_bytes = budget_bytes, .whole_segments = whole_segments};
    CHECK_OK(sk_pool_create(s->trace, &params, &s->f.pool));
    sk_pool_set_settle(s->f.pool, settle, s);
    (void)pthread_mutex_init(&s->mutex, NULL);
    s->one = make_stream(s->trace);
    s->two = make_stream(s->trace);
    return s;
}

/* Queue a write and a read of the block's first bytes. */
static void queue_work(scene *s, void *block, sk_stream *stream) {
    unsigned seed = (unsigned)s->nhosts + 1;
    unsigned char *host = host_take((size_t)2 * PROBE);
    pattern_write(host, PROBE, seed);
    memset(host + PROBE, 0, PROBE);
    (void)pthread_mutex_lock(&s->mutex);
    CHECK(s->nqueued < MOST_WORK && s->nhosts < MOST_WORK);
    s->queue[s->nqueued++] = (work){.stream = stream, .block = block, .host = host};
    s->seeds[s->nhosts] = seed;
    s->host[s->nhosts++] = host;
    (void)pthread_mutex_unlock(&s->mutex);
}

/* Check that all work read what it wrote. */
static void scene_close(scene *s) {
    queue_run(s);
    CHECK_OK(sk_stream_sync(s->f.backend, s->one));
    CHECK_OK(sk_stream_sync(s->f.backend, s->two));
    for (size_t i = 0; i < s->nhosts; i++) {
        CHECK(pattern_holds(s->host[i] + PROBE, PROBE, s->seeds[i]));
        host_give(s->host[i]);
    }
    sk_pool_set_rescue(s->f.pool, NULL, NULL);
    drop_used_stream(&s->f, s->one);
    drop_used_stream(&s->f, s->two);
    fixture_close(&s->f); /* settles, too */
    (void)pthread_mutex_destroy(&s->mutex);
    free(s);
}

/* How often `name` was called after the last call of `other`. */
static size_t calls_after(scene *s, const char *name, const char *other) {
    sk_trace_call *calls = calloc(TRACED, sizeof *calls);
    size_t count = sk_trace_read(s->trace, calls, TRACED);
    size_t found = 0;
    for (size_t i = 0; i < count; i++) {
        found = strcmp(calls[i].name, other) == 0 ? 0 : found;
        found += strcmp(calls[i].name, name) == 0;
    }
    free(calls);
    return found;
}

SK_TEST(parked, test_take_when_a_block_of_the_stream_fits_then_nothing_settles) {
    scene *s = scene_open(8 * BLOCK, false);
    void *block = take(&s->f, BLOCK, s->one);
    int before = s->nsettles;
    queue_work(s, block, s->one);
    give(&s->f, block);
    CHECK(take(&s->f, BLOCK, s->one) == block);
    CHECK_EQUAL(before, s->nsettles);
    CHECK_EQUAL(before, stats_of(&s->f).num_settles);
    CHECK_EQUAL(1, s->nqueued);
    give(&s->f, block);
    scene_close(s);
}

SK_TEST(parked, test_take_when_another_streams_block_serves_then_its_work_comes_first) {
    scene *s = scene_open(BLOCK, false);
    void *block = take(&s->f, BLOCK, s->one);
    queue_work(s, block, s->one);
    give(&s->f, block);
    CHECK(take(&s->f, BLOCK, s->two) == block);
    CHECK_EQUAL(0, s->nqueued);
    CHECK(calls_after(s, "event_record", "copy_async") > 0); /* behind the queued work */
    queue_work(s, block, s->two);
    give(&s->f, block);
    scene_close(s);
}

SK_TEST(parked, test_give_when_another_stream_uses_the_block_then_its_event_follows_the_work) {
    scene *s = scene_open(BLOCK, false);
    void *block = take(&s->f, BLOCK, s->one);
    CHECK_OK(sk_pool_use(s->f.pool, block, s->two));
    queue_work(s, block, s->two);
    give(&s->f, block);
    CHECK_EQUAL(1, s->nqueued);
    CHECK_EQUAL(0, calls_after(s, "event_record", "copy_async"));
    CHECK_EQUAL(0, stats_of(&s->f).allocated_bytes[0].current);
    CHECK_EQUAL(BLOCK, stats_of(&s->f).active_bytes[0].current);
    CHECK(take(&s->f, BLOCK, s->one) == block);
    CHECK_EQUAL(0, s->nqueued);
    CHECK(calls_after(s, "event_record", "copy_async") > 0);
    give(&s->f, block);
    scene_close(s);
}

SK_TEST(parked, test_unuse_when_the_stream_is_done_then_the_block_is_free_at_once) {
    scene *s = scene_open(BLOCK, false);
    void *block = take(&s->f, BLOCK, s->one);
    CHECK_OK(sk_pool_use(s->f.pool, block, s->two));
    sk_pool_unuse(s->f.pool, block, s->one, s->one); /* no such use */
    sk_pool_unuse(s->f.pool, block, s->two, s->one);
    sk_pool_unuse(s->f.pool, (char *)block + ROUNDING, s->two, s->one); /* no block */
    int before = s->nsettles;
    give(&s->f, block);
    CHECK(take(&s->f, BLOCK, s->one) == block);
    CHECK_EQUAL(before, s->nsettles);
    give(&s->f, block);
    scene_close(s);
}

SK_TEST(parked, test_unuse_when_another_stream_waited_then_the_block_stays_in_use) {
    scene *s = scene_open(BLOCK, false);
    void *block = take(&s->f, BLOCK, s->one);
    CHECK_OK(sk_pool_use(s->f.pool, block, s->two));
    sk_pool_unuse(s->f.pool, block, s->two, s->two); /* the block's own stream does not wait */
    give(&s->f, block);
    CHECK_EQUAL(BLOCK, stats_of(&s->f).active_bytes[0].current);
    CHECK(take(&s->f, BLOCK, s->one) == block);
    give(&s->f, block);
    scene_close(s);
}

SK_TEST(parked, test_settle_when_it_fails_then_nothing_is_lost_and_later_takes_work) {
    scene *s = scene_open(2 * BLOCK, false);
    void *used = take(&s->f, BLOCK, s->one);
    CHECK_OK(sk_pool_use(s->f.pool, used, s->two));
    void *other = take(&s->f, BLOCK, s->one);
    give(&s->f, used);
    give(&s->f, other);
    s->fails = true;
    void *never = NULL;
    CHECK_STATUS(SK_BACKEND_FAILED, sk_pool_take(s->f.pool, 2 * BLOCK, s->one, &never));
    CHECK_CONTAINS(sk_error_text(), "an operator failed");
    CHECK_STATUS(SK_BACKEND_FAILED, sk_pool_trim(s->f.pool));
    CHECK_STATUS(SK_BACKEND_FAILED, sk_pool_set_budget(s->f.pool, BLOCK));
    CHECK_STATUS(SK_BACKEND_FAILED, sk_pool_destroy(s->f.pool));
    CHECK_OK(sk_pool_check(s->f.pool));
    CHECK(take(&s->f, BLOCK, s->one) == other); /* free on its own stream */
    give(&s->f, other);                         /* not parked: nothing relies on a settle */
    CHECK(take(&s->f, BLOCK, s->one) == other);
    give(&s->f, other);
    s->fails = false;
    never = take(&s->f, 2 * BLOCK, s->one);
    give(&s->f, never);
    scene_close(s);
}

SK_TEST(parked, test_take_when_tentative_then_it_does_not_wait_for_the_queue) {
    scene *s = scene_open(2 * BLOCK, false);
    void *block = take(&s->f, BLOCK, s->one);
    queue_work(s, block, s->one);
    give(&s->f, block);
    int before = s->nsettles;
    (void)sk_tentative_set(true);
    void *fresh = take(&s->f, BLOCK, s->two); /* new memory, though the other stream's would fit */
    void *never = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(s->f.pool, BLOCK, s->two, &never));
    (void)sk_tentative_set(false);
    CHECK_EQUAL(before, s->nsettles);
    CHECK_EQUAL(1, s->nqueued);
    give(&s->f, fresh);
    scene_close(s);
}

SK_TEST(parked, test_give_during_a_settle_then_only_the_next_settle_frees_the_block) {
    scene *s = scene_open(2 * BLOCK, false);
    void *first = take(&s->f, BLOCK, s->one);
    void *second = take(&s->f, BLOCK, s->one);
    queue_work(s, first, s->one);
    give(&s->f, first);
    s->given = second; /* perhaps with work that this settle does not see */
    CHECK(take(&s->f, BLOCK, s->two) == first);
    CHECK_EQUAL(SK_BLOCK_PENDING, block_at(&s->f, second).state);
    int before = s->nsettles;
    CHECK(take(&s->f, BLOCK, s->one) == second);
    CHECK_EQUAL(before + 1, s->nsettles);
    give(&s->f, first);
    give(&s->f, second);
    scene_close(s);
}

static size_t rescue(void *context, size_t needed_bytes) {
    scene *s = context;
    (void)needed_bytes;
    if (s->rescued == NULL) {
        return 0;
    }
    queue_work(s, s->rescued, s->one);
    s->nqueued_at_rescue = s->nqueued;
    give(&s->f, s->rescued);
    s->rescued = NULL;
    return BLOCK;
}

/* Evicts: the work that it queued fails when the pool settles for the block. */
static size_t rescue_in_vain(void *context, size_t needed_bytes) {
    scene *s = context;
    size_t freed = rescue(context, needed_bytes);
    s->fails = freed > 0;
    return freed;
}

SK_TEST(parked, test_rescue_when_queued_work_fails_after_it_then_the_take_reports_that) {
    scene *s = scene_open(BLOCK, false);
    s->rescued = take(&s->f, BLOCK, s->one);
    sk_pool_set_rescue(s->f.pool, rescue_in_vain, s);
    void *never = NULL;
    CHECK_STATUS(SK_BACKEND_FAILED, sk_pool_take(s->f.pool, BLOCK, s->two, &never));
    CHECK_CONTAINS(sk_error_text(), "an operator failed");
    s->fails = false;
    void *block = take(&s->f, BLOCK, s->two); /* the rescued block was parked meanwhile */
    give(&s->f, block);
    scene_close(s);
}

SK_TEST(parked, test_rescue_when_it_frees_a_block_with_queued_work_then_that_comes_first) {
    scene *s = scene_open(BLOCK, false);
    s->rescued = take(&s->f, BLOCK, s->one);
    void *expected = s->rescued;
    sk_pool_set_rescue(s->f.pool, rescue, s);
    CHECK(take(&s->f, BLOCK, s->two) == expected);
    CHECK_EQUAL(1, s->nqueued_at_rescue);
    CHECK_EQUAL(0, s->nqueued);
    CHECK_EQUAL(1, stats_of(&s->f).num_rescues);
    queue_work(s, expected, s->two);
    give(&s->f, expected);
    scene_close(s);
}

static void trim_settles(bool whole_segments) {
    scene *s = scene_open(8 * BLOCK, whole_segments);
    void *block = take(&s->f, BLOCK, s->one);
    queue_work(s, block, s->one);
    give(&s->f, block);
    CHECK_OK(sk_pool_trim(s->f.pool)); /* the work would write to memory that is gone */
    CHECK_EQUAL(0, s->nqueued);
    CHECK_EQUAL(0, stats_of(&s->f).reserved_bytes[0].current);
    scene_close(s);
}

SK_TEST(parked, test_trim_then_queued_work_comes_before_memory_goes_back) { trim_settles(false); }

SK_TEST(parked, test_trim_of_whole_segments_then_likewise) { trim_settles(true); }

SK_TEST(parked, test_budget_when_lowered_then_queued_work_comes_first) {
    scene *s = scene_open(2 * BLOCK, false);
    void *block = take(&s->f, BLOCK, s->one);
    queue_work(s, block, s->one);
    give(&s->f, block);
    CHECK_OK(sk_pool_set_budget(s->f.pool, BLOCK / 2));
    CHECK_EQUAL(0, s->nqueued);
    scene_close(s);
}

SK_TEST(parked, test_event_when_it_cannot_be_recorded_then_the_block_stays_parked) {
    scene *s = scene_open(BLOCK, false);
    void *block = take(&s->f, BLOCK, s->one);
    CHECK_OK(sk_pool_use(s->f.pool, block, s->two));
    give(&s->f, block);
    sk_fault_arm(s->f.fault, 1, true, SK_BACKEND_FAILED);
    void *never = NULL;
    CHECK_STATUS(SK_BACKEND_FAILED, sk_pool_take(s->f.pool, BLOCK, s->one, &never));
    CHECK_OK(sk_pool_check(s->f.pool));
    sk_fault_arm(s->f.fault, 0, false, SK_OK);
    CHECK(take(&s->f, BLOCK, s->one) == block);
    give(&s->f, block);
    scene_close(s);
}

/* ---- several threads, and one that empties their queue --------------------------------------- */

enum { TRAINERS = 3, ROUNDS = 300, KEPT = 2, STORM_BUDGET = 6 };

typedef struct storm {
    fixture f;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    work queue[TRAINERS * ROUNDS];
    size_t head, tail; /* the consumer has run all before `head` */
    bool ends;
    atomic_int wrong, nrefused;
} storm;

static void *consume(void *context) {
    storm *s = context;
    (void)pthread_mutex_lock(&s->mutex);
    while (!s->ends || s->head < s->tail) {
        if (s->head == s->tail) {
            (void)pthread_cond_wait(&s->changed, &s->mutex);
            continue;
        }
        work each = s->queue[s->head];
        (void)pthread_mutex_unlock(&s->mutex);
        CHECK_OK(sk_copy_async(s->f.backend, each.block, each.host, PROBE, SK_HOST_TO_DEVICE,
                               each.stream));
        CHECK_OK(sk_copy_async(s->f.backend, each.host + PROBE, each.block, PROBE,
                               SK_DEVICE_TO_HOST, each.stream));
        (void)pthread_mutex_lock(&s->mutex);
        s->head++;
        (void)pthread_cond_broadcast(&s->changed);
    }
    (void)pthread_mutex_unlock(&s->mutex);
    return NULL;
}

static sk_status storm_settle(void *context, char *text, size_t capacity) {
    (void)text, (void)capacity;
    storm *s = context;
    (void)pthread_mutex_lock(&s->mutex);
    size_t end = s->tail;
    while (s->head < end) {
        (void)pthread_cond_wait(&s->changed, &s->mutex);
    }
    (void)pthread_mutex_unlock(&s->mutex);
    return SK_OK;
}

static void storm_queue(storm *s, work added) {
    (void)pthread_mutex_lock(&s->mutex);
    s->queue[s->tail++] = added;
    (void)pthread_cond_broadcast(&s->changed);
    (void)pthread_mutex_unlock(&s->mutex);
}

typedef struct trainer {
    storm *storm;
    unsigned number;
} trainer;

static void *train(void *context) {
    trainer *me = context;
    storm *s = me->storm;
    sk_stream *stream = make_stream(s->f.backend);
    uint64_t random = me->number + 1;
    unsigned char *hosts[ROUNDS] = {0};
    void *kept[KEPT] = {0};
    for (unsigned i = 0; i < ROUNDS; i++) {
        size_t slot = random_below(&random, KEPT);
        if (kept[slot] != NULL) {
            give(&s->f, kept[slot]); /* its work may still be queued */
            kept[slot] = NULL;
        }
        size_t nbytes = BLOCK / (1 + random_below(&random, 4));
        if (sk_pool_take(s->f.pool, nbytes, stream, &kept[slot]) != SK_OK) {
            s->nrefused++;
            continue;
        }
        hosts[i] = host_take((size_t)2 * PROBE);
        pattern_write(hosts[i], PROBE, me->number * ROUNDS + i);
        storm_queue(s, (work){.stream = stream, .block = kept[slot], .host = hosts[i]});
    }
    for (size_t slot = 0; slot < KEPT; slot++) {
        if (kept[slot] != NULL) {
            give(&s->f, kept[slot]);
        }
    }
    CHECK_OK(storm_settle(s, NULL, 0));
    CHECK_OK(sk_stream_sync(s->f.backend, stream));
    for (unsigned i = 0; i < ROUNDS; i++) {
        if (hosts[i] != NULL) {
            s->wrong += !pattern_holds(hosts[i] + PROBE, PROBE, me->number * ROUNDS + i);
            host_give(hosts[i]);
        }
    }
    drop_used_stream(&s->f, stream);
    return NULL;
}

/* Return how many patterns were wrong. */
static int storm_run(void) {
    storm *s = calloc(1, sizeof *s);
    s->f = fixture_open((size_t)STORM_BUDGET * BLOCK / 2, false);
    sk_pool_set_settle(s->f.pool, storm_settle, s);
    (void)pthread_mutex_init(&s->mutex, NULL);
    (void)pthread_cond_init(&s->changed, NULL);
    pthread_t consumer;
    pthread_t threads[TRAINERS];
    trainer trainers[TRAINERS];
    CHECK_EQUAL(0, pthread_create(&consumer, NULL, consume, s));
    for (unsigned i = 0; i < TRAINERS; i++) {
        trainers[i] = (trainer){.storm = s, .number = i};
        CHECK_EQUAL(0, pthread_create(&threads[i], NULL, train, &trainers[i]));
    }
    for (unsigned i = 0; i < TRAINERS; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    (void)pthread_mutex_lock(&s->mutex);
    s->ends = true;
    (void)pthread_cond_broadcast(&s->changed);
    (void)pthread_mutex_unlock(&s->mutex);
    (void)pthread_join(consumer, NULL);
    int wrong = s->wrong;
    CHECK(stats_of(&s->f).num_settles > 0);
    fixture_close(&s->f);
    (void)pthread_mutex_destroy(&s->mutex);
    (void)pthread_cond_destroy(&s->changed);
    free(s);
    return wrong;
}

SK_TEST(parked_threads, test_memory_of_many_streams_when_work_is_queued_then_no_pattern_is_wrong) {
    CHECK_EQUAL(0, storm_run());
}
