/* test_sched.c - groups without a disk: states, order, owners, streams. */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "sched_fixture.h"

enum { SIZE = 64 * KIB };

/* ---- arguments ------------------------------------------------------------------------------- */

static void drop_nothing(void *owner) { (void)owner; }

SK_TEST(sched, test_create_when_an_argument_is_missing_then_invalid) {
    sk_backend *backend = make_device(CAPACITY);
    sk_sched_params params = {.drop_owner = drop_nothing};
    sk_sched *sched = NULL;
    CHECK_STATUS(SK_INVALID, sk_sched_create(NULL, &params, &sched));
    CHECK_STATUS(SK_INVALID, sk_sched_create(backend, NULL, &sched));
    CHECK_STATUS(SK_INVALID, sk_sched_create(backend, &params, NULL));
    CHECK_STATUS(SK_INVALID, sk_sched_create(backend, &(sk_sched_params){0}, &sched));
    CHECK_CONTAINS(sk_error_text(), "scheduler: expected a backend, parameters");
    params.disk_folder = "/proc/no such folder";
    CHECK(sk_sched_create(backend, &params, &sched) != SK_OK);
    CHECK(sched == NULL);
    CHECK_OK(sk_sched_destroy(NULL));
    sk_group_destroy(NULL);
    sk_backend_close(backend);
}

SK_TEST(sched, test_group_when_an_argument_is_wrong_then_invalid) {
    scene s;
    scene_open(&s, &(scene_options){0});
    sk_group *group = NULL;
    CHECK_STATUS(SK_INVALID, sk_group_create(s.sched, 0, SK_TIER_ANY, &group));
    CHECK_STATUS(SK_INVALID, sk_group_create(s.sched, SK_MAX_BYTES + 1, SK_TIER_ANY, &group));
    CHECK_CONTAINS(sk_error_text(), "is not possible");
    CHECK_STATUS(SK_INVALID, sk_group_create(s.sched, SIZE, SK_TIER_DISK, &group));
    CHECK_CONTAINS(sk_error_text(), "no disk was given");
    CHECK_STATUS(SK_INVALID, sk_group_create(s.sched, SIZE, (sk_tier)17, &group));
    CHECK_CONTAINS(sk_error_text(), "no tier 17");
    CHECK(group == NULL);
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_STATUS(SK_INVALID, sk_group_copy_out(p.group, NULL, NULL, 1, NULL));
    CHECK_CONTAINS(sk_error_text(), "without device memory");
    parcel_send(&p);
    CHECK_STATUS(SK_INVALID, sk_group_copy_in(p.group, NULL, NULL, 1, NULL));
    CHECK_EQUAL(SK_GROUP_OUT, parcel_state(&p));
    parcel_drop(&p);
    scene_close(&s);
}

/* ---- states ---------------------------------------------------------------------------------- */

static const char *const state_words[] = {"resident", "copying out", "clean", "out", "copying in"};

/* Try what `state` does not allow: each is refused with a text, and nothing has changed. */
static void try_illegal(parcel *p, sk_group_state state) {
    unsigned char bytes[1] = {0};
    const sk_status moves[] = {
        state == SK_GROUP_RESIDENT ? SK_INVALID : sk_group_copy_out(p->group, bytes, NULL, 1, NULL),
        state == SK_GROUP_COPYING_OUT ? SK_INVALID : sk_group_finish_out(p->group, NULL, true),
        state == SK_GROUP_CLEAN ? SK_INVALID : sk_group_evict(p->group),
        state == SK_GROUP_OUT ? SK_INVALID : sk_group_unevict(p->group),
        state == SK_GROUP_OUT ? SK_INVALID : sk_group_copy_in(p->group, bytes, NULL, 1, NULL),
        state == SK_GROUP_COPYING_IN ? SK_INVALID : sk_group_finish_in(p->group, NULL, false),
    };
    for (size_t i = 0; i < sizeof moves / sizeof moves[0]; i++) {
        CHECK_EQUAL(SK_INVALID, moves[i]);
    }
    CHECK_EQUAL(state, parcel_state(p));
    /* The texts name both states: one of the moves, asked again. */
    if (state != SK_GROUP_CLEAN) {
        CHECK_STATUS(SK_INVALID, sk_group_evict(p->group));
        CHECK_CONTAINS(sk_error_text(), state_words[state]);
        CHECK_CONTAINS(sk_error_text(), "cannot be evicted: it must be clean");
    } else {
        CHECK_STATUS(SK_INVALID, sk_group_finish_in(p->group, NULL, true));
        CHECK_CONTAINS(sk_error_text(),
                       "that is clean cannot be waited for: it must be copying in");
    }
    CHECK_EQUAL(0, scene_stats(p->scene).overtakes);
}

