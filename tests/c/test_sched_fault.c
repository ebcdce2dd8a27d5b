/* test_sched_fault.c - the nth call fails, n = 1, 2, ... until a run has no failure; and forks.
 *
 * Every step of the scenario may fail. Afterwards, with faults off: no structure is broken, every
 * storage's bytes can be brought back to the device, and nothing is left anywhere.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sched_fixture.h"

enum { SIZE = 128 * KIB, COUNT = 6, NFIT = 3, LIMIT = NFIT * SIZE, MAX_CALLS = 3000 };

/* ---- the scenario ---------------------------------------------------------------------------- */

typedef struct play {
    scene s;
    bool forever; /* the device may have been silent for so long that copies were given up */
    sk_stream *stream;
    parcel parcels[COUNT];
} play;

static void play_open(play *mine, bool disk, bool streams, bool forever) {
    mine->forever = forever;
    scene_open(&mine->s, &(scene_options){.fault = true,
                                          .disk = disk,
                                          .streams = streams,
                                          .copies_in_flight = forever ? COUNT : 0,
                                          .host_limit_bytes = disk ? LIMIT : 2 * LIMIT});
    mine->stream = make_stream(mine->s.backend);
    for (int i = 0; i < COUNT; i++) {
        sk_tier tier = !disk || i == 0 ? SK_TIER_HOST : i % 2 == 0 ? SK_TIER_ANY : SK_TIER_DISK;
        mine->parcels[i] = parcel_make(&mine->s, SIZE, tier, (uint64_t)i);
    }
}

/* Evict and overwrite, if nothing reads the memory any more. It stays: allocating could fail. */
static void play_evict(play *mine, parcel *p) {
    if (parcel_state(p) == SK_GROUP_CLEAN &&
        sk_stream_sync(mine->s.backend, mine->stream) == SK_OK &&
        sk_group_evict(p->group) == SK_OK) {
        device_fill(p->device->bytes, 0, p->nbytes);
    }
}

/* Wait in one of three ways. */
static void play_finish(play *mine, parcel *p, int how) {
    if (mine->forever && scene_stats(&mine->s).queued > 0) {
        how = 1; /* what waits for memory would wait until the device is given up */
    }
    sk_status (*finish)(sk_group *, sk_stream *, bool) =
        parcel_state(p) == SK_GROUP_COPYING_OUT ? sk_group_finish_out : sk_group_finish_in;
    sk__ignore(finish(p->group, how % 3 == 0 ? mine->stream : NULL, how % 3 == 1));
}

static void play_steps(play *mine) {
    for (int i = 0; i < COUNT; i++) {
        sk__ignore(parcel_out(&mine->parcels[i], i % 2 == 0 ? mine->stream : NULL));
        CHECK_OK(sk_sched_check(mine->s.sched));
    }
    for (int i = 0; i < COUNT; i++) {
        play_finish(mine, &mine->parcels[i], i);
        play_evict(mine, &mine->parcels[i]);
    }
    for (int i = 0; i < COUNT; i++) {
        if (parcel_state(&mine->parcels[i]) == SK_GROUP_OUT) {
            sk__ignore(parcel_in(&mine->parcels[i], i % 2 == 1 ? mine->stream : NULL));
        }
        CHECK_OK(sk_sched_check(mine->s.sched));
    }
    for (int i = COUNT - 1; i >= 0; i--) {
        play_finish(mine, &mine->parcels[i], i + 1);
        play_evict(mine, &mine->parcels[i]);
    }
    CHECK_OK(sk_sched_check(mine->s.sched));
}

