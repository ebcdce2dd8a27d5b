/* sched.h - the structures of the scheduler, shared by its files.
 *
 * A group has at most one transfer at a time, so the group holds its fields. A transfer is
 *   WAITING  in its lane's queue; on the way out possibly without host memory yet, on the way back
 *            possibly with its bytes still on the disk
 *   RUNNING  given to the lane's stream, an event behind it; in the lane's list, oldest first
 *   DONE or FAILED  until the group's user has seen it by finish_*
 * The group's copy is NOWHERE, ON_HOST, WRITING (on the host, and on its way to the
 * disk), ON_DISK or READING (on its way back to the host). A copy that was read keeps its place on
 * the disk, so the host can drop it again at no cost.
 *
 * As many copies run as keep the link busy: few large ones or many small ones, bounded by the delay
 * that their bytes may cause for a copy that a thread waits for. Each lane has a pump: a thread
 * that waits for a copy in the middle of the running ones, ends it and all before it (the stream is
 * in order), and starts the next. A thread that queues or needs a transfer also starts it if there
 * is a slot. Without work there is no pump. All code that ends a transfer or frees memory calls
 * sk__lanes_fill() last, so a transfer only ever waits for work that is under way.
 *
 * Small copies share an event: it is recorded behind several of them, or when a thread waits for
 * one. So the first of the running copies have an event, and the last may have none yet.
 *
 * A wait that fails says nothing about the copies. They keep their memory, and the wait is repeated
 * until the device has not answered for a second; only then are the awaited copies given up.
 *
 * Everything is guarded by sched->lock, which every sk__ function below expects to be held. Device
 * waits and callbacks run without it: owners that are no longer needed are collected in
 * sched->drops, which has room for every owner in advance, and dropped by sk__leave(). */
#ifndef SWAPKIT_SCHED_SCHED_H
#define SWAPKIT_SCHED_SCHED_H

#include <stdatomic.h>

#include "backend/backend.h"
#include "base/base.h"
#include "base/ring.h"
#include "base/thread.h"
#include "disk/disk.h"
#include "swapkit_sched.h"

#define SK_NO_LIMIT (SIZE_MAX / 2) /* so that adding to it cannot overflow */

typedef enum sk__way { SK_WAY_OUT, SK_WAY_IN, SK_WAYS } sk__way;
typedef enum sk__phase { SK_IDLE, SK_WAITING, SK_RUNNING, SK_DONE, SK_FAILED } sk__phase;
typedef enum sk__place { SK_NOWHERE, SK_ON_HOST, SK_WRITING, SK_ON_DISK, SK_READING } sk__place;

/* A reusable event. It is not reused while a transfer has it or a thread waits for its last
 * recording. */
typedef struct sk__mark {
    sk_event *event;
    struct sk__mark *below; /* all marks */
    struct sk__mark *next;  /* spare ones */
    uint64_t ticket;        /* of the last copy before it in the stream */
    uint32_t holders;       /* transfers */
    uint32_t waiters;
} sk__mark;

/* When a copy ran, written by calls in its stream; 0: not yet. */
typedef struct sk__stamp {
    atomic_uint_least64_t begun_ns, ended_ns;
    struct sk__stamp *below; /* all stamps */
    struct sk__stamp *next;  /* spare ones */
} sk__stamp;

struct sk_group {
    sk_sched *sched;
    sk_group *above, *below; /* all groups, the newest first */
    size_t nbytes;
    sk_tier tier;
    uint32_t tag;    /* of its copies in a history */
    uint64_t number; /* from 1 */
    bool orphan;     /* destroyed by its user; freed when no transfer or disk request uses it */
    sk_group_state state;
    /* its transfer */
    sk__phase phase;
    sk__way way;
    sk_status failure; /* of a FAILED one */
    char why[SK_DISK_TEXT_BYTES];
    void *device;          /* the owner's memory */
    void *owner;           /* NULL once it is dropped */
    uint64_t next_use;     /* the smaller the sooner */
    uint64_t ticket;       /* of this run of the copy, since events are reused */
    sk__mark *ready;       /* the copy waits for it; NULL: for nothing */
    sk__mark *done;        /* behind the running copy, possibly shared; NULL: none yet */
    sk__stamp *stamp;      /* of the running copy; NULL: there is no history */
    sk_group *prev, *next; /* in the lane's queue or among its running copies */
    /* its copy */
    sk__place place;
    void *host;
    bool has_extent;
    uint64_t
        failed_for; /* the number of requests at a failed write: it is tried again for others */
    sk__extent extent;
    sk__disk_request request;
};

