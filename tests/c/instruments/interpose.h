/* interpose.h - a backend around another one, with code before and after every call. */
#ifndef SWAPKIT_TESTS_INTERPOSE_H
#define SWAPKIT_TESTS_INTERPOSE_H

#include "backend/backend.h"
#include "base/thread.h"

/* One call that passes through a wrapper. */
typedef struct sk__call {
    const char *name; /* the member of sk_backend_ops; static */
    size_t nbytes;    /* 0 where the call has none */
    sk_stream *stream;
    bool fallible; /* false: it releases or only queries, and must go through */
} sk__call;

/* First member of a wrapper's state. `before` may refuse the call with its own status; `after` sees
 * the result. Either may be NULL. Threads: any, concurrently. */
typedef struct sk__interposer {
    sk_backend *inner; /* owned */
    sk__mutex lock;    /* for the wrapper's state */
    sk__fork_node fork_node;
    sk_status (*before)(struct sk__interposer *self, const sk__call *call);
    void (*after)(struct sk__interposer *self, const sk__call *call, sk_status status);
    void (*destroy)(struct sk__interposer *self); /* frees the state; inner is closed after it */
    void (*child)(void *self);                    /* after a fork; NULL: the lock is all */
} sk__interposer;

/* self  transferred on success, with self->inner; its lock is initialized here.   name  static. */
sk_status sk__interpose(sk__interposer *self, const char *name, sk_backend **out);
/* Return the wrapper's state if `backend` is the wrapper `name`, else NULL. */
sk__interposer *sk__interposer_of(sk_backend *backend, const char *name);

#endif