SK_TEST(sched, test_moves_when_the_state_forbids_them_then_invalid) {
    scene s;
    scene_open(&s, &(scene_options){.gate = true});
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    try_illegal(&p, SK_GROUP_RESIDENT);
    CHECK_OK(parcel_out(&p, NULL));
    try_illegal(&p, SK_GROUP_COPYING_OUT);
    sk_delay_release(s.gate, 1);
    parcel_finish_out(&p);
    try_illegal(&p, SK_GROUP_CLEAN);
    parcel_evict(&p);
    try_illegal(&p, SK_GROUP_OUT);
    CHECK_OK(parcel_in(&p, NULL));
    try_illegal(&p, SK_GROUP_COPYING_IN);
    sk_delay_release(s.gate, 1);
    parcel_finish_in(&p);
    try_illegal(&p, SK_GROUP_CLEAN);
    scene_check(&s);
    parcel_drop(&p);
    scene_close(&s);
}

SK_TEST(sched, test_unevict_when_the_memory_was_kept_then_clean_without_a_copy) {
    scene s;
    scene_open(&s, &(scene_options){0});
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_OK(parcel_out(&p, NULL));
    parcel_finish_out(&p);
    CHECK_OK(sk_group_evict(p.group));
    CHECK_OK(sk_group_unevict(p.group));
    CHECK_EQUAL(SK_GROUP_CLEAN, parcel_state(&p));
    CHECK_EQUAL(0, scene_stats(&s).copied_in_bytes);
    parcel_evict(&p);
    parcel_fetch(&p);
    parcel_drop(&p);
    scene_close(&s);
}

SK_TEST(sched, test_round_trip_when_repeated_then_bytes_return_and_are_counted) {
    enum { ROUNDS = 20, LARGE = 3 * MIB };
    const size_t sizes[] = {1, 100, 4 * KIB, SIZE, LARGE};
    scene s;
    scene_open(&s, &(scene_options){0});
    uint64_t expected = 0;
    for (int i = 0; i < ROUNDS; i++) {
        size_t nbytes = sizes[(size_t)i % (sizeof sizes / sizeof sizes[0])];
        parcel p = parcel_make(&s, nbytes, SK_TIER_ANY, 1);
        parcel_send(&p);
        parcel_fetch(&p);
        parcel_evict(&p); /* the copy is still good: no new one is needed */
        parcel_fetch(&p);
        parcel_drop(&p);
        expected += nbytes;
    }
    sk_sched_stats stats = scene_stats(&s);
    CHECK_EQUAL(expected, stats.copied_out_bytes);
    CHECK_EQUAL(2 * expected, stats.copied_in_bytes);
    CHECK_EQUAL(0, stats.written_bytes + stats.read_bytes);
    sk_sched_drain(s.sched);
    CHECK_EQUAL(3 * ROUNDS, atomic_load(&s.ndrops));
    scene_close(&s);
}

/* ---- order ----------------------------------------------------------------------------------- */

enum { NQUEUED = 6 };