static void play_close(play *mine) {
    CHECK_OK(sk_sched_check(mine->s.sched));
    sk_sched_drain(mine->s.sched);
    scene_check(&mine->s);
    CHECK_OK(sk_stream_sync(mine->s.backend, mine->stream));
    for (int i = 0; i < COUNT; i++) { /* and once more, with nothing failing */
        parcel *p = &mine->parcels[i];
        sk_group_state state = parcel_state(p);
        if ((state == SK_GROUP_CLEAN || state == SK_GROUP_OUT) && parcel_place(p) == SK_NOWHERE) {
            CHECK(mine->forever);
            parcel_drop(p);
            continue;
        }
        parcel_recover(p);
        if (parcel_state(p) == SK_GROUP_RESIDENT) {
            CHECK_OK(parcel_out(p, NULL));
            parcel_finish_out(p);
        }
        parcel_evict(p);
        if (i % 2 == 0) {
            parcel_fetch(p);
        }
        parcel_drop(p);
    }
    drop_stream(mine->s.backend, mine->stream);
    scene_close(&mine->s);
}

/* ---- the loops ------------------------------------------------------------------------------- */

static void device_loop(bool disk, bool streams, bool forever, sk_status status) {
    uint64_t nth = 1;
    for (;; nth++) {
        CHECK(nth < MAX_CALLS);
        play mine;
        play_open(&mine, disk, streams, forever);
        sk_fault_arm(mine.s.fault, nth, forever, status);
        play_steps(&mine);
        uint64_t ncalls = sk_fault_calls(mine.s.fault);
        sk_fault_arm(mine.s.fault, 0, false, SK_OK);
        play_close(&mine);
        if (ncalls < nth) {
            break;
        }
    }
    CHECK(nth > 20);
}

SK_TEST(sched_fault, test_device_when_the_nth_call_fails_then_recovers) {
    for (int i = 0; i < 4; i++) {
        device_loop(i % 2 == 1, i / 2 == 1, false, SK_BACKEND_FAILED);
    }
}
SK_TEST(sched_fault, test_device_when_all_from_the_nth_call_on_fail_then_recovers) {
    for (int i = 0; i < 4; i++) {
        device_loop(i % 2 == 1, i / 2 == 1, true, SK_BACKEND_FAILED);
    }
}
SK_TEST(sched_fault, test_device_when_it_has_no_memory_for_the_nth_call_then_recovers) {
    device_loop(true, false, false, SK_OUT_OF_HOST_MEMORY);
    device_loop(true, false, true, SK_OUT_OF_DEVICE_MEMORY);
}

static void host_loop(bool disk, bool forever) {
    uint64_t nth = 1;
    for (;; nth++) {
        CHECK(nth < MAX_CALLS);
        play mine;
        play_open(&mine, disk, false, false);
        host_memory_fail(nth, forever);
        play_steps(&mine);
        uint64_t ncalls = host_memory_calls();
        host_memory_fail(0, false);
        play_close(&mine);
        if (ncalls < nth) {
            break;
        }
    }
    CHECK(nth > 5);
}

SK_TEST(sched_fault, test_host_when_the_nth_allocation_fails_then_recovers) {
    for (int i = 0; i < 4; i++) {
        host_loop(i % 2 == 1, i / 2 == 1);
    }
}

static void disk_loop(unsigned calls, bool forever, int error) {
    uint64_t nth = 1;
    for (;; nth++) {
        CHECK(nth < MAX_CALLS);
        play mine;
        play_open(&mine, true, false, false);
        fault_calls(calls, nth, forever, error);
        play_steps(&mine);
        uint64_t ncalls = sk_disk_fault_calls();
        fault_none();
        play_close(&mine);
        if (ncalls < nth) {
            break;
        }
    }
    CHECK(nth > 1);
}

SK_TEST(sched_fault, test_disk_when_the_nth_call_fails_then_recovers) {
    for (int forever = 0; forever < 2; forever++) {
        disk_loop(SK_DISK_CALL_ANY, forever == 1, EIO);
        disk_loop(SK_DISK_CALL_ALLOCATE | SK_DISK_CALL_WRITE, forever == 1, ENOSPC);
        disk_loop(SK_DISK_CALL_READ, forever == 1, EIO);
    }
}

/* ---- creation -------------------------------------------------------------------------------- */

static void drop_nothing(void *owner) { (void)owner; }

