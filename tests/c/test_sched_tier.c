/* test_sched_tier.c - a disk below the host: what is written, read ahead, refused, and how failures
 * of the file show. */
#include <errno.h>

#include "sched_fixture.h"

enum { SIZE = 256 * KIB, NFIT = 4, LIMIT = NFIT * SIZE, MANY = 12 };

static void open_tight(scene *s, size_t disk_limit_bytes) {
    scene_open(s, &(scene_options){.disk = true,
                                   .host_limit_bytes = LIMIT,
                                   .disk_limit_bytes = disk_limit_bytes});
}

static void send_many(scene *s, parcel *parcels, int count) {
    for (int i = 0; i < count; i++) {
        parcels[i] = parcel_make(s, SIZE, SK_TIER_ANY, (uint64_t)(count - i));
        parcel_send(&parcels[i]);
        scene_check(s);
    }
    sk_sched_drain(s->sched);
}

static void drop_many(parcel *parcels, int count) {
    for (int i = 0; i < count; i++) {
        parcel_drop(&parcels[i]);
    }
}

/* ---- going out ------------------------------------------------------------------------------- */

SK_TEST(sched_tier, test_spill_when_the_host_is_full_then_the_latest_next_use_is_written) {
    scene s;
    open_tight(&s, 0);
    parcel parcels[MANY];
    send_many(&s, parcels, MANY);
    for (int i = 0; i < MANY; i++) { /* the first is needed last; one place is kept free */
        CHECK_EQUAL(i < MANY - (NFIT - 1) ? SK_ON_DISK : SK_ON_HOST, parcel_place(&parcels[i]));
    }
    sk_sched_stats stats = scene_stats(&s);
    CHECK_EQUAL((MANY - (NFIT - 1)) * SIZE, stats.disk_bytes);
    CHECK_EQUAL((MANY - (NFIT - 1)) * SIZE, stats.written_bytes);
    CHECK_EQUAL(stats.disk_bytes, stats.disk_peak_bytes);
    CHECK_EQUAL((NFIT - 1) * SIZE, stats.host_bytes);
    CHECK_EQUAL(0, stats.read_bytes);
    for (int i = MANY - 1; i >= 0; i--) {
        parcel_fetch(&parcels[i]);
        scene_check(&s);
    }
    drop_many(parcels, MANY);
    sk_sched_trim(s.sched);
    CHECK_EQUAL(0, scene_stats(&s).host_reserved_bytes);
    scene_close(&s);
}

SK_TEST(sched_tier, test_spill_when_going_out_in_any_order_then_next_use_decides) {
    static const uint64_t uses[] = {5, 90, 1, 40, 70, 2, 60, 3};
    enum { COUNT = sizeof uses / sizeof uses[0] };
    scene s;
    open_tight(&s, 0);
    parcel parcels[COUNT];
    for (int i = 0; i < COUNT; i++) {
        parcels[i] = parcel_make(&s, SIZE, SK_TIER_ANY, uses[i]);
        parcel_send(&parcels[i]);
    }
    sk_sched_drain(s.sched);
    for (int i = 0; i < COUNT; i++) { /* the newest has the room that was made */
        bool soon = uses[i] <= 2 || i == COUNT - 1;
        CHECK_EQUAL(soon ? SK_ON_HOST : SK_ON_DISK, parcel_place(&parcels[i]));
    }
    drop_many(parcels, COUNT);
    scene_close(&s);
}

SK_TEST(sched_tier, test_tier_when_disk_then_written_at_once) {
    scene s;
    open_tight(&s, 0);
    parcel p = parcel_make(&s, SIZE - 100, SK_TIER_DISK, 1);
    parcel_send(&p);
    sk_sched_drain(s.sched);
    CHECK_EQUAL(SK_ON_DISK, parcel_place(&p));
    CHECK_EQUAL(0, scene_stats(&s).host_bytes);
    CHECK_EQUAL(SIZE, scene_stats(&s).disk_bytes);
    CHECK(sk_group_host(p.group) == NULL);
    parcel_fetch(&p);
    parcel_evict(&p); /* it is on the disk still: nothing is written again */
    parcel_fetch(&p);
    CHECK_EQUAL(SIZE - 100, scene_stats(&s).written_bytes);
    parcel_drop(&p);
    scene_close(&s);
}

