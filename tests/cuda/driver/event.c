/* event.c - events: an event is a name for its latest recording. */
#include <stdlib.h>

#include "sim.h"

#define NS_PER_MS 1e6F

sim_recording *sim_recording_new(void) {
    sim_recording *recording = calloc(1, sizeof *recording);
    if (recording != NULL) {
        recording->references = 1;
    }
    return recording;
}

void sim_recording_drop(sim_recording *recording) {
    if (recording != NULL && --recording->references == 0) {
        free(recording);
    }
}

static bool is_done(const sim_recording *recording) {
    return recording->done || sim_timed_done(recording->time_ns);
}

static void event_close(sim_event *event) {
    sim_handle_close(event->handle);
    sim_recording_drop(event->recording);
    if (event->previous == NULL) {
        event->context->events = event->next;
    } else {
        event->previous->next = event->next;
    }
    if (event->next != NULL) {
        event->next->previous = event->previous;
    }
    free(event);
}

void sim_events_close(sim_context *context) {
    while (context->events != NULL) {
        event_close(context->events);
    }
}

static sim_event *event_open(sim_context *context, unsigned flags) {
    sim_event *event = calloc(1, sizeof *event);
    if (event == NULL) {
        return NULL;
    }
    *event = (sim_event){.context = context, .next = context->events, .flags = flags};
    event->handle = sim_handle_open(SIM_KIND_EVENT, event);
    if (event->handle == 0) {
        free(event);
        return NULL;
    }
    if (event->next != NULL) {
        event->next->previous = event;
    }
    context->events = event;
    return event;
}

static CUresult event_get(const char *name, CUevent handle, sim_event **out) {
    *out = sim_handle_get(SIM_KIND_EVENT, (uint64_t)(uintptr_t)handle);
    if (*out == NULL) {
        return sim_refuse(CUDA_ERROR_INVALID_HANDLE, "%s: %p is no event", name, (void *)handle);
    }
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *out, unsigned flags) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuEventCreate, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    bool shared = (flags & CU_EVENT_INTERPROCESS) != 0;
    bool timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
    if (out == NULL || (flags & ~known) != 0 || (shared && timed)) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuEventCreate: flags"));
    }
    const sim_event *event = event_open(context, flags);
    if (event == NULL) {
        return sim_leave(NULL, CUDA_ERROR_OUT_OF_MEMORY);
    }
    *out = (CUevent)(uintptr_t)event->handle;
    return sim_leave(NULL, CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent handle) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuEventDestroy_v2, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_event *event = NULL;
    result = event_get("cuEventDestroy", handle, &event);
    if (result == CUDA_SUCCESS) {
        event_close(event);
    }
    return sim_leave(context, result);
}

