/* tier.c - where copies live: the host's memory, and the disk for copies that do not fit there.
 *
 * The host is a window onto the copies that are needed soonest. When a copy on its way out finds no
 * room, the copies with the latest next use are written to the disk; when copies come back, the
 * next ones are read ahead as far as the host has room. A reserve as large as the largest copy on
 * the disk is kept free from copies on their way out, so that any copy on the disk can always be
 * read: copies that cannot be dropped never take more than the rest. A copy that was read keeps its
 * extent, and costs nothing to drop again.
 *
 * The extent of a borrowed part of a file is there from the beginning: writing compares. If the
 * bytes are the same, the host's copy is spare without any disk folder. */
#include "sched/sched.h"
#include "swapkit_devices.h"

enum {
    READS_AHEAD = 2,
    GRANULES_PER_LIMIT = 64,                  /* at least; bounds the unused rest of the limit */
    MOST_GRANULE_WITH_DISK = 2 * 1024 * 1024, /* every copy is rounded up to it */
};

/* ---- life ------------------------------------------------------------------------------------ */

/* Return the granule of host memory for a device that locks host memory. All of it is locked, one
 * granule at a time: few and large ones, but many under a limit, since a part of the limit smaller
 * than a granule is unusable. With a disk they are smaller still: see below. */
static size_t locked_granule_bytes(const sk_backend *device, const sk_sched_params *params,
                                   size_t least) {
    size_t most = params->disk_folder != NULL ? MOST_GRANULE_WITH_DISK : SIZE_MAX;
    size_t limit = params->host_limit_bytes;
    if (limit != 0) {
        most = sk__min(most, limit / GRANULES_PER_LIMIT);
    }
    size_t granule = device->ops.host_lock_bytes;
    while (granule > most && granule > least) {
        granule /= 2;
    }
    return sk__max(granule, least);
}

/* If the host copies, a lane's own thread touches the pages first, and the caller does not wait for
 * that. A device's copy engine gets populated pages that stay. If the system does not let us lock
 * them (`ulimit -l`), there is no memory: pageable memory would be slow, and not say why. */
static sk_status host_backend_open(sk_sched *sched, const sk_sched_params *params) {
    sk_backend *device = sched->backend;
    const sk_cpu_params host = {.populate = device->ops.null_stream_is_host == 0,
                                .numa_nodes = params->host_nodes};
    sk_status status = sk_backend_cpu(&host, &sched->host_backend);
    if (status == SK_OK && device->ops.host_lock_bytes != 0) {
        size_t least = sched->host_backend->ops.granule_bytes;
        sk__backend_pin(sched->host_backend, device, locked_granule_bytes(device, params, least));
    }
    return status;
}

/* A host limit of 0 means all memory of the machine, or its control group: the cpu backend's
 * capacity.
 *
 * With a disk, copies are whole granules of the host's memory: then the free memory under the limit
 * can always form one block, however scattered it is, and reading cannot fail for lack of it. */
sk_status sk__host_open(sk_sched *sched, const sk_sched_params *params) {
    sched->host_rounding = 1;
    sched->host_limit_bytes = params->host_limit_bytes == 0
                                  ? SK_NO_LIMIT
                                  : sk__min(params->host_limit_bytes, SK_NO_LIMIT);
    sk_status status = host_backend_open(sched, params);
    sched->has_folder = params->disk_folder != NULL;
    if (status == SK_OK) {
        status = sk__disk_open(params->disk_folder, params->disk_limit_bytes, &sched->disk);
    }
    if (status != SK_OK) {
        return status;
    }
    if (sched->has_folder) {
        sched->host_rounding =
            sk__max(sk__disk_alignment(sched->disk), sched->host_backend->ops.granule_bytes);
    }
    return sk_pool_create(sched->host_backend,
                          &(sk_pool_params){.budget_bytes = params->host_limit_bytes},
                          &sched->host);
}

void sk__host_close(sk_sched *sched) {
    sk__ignore(sk_pool_destroy(
        sched->host)); /* in a forked child, memory that was being read into stays in use */
    sk_backend_close(sched->host_backend);
    sk__disk_close(sched->disk);
}

void sk_sched_trim(sk_sched *sched) {
    sk__enter(sched);
    sk__ignore(sk_pool_trim(sched->host)); /* the rest stays for later */
    sk__ignore(sk__disk_trim(sched->disk));
    sk__leave(sched);
}

