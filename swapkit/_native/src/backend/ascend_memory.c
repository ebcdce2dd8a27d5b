/* ascend_memory.c - device memory, whole or in granules behind a range of addresses; host memory
 * that its copy engines may read and write.
 *
 * A granule is separate physical memory, mapped where it is committed, and where it has aliases.
 * ACL does not say that memory outlives its handle while it is mapped, so the handle is kept until
 * the last unmap, and every range knows the granule behind each of its places. Places are used by
 * one thread at a time, as the caller of commit and decommit sees to; what several places share is
 * counted atomically. ACL waits for nothing when it unmaps or frees: the caller has waited. */
#include <stdlib.h>
#include <string.h>

#include "backend/ascend.h"

typedef struct granule {
    sk__acl_memory *memory;
    unsigned mappings; /* atomic */
} granule;

struct sk__ascend_range {
    sk__ascend_range *next;
    char *reserved; /* what ACL gave out */
    char *address;  /* the first granule's */
    size_t nbytes;
    granule *places[]; /* one for each granule of addresses; NULL: not committed */
};

/* ---- opening --------------------------------------------------------------------------------- */

typedef struct pages {
    int policy, attribute;
    uint64_t reserve_flags;
} pages;

static pages pages_of(const sk_ascend_params *params) {
    switch ((sk_ascend_pages)params->pages) {
    case SK_ASCEND_HUGE_ONLY:
        return (pages){SK_ACL_POLICY_HUGE_ONLY, SK_ACL_HBM_HUGE, SK_ACL_RESERVE_HUGE};
    case SK_ASCEND_NORMAL:
        return (pages){SK_ACL_POLICY_NORMAL_ONLY, SK_ACL_HBM_NORMAL, SK_ACL_RESERVE_NORMAL};
    case SK_ASCEND_GIANT:
        return (pages){SK_ACL_POLICY_GIANT_ONLY, SK_ACL_HBM_GIANT, SK_ACL_RESERVE_HUGE};
    case SK_ASCEND_HUGE_FIRST:
        break;
    }
    return (pages){SK_ACL_POLICY_HUGE_FIRST, SK_ACL_HBM_HUGE, SK_ACL_RESERVE_HUGE};
}

static sk_status granules_open(sk__ascend *ascend, const sk_ascend_params *params) {
    size_t least = 0;
    sk__acl_error error = ascend->runtime->aclrtMemGetAllocationGranularity(
        &ascend->kind, SK_ACL_GRANULARITY_MINIMUM, &least);
    if (sk__ascend_is_unsupported(error)) {
        return SK_OK; /* whole segments, then */
    }
    if (error != SK_ACL_SUCCESS) {
        return sk__ascend_fail(ascend->runtime, SK_BACKEND_FAILED,
                               "aclrtMemGetAllocationGranularity", error);
    }
    return sk__granule_choose("ascend", params->granule_bytes, least, &ascend->granule_bytes);
}

/* Whether the device can lock host memory: products and drivers differ, and only trying tells. */
static sk_status host_probe(sk__ascend *ascend) {
    enum { PAGE_BYTES = 4096 };
    const sk__ascend_runtime *runtime = ascend->runtime;
    if (runtime->aclrtHostRegister == NULL || runtime->aclrtHostUnregister == NULL) {
        return SK_OK;
    }
    void *page = aligned_alloc(PAGE_BYTES, PAGE_BYTES);
    if (page == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "ascend backend: no host memory for its state");
    }
    void *seen = NULL;
    sk__acl_error error =
        runtime->aclrtHostRegister(page, PAGE_BYTES, SK_ACL_REGISTER_MAPPED, &seen);
    if (error == SK_ACL_SUCCESS) {
        error = runtime->aclrtHostUnregister(page);
    }
    ascend->locks_host = !sk__ascend_is_unsupported(error); /* other reasons may pass */
    free(page);
    return SK_OK;
}

/* Note the other devices that are to use the memory. Mapped memory is its own device's at first. */
static void access_open(sk__ascend *ascend, uint64_t peers) {
    for (int32_t number = 0; number < SK_ASCEND_DEVICES; number++) {
        bool is_meant = ((peers >> (unsigned)number) & 1) != 0 && number != ascend->device;
        if (is_meant && ascend->runtime->aclrtMemSetAccess != NULL) {
            ascend->access[ascend->naccess++] =
                (sk__acl_access){.flags = SK_ACL_ACCESS_READ_WRITE,
                                 .device = (uint32_t)number,
                                 .location_type = SK_ACL_LOCATION_DEVICE};
        }
    }
}

