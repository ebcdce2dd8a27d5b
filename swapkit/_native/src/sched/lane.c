/* lane.c - one direction: its queue, its stream, and the pump that keeps it busy. */
#include "sched/sched.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum {
    NS_PER_S = 1000000000,
    RETRY_NS = 1000000,
    PATIENCE_NS = NS_PER_S,
    MIB = 1024 * 1024,
    /* Copies in flight: the least, so that one starts when another ends; the most; and the most
     * bytes beyond the least, 0.2 ms of a link of 50 GB/s. */
    LEAST_IN_FLIGHT = 2,
    MOST_IN_FLIGHT = 64,
    MOST_BYTES_IN_FLIGHT = 8 * MIB,
    /* Copies that share an event: few enough that the pump has a middle to wait for. */
    MOST_SHARING = 8,
    MOST_BYTES_SHARING = MIB,
};

/* The next uses of planned copies in are below it. */
static const uint64_t first_unplanned = UINT64_C(1) << 40;

/* ---- lists ----------------------------------------------------------------------------------- */

/* `after` NULL: at the front. */
static void list_insert(sk__list *list, sk_group *after, sk_group *group) {
    sk_assert(group->prev == NULL && group->next == NULL);
    sk_group *before = after == NULL ? list->first : after->next;
    group->prev = after;
    group->next = before;
    *(after == NULL ? &list->first : &after->next) = group;
    *(before == NULL ? &list->last : &before->prev) = group;
}

void sk__list_append(sk__list *list, sk_group *group) { list_insert(list, list->last, group); }

void sk__list_remove(sk__list *list, sk_group *group) {
    sk_assert(group->prev != NULL || list->first == group);
    *(group->prev == NULL ? &list->first : &group->prev->next) = group->next;
    *(group->next == NULL ? &list->last : &group->next->prev) = group->prev;
    group->prev = group->next = NULL;
}

/* ---- the pump -------------------------------------------------------------------------------- */

/* Return the copy to wait for: when it ends, half of the running bytes are done, and the link is
 * busy with the other half while this thread wakes. */
static sk_group *running_middle(const sk__lane_of_copies *lane) {
    sk_group *middle = lane->running.first;
    size_t nbytes = middle->nbytes;
    while (middle->next != NULL && nbytes + middle->next->nbytes <= lane->in_flight_bytes / 2) {
        middle = middle->next;
        nbytes += middle->nbytes;
    }
    return middle;
}

static void *pump_main(void *argument) {
    sk__lane_of_copies *lane = argument;
    sk_sched *sched = lane->sched;
    sk__visit_begin(sched->backend); /* a single visit */
    sk__enter(sched);
    for (;;) {
        while (lane->running.first == NULL && !lane->stopping) {
            sk__wait(&lane->work, &sched->lock);
        }
        if (lane->running.first == NULL) {
            break;
        }
        sk__ignore(sk__lane_await(sched, running_middle(lane))); /* still running: retry */
        sk__leave(sched);                                        /* drops the owners of copies */
        sk__enter(sched);
    }
    sk__leave(sched);
    sk__visit_end(sched->backend);
    return NULL;
}

static sk_status pump_start(sk_sched *sched, sk__way way) SK_REQUIRES(sched->lock) {
    sk__lane_of_copies *lane = &sched->lanes[way];
    if (lane->has_thread) {
        return SK_OK;
    }
    int error = sk__thread_start(&lane->thread, pump_main, lane);
    if (error != 0) {
        return sk__fail(SK_BACKEND_FAILED, "scheduler: no thread for a copy stream: %s",
                        strerror(error));
    }
    lane->has_thread = true;
    return SK_OK;
}

sk_status sk__lane_open(sk_sched *sched, sk__way way) {
    sk__lane_of_copies *lane = &sched->lanes[way];
    lane->sched = sched;
    lane->way = way;
    (void)pthread_cond_init(&lane->work, NULL);
    sk_status status = sk_stream_create(sched->backend, &lane->stream);
    if (status == SK_OK && sched->has_folder) {
        status = pump_start(sched, way); /* later there may be no memory for a thread */
    }
    return status;
}

SK_NO_ANALYSIS void sk__lane_close(sk__lane_of_copies *lane) { /* the queue is empty */
    sk_assert(lane->queue.first == NULL && lane->running.first == NULL);
    sk__lock(&lane->sched->lock);
    lane->stopping = true;
    (void)pthread_cond_broadcast(&lane->work);
    sk__unlock(&lane->sched->lock);
    if (lane->has_thread) {
        (void)pthread_join(lane->thread, NULL);
    }
    if (lane->stream != NULL) {
        sk__ignore(sk_stream_destroy(lane->sched->backend, lane->stream));
    }
    (void)pthread_cond_destroy(&lane->work);
}