SK_TEST(sched_tier, test_tier_when_host_then_never_written) {
    enum { NPINNED = 2 };
    scene s;
    open_tight(&s, 0);
    parcel pinned[NPINNED];
    for (int i = 0; i < NPINNED; i++) {
        pinned[i] = parcel_make(&s, SIZE, SK_TIER_HOST, 1000);
        parcel_send(&pinned[i]);
    }
    const void *host = sk_group_host(pinned[0].group);
    parcel parcels[MANY];
    send_many(&s, parcels, MANY);
    for (int i = 0; i < NPINNED; i++) {
        CHECK_EQUAL(SK_ON_HOST, parcel_place(&pinned[i]));
    }
    CHECK(sk_group_host(pinned[0].group) == host && pattern_holds(host, SIZE, pinned[0].seed));
    parcel more[2];
    more[0] = parcel_make(&s, SIZE, SK_TIER_HOST, 1);
    parcel_send(&more[0]); /* others make room, down to what reading needs */
    more[1] = parcel_make(&s, SIZE, SK_TIER_HOST, 1);
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, parcel_out(&more[1], NULL));
    CHECK_CONTAINS(sk_error_text(), "kept free to read from the disk");
    for (int i = 0; i < MANY; i++) {
        parcel_fetch(&parcels[i]);
    }
    drop_many(parcels, MANY);
    drop_many(pinned, NPINNED);
    drop_many(more, 2);
    scene_close(&s);
}

SK_TEST(sched_tier, test_copy_out_when_larger_than_the_limit_then_others_do_not_suffer) {
    scene s;
    open_tight(&s, 0);
    parcel giant = parcel_make(&s, LIMIT + 1, SK_TIER_ANY, 1);
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, parcel_out(&giant, NULL));
    CHECK_EQUAL(SK_GROUP_RESIDENT, parcel_state(&giant));
    parcel parcels[MANY];
    send_many(&s, parcels, MANY);
    CHECK_EQUAL(SIZE, s.sched->reserve_bytes);
    drop_many(parcels, MANY);
    parcel_drop(&giant);
    parcel whole = parcel_make(&s, LIMIT, SK_TIER_ANY, 1); /* nothing to read: no part is kept */
    parcel_send(&whole);
    parcel_fetch(&whole);
    parcel_drop(&whole);
    scene_close(&s);
}

SK_TEST(sched_tier, test_copy_out_when_a_large_copy_has_left_the_disk_then_its_room_is_used) {
    scene s;
    open_tight(&s, 0);
    parcel large = parcel_make(&s, 2 * SIZE, SK_TIER_DISK, 1);
    parcel_send(&large);
    sk_sched_drain(s.sched);
    CHECK_EQUAL(2 * SIZE, s.sched->reserve_bytes);
    parcel parcels[NFIT];
    for (int i = 0; i < 2; i++) {
        parcels[i] = parcel_make(&s, SIZE, SK_TIER_HOST, 1);
        parcel_send(&parcels[i]);
    }
    parcels[2] = parcel_make(&s, SIZE, SK_TIER_HOST, 1);
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, parcel_out(&parcels[2], NULL));
    parcel_fetch(&large); /* there was room for it */
    parcel_drop(&large);
    parcel_send(&parcels[2]);
    parcels[3] = parcel_make(&s, SIZE, SK_TIER_HOST, 1);
    parcel_send(&parcels[3]);
    drop_many(parcels, NFIT);
    scene_close(&s);
}

/* ---- coming back ----------------------------------------------------------------------------- */