/* From here on, copies in are in no order that has to stay. */
static const uint64_t first_unplanned = UINT64_C(1) << 40;

/* Queue parcels behind one that is held, in one direction, with these next uses beyond `base`. */
static void queue_up(scene *s, parcel *parcels, bool out, uint64_t base) {
    static const uint64_t uses[NQUEUED] = {50, 30, 10, 60, 20, 40};
    scene_open(s, &(scene_options){.gate = true, .copies_in_flight = 1});
    for (int i = 0; i < NQUEUED; i++) {
        parcels[i] = parcel_make(s, SIZE, SK_TIER_ANY, base + uses[i]);
        if (!out) {
            sk_delay_release(s->gate, 1);
            parcel_send(&parcels[i]);
        }
    }
    sk_sched_drain(s->sched);
    atomic_store(&s->ndrops, 0);
    for (int i = 0; i < NQUEUED; i++) {
        CHECK_OK(out ? parcel_out(&parcels[i], NULL) : parcel_in(&parcels[i], NULL));
    }
    sk_sched_stats stats = scene_stats(s);
    CHECK_EQUAL(1, stats.in_flight);
    CHECK_EQUAL(NQUEUED - 1, stats.queued);
    scene_check(s);
}

/* Let everything go and check in which order the copies were done. `consumer` may be NULL. */
static void order_check(scene *s, parcel *parcels, sk_stream *consumer, const int *expected) {
    for (int i = 0; i < NQUEUED; i++) {
        atomic_fetch_add(&parcels[i].device->nholders, 1);
    }
    sk_delay_release(s->gate, UINT64_MAX);
    sk_sched_drain(s->sched);
    if (consumer != NULL) {
        CHECK_OK(sk_stream_sync(s->backend, consumer));
        drop_stream(s->backend, consumer);
    }
    slab *slabs[NQUEUED];
    for (int i = 0; i < NQUEUED; i++) {
        slabs[i] = parcels[i].device;
        parcel_recover(&parcels[i]);
        parcel_drop(&parcels[i]);
    }
    while (atomic_load(&s->ndrops) < NQUEUED) { /* the pump may still be about to drop the last */
        (void)sched_yield();
    }
    for (int i = 0; i < NQUEUED; i++) {
        CHECK_EQUAL(expected[i], slabs[i]->dropped_as);
        slab_drop(slabs[i]);
    }
    scene_close(s);
}

SK_TEST(sched, test_queue_when_going_out_then_the_latest_next_use_goes_first) {
    scene s;
    parcel parcels[NQUEUED];
    queue_up(&s, parcels, true, 0);
    order_check(&s, parcels, NULL, (const int[]){1, 4, 6, 2, 5, 3});
}

SK_TEST(sched, test_queue_when_coming_in_then_the_soonest_next_use_goes_first) {
    scene s;
    parcel parcels[NQUEUED];
    queue_up(&s, parcels, false, 0);
    order_check(&s, parcels, NULL, (const int[]){1, 4, 2, 6, 3, 5});
}

/* Somebody waits for the one that would be last: it starts although nothing else may. */
static void overtake(bool out) {
    scene s;
    parcel parcels[NQUEUED];
    queue_up(&s, parcels, out, out ? 0 : first_unplanned);
    parcel *last = &parcels[out ? 2 : 3];
    sk_stream *consumer = make_stream(s.backend);
    CHECK_OK(out ? sk_group_finish_out(last->group, consumer, false)
                 : sk_group_finish_in(last->group, consumer, false));
    CHECK_EQUAL(SK_GROUP_CLEAN, parcel_state(last));
    sk_sched_stats stats = scene_stats(&s);
    CHECK_EQUAL(2, stats.in_flight);
    CHECK_EQUAL(NQUEUED - 2, stats.queued);
    CHECK_EQUAL(1, stats.overtakes);
    CHECK_EQUAL(1, last->device->dropped_as); /* the consumer is behind the copy */
    sk_delay_release(s.gate, 2);              /* of the held one and of this: no other is second */
    CHECK_OK(sk_stream_sync(s.backend, consumer));
    CHECK(parcel_holds(last));
    sk_delay_release(s.gate, UINT64_MAX);
    for (int i = 0; i < NQUEUED; i++) {
        parcel_recover(&parcels[i]);
        parcel_drop(&parcels[i]);
    }
    drop_stream(s.backend, consumer);
    scene_close(&s);
}