/* Keep only the devices that may use the granule mapped at `address`. */
static void access_filter(sk__ascend *ascend, size_t count, void *address) {
    for (size_t i = 0; i < count; i++) {
        sk__acl_access access = ascend->access[i];
        if (ascend->runtime->aclrtMemSetAccess(address, ascend->granule_bytes, &access, 1) ==
            SK_ACL_SUCCESS) {
            ascend->access[ascend->naccess++] = access;
        }
    }
}

/* Keep only the devices that may really use the memory: whether they may, only trying tells. */
static void access_probe(sk__ascend *ascend) {
    const sk__ascend_runtime *runtime = ascend->runtime;
    size_t nbytes = ascend->granule_bytes;
    size_t count = nbytes == 0 ? 0 : ascend->naccess;
    void *address = NULL;
    sk__acl_memory *memory = NULL;
    ascend->naccess = 0;
    if (count == 0 || runtime->aclrtReserveMemAddress(&address, nbytes, 0, NULL,
                                                      ascend->reserve_flags) != SK_ACL_SUCCESS) {
        return;
    }
    sk__acl_error error = runtime->aclrtMallocPhysical(&memory, nbytes, &ascend->kind, 0);
    if (error == SK_ACL_SUCCESS) {
        error = runtime->aclrtMapMem(address, nbytes, 0, memory, 0);
    }
    if (error == SK_ACL_SUCCESS) {
        access_filter(ascend, count, address);
        (void)runtime->aclrtUnmapMem(address);
    }
    if (memory != NULL) {
        (void)runtime->aclrtFreePhysical(memory);
    }
    (void)runtime->aclrtReleaseMemAddress(address);
}

sk_status sk__ascend_memory_open(sk__ascend *ascend, const sk_ascend_params *params) {
    pages chosen = pages_of(params);
    ascend->policy = chosen.policy;
    ascend->kind = (sk__acl_physical){.attribute = chosen.attribute,
                                      .device = (uint32_t)ascend->device,
                                      .location_type = SK_ACL_LOCATION_DEVICE};
    ascend->reserve_flags = chosen.reserve_flags;
    access_open(ascend, params->peer_devices);
    sk_status status = host_probe(ascend);
    if (status == SK_OK && !params->no_virtual_memory) {
        status = granules_open(ascend, params);
    }
    if (status == SK_OK) {
        access_probe(ascend);
    }
    return status;
}

/* Forget what is left of a runtime that is gone, or of a device that failed. */
static void range_forget(sk__ascend_range *range, size_t granule_bytes) {
    for (size_t i = 0; i < range->nbytes / granule_bytes; i++) {
        granule *left = range->places[i];
        if (left != NULL && --left->mappings == 0) {
            free(left);
        }
    }
    free(range);
}

void sk__ascend_memory_close(sk__ascend *ascend) {
    sk__fork_unregister(&ascend->fork_node);
    sk__lock(&ascend->lock);
    while (ascend->ranges != NULL) {
        sk__ascend_range *range = ascend->ranges;
        ascend->ranges = range->next;
        range_forget(range, ascend->granule_bytes);
    }
    sk__unlock(&ascend->lock);
    sk__mutex_destroy(&ascend->lock);
}

/* ---- whole segments -------------------------------------------------------------------------- */

static sk_status memory_info(void *self, sk_memory_info *out) {
    sk_memory_info info = {0};
    SK_ASCEND_VISIT(self, sk__visit_leave, aclrtGetMemInfo,
                    (SK_ACL_HBM, &info.free_bytes, &info.total_bytes), *out = info);
}

/* Without ACL's own padding: the pool keeps what kernels may read inside its blocks. */
static sk_status memory_alloc(void *self, size_t nbytes, void **out) {
    const sk__ascend *ascend = self;
    void *address = NULL;
    SK_ASCEND_VISIT(ascend, sk__visit_leave, aclrtMallocAlign32, (&address, nbytes, ascend->policy),
                    *out = address);
}

static sk_status memory_free(void *self, void *address, size_t nbytes) {
    (void)nbytes;
    SK_ASCEND_VISIT(self, sk__visit_leave_released, aclrtFree, (address), );
}

/* ---- ranges of addresses --------------------------------------------------------------------- */