typedef struct sk__list {
    sk_group *first, *last;
} sk__list;

typedef struct sk__lane_of_copies {
    sk_sched *sched;
    sk__way way;
    sk_stream *stream;
    sk__list queue;
    sk__list running;
    uint32_t queued, in_flight;
    uint32_t unmarked; /* the last ones in flight, without an event behind them */
    size_t in_flight_bytes, unmarked_bytes;
    uint64_t silent_since_ns; /* waits have failed since then; 0: the device answers */
    pthread_t thread;
    pthread_cond_t work; /* a copy runs, or the lane stops */
    bool has_thread, stopping;
} sk__lane_of_copies;

struct sk_sched {
    sk__mutex lock;
    sk__fork_node fork_node;
    pthread_cond_t changed; /* a transfer changed its phase, or memory came free */
    sk_backend *backend;
    sk_backend *host_backend;
    sk_pool *host;
    size_t host_limit_bytes; /* SK_NO_LIMIT: none set */
    size_t host_bytes;       /* in use for copies, as allocated */
    size_t reserve_bytes;    /* kept free for reading: at least the largest copy on the disk */
    sk__disk *disk;
    bool has_folder;      /* otherwise the disk has files of others only */
    size_t host_rounding; /* of host memory, for the disk: see sk__host_open() */
    uint32_t nreads, nwrites;
    uint64_t requests; /* for copies out, from 1 */
    sk__lane_of_copies lanes[SK_WAYS];
    uint32_t copies_in_flight; /* 0: by their bytes */
    uint64_t ticket;
    uint64_t group_number; /* of the newest group */
    sk_ring *history;      /* NULL: none */
    sk__stamp *stamps, *spare_stamps;
    uint64_t nended; /* transfers, ever; atomic */
    sk_group *groups;
    uint32_t ngroups;  /* orphans included */
    bool left_orphans; /* a fork has left orphans without any work under way */
    uint32_t nowners;
    void **drops;
    size_t first_drop, end_drops, drops_capacity;
    uint32_t ndropping; /* owners that other threads are dropping without the lock */
    sk__mark *marks, *spares;
    void (*drop_owner)(void *owner);
    sk_sched_stats stats;
};

/* sched.c */
/* Lock. The calls on this thread until sk__leave() are one visit to the device. */
void sk__enter(sk_sched *sched) SK_ACQUIRE(sched->lock);
/* Unlock, and drop the owners that are no longer needed. */
void sk__leave(sk_sched *sched) SK_RELEASE(sched->lock);
/* Drop the owners that are no longer needed, and wait until no other thread drops one. */
void sk__drops_await(sk_sched *sched) SK_REQUIRES(sched->lock);
/* Make room for one more owner, so that dropping it cannot fail. */
sk_status sk__owner_reserve(sk_sched *sched) SK_REQUIRES(sched->lock);
void sk__owner_release(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock);
sk_status sk__mark_take(sk_sched *sched, sk__mark **out) SK_REQUIRES(sched->lock);
/* Add a holder to the mark. */
sk__mark *sk__mark_share(sk__mark *mark);
/* Give a group's mark back and set it to NULL; NULL is accepted. */
void sk__mark_give(sk_sched *sched, sk__mark **mark) SK_REQUIRES(sched->lock);
/* Before and after waiting for a mark (NULL: nothing) with the lock released. */
void sk__mark_hold(sk__mark *mark);
void sk__mark_drop(sk_sched *sched, sk__mark *mark) SK_REQUIRES(sched->lock);