static bool create_once(sk_backend *backend, const char *folder) {
    sk_sched_params params = {.drop_owner = drop_nothing, .disk_folder = folder};
    sk_sched *sched = NULL;
    sk_status status = sk_sched_create(backend, &params, &sched);
    CHECK((status == SK_OK) == (sched != NULL));
    sk_group *group = NULL;
    if (sched != NULL && sk_group_create(sched, SIZE, SK_TIER_ANY, &group) == SK_OK) {
        sk_group_destroy(group);
    } else {
        status = SK_OUT_OF_HOST_MEMORY;
    }
    CHECK_OK(sk_sched_destroy(sched));
    return status == SK_OK;
}

SK_TEST(sched_fault, test_create_when_anything_fails_then_nothing_is_left) {
    enum { HOST, DEVICE, DISK, KINDS };
    for (int kind = 0; kind < KINDS; kind++) {
        sk_backend *fault = make_fault(make_device(CAPACITY));
        char folder[FOLDER_CHARS];
        make_folder(folder);
        int nfiles = count_open_files();
        int nfailed = -1;
        bool made = false;
        for (uint64_t nth = 1; !made; nth++, nfailed++) {
            CHECK(nth < MAX_CALLS);
            host_memory_fail(kind == HOST ? nth : 0, false);
            sk_fault_arm(fault, kind == DEVICE ? nth : 0, false, SK_BACKEND_FAILED);
            fault_calls(SK_DISK_CALL_OPEN, kind == DISK ? nth : 0, true, EACCES);
            made = create_once(fault, folder);
            uint64_t ncalls = kind == HOST     ? host_memory_calls()
                              : kind == DEVICE ? sk_fault_calls(fault)
                                               : sk_disk_fault_calls();
            host_memory_fail(0, false);
            fault_none();
            made = made && ncalls < nth;
            CHECK_EQUAL(nfiles, count_open_files());
        }
        CHECK(nfailed > 0);
        drop_folder(folder);
        sk_backend_close(fault);
    }
}

/* ---- a device that does not answer ----------------------------------------------------------- */

SK_TEST(sched_fault, test_finish_when_only_the_wait_fails_then_nothing_has_changed) {
    scene s;
    scene_open(&s, &(scene_options){.gate = true, .fault = true, .copies_in_flight = 1});
    sk_stream *consumer = make_stream(s.backend);
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_OK(parcel_out(&p, NULL));
    sk_fault_arm(s.fault, 1, true, SK_BACKEND_FAILED);
    CHECK_STATUS(SK_NOT_READY, sk_group_finish_out(p.group, NULL, true));
    CHECK_STATUS(SK_BACKEND_FAILED, sk_group_finish_out(p.group, consumer, false));
    CHECK_CONTAINS(sk_error_text(), "stream_wait, was made to fail");
    sk_fault_arm(s.fault, 0, false, SK_OK);
    CHECK_EQUAL(SK_GROUP_COPYING_OUT, parcel_state(&p));
    CHECK_EQUAL(0, atomic_load(&s.ndrops)); /* the copy still runs */
    CHECK_EQUAL(SIZE, scene_stats(&s).host_bytes);
    sk_delay_release(s.gate, UINT64_MAX);
    parcel_finish_out(&p);
    parcel_evict(&p);
    parcel_fetch(&p);
    parcel_drop(&p);
    drop_stream(s.backend, consumer);
    scene_close(&s);
}