/* ---- host memory ----------------------------------------------------------------------------- */

static size_t host_bytes_of(const sk_group *group) {
    return sk__round_up(group->nbytes, group->sched->host_rounding);
}

static void host_give(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock) {
    sk_status status = sk_pool_give(sched->host, group->host);
    sk_assert(status == SK_OK && sched->host_bytes >= host_bytes_of(group));
    sk__ignore(status);
    sched->host_bytes -= host_bytes_of(group);
    group->host = NULL;
    (void)pthread_cond_broadcast(&sched->changed);
}

static void extent_drop(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock) {
    if (group->has_extent || group->extent.source != NULL) {
        sk__disk_release(sched->disk, group->extent);
    }
    group->has_extent = false;
    group->extent = (sk__extent){0};
}

void sk__copy_drop(sk_sched *sched, sk_group *group) {
    sk_assert(!sk__in_transit(group) && group->phase != SK_RUNNING);
    if (group->host != NULL) {
        host_give(sched, group);
    }
    if (group->extent.source == NULL || group->orphan) {
        extent_drop(sched, group);
    }
    group->has_extent = false;
    group->place = SK_NOWHERE;
}

static size_t room_bytes(const sk_sched *sched) SK_REQUIRES(sched->lock) {
    sk_assert(sched->host_bytes <= sched->host_limit_bytes);
    return sched->host_limit_bytes - sched->host_bytes;
}

/* Whether a group's copy may live on the disk alone. */
static bool is_movable(const sk_group *group) {
    return (group->sched->has_folder || group->extent.source != NULL) &&
           group->tier != SK_TIER_HOST && group->failed_for != group->sched->requests;
}

/* Whether the host's copy of a group may go: it is not in use, and it may live on the disk. */
static bool is_spare(const sk_group *group) {
    return group->place == SK_ON_HOST && is_movable(group) && !group->orphan &&
           !sk__is_under_way(group);
}

/* Return the spare copy with the latest next use, among those that are (not) on the disk, too. */
static sk_group *spare_find(const sk_sched *sched, bool written) SK_REQUIRES(sched->lock) {
    sk_group *latest = NULL;
    for (sk_group *group = sched->groups; group != NULL; group = group->below) {
        if (is_spare(group) && group->has_extent == written &&
            (latest == NULL || group->next_use > latest->next_use)) {
            latest = group;
        }
    }
    return latest;
}

/* Drop copies that are also on the disk until `nbytes` fit under the limit. */
static void spares_drop(sk_sched *sched, size_t nbytes) SK_REQUIRES(sched->lock) {
    sk_group *group = NULL;
    while (room_bytes(sched) < nbytes && (group = spare_find(sched, true)) != NULL) {
        sk_assert(group->has_extent && group->tier != SK_TIER_HOST);
        host_give(sched, group);
        group->place = SK_ON_DISK;
    }
}

/* Write copies until the writes under way will make room for `nbytes`. SK_NOT_READY: some room will
 * come free. SK_OUT_OF_HOST_MEMORY: there is nothing to write. */
static sk_status spares_write(sk_sched *sched, size_t nbytes) SK_REQUIRES(sched->lock) {
    size_t coming_bytes = 0;
    for (const sk_group *group = sched->groups; group != NULL; group = group->below) {
        coming_bytes += group->place == SK_WRITING ? host_bytes_of(group) : 0;
    }
    sk_status status = SK_OUT_OF_HOST_MEMORY;
    sk_group *group = NULL;
    while (room_bytes(sched) + coming_bytes < nbytes &&
           (group = spare_find(sched, false)) != NULL) {
        status = sk__tier_write(sched, group);
        if (status != SK_OK) {
            break;
        }
        coming_bytes += host_bytes_of(group);
    }
    return coming_bytes > 0 ? SK_NOT_READY : status;
}

/* Whether work under way will free host memory or make it spare. */
static bool is_room_coming(const sk_sched *sched, const sk_group *asking) SK_REQUIRES(sched->lock) {
    for (const sk_group *group = sched->groups; group != NULL; group = group->below) {
        if (group != asking && group->host != NULL &&
            (sk__in_transit(group) || sk__is_under_way(group)) &&
            (group->orphan || is_movable(group))) {
            return true;
        }
    }
    return false;
}

