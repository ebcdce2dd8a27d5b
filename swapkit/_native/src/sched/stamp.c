/* stamp.c - the times of copies, for a history.
 *
 * A stamp lies between the copies of a stream: calls in it read the clock on the stream's thread.
 * A stamp whose calls may be outstanding is not used again; it goes with the scheduler. */
#include <stdlib.h>

#include "sched/sched.h"

static void begin_stamp(void *argument) {
    sk__stamp *stamp = argument;
    atomic_store_explicit(&stamp->begun_ns, sk__now_ns(), memory_order_relaxed);
}

static void end_stamp(void *argument) {
    sk__stamp *stamp = argument;
    atomic_store_explicit(&stamp->ended_ns, sk__now_ns(), memory_order_release);
}

static sk__stamp *stamp_take(sk_sched *sched) SK_REQUIRES(sched->lock) {
    sk__stamp *stamp = sched->spare_stamps;
    if (stamp != NULL) {
        sk_assert(stamp->ended_ns == 0 || stamp->begun_ns <= stamp->ended_ns);
        sched->spare_stamps = stamp->next;
        return stamp;
    }
    stamp = calloc(1, sizeof *stamp);
    if (stamp != NULL) {
        stamp->below = sched->stamps;
        sched->stamps = stamp;
    }
    return stamp;
}

static sk_status call_in_stream(sk_sched *sched, const sk_group *group, void (*call)(void *))
    SK_REQUIRES(sched->lock) {
    sk_backend *backend = sched->backend;
    sk_assert(group->stamp != NULL);
    return backend->ops.stream_call(backend->self, sched->lanes[group->way].stream, call,
                                    group->stamp);
}

void sk__stamp_begin(sk_sched *sched, sk_group *group) {
    sk_assert(group->stamp == NULL);
    group->stamp = stamp_take(sched);
    if (group->stamp == NULL) {
        return;
    }
    atomic_store_explicit(&group->stamp->begun_ns, sk__now_ns(), memory_order_relaxed);
    atomic_store_explicit(&group->stamp->ended_ns, 0, memory_order_relaxed);
    sk__ignore(call_in_stream(sched, group, begin_stamp)); /* else the time is that of this call */
}

void sk__stamp_end(sk_sched *sched, const sk_group *group) {
    sk__ignore(call_in_stream(sched, group, end_stamp)); /* else the end is when it is noted */
}

void sk__stamp_note(sk_sched *sched, sk_group *group, sk_status status) {
    sk__stamp *stamp = group->stamp;
    sk_assert(stamp != NULL && group->device != NULL);
    group->stamp = NULL;
    if (status != SK_OK) {
        return; /* given up: its calls may still run */
    }
    uint64_t ended_ns = atomic_load_explicit(&stamp->ended_ns, memory_order_acquire);
    uint64_t begun_ns = atomic_load_explicit(&stamp->begun_ns, memory_order_relaxed);
    ended_ns = ended_ns != 0 ? ended_ns : sk__now_ns();
    sk_assert(begun_ns > 0 && begun_ns <= ended_ns);
    if (sched->history != NULL) {
        bool out = group->way == SK_WAY_OUT;
        sk__ring_add(sched->history, (sk_ring_event){
                                         .time_ns = ended_ns,
                                         .duration_ns = ended_ns - begun_ns,
                                         .nbytes = group->nbytes,
                                         .address = (uintptr_t)group->device,
                                         .group = group->number,
                                         .kind = out ? SK_RING_COPIED_OUT : SK_RING_COPIED_IN,
                                         .tag = group->tag,
                                     });
    }
    stamp->next = sched->spare_stamps;
    sched->spare_stamps = stamp;
}

void sk__stamps_free(sk_sched *sched) {
    while (sched->stamps != NULL) {
        sk__stamp *stamp = sched->stamps;
        sched->stamps = stamp->below;
        free(stamp);
    }
}

void sk_sched_set_history(sk_sched *sched, sk_ring *ring) {
    sk__enter(sched);
    sched->history = ring;
    sk__leave(sched);
}