SK_TEST(sched_tier, test_copy_in_when_others_are_needed_soon_then_they_are_read_ahead) {
    scene s;
    open_tight(&s, 0);
    parcel parcels[MANY];
    for (int i = 0; i < MANY; i++) {
        parcels[i] = parcel_make(&s, SIZE, SK_TIER_DISK, (uint64_t)i);
        parcel_send(&parcels[i]);
    }
    sk_sched_drain(s.sched);
    parcel clean = parcel_make(&s, SIZE, SK_TIER_DISK, 0);
    CHECK_OK(parcel_out(&clean, NULL));
    parcel_finish_out(&clean);
    sk_sched_drain(s.sched);
    parcel_fetch(&parcels[0]);
    sk_sched_drain(s.sched);
    CHECK_EQUAL(SK_ON_HOST, parcel_place(&parcels[1]));
    CHECK_EQUAL(SK_ON_HOST, parcel_place(&parcels[2]));
    CHECK_EQUAL(SK_ON_DISK,
                parcel_place(&parcels[3]));        /* one place is kept for who is in a hurry */
    CHECK_EQUAL(SK_ON_DISK, parcel_place(&clean)); /* on the device: nobody needs to read it */
    CHECK_EQUAL(3 * SIZE, scene_stats(&s).read_bytes);
    parcel_drop(&parcels[0]);
    for (int i = 1; i < MANY; i++) {
        parcel_fetch(&parcels[i]);
        scene_check(&s);
        parcel_drop(&parcels[i]);
    }
    CHECK_EQUAL(MANY * SIZE, scene_stats(&s).read_bytes); /* each once */
    parcel_drop(&clean);
    scene_close(&s);
}

/* Everything is as full as it gets; whatever is there can still be read, in any order. */
static void read_when_full(size_t most_in_flight, uint64_t seed) {
    enum { COUNT = 24, DISK = 8 * SIZE };
    scene s;
    open_tight(&s, DISK);
    parcel parcels[COUNT];
    int count = 0;
    uint64_t state = seed;
    bool full = false;
    while (!full) {
        CHECK(count < COUNT);
        size_t nbytes = SIZE - random_below(&state, 3) * 64 * KIB;
        parcels[count] =
            parcel_make(&s, nbytes, random_below(&state, 5) == 0 ? SK_TIER_HOST : SK_TIER_ANY,
                        random_below(&state, 100));
        sk_status status = parcel_out(&parcels[count], NULL);
        if (status == SK_OK) {
            status = sk_group_finish_out(parcels[count].group, NULL, false);
        }
        full = status != SK_OK;
        if (full) {
            CHECK(status == SK_OUT_OF_DISK || status == SK_OUT_OF_HOST_MEMORY);
            parcel_drop(&parcels[count]);
        } else {
            parcel_evict(&parcels[count]);
            count++;
        }
        scene_check(&s);
    }
    CHECK(count > NFIT);
    for (int round = 0; round < 4 * COUNT; round++) {
        parcel *chosen[COUNT];
        size_t nchosen = 0;
        for (int i = 0; i < count && nchosen < most_in_flight; i++) {
            if (random_below(&state, 4) == 0) {
                chosen[nchosen++] = &parcels[i];
            }
        }
        for (size_t i = 0; i < nchosen; i++) {
            CHECK_OK(parcel_in(chosen[i], NULL));
        }
        scene_check(&s);
        for (size_t i = nchosen; i-- > 0;) {
            parcel_finish_in(chosen[i]);
            parcel_evict(chosen[i]);
        }
    }
    drop_many(parcels, count);
    scene_close(&s);
}

SK_TEST(sched_tier, test_copy_in_when_host_and_disk_are_full_then_it_works) {
    for (uint64_t seed = 1; seed < 6; seed++) {
        read_when_full(1, seed);
    }
}

SK_TEST(sched_tier, test_copy_in_when_many_at_once_and_all_is_full_then_it_works) {
    for (uint64_t seed = 1; seed < 12; seed++) {
        read_when_full(2 + seed, seed);
    }
}

