/* backend.h - a backend's handle: the validated table, the backend's own state, its users. */
#ifndef SWAPKIT_BACKEND_BACKEND_H
#define SWAPKIT_BACKEND_BACKEND_H

#include "base/base.h"

struct sk_backend {
    sk_backend_ops ops; /* every member callable */
    void *self;
    bool has_segments; /* memory_alloc is more than a stub */
    size_t users;      /* atomic: the handle's owner, and every open pool, stream and event */
};

/* Keep a backend open, and let go of it; the last user's going destroys it. Threads: any. */
void sk__backend_hold(sk_backend *backend);
void sk__backend_drop(sk_backend *backend);

#endif
