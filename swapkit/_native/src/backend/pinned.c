/* pinned.c - the cpu backend's memory, with every committed granule locked by a device.
 *
 * A commit makes the pages, then locks them; a decommit unlocks them first. Each granule is locked
 * separately, once: locking costs about as much as writing the memory. A failure undoes the earlier
 * steps, so that a range is either locked and committed or neither. */
#include "backend/cpu.h"

/* Reserve more than requested and cut an aligned part out: the cpu backend takes ranges back in
 * parts. */
static sk_status pinned_range_reserve(void *self, size_t nbytes, void **out) {
    const sk__cpu *cpu = self;
    void *start = NULL;
    sk_status status = sk__cpu_range_reserve(self, nbytes + cpu->locked_bytes, &start);
    if (status != SK_OK) {
        return status;
    }
    char *address = (char *)sk__round_up((uintptr_t)start, cpu->locked_bytes);
    size_t before = (size_t)(address - (char *)start);
    size_t after = cpu->locked_bytes - before;
    if (before > 0) {
        sk__ignore(sk__cpu_range_release(self, start, before));
    }
    if (after > 0) {
        sk__ignore(sk__cpu_range_release(self, address + nbytes, after));
    }
    *out = address;
    return SK_OK;
}

/* Unlock granule by granule up to the first refusal; return the unlocked bytes. */
static size_t granules_unlock(const sk__cpu *cpu, char *address, size_t nbytes, sk_status *status) {
    sk_backend *device = cpu->locker;
    size_t done = 0;
    *status = SK_OK;
    while (done < nbytes && *status == SK_OK) {
        *status = device->ops.host_unlock(device->self, address + done, cpu->locked_bytes);
        done += *status == SK_OK ? cpu->locked_bytes : 0;
    }
    return done;
}

/* Lock all of `nbytes`, or nothing. */
static sk_status granules_lock(const sk__cpu *cpu, char *address, size_t nbytes) {
    sk_backend *device = cpu->locker;
    size_t done = 0;
    sk_status status = SK_OK;
    while (done < nbytes && status == SK_OK) {
        status = device->ops.host_lock(device->self, address + done, cpu->locked_bytes);
        done += status == SK_OK ? cpu->locked_bytes : 0;
    }
    if (status != SK_OK) {
        sk_status ignored = SK_OK;
        (void)granules_unlock(cpu, address, done, &ignored);
    }
    return status;
}

static sk_status pinned_range_commit(void *self, void *address, size_t nbytes) {
    const sk__cpu *cpu = self;
    sk_assert(nbytes % cpu->locked_bytes == 0);
    sk_status status = sk__cpu_range_commit(self, address, nbytes);
    if (status != SK_OK) {
        return status;
    }
    status = granules_lock(cpu, address, nbytes);
    if (status != SK_OK) {
        sk__ignore(sk__cpu_range_decommit(self, address, nbytes));
    }
    return status;
}

static sk_status pinned_range_move(void *self, void *from, void *to, size_t nbytes) {
    (void)self, (void)from, (void)to, (void)nbytes;
    return sk__fail(SK_UNSUPPORTED, "locked host memory: it cannot move to other addresses");
}

static sk_status pinned_range_decommit(void *self, void *address, size_t nbytes) {
    const sk__cpu *cpu = self;
    sk_assert(nbytes % cpu->locked_bytes == 0);
    sk_status status = SK_OK;
    size_t done = granules_unlock(cpu, address, nbytes, &status);
    if (status == SK_OK) {
        status = sk__cpu_range_decommit(self, address, nbytes);
    }
    if (status != SK_OK) {
        sk__ignore(granules_lock(cpu, address, done));
    }
    return status;
}

void sk__backend_pin(sk_backend *backend, sk_backend *device, size_t granule_bytes) {
    sk_assert(device->ops.host_lock_bytes != 0 && granule_bytes % backend->ops.granule_bytes == 0);
    sk__cpu *cpu = backend->self;
    cpu->locker = device;
    cpu->locked_bytes = granule_bytes;
    sk__backend_hold(device);
    backend->has_segments = false;
    backend->ops.name = "locked host memory";
    backend->ops.granule_bytes = granule_bytes;
    backend->ops.range_reserve = pinned_range_reserve;
    backend->ops.range_commit = pinned_range_commit;
    backend->ops.range_decommit = pinned_range_decommit;
    backend->ops.range_move = pinned_range_move;
}