static sk_status host_refuse(const sk_sched *sched, size_t nbytes) SK_REQUIRES(sched->lock) {
    if (sched->host_limit_bytes == SK_NO_LIMIT) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY,
                        "no host memory for a copy of %zu bytes beside %zu bytes of other copies",
                        nbytes, sched->host_bytes);
    }
    if (!sched->has_folder) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY,
                        "no host memory for a copy of %zu bytes: %zu of the limit of %zu bytes are "
                        "in use and no disk was given; raise host_limit",
                        nbytes, sched->host_bytes, sched->host_limit_bytes);
    }
    return sk__fail(SK_OUT_OF_HOST_MEMORY,
                    "no host memory for a copy of %zu bytes: %zu of the limit of %zu bytes are in "
                    "use and %zu kept free to read from the disk; raise host_limit",
                    nbytes, sched->host_bytes, sched->host_limit_bytes, sched->reserve_bytes);
}

/* Bring the room up to `nbytes`. SK_NOT_READY: there may be room when work under way has ended. */
static sk_status room_make(sk_sched *sched, sk_group *asking, size_t nbytes)
    SK_REQUIRES(sched->lock) {
    spares_drop(sched, nbytes);
    if (room_bytes(sched) >= nbytes) {
        return SK_OK;
    }
    sk_status status = spares_write(sched, nbytes);
    if (status == SK_NOT_READY || is_room_coming(sched, asking)) {
        return SK_NOT_READY;
    }
    return status == SK_OUT_OF_HOST_MEMORY ? host_refuse(sched, host_bytes_of(asking)) : status;
}

/* Compute the reserve. It only grows while copies are written; here it may shrink. */
static void reserve_measure(sk_sched *sched) SK_REQUIRES(sched->lock) {
    sched->reserve_bytes = 0;
    for (const sk_group *group = sched->groups; group != NULL; group = group->below) {
        if (group->has_extent) {
            sched->reserve_bytes = sk__max(sched->reserve_bytes, host_bytes_of(group));
        }
    }
}

/* Make room for a group's copy under the limit. */
static sk_status room_ensure(sk_sched *sched, sk_group *group, sk__way way)
    SK_REQUIRES(sched->lock) {
    size_t nbytes = host_bytes_of(group);
    if (room_bytes(sched) >= nbytes + (way == SK_WAY_OUT ? sched->reserve_bytes : 0)) {
        return SK_OK;
    }
    reserve_measure(sched);
    nbytes += way == SK_WAY_OUT ? sched->reserve_bytes : 0;
    return nbytes > sched->host_limit_bytes ? host_refuse(sched, host_bytes_of(group))
                                            : room_make(sched, group, nbytes);
}

sk_status sk__host_take(sk_sched *sched, sk_group *group, sk__way way) {
    size_t nbytes = host_bytes_of(group);
    sk_assert(group->host == NULL);
    sk_status status = room_ensure(sched, group, way);
    bool tentative = sk_tentative_set(false); /* it is meant for the device; nothing waits here */
    while (status == SK_OK && group->host == NULL) {
        status = sk_pool_take(sched->host, nbytes, NULL, &group->host);
        if (status == SK_OVER_BUDGET || status == SK_OUT_OF_DEVICE_MEMORY) {
            status = room_make(sched, group, room_bytes(sched) + 1); /* free memory is in pieces */
        }
    }
    (void)sk_tentative_set(tentative);
    if (status != SK_OK) {
        return status;
    }
    sk_assert(nbytes <= room_bytes(sched));
    sched->host_bytes += nbytes;
    if (way == SK_WAY_OUT) {
        group->place = SK_ON_HOST;
    }
    return SK_OK;
}

/* ---- the disk -------------------------------------------------------------------------------- */

/* End a read or a write, on a thread of the disk. */
static void request_end(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock) {
    sk_assert(group->sched == sched && !sk__in_transit(group));
    sk__group_reap(sched, group);
    sk__lanes_fill(sched);
    (void)pthread_cond_broadcast(&sched->changed);
}

