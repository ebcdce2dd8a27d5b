/* test_wait.c - a wait that is left out is found out.
 *
 * Each scenario is played twice: over the device, where the bytes are right, and over one whose
 * waits of one kind do nothing, where they are not. So the suite would see it if the pool or the
 * scheduler forgot such a wait. Streams are made slow by the simulated driver.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda_device.h"
#include "instruments/interpose.h"
#include "sched_fixture.h"

enum { SIZE = 2 * MIB, SLOW_NS = 60000000 };

/* ---- a device that does not wait ------------------------------------------------------------- */

typedef enum deafness { HEARS, NO_STREAM_WAIT, NO_EVENT_SYNC } deafness;

static sk_status stream_wait_skipped(void *self, sk_stream *stream, sk_event *event) {
    (void)self;
    (void)stream;
    (void)event;
    return SK_OK;
}

static sk_status event_sync_skipped(void *self, sk_event *event) {
    (void)self;
    (void)event;
    return SK_OK;
}

static void deaf_destroy(sk__interposer *self) { free(self); }

static sk_backend *make_deaf(deafness how) {
    sk__interposer *state = calloc(1, sizeof *state);
    CHECK(state != NULL);
    *state = (sk__interposer){.inner = make_device(CAPACITY), .destroy = deaf_destroy};
    sk_backend *out = NULL;
    CHECK_OK(sk__interpose(state, "deaf", &out));
    if (how == NO_STREAM_WAIT) {
        out->ops.stream_wait = stream_wait_skipped;
    }
    if (how == NO_EVENT_SYNC) {
        out->ops.event_sync = event_sync_skipped;
        out->ops.event_query = event_sync_skipped;
    }
    return out;
}

static void slow_down(sk_stream *stream) { device_slow(stream, SLOW_NS); }

/* ---- the pool -------------------------------------------------------------------------------- */

typedef struct pair {
    fixture f;
    sk_stream *first, *second;
    unsigned char *host, *fresh;
} pair;

static pair pair_open(deafness how) {
    pair made = {
        .f = {.backend = make_deaf(how)}, .host = host_take(SIZE), .fresh = host_take(SIZE)};
    sk_pool_params params = {.budget_bytes = SIZE};
    CHECK_OK(sk_pool_create(made.f.backend, &params, &made.f.pool));
    made.first = make_stream(made.f.backend);
    made.second = make_stream(made.f.backend);
    pattern_write(made.fresh, SIZE, 2);
    return made;
}

/* Whether what the first stream copied out are the bytes from before the second wrote. */
static bool pair_close(pair *p) {
    CHECK_OK(sk_stream_sync(p->f.backend, p->first));
    CHECK_OK(sk_stream_sync(p->f.backend, p->second));
    bool right = pattern_holds(p->host, SIZE, 1);
    drop_used_stream(&p->f, p->first);
    drop_used_stream(&p->f, p->second);
    fixture_close(&p->f);
    host_give(p->host);
    host_give(p->fresh);
    return right;
}

/* The slow first stream still reads its block when the second is given it, and writes. */
static bool adopt(deafness how) {
    pair p = pair_open(how);
    void *block = take(&p.f, SIZE, p.first);
    pattern_write(block, SIZE, 1);
    slow_down(p.first);
    CHECK_OK(sk_copy_async(p.f.backend, p.host, block, SIZE, SK_DEVICE_TO_HOST, p.first));
    give(&p.f, block);
    block = take(&p.f, SIZE, p.second);
    CHECK_OK(sk_copy_async(p.f.backend, block, p.fresh, SIZE, SK_HOST_TO_DEVICE, p.second));
    give(&p.f, block);
    return pair_close(&p);
}

SK_TEST(wait, test_adopt_when_the_streams_wait_is_left_out_then_bytes_are_wrong) {
    CHECK(adopt(HEARS));
    CHECK(!adopt(NO_STREAM_WAIT));
}

/* The second stream's block is used by the slow first one, given, and taken again. */
static bool reuse(deafness how) {
    pair p = pair_open(how);
    void *block = take(&p.f, SIZE, p.second);
    pattern_write(block, SIZE, 1);
    slow_down(p.first);
    CHECK_OK(sk_pool_use(p.f.pool, block, p.first));
    CHECK_OK(sk_copy_async(p.f.backend, p.host, block, SIZE, SK_DEVICE_TO_HOST, p.first));
    give(&p.f, block);
    block = take(&p.f, SIZE, p.second);
    CHECK_OK(sk_copy_async(p.f.backend, block, p.fresh, SIZE, SK_HOST_TO_DEVICE, p.second));
    give(&p.f, block);
    return pair_close(&p);
}

