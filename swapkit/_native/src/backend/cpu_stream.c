/* cpu_stream.c - worker threads as streams, with events and copies.
 *
 * One lock serves all streams of a backend. Work items may be hundreds of small copies, so a thread
 * is woken only for work in its own stream, or for the end of work that it waits for. A task stays
 * at the head of its queue while it runs and is removed when done. So a forked child, where the
 * threads do not exist, finds every unfinished task still queued and runs it again (a copy may be
 * repeated). Each recording of an event is a separate mark, kept alive by the tasks that refer to
 * it: a wait is for the recording that was the latest when the wait was queued, regardless of later
 * recordings.
 *
 * The NULL stream is the host's own program order: work on it is done before the call returns. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/cpu.h"

enum { QUEUE_START = 16, QUICK_BYTES = 64 * 1024, NS_PER_S = 1000000000 };

/* One recording of an event. Guarded by the backend's lock. */
typedef struct mark {
    bool done;
    unsigned holders; /* the event, every queued task, and waiting threads */
    unsigned waiters; /* threads */
} mark;

struct sk_event {
    mark *latest; /* NULL: never recorded, or recorded when all work was done already */
    mark *spare;  /* for the next recording, so that recording usually allocates nothing */
};

typedef enum task_kind { TASK_COPY, TASK_SIGNAL, TASK_WAIT, TASK_CALL } task_kind;

typedef struct task {
    task_kind kind;
    void *to; /* TASK_COPY */
    const void *from;
    size_t nbytes;
    mark *mark;           /* TASK_SIGNAL, TASK_WAIT */
    void (*call)(void *); /* TASK_CALL */
    void *argument;
} task;

struct sk_stream {
    sk__cpu *cpu;
    sk_stream *next;
    pthread_t thread;
    bool running; /* the thread exists */
    bool stopping;
    pthread_cond_t work; /* a task is queued, or the stream stops */
    unsigned syncs;      /* threads that wait for queued work */
    task *queue;         /* ring of `capacity` slots, `count` from `head` on */
    size_t capacity, head, count;
    uint64_t done; /* tasks ever finished; with `count`, their sequence numbers */
};

/* ---- events ---------------------------------------------------------------------------------- */

static void mark_drop(mark *mark) {
    sk_assert(mark->holders > 0);
    mark->holders--;
    if (mark->holders == 0) {
        free(mark);
    }
}

/* Clear an event's latest recording; keep the mark for the next one if it has no other holders. */
static void event_clear(sk_event *event) {
    mark *latest = event->latest;
    event->latest = NULL;
    if (latest == NULL) {
        return;
    }
    if (latest->holders == 1 && event->spare == NULL) {
        event->spare = latest;
    } else {
        mark_drop(latest);
    }
}

/* Return a mark for the event's next recording, held once. */
static mark *event_mark(sk_event *event) {
    mark *fresh = event->spare;
    event->spare = NULL;
    if (fresh == NULL) {
        fresh = malloc(sizeof *fresh);
    }
    if (fresh != NULL) {
        *fresh = (mark){.holders = 1};
    }
    return fresh;
}

static bool event_is_done(const sk_event *event) {
    return event->latest == NULL || event->latest->done;
}

static sk_status event_create(void *self, sk_event **out) {
    (void)self;
    sk_event *event = calloc(1, sizeof *event);
    if (event != NULL) {
        event->spare = event_mark(event);
    }
    if (event == NULL || event->spare == NULL) {
        free(event);
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "cpu backend: no host memory for an event");
    }
    *out = event;
    return SK_OK;
}

static sk_status event_destroy(void *self, sk_event *event) {
    sk__cpu *cpu = self;
    sk__lock(&cpu->lock);
    event_clear(event);
    sk__unlock(&cpu->lock);
    free(event->spare);
    free(event);
    return SK_OK;
}

/* ---- the worker ------------------------------------------------------------------------------ */