SK_TEST(sched_tier, test_copy_in_when_it_is_being_written_then_it_does_not_wait_for_that) {
    enum { ROUNDS = 10, LARGE = 2 * MIB, SLOW_BYTES = 4096 };
    scene s;
    scene_open(&s, &(scene_options){.disk = true, .host_limit_bytes = 4 * LARGE});
    fault_short(SK_DISK_CALL_WRITE, 1, true, SLOW_BYTES);
    int nwriting = 0;
    for (int i = 0; i < ROUNDS; i++) {
        parcel p = parcel_make(&s, LARGE, SK_TIER_DISK, 1);
        parcel_send(&p);
        nwriting += scene_stats(&s).disk_bytes > 0 &&
                    scene_stats(&s).written_bytes < (size_t)(i + 1) * LARGE;
        parcel_fetch(&p);
        scene_check(&s);
        if (i % 2 == 0) {
            sk_sched_drain(s.sched);
            parcel_evict(&p);
            parcel_fetch(&p);
        }
        parcel_drop(&p); /* every other one while it is being written */
    }
    fault_none();
    CHECK(nwriting > 0);
    scene_close(&s);
}

/* ---- no room --------------------------------------------------------------------------------- */

SK_TEST(sched_tier, test_copy_out_when_the_disk_is_full_then_refused_and_usable_again) {
    enum { NDISK = 3, FIT = NDISK + NFIT - 1 };
    scene s;
    open_tight(&s, NDISK * SIZE);
    parcel parcels[FIT];
    send_many(&s, parcels, FIT);
    CHECK_EQUAL(NDISK * SIZE, scene_stats(&s).disk_bytes);
    parcel more = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_STATUS(SK_OUT_OF_DISK, parcel_out(&more, NULL));
    CHECK_CONTAINS(sk_error_text(), "disk: no room for 262144 bytes");
    CHECK_EQUAL(SK_GROUP_RESIDENT, parcel_state(&more));
    CHECK(parcel_holds(&more));
    scene_check(&s);
    parcel_drop(&parcels[0]);
    parcel_send(&more);
    for (int i = 1; i < FIT; i++) {
        parcel_fetch(&parcels[i]);
        parcel_drop(&parcels[i]);
    }
    parcel_fetch(&more);
    parcel_drop(&more);
    scene_close(&s);
}

SK_TEST(sched_tier, test_copy_out_when_room_was_hoped_for_in_vain_then_finish_says_so) {
    enum { NDISK = 1 };
    scene s;
    scene_open(&s, &(scene_options){.disk = true,
                                    .gate = true,
                                    .copies_in_flight = 1,
                                    .host_limit_bytes = LIMIT,
                                    .disk_limit_bytes = NDISK * SIZE});
    parcel parcels[NFIT + 2];
    for (int i = 0; i < NFIT + 2; i++) { /* while copies run there is hope for the last two */
        parcels[i] = parcel_make(&s, SIZE, SK_TIER_ANY, (uint64_t)i);
        CHECK_OK(parcel_out(&parcels[i], NULL));
    }
    CHECK_EQUAL(LIMIT, scene_stats(&s).host_bytes);
    scene_check(&s);
    sk_delay_release(s.gate, UINT64_MAX);
    int nrefused = 0;
    for (int i = 0; i < NFIT + 2; i++) {
        sk_status status = sk_group_finish_out(parcels[i].group, NULL, false);
        nrefused += status != SK_OK;
        CHECK(status == SK_OK || status == SK_OUT_OF_DISK);
        CHECK_EQUAL(status == SK_OK ? SK_GROUP_CLEAN : SK_GROUP_RESIDENT,
                    parcel_state(&parcels[i]));
        CHECK(status == SK_OK || parcel_holds(&parcels[i]));
    }
    CHECK_EQUAL(2, nrefused);
    sk_sched_drain(s.sched);
    CHECK_EQUAL(NFIT + 2, atomic_load(&s.ndrops));
    drop_many(parcels, NFIT + 2);
    scene_close(&s);
}

