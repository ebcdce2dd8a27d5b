/* swapkit_sched.h - the scheduler: copies between the device, the host and a disk.
 *
 * A *group* is one storage at one version, with its copy outside the device. A *transfer* is one
 * copy of one group in one direction; each direction has a queue, a stream and a bounded number of
 * transfers in flight: two, or up to 64 of together 8 MiB. Queued transfers start in the order of
 * their planned next use, the soonest first; one that a thread waits for overtakes all others.
 * Copies live in host memory of our own, allocated exactly and capped by `host_limit_bytes`; with a
 * disk folder, copies that do not fit on the host are written to an unlinked file there, the latest
 * next use first, and read back ahead of use.
 *
 *     RESIDENT --copy_out--> COPYING_OUT --finish_out--> CLEAN --evict--> OUT
 *        ^                       | failed                  ^               |  copy_in
 *        +-----------------------+                         |               v
 *                                                          +-finish_in- COPYING_IN --failed--> OUT
 *
 * The caller owns device memory: it hands the scheduler an `owner` for as long as a transfer needs
 * the memory, and drops its own references when a group is evicted. Waits are for events: on a
 * backend with real streams `finish_*` makes the consumer's stream wait and returns at once; on the
 * cpu backend, whose NULL stream is the host, it waits.
 *
 * The rules are those of swapkit.h. Threads: any, unless said; the calls for one group must not
 * overlap each other. */
#ifndef SWAPKIT_SCHED_H
#define SWAPKIT_SCHED_H

#include "swapkit_pool.h"

typedef struct sk_sched sk_sched;
typedef struct sk_group sk_group;

typedef enum sk_group_state {
    SK_GROUP_RESIDENT,
    SK_GROUP_COPYING_OUT,
    SK_GROUP_CLEAN,
    SK_GROUP_OUT,
    SK_GROUP_COPYING_IN
} sk_group_state;

/* Where a group's copy may live. */
typedef enum sk_tier {
    SK_TIER_ANY,  /* on the host, or on the disk when the host has no room */
    SK_TIER_HOST, /* on the host only */
    SK_TIER_DISK  /* on the disk as soon as it is written */
} sk_tier;

typedef struct sk_sched_params {
    size_t host_limit_bytes;   /* most host memory for copies; 0: all that the machine has */
    const char *disk_folder;   /* NULL: no disk */
    size_t disk_limit_bytes;   /* 0: all that the file system has */
    uint32_t copies_in_flight; /* of each direction; 0: as many as keep the link busy */
    uint64_t host_nodes;       /* bit n: prefer host memory of node n; 0: of any node. A hint */
    /* Called on any thread, with no lock held. It must not wait, and must leave the thread's device
     * and context as they were. */
    void (*drop_owner)(void *owner);
} sk_sched_params;

typedef struct sk_sched_stats {
    uint64_t copied_out_bytes, copied_in_bytes;  /* of copies that were started */
    uint64_t written_bytes, read_bytes;          /* to and from the disk */
    uint64_t stall_ns;                           /* threads waited for transfers */
    uint64_t overtakes;                          /* transfers waited for while queued */
    size_t host_bytes;                           /* that hold copies */
    size_t host_reserved_bytes, host_peak_bytes; /* taken from the machine for them */
    size_t disk_bytes, disk_peak_bytes;          /* that hold copies */
    uint32_t queued, in_flight;                  /* transfers now */
    uint32_t groups;
} sk_sched_stats;

/* backend  of the device; kept open.   out  owned: sk_sched_destroy(). */
SK_API SK_NODISCARD sk_status sk_sched_create(sk_backend *backend, const sk_sched_params *params,
                                              sk_sched **out);
/* Wait for every transfer. SK_INVALID, and nothing done, while groups exist. */
SK_API SK_NODISCARD sk_status sk_sched_destroy(sk_sched *sched);
SK_API void sk_sched_stats_get(sk_sched *sched, sk_sched_stats *out);
/* Wait until no transfer is queued or in flight in either direction, and owners are dropped. */
SK_API void sk_sched_drain(sk_sched *sched);
/* ring  borrowed until detached; NULL detaches. While attached, every copy that ends well is noted
 * in it with its time: two calls in the stream, around the copy, read the clock. Where the backend
 * has no such calls, the time is from when the copy was given to the stream until the scheduler
 * learned of its end. */
