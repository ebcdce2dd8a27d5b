/* test_sched_host.c - the host's limit, room that is waited for, and the walk over all invariants.
 */
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sched_fixture.h"

enum { SIZE = 64 * KIB };

SK_TEST(sched, test_copy_out_when_the_host_is_full_then_refused_and_still_resident) {
    enum { NFIT = 16, ODD = SIZE - 300 };
    scene s;
    scene_open(&s, &(scene_options){.host_limit_bytes = NFIT * SIZE});
    parcel parcels[NFIT];
    size_t expected = 0;
    for (int i = 0; i < NFIT; i++) {
        size_t nbytes = i % 2 == 0 ? SIZE : ODD;
        parcels[i] = parcel_make(&s, nbytes, SK_TIER_ANY, 1);
        parcel_send(&parcels[i]);
        expected += sk__round_up(nbytes, ROUNDING);
        CHECK_EQUAL(expected, scene_stats(&s).host_bytes); /* exact, not a power of two */
        scene_check(&s);
    }
    parcel more = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, parcel_out(&more, NULL));
    CHECK_CONTAINS(sk_error_text(), "of the limit of 1048576 bytes are in use");
    CHECK_CONTAINS(sk_error_text(), "no disk was given; raise host_limit");
    CHECK_EQUAL(SK_GROUP_RESIDENT, parcel_state(&more));
    CHECK(parcel_holds(&more));
    scene_check(&s);
    parcel_drop(&parcels[0]);
    parcel_send(&more); /* whose room is free now */
    parcel_fetch(&more);
    for (int i = 1; i < NFIT; i++) {
        parcel_fetch(&parcels[i]);
        parcel_drop(&parcels[i]);
    }
    parcel_drop(&more);
    CHECK(scene_stats(&s).host_reserved_bytes > 0);
    sk_sched_trim(s.sched);
    CHECK_EQUAL(0, scene_stats(&s).host_reserved_bytes);
    scene_close(&s);
}

SK_TEST(sched, test_copy_out_when_an_orphan_is_about_to_go_then_its_room_is_waited_for) {
    scene s;
    scene_open(&s, &(scene_options){.gate = true, .host_limit_bytes = SIZE});
    parcel gone = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel next = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel last = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_OK(parcel_out(&gone, NULL));
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, parcel_out(&next, NULL)); /* its copy is to stay */
    parcel_drop(&gone);
    CHECK_OK(parcel_out(&next, NULL));
    CHECK_OK(parcel_out(&last, NULL));
    CHECK_STATUS(SK_NOT_READY, sk_group_finish_out(next.group, NULL, true));
    CHECK_EQUAL(2, scene_stats(&s).queued);
    scene_check(&s);
    sk_delay_release(s.gate, UINT64_MAX);
    parcel_finish_out(&next);
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, sk_group_finish_out(last.group, NULL, false));
    CHECK_CONTAINS(sk_error_text(), "copying 65536 bytes to the host failed: no host memory");
    CHECK_EQUAL(SK_GROUP_RESIDENT, parcel_state(&last));
    parcel_drop(&next);
    parcel_send(&last);
    parcel_drop(&last);
    scene_close(&s);
}

SK_TEST(sched, test_copy_out_when_the_waited_for_room_is_given_by_destroy_then_it_starts) {
    scene s;
    scene_open(&s, &(scene_options){.gate = true, .host_limit_bytes = 2 * SIZE});
    parcel kept = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel gone = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel next = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    sk_delay_release(s.gate, 1);
    CHECK_OK(parcel_out(&kept, NULL));
    parcel_finish_out(&kept);
    CHECK_OK(parcel_out(&gone, NULL));
    parcel_drop(&gone); /* its room will come, but not now */
    CHECK_OK(parcel_out(&next, NULL));
    CHECK_EQUAL(1, scene_stats(&s).queued);
    parcel_drop(&kept); /* nobody waits and no copy ends: this alone makes room */
    CHECK_EQUAL(0, scene_stats(&s).queued);
    CHECK_EQUAL(2, scene_stats(&s).in_flight);
    scene_check(&s);
    sk_delay_release(s.gate, 2);
    parcel_finish_out(&next);
    parcel_drop(&next);
    scene_close(&s);
}