SK_TEST(sched, test_finish_out_when_still_queued_then_it_overtakes) { overtake(true); }
SK_TEST(sched, test_finish_in_when_still_queued_then_it_overtakes) { overtake(false); }

SK_TEST(sched, test_finish_in_when_planned_then_those_before_it_start_first) {
    scene s;
    parcel parcels[NQUEUED];
    queue_up(&s, parcels, false, first_unplanned - 60);
    sk_stream *consumer = make_stream(s.backend);
    CHECK_OK(sk_group_finish_in(parcels[5].group, consumer, false));
    CHECK_EQUAL(NQUEUED - 1, scene_stats(&s).in_flight); /* the last of all is not planned */
    CHECK_EQUAL(1, scene_stats(&s).queued);
    order_check(&s, parcels, consumer, (const int[]){2, 5, 3, 6, 4, 1}); /* its own first */
}

SK_TEST(sched, test_queue_when_many_are_asked_for_then_few_are_in_flight) {
    enum { NPARCELS = 9 };
    for (uint32_t most = 1; most < 4; most++) {
        scene s;
        scene_open(&s, &(scene_options){.gate = true, .copies_in_flight = most});
        uint32_t expected = most;
        parcel parcels[NPARCELS];
        for (int i = 0; i < NPARCELS; i++) {
            parcels[i] = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
            CHECK_OK(parcel_out(&parcels[i], NULL));
            CHECK(scene_stats(&s).in_flight <= expected);
        }
        CHECK_EQUAL(expected, scene_stats(&s).in_flight);
        CHECK_EQUAL(NPARCELS - expected, scene_stats(&s).queued);
        sk_delay_release(s.gate, 1);
        parcel_finish_out(&parcels[0]); /* the first of equals is first */
        while (scene_stats(&s).queued == NPARCELS - expected) {
            (void)sched_yield();
        }
        CHECK_EQUAL(expected, scene_stats(&s).in_flight);
        CHECK_EQUAL(0, scene_stats(&s).overtakes);
        for (int i = 0; i < NPARCELS; i++) {
            parcel_drop(&parcels[i]);
        }
        scene_close(&s);
    }
}

/* How many of `count` copies are in flight, those of `first` bytes before the others. */
static uint32_t count_in_flight(int count, size_t first, size_t nbytes) {
    scene s;
    scene_open(&s, &(scene_options){.gate = true});
    parcel *parcels = calloc((size_t)count, sizeof *parcels);
    CHECK(parcels != NULL);
    for (int i = 0; i < count; i++) {
        parcels[i] = parcel_make(&s, i == 0 ? first : nbytes, SK_TIER_ANY, 1);
        CHECK_OK(parcel_out(&parcels[i], NULL));
    }
    scene_check(&s);
    uint32_t in_flight = scene_stats(&s).in_flight;
    CHECK_EQUAL((uint32_t)count - in_flight, scene_stats(&s).queued);
    sk_delay_release(s.gate, UINT64_MAX);
    for (int i = 0; i < count; i++) {
        parcel_finish_out(&parcels[i]);
        parcel_drop(&parcels[i]);
    }
    free(parcels);
    scene_close(&s);
    return in_flight;
}