/* ---- a file that fails ----------------------------------------------------------------------- */

SK_TEST(sched_tier, test_write_when_it_fails_then_the_copy_stays_on_the_host) {
    scene s;
    open_tight(&s, 0);
    fault_calls(SK_DISK_CALL_WRITE, 1, true, EIO);
    parcel p = parcel_make(&s, SIZE, SK_TIER_DISK, 1);
    parcel_send(&p);
    sk_sched_drain(s.sched);
    CHECK_EQUAL(SK_ON_HOST, parcel_place(&p));
    CHECK_EQUAL(0, scene_stats(&s).disk_bytes);
    parcel parcels[MANY];
    int count = 0;
    sk_status status = SK_OK;
    while (status == SK_OK) {
        CHECK(count < MANY);
        parcels[count] = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
        status = parcel_out(&parcels[count], NULL);
        if (status == SK_OK) {
            status = sk_group_finish_out(parcels[count].group, NULL, false);
        }
        count++;
    }
    CHECK_EQUAL(SK_OUT_OF_HOST_MEMORY, status);
    CHECK_EQUAL(NFIT, count);
    CHECK_EQUAL(SK_GROUP_RESIDENT, parcel_state(&parcels[count - 1]));
    fault_none();
    parcel_fetch(&p);
    CHECK_EQUAL(0, scene_stats(&s).disk_bytes + scene_stats(&s).written_bytes);
    drop_many(parcels, count);
    parcel_drop(&p);
    scene_close(&s);
}

SK_TEST(sched_tier, test_write_when_space_cannot_be_had_then_the_copy_stays_on_the_host) {
    scene s;
    open_tight(&s, 0);
    fault_calls(SK_DISK_CALL_ALLOCATE, 1, true, ENOSPC);
    parcel p = parcel_make(&s, SIZE, SK_TIER_DISK, 1);
    parcel_send(&p);
    sk_sched_drain(s.sched);
    CHECK_EQUAL(SK_ON_HOST, parcel_place(&p));
    fault_none();
    parcel_fetch(&p);
    parcel_drop(&p);
    scene_close(&s);
}

SK_TEST(sched_tier, test_read_when_it_fails_then_finish_says_so_and_a_retry_works) {
    scene s;
    open_tight(&s, 0);
    parcel p = parcel_make(&s, SIZE, SK_TIER_DISK, 1);
    parcel_send(&p);
    sk_sched_drain(s.sched);
    for (int forever = 0; forever < 2; forever++) {
        fault_calls(SK_DISK_CALL_READ, 1, forever == 1, EIO);
        CHECK_OK(parcel_in(&p, NULL));
        CHECK_STATUS(SK_DISK_FAILED, sk_group_finish_in(p.group, NULL, false));
        CHECK_CONTAINS(sk_error_text(), "copying 262144 bytes back to the device failed: disk: ");
        CHECK_EQUAL(SK_GROUP_OUT, parcel_state(&p));
        scene_check(&s);
        CHECK_EQUAL(0, scene_stats(&s).host_bytes);
        fault_none();
        parcel_fetch(&p);
        slab_drop(p.device);
        p.device = NULL;
        CHECK_OK(sk_group_evict(p.group));
        p.group->next_use = 1;
        sk_sched_drain(s.sched);
        parcel filler[NFIT]; /* so that the host's copy is dropped */
        send_many(&s, filler, NFIT);
        drop_many(filler, NFIT);
        if (parcel_place(&p) == SK_ON_HOST) {
            parcel whole = parcel_make(&s, LIMIT - SIZE, SK_TIER_HOST, 1);
            parcel_send(&whole);
            parcel_drop(&whole);
        }
        CHECK_EQUAL(SK_ON_DISK, parcel_place(&p));
    }
    parcel_drop(&p);
    scene_close(&s);
}

