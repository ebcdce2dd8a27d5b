/* control.c - what tests do to streams and contexts, and what they ask at the end. */
#include <stdlib.h>

#include "sim.h"

/* Take the lock and find a stream as a driver call would, without counting one. */
static CUresult control_enter(CUstream handle, sim_context **context, sim_stream **stream) {
    if (atomic_load(&sim.forked) || !atomic_load(&sim.initialised)) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    (void)pthread_mutex_lock(&sim.lock);
    *context = sim_context_current();
    if (*context == NULL || (*context)->retained == 0) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_CONTEXT, "no context is current"));
    }
    CUresult result = sim_stream_get(*context, handle, stream);
    return result == CUDA_SUCCESS ? result : sim_leave(NULL, result);
}

void cusim_hold(bool hold) {
    (void)pthread_mutex_lock(&sim.lock);
    sim.hold = hold;
    sim_notify();
    (void)pthread_mutex_unlock(&sim.lock);
}

CUresult cusim_delay_stream(CUstream handle, uint64_t nanoseconds) {
    sim_context *context = NULL;
    sim_stream *stream = NULL;
    CUresult result = control_enter(handle, &context, &stream);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_task *task = sim_task_new(SIM_TASK_SLEEP, 0);
    if (task == NULL) {
        return sim_leave(NULL, CUDA_ERROR_OUT_OF_MEMORY);
    }
    task->as.sleep_ns = nanoseconds;
    sim_task_queue(stream, task);
    return sim_leave(NULL, CUDA_SUCCESS);
}

CUresult cusim_capture(CUstream handle, bool active) {
    sim_context *context = NULL;
    sim_stream *stream = NULL;
    CUresult result = control_enter(handle, &context, &stream);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    stream->capturing = active;
    return sim_leave(NULL, CUDA_SUCCESS);
}

static CUresult use_check(const cusim_use *use, int device) {
    sim_range range = {.base = use->address, .size = use->size};
    bool legal = true;
    if (range.size == 0 || range.size > UINTPTR_MAX - range.base) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cusim_run: %zu bytes", range.size);
    }
    if (!sim_in_window(range.base, range.size)) {
        if (!sim_host_pinned(&range, &legal)) {
            return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cusim_run: %#zx is not pinned",
                              range.base);
        }
        return CUDA_SUCCESS;
    }
    const char *problem = sim_access_problem(&range, device, use->write, false);
    if (problem != NULL) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cusim_run: %#zx, %zu bytes, %s", range.base,
                          range.size, problem);
    }
    return CUDA_SUCCESS;
}

CUresult cusim_run(CUstream handle, cusim_kernel *kernel, void *arg, const cusim_use *uses,
                   size_t count) {
    sim_context *context = NULL;
    sim_stream *stream = NULL;
    CUresult result = control_enter(handle, &context, &stream);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (stream->context != context) {
        result = sim_refuse(CUDA_ERROR_INVALID_HANDLE, "cusim_run: stream of another context");
    }
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++) {
        result = use_check(&uses[i], context->device);
    }
    sim_task *task = result == CUDA_SUCCESS ? sim_task_new(SIM_TASK_KERNEL, count) : NULL;
    if (task != NULL) {
        task->as.kernel.kernel = kernel;
        task->as.kernel.arg = arg;
        for (size_t i = 0; i < count; i++) {
            task->uses[i] = (sim_range){.base = uses[i].address, .size = uses[i].size};
        }
        sim_task_queue(stream, task);
    } else if (result == CUDA_SUCCESS) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return sim_leave(NULL, result);
}

void cusim_break(CUresult result) {
    (void)pthread_mutex_lock(&sim.lock);
    for (int i = 0; i < sim.options.devices; i++) {
        if (sim.devices[i].primary.retained > 0) {
            sim.devices[i].primary.sticky = result;
        }
    }
    sim_notify();
    (void)pthread_mutex_unlock(&sim.lock);
}

static void report_pinned(cusim_open *open) {
    for (size_t i = 0; i < sim.pinned.count; i++) {
        const sim_pinned *pinned = (const sim_pinned *)sim.pinned.items[i];
        if (pinned->registered) {
            open->registrations++;
            open->registration_bytes += pinned->range.size;
        } else {
            open->host_allocations++;
            open->host_allocation_bytes += pinned->range.size;
        }
    }
}

static void report_contexts(cusim_open *open) {
    for (int i = 0; i < sim.options.devices; i++) {
        const sim_context *context = &sim.devices[i].primary;
        open->contexts += context->retained;
        for (const sim_stream *stream = context->streams; stream != NULL; stream = stream->next) {
            open->tasks += stream->queued - stream->done;
        }
    }
}

void cusim_report(cusim_open *open) {
    (void)pthread_mutex_lock(&sim.lock);
    *open = (cusim_open){
        .streams = sim_handle_count(SIM_KIND_STREAM),
        .events = sim_handle_count(SIM_KIND_EVENT),
        .allocations = sim.allocations.count,
        .allocation_bytes = sim_table_bytes(&sim.allocations),
        .handles = sim.physical_count,
        .handle_bytes = sim.physical_bytes,
        .reservations = sim.reservations.count,
        .reservation_bytes = sim_table_bytes(&sim.reservations),
        .mappings = sim.mappings.count,
        .mapping_bytes = sim_table_bytes(&sim.mappings),
        .problems = sim.problems,
        .exit_calls = atomic_load(&sim.exit_calls),
    };
    report_contexts(open);
    report_pinned(open);
    (void)pthread_mutex_unlock(&sim.lock);
}
