/* thread.c - locks with ranks, and the registry that carries them over a fork. */
#include "base/thread.h"

#include <string.h>

enum { STACK_BYTES = 256 * 1024 };

#ifdef SK_DEBUG
/* Locks held by this thread, per rank. */
static _Thread_local int held[SK_RANK_RING + 1];

static void rank_check(sk__rank rank) {
    for (int above = (int)rank; above <= SK_RANK_RING; above++) {
        bool stackable = rank == SK_RANK_WRAPPER && above == SK_RANK_WRAPPER;
        sk_assert(held[above] == 0 || stackable);
    }
}
#define RANK_ENTER(mutex) (rank_check((mutex)->rank), (void)held[(mutex)->rank]++)
#define RANK_LEAVE(mutex) ((void)held[(mutex)->rank]--)
#define RANK_FORGET() memset(held, 0, sizeof held)
#else
#define RANK_ENTER(mutex) ((void)0)
#define RANK_LEAVE(mutex) ((void)0)
#define RANK_FORGET() ((void)0)
#endif

void sk__mutex_init(sk__mutex *mutex, sk__rank rank) {
    pthread_mutexattr_t attributes;
    (void)pthread_mutexattr_init(&attributes);
    /* Critical sections are tens of nanoseconds: spin a little before sleeping. */
    (void)pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ADAPTIVE_NP);
    (void)pthread_mutex_init(&mutex->impl, &attributes);
    (void)pthread_mutexattr_destroy(&attributes);
    mutex->rank = rank;
}

void sk__mutex_destroy(sk__mutex *mutex) { (void)pthread_mutex_destroy(&mutex->impl); }

SK_NO_ANALYSIS void sk__lock(sk__mutex *mutex) {
    RANK_ENTER(mutex);
    (void)pthread_mutex_lock(&mutex->impl);
}

SK_NO_ANALYSIS void sk__unlock(sk__mutex *mutex) {
    RANK_LEAVE(mutex);
    (void)pthread_mutex_unlock(&mutex->impl);
}

void sk__wait(pthread_cond_t *condition, sk__mutex *mutex) {
    (void)pthread_cond_wait(condition, &mutex->impl);
}

int sk__thread_start(pthread_t *thread, void *(*start)(void *), void *argument) {
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (error != 0) {
        return error;
    }
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES); /* else the default: larger */
    error = pthread_create(thread, &attributes, start, argument);
    (void)pthread_attr_destroy(&attributes);
    if (error == 0) {
        (void)pthread_setname_np(*thread, "swapkit"); /* for tools, and to find it by */
    }
    return error;
}

/* ---- fork ------------------------------------------------------------------------------------ */

static struct {
    sk__mutex lock;
    sk__fork_node *nodes; /* by ascending rank */
} registry;

static pthread_once_t registry_once = PTHREAD_ONCE_INIT;

/* The locks are taken and released below the rank check: several of one rank are held at once. */
static void fork_prepare(void) {
    (void)pthread_mutex_lock(&registry.lock.impl);
    for (sk__fork_node *node = registry.nodes; node != NULL; node = node->next) {
        (void)pthread_mutex_lock(&node->lock->impl);
    }
}

static void fork_parent(void) {
    for (sk__fork_node *node = registry.nodes; node != NULL; node = node->next) {
        (void)pthread_mutex_unlock(&node->lock->impl);
    }
    (void)pthread_mutex_unlock(&registry.lock.impl);
}

static void fork_child(void) {
    for (sk__fork_node *node = registry.nodes; node != NULL; node = node->next) {
        (void)pthread_mutex_unlock(&node->lock->impl);
        if (node->child != NULL) {
            node->child(node->owner);
        }
    }
    (void)pthread_mutex_unlock(&registry.lock.impl);
    RANK_FORGET();
}

static void registry_init(void) {
    sk__mutex_init(&registry.lock, SK_RANK_FORK);
    (void)pthread_atfork(fork_prepare, fork_parent, fork_child);
}

void sk__fork_register(sk__fork_node *node) {
    (void)pthread_once(&registry_once, registry_init);
    sk__lock(&registry.lock);
    sk__fork_node **link = &registry.nodes;
    while (*link != NULL && (*link)->lock->rank <= node->lock->rank) {
        link = &(*link)->next;
    }
    node->next = *link;
    *link = node;
    sk__unlock(&registry.lock);
}

void sk__fork_unregister(sk__fork_node *node) {
    sk__lock(&registry.lock);
    sk__fork_node **link = &registry.nodes;
    while (*link != NULL && *link != node) {
        link = &(*link)->next;
    }
    if (*link != NULL) {
        *link = node->next;
    }
    sk__unlock(&registry.lock);
}