/* It is given up after a second. `evicted`: by then the copy was all there was. */
static void go_silent(bool evicted) {
    scene s;
    scene_open(&s, &(scene_options){.fault = true, .gate = true});
    sk_stream *consumer = make_stream(s.backend);
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_OK(parcel_out(&p, NULL));
    CHECK_OK(sk_group_finish_out(p.group, consumer, false));
    slab *device = p.device;
    if (evicted) {
        atomic_fetch_add(&device->nholders, 1);
        parcel_evict(&p);
    }
    sk_fault_arm(s.fault, 1, true, SK_BACKEND_FAILED);
    sk_delay_release(s.gate, UINT64_MAX);
    /* The pump may be in a wait that began before and succeeds: then this is no test. */
    sk_sched_drain(s.sched);
    sk_fault_arm(s.fault, 0, false, SK_OK);
    CHECK_OK(sk_stream_sync(s.backend, consumer));
    if (p.group->phase != SK_FAILED) {
        parcel_drop(&p);
    } else if (evicted) {
        CHECK_STATUS(SK_BACKEND_FAILED, parcel_in(&p, NULL));
        CHECK_CONTAINS(sk_error_text(), "copying 131072 bytes to the host failed: fault: call");
        CHECK_EQUAL(SK_GROUP_OUT, parcel_state(&p));
        scene_check(&s);
        parcel_drop(&p);
    } else {
        CHECK(sk_group_host(p.group) == NULL);
        CHECK_STATUS(SK_BACKEND_FAILED, sk_group_evict(p.group));
        CHECK_CONTAINS(sk_error_text(), "copying 131072 bytes to the host failed: fault: call");
        CHECK_EQUAL(SK_GROUP_RESIDENT, parcel_state(&p));
        scene_check(&s);
        CHECK_EQUAL(0, scene_stats(&s).host_bytes);
        parcel_send(&p);
        parcel_fetch(&p);
        parcel_drop(&p);
    }
    if (evicted) {
        slab_drop(device);
    }
    drop_stream(s.backend, consumer);
    scene_close(&s);
}

SK_TEST(sched_fault, test_device_when_silent_for_long_then_the_copy_is_given_up) {
    go_silent(false);
    go_silent(true);
}

/* ---- forks ----------------------------------------------------------------------------------- */

enum { CHILD_SECONDS = 30 };

static void need_fork(void) {
    if (device_is_remote()) {
        test_skip("a forked child cannot use such a device");
    }
#ifdef __SANITIZE_THREAD__
    test_skip("the thread sanitiser takes a child's thread for the parent's at the same address");
#endif
}

static void in_child(int (*child)(scene *s, parcel *parcels), scene *s, parcel *parcels) {
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)signal(SIGALRM, SIG_DFL);
        (void)alarm(CHILD_SECONDS);
        int line = child(s, parcels);
        coverage_write();
        if (line != 0) {
            (void)fprintf(stderr, "%s:%d: in the child (%s)\n", __FILE__, line, sk_error_text());
        }
        _exit(line == 0 ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(!WIFSIGNALED(status) || WTERMSIG(status) != SIGALRM); /* hung */
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(0, WEXITSTATUS(status));
}

static int finish_in_child(scene *s, parcel *parcels) {
    sk_delay_release(s->gate, UINT64_MAX);
    for (int i = COUNT - 1; i >= 0; i--) {
        EXPECT(sk_group_finish_out(parcels[i].group, NULL, false) == SK_OK);
        EXPECT(sk_group_evict(parcels[i].group) == SK_OK);
        device_fill(parcels[i].device->bytes, 0, SIZE);
        EXPECT(parcel_in(&parcels[i], NULL) == SK_OK);
        EXPECT(sk_group_finish_in(parcels[i].group, NULL, i % 2 == 0) != SK_INVALID);
        EXPECT(sk_sched_check(s->sched) == SK_OK);
    }
    sk_sched_drain(s->sched);
    for (int i = 0; i < COUNT; i++) {
        EXPECT(parcel_holds(&parcels[i]));
        parcel_drop(&parcels[i]);
    }
    EXPECT(scene_stats(s).host_bytes == 0);
    EXPECT(sk_sched_destroy(s->sched) == SK_OK);
    return 0;
}

static int poll_in_child(scene *s, parcel *parcels) {
    sk_delay_release(s->gate, UINT64_MAX);
    for (int i = COUNT - 1; i >= 0; i--) {
        sk_status status = SK_NOT_READY;
        while (status == SK_NOT_READY) {
            status = sk_group_finish_out(parcels[i].group, NULL, true);
        }
        EXPECT(status == SK_OK);
    }
    return 0;
}