static void range_list(sk__ascend *ascend, sk__ascend_range *range) {
    sk__lock(&ascend->lock);
    range->next = ascend->ranges;
    ascend->ranges = range;
    sk__unlock(&ascend->lock);
}

static sk__ascend_range *range_unlist(sk__ascend *ascend, const void *address) {
    sk__lock(&ascend->lock);
    sk__ascend_range **link = &ascend->ranges;
    while (*link != NULL && (*link)->address != address) {
        link = &(*link)->next;
    }
    sk__ascend_range *range = *link;
    if (range != NULL) {
        *link = range->next;
    }
    sk__unlock(&ascend->lock);
    return range;
}

/* Addresses at multiples of a granule. ACL has no alignment to ask for: its own is a huge page's,
 * and if that is too little, a part of more addresses is used. */
static sk__acl_error addresses_reserve(const sk__ascend *ascend, sk__ascend_range *range) {
    const size_t granule = ascend->granule_bytes;
    void *address = NULL;
    sk__acl_error error = ascend->runtime->aclrtReserveMemAddress(&address, range->nbytes, 0, NULL,
                                                                  ascend->reserve_flags);
    if (error == SK_ACL_SUCCESS && (uintptr_t)address % granule != 0) {
        (void)ascend->runtime->aclrtReleaseMemAddress(address);
        error = ascend->runtime->aclrtReserveMemAddress(&address, range->nbytes + granule, 0, NULL,
                                                        ascend->reserve_flags);
    }
    if (error == SK_ACL_SUCCESS) {
        range->reserved = address;
        range->address = range->reserved + (granule - (uintptr_t)address % granule) % granule;
    }
    return error;
}

static sk_status range_visit(const sk__ascend *ascend, sk__ascend_range *range) {
    SK__VISIT(&sk__ascend_visitor, ascend, sk__visit_leave, "aclrtReserveMemAddress",
              addresses_reserve(ascend, range), );
}

static sk_status range_reserve(void *self, size_t nbytes, void **out) {
    sk__ascend *ascend = self;
    sk_assert(nbytes % ascend->granule_bytes == 0);
    size_t count = nbytes / ascend->granule_bytes;
    sk__ascend_range *range = calloc(1, sizeof *range + count * sizeof range->places[0]);
    if (range == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "ascend backend: no host memory for %zu granules",
                        count);
    }
    range->nbytes = nbytes;
    sk_status status = range_visit(ascend, range);
    if (status != SK_OK) {
        free(range);
        return status;
    }
    range_list(ascend, range);
    *out = range->address;
    return SK_OK;
}

static sk_status addresses_release(const sk__ascend *ascend, const sk__ascend_range *range) {
    SK_ASCEND_VISIT(ascend, sk__visit_leave_released, aclrtReleaseMemAddress, (range->reserved), );
}

static sk_status range_release(void *self, void *address, size_t nbytes) {
    sk__ascend *ascend = self;
    sk__ascend_range *range = range_unlist(ascend, address);
    sk_assert(range != NULL && range->nbytes == nbytes);
    (void)nbytes;
    sk_status status = addresses_release(ascend, range);
    if (status == SK_OK) {
        range_forget(range, ascend->granule_bytes);
    } else {
        range_list(ascend, range);
    }
    return status;
}

/* ---- granules -------------------------------------------------------------------------------- */

/* Places in a row, of one range. */
typedef struct run {
    char *address;
    granule **places;
    size_t count;
} run;

static bool run_find(sk__ascend *ascend, char *address, size_t nbytes, run *out) {
    const size_t granule_bytes = ascend->granule_bytes;
    sk_assert(nbytes % granule_bytes == 0);
    sk__lock(&ascend->lock);
    sk__ascend_range *range = ascend->ranges;
    while (range != NULL &&
           (address < range->address || address + nbytes > range->address + range->nbytes)) {
        range = range->next;
    }
    sk__unlock(&ascend->lock);
    if (range == NULL) {
        (void)sk__fail(SK_INVALID, "ascend backend: %p, %zu bytes: not in a range of addresses",
                       (void *)address, nbytes);
        return false;
    }
    *out = (run){.address = address,
                 .places = &range->places[(size_t)(address - range->address) / granule_bytes],
                 .count = nbytes / granule_bytes};
    return true;
}

static void *place_address(const sk__ascend *ascend, const run *run, size_t index) {
    return run->address + index * ascend->granule_bytes;
}

