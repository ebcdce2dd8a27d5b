/* sched_fixture.c - see sched_fixture.h. */
#include "sched_fixture.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "instruments/interpose.h"

/* ---- device memory --------------------------------------------------------------------------- */

slab *slab_make(scene *s, size_t nbytes) {
    slab *made = calloc(1, sizeof *made);
    CHECK(made != NULL);
    made->scene = s;
    made->nbytes = nbytes;
    made->bytes = device_take(nbytes);
    atomic_store(&made->nholders, 1);
    atomic_fetch_add(&s->nslabs, 1);
    return made;
}

void slab_drop(slab *slab) {
    int before = atomic_fetch_sub(&slab->nholders, 1);
    CHECK(before > 0);
    if (before == 1) {
        atomic_fetch_sub(&slab->scene->nslabs, 1);
        device_give(slab->bytes, slab->nbytes);
        free(slab);
    }
}

/* With no lock held: so the scheduler may be called. */
static void owner_drop(void *owner) {
    slab *dropped = owner;
    sk_sched_stats stats;
    sk_sched_stats_get(dropped->scene->sched, &stats);
    dropped->dropped_as = atomic_fetch_add(&dropped->scene->ndrops, 1) + 1;
    slab_drop(dropped);
}

/* ---- scenes ---------------------------------------------------------------------------------- */

static void plain_destroy(sk__interposer *self) { free(self); }

static sk_backend *make_streamed(sk_backend *device) {
    sk__interposer *state = calloc(1, sizeof *state);
    CHECK(state != NULL);
    *state = (sk__interposer){.inner = device, .destroy = plain_destroy};
    sk_backend *out = NULL;
    CHECK_OK(sk__interpose(state, "streamed", &out));
    out->ops.null_stream_is_host = 0;
    return out;
}

void scene_open(scene *s, const scene_options *options) {
    scene_open_over(s, make_device(CAPACITY), options);
}

void scene_open_over(scene *s, sk_backend *device, const scene_options *options) {
    fault_none(); /* a test before may have failed half-way */
    host_memory_fail(0, false);
    *s = (scene){.backend = options->streams ? make_streamed(device) : device};
    if (options->gate) {
        s->backend = s->gate = make_delay(s->backend);
    }
    if (options->fault) {
        s->backend = s->fault = make_fault(s->backend);
    }
    if (options->disk) {
        make_folder(s->folder);
    }
    sk_sched_params params = {.host_limit_bytes = options->host_limit_bytes,
                              .disk_folder = options->disk ? s->folder : NULL,
                              .disk_limit_bytes = options->disk_limit_bytes,
                              .copies_in_flight = options->copies_in_flight,
                              .host_nodes = options->host_nodes,
                              .drop_owner = owner_drop};
    CHECK_OK(sk_sched_create(s->backend, &params, &s->sched));
    CHECK(s->sched != NULL);
}

sk_sched_stats scene_stats(scene *s) {
    sk_sched_stats stats;
    sk_sched_stats_get(s->sched, &stats);
    return stats;
}

void scene_check(scene *s) {
    CHECK_OK(sk_sched_check(s->sched));
    sk_sched_stats stats = scene_stats(s);
    CHECK(stats.host_peak_bytes <= s->sched->host_limit_bytes);
    CHECK(stats.host_bytes <= stats.host_reserved_bytes);
    CHECK(stats.host_reserved_bytes <= stats.host_peak_bytes);
}

void scene_close(scene *s) {
    if (s->gate != NULL) {
        sk_delay_release(s->gate, UINT64_MAX);
    }
    sk_sched_drain(s->sched);
    scene_check(s);
    sk_sched_stats stats = scene_stats(s);
    CHECK_EQUAL(0, stats.groups);
    CHECK_EQUAL(0, stats.queued + stats.in_flight);
    CHECK_EQUAL(0, stats.host_bytes);
    CHECK_EQUAL(0, stats.disk_bytes);
    CHECK_OK(sk_sched_destroy(s->sched));
    CHECK_EQUAL(0, atomic_load(&s->nslabs));
    sk_backend_close(s->backend);
    if (s->folder[0] != '\0') {
        drop_folder(s->folder);
    }
}

/* ---- parcels --------------------------------------------------------------------------------- */