static int drain_in_child(scene *s, parcel *parcels) {
    sk_delay_release(s->gate, UINT64_MAX);
    parcel_drop(&parcels[0]);
    host_memory_fail(1, false); /* the pump cannot be started: who waits does its work */
    sk_sched_drain(s->sched);
    host_memory_fail(0, false);
    EXPECT(sk_sched_check(s->sched) == SK_OK);
    for (int i = 1; i < COUNT; i++) {
        EXPECT(sk_group_finish_out(parcels[i].group, NULL, true) == SK_OK);
        parcel_drop(&parcels[i]);
    }
    EXPECT(sk_sched_destroy(s->sched) == SK_OK);
    return 0;
}

SK_TEST(sched_fault, test_fork_when_copies_are_under_way_then_the_child_can_finish_them) {
    need_fork();
    int (*const children[])(scene *, parcel *) = {finish_in_child, poll_in_child, drain_in_child};
    scene s;
    scene_open(&s, &(scene_options){.gate = true, .copies_in_flight = 2});
    parcel parcels[COUNT];
    for (int i = 0; i < COUNT; i++) {
        parcels[i] = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
        CHECK_OK(parcel_out(&parcels[i], NULL));
    }
    for (size_t i = 0; i < sizeof children / sizeof children[0]; i++) {
        in_child(children[i], &s, parcels);
    }
    CHECK_EQUAL(2, scene_stats(&s).in_flight);
    sk_delay_release(s.gate, UINT64_MAX);
    for (int i = 0; i < COUNT; i++) {
        parcel_finish_out(&parcels[i]);
        parcel_evict(&parcels[i]);
        parcel_fetch(&parcels[i]);
        parcel_drop(&parcels[i]);
    }
    scene_close(&s);
}

/* The disk is the parent's: what is there cannot be read, what is on the host can. */
static int disk_in_sched_child(scene *s, parcel *parcels) {
    EXPECT(sk_sched_check(s->sched) == SK_OK);
    for (int i = 0; i < COUNT; i++) {
        if (parcel_state(&parcels[i]) == SK_GROUP_COPYING_IN) {
            sk_status status = sk_group_finish_in(parcels[i].group, NULL, false);
            EXPECT(status == SK_OK || status == SK_UNSUPPORTED);
            EXPECT(status != SK_OK || parcel_holds(&parcels[i]));
        } else if (i % 2 == 0) {
            EXPECT(parcel_in(&parcels[i], NULL) == SK_OK);
        }
    }
    EXPECT(sk_sched_check(s->sched) == SK_OK);
    for (int i = 0; i < COUNT; i++) {
        parcel_drop(&parcels[i]);
    }
    EXPECT(sk_sched_destroy(s->sched) == SK_OK);
    return 0;
}

SK_TEST(sched_fault, test_fork_when_the_disk_is_busy_then_parent_and_child_go_on) {
    need_fork();
    enum { NFORKS = 10, SLOW_BYTES = 4096 };
    for (int round = 0; round < NFORKS; round++) {
        scene s;
        scene_open(&s, &(scene_options){.disk = true, .host_limit_bytes = LIMIT});
        fault_short(SK_DISK_CALL_WRITE | SK_DISK_CALL_READ, 1, true, SLOW_BYTES);
        parcel parcels[COUNT];
        for (int i = 0; i < COUNT; i++) {
            parcels[i] = parcel_make(&s, SIZE, SK_TIER_ANY, (uint64_t)i);
            parcel_send(&parcels[i]);
        }
        if (round % 2 == 0) {
            CHECK_OK(parcel_in(&parcels[COUNT - 1], NULL));
            parcel orphan = parcel_make(&s, SIZE, SK_TIER_DISK, 100);
            sk__ignore(parcel_out(&orphan, NULL));
            sk__ignore(sk_group_finish_out(orphan.group, NULL, false));
            parcel_drop(&orphan); /* perhaps while it is written */
        }
        in_child(disk_in_sched_child, &s, parcels);
        fault_none();
        for (int i = 0; i < COUNT; i++) {
            parcel_recover(&parcels[i]);
            parcel_drop(&parcels[i]);
        }
        scene_close(&s);
    }
}