SK_TEST(sched, test_queue_when_nothing_is_said_then_as_many_in_flight_as_keep_the_link_busy) {
    enum { MANY = 70, FEW = 6, LARGE = 9 * MIB };
    CHECK_EQUAL(64, count_in_flight(MANY, SIZE, SIZE));
    CHECK_EQUAL(4, count_in_flight(FEW, 2 * MIB, 2 * MIB));
    CHECK_EQUAL(2, count_in_flight(FEW, 3 * MIB, 3 * MIB));
    CHECK_EQUAL(2, count_in_flight(FEW, LARGE, LARGE));
    CHECK_EQUAL(2, count_in_flight(FEW, LARGE, SIZE));
}

/* ---- copies that end together ---------------------------------------------------------------- */

SK_TEST(sched, test_poll_when_copies_are_held_then_it_never_waits) {
    scene s;
    scene_open(&s, &(scene_options){.gate = true, .copies_in_flight = 1});
    parcel running = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel queued = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_OK(parcel_out(&running, NULL));
    CHECK_OK(parcel_out(&queued, NULL));
    CHECK_STATUS(SK_NOT_READY, sk_group_finish_out(running.group, NULL, true));
    CHECK_STATUS(SK_NOT_READY, sk_group_finish_out(queued.group, NULL, true));
    CHECK_EQUAL(SK_GROUP_COPYING_OUT, parcel_state(&running));
    CHECK_EQUAL(SK_GROUP_COPYING_OUT, parcel_state(&queued));
    CHECK_EQUAL(0, atomic_load(&s.ndrops));
    CHECK_EQUAL(1, scene_stats(&s).queued); /* polling is not waiting: it overtakes nobody */
    sk_delay_release(s.gate, 2);
    parcel *both[] = {&running, &queued};
    for (int i = 0; i < 2; i++) {
        sk_status status = SK_NOT_READY;
        while (status == SK_NOT_READY) {
            status = sk_group_finish_out(both[i]->group, NULL, true);
        }
        CHECK_OK(status);
        CHECK_EQUAL(SK_GROUP_CLEAN, parcel_state(both[i]));
    }
    for (int i = 0; i < 2; i++) {
        parcel_evict(both[i]);
        CHECK_OK(parcel_in(both[i], NULL));
        CHECK_STATUS(SK_NOT_READY, sk_group_finish_in(both[i]->group, NULL, true));
        sk_delay_release(s.gate, 1);
        parcel_finish_in(both[i]);
        parcel_drop(both[i]);
    }
    scene_close(&s);
}

typedef struct waiter {
    parcel *p;
    pthread_t thread;
} waiter;

static void *wait_for_it(void *argument) {
    parcel_finish_out(((waiter *)argument)->p);
    return NULL;
}

SK_TEST(sched, test_finish_when_a_thread_waits_for_a_queued_one_then_it_goes_next) {
    scene s;
    parcel parcels[NQUEUED];
    queue_up(&s, parcels, true, 0);
    waiter w = {.p = &parcels[2]};
    CHECK(pthread_create(&w.thread, NULL, wait_for_it, &w) == 0);
    while (scene_stats(&s).overtakes == 0) {
        (void)sched_yield();
    }
    sk_delay_release(s.gate, 2);
    (void)pthread_join(w.thread, NULL);
    CHECK_EQUAL(SK_GROUP_CLEAN, parcel_state(w.p));
    sk_delay_release(s.gate, UINT64_MAX);
    for (int i = 0; i < NQUEUED; i++) {
        parcel_drop(&parcels[i]);
    }
    scene_close(&s);
}

SK_TEST(sched, test_copy_out_when_the_producer_is_busy_then_it_is_behind_it) {
    scene s;
    scene_open(&s, &(scene_options){.gate = true});
    sk_stream *producer = make_stream(s.backend);
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    unsigned char *fresh = malloc(SIZE);
    CHECK(fresh != NULL);
    p.seed++;
    pattern_write(fresh, SIZE, p.seed);
    CHECK_OK(sk_copy_async(s.backend, p.device->bytes, fresh, SIZE, SK_HOST_TO_DEVICE, producer));
    CHECK_OK(parcel_out(&p, producer));
    sk_delay_release(s.gate, 2);
    parcel_finish_out(&p);
    CHECK(parcel_holds(&p));
    parcel_evict(&p);
    CHECK_OK(parcel_in(&p, producer));
    sk_delay_release(s.gate, 1);
    parcel_finish_in(&p);
    parcel_drop(&p);
    drop_stream(s.backend, producer);
    free(fresh);
    scene_close(&s);
}