/* ---- a transfer's life ----------------------------------------------------------------------- */

/* On the way out the latest next use goes first, on the way back the soonest: in both cases this is
 * the order in which transfers usually arrive. */
static bool goes_before(const sk_group *group, const sk_group *other) {
    return group->way == SK_WAY_OUT ? group->next_use > other->next_use
                                    : group->next_use < other->next_use;
}

sk_status sk__lane_queue(sk_sched *sched, sk__way way, sk_group *group) {
    sk__lane_of_copies *lane = &sched->lanes[way];
    sk_status status = pump_start(sched, way);
    if (status != SK_OK) {
        return status;
    }
    group->way = way; /* first: the order depends on it */
    sk_group *after = lane->queue.last;
    while (after != NULL && goes_before(group, after)) {
        after = after->prev;
    }
    list_insert(&lane->queue, after, group);
    lane->queued++;
    group->phase = SK_WAITING;
    group->failure = SK_OK;
    sk__lanes_fill(sched);
    return SK_OK;
}

static void queue_leave(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock) {
    sk__lane_of_copies *lane = &sched->lanes[group->way];
    sk_assert(group->phase == SK_WAITING && lane->queued > 0);
    sk__list_remove(&lane->queue, group);
    lane->queued--;
}

/* End a transfer, started or not. `why` (of a failure) is a text for people. */
static void transfer_end(sk_sched *sched, sk_group *group, sk_status status, const char *why)
    SK_REQUIRES(sched->lock) {
    sk_assert(sk__is_under_way(group) && group->done == NULL);
    group->phase = status == SK_OK ? SK_DONE : SK_FAILED;
    group->failure = status;
    (void)__atomic_add_fetch(&sched->nended, 1, __ATOMIC_RELEASE);
    sk__owner_release(sched, group);
    sk__mark_give(sched, &group->ready);
    if (status != SK_OK) {
        (void)snprintf(group->why, sizeof group->why, "%s", why);
    }
    if (status != SK_OK && group->way == SK_WAY_OUT) {
        sk__copy_drop(sched, group); /* no write to the disk before the copy has arrived */
    }
    (void)pthread_cond_broadcast(&sched->changed);
}

void sk__lane_cancel(sk_sched *sched, sk_group *group) {
    sk__lane_fail(sched, group, SK_INVALID, "it was cancelled");
}

void sk__lane_fail(sk_sched *sched, sk_group *group, sk_status status, const char *why) {
    sk_assert(status != SK_OK && status != SK_NOT_READY);
    queue_leave(sched, group);
    transfer_end(sched, group, status, why);
}

/* Give the copy to the stream. It cannot be cancelled after that. */
static sk_status copy_start(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock) {
    sk_stream *stream = sched->lanes[group->way].stream;
    bool out = group->way == SK_WAY_OUT;
    void *to = out ? group->host : group->device;
    const void *source = out ? group->device : group->host;
    sk_assert(to != NULL && source != NULL && group->done == NULL);
    sk_status status = SK_OK;
    if (group->ready != NULL) {
        status = sk_stream_wait(sched->backend, stream, group->ready->event);
    }
    if (status == SK_OK && sched->history != NULL) {
        sk__stamp_begin(sched, group);
    }
    if (status == SK_OK) {
        status = sk_copy_async(sched->backend, to, source, group->nbytes,
                               out ? SK_DEVICE_TO_HOST : SK_HOST_TO_DEVICE, stream);
    }
    if (status == SK_OK && group->stamp != NULL) {
        sk__stamp_end(sched, group);
    }
    return status;
}

void sk__lane_mark(sk_sched *sched, sk__way way) {
    sk__lane_of_copies *lane = &sched->lanes[way];
    sk__mark *mark = NULL;
    if (lane->unmarked == 0 || sk__mark_take(sched, &mark) != SK_OK) {
        return;
    }
    if (sk_event_record(sched->backend, mark->event, lane->stream) == SK_OK) {
        sk_group *group = lane->running.last;
        mark->ticket = group->ticket;
        while (group != NULL && group->done == NULL) {
            group->done = sk__mark_share(mark);
            group = group->prev;
        }
        lane->unmarked = 0;
        lane->unmarked_bytes = 0;
    }
    sk__mark_give(sched, &mark);
}