/* Small copies lie in between: what is free is in pieces, and found out only by the pool. */
SK_TEST(sched, test_copy_out_when_free_room_is_in_pieces_then_refused_not_passed) {
    enum { NPARCELS = 64, PIECE = 2 * KIB }; /* smaller than a page: none can move */
    scene s;
    scene_open(&s, &(scene_options){.host_limit_bytes = NPARCELS * PIECE});
    parcel parcels[NPARCELS];
    for (int i = 0; i < NPARCELS; i++) {
        parcels[i] = parcel_make(&s, PIECE, SK_TIER_ANY, 1);
        parcel_send(&parcels[i]);
    }
    for (int i = 0; i < NPARCELS; i += 2) {
        parcel_drop(&parcels[i]);
    }
    parcel large = parcel_make(&s, NPARCELS / 4 * PIECE, SK_TIER_ANY, 1);
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, parcel_out(&large, NULL));
    scene_check(&s);
    for (int i = 1; i < NPARCELS; i += 2) {
        parcel_fetch(&parcels[i]);
        parcel_drop(&parcels[i]);
    }
    parcel_send(&large);
    parcel_drop(&large);
    scene_close(&s);
}

/* ---- the walk over all invariants ------------------------------------------------------------ */

#define CHECK_BROKEN(field, value, text)                                                           \
    do {                                                                                           \
        __typeof__(field) was_ = (field);                                                          \
        (field) = (value);                                                                         \
        CHECK_STATUS(SK_CORRUPT, sk_sched_check(s.sched));                                         \
        CHECK_CONTAINS(sk_error_text(), (text));                                                   \
        (field) = was_;                                                                            \
        CHECK_OK(sk_sched_check(s.sched));                                                         \
    } while (0)

/* Until the pump is in its wait, it reads what a test may want to break. */
static void await_pump(scene *s, const parcel *running) {
    bool waits = false;
    while (!waits) {
        (void)sched_yield();
        sk__enter(s->sched);
        waits = running->group->done->waiters > 0;
        sk__leave(s->sched);
    }
}

