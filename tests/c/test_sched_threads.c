/* test_sched_threads.c - threads with groups of their own do anything allowed, at any moment.
 *
 * Device memory is the allocator's, so a copy into or out of memory that was given up is seen by
 * the address sanitiser; every byte that comes back is compared. Runs for SK_TEST_SECONDS each.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "sched_fixture.h"

enum { NTHREADS = 6, NOWN = 6, LARGEST = 192 * KIB };

typedef struct worker {
    scene *s;
    atomic_bool *stop;
    pthread_t thread;
    sk_stream *stream;
    parcel own[NOWN];
    uint64_t state;
    bool has_disk;
    long nsteps, nreturned, nrefused;
} worker;

/* A copy that only a stream waits for may still run: nobody but that stream may touch its memory.
 */
static void settle(worker *w) { CHECK_OK(sk_stream_sync(w->s->backend, w->stream)); }

static void make_one(worker *w, parcel *p) {
    sk_tier tier = (sk_tier)random_below(&w->state, w->has_disk ? 3 : 2);
    *p = parcel_make(w->s, 1 + random_below(&w->state, LARGEST), tier,
                     random_below(&w->state, 1000));
}

static bool is_refusal(sk_status status) {
    return status == SK_OUT_OF_HOST_MEMORY || status == SK_OUT_OF_DISK;
}

static void send_one(worker *w, parcel *p) {
    sk_status status = parcel_out(p, random_below(&w->state, 2) == 0 ? w->stream : NULL);
    CHECK(status == SK_OK || is_refusal(status));
    w->nrefused += status != SK_OK;
}

/* Wait for a transfer in one of three ways. */
static sk_status finish_one(worker *w, parcel *p) {
    size_t how = random_below(&w->state, 3);
    return (parcel_state(p) == SK_GROUP_COPYING_OUT ? sk_group_finish_out : sk_group_finish_in)(
        p->group, how == 0 ? w->stream : NULL, how == 1);
}

static void finish_send(worker *w, parcel *p) {
    sk_status status = finish_one(w, p);
    CHECK(status == SK_OK || status == SK_NOT_READY || is_refusal(status));
    if (is_refusal(status)) {
        CHECK_EQUAL(SK_GROUP_RESIDENT, parcel_state(p));
        CHECK(parcel_holds(p));
        w->nrefused++;
    }
}

static void finish_fetch(worker *w, parcel *p) {
    sk_status status = finish_one(w, p);
    CHECK_STATUS(status == SK_NOT_READY ? SK_NOT_READY : SK_OK, status); /* never refused */
    if (status == SK_OK) {
        settle(w);
        CHECK(parcel_holds(p));
        w->nreturned++;
    }
}

static void step(worker *w) {
    enum { DROP_ONE_IN = 12, CHECK_ONE_IN = 100, TRIM_ONE_IN = 200 };
    parcel *p = &w->own[random_below(&w->state, NOWN)];
    w->nsteps++;
    if (random_below(&w->state, CHECK_ONE_IN) == 0) {
        scene_check(w->s);
    }
    if (random_below(&w->state, TRIM_ONE_IN) == 0) {
        sk_sched_trim(w->s->sched);
    }
    if (p->group == NULL) {
        make_one(w, p);
        return;
    }
    if (random_below(&w->state, DROP_ONE_IN) == 0) {
        settle(w);
        parcel_drop(p);
        return;
    }
    switch (parcel_state(p)) {
    case SK_GROUP_RESIDENT:
        send_one(w, p);
        break;
    case SK_GROUP_COPYING_OUT:
        finish_send(w, p);
        break;
    case SK_GROUP_CLEAN:
        settle(w);
        parcel_evict(p);
        break;
    case SK_GROUP_OUT:
        CHECK_OK(parcel_in(p, random_below(&w->state, 2) == 0 ? w->stream : NULL));
        break;
    case SK_GROUP_COPYING_IN:
        finish_fetch(w, p);
        break;
    }
}

static void *work(void *argument) {
    worker *w = argument;
    while (!atomic_load(w->stop)) {
        step(w);
    }
    settle(w);
    for (int i = 0; i < NOWN; i++) {
        parcel_drop(&w->own[i]);
    }
    return NULL;
}

static unsigned seconds_to_run(void) {
    enum { DEFAULT_SECONDS = 2, DECIMAL = 10 };
    const char *text = getenv("SK_TEST_SECONDS");
    return text == NULL ? DEFAULT_SECONDS : (unsigned)strtoul(text, NULL, DECIMAL);
}

static void run_threads(const scene_options *options) {
    enum { SPARE_SECONDS = 60 };
    test_time_limit(seconds_to_run() + SPARE_SECONDS);
    scene s;
    scene_open(&s, options);
    worker *workers = calloc(NTHREADS, sizeof *workers);
    CHECK(workers != NULL);
    atomic_bool stop = false;
    for (unsigned i = 0; i < NTHREADS; i++) {
        workers[i] = (worker){.s = &s, .stop = &stop, .state = i + 1, .has_disk = options->disk};
        workers[i].stream = make_stream(s.backend);
        CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
    struct timespec length = {.tv_sec = seconds_to_run()}; /* the length of the run itself */
    while (nanosleep(&length, &length) != 0) {
    }
    atomic_store(&stop, true);
    long totals[3] = {0};
    for (int i = 0; i < NTHREADS; i++) {
        (void)pthread_join(workers[i].thread, NULL);
        totals[0] += workers[i].nsteps;
        totals[1] += workers[i].nreturned;
        totals[2] += workers[i].nrefused;
        drop_stream(s.backend, workers[i].stream);
    }
    sk_sched_stats stats = scene_stats(&s);
    (void)fprintf(stderr,
                  "    %ld steps, %ld returned, %ld refused, %llu bytes read, %llu overtook\n",
                  totals[0], totals[1], totals[2], (unsigned long long)stats.read_bytes,
                  (unsigned long long)stats.overtakes);
    CHECK(totals[1] > 0);
    CHECK(!options->disk || stats.read_bytes > 0);
    free(workers);
    scene_close(&s);
}

SK_TEST(sched_threads, test_threads_when_there_is_only_the_host_then_bytes_return) {
    run_threads(&(scene_options){0});
}

SK_TEST(sched_threads, test_threads_when_copies_share_events_then_bytes_return) {
    run_threads(&(scene_options){.streams = true});
}

SK_TEST(sched_threads, test_threads_when_the_host_is_tiny_then_the_limit_holds) {
    run_threads(&(scene_options){.host_limit_bytes = MIB, .copies_in_flight = 1});
}

SK_TEST(sched_threads, test_threads_when_the_host_is_tiny_and_a_disk_is_there_then_bytes_return) {
    run_threads(&(scene_options){.host_limit_bytes = MIB, .disk = true});
}

SK_TEST(sched_threads, test_threads_when_host_and_disk_are_tiny_then_bytes_return) {
    run_threads(&(scene_options){
        .host_limit_bytes = MIB, .disk = true, .disk_limit_bytes = MIB, .copies_in_flight = 1});
}
