/* test_sched_batch.c - small copies that are in flight together. */
#include "sched_fixture.h"

enum { BATCH = 40 };

static void batch_open(scene *s, parcel *parcels, const scene_options *options) {
    scene_open(s, options);
    for (int i = 0; i < BATCH; i++) {
        parcels[i] = parcel_make(s, KIB * (1 + (size_t)i % 3), SK_TIER_ANY, 1);
        CHECK_OK(parcel_out(&parcels[i], NULL));
    }
    CHECK_EQUAL(BATCH, scene_stats(s).in_flight);
    scene_check(s);
}

SK_TEST(sched, test_batch_when_it_ends_then_owners_are_dropped_in_its_order) {
    for (int streams = 0; streams < 2; streams++) {
        scene s;
        parcel parcels[BATCH];
        batch_open(&s, parcels, &(scene_options){.gate = true, .streams = streams == 1});
        sk_delay_release(s.gate, UINT64_MAX);
        while (atomic_load(&s.ndrops) < BATCH) { /* only the pump drops any */
            (void)sched_yield();
        }
        for (int i = 0; i < BATCH; i++) {
            CHECK_EQUAL(i + 1, parcels[i].device->dropped_as);
            parcel_recover(&parcels[i]);
            parcel_drop(&parcels[i]);
        }
        scene_close(&s);
    }
}

/* The rest of a batch neither ends with its first half nor is needed by it. */
SK_TEST(sched, test_batch_when_half_of_it_may_run_then_the_other_half_is_in_flight) {
    for (int streams = 0; streams < 2; streams++) {
        scene s;
        parcel parcels[BATCH];
        batch_open(&s, parcels, &(scene_options){.gate = true, .streams = streams == 1});
        sk_stream *consumer = make_stream(s.backend);
        sk_delay_release(s.gate, BATCH / 2);
        for (int i = 0; i < BATCH / 2 - 8; i++) { /* as many share an event */
            CHECK_OK(sk_group_finish_out(parcels[i].group, consumer, false));
        }
        CHECK_OK(sk_stream_sync(s.backend, consumer));
        CHECK_STATUS(SK_NOT_READY, sk_group_finish_out(parcels[BATCH / 2].group, NULL, true));
        CHECK(scene_stats(&s).in_flight >= BATCH / 2);
        CHECK_EQUAL(0, parcels[BATCH / 2].device->dropped_as);
        for (int i = 0; i < BATCH; i += 2) {
            parcel_drop(&parcels[i]); /* those that run become orphans */
        }
        scene_check(&s);
        sk_delay_release(s.gate, UINT64_MAX);
        for (int i = 1; i < BATCH; i += 2) {
            parcel_recover(&parcels[i]);
            parcel_drop(&parcels[i]);
        }
        drop_stream(s.backend, consumer);
        scene_close(&s);
    }
}

SK_TEST(sched, test_batch_when_copies_are_small_then_they_share_events) {
    scene s;
    parcel parcels[BATCH];
    batch_open(&s, parcels, &(scene_options){.gate = true, .streams = true});
    sk_stream *consumer = make_stream(s.backend);
    CHECK_OK(sk_group_finish_out(parcels[BATCH - 1].group, consumer, false));
    sk__enter(s.sched);
    int nmarks = 0;
    for (int i = 0; i < BATCH; i++) {
        const sk__mark *mark = parcels[i].group->done;
        CHECK(mark != NULL && mark->ticket >= parcels[i].group->ticket);
        nmarks += i == 0 || mark != parcels[i - 1].group->done;
    }
    sk__leave(s.sched);
    CHECK(nmarks >= BATCH / 8 && nmarks <= BATCH / 4);
    sk_delay_release(s.gate, UINT64_MAX);
    CHECK_OK(sk_stream_sync(s.backend, consumer));
    CHECK(parcel_holds(&parcels[BATCH - 1]));
    for (int i = 0; i < BATCH; i++) {
        parcel_recover(&parcels[i]);
        parcel_drop(&parcels[i]);
    }
    drop_stream(s.backend, consumer);
    scene_close(&s);
}

/* ---- waiting --------------------------------------------------------------------------------- */