SK_API void sk_sched_set_history(sk_sched *sched, sk_ring *ring);
/* Give the host memory and the disk space that hold no copy back. */
SK_API void sk_sched_trim(sk_sched *sched);
/* Walk every structure. SK_CORRUPT: sk_error_text() names the broken invariant. */
SK_API SK_NODISCARD sk_status sk_sched_check(sk_sched *sched);

/* out  owned: sk_group_destroy(). RESIDENT.   SK_INVALID: SK_TIER_DISK without a disk. */
SK_API SK_NODISCARD sk_status sk_group_create(sk_sched *sched, size_t nbytes, sk_tier tier,
                                              sk_group **out);
/* Set the tag of the group's copies in a history; 0 at first. Not while one is under way. */
SK_API void sk_group_label(sk_group *group, uint32_t tag);
/* Let the copy of a RESIDENT group be a part of a file, which is only read: the bytes at `offset`
 * of `path`, unless those turn out to differ. They are compared once the copy is on the host, which
 * needs it no more then. If the file is changed later, reading it fails; renaming and deleting it
 * do no harm. Not twice.
 *
 * Returns  SK_DISK_FAILED, SK_INVALID, SK_OUT_OF_HOST_MEMORY: the file is of no use. */
SK_API SK_NODISCARD sk_status sk_group_borrow(sk_group *group, const char *path, uint64_t offset);
/* In any state: a queued transfer is cancelled; one in flight keeps its memory until it is done. */
SK_API void sk_group_destroy(sk_group *group);
SK_API sk_group_state sk_group_state_get(const sk_group *group);
/* The address of the state, for frequent reads. Borrowed until the group is destroyed. */
SK_API const sk_group_state *sk_group_state_at(const sk_group *group);
/* Queue the copy to the host of the bytes at `device`, behind the work queued on `producer`.
 *
 * owner     transferred on success: dropped when the copy no longer needs the memory.
 * next_use  planned; the smaller the sooner. Copies in with one below 2**40 keep that order: a copy
 *           that is waited for starts those before it, too.
 * Returns   SK_OUT_OF_HOST_MEMORY or SK_OUT_OF_DISK: no room; the group stays RESIDENT. */
SK_API SK_NODISCARD sk_status sk_group_copy_out(sk_group *group, const void *device, void *owner,
                                                uint64_t next_use, sk_stream *producer);
/* Let `consumer` wait for the copy; then the group is CLEAN. With `poll`, SK_NOT_READY instead of
 * waiting. If the copy failed, its status, and the group is RESIDENT. If only the wait failed, its
 * status, and nothing has changed: call again. */
SK_API SK_NODISCARD sk_status sk_group_finish_out(sk_group *group, sk_stream *consumer, bool poll);
/* The owner of a CLEAN group drops its device memory: the group is OUT. If the copy turns out to
 * have failed late, its status, and the group is RESIDENT. unevict undoes this: another reference
 * kept the memory, and the owner has it again. */
SK_API SK_NODISCARD sk_status sk_group_evict(sk_group *group);
SK_API SK_NODISCARD sk_status sk_group_unevict(sk_group *group);
/* Queue the copy back into the memory at `device`, behind the work queued on `producer`. */
SK_API SK_NODISCARD sk_status sk_group_copy_in(sk_group *group, void *device, void *owner,
                                               uint64_t next_use, sk_stream *producer);
/* As sk_group_finish_out; CLEAN in the end, or OUT if the copy failed. */
SK_API SK_NODISCARD sk_status sk_group_finish_in(sk_group *group, sk_stream *consumer, bool poll);
/* Whether a complete copy exists outside the device. May be called at any time, also beside other
 * calls for the group; drops no owner. */
SK_API bool sk_group_has_copy(sk_group *group);
/* The address of the copy, for code that reads it in place: NULL unless the group is CLEAN or OUT
 * and its tier is SK_TIER_HOST. Borrowed until the group is destroyed. */
SK_API void *sk_group_host(sk_group *group);

#endif