static CUresult event_record(sim_event *event, sim_stream *stream) {
    if (event->context != stream->context) {
        return sim_refuse(CUDA_ERROR_INVALID_HANDLE,
                          "cuEventRecord: event of device %d, stream of device %d",
                          event->context->device, stream->context->device);
    }
    sim_timed_cost(CUSIM_COST_RECORD);
    sim_recording *recording = sim_recording_new();
    sim_task *task = recording == NULL ? NULL : sim_task_new(SIM_TASK_RECORD, 0);
    if (task == NULL) {
        sim_recording_drop(recording);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_recording_drop(event->recording);
    event->recording = recording;
    recording->references++;
    task->as.recording = recording;
    sim_task_queue(stream, task);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuEventRecord, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_event *event = NULL;
    sim_stream *stream = NULL;
    result = event_get("cuEventRecord", handle, &event);
    if (result == CUDA_SUCCESS) {
        result = sim_stream_get(context, stream_handle, &stream);
    }
    return sim_leave(NULL, result == CUDA_SUCCESS ? event_record(event, stream) : result);
}

static CUresult stream_wait_event(sim_stream *stream, const sim_event *event) {
    sim_timed_cost(CUSIM_COST_WAIT);
    if (event->recording == NULL || is_done(event->recording)) {
        return CUDA_SUCCESS;
    }
    if (sim_is_timed()) {
        sim_timed_after(stream, event->recording->time_ns);
        return CUDA_SUCCESS;
    }
    sim_task *task = sim_task_new(SIM_TASK_WAIT, 0);
    if (task == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    event->recording->references++;
    task->as.recording = event->recording;
    sim_task_queue(stream, task);
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuStreamWaitEvent, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_event *event = NULL;
    sim_stream *stream = NULL;
    result = event_get("cuStreamWaitEvent", handle, &event);
    if (result == CUDA_SUCCESS) {
        result = sim_stream_get(context, stream_handle, &stream);
    }
    if (result == CUDA_SUCCESS && flags != 0) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuStreamWaitEvent: flags must be 0");
    }
    return sim_leave(NULL, result == CUDA_SUCCESS ? stream_wait_event(stream, event) : result);
}

/* Enter, and find the event, whose context must be well. */
static CUresult event_enter(sim_function function, const char *name, CUevent handle,
                            sim_event **out) {
    sim_context *context = NULL;
    CUresult result = sim_enter(function, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = event_get(name, handle, out);
    if (result == CUDA_SUCCESS) {
        result = (*out)->context->sticky;
    }
    return result == CUDA_SUCCESS ? result : sim_leave(NULL, result);
}

CUresult cuEventQuery(CUevent handle) {
    sim_event *event = NULL;
    CUresult result = event_enter(SIM_cuEventQuery, "cuEventQuery", handle, &event);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_timed_cost(CUSIM_COST_QUERY);
    bool done = event->recording == NULL || is_done(event->recording);
    return sim_leave(NULL, done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

/* Take the lock and find an event, on a thread with any context or none. */
static CUresult event_enter_anywhere(const char *name, CUevent handle, sim_event **out) {
    if (atomic_load(&sim.forked) || !atomic_load(&sim.initialised)) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    (void)pthread_mutex_lock(&sim.lock);
    CUresult result = event_get(name, handle, out);
    return result == CUDA_SUCCESS ? result : sim_leave(NULL, result);
}

CUresult cusim_destroy_event(CUevent handle) {
    sim_event *event = NULL;
    CUresult result = event_enter_anywhere("cusim_destroy_event", handle, &event);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    event_close(event);
    return sim_leave(NULL, CUDA_SUCCESS);
}

CUresult cusim_event_time(CUevent handle, uint64_t *time_ns) {
    sim_event *event = NULL;
    CUresult result = event_enter_anywhere("cusim_event_time", handle, &event);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (event->recording == NULL) {
        result = CUDA_ERROR_NOT_FOUND;
    } else if (!is_done(event->recording)) {
        result = CUDA_ERROR_NOT_READY;
    } else {
        *time_ns = event->recording->time_ns;
    }
    return sim_leave(NULL, result);
}

CUresult cuEventSynchronize(CUevent handle) {
    sim_event *event = NULL;
    CUresult result = event_enter(SIM_cuEventSynchronize, "cuEventSynchronize", handle, &event);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    const sim_context *context = event->context; /* the event may go while we wait */
    sim_recording *recording = event->recording;
    if (recording != NULL) {
        recording->references++;
        sim_timed_wait(recording->time_ns);
        while (!is_done(recording)) {
            sim_wait();
        }
        sim_recording_drop(recording);
    }
    return sim_leave(context, CUDA_SUCCESS);
}

static CUresult events_elapsed(const sim_event *start, const sim_event *end, float *milliseconds) {
    unsigned untimed = (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING;
    if (untimed != 0 || start->context != end->context || start->recording == NULL ||
        end->recording == NULL) {
        return sim_refuse(CUDA_ERROR_INVALID_HANDLE,
                          "cuEventElapsedTime: not recorded, without time, or of two contexts");
    }
    if (!is_done(start->recording) || !is_done(end->recording)) {
        return CUDA_ERROR_NOT_READY;
    }
    int64_t difference = (int64_t)(end->recording->time_ns - start->recording->time_ns);
    *milliseconds = (float)difference / NS_PER_MS;
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
    sim_event *start = NULL;
    sim_event *end = NULL;
    CUresult result =
        event_enter(SIM_cuEventElapsedTime, "cuEventElapsedTime", start_handle, &start);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = event_get("cuEventElapsedTime", end_handle, &end);
    if (result == CUDA_SUCCESS && milliseconds == NULL) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuEventElapsedTime: NULL");
    }
    return sim_leave(NULL,
                     result == CUDA_SUCCESS ? events_elapsed(start, end, milliseconds) : result);
}