static void sleep_until(uint64_t deadline_ns) {
    struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / NS_PER_S),
                                .tv_nsec = (long)(deadline_ns % NS_PER_S)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, NULL) == EINTR) {
    }
}

static void copy_run(const sk_cpu_params *params, const task *work) {
    uint64_t deadline_ns = sk__now_ns() + params->copy_latency_ns;
    if (params->copy_bytes_per_s != 0) {
        deadline_ns +=
            (uint64_t)((double)work->nbytes * NS_PER_S / (double)params->copy_bytes_per_s);
    }
    memcpy(work->to, work->from, work->nbytes);
    if (params->copy_bytes_per_s != 0 || params->copy_latency_ns != 0) {
        sleep_until(deadline_ns);
    }
}

/* Wait for a recording that the caller holds. */
static void mark_await(sk__cpu *cpu, mark *mark) SK_REQUIRES(cpu->lock) {
    mark->waiters++;
    while (!mark->done) {
        sk__wait(&cpu->changed, &cpu->lock);
    }
    mark->waiters--;
}

/* Run the task at the head; the lock is released while it copies or calls. */
static void task_run(sk__cpu *cpu, const task *work) SK_REQUIRES(cpu->lock) {
    switch (work->kind) {
    case TASK_COPY:
        sk__unlock(&cpu->lock);
        copy_run(&cpu->params, work);
        sk__lock(&cpu->lock);
        break;
    case TASK_CALL:
        sk__unlock(&cpu->lock);
        work->call(work->argument);
        sk__lock(&cpu->lock);
        break;
    case TASK_WAIT:
        mark_await(cpu, work->mark);
        break;
    case TASK_SIGNAL:
        work->mark->done = true;
        if (work->mark->waiters > 0) {
            (void)pthread_cond_broadcast(&cpu->changed);
        }
        break;
    }
}

static void *stream_main(void *argument) {
    sk_stream *stream = argument;
    sk__cpu *cpu = stream->cpu;
    sk__lock(&cpu->lock);
    for (;;) {
        while (stream->count == 0 && !stream->stopping) {
            sk__wait(&stream->work, &cpu->lock);
        }
        if (stream->count == 0) {
            break;
        }
        task work = stream->queue[stream->head];
        task_run(cpu, &work);
        stream->head = (stream->head + 1) % stream->capacity;
        stream->count--;
        stream->done++;
        if (work.mark != NULL) {
            mark_drop(work.mark);
        }
        if (stream->syncs > 0) {
            (void)pthread_cond_broadcast(&cpu->changed);
        }
    }
    sk__unlock(&cpu->lock);
    return NULL;
}

static sk_status stream_start(sk__cpu *cpu, sk_stream *stream) SK_REQUIRES(cpu->lock) {
    sk_assert(stream->cpu == cpu);
    (void)cpu; /* named for the lock analysis */
    if (stream->running) {
        return SK_OK;
    }
    int error = sk__thread_start(&stream->thread, stream_main, stream);
    if (error != 0) {
        return sk__fail(SK_BACKEND_FAILED, "cpu backend: no thread for a stream: %s",
                        strerror(error));
    }
    stream->running = true;
    return SK_OK;
}

static sk_status queue_grow(sk_stream *stream) {
    size_t capacity = stream->capacity == 0 ? QUEUE_START : 2 * stream->capacity;
    task *queue = malloc(capacity * sizeof *queue);
    if (queue == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "cpu backend: no host memory for a queue");
    }
    for (size_t i = 0; i < stream->count; i++) {
        queue[i] = stream->queue[(stream->head + i) % stream->capacity];
    }
    free(stream->queue);
    stream->queue = queue;
    stream->capacity = capacity;
    stream->head = 0;
    return SK_OK;
}

