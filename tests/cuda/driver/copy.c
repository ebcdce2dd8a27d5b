/* copy.c - copies and fills: what is checked at the call, and what waits.
 *
 *   pinned host memory     used by the stream when it gets there
 *   pageable, as source    read before the call returns
 *   pageable, as target    written before the call returns
 *
 * A host range that is only partly pinned is refused, whichever end it is.
 */
#include <stdlib.h>

#include "sim.h"

/* Smaller ones are numbers that the program reads. */
enum { LEAST_SWAPPED = 4096 };

typedef enum side { SIDE_ANY, SIDE_DEVICE, SIDE_HOST } side;

typedef struct copy_end {
    sim_range range;
    side must_be;
    int device; /* that does the copy; -1: the stream's */
} copy_end;

typedef struct copy_request {
    const char *name;
    copy_end to, from;
    bool synchronous;
} copy_request;

/* What the checks found. */
typedef struct copy_plan {
    sim_stream *stream;
    side to, from;
    bool to_pinned, from_pinned;
} copy_plan;

static CUresult host_end_check(const char *name, const copy_end *end, bool *pinned) {
    const sim_range *range = &end->range;
    bool legal = true;
    *pinned = sim_host_pinned(range, &legal);
    if (!legal) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE,
                          "%s: %#zx, %zu bytes: partly pinned, or in two registrations", name,
                          range->base, range->size);
    }
    if (!*pinned && !sim_host_mapped(range->base, range->size)) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %#zx is not host memory", name,
                          range->base);
    }
    return CUDA_SUCCESS;
}

static CUresult end_check(const copy_request *request, const copy_plan *plan, bool write,
                          side *found) {
    const copy_end *end = write ? &request->to : &request->from;
    const sim_range *range = &end->range;
    *found = sim_in_window(range->base, range->size) ? SIDE_DEVICE : SIDE_HOST;
    if (range->size > UINTPTR_MAX - range->base ||
        (end->must_be != SIDE_ANY && *found != end->must_be)) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "%s: the %s %#zx is%s device memory",
                          request->name, write ? "target" : "source", range->base,
                          *found == SIDE_DEVICE ? "" : " not");
    }
    if (*found == SIDE_HOST) {
        return CUDA_SUCCESS;
    }
    int device = end->device < 0 ? plan->stream->context->device : end->device;
    const char *problem = sim_access_problem(range, device, write, true);
    if (problem != NULL) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "%s: the %s %#zx, %zu bytes, %s", request->name,
                          write ? "target" : "source", range->base, range->size, problem);
    }
    return CUDA_SUCCESS;
}

static CUresult copy_check(sim_context *context, CUstream handle, const copy_request *request,
                           copy_plan *plan) {
    CUresult result = sim_stream_get(context, handle, &plan->stream);
    if (result != CUDA_SUCCESS || request->to.range.size == 0) {
        return result;
    }
    result = end_check(request, plan, true, &plan->to);
    if (result == CUDA_SUCCESS) {
        result = end_check(request, plan, false, &plan->from);
    }
    if (result == CUDA_SUCCESS && plan->to == SIDE_HOST) {
        result = host_end_check(request->name, &request->to, &plan->to_pinned);
    }
    if (result == CUDA_SUCCESS && plan->from == SIDE_HOST) {
        result = host_end_check(request->name, &request->from, &plan->from_pinned);
    }
    return result;
}

static sim_direction direction_of(const copy_plan *plan) {
    if (plan->to == plan->from) {
        return SIM_D2D;
    }
    return plan->to == SIDE_DEVICE ? SIM_H2D : SIM_D2H;
}

static void *bytes_of(const sim_range *range, side where) {
    return where == SIDE_DEVICE ? sim_shadow_of(range->base) : (void *)range->base;
}