SK_TEST(wait, test_reuse_when_the_wait_for_the_event_is_left_out_then_bytes_are_wrong) {
    CHECK(reuse(HEARS));
    CHECK(!reuse(NO_EVENT_SYNC));
}

/* ---- the scheduler --------------------------------------------------------------------------- */

static void scene_open_deaf(scene *s, deafness how) {
    scene_open_over(s, make_deaf(how), &(scene_options){0});
}

/* The copy out is queued while the producer has yet to write the bytes. */
static bool produce(deafness how) {
    scene s;
    scene_open_deaf(&s, how);
    sk_stream *producer = make_stream(s.backend);
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    unsigned char *fresh = host_take(SIZE);
    p.seed++;
    pattern_write(fresh, SIZE, p.seed);
    slow_down(producer);
    CHECK_OK(sk_copy_async(s.backend, p.device->bytes, fresh, SIZE, SK_HOST_TO_DEVICE, producer));
    CHECK_OK(parcel_out(&p, producer));
    CHECK_OK(sk_group_finish_out(p.group, producer, false));
    CHECK_OK(sk_stream_sync(s.backend, producer));
    sk_sched_drain(s.sched);
    parcel_evict(&p);
    CHECK_OK(parcel_in(&p, NULL));
    CHECK_OK(sk_group_finish_in(p.group, NULL, false));
    sk_sched_drain(s.sched);
    bool right = parcel_holds(&p);
    parcel_drop(&p);
    drop_stream(s.backend, producer);
    host_give(fresh);
    scene_close(&s);
    return right;
}

SK_TEST(wait, test_copy_out_when_it_does_not_wait_for_the_producer_then_bytes_are_wrong) {
    CHECK(produce(HEARS));
    CHECK(!produce(NO_STREAM_WAIT));
}

/* The consumer reads while the copy back is yet to come. */
static bool consume(deafness how) {
    scene s;
    scene_open_deaf(&s, how);
    sk_stream *consumer = make_stream(s.backend);
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    unsigned char *seen = host_take(SIZE);
    parcel_send(&p);
    sk_sched_drain(s.sched);
    p.device = slab_make(&s, SIZE);
    device_fill(p.device->bytes, 0, SIZE);
    CHECK_OK(sk_stream_sync(s.backend, NULL));
    slow_down(s.sched->lanes[SK_WAY_IN].stream);
    CHECK_OK(parcel_in(&p, NULL));
    CHECK_OK(sk_group_finish_in(p.group, consumer, false));
    CHECK_OK(sk_copy_async(s.backend, seen, p.device->bytes, SIZE, SK_DEVICE_TO_HOST, consumer));
    CHECK_OK(sk_stream_sync(s.backend, consumer));
    sk_sched_drain(s.sched);
    bool right = pattern_holds(seen, SIZE, p.seed);
    parcel_drop(&p);
    drop_stream(s.backend, consumer);
    host_give(seen);
    scene_close(&s);
    return right;
}

SK_TEST(wait, test_copy_in_when_the_consumer_does_not_wait_then_bytes_are_wrong) {
    CHECK(consume(HEARS));
    CHECK(!consume(NO_STREAM_WAIT));
}

/* The memory of a copy on its way out is dropped when its event has come, and used for others. */
static bool drop_early(deafness how) {
    scene s;
    scene_open_deaf(&s, how);
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    CHECK_OK(sk_stream_sync(s.backend, NULL));
    slow_down(s.sched->lanes[SK_WAY_OUT].stream);
    CHECK_OK(parcel_out(&p, NULL));
    sk_sched_drain(s.sched); /* the owner is dropped in here */
    CHECK_OK(sk_group_finish_out(p.group, NULL, false));
    slab_drop(p.device); /* the last reference: the memory is another's now */
    p.device = NULL;
    CHECK_OK(sk_group_evict(p.group));
    CHECK_OK(sk_stream_sync(s.backend, s.sched->lanes[SK_WAY_OUT].stream));
    CHECK_OK(parcel_in(&p, NULL));
    CHECK_OK(sk_group_finish_in(p.group, NULL, false));
    sk_sched_drain(s.sched);
    CHECK_OK(sk_stream_sync(s.backend, s.sched->lanes[SK_WAY_IN].stream));
    bool right = parcel_holds(&p);
    parcel_drop(&p);
    scene_close(&s);
    return right;
}

SK_TEST(wait, test_copy_out_when_its_owner_is_dropped_early_then_bytes_are_wrong) {
    CHECK(drop_early(HEARS));
    CHECK(!drop_early(NO_EVENT_SYNC));
}