/* Make physical memory that is mapped nowhere. */
static sk__acl_error granule_make(const sk__ascend *ascend, granule **out, const char **what) {
    *what = "aclrtMallocPhysical";
    granule *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return SK_ACL_HOST_NO_MEMORY;
    }
    sk__acl_error error = ascend->runtime->aclrtMallocPhysical(&made->memory, ascend->granule_bytes,
                                                               &ascend->kind, 0);
    if (error != SK_ACL_SUCCESS) {
        free(made);
        return error;
    }
    *out = made;
    return SK_ACL_SUCCESS;
}

/* Let the other devices use a mapped granule; on failure unmap it. */
static sk__acl_error place_share(const sk__ascend *ascend, void *address, const char **what) {
    if (ascend->naccess == 0) {
        return SK_ACL_SUCCESS;
    }
    sk__acl_access access[SK_ASCEND_DEVICES];
    memcpy(access, ascend->access, sizeof access); /* ACL's argument is not const */
    *what = "aclrtMemSetAccess";
    sk__acl_error error =
        ascend->runtime->aclrtMemSetAccess(address, ascend->granule_bytes, access, ascend->naccess);
    if (error != SK_ACL_SUCCESS) {
        (void)ascend->runtime->aclrtUnmapMem(address);
    }
    return error;
}

/* Map a granule at one place: a new one, or that at the same place of `twin`. */
static sk__acl_error place_fill(const sk__ascend *ascend, const run *to, const run *twin,
                                size_t index, const char **what) {
    granule *used = twin != NULL ? twin->places[index] : NULL;
    sk__acl_error error = twin == NULL ? granule_make(ascend, &used, what) : SK_ACL_SUCCESS;
    if (error != SK_ACL_SUCCESS || used == NULL) {
        return error != SK_ACL_SUCCESS ? error : SK_ACL_INVALID; /* nothing is committed there */
    }
    *what = "aclrtMapMem";
    void *address = place_address(ascend, to, index);
    error = ascend->runtime->aclrtMapMem(address, ascend->granule_bytes, 0, used->memory, 0);
    if (error == SK_ACL_SUCCESS) {
        error = place_share(ascend, address, what);
    }
    if (error == SK_ACL_SUCCESS) {
        (void)__atomic_add_fetch(&used->mappings, 1, __ATOMIC_RELAXED);
        to->places[index] = used;
    } else if (twin == NULL) {
        (void)ascend->runtime->aclrtFreePhysical(used->memory);
        free(used);
    }
    return error;
}

/* Unmap one place; the last one of a granule gives its memory back. A failure changes nothing. */
static sk__acl_error place_empty(const sk__ascend *ascend, const run *run, size_t index,
                                 const char **what) {
    void *address = place_address(ascend, run, index);
    granule *used = run->places[index];
    *what = "aclrtUnmapMem";
    sk__acl_error error = ascend->runtime->aclrtUnmapMem(address);
    if (error != SK_ACL_SUCCESS) {
        return error;
    }
    run->places[index] = NULL;
    if (__atomic_sub_fetch(&used->mappings, 1, __ATOMIC_ACQ_REL) > 0) {
        return SK_ACL_SUCCESS;
    }
    *what = "aclrtFreePhysical";
    error = ascend->runtime->aclrtFreePhysical(used->memory);
    if (error != SK_ACL_SUCCESS &&
        ascend->runtime->aclrtMapMem(address, ascend->granule_bytes, 0, used->memory, 0) ==
            SK_ACL_SUCCESS) {
        used->mappings = 1;
        run->places[index] = used;
        return error;
    }
    free(used); /* if it could neither be freed nor mapped again, the memory is lost */
    return error;
}

/* Empty places up to the first refusal; return how many. */
static size_t places_empty(const sk__ascend *ascend, const run *run, sk__acl_error *error,
                           const char **what) {
    size_t done = 0;
    *error = SK_ACL_SUCCESS;
    while (done < run->count && *error == SK_ACL_SUCCESS) {
        *error = place_empty(ascend, run, done, what);
        done += *error == SK_ACL_SUCCESS;
    }
    return done;
}

/* Fail if the device has too little left: otherwise a large request would map all of it in vain. */
static sk__acl_error memory_require(const sk__ascend *ascend, size_t nbytes, const char **what) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    *what = "aclrtGetMemInfo";
    sk__acl_error error = ascend->runtime->aclrtGetMemInfo(SK_ACL_HBM, &free_bytes, &total_bytes);
    if (error == SK_ACL_SUCCESS && free_bytes < nbytes) {
        *what = "aclrtMallocPhysical";
        error = SK_ACL_OUT_OF_MEMORY;
    }
    return error;
}

