/* thread.h - locks that clang's thread-safety analysis and debug builds can check.
 *
 * Lock order, outermost first: registry of forks, scheduler, pool, backend wrapper, backend, ring.
 * A debug build asserts it by rank: a thread may take a lock only of a higher rank than those it
 * holds. Locks are private to one floor; callbacks and waits happen with none held. */
#ifndef SWAPKIT_BASE_THREAD_H
#define SWAPKIT_BASE_THREAD_H

#include <pthread.h>

#include "base/base.h"

#if defined(__clang__)
#define SK_ANNOTATE(x) __attribute__((x))
#else
#define SK_ANNOTATE(x)
#endif
#define SK_GUARDED_BY(lock) SK_ANNOTATE(guarded_by(lock))
#define SK_REQUIRES(lock) SK_ANNOTATE(requires_capability(lock))
#define SK_ACQUIRE(lock) SK_ANNOTATE(acquire_capability(lock))
#define SK_RELEASE(lock) SK_ANNOTATE(release_capability(lock))
#define SK_NO_ANALYSIS SK_ANNOTATE(no_thread_safety_analysis)

typedef enum sk__rank {
    SK_RANK_FORK,
    SK_RANK_SCHED,
    SK_RANK_POOL,
    SK_RANK_WRAPPER, /* wrappers may be stacked: equal ranks are allowed here */
    SK_RANK_BACKEND,
    SK_RANK_RING
} sk__rank;

typedef struct SK_ANNOTATE(capability("mutex")) sk__mutex {
    pthread_mutex_t impl;
    sk__rank rank;
} sk__mutex;

SK_API void sk__mutex_init(sk__mutex *mutex, sk__rank rank);
SK_API void sk__mutex_destroy(sk__mutex *mutex);
SK_API void sk__lock(sk__mutex *mutex) SK_ACQUIRE(*mutex);
SK_API void sk__unlock(sk__mutex *mutex) SK_RELEASE(*mutex);
/* Wait on `condition`; `mutex` is released meanwhile. */
SK_API void sk__wait(pthread_cond_t *condition, sk__mutex *mutex) SK_REQUIRES(*mutex);

/* pthread_create with a small stack: our threads need little, and a process that trains at the edge
 * of its memory has none to spare. The thread is named "swapkit" and inherits the CPUs of the
 * calling thread. Returns an errno. */
int sk__thread_start(pthread_t *thread, void *(*start)(void *), void *argument);

/* Surviving fork(): every owner of a lock registers a node. Before a fork the locks of all nodes
 * are taken, in rank order, so that the child gets every structure in a consistent state;
 * afterwards both sides release them. `child` (may be NULL) then repairs the state that belonged to
 * threads that the child lacks. Registered from create to destroy of the owner. Threads: any. */
typedef struct sk__fork_node {
    struct sk__fork_node *next;
    sk__mutex *lock;
    void (*child)(void *owner);
    void *owner;
} sk__fork_node;

SK_API void sk__fork_register(sk__fork_node *node);
SK_API void sk__fork_unregister(sk__fork_node *node);

#endif
