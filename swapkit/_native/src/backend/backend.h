/* backend.h - a backend's handle: the validated table, the backend's own state, its users. */
#ifndef SWAPKIT_BACKEND_BACKEND_H
#define SWAPKIT_BACKEND_BACKEND_H

#include "base/base.h"

struct sk_backend {
    sk_backend_ops ops; /* every member callable */
    void *self;
    bool has_segments; /* memory_alloc is more than a stub */
    bool has_aliases;  /* range_alias is more than a stub */
    size_t users;      /* atomic: the handle's owner, and every open pool, stream and event */
};

/* Keep a backend open; and release it: the last user's release destroys it. Threads: any. */
void sk__backend_hold(sk_backend *backend);
void sk__backend_drop(sk_backend *backend);

/* Enclose several calls of this thread in a row. See sk_backend_ops. */
static inline void sk__visit_begin(const sk_backend *backend) {
    backend->ops.visit_begin(backend->self);
}

static inline void sk__visit_end(const sk_backend *backend) {
    backend->ops.visit_end(backend->self);
}

/* Choose the granules of a device that maps multiples of `least` bytes; `asked`: 0 for the usual
 * ones. SK_INVALID: it cannot have them. */
sk_status sk__granule_choose(const char *backend, size_t asked, size_t least, size_t *out);

/* pinned.c. Let `device` lock every granule that the cpu backend `backend`, not yet used, commits.
 *
 * device   must have host_lock; kept open.
 * granule  of commit and decommit, and one locked piece each: a power of two, and a multiple of
 *          the granule so far.
 * The backend then has virtual memory only. */
void sk__backend_pin(sk_backend *backend, sk_backend *device, size_t granule_bytes);

#endif