parcel parcel_make(scene *s, size_t nbytes, sk_tier tier, uint64_t next_use) {
    static atomic_uint seeds;
    parcel p = {.scene = s,
                .nbytes = nbytes,
                .next_use = next_use,
                .seed = atomic_fetch_add(&seeds, 1),
                .device = slab_make(s, nbytes)};
    pattern_write(p.device->bytes, nbytes, p.seed);
    CHECK_OK(sk_group_create(s->sched, nbytes, tier, &p.group));
    CHECK_EQUAL(SK_GROUP_RESIDENT, parcel_state(&p));
    return p;
}

void parcel_drop(parcel *p) {
    sk_group_destroy(p->group);
    if (p->device != NULL) {
        slab_drop(p->device);
    }
    p->group = NULL;
    p->device = NULL;
}

sk_group_state parcel_state(const parcel *p) { return sk_group_state_get(p->group); }

sk_status parcel_out(parcel *p, sk_stream *producer) {
    atomic_fetch_add(&p->device->nholders, 1);
    sk_status status =
        sk_group_copy_out(p->group, p->device->bytes, p->device, p->next_use, producer);
    if (status != SK_OK) {
        atomic_fetch_sub(&p->device->nholders, 1);
    }
    return status;
}

/* Where only the NULL stream has waited, wait as the host would have. */
static void parcel_settle(const parcel *p) {
    sk_sched *sched = p->scene->sched;
    bool runs = true;
    while (runs) {
        sk__enter(sched);
        runs = p->group->phase == SK_RUNNING;
        sk__leave(sched);
        (void)sched_yield();
    }
}

void parcel_finish_out(parcel *p) {
    CHECK_OK(sk_group_finish_out(p->group, NULL, false));
    parcel_settle(p);
    CHECK_EQUAL(SK_GROUP_CLEAN, parcel_state(p));
}

void parcel_evict(parcel *p) {
    CHECK_OK(sk_group_evict(p->group));
    CHECK_EQUAL(SK_GROUP_OUT, parcel_state(p));
    slab_drop(p->device);
    p->device = NULL;
}

sk_status parcel_in(parcel *p, sk_stream *producer) {
    if (p->device == NULL) {
        p->device = slab_make(p->scene, p->nbytes);
    }
    atomic_fetch_add(&p->device->nholders, 1);
    sk_status status =
        sk_group_copy_in(p->group, p->device->bytes, p->device, p->next_use, producer);
    if (status != SK_OK) {
        atomic_fetch_sub(&p->device->nholders, 1);
    }
    return status;
}

bool parcel_holds(const parcel *p) { return pattern_holds(p->device->bytes, p->nbytes, p->seed); }

void parcel_finish_in(parcel *p) {
    CHECK_OK(sk_group_finish_in(p->group, NULL, false));
    parcel_settle(p);
    CHECK_EQUAL(SK_GROUP_CLEAN, parcel_state(p));
    CHECK(parcel_holds(p));
}

void parcel_send(parcel *p) {
    CHECK_OK(parcel_out(p, NULL));
    parcel_finish_out(p);
    parcel_evict(p);
}

void parcel_fetch(parcel *p) {
    CHECK_OK(parcel_in(p, NULL));
    parcel_finish_in(p);
}

sk__place parcel_place(const parcel *p) {
    sk__enter(p->scene->sched);
    sk__place place = p->group->place;
    sk__leave(p->scene->sched);
    return place;
}

void parcel_recover(parcel *p) {
    if (parcel_state(p) == SK_GROUP_COPYING_OUT) {
        sk_status status = sk_group_finish_out(p->group, NULL, false);
        CHECK(parcel_state(p) == (status == SK_OK ? SK_GROUP_CLEAN : SK_GROUP_RESIDENT));
    }
    if (parcel_state(p) == SK_GROUP_COPYING_IN) {
        sk_status status = sk_group_finish_in(p->group, NULL, false);
        CHECK(parcel_state(p) == (status == SK_OK ? SK_GROUP_CLEAN : SK_GROUP_OUT));
    }
    if (parcel_state(p) == SK_GROUP_OUT) {
        parcel_fetch(p);
    }
    CHECK(parcel_holds(p));
}