SK_TEST(sched, test_check_when_something_is_broken_then_it_is_named) {
    scene s;
    scene_open(&s, &(scene_options){.gate = true, .copies_in_flight = 1});
    parcel resident = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel clean = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    sk_delay_release(s.gate, 1);
    CHECK_OK(parcel_out(&clean, NULL));
    parcel_finish_out(&clean);
    parcel running = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel waiting = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel behind = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_OK(parcel_out(&running, NULL));
    CHECK_OK(parcel_out(&waiting, NULL));
    CHECK_OK(parcel_out(&behind, NULL));
    await_pump(&s, &running);
    sk__lane_of_copies *lane = &s.sched->lanes[SK_WAY_OUT];
    CHECK_BROKEN(waiting.group->way, SK_WAY_IN, "wrong list");
    CHECK_BROKEN(running.group->phase, SK_DONE, "holds an owner");
    CHECK_BROKEN(behind.group->prev, running.group, "the links of a list");
    CHECK_BROKEN(lane->queue.last, waiting.group, "the end of a list");
    CHECK_BROKEN(lane->queued, 3, "transfers queued");
    CHECK_BROKEN(lane->in_flight, 0, "transfers queued");
    CHECK_BROKEN(clean.group->owner, clean.device, "holds an owner");
    CHECK_BROKEN(clean.group->done, running.group->done, "has an event behind it");
    CHECK_BROKEN(running.group->done->holders, 0, "used twice");
    CHECK_BROKEN(running.group->done->ticket, 0, "not behind its copy");
    CHECK_BROKEN(running.group->ticket, 0, "order of their start");
    CHECK_BROKEN(lane->in_flight_bytes, 1, "bytes in flight");
    CHECK_BROKEN(lane->unmarked, 1, "without an event");
    CHECK_BROKEN(clean.group->state, SK_GROUP_RESIDENT, "on the device only has a copy");
    CHECK_BROKEN(resident.group->state, SK_GROUP_COPYING_IN, "without a transfer");
    CHECK_BROKEN(waiting.group->state, SK_GROUP_CLEAN, "waits for a group");
    CHECK_BROKEN(clean.group->orphan, true, "was not freed");
    CHECK_BROKEN(clean.group->host, NULL, "not where its copy is");
    CHECK_BROKEN(running.group->place, SK_WRITING, "has no extent");
    CHECK_BROKEN(resident.group->has_extent, true, "without a copy has an extent");
    CHECK_BROKEN(resident.group->state, SK_GROUP_OUT, "copy is gone");
    CHECK_BROKEN(clean.group->above, NULL, "the list of groups is broken");
    CHECK_BROKEN(clean.group->has_extent, true, "larger than the memory kept free");
    CHECK_BROKEN(s.sched->ngroups, 0, "groups");
    CHECK_BROKEN(s.sched->nowners, 0, "owners");
    CHECK_BROKEN(s.sched->nwrites, 1, "on the way to a tier");
    CHECK_BROKEN(s.sched->drops_capacity, 1, "no room to drop");
    CHECK_BROKEN(s.sched->host_bytes, 0, "bytes on the host");
    CHECK_BROKEN(s.sched->host_limit_bytes, SIZE, "allowed");
    sk_delay_release(s.gate, UINT64_MAX);
    parcel *all[] = {&resident, &clean, &running, &waiting, &behind};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        parcel_drop(all[i]);
    }
    scene_close(&s);
}

/* The memory policy of a copy on the host, and in `nodes` which nodes it names. */
static int policy_of_copy(uint64_t host_nodes, uint64_t *nodes) {
    enum { BY_ADDRESS = 2, NODES = 1024 };
    scene s;
    scene_open(&s, &(scene_options){.host_nodes = host_nodes});
    parcel copied = parcel_make(&s, SIZE, SK_TIER_HOST, 1);
    parcel_send(&copied);
    uint64_t mask[NODES / 64] = {0};
    int policy = -1;
    void *host = sk_group_host(copied.group);
    CHECK(host != NULL);
    long refused = syscall(SYS_get_mempolicy, &policy, mask, NODES, host, BY_ADDRESS);
    parcel_drop(&copied);
    scene_close(&s);
    if (refused != 0) {
        test_skip("this kernel tells nothing of NUMA nodes");
    }
    *nodes = mask[0];
    return policy;
}

SK_TEST(sched, test_copy_when_a_node_is_named_for_the_host_then_its_memory_is_preferred) {
    enum { DEFAULT = 0, PREFERRED = 1, PREFERRED_MANY = 5 };
    uint64_t nodes = 0;
    CHECK_EQUAL(DEFAULT, policy_of_copy(0, &nodes));
    int policy = policy_of_copy(1, &nodes);
    CHECK(policy == PREFERRED || policy == PREFERRED_MANY);
    CHECK_EQUAL(1, nodes);
}

typedef struct thread_look {
    cpu_set_t cpus;
} thread_look;

static void *thread_look_run(void *argument) {
    thread_look *look = argument;
    (void)sched_getaffinity(0, sizeof look->cpus, &look->cpus);
    return NULL;
}

SK_TEST(sched, test_thread_when_started_then_on_the_cpus_of_its_creator) {
    cpu_set_t before, one;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++) {
        if (CPU_ISSET(cpu, &before)) {
            CPU_SET(cpu, &one);
        }
    }
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    thread_look look = {0};
    pthread_t thread;
    int error = sk__thread_start(&thread, thread_look_run, &look);
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
    CHECK_EQUAL(0, error);
    CHECK_EQUAL(0, pthread_join(thread, NULL));
    CHECK(CPU_EQUAL(&one, &look.cpus));
}
