/* group.c - the life of a group: its states, and its transfers. */
#include <stdlib.h>

#include "sched/sched.h"

static const char *const state_names[] = {"resident", "copying out", "clean", "out", "copying in"};

/* Refuse an operation on a group in another state. */
static sk_status state_require(const sk_group *group, sk_group_state wanted, const char *what) {
    if (group->state == wanted) {
        return SK_OK;
    }
    return sk__fail(SK_INVALID, "scheduler: a group that is %s cannot be %s: it must be %s",
                    state_names[group->state], what, state_names[wanted]);
}

/* ---- life ------------------------------------------------------------------------------------ */

sk_status sk_group_create(sk_sched *sched, size_t nbytes, sk_tier tier, sk_group **out) {
    if (nbytes == 0 || nbytes > SK_MAX_BYTES) {
        return sk__fail(SK_INVALID, "scheduler: a group of %zu bytes is not possible", nbytes);
    }
    if (tier != SK_TIER_ANY && tier != SK_TIER_HOST && tier != SK_TIER_DISK) {
        return sk__fail(SK_INVALID, "scheduler: there is no tier %d", (int)tier);
    }
    if (tier == SK_TIER_DISK && !sched->has_folder) {
        return sk__fail(SK_INVALID, "scheduler: no disk was given for copies");
    }
    sk_group *group = calloc(1, sizeof *group);
    if (group == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "scheduler: no host memory for a group");
    }
    group->sched = sched;
    group->nbytes = nbytes;
    group->tier = tier;
    sk__enter(sched);
    group->below = sched->groups;
    if (sched->groups != NULL) {
        sched->groups->above = group;
    }
    sched->groups = group;
    sched->ngroups++;
    group->number = ++sched->group_number;
    sk__leave(sched);
    *out = group;
    return SK_OK;
}

void sk_group_label(sk_group *group, uint32_t tag) { group->tag = tag; }

sk_status sk_group_borrow(sk_group *group, const char *path, uint64_t offset) {
    sk_sched *sched = group->sched;
    sk__enter(sched);
    sk_status status = state_require(group, SK_GROUP_RESIDENT, "given a file");
    if (status == SK_OK) {
        status = sk__disk_borrow(sched->disk, path, offset, group->nbytes, &group->extent);
    }
    sk__leave(sched);
    return status;
}

void sk__group_reap(sk_sched *sched, sk_group *group) {
    if (!group->orphan || group->phase == SK_RUNNING || sk__in_transit(group)) {
        return;
    }
    sk_assert(group->owner == NULL && group->phase != SK_WAITING);
    sk__copy_drop(sched, group);
    *(group->above == NULL ? &sched->groups : &group->above->below) = group->below;
    if (group->below != NULL) {
        group->below->above = group->above;
    }
    sk_assert(sched->ngroups > 0 && group->done == NULL && group->ready == NULL);
    sched->ngroups--;
    free(group);
    (void)pthread_cond_broadcast(&sched->changed);
}

void sk_group_destroy(sk_group *group) {
    if (group == NULL) {
        return;
    }
    sk_sched *sched = group->sched;
    sk__enter(sched);
    sk_assert(!group->orphan); /* destroyed twice */
    if (group->phase == SK_WAITING) {
        sk__lane_cancel(sched, group);
    }
    group->orphan = true;
    sk__group_reap(sched, group);
    sk__lanes_fill(sched);
    sk__leave(sched);
}

sk_group_state sk_group_state_get(const sk_group *group) { return group->state; }

const sk_group_state *sk_group_state_at(const sk_group *group) { return &group->state; }

/* ---- results of transfers -------------------------------------------------------------------- */

/* Set the text of a failed transfer; return its status, for the call that reports it. */
static sk_status failure_tell(const sk_group *group) {
    sk_assert(group->phase == SK_FAILED && group->failure != SK_OK);
    return sk__fail(group->failure, "copying %zu bytes %s failed: %s", group->nbytes,
                    group->way == SK_WAY_OUT ? "to the host" : "back to the device", group->why);
}

/* Wait for the previous transfer, which may still run although its user no longer waits for it. */
static sk_status transfer_settle(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock) {
    sk_status status = SK_OK;
    while (group->phase == SK_RUNNING && status == SK_OK) {
        status = sk__lane_await(sched, group);
    }
    return status;
}

/* Refuse if the copy out failed after only a stream had waited for it: then there is no copy. */
static sk_status copy_require(const sk_group *group) {
    return group->place == SK_NOWHERE ? failure_tell(group) : SK_OK;
}

