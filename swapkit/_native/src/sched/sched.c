/* sched.c - the scheduler's life, its statistics, and the owners and events under its lock. */
#include "sched/sched.h"

#include <stdlib.h>
#include <string.h>

enum { ROOM_START = 16 };

/* ---- the lock, and dropping owners ----------------------------------------------------------- */

SK_NO_ANALYSIS void sk__enter(sk_sched *sched) {
    sk__lock(&sched->lock);
    sk__visit_begin(sched->backend);
}

/* The scheduler whose owners this thread is dropping. If drop_owner calls the scheduler again, that
 * call drops no further owners: they keep their order. */
static _Thread_local const sk_sched *dropping;

/* Drop the owners that are no longer needed, the oldest first, each with the lock released. */
SK_NO_ANALYSIS static void drop_owners(sk_sched *sched) {
    if (dropping == sched) {
        return;
    }
    const sk_sched *outer = dropping;
    dropping = sched;
    while (sched->first_drop < sched->end_drops) {
        void *owner = sched->drops[sched->first_drop++];
        sched->ndropping++;
        sk__unlock(&sched->lock);
        sched->drop_owner(owner);
        sk__lock(&sched->lock);
        if (--sched->ndropping == 0) {
            (void)pthread_cond_broadcast(&sched->changed);
        }
    }
    sched->first_drop = sched->end_drops = 0;
    dropping = outer;
}

SK_NO_ANALYSIS void sk__leave(sk_sched *sched) {
    sk__visit_end(sched->backend);
    drop_owners(sched);
    sk__unlock(&sched->lock);
}

void sk__drops_await(sk_sched *sched) {
    while (sched->ndropping > 0) { /* that thread also drops the later ones */
        sk__wait(&sched->changed, &sched->lock);
    }
    drop_owners(sched);
    while (sched->ndropping > 0) {
        sk__wait(&sched->changed, &sched->lock);
    }
}

sk_status sk__owner_reserve(sk_sched *sched) {
    size_t ndrops = sched->end_drops - sched->first_drop;
    if (sched->first_drop > 0) { /* reuse the room of dropped owners */
        memmove(sched->drops, sched->drops + sched->first_drop, ndrops * sizeof *sched->drops);
        sched->first_drop = 0;
        sched->end_drops = ndrops;
    }
    size_t needed = ndrops + sched->nowners + 1;
    if (needed <= sched->drops_capacity) {
        return SK_OK;
    }
    size_t capacity = sk__max(ROOM_START, 2 * needed);
    void **drops = realloc(sched->drops, capacity * sizeof *drops);
    if (drops == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "scheduler: no host memory for a transfer");
    }
    sched->drops = drops;
    sched->drops_capacity = capacity;
    return SK_OK;
}

void sk__owner_release(sk_sched *sched, sk_group *group) {
    if (group->owner == NULL) {
        return;
    }
    sk_assert(sched->nowners > 0 && sched->end_drops < sched->drops_capacity);
    sched->drops[sched->end_drops++] = group->owner;
    sched->nowners--;
    group->owner = NULL;
}

/* ---- events ---------------------------------------------------------------------------------- */

sk_status sk__mark_take(sk_sched *sched, sk__mark **out) {
    sk__mark *mark = sched->spares;
    if (mark != NULL) {
        sk_assert(mark->holders == 0 && mark->waiters == 0);
        sched->spares = mark->next;
        mark->holders = 1;
        *out = mark;
        return SK_OK;
    }
    mark = calloc(1, sizeof *mark);
    if (mark == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "scheduler: no host memory for an event");
    }
    sk_status status = sk_event_create(sched->backend, &mark->event);
    if (status != SK_OK) {
        free(mark);
        return status;
    }
    mark->below = sched->marks;
    sched->marks = mark;
    mark->holders = 1;
    *out = mark;
    return SK_OK;
}

sk__mark *sk__mark_share(sk__mark *mark) {
    sk_assert(mark->holders > 0);
    mark->holders++;
    return mark;
}

static void mark_keep(sk_sched *sched, sk__mark *mark) SK_REQUIRES(sched->lock) {
    if (mark->holders == 0 && mark->waiters == 0) {
        mark->next = sched->spares;
        sched->spares = mark;
    }
}

void sk__mark_give(sk_sched *sched, sk__mark **mark) {
    if (*mark != NULL) {
        sk_assert((*mark)->holders > 0);
        (*mark)->holders--;
        mark_keep(sched, *mark);
        *mark = NULL;
    }
}

void sk__mark_hold(sk__mark *mark) {
    if (mark != NULL) {
        mark->waiters++;
    }
}

void sk__mark_drop(sk_sched *sched, sk__mark *mark) {
    if (mark != NULL) {
        sk_assert(mark->waiters > 0);
        mark->waiters--;
        mark_keep(sched, mark);
    }
}

static void marks_free(sk_sched *sched) {
    while (sched->marks != NULL) {
        sk__mark *mark = sched->marks;
        sk_assert(mark->holders == 0 && mark->waiters == 0);
        sched->marks = mark->below;
        sk__ignore(sk_event_destroy(sched->backend, mark->event));
        free(mark);
    }
}

/* ---- life ------------------------------------------------------------------------------------ */

/* Repair a forked child. It has no pumps; they start again when a transfer is queued. The disk
 * belongs to the parent, and does not answer here. */