/* group.c */
/* Free an orphan that no transfer or disk request uses. */
void sk__group_reap(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock);

/* lane.c */
void sk__list_append(sk__list *list, sk_group *group);
void sk__list_remove(sk__list *list, sk_group *group);
sk_status sk__lane_open(sk_sched *sched, sk__way way) SK_REQUIRES(sched->lock);
void sk__lane_close(sk__lane_of_copies *lane);
/* Put a group's transfer into the queue, in the order of next use. */
sk_status sk__lane_queue(sk_sched *sched, sk__way way, sk_group *group) SK_REQUIRES(sched->lock);
/* Remove a transfer that did not start from the queue. */
void sk__lane_cancel(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock);
/* End a transfer that did not start; `why` is a text for people. */
void sk__lane_fail(sk_sched *sched, sk_group *group, sk_status status, const char *why)
    SK_REQUIRES(sched->lock);
/* Start all transfers that can start, in both directions. */
void sk__lanes_fill(sk_sched *sched) SK_REQUIRES(sched->lock);
/* Wait, with the lock released, until a transfer or memory changes. */
void sk__lanes_await(sk_sched *sched) SK_REQUIRES(sched->lock);
/* Start a waiting transfer now if its memory allows it, regardless of others in flight; otherwise
 * move it to the front for memory. */
void sk__lane_hurry(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock);
/* Put an event behind every running copy. If there is none afterwards, it could not be recorded,
 * and the caller waits for the stream instead. */
void sk__lane_mark(sk_sched *sched, sk__way way) SK_REQUIRES(sched->lock);
/* Wait for a running copy, with the lock released. On failure it is still running. */
sk_status sk__lane_await(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock);
/* End the running copies up to the one with ticket `last`; `status` is their result,
 * sk_error_text() the reason. Orphans are freed. */
void sk__lane_complete(sk_sched *sched, sk__way way, uint64_t last, sk_status status)
    SK_REQUIRES(sched->lock);

/* stamp.c: the times of copies, for a history. */
/* Before and after a copy is given to the lane's stream. Without host memory there is no stamp. */
void sk__stamp_begin(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock);
void sk__stamp_end(sk_sched *sched, const sk_group *group) SK_REQUIRES(sched->lock);
/* Note the group's copy, which has ended: with SK_OK, in the history. */
void sk__stamp_note(sk_sched *sched, sk_group *group, sk_status status) SK_REQUIRES(sched->lock);
/* After the streams are gone. */
void sk__stamps_free(sk_sched *sched);

/* tier.c: the host's memory and the disk below it. */
sk_status sk__host_open(sk_sched *sched, const sk_sched_params *params);
void sk__host_close(sk_sched *sched);
/* Get host memory for a group's copy. SK_NOT_READY: work under way makes room; call again when it
 * has ended. SK_OUT_OF_HOST_MEMORY, SK_OUT_OF_DISK: there is none. */
sk_status sk__host_take(sk_sched *sched, sk_group *group, sk__way way) SK_REQUIRES(sched->lock);
/* Start reading a copy that is on the disk; as sk__host_take. */
sk_status sk__tier_read(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock);
/* Start writing a copy to the disk. */
sk_status sk__tier_write(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock);
/* Read the copies that are needed next, as far as there is host memory that no thread waits for. */
void sk__tier_read_ahead(sk_sched *sched) SK_REQUIRES(sched->lock);
/* Drop a copy, wherever it is; not while it is being written or read. */
void sk__copy_drop(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock);

static inline bool sk__is_under_way(const sk_group *group) {
    return group->phase == SK_WAITING || group->phase == SK_RUNNING;
}

static inline bool sk__in_transit(const sk_group *group) {
    return group->place == SK_WRITING || group->place == SK_READING;
}

#endif