/* End a copy that ran. */
static void running_end(sk_sched *sched, sk_group *group, sk_status status)
    SK_REQUIRES(sched->lock) {
    sk__lane_of_copies *lane = &sched->lanes[group->way];
    sk_assert(group->phase == SK_RUNNING && lane->in_flight > 0);
    sk__list_remove(&lane->running, group);
    sk_assert(lane->in_flight_bytes >= group->nbytes);
    lane->in_flight--;
    lane->in_flight_bytes -= group->nbytes;
    if (group->done == NULL) {
        lane->unmarked--;
        lane->unmarked_bytes -= group->nbytes;
    }
    sk__mark_give(sched, &group->done);
    if (group->stamp != NULL) {
        sk__stamp_note(sched, group, status);
    }
    transfer_end(sched, group, status, sk_error_text());
    bool is_there = group->tier == SK_TIER_DISK || group->extent.source != NULL;
    bool to_disk = group->way == SK_WAY_OUT && is_there && !group->orphan;
    if (status == SK_OK && to_disk) {
        /* If the write cannot start, the copy stays on the host. */
        sk__ignore(sk__tier_write(sched, group));
    }
}

/* End the running copies up to ticket `last`: the stream is in order. */
static void running_end_until(sk_sched *sched, sk__way way, uint64_t last, sk_status status)
    SK_REQUIRES(sched->lock) {
    sk__lane_of_copies *lane = &sched->lanes[way];
    lane->silent_since_ns = 0;
    while (lane->running.first != NULL && lane->running.first->ticket <= last) {
        sk_group *group = lane->running.first;
        running_end(sched, group, status);
        sk__group_reap(sched, group);
    }
}

/* Mark a started copy. If the host copies, it may be over already: then no pump has to wake. */
static void started_mark(sk_sched *sched, sk__lane_of_copies *lane) SK_REQUIRES(sched->lock) {
    bool on_host = sched->backend->ops.null_stream_is_host != 0;
    bool sharing = !on_host && sched->copies_in_flight == 0 && lane->unmarked < MOST_SHARING &&
                   lane->unmarked_bytes < MOST_BYTES_SHARING;
    if (sharing) {
        return;
    }
    sk__lane_mark(sched, lane->way);
    const sk__mark *mark = lane->running.last->done;
    if (on_host && mark != NULL && sk_event_query(sched->backend, mark->event) == SK_OK) {
        running_end_until(sched, lane->way, mark->ticket, SK_OK);
    }
}

/* Start a waiting transfer that has its memory. */
static void transfer_start(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock) {
    sk__lane_of_copies *lane = &sched->lanes[group->way];
    sk_assert(group->phase == SK_WAITING && group->place != SK_READING);
    sk_status status = copy_start(sched, group);
    if (status != SK_OK) {
        group->stamp = NULL; /* the stream may still write to it */
        sk__lane_fail(sched, group, status, sk_error_text());
        return;
    }
    queue_leave(sched, group);
    group->phase = SK_RUNNING;
    group->ticket = ++sched->ticket;
    sk__list_append(&lane->running, group);
    lane->in_flight++;
    lane->in_flight_bytes += group->nbytes;
    lane->unmarked++;
    lane->unmarked_bytes += group->nbytes;
    uint64_t *total =
        group->way == SK_WAY_OUT ? &sched->stats.copied_out_bytes : &sched->stats.copied_in_bytes;
    *total += group->nbytes;
    started_mark(sched, lane);
    if (lane->running.first != NULL) {
        (void)pthread_cond_broadcast(&lane->work);
    }
    (void)pthread_cond_broadcast(&sched->changed);
}

/* Get host memory for a waiting transfer; on the way back, with its bytes in it. */
static sk_status memory_prepare(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock) {
    switch (group->place) {
    case SK_NOWHERE:
        sk_assert(group->way == SK_WAY_OUT);
        return sk__host_take(sched, group, SK_WAY_OUT);
    case SK_ON_DISK:
        sk_assert(group->way == SK_WAY_IN);
        return sk__tier_read(sched, group);
    case SK_READING:
        return SK_NOT_READY;
    case SK_ON_HOST:
    case SK_WRITING:
        break;
    }
    return SK_OK;
}

/* Start one waiting transfer if its memory allows; a memory failure ends it. */
static void transfer_try(sk_sched *sched, sk_group *group) SK_REQUIRES(sched->lock) {
    sk_status status = memory_prepare(sched, group);
    if (status == SK_OK) {
        transfer_start(sched, group);
    } else if (status != SK_NOT_READY) {
        sk__lane_fail(sched, group, status, sk_error_text());
    }
}

static bool is_full(const sk_sched *sched, const sk__lane_of_copies *lane, const sk_group *next)
    SK_REQUIRES(sched->lock) {
    if (sched->copies_in_flight != 0) {
        return lane->in_flight >= sched->copies_in_flight;
    }
    bool is_much = lane->in_flight >= MOST_IN_FLIGHT ||
                   lane->in_flight_bytes + next->nbytes > MOST_BYTES_IN_FLIGHT;
    return lane->in_flight >= LEAST_IN_FLIGHT && is_much;
}

