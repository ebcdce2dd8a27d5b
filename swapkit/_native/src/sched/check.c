/* check.c - checks of every invariant of the scheduler. */
#include "sched/sched.h"

#define ENSURE(condition, ...)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            return sk__fail(SK_CORRUPT, "scheduler: " __VA_ARGS__);                                \
        }                                                                                          \
    } while (0)

/* Walk a list whose members are all in `phase`. */
static sk_status list_check(const sk__list *list, sk__way way, sk__phase phase, uint32_t *count) {
    const sk_group *last = NULL;
    for (const sk_group *group = list->first; group != NULL; group = group->next) {
        ENSURE(group->phase == phase && group->way == way, "a transfer is in the wrong list");
        ENSURE(group->prev == last, "the links of a list of transfers do not agree");
        (*count)++;
        last = group;
    }
    ENSURE(list->last == last, "the end of a list of transfers is lost");
    return SK_OK;
}

/* Check the bytes in flight, and the events behind them. */
static sk_status running_check(const sk__lane_of_copies *lane) {
    size_t nbytes = 0;
    size_t unmarked_bytes = 0;
    uint32_t unmarked = 0;
    uint64_t ticket = 0;
    for (const sk_group *group = lane->running.first; group != NULL; group = group->next) {
        ENSURE(group->ticket > ticket, "copies that run are not in the order of their start");
        ENSURE(group->done == NULL || (unmarked == 0 && group->done->ticket >= group->ticket),
               "an event is not behind its copy");
        ticket = group->ticket;
        nbytes += group->nbytes;
        unmarked += group->done == NULL;
        unmarked_bytes += group->done == NULL ? group->nbytes : 0;
    }
    ENSURE(nbytes == lane->in_flight_bytes && unmarked == lane->unmarked &&
               unmarked_bytes == lane->unmarked_bytes,
           "%zu bytes in flight, %zu of them in %u copies without an event, not %zu, %zu, %u",
           nbytes, unmarked_bytes, unmarked, lane->in_flight_bytes, lane->unmarked_bytes,
           lane->unmarked);
    return SK_OK;
}

static sk_status lane_check(const sk_sched *sched, sk__way way) SK_REQUIRES(sched->lock) {
    const sk__lane_of_copies *lane = &sched->lanes[way];
    uint32_t queued = 0;
    uint32_t running = 0;
    sk_status status = list_check(&lane->queue, way, SK_WAITING, &queued);
    if (status == SK_OK) {
        status = list_check(&lane->running, way, SK_RUNNING, &running);
    }
    if (status == SK_OK) {
        status = running_check(lane);
    }
    ENSURE(status != SK_OK || (queued == lane->queued && running == lane->in_flight),
           "%u transfers queued and %u in flight, not %u, %u", queued, running, lane->queued,
           lane->in_flight);
    return status;
}

/* Check the fields of a group against the phase of its transfer. */
static sk_status transfer_check(const sk_group *group) {
    bool under_way = sk__is_under_way(group);
    bool copying = group->state == SK_GROUP_COPYING_OUT || group->state == SK_GROUP_COPYING_IN;
    ENSURE(under_way || (group->owner == NULL && group->ready == NULL),
           "a finished transfer holds an owner or an event");
    ENSURE(group->done == NULL || group->phase == SK_RUNNING,
           "a copy that does not run has an event behind it");
    ENSURE(group->done == NULL || group->done->holders > 0, "an event is used twice");
    ENSURE(!copying || group->phase != SK_IDLE, "a group copies without a transfer");
    ENSURE(group->phase != SK_WAITING || copying,
           "a transfer waits for a group that does not copy");
    ENSURE(!group->orphan || group->phase == SK_RUNNING || sk__in_transit(group) ||
               group->sched->left_orphans,
           "an unowned group was not freed");
    return SK_OK;
}

/* Check the place of the copy against the fields of the group. */
static sk_status place_check(const sk_group *group) {
    bool on_host = group->place == SK_ON_HOST || sk__in_transit(group);
    bool on_disk = group->place == SK_ON_DISK || sk__in_transit(group);
    ENSURE(on_host == (group->host != NULL), "a group's host memory is not where its copy is");
    ENSURE(!on_disk || group->has_extent, "a group's copy on the disk has no extent");
    ENSURE(group->place != SK_NOWHERE || !group->has_extent,
           "a group without a copy has an extent");
    bool lost = group->phase == SK_FAILED && group->way == SK_WAY_OUT;
    bool needed = group->state == SK_GROUP_CLEAN || group->state == SK_GROUP_OUT ||
                  group->state == SK_GROUP_COPYING_IN;
    ENSURE(!needed || lost || group->place != SK_NOWHERE, "a group's copy is gone");
    ENSURE(group->state != SK_GROUP_RESIDENT || group->place == SK_NOWHERE,
           "a group that is on the device only has a copy");
    return SK_OK;
}

static sk_status groups_check(const sk_sched *sched) SK_REQUIRES(sched->lock) {
    size_t host_bytes = 0;
    uint32_t ngroups = 0;
    uint32_t nowners = 0;
    uint32_t transits = 0;
    const sk_group *above = NULL;
    for (const sk_group *group = sched->groups; group != NULL; group = group->below) {
        sk_status status = transfer_check(group);
        status = status == SK_OK ? place_check(group) : status;
        if (status != SK_OK) {
            return status;
        }
        ENSURE(group->above == above && group->sched == sched, "the list of groups is broken");
        ENSURE(!group->has_extent ||
                   sk__round_up(group->nbytes, sched->host_rounding) <= sched->reserve_bytes,
               "a copy on the disk is larger than the memory kept free to read it");
        above = group;
        ngroups++;
        nowners += group->owner != NULL;
        transits += sk__in_transit(group);
        host_bytes += group->host != NULL ? sk__round_up(group->nbytes, sched->host_rounding) : 0;
    }
    ENSURE(ngroups == sched->ngroups && nowners == sched->nowners &&
               transits == sched->nreads + sched->nwrites,
           "%u groups, %u owners, %u on the way to a tier", ngroups, nowners, transits);
    ENSURE(sched->end_drops + sched->nowners <= sched->drops_capacity,
           "no room to drop every owner");
    ENSURE(host_bytes == sched->host_bytes && host_bytes <= sched->host_limit_bytes,
           "%zu bytes on the host, %zu counted, %zu allowed", host_bytes, sched->host_bytes,
           sched->host_limit_bytes);
    return SK_OK;
}

sk_status sk_sched_check(sk_sched *sched) {
    sk__enter(sched);
    sk_status status = groups_check(sched);
    for (int way = 0; way < SK_WAYS && status == SK_OK; way++) {
        status = lane_check(sched, (sk__way)way);
    }
    if (status == SK_OK) {
        status = sk_pool_check(sched->host);
    }
    if (status == SK_OK) {
        status = sk__disk_check(sched->disk);
    }
    sk__leave(sched);
    return status;
}