SK_TEST(sched, test_copy_in_when_the_copy_out_still_runs_then_it_is_behind_it) {
    scene s;
    scene_open(&s, &(scene_options){.gate = true});
    sk_stream *consumer = make_stream(s.backend);
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    slab *first = p.device;
    atomic_fetch_add(&first->nholders, 1); /* a stream that waits is no owner */
    CHECK_OK(parcel_out(&p, NULL));
    CHECK_OK(sk_group_finish_out(p.group, consumer, false));
    parcel_evict(&p);
    CHECK_EQUAL(1, scene_stats(&s).in_flight);
    sk_delay_release(s.gate, 2);
    parcel_fetch(&p);
    CHECK_OK(sk_stream_sync(s.backend, consumer));
    slab_drop(first);
    parcel_drop(&p);
    drop_stream(s.backend, consumer);
    scene_close(&s);
}

SK_TEST(sched, test_host_when_the_tier_is_host_then_the_copy_can_be_read_in_place) {
    enum { LARGE = 16 * MIB }; /* so that the copy takes a while */
    scene s;
    scene_open(&s, &(scene_options){.gate = true});
    sk_stream *consumer = make_stream(s.backend);
    parcel p = parcel_make(&s, LARGE, SK_TIER_HOST, 1);
    parcel other = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK(sk_group_host(p.group) == NULL);
    CHECK_OK(parcel_out(&p, NULL));
    CHECK(sk_group_host(p.group) == NULL);
    CHECK_OK(sk_group_finish_out(p.group, consumer, false));
    sk_delay_release(s.gate, 1);
    const void *host = sk_group_host(p.group); /* waits: only the stream is behind the copy */
    CHECK(host != NULL && pattern_holds(host, LARGE, p.seed));
    CHECK_OK(sk_stream_sync(s.backend, consumer));
    parcel_evict(&p);
    CHECK(sk_group_host(p.group) == host);
    CHECK_OK(parcel_in(&p, NULL));
    CHECK(sk_group_host(p.group) == NULL);
    sk_delay_release(s.gate, UINT64_MAX);
    parcel_finish_in(&p);
    CHECK(sk_group_host(p.group) == host);
    parcel_send(&other);
    CHECK(sk_group_host(other.group) == NULL);
    parcel_drop(&p);
    parcel_drop(&other);
    drop_stream(s.backend, consumer);
    scene_close(&s);
}

/* ---- life ------------------------------------------------------------------------------------ */

SK_TEST(sched, test_destroy_when_a_copy_is_queued_then_it_is_cancelled_and_its_owner_dropped) {
    for (int out = 0; out < 2; out++) {
        scene s;
        parcel parcels[NQUEUED];
        queue_up(&s, parcels, out == 1, 0);
        uint64_t copied = scene_stats(&s).copied_out_bytes + scene_stats(&s).copied_in_bytes;
        for (int i = NQUEUED - 1; i > 0; i--) {
            slab *device = parcels[i].device;
            atomic_fetch_add(&device->nholders, 1);
            parcel_drop(&parcels[i]);
            CHECK_EQUAL(NQUEUED - i, device->dropped_as); /* at once, and once */
            CHECK_EQUAL(1, atomic_load(&device->nholders));
            slab_drop(device);
            CHECK_EQUAL(i - 1, scene_stats(&s).queued);
            CHECK_EQUAL(i, scene_stats(&s).groups);
            scene_check(&s);
        }
        CHECK_EQUAL(1, scene_stats(&s).in_flight);
        CHECK_EQUAL(copied, scene_stats(&s).copied_out_bytes + scene_stats(&s).copied_in_bytes);
        parcel_drop(&parcels[0]);
        scene_close(&s);
    }
}

