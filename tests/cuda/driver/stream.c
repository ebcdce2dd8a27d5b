/* stream.c - streams, their queues, and who waits for whom.
 *
 * The default stream is the legacy one: what is queued in it comes after all that is queued in the
 * context's blocking streams, and what is queued in those comes after all that is queued in it.
 */
#include <stdlib.h>

#include "sim.h"

static bool stream_pending(const sim_stream *stream) {
    return stream->done < stream->queued || (sim_is_timed() && !sim_timed_done(stream->ready_ns));
}

void sim_stream_drop(sim_stream *stream) {
    stream->references--;
    if (stream->references == 0) {
        (void)pthread_cond_destroy(&stream->work);
        free(stream);
    }
}

bool sim_point_done(const sim_point *point) { return point->stream->done >= point->sequence; }

static bool always(const sim_stream *stream) {
    (void)stream;
    return true;
}

static bool is_blocking(const sim_stream *stream) { return stream->blocking && !stream->legacy; }

static bool is_legacy(const sim_stream *stream) { return stream->legacy; }

/* The ends of all queues that `wanted` picks and that have work; NULL if there are none. */
static sim_points *points_of(const sim_context *context, bool (*wanted)(const sim_stream *)) {
    size_t count = 0;
    for (const sim_stream *stream = context->streams; stream != NULL; stream = stream->next) {
        count += wanted(stream) && stream_pending(stream);
    }
    if (count == 0) {
        return NULL;
    }
    sim_points *points = malloc(sizeof *points + count * sizeof points->items[0]);
    if (points == NULL) {
        abort(); /* going on would break the order that tests rely on */
    }
    points->count = 0;
    for (sim_stream *stream = context->streams; stream != NULL; stream = stream->next) {
        if (wanted(stream) && stream_pending(stream)) {
            stream->references++;
            points->items[points->count++] =
                (sim_point){.stream = stream, .sequence = stream->queued};
        }
    }
    return points;
}

static void points_free(sim_points *points) {
    for (size_t i = 0; points != NULL && i < points->count; i++) {
        sim_stream_drop(points->items[i].stream);
    }
    free(points);
}

static void points_wait(sim_points *points) {
    for (size_t i = 0; points != NULL && i < points->count; i++) {
        sim_timed_wait(points->items[i].stream->ready_ns);
        while (!sim_point_done(&points->items[i])) {
            sim_wait();
        }
    }
    points_free(points);
}

sim_task *sim_task_new(sim_task_kind kind, size_t use_count) {
    sim_task *task = calloc(1, sizeof *task + use_count * sizeof task->uses[0]);
    if (task != NULL) {
        task->kind = kind;
        task->use_count = use_count;
    }
    return task;
}

void sim_task_free(sim_task *task) {
    points_free(task->after);
    if (task->kind == SIM_TASK_COPY) {
        free(task->as.copy.staging);
    } else if (task->kind == SIM_TASK_RECORD || task->kind == SIM_TASK_WAIT) {
        sim_recording_drop(task->as.recording);
    }
    free(task);
}

void sim_task_queue(sim_stream *stream, sim_task *task) {
    if (sim_is_timed() && sim_timed_queue(stream, task)) {
        return;
    }
    if (stream->blocking && !sim_is_timed()) {
        task->after = points_of(stream->context, stream->legacy ? is_blocking : is_legacy);
    }
    task->sequence = ++stream->queued;
    if (stream->tail == NULL) {
        stream->head = task;
    } else {
        stream->tail->next = task;
    }
    stream->tail = task;
    (void)pthread_cond_signal(&stream->work);
}

CUresult sim_stream_wait(sim_stream *stream) {
    uint64_t sequence = stream->queued;
    stream->references++;
    sim_timed_wait(stream->ready_ns);
    while (stream->done < sequence) {
        sim_wait();
    }
    CUresult result = stream->context->sticky;
    sim_stream_drop(stream);
    return result;
}

void sim_context_wait(const sim_context *context) { points_wait(points_of(context, always)); }

static bool uses_range(const sim_task *task, uintptr_t base, size_t size) {
    for (size_t i = 0; i < task->use_count; i++) {
        if (sim_range_overlaps(&task->uses[i], base, size)) {
            return true;
        }
    }
    return false;
}

/* Returns whether a running task uses the bytes. */
static bool stream_uses_end(sim_stream *stream, uintptr_t base, size_t size, const char *what) {
    bool running = false;
    for (const sim_task *task = stream->head; task != NULL; task = task->next) {
        if (!uses_range(task, base, size)) {
            continue;
        }
        running = running || task->running;
        if (stream->context->sticky == CUDA_SUCCESS) {
            sim_problem(stream->context, CUDA_ERROR_ILLEGAL_ADDRESS,
                        "%s of %#zx, %zu bytes, while %s work uses it", what, base, size,
                        task->running ? "running" : "queued");
        }
    }
    return running;
}

void sim_uses_end(uintptr_t base, size_t size, const char *what) {
    bool running = true;
    while (running) {
        running = false;
        for (int i = 0; i < sim.options.devices; i++) {
            sim_stream *stream = sim.devices[i].primary.streams;
            for (; stream != NULL; stream = stream->next) {
                running = stream_uses_end(stream, base, size, what) || running;
            }
        }
        if (running) {
            sim_wait();
        }
    }
}