static SK_NO_ANALYSIS void sched_after_fork(void *owner) {
    sk_sched *sched = owner;
    for (sk_group *group = sched->groups; group != NULL; group = group->below) {
        if (group->place == SK_WRITING) {
            group->place = SK_ON_HOST;
            group->has_extent = false;
        } else if (group->place == SK_READING) {
            group->place = SK_ON_DISK;
            group->host = NULL;
            sched->host_bytes -= sk__round_up(group->nbytes, sched->host_rounding);
        }
    }
    sched->nreads = sched->nwrites = 0;
    sched->ndropping = 0;
    sched->left_orphans = true; /* groups that the disk's threads worked on; see sk__lanes_fill() */
    for (sk__mark *mark = sched->marks; mark != NULL; mark = mark->below) {
        bool was_held = mark->waiters > 0;
        mark->waiters = 0;
        if (was_held) {
            mark_keep(sched, mark);
        }
    }
    (void)pthread_cond_init(&sched->changed, NULL);
    for (int way = 0; way < SK_WAYS; way++) {
        (void)pthread_cond_init(&sched->lanes[way].work, NULL);
        sched->lanes[way].has_thread = false;
    }
}

/* Free a scheduler, also one that `sk_sched_create` has only made in part. */
static SK_NO_ANALYSIS void sched_free(sk_sched *sched) {
    for (int way = 0; way < SK_WAYS; way++) {
        if (sched->lanes[way].sched != NULL) {
            sk__lane_close(&sched->lanes[way]);
        }
    }
    marks_free(sched);
    sk__stamps_free(sched);
    sk__host_close(sched);
    sk__fork_unregister(&sched->fork_node);
    sk__backend_drop(sched->backend);
    (void)pthread_cond_destroy(&sched->changed);
    sk__mutex_destroy(&sched->lock);
    free(sched->drops);
    free(sched);
}

static SK_NO_ANALYSIS sk_status sched_open(sk_sched *sched, const sk_sched_params *params) {
    sk_status status = sk__host_open(sched, params);
    for (int way = 0; way < SK_WAYS && status == SK_OK; way++) {
        status = sk__lane_open(sched, (sk__way)way);
    }
    return status;
}

sk_status sk_sched_create(sk_backend *backend, const sk_sched_params *params, sk_sched **out) {
    if (backend == NULL || params == NULL || params->drop_owner == NULL || out == NULL) {
        return sk__fail(SK_INVALID,
                        "scheduler: expected a backend, parameters and a pointer for the result");
    }
    sk_sched *sched = calloc(1, sizeof *sched);
    if (sched == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "scheduler: no host memory for its state");
    }
    sched->backend = backend;
    sched->drop_owner = params->drop_owner;
    sched->copies_in_flight = params->copies_in_flight;
    sk__mutex_init(&sched->lock, SK_RANK_SCHED);
    (void)pthread_cond_init(&sched->changed, NULL);
    sk__backend_hold(backend);
    sched->fork_node =
        (sk__fork_node){.lock = &sched->lock, .child = sched_after_fork, .owner = sched};
    sk__fork_register(&sched->fork_node);
    sk_status status = sched_open(sched, params);
    if (status != SK_OK) {
        sched_free(sched);
        return status;
    }
    *out = sched;
    return SK_OK;
}

static bool is_idle(const sk_sched *sched) {
    bool idle = sched->nreads == 0 && sched->nwrites == 0;
    for (int way = 0; way < SK_WAYS; way++) {
        idle = idle && sched->lanes[way].queued == 0 && sched->lanes[way].in_flight == 0;
    }
    return idle;
}

static void drain_locked(sk_sched *sched) SK_REQUIRES(sched->lock) {
    sk__lanes_fill(sched);
    while (!is_idle(sched)) {
        sk__lanes_await(sched);
    }
}

sk_status sk_sched_destroy(sk_sched *sched) {
    if (sched == NULL) {
        return SK_OK;
    }
    sk__enter(sched);
    uint32_t alive = 0;
    for (const sk_group *group = sched->groups; group != NULL; group = group->below) {
        alive += !group->orphan;
    }
    if (alive > 0) {
        sk__leave(sched);
        return sk__fail(SK_INVALID, "scheduler: cannot be destroyed: %u groups exist", alive);
    }
    drain_locked(sched);
    sk_assert(sched->groups == NULL && sched->nowners == 0);
    sk__leave(sched);
    sched_free(sched);
    return SK_OK;
}

void sk_sched_drain(sk_sched *sched) {
    sk__enter(sched);
    drain_locked(sched);
    sk__drops_await(sched);
    sk__leave(sched);
}

void sk_sched_stats_get(sk_sched *sched, sk_sched_stats *out) {
    sk__enter(sched);
    *out = sched->stats;
    out->queued = sched->lanes[SK_WAY_OUT].queued + sched->lanes[SK_WAY_IN].queued;
    out->in_flight = sched->lanes[SK_WAY_OUT].in_flight + sched->lanes[SK_WAY_IN].in_flight;
    out->groups = sched->ngroups;
    sk_pool_stats host;
    sk_pool_stats_get(sched->host, &host);
    out->host_bytes = (size_t)host.allocated_bytes[0].current;
    out->host_reserved_bytes = (size_t)host.reserved_bytes[0].current;
    out->host_peak_bytes = (size_t)host.reserved_bytes[0].peak;
    sk__disk_stats disk;
    sk__disk_stats_get(sched->disk, &disk);
    out->disk_bytes = disk.in_use_bytes;
    out->disk_peak_bytes = disk.peak_bytes;
    sk__leave(sched);
}