static void write_done(sk__disk_request *request, sk_status status) {
    sk_group *group = request->context;
    sk_sched *sched = group->sched;
    sk__enter(sched);
    sk_assert(group->place == SK_WRITING && sched->nwrites > 0);
    sched->nwrites--;
    group->place = SK_ON_HOST;
    if (status != SK_OK) {
        bool is_other = status == SK_INVALID; /* the file of others: the folder may do instead */
        group->failed_for = is_other ? 0 : sched->requests;
        if (is_other || group->extent.source == NULL) {
            extent_drop(sched, group);
        }
        group->has_extent = false;
    } else {
        group->extent = request->extent;
        sched->stats.written_bytes += group->extent.source == NULL ? group->nbytes : 0;
        if (is_spare(group) &&
            group->extent.source == NULL) { /* otherwise it is needed on the device just now */
            host_give(sched, group);
            group->place = SK_ON_DISK;
        }
    }
    request_end(sched, group);
    sk__leave(sched);
}

static void read_done(sk__disk_request *request, sk_status status) {
    sk_group *group = request->context;
    sk_sched *sched = group->sched;
    sk__enter(sched);
    sk_assert(group->place == SK_READING && sched->nreads > 0);
    sched->nreads--;
    group->place = status == SK_OK ? SK_ON_HOST : SK_ON_DISK;
    sched->stats.read_bytes += status == SK_OK ? group->nbytes : 0;
    if (status != SK_OK) {
        host_give(sched, group);
        if (group->phase == SK_WAITING) {
            status = status == SK_INVALID ? SK_DISK_FAILED : status;
            sk__lane_fail(sched, group, status, request->text);
        }
    }
    request_end(sched, group);
    if (status == SK_OK) {
        sk__tier_read_ahead(sched);
    }
    sk__leave(sched);
}

static void request_fill(sk_group *group, sk__disk_way way) {
    group->request = (sk__disk_request){
        .way = way,
        .memory = group->host,
        .nbytes = group->nbytes,
        .extent = group->extent,
        .done = way == SK_DISK_WRITE ? write_done : read_done,
        .context = group,
    };
}

sk_status sk__tier_write(sk_sched *sched, sk_group *group) {
    sk_assert(group->place == SK_ON_HOST && !group->has_extent);
    sk_status status = SK_OK;
    if (group->extent.source == NULL) {
        status = sk__disk_reserve(sched->disk, group->nbytes, &group->extent);
    }
    if (status != SK_OK) {
        return status;
    }
    request_fill(group, SK_DISK_WRITE);
    status = sk__disk_submit(sched->disk, &group->request);
    if (status != SK_OK) {
        group->has_extent = true;
        extent_drop(sched, group);
        return status;
    }
    group->has_extent = true;
    group->place = SK_WRITING;
    sched->nwrites++;
    sched->reserve_bytes = sk__max(sched->reserve_bytes, host_bytes_of(group));
    return SK_OK;
}

sk_status sk__tier_read(sk_sched *sched, sk_group *group) {
    sk_assert(group->place == SK_ON_DISK && group->has_extent && group->host == NULL);
    sk_status status = sk__host_take(sched, group, SK_WAY_IN);
    if (status != SK_OK) {
        return status;
    }
    request_fill(group, SK_DISK_READ);
    status = sk__disk_submit(sched->disk, &group->request);
    if (status != SK_OK) {
        host_give(sched, group);
        return status;
    }
    group->place = SK_READING;
    sched->nreads++;
    return SK_NOT_READY;
}

/* Whether a transfer waits for host memory: free memory is not for reading ahead then. */
static bool is_starving(const sk_sched *sched) SK_REQUIRES(sched->lock) {
    for (int way = 0; way < SK_WAYS; way++) {
        for (const sk_group *group = sched->lanes[way].queue.first; group != NULL;
             group = group->next) {
            if (group->host == NULL) {
                return true;
            }
        }
    }
    return false;
}

static sk_group *soonest_find(const sk_sched *sched) SK_REQUIRES(sched->lock) {
    sk_group *soonest = NULL;
    for (sk_group *group = sched->groups; group != NULL; group = group->below) {
        if (group->place == SK_ON_DISK && group->state == SK_GROUP_OUT && !group->orphan &&
            (soonest == NULL || group->next_use < soonest->next_use)) {
            soonest = group;
        }
    }
    return soonest;
}

void sk__tier_read_ahead(sk_sched *sched) {
    while (sched->nreads < READS_AHEAD && !is_starving(sched)) {
        sk_group *soonest = soonest_find(sched);
        if (soonest == NULL || room_bytes(sched) < host_bytes_of(soonest) + sched->reserve_bytes) {
            return;
        }
        if (sk__tier_read(sched, soonest) != SK_NOT_READY) {
            return; /* the transfer that needs it reports the reason */
        }
    }
}