static sim_stream *stream_open(sim_context *context, bool blocking, bool legacy) {
    sim_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) {
        return NULL;
    }
    *stream =
        (sim_stream){.context = context, .references = 1, .blocking = blocking, .legacy = legacy};
    (void)pthread_cond_init(&stream->work, NULL);
    if (!legacy) {
        stream->handle = sim_handle_open(SIM_KIND_STREAM, stream);
    }
    if ((!legacy && stream->handle == 0) || !sim_worker_start(stream)) {
        sim_handle_close(stream->handle);
        sim_stream_drop(stream);
        return NULL;
    }
    stream->next = context->streams;
    context->streams = stream;
    return stream;
}

/* The worker ends when its queue is empty. */
static void stream_close(sim_stream *stream) {
    if (stream->handle != 0) {
        sim_handle_close(stream->handle);
        stream->handle = 0;
    }
    if (stream->legacy) {
        stream->context->legacy = NULL;
    }
    stream->closing = true;
    (void)pthread_cond_signal(&stream->work);
}

void sim_streams_close(sim_context *context) {
    for (sim_stream *stream = context->streams; stream != NULL; stream = stream->next) {
        stream_close(stream);
    }
    while (context->streams != NULL) {
        sim_wait();
    }
}

static sim_stream *stream_find(CUstream handle) {
    return sim_handle_get(SIM_KIND_STREAM, (uint64_t)(uintptr_t)handle);
}

CUresult sim_stream_get(sim_context *context, CUstream handle, sim_stream **out) {
    if (handle == NULL || handle == CU_STREAM_LEGACY) {
        if (context->legacy == NULL) {
            context->legacy = stream_open(context, true, true);
        }
        *out = context->legacy;
        return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : context->sticky;
    }
    *out = stream_find(handle);
    if (*out == NULL) {
        return sim_refuse(CUDA_ERROR_INVALID_HANDLE, "%p is no stream", (void *)handle);
    }
    return (*out)->context->sticky;
}

enum { LEAST_PRIORITY = 0, GREATEST_PRIORITY = -5 };

static CUresult stream_create(sim_function function, CUstream *out, unsigned flags) {
    sim_context *context = NULL;
    CUresult result = sim_enter(function, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (out == NULL || (flags != CU_STREAM_DEFAULT && flags != CU_STREAM_NON_BLOCKING)) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuStreamCreate: flags"));
    }
    const sim_stream *stream = stream_open(context, flags == CU_STREAM_DEFAULT, false);
    if (stream == NULL) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cuStreamCreate: no thread"));
    }
    *out = (CUstream)(uintptr_t)stream->handle;
    return sim_leave(NULL, CUDA_SUCCESS);
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    return stream_create(SIM_cuStreamCreate, stream, flags);
}

/* Any priority is legal, as it is for the driver, which takes the nearest one that exists. */
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    (void)priority;
    return stream_create(SIM_cuStreamCreateWithPriority, stream, flags);
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuCtxGetStreamPriorityRange, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (least != NULL) {
        *least = LEAST_PRIORITY;
    }
    if (greatest != NULL) {
        *greatest = GREATEST_PRIORITY;
    }
    return sim_leave(context, CUDA_SUCCESS);
}

CUresult cuStreamDestroy_v2(CUstream handle) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuStreamDestroy_v2, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_stream *stream = stream_find(handle);
    if (stream == NULL) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_HANDLE,
                                          "cuStreamDestroy: %p is no stream", (void *)handle));
    }
    stream_close(stream);
    return sim_leave(context, CUDA_SUCCESS);
}

static CUresult not_while_capturing(const sim_stream *stream, const char *name) {
    if (stream->capturing) {
        return sim_refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s: the stream captures", name);
    }
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuStreamSynchronize, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_stream *stream = NULL;
    result = sim_stream_get(context, handle, &stream);
    if (result == CUDA_SUCCESS) {
        result = not_while_capturing(stream, "cuStreamSynchronize");
    }
    if (result == CUDA_SUCCESS) {
        sim_points *others = stream->legacy ? points_of(context, is_blocking) : NULL;
        result = sim_stream_wait(stream);
        points_wait(others);
    }
    return sim_leave(context, result);
}

CUresult cuStreamQuery(CUstream handle) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuStreamQuery, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_stream *stream = NULL;
    result = sim_stream_get(context, handle, &stream);
    if (result == CUDA_SUCCESS) {
        result = not_while_capturing(stream, "cuStreamQuery");
    }
    sim_timed_cost(CUSIM_COST_QUERY);
    if (result == CUDA_SUCCESS) {
        sim_points *others = stream->legacy ? points_of(context, is_blocking) : NULL;
        result = stream_pending(stream) || others != NULL ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
        points_free(others);
    }
    return sim_leave(NULL, result);
}

CUresult cuStreamIsCapturing(CUstream handle, int *status) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuStreamIsCapturing, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_stream *stream = NULL;
    result = sim_stream_get(context, handle, &stream);
    if (result == CUDA_SUCCESS && status == NULL) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuStreamIsCapturing: NULL");
    }
    if (result == CUDA_SUCCESS) {
        *status =
            stream->capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    }
    return sim_leave(NULL, result);
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn fn, void *data) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuLaunchHostFunc, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_stream *stream = NULL;
    result = sim_stream_get(context, handle, &stream);
    if (result == CUDA_SUCCESS && fn == NULL) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuLaunchHostFunc: NULL");
    }
    sim_task *task = result == CUDA_SUCCESS ? sim_task_new(SIM_TASK_CALL, 0) : NULL;
    if (task != NULL) {
        task->as.call.fn = fn;
        task->as.call.data = data;
        sim_task_queue(stream, task);
    } else if (result == CUDA_SUCCESS) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return sim_leave(NULL, result);
}