/* Takes `staging`, the source's bytes if they were read already. */
static CUresult copy_queue(const copy_request *request, const copy_plan *plan, void *staging) {
    sim_task *task = sim_task_new(SIM_TASK_COPY, 2);
    if (task == NULL) {
        free(staging);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const sim_range *to = &request->to.range;
    const sim_range *from = &request->from.range;
    if (sim_range_overlaps(to, from->base, from->size)) {
        sim_problem(NULL, CUDA_SUCCESS, "%s: source %#zx and target %#zx overlap", request->name,
                    from->base, to->base);
    }
    task->as.copy.to = bytes_of(to, plan->to);
    task->as.copy.from = staging != NULL ? staging : bytes_of(from, plan->from);
    task->as.copy.staging = staging;
    task->as.copy.size = to->size;
    task->as.copy.direction = direction_of(plan);
    task->as.copy.pageable = plan->to == SIDE_HOST && !plan->to_pinned;
    task->uses[0] = *to;
    task->use_count = staging != NULL ? 1 : 2;
    task->uses[1] = *from;
    sim_task_queue(plan->stream, task);
    return CUDA_SUCCESS;
}

/* Device to device never waits, and a source that was read already need not. */
static bool copy_waits(const copy_request *request, const copy_plan *plan, bool staged) {
    if (plan->to == SIDE_HOST) {
        return request->synchronous || !plan->to_pinned || plan->from == SIDE_HOST;
    }
    return request->synchronous && plan->from == SIDE_HOST && !staged;
}

/* On the virtual GPU: no byte moves. All of the device's memory reads as zeros, so that what is
 * read twice is the same. Pinned memory for tensors to come back from is not touched. */
static CUresult copy_timed(const copy_request *request, const copy_plan *plan) {
    const sim_range *to = &request->to.range;
    bool staged = plan->from == SIDE_HOST && plan->to == SIDE_DEVICE && !plan->from_pinned;
    sim_timed_cost(CUSIM_COST_COPY);
    if (staged) {
        sim_timed_stage(to->size);
    }
    CUresult result = copy_queue(request, plan, NULL);
    if (result == CUDA_SUCCESS && plan->to == SIDE_HOST && plan->from == SIDE_DEVICE &&
        (!plan->to_pinned || to->size <= LEAST_SWAPPED)) {
        sim_host_zero(to);
    }
    if (result == CUDA_SUCCESS && copy_waits(request, plan, staged)) {
        result = sim_stream_wait(plan->stream);
    }
    return result;
}

static CUresult copy_inside(sim_context *context, CUstream handle, const copy_request *request) {
    copy_plan plan = {0};
    void *staging = NULL;
    size_t size = request->to.range.size;
    CUresult result = copy_check(context, handle, request, &plan);
    if (result != CUDA_SUCCESS || size == 0) {
        return result;
    }
    if (sim_is_timed()) {
        return copy_timed(request, &plan);
    }
    if (plan.from == SIDE_HOST && plan.to == SIDE_DEVICE && !plan.from_pinned) {
        (void)pthread_mutex_unlock(&sim.lock);
        staging = malloc(size);
        if (staging != NULL) {
            memcpy(staging, (const void *)request->from.range.base, size);
        }
        (void)pthread_mutex_lock(&sim.lock);
        result = staging == NULL ? CUDA_ERROR_OUT_OF_MEMORY
                                 : copy_check(context, handle, request, &plan);
        if (result != CUDA_SUCCESS) {
            free(staging);
            return result;
        }
    }
    result = copy_queue(request, &plan, staging);
    if (result == CUDA_SUCCESS && copy_waits(request, &plan, staging != NULL)) {
        result = sim_stream_wait(plan.stream);
    }
    return result;
}

static CUresult copy(sim_function function, CUstream stream, const copy_request *request) {
    sim_context *context = NULL;
    CUresult result = sim_enter(function, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    return sim_leave(context, copy_inside(context, stream, request));
}

static copy_end end_of(CUdeviceptr address, size_t size, side must_be) {
    return (copy_end){.range = {.base = address, .size = size}, .must_be = must_be, .device = -1};
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    copy_request request = {.name = "cuMemcpyAsync",
                            .to = end_of(to, size, SIDE_ANY),
                            .from = end_of(from, size, SIDE_ANY)};
    return copy(SIM_cuMemcpyAsync, stream, &request);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    copy_request request = {.name = "cuMemcpyHtoDAsync",
                            .to = end_of(to, size, SIDE_DEVICE),
                            .from = end_of((uintptr_t)from, size, SIDE_HOST)};
    return copy(SIM_cuMemcpyHtoDAsync_v2, stream, &request);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    copy_request request = {.name = "cuMemcpyDtoHAsync",
                            .to = end_of((uintptr_t)to, size, SIDE_HOST),
                            .from = end_of(from, size, SIDE_DEVICE)};
    return copy(SIM_cuMemcpyDtoHAsync_v2, stream, &request);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    copy_request request = {.name = "cuMemcpyDtoDAsync",
                            .to = end_of(to, size, SIDE_DEVICE),
                            .from = end_of(from, size, SIDE_DEVICE)};
    return copy(SIM_cuMemcpyDtoDAsync_v2, stream, &request);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    copy_request request = {.name = "cuMemcpyHtoD",
                            .to = end_of(to, size, SIDE_DEVICE),
                            .from = end_of((uintptr_t)from, size, SIDE_HOST),
                            .synchronous = true};
    return copy(SIM_cuMemcpyHtoD_v2, NULL, &request);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    copy_request request = {.name = "cuMemcpyDtoH",
                            .to = end_of((uintptr_t)to, size, SIDE_HOST),
                            .from = end_of(from, size, SIDE_DEVICE),
                            .synchronous = true};
    return copy(SIM_cuMemcpyDtoH_v2, NULL, &request);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    copy_request request = {.name = "cuMemcpyDtoD",
                            .to = end_of(to, size, SIDE_DEVICE),
                            .from = end_of(from, size, SIDE_DEVICE),
                            .synchronous = true};
    return copy(SIM_cuMemcpyDtoD_v2, NULL, &request);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                           CUcontext from_context, size_t size, CUstream stream) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuMemcpyPeerAsync, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    const sim_context *target = sim_context_get(to_context);
    const sim_context *source = sim_context_get(from_context);
    if (target == NULL || source == NULL || target->retained == 0 || source->retained == 0) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_CONTEXT,
                                          "cuMemcpyPeerAsync: a context that does not exist"));
    }
    copy_request request = {.name = "cuMemcpyPeerAsync",
                            .to = end_of(to, size, SIDE_DEVICE),
                            .from = end_of(from, size, SIDE_DEVICE)};
    request.to.device = target->device;
    request.from.device = source->device;
    return sim_leave(context, copy_inside(context, stream, &request));
}

static CUresult fill(sim_context *context, CUstream handle, const sim_range *range,
                     unsigned char value) {
    sim_stream *stream = NULL;
    CUresult result = sim_stream_get(context, handle, &stream);
    if (result != CUDA_SUCCESS || range->size == 0) {
        return result;
    }
    const char *problem = sim_access_problem(range, stream->context->device, true, true);
    if (range->size > UINTPTR_MAX - range->base || problem != NULL) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemsetD8: %#zx, %zu bytes, %s", range->base,
                          range->size, problem);
    }
    sim_task *task = sim_task_new(SIM_TASK_FILL, 1);
    if (task == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    task->as.fill.to = sim_shadow_of(range->base);
    task->as.fill.size = range->size;
    task->as.fill.value = value;
    task->uses[0] = *range;
    sim_task_queue(stream, task);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream stream) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuMemsetD8Async, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_range range = {.base = to, .size = size};
    return sim_leave(context, fill(context, stream, &range, value));
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t size) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuMemsetD8_v2, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_range range = {.base = to, .size = size};
    return sim_leave(context, fill(context, NULL, &range, value));
}