static sk_status task_add(sk__cpu *cpu, sk_stream *stream, const task *work)
    SK_REQUIRES(cpu->lock) {
    if (stream->count == stream->capacity) {
        sk_status status = queue_grow(stream);
        if (status != SK_OK) {
            return status;
        }
    }
    sk_status status = stream_start(cpu, stream);
    if (status != SK_OK) {
        return status;
    }
    stream->queue[(stream->head + stream->count) % stream->capacity] = *work;
    stream->count++;
    if (work->mark != NULL) {
        work->mark->holders++;
    }
    (void)pthread_cond_signal(&stream->work); /* only its thread waits for it */
    return SK_OK;
}

/* ---- streams --------------------------------------------------------------------------------- */

static sk_status stream_create(void *self, sk_stream **out) {
    sk__cpu *cpu = self;
    sk_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "cpu backend: no host memory for a stream");
    }
    stream->cpu = cpu;
    (void)pthread_cond_init(&stream->work, NULL);
    sk__lock(&cpu->lock);
    stream->next = cpu->streams;
    cpu->streams = stream;
    sk__unlock(&cpu->lock);
    *out = stream;
    return SK_OK;
}

static void stream_unlink(sk__cpu *cpu, const sk_stream *stream) SK_REQUIRES(cpu->lock) {
    sk_stream **link = &cpu->streams;
    while (*link != stream) {
        link = &(*link)->next;
    }
    *link = stream->next;
}

static sk_status stream_destroy(void *self, sk_stream *stream) {
    sk__cpu *cpu = self;
    sk__lock(&cpu->lock);
    /* In a forked child the thread may be missing while work is left. */
    sk_status status = stream->count > 0 ? stream_start(cpu, stream) : SK_OK;
    if (status != SK_OK) {
        sk__unlock(&cpu->lock);
        return status;
    }
    bool running = stream->running;
    stream->stopping = true;
    (void)pthread_cond_signal(&stream->work);
    sk__unlock(&cpu->lock);
    if (running) {
        (void)pthread_join(stream->thread, NULL);
    }
    sk__lock(&cpu->lock);
    stream_unlink(cpu, stream);
    sk__unlock(&cpu->lock);
    (void)pthread_cond_destroy(&stream->work);
    free(stream->queue);
    free(stream);
    return SK_OK;
}

static sk_status stream_sync(void *self, sk_stream *stream) {
    sk__cpu *cpu = self;
    if (stream == NULL) {
        return SK_OK;
    }
    sk__lock(&cpu->lock);
    sk_status status = stream->count == 0 ? SK_OK : stream_start(cpu, stream);
    uint64_t last = stream->done + stream->count; /* without tasks queued meanwhile */
    stream->syncs++;
    while (status == SK_OK && stream->done < last) {
        sk__wait(&cpu->changed, &cpu->lock);
    }
    stream->syncs--;
    sk__unlock(&cpu->lock);
    return status;
}

/* Restart the threads that a fork left behind, when a caller needs their work. */
static sk_status streams_resume(sk__cpu *cpu) SK_REQUIRES(cpu->lock) {
    sk_status status = SK_OK;
    for (sk_stream *stream = cpu->streams; stream != NULL; stream = stream->next) {
        if (stream->count > 0 && status == SK_OK) {
            status = stream_start(cpu, stream);
        }
    }
    return status;
}

static sk_status event_query(void *self, sk_event *event) {
    sk__cpu *cpu = self;
    sk__lock(&cpu->lock);
    sk_status status = SK_OK;
    if (!event_is_done(event)) {
        status = streams_resume(cpu);
        status = status == SK_OK ? SK_NOT_READY : status;
    }
    sk__unlock(&cpu->lock);
    return status;
}

static sk_status event_sync(void *self, sk_event *event) {
    sk__cpu *cpu = self;
    sk__lock(&cpu->lock);
    sk_status status = event_is_done(event) ? SK_OK : streams_resume(cpu);
    mark *latest = event->latest;
    if (status == SK_OK && latest != NULL) {
        latest->holders++;
        mark_await(cpu, latest);
        mark_drop(latest);
    }
    sk__unlock(&cpu->lock);
    return status;
}