bool sk_group_has_copy(sk_group *group) {
    sk_sched *sched = group->sched;
    sk__lock(&sched->lock); /* not sk__leave: it drops owners, which may need locks of the caller */
    bool is_whole = group->place != SK_NOWHERE && !sk__is_under_way(group);
    sk__unlock(&sched->lock);
    return is_whole;
}

void *sk_group_host(sk_group *group) {
    sk_sched *sched = group->sched;
    sk__enter(sched);
    bool is_there = group->tier == SK_TIER_HOST &&
                    (group->state == SK_GROUP_CLEAN || group->state == SK_GROUP_OUT) &&
                    transfer_settle(sched, group) == SK_OK;
    void *host = is_there ? group->host : NULL;
    sk__leave(sched);
    return host;
}

/* ---- starting a transfer --------------------------------------------------------------------- */

/* Record an event on `producer`, unless its work is done when its calls return. */
static sk_status ready_record(sk_sched *sched, sk_group *group, sk_stream *producer)
    SK_REQUIRES(sched->lock) {
    if (producer == NULL && sched->backend->ops.null_stream_is_host) {
        return SK_OK;
    }
    sk_status status = sk__mark_take(sched, &group->ready);
    if (status == SK_OK) {
        status = sk_event_record(sched->backend, group->ready->event, producer);
    }
    if (status != SK_OK) {
        sk__mark_give(sched, &group->ready);
    }
    return status;
}

static sk_status transfer_permit(const sk_group *group, sk_group_state wanted, const void *device,
                                 const char *what) {
    if (device == NULL) {
        return sk__fail(SK_INVALID, "scheduler: a group cannot be %s without device memory", what);
    }
    return state_require(group, wanted, what);
}

static sk_status transfer_ask(sk_sched *sched, sk_group *group, sk__way way, sk_stream *producer,
                              void *owner) SK_REQUIRES(sched->lock) {
    sk_assert(!sk__is_under_way(group) && group->owner == NULL && group->ready == NULL);
    sk_status status = sk__owner_reserve(sched);
    if (status == SK_OK) {
        status = ready_record(sched, group, producer);
    }
    if (status != SK_OK) {
        return status;
    }
    group->owner = owner;
    sched->nowners += owner != NULL;
    group->state = way == SK_WAY_OUT ? SK_GROUP_COPYING_OUT : SK_GROUP_COPYING_IN;
    status = sk__lane_queue(sched, way, group);
    if (status == SK_OK) {
        return SK_OK;
    }
    sk__mark_give(sched, &group->ready);
    group->owner = NULL; /* it stays the caller's */
    sched->nowners -= owner != NULL;
    group->state = way == SK_WAY_OUT ? SK_GROUP_RESIDENT : SK_GROUP_OUT;
    return status;
}

sk_status sk_group_copy_out(sk_group *group, const void *device, void *owner, uint64_t next_use,
                            sk_stream *producer) {
    sk_sched *sched = group->sched;
    sk__enter(sched);
    sk_status status = transfer_permit(group, SK_GROUP_RESIDENT, device, "copied out");
    sched->requests++;
    if (status == SK_OK) {
        status = sk__host_take(sched, group, SK_WAY_OUT);
        status = status == SK_NOT_READY ? SK_OK : status; /* it waits in the queue */
    }
    if (status == SK_OK) {
        group->device = (void *)(uintptr_t)device; /* only read from */
        group->next_use = next_use;
        status = transfer_ask(sched, group, SK_WAY_OUT, producer, owner);
        if (status != SK_OK) {
            sk__copy_drop(sched, group);
            sk__lanes_fill(sched);
        }
    }
    sk__leave(sched);
    return status;
}

sk_status sk_group_copy_in(sk_group *group, void *device, void *owner, uint64_t next_use,
                           sk_stream *producer) {
    sk_sched *sched = group->sched;
    sk__enter(sched);
    sk_status status = transfer_permit(group, SK_GROUP_OUT, device, "copied in");
    if (status == SK_OK) {
        status = transfer_settle(sched, group);
    }
    if (status == SK_OK) {
        status = copy_require(group);
    }
    if (status == SK_OK) {
        group->device = device;
        group->next_use = next_use;
        status = transfer_ask(sched, group, SK_WAY_IN, producer, owner);
    }
    if (status == SK_OK) {
        sk__tier_read_ahead(sched);
    }
    sk__leave(sched);
    return status;
}