/* Fill all places, or none: with new memory, or with that of `twin`. */
static sk__acl_error places_fill(const sk__ascend *ascend, const run *to, const run *twin,
                                 const char **what) {
    run done = {.address = to->address, .places = to->places};
    bool much = twin == NULL && to->count > 1;
    sk__acl_error error =
        much ? memory_require(ascend, to->count * ascend->granule_bytes, what) : SK_ACL_SUCCESS;
    while (done.count < to->count && error == SK_ACL_SUCCESS) {
        error = place_fill(ascend, to, twin, done.count, what);
        done.count += error == SK_ACL_SUCCESS;
    }
    if (error != SK_ACL_SUCCESS) {
        sk__acl_error ignored = SK_ACL_SUCCESS;
        const char *unused = NULL;
        (void)places_empty(ascend, &done, &ignored, &unused);
    }
    return error;
}

static sk_status run_fill(const sk__ascend *ascend, const run *to, const run *twin) {
    const char *what = "aclrtMapMem";
    SK__VISIT(&sk__ascend_visitor, ascend, sk__visit_leave, what,
              places_fill(ascend, to, twin, &what), );
}

static sk_status range_commit(void *self, void *address, size_t nbytes) {
    run to;
    return run_find(self, address, nbytes, &to) ? run_fill(self, &to, NULL) : SK_INVALID;
}

static sk_status range_alias(void *self, void *from, void *to, size_t nbytes) {
    run twin;
    run target;
    bool found = run_find(self, from, nbytes, &twin) && run_find(self, to, nbytes, &target);
    return found ? run_fill(self, &target, &twin) : SK_INVALID;
}

/* Empty all places, or none. */
static sk__acl_error run_empty(const sk__ascend *ascend, const run *whole, const char **what) {
    sk__acl_error error = SK_ACL_SUCCESS;
    run done = *whole;
    done.count = places_empty(ascend, whole, &error, what);
    if (error != SK_ACL_SUCCESS && done.count > 0) { /* map free memory again */
        const char *unused = NULL;
        (void)places_fill(ascend, &done, NULL, &unused);
    }
    return error;
}

static sk_status range_decommit(void *self, void *address, size_t nbytes) {
    const char *what = "aclrtUnmapMem";
    run whole;
    if (!run_find(self, address, nbytes, &whole)) {
        return SK_INVALID;
    }
    SK__VISIT(&sk__ascend_visitor, self, sk__visit_leave_released, what,
              run_empty(self, &whole, &what), );
}

/* ---- host memory ----------------------------------------------------------------------------- */

static sk_status host_lock(void *self, void *address, size_t nbytes) {
    sk__ascend *ascend = self;
    void *seen = NULL; /* by the device: not needed for copies */
    sk_assert((nbytes & (nbytes - 1)) == 0 && (uintptr_t)address % nbytes == 0);
    SK_ASCEND_VISIT(ascend, sk__visit_leave_locking, aclrtHostRegister,
                    (address, nbytes, SK_ACL_REGISTER_MAPPED, &seen),
                    sk__pieces_locked(&ascend->pieces, nbytes));
}

static sk_status host_unlock(void *self, void *address, size_t nbytes) {
    sk__ascend *ascend = self;
    SK_ASCEND_VISIT(ascend, sk__visit_leave_released, aclrtHostUnregister, (address),
                    sk__pieces_unlocked(&ascend->pieces, nbytes));
}

/* The members that depend on the device and the parameters, too. */
void sk__ascend_memory_ops(const sk__ascend *ascend, sk_backend_ops *ops) {
    ops->memory_info = memory_info;
    ops->memory_alloc = memory_alloc;
    ops->memory_free = memory_free;
    ops->over_read_bytes = SK_ASCEND_OVER_READ_BYTES;
    ops->granule_bytes = ascend->granule_bytes;
    if (ascend->granule_bytes != 0) {
        ops->range_reserve = range_reserve;
        ops->range_release = range_release;
        ops->range_commit = range_commit;
        ops->range_decommit = range_decommit;
        ops->range_alias = range_alias;
    }
    if (ascend->locks_host) {
        ops->host_lock_bytes = SK_HOST_LOCK_BYTES;
        ops->host_lock = host_lock;
        ops->host_unlock = host_unlock;
    }
}