SK_TEST(sched_tier, test_read_ahead_when_it_fails_then_nobody_notices) {
    scene s;
    open_tight(&s, 0);
    parcel parcels[NFIT];
    for (int i = 0; i < NFIT; i++) {
        parcels[i] = parcel_make(&s, SIZE, SK_TIER_DISK, (uint64_t)i);
        parcel_send(&parcels[i]);
    }
    sk_sched_drain(s.sched);
    parcel host = parcel_make(&s, SIZE, SK_TIER_HOST, 1);
    parcel_send(&host);
    fault_calls(SK_DISK_CALL_READ, 1, true, EIO);
    parcel_fetch(&host); /* which reads nothing itself */
    sk_sched_drain(s.sched);
    CHECK(sk_disk_fault_calls() > 0);
    CHECK_EQUAL(SK_ON_DISK, parcel_place(&parcels[0]));
    scene_check(&s);
    fault_none();
    for (int i = 0; i < NFIT; i++) {
        parcel_fetch(&parcels[i]);
    }
    drop_many(parcels, NFIT);
    parcel_drop(&host);
    scene_close(&s);
}

SK_TEST(sched_tier, test_destroy_when_a_failing_read_is_under_way_then_nothing_is_left) {
    enum { ROUNDS = 20 };
    scene s;
    open_tight(&s, 0);
    for (int i = 0; i < ROUNDS; i++) {
        parcel p = parcel_make(&s, SIZE, SK_TIER_DISK, 1);
        parcel_send(&p);
        sk_sched_drain(s.sched);
        fault_calls(SK_DISK_CALL_READ, 1, true, EIO);
        CHECK_OK(parcel_in(&p, NULL));
        parcel_drop(&p);
        sk_sched_drain(s.sched);
        fault_none();
        scene_check(&s);
    }
    scene_close(&s);
}

/* ---- many rounds ----------------------------------------------------------------------------- */

SK_TEST(sched_tier, test_groups_when_dropped_at_random_then_no_byte_is_left) {
#ifdef SK_TEST_SANITISED
    enum { ROUNDS = 200, LIVE = 10 };
#else
    enum { ROUNDS = 1000, LIVE = 10 };
#endif
    scene s;
    open_tight(&s, 10 * SIZE);
    uint64_t state = 1;
    parcel parcels[LIVE] = {{0}};
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < LIVE; i++) {
            parcel *p = &parcels[i];
            size_t chance = random_below(&state, 4);
            if (p->group == NULL) {
                *p = parcel_make(&s, 1 + random_below(&state, SIZE),
                                 (sk_tier)random_below(&state, 3), random_below(&state, 100));
                sk__ignore(parcel_out(p, NULL));
            } else if (chance == 0) {
                parcel_drop(p);
            } else if (chance == 1 && parcel_state(p) == SK_GROUP_COPYING_OUT) {
                if (sk_group_finish_out(p->group, NULL, false) == SK_OK) {
                    parcel_evict(p);
                }
            } else if (chance == 2 && parcel_state(p) == SK_GROUP_OUT) {
                CHECK_OK(parcel_in(p, NULL));
            } else if (chance == 3 && parcel_state(p) == SK_GROUP_COPYING_IN) {
                parcel_finish_in(p);
            }
        }
        CHECK_OK(sk_sched_check(s.sched));
    }
    for (int i = 0; i < LIVE; i++) {
        parcel_drop(&parcels[i]);
    }
    sk_sched_drain(s.sched);
    CHECK(scene_stats(&s).written_bytes > 0 && scene_stats(&s).read_bytes > 0);
    sk_sched_trim(s.sched);
    CHECK_EQUAL(0, scene_stats(&s).host_reserved_bytes);
    sk__disk_stats disk;
    sk__disk_stats_get(s.sched->disk, &disk);
    CHECK_EQUAL(0, disk.backed_bytes);
    scene_close(&s);
}
