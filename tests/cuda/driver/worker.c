/* worker.c - the thread of a stream: what tasks do.
 *
 * When the context has a sticky error, work is skipped, but events count as reached and whoever
 * waits is woken, so that everything still comes to an end.
 */
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

#include "sim.h"

#define NS_PER_S 1000000000U

static void sleep_until(uint64_t deadline_ns) {
    struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / NS_PER_S),
                                .tv_nsec = (long)(deadline_ns % NS_PER_S)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, NULL) != 0) {
    }
}

static void sleep_outside(uint64_t nanoseconds) {
    (void)pthread_mutex_unlock(&sim.lock);
    sleep_until(sim_now_ns() + nanoseconds);
    (void)pthread_mutex_lock(&sim.lock);
}

/* When the link has moved these bytes; 0 if it takes no time. */
static uint64_t link_take(int device, sim_direction direction, size_t size) {
    uint64_t rates[SIM_DIRECTIONS] = {[SIM_H2D] = sim.options.h2d_bytes_per_s,
                                      [SIM_D2H] = sim.options.d2h_bytes_per_s,
                                      [SIM_D2D] = sim.options.d2d_bytes_per_s};
    uint64_t duration = sim.options.latency_ns;
    if (rates[direction] > 0) {
        duration += (uint64_t)((double)size * NS_PER_S / (double)rates[direction]);
    }
    if (duration == 0) {
        return 0;
    }
    uint64_t *free_ns = &sim.devices[device].link_free_ns[direction];
    uint64_t now = sim_now_ns();
    *free_ns = (*free_ns > now ? *free_ns : now) + duration;
    return *free_ns;
}

/* Whether the copy may begin: not before it is let go, and not in a broken context. */
static bool copy_may_begin(const sim_context *context) {
    while (sim.hold && context->sticky == CUDA_SUCCESS) {
        sim_wait();
    }
    if (sim.options.delay_ns > 0 && context->sticky == CUDA_SUCCESS) {
        sleep_outside(sim.options.delay_ns);
    }
    return context->sticky == CUDA_SUCCESS;
}

static void copy_do(const sim_context *context, sim_task *task) {
    if (!copy_may_begin(context)) {
        return;
    }
    uint64_t deadline = link_take(context->device, task->as.copy.direction, task->as.copy.size);
    task->running = true;
    (void)pthread_mutex_unlock(&sim.lock);
    memmove(task->as.copy.to, task->as.copy.from, task->as.copy.size);
    if (deadline > 0) {
        sleep_until(deadline);
    }
    (void)pthread_mutex_lock(&sim.lock);
    task->running = false;
}

static void fill_do(const sim_context *context, sim_task *task) {
    if (!copy_may_begin(context)) {
        return;
    }
    task->running = true;
    (void)pthread_mutex_unlock(&sim.lock);
    memset(task->as.fill.to, task->as.fill.value, task->as.fill.size);
    (void)pthread_mutex_lock(&sim.lock);
    task->running = false;
}

static void kernel_do(sim_task *task) {
    void **bytes = calloc(task->use_count + 1, sizeof *bytes);
    if (bytes == NULL) {
        abort();
    }
    for (size_t i = 0; i < task->use_count; i++) {
        const sim_range *use = &task->uses[i];
        bool device = sim_in_window(use->base, use->size);
        bytes[i] = device ? sim_shadow_of(use->base) : (void *)use->base;
    }
    task->running = true;
    (void)pthread_mutex_unlock(&sim.lock);
    sim_forbid_calls(true);
    task->as.kernel.kernel(bytes, task->as.kernel.arg);
    sim_forbid_calls(false);
    free(bytes);
    (void)pthread_mutex_lock(&sim.lock);
    task->running = false;
}

static void call_do(const sim_task *task) {
    (void)pthread_mutex_unlock(&sim.lock);
    if (task->due_ns > 0) {
        sim_clock_wait(task->due_ns);
    }
    sim_forbid_calls(true);
    task->as.call.fn(task->as.call.data);
    sim_forbid_calls(false);
    (void)pthread_mutex_lock(&sim.lock);
}

static void task_do(const sim_context *context, sim_task *task) {
    bool broken = context->sticky != CUDA_SUCCESS;
    if (task->kind == SIM_TASK_RECORD) {
        task->as.recording->done = true;
        task->as.recording->time_ns = sim_now_ns();
    } else if (broken) {
        return;
    }
    switch (task->kind) {
    case SIM_TASK_COPY:
        copy_do(context, task);
        break;
    case SIM_TASK_FILL:
        fill_do(context, task);
        break;
    case SIM_TASK_KERNEL:
        kernel_do(task);
        break;
    case SIM_TASK_CALL:
        call_do(task);
        break;
    case SIM_TASK_SLEEP:
        sleep_outside(task->as.sleep_ns);
        break;
    case SIM_TASK_WAIT:
        while (!task->as.recording->done && context->sticky == CUDA_SUCCESS) {
            sim_wait();
        }
        break;
    case SIM_TASK_RECORD:
        break;
    }
}

static void task_next(sim_stream *stream) {
    sim_task *task = stream->head;
    for (size_t i = 0; task->after != NULL && i < task->after->count; i++) {
        while (!sim_point_done(&task->after->items[i])) {
            sim_wait();
        }
    }
    task_do(stream->context, task);
    stream->head = task->next;
    if (stream->head == NULL) {
        stream->tail = NULL;
    }
    stream->done = task->sequence;
    sim_task_free(task);
    sim_notify();
}

static void *worker_main(void *arg) {
    sim_stream *stream = arg;
    (void)prctl(PR_SET_TIMERSLACK, 1UL);
    (void)pthread_mutex_lock(&sim.lock);
    while (stream->head != NULL || !stream->closing) {
        if (stream->head == NULL) {
            (void)pthread_cond_wait(&stream->work, &sim.lock);
        } else {
            task_next(stream);
        }
    }
    sim_stream **link = &stream->context->streams;
    while (*link != stream) {
        link = &(*link)->next;
    }
    *link = stream->next;
    sim_stream_drop(stream);
    sim.workers--;
    sim_notify();
    (void)pthread_mutex_unlock(&sim.lock);
    return NULL;
}

/* Signals are for the program's own threads. */
bool sim_worker_start(sim_stream *stream) {
    sigset_t all;
    sigset_t before;
    pthread_attr_t attributes;
    pthread_t thread;
    (void)sigfillset(&all);
    if (pthread_attr_init(&attributes) != 0) {
        return false;
    }
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&thread, &attributes, worker_main, stream) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attributes);
    sim.workers += started;
    return started;
}