SK_TEST(sched, test_destroy_when_a_copy_runs_then_its_memory_stays_until_it_is_done) {
    for (int out = 0; out < 2; out++) {
        scene s;
        scene_open(&s, &(scene_options){.gate = true});
        parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
        if (out == 0) {
            sk_delay_release(s.gate, 1);
            parcel_send(&p);
            sk_sched_drain(s.sched);
        }
        CHECK_OK(out == 1 ? parcel_out(&p, NULL) : parcel_in(&p, NULL));
        parcel_drop(&p);
        scene_check(&s);
        CHECK_EQUAL(1, atomic_load(&s.nslabs)); /* the owner that the copy has */
        CHECK_EQUAL(SIZE, scene_stats(&s).host_bytes);
        CHECK_EQUAL(1, scene_stats(&s).groups);
        sk_delay_release(s.gate, 1);
        sk_sched_drain(s.sched);
        CHECK_EQUAL(0, scene_stats(&s).groups);
        CHECK_EQUAL(0, scene_stats(&s).host_bytes);
        scene_close(&s);
    }
}

SK_TEST(sched, test_destroy_when_groups_exist_then_refused_and_nothing_is_done) {
    scene s;
    scene_open(&s, &(scene_options){0});
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel_send(&p);
    CHECK_STATUS(SK_INVALID, sk_sched_destroy(s.sched));
    CHECK_CONTAINS(sk_error_text(), "cannot be destroyed: 1 groups exist");
    parcel_fetch(&p);
    parcel_drop(&p);
    scene_close(&s);
}

SK_TEST(sched, test_destroy_when_orphans_are_under_way_then_it_waits_for_them) {
    enum { NPARCELS = 5, LARGE = 8 * MIB };
    scene s;
    scene_open(&s, &(scene_options){.gate = true});
    for (int i = 0; i < NPARCELS; i++) {
        parcel p = parcel_make(&s, LARGE, SK_TIER_ANY, 1);
        CHECK_OK(parcel_out(&p, NULL));
        parcel_drop(&p);
    }
    sk_delay_release(s.gate, UINT64_MAX);
    CHECK_OK(sk_sched_destroy(s.sched));
    CHECK_EQUAL(0, atomic_load(&s.nslabs));
    CHECK_EQUAL(NPARCELS, atomic_load(&s.ndrops));
    sk_backend_close(s.backend);
}

SK_TEST(sched, test_owner_when_null_then_nothing_is_dropped) {
    scene s;
    scene_open(&s, &(scene_options){0});
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_OK(sk_group_copy_out(p.group, p.device->bytes, NULL, 1, NULL));
    parcel_finish_out(&p);
    sk_sched_drain(s.sched);
    CHECK_EQUAL(0, atomic_load(&s.ndrops));
    parcel_drop(&p);
    scene_close(&s);
}

SK_TEST(sched, test_events_when_many_copies_are_made_then_they_are_used_again) {
    enum { ROUNDS = 50, MOST = 6 };
    scene s;
    scene_open(&s, &(scene_options){0});
    sk_stream *stream = make_stream(s.backend);
    for (int i = 0; i < ROUNDS; i++) {
        parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
        CHECK_OK(parcel_out(&p, stream));
        parcel_finish_out(&p);
        parcel_drop(&p);
    }
    sk_sched_drain(s.sched);
    int nmarks = 0;
    for (const sk__mark *mark = s.sched->marks; mark != NULL; mark = mark->below) {
        nmarks++;
    }
    CHECK(nmarks > 0 && nmarks <= MOST);
    drop_stream(s.backend, stream);
    scene_close(&s);
}