/* Queue a fresh mark in `stream`; replace the event's latest recording only if that succeeds. */
static sk_status mark_queue(sk__cpu *cpu, sk_event *event, sk_stream *stream)
    SK_REQUIRES(cpu->lock) {
    mark *fresh = event_mark(event);
    if (fresh == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "cpu backend: no host memory to record an event");
    }
    task work = {.kind = TASK_SIGNAL, .mark = fresh};
    sk_status status = task_add(cpu, stream, &work);
    if (status != SK_OK) {
        event->spare = fresh;
        return status;
    }
    event_clear(event);
    event->latest = fresh;
    return SK_OK;
}

static sk_status event_record(void *self, sk_event *event, sk_stream *stream) {
    sk__cpu *cpu = self;
    sk_status status = SK_OK;
    sk__lock(&cpu->lock);
    if (stream != NULL && stream->count > 0) {
        status = mark_queue(cpu, event, stream);
    } else { /* all earlier work is done */
        event_clear(event);
    }
    sk__unlock(&cpu->lock);
    return status;
}

static sk_status stream_wait(void *self, sk_stream *stream, sk_event *event) {
    sk__cpu *cpu = self;
    if (stream == NULL) {
        return event_sync(self, event);
    }
    sk__lock(&cpu->lock);
    sk_status status = SK_OK;
    if (!event_is_done(event)) {
        task work = {.kind = TASK_WAIT, .mark = event->latest};
        status = task_add(cpu, stream, &work);
    }
    sk__unlock(&cpu->lock);
    return status;
}

/* A small copy takes less time than waking a thread for it: if no work is before it in the stream,
 * it is done at once. */
static bool copy_is_quick(sk__cpu *cpu, const sk_stream *stream, size_t nbytes) {
    if (nbytes > QUICK_BYTES || cpu->params.copy_bytes_per_s != 0 ||
        cpu->params.copy_latency_ns != 0) {
        return false;
    }
    sk__lock(&cpu->lock);
    bool is_idle = stream->count == 0;
    sk__unlock(&cpu->lock);
    return is_idle;
}

static sk_status copy_async(void *self, void *to, const void *from, size_t nbytes,
                            sk_copy_kind kind, sk_stream *stream) {
    sk__cpu *cpu = self;
    (void)kind;
    task work = {.kind = TASK_COPY, .to = to, .from = from, .nbytes = nbytes};
    if (stream == NULL || copy_is_quick(cpu, stream, nbytes)) {
        copy_run(&cpu->params, &work);
        return SK_OK;
    }
    sk__lock(&cpu->lock);
    sk_status status = task_add(cpu, stream, &work);
    sk__unlock(&cpu->lock);
    return status;
}

static sk_status stream_call(void *self, sk_stream *stream, void (*call)(void *), void *argument) {
    sk__cpu *cpu = self;
    if (stream == NULL) {
        call(argument);
        return SK_OK;
    }
    sk__lock(&cpu->lock);
    task work = {.kind = TASK_CALL, .call = call, .argument = argument};
    sk_status status = task_add(cpu, stream, &work);
    sk__unlock(&cpu->lock);
    return status;
}

void sk__cpu_stream_ops(sk_backend_ops *ops) {
    ops->stream_create = stream_create;
    ops->stream_destroy = stream_destroy;
    ops->stream_sync = stream_sync;
    ops->stream_wait = stream_wait;
    ops->stream_call = stream_call;
    ops->event_create = event_create;
    ops->event_destroy = event_destroy;
    ops->event_record = event_record;
    ops->event_query = event_query;
    ops->event_sync = event_sync;
    ops->copy_async = copy_async;
}

SK_NO_ANALYSIS void sk__cpu_streams_after_fork(void *self) {
    sk__cpu *cpu = self;
    (void)pthread_cond_init(&cpu->changed, NULL);
    for (sk_stream *stream = cpu->streams; stream != NULL; stream = stream->next) {
        (void)pthread_cond_init(&stream->work, NULL);
        stream->running = false;
        stream->syncs = 0;
    }
}