/* ---- waiting for a transfer ------------------------------------------------------------------ */

/* Start the transfer if it still waits, and let `consumer` wait for it. */
static sk_status transfer_await(sk_sched *sched, sk_group *group, sk_stream *consumer)
    SK_REQUIRES(sched->lock) {
    uint64_t begin_ns = sk__now_ns();
    sk_status status = SK_OK;
    sched->stats.overtakes += group->phase == SK_WAITING;
    while (group->phase == SK_WAITING) {
        sk__lane_hurry(sched, group);
        if (group->phase == SK_WAITING) {
            sk__lanes_await(sched);
        }
    }
    bool on_host = consumer == NULL && sched->backend->ops.null_stream_is_host;
    if (group->phase == SK_RUNNING && !on_host && group->done == NULL) {
        sk__lane_mark(sched, group->way);
    }
    if (group->phase == SK_RUNNING && !on_host && group->done != NULL) {
        status = sk_stream_wait(sched->backend, consumer, group->done->event);
    } else {
        status = transfer_settle(sched, group);
    }
    sched->stats.stall_ns += sk__now_ns() - begin_ns;
    return status;
}

/* End the transfer if it is done; never wait. A query that fails says nothing about the copy. */
static sk_status transfer_poll(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock) {
    if (group->phase == SK_WAITING) {
        sk__lanes_fill(sched); /* a forked child has no pump to do so */
    }
    if (group->phase == SK_RUNNING && group->done == NULL && !sched->lanes[group->way].has_thread) {
        sk__lane_mark(sched, group->way); /* as its pump does */
    }
    if (group->phase == SK_RUNNING && group->done != NULL &&
        sk_event_query(sched->backend, group->done->event) == SK_OK) {
        sk__lane_complete(sched, group->way, group->done->ticket, SK_OK);
    }
    return sk__is_under_way(group) ? SK_NOT_READY : SK_OK;
}

static sk_status transfer_finish(sk_sched *sched, sk_group *group, sk_group_state expected,
                                 sk_stream *consumer, bool poll) SK_REQUIRES(sched->lock) {
    sk_status status = state_require(group, expected, "waited for");
    if (status == SK_OK && sk__is_under_way(group)) {
        status = poll ? transfer_poll(sched, group) : transfer_await(sched, group, consumer);
    }
    if (status != SK_OK) {
        return status;
    }
    sk_assert(group->phase != SK_IDLE && group->phase != SK_WAITING);
    if (group->phase == SK_FAILED) {
        status = failure_tell(group);
        group->state = expected == SK_GROUP_COPYING_OUT ? SK_GROUP_RESIDENT : SK_GROUP_OUT;
        group->phase = SK_IDLE;
        return status;
    }
    sk__owner_release(sched, group); /* later uses of the memory are behind the copy */
    group->state = SK_GROUP_CLEAN;
    if (!poll && expected == SK_GROUP_COPYING_OUT) {
        sk__drops_await(sched); /* afterwards only the caller holds the memory */
    }
    return SK_OK;
}

sk_status sk_group_finish_out(sk_group *group, sk_stream *consumer, bool poll) {
    sk_sched *sched = group->sched;
    sk__enter(sched);
    sk_status status = transfer_finish(sched, group, SK_GROUP_COPYING_OUT, consumer, poll);
    sk__leave(sched);
    return status;
}

sk_status sk_group_finish_in(sk_group *group, sk_stream *consumer, bool poll) {
    sk_sched *sched = group->sched;
    sk__enter(sched);
    sk_status status = transfer_finish(sched, group, SK_GROUP_COPYING_IN, consumer, poll);
    sk__leave(sched);
    return status;
}

sk_status sk_group_evict(sk_group *group) {
    sk__enter(group->sched);
    sk_status status = state_require(group, SK_GROUP_CLEAN, "evicted");
    if (status == SK_OK) {
        status = copy_require(group);
        group->state = status == SK_OK ? SK_GROUP_OUT : SK_GROUP_RESIDENT;
    }
    sk__leave(group->sched);
    return status;
}

sk_status sk_group_unevict(sk_group *group) {
    sk__enter(group->sched);
    sk_status status = state_require(group, SK_GROUP_OUT, "taken back");
    if (status == SK_OK) {
        group->state = SK_GROUP_CLEAN;
    }
    sk__leave(group->sched);
    return status;
}
