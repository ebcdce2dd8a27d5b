/* pinned.c - the cpu backend's memory, with every committed granule locked by a device.
 *
 * A commit makes the pages, then locks them; a decommit unlocks them first. Each granule is locked
 * separately, once: locking costs about as much as writing the memory. A failure undoes the earlier
 * steps, so that a range is either locked and committed or neither. */
#include <stdlib.h>

#include "backend/interpose.h"

static const char pinned_name[] = "locked host memory";

typedef struct pinned {
    sk__interposer base; /* around the cpu backend */
    sk_backend *device;
    size_t granule_bytes;
} pinned;

/* ---- ranges ---------------------------------------------------------------------------------- */

/* Reserve more than requested and cut an aligned part out: the cpu backend takes ranges back in
 * parts. */
static sk_status pinned_range_reserve(void *self, size_t nbytes, void **out) {
    pinned *state = self;
    sk_backend *inner = state->base.inner;
    void *start = NULL;
    sk_status status = inner->ops.range_reserve(inner->self, nbytes + state->granule_bytes, &start);
    if (status != SK_OK) {
        return status;
    }
    char *address = (char *)sk__round_up((uintptr_t)start, state->granule_bytes);
    size_t before = (size_t)(address - (char *)start);
    size_t after = state->granule_bytes - before;
    if (before > 0) {
        sk__ignore(inner->ops.range_release(inner->self, start, before));
    }
    if (after > 0) {
        sk__ignore(inner->ops.range_release(inner->self, address + nbytes, after));
    }
    *out = address;
    return SK_OK;
}

/* Unlock granule by granule up to the first refusal; return the unlocked bytes. */
static size_t granules_unlock(const pinned *state, char *address, size_t nbytes,
                              sk_status *status) {
    sk_backend *device = state->device;
    size_t done = 0;
    *status = SK_OK;
    while (done < nbytes && *status == SK_OK) {
        *status = device->ops.host_unlock(device->self, address + done, state->granule_bytes);
        done += *status == SK_OK ? state->granule_bytes : 0;
    }
    return done;
}

/* Lock all of `nbytes`, or nothing. */
static sk_status granules_lock(const pinned *state, char *address, size_t nbytes) {
    sk_backend *device = state->device;
    size_t done = 0;
    sk_status status = SK_OK;
    while (done < nbytes && status == SK_OK) {
        status = device->ops.host_lock(device->self, address + done, state->granule_bytes);
        done += status == SK_OK ? state->granule_bytes : 0;
    }
    if (status != SK_OK) {
        sk_status ignored = SK_OK;
        (void)granules_unlock(state, address, done, &ignored);
    }
    return status;
}

static sk_status pinned_range_commit(void *self, void *address, size_t nbytes) {
    const pinned *state = self;
    sk_backend *inner = state->base.inner;
    sk_assert(nbytes % state->granule_bytes == 0);
    sk_status status = inner->ops.range_commit(inner->self, address, nbytes);
    if (status != SK_OK) {
        return status;
    }
    status = granules_lock(state, address, nbytes);
    if (status != SK_OK) {
        sk__ignore(inner->ops.range_decommit(inner->self, address, nbytes));
    }
    return status;
}

static sk_status pinned_range_move(void *self, void *from, void *to, size_t nbytes) {
    (void)self, (void)from, (void)to, (void)nbytes;
    return sk__fail(SK_UNSUPPORTED, "locked host memory: it cannot move to other addresses");
}

static sk_status pinned_range_decommit(void *self, void *address, size_t nbytes) {
    const pinned *state = self;
    sk_backend *inner = state->base.inner;
    sk_assert(nbytes % state->granule_bytes == 0);
    sk_status status = SK_OK;
    size_t done = granules_unlock(state, address, nbytes, &status);
    if (status == SK_OK) {
        status = inner->ops.range_decommit(inner->self, address, nbytes);
    }
    if (status != SK_OK) {
        sk__ignore(granules_lock(state, address, done));
    }
    return status;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void pinned_destroy(sk__interposer *self) {
    pinned *state = (pinned *)self;
    sk__backend_drop(state->device);
    free(state);
}

sk_status sk__backend_pinned(sk_backend *device, size_t granule_bytes, sk_backend *cpu,
                             sk_backend **out) {
    sk_assert(device->ops.host_lock_bytes != 0 && granule_bytes % cpu->ops.granule_bytes == 0);
    pinned *state = calloc(1, sizeof *state);
    if (state == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "locked host memory: no host memory for its state");
    }
    state->base = (sk__interposer){.inner = cpu, .destroy = pinned_destroy};
    state->device = device;
    state->granule_bytes = granule_bytes;
    sk_status status = sk__interpose(&state->base, pinned_name, out);
    if (status != SK_OK) {
        free(state);
        return status;
    }
    sk__backend_hold(device);
    sk_backend *made = *out;
    made->has_segments = false;
    made->ops.granule_bytes = granule_bytes;
    made->ops.range_reserve = pinned_range_reserve;
    made->ops.range_commit = pinned_range_commit;
    made->ops.range_decommit = pinned_range_decommit;
    made->ops.range_move = pinned_range_move;
    return SK_OK;
}