static void lane_fill(sk_sched *sched, sk__way way) SK_REQUIRES(sched->lock) {
    const sk__lane_of_copies *lane = &sched->lanes[way];
    bool starved = false; /* transfers behind it do not take the memory that it waits for */
    sk_group *next = NULL;
    for (sk_group *group = lane->queue.first; group != NULL; group = next) {
        if (is_full(sched, lane, group)) {
            return;
        }
        next = group->next;
        if (!starved || group->host != NULL) {
            transfer_try(sched, group);
            starved = starved || (group->phase == SK_WAITING && group->host == NULL);
        }
    }
}

static void orphans_reap(sk_sched *sched) SK_REQUIRES(sched->lock) {
    sk_group *below = NULL;
    for (sk_group *group = sched->groups; group != NULL; group = below) {
        below = group->below;
        sk__group_reap(sched, group);
    }
    sched->left_orphans = false;
}

void sk__lanes_fill(sk_sched *sched) {
    uint64_t nended = 0;
    if (sched->left_orphans) {
        orphans_reap(sched);
    }
    do { /* the end of one transfer may be what another waits for */
        nended = sched->nended;
        for (int way = 0; way < SK_WAYS; way++) {
            sk__lane_of_copies *lane = &sched->lanes[way];
            if (lane->running.first != NULL) {
                sk__ignore(pump_start(sched, (sk__way)way)); /* a fork left the pump behind */
            }
            lane_fill(sched, (sk__way)way);
        }
    } while (nended != sched->nended);
}

void sk__lane_hurry(sk_sched *sched, sk_group *group) {
    sk__list *queue = &sched->lanes[group->way].queue;
    sk_assert(group->phase == SK_WAITING);
    /* The stream is in order: behind a copy whose memory is free later, others would wait for it.
     */
    bool in_order = group->way == SK_WAY_IN && group->next_use < first_unplanned;
    sk_group *next = NULL;
    for (sk_group *each = queue->first; in_order && each != group; each = next) {
        next = each->next;
        sk_assert(each->phase == SK_WAITING);
        transfer_try(sched, each);
    }
    transfer_try(sched, group);
    if (group->phase == SK_WAITING && queue->first != group) {
        sk__list_remove(queue, group);
        list_insert(queue, NULL, group);
    }
    sk__lanes_fill(sched);
}

void sk__lane_complete(sk_sched *sched, sk__way way, uint64_t last, sk_status status) {
    running_end_until(sched, way, last, status);
    sk__lanes_fill(sched);
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* Return whether to repeat a failed wait: until the device has been silent for PATIENCE_NS. */
static bool is_patient(sk_sched *sched, sk__way way) SK_REQUIRES(sched->lock) {
    sk__lane_of_copies *lane = &sched->lanes[way];
    uint64_t now_ns = sk__now_ns();
    if (lane->silent_since_ns == 0) {
        lane->silent_since_ns = now_ns;
    }
    return now_ns - lane->silent_since_ns < PATIENCE_NS;
}

sk_status sk__lane_await(sk_sched *sched, sk_group *group) {
    sk_assert(group->phase == SK_RUNNING);
    sk__way way = group->way;
    sk__lane_of_copies *lane = &sched->lanes[way];
    if (group->done == NULL) {
        sk__lane_mark(sched, way);
    }
    sk__mark *mark = group->done;
    uint64_t ticket = group->ticket;
    uint64_t last = mark != NULL ? mark->ticket : lane->running.last->ticket;
    sk__mark_hold(mark);
    sk__unlock(&sched->lock);
    sk_status status = mark == NULL ? sk_stream_sync(sched->backend, lane->stream)
                                    : sk_event_sync(sched->backend, mark->event);
    if (status != SK_OK) {
        (void)nanosleep(&(struct timespec){.tv_nsec = RETRY_NS}, NULL);
    }
    sk__lock(&sched->lock);
    sk__mark_drop(sched, mark);
    /* Another thread may have been first, and the group may already be freed. */
    bool is_over = lane->running.first == NULL || lane->running.first->ticket > ticket;
    if (status != SK_OK && (is_over || is_patient(sched, way))) {
        return is_over ? SK_OK : status;
    }
    sk__lane_complete(sched, way, last, status);
    return SK_OK;
}

void sk__lanes_await(sk_sched *sched) {
    for (int way = 0; way < SK_WAYS; way++) {
        sk__lane_of_copies *lane = &sched->lanes[way];
        if (lane->running.first != NULL && !lane->has_thread) { /* none could be started */
            sk__ignore(sk__lane_await(sched, lane->running.first));
            return;
        }
    }
    sk__wait(&sched->changed, &sched->lock);
}
