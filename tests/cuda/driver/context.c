/* context.c - primary contexts, and the stack of current ones that every thread has. */
#include "sim.h"

enum { STACK_DEPTH = 32 };

static _Thread_local struct {
    uint64_t epoch;
    size_t depth;
    sim_context *contexts[STACK_DEPTH];
} stack;

/* Forget what was current before cusim_reset(). */
static void stack_refresh(void) {
    if (stack.epoch != sim.epoch) {
        stack.epoch = sim.epoch;
        stack.depth = 0;
    }
}

sim_context *sim_context_current(void) {
    stack_refresh();
    return stack.depth == 0 ? NULL : stack.contexts[stack.depth - 1];
}

sim_context *sim_context_get(CUcontext handle) {
    return sim_handle_get(SIM_KIND_CONTEXT, (uint64_t)(uintptr_t)handle);
}

static CUcontext handle_of(const sim_context *context) {
    return context == NULL ? NULL : (CUcontext)(uintptr_t)context->handle;
}

static CUresult device_get(const char *name, CUdevice device, sim_context **out) {
    if (device < 0 || device >= sim.options.devices) {
        return sim_refuse(CUDA_ERROR_INVALID_DEVICE, "%s: no device %d", name, device);
    }
    *out = &sim.devices[device].primary;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUresult result = sim_enter(SIM_cuDevicePrimaryCtxRetain, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_context *primary = NULL;
    result = device_get("cuDevicePrimaryCtxRetain", device, &primary);
    if (result == CUDA_SUCCESS && context == NULL) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuDevicePrimaryCtxRetain: NULL");
    }
    if (result == CUDA_SUCCESS && primary->sticky != CUDA_SUCCESS) {
        result = primary->sticky;
    }
    if (result == CUDA_SUCCESS) {
        primary->retained++;
        *context = handle_of(primary);
    }
    return sim_leave(NULL, result);
}

/* Everything that belongs to the context goes; its handle can be retained again. */
static void context_close(sim_context *context) {
    sim_context_wait(context);
    sim_streams_close(context);
    sim_events_close(context);
    sim_host_close(context);
    sim_memory_close(context);
    context->retained = 0;
    context->sticky = CUDA_SUCCESS;
    memset(context->peers, 0, sizeof context->peers);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CUresult result = sim_enter(SIM_cuDevicePrimaryCtxRelease_v2, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_context *primary = NULL;
    result = device_get("cuDevicePrimaryCtxRelease", device, &primary);
    if (result == CUDA_SUCCESS && primary->retained == 0) {
        result = sim_refuse(CUDA_ERROR_INVALID_CONTEXT,
                            "cuDevicePrimaryCtxRelease: device %d is not retained", device);
    } else if (result == CUDA_SUCCESS && primary->retained == 1) {
        context_close(primary);
    } else if (result == CUDA_SUCCESS) {
        primary->retained--;
    }
    return sim_leave(NULL, result);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    CUresult result = sim_enter(SIM_cuDevicePrimaryCtxReset_v2, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_context *primary = NULL;
    result = device_get("cuDevicePrimaryCtxReset", device, &primary);
    if (result == CUDA_SUCCESS && primary->retained > 0) {
        context_close(primary);
    }
    return sim_leave(NULL, result);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    CUresult result = sim_enter(SIM_cuDevicePrimaryCtxGetState, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_context *primary = NULL;
    result = device_get("cuDevicePrimaryCtxGetState", device, &primary);
    if (result == CUDA_SUCCESS && (flags == NULL || active == NULL)) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuDevicePrimaryCtxGetState: NULL");
    }
    if (result == CUDA_SUCCESS) {
        *flags = 0;
        *active = primary->retained > 0;
    }
    return sim_leave(NULL, result);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    CUresult result = sim_enter(SIM_cuCtxGetCurrent, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (context == NULL) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuCtxGetCurrent: NULL"));
    }
    *context = handle_of(sim_context_current());
    return sim_leave(NULL, CUDA_SUCCESS);
}

/* An active context, or an error. */
static CUresult active_get(const char *name, CUcontext handle, sim_context **out) {
    *out = sim_context_get(handle);
    if (*out == NULL || (*out)->retained == 0) {
        return sim_refuse(CUDA_ERROR_INVALID_CONTEXT, "%s: %p is no context", name, (void *)handle);
    }
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    CUresult result = sim_enter(SIM_cuCtxSetCurrent, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_context *wanted = NULL;
    stack_refresh();
    if (context == NULL) {
        stack.depth -= stack.depth > 0;
        return sim_leave(NULL, CUDA_SUCCESS);
    }
    result = active_get("cuCtxSetCurrent", context, &wanted);
    if (result == CUDA_SUCCESS) {
        stack.depth += stack.depth == 0;
        stack.contexts[stack.depth - 1] = wanted;
    }
    return sim_leave(NULL, result);
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    CUresult result = sim_enter(SIM_cuCtxPushCurrent_v2, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_context *wanted = NULL;
    stack_refresh();
    result = active_get("cuCtxPushCurrent", context, &wanted);
    if (result == CUDA_SUCCESS && stack.depth == STACK_DEPTH) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuCtxPushCurrent: too many");
    }
    if (result == CUDA_SUCCESS) {
        stack.contexts[stack.depth++] = wanted;
    }
    return sim_leave(NULL, result);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    CUresult result = sim_enter(SIM_cuCtxPopCurrent_v2, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    const sim_context *current = sim_context_current();
    if (current == NULL) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_CONTEXT, "cuCtxPopCurrent: empty"));
    }
    stack.depth--;
    if (context != NULL) {
        *context = handle_of(current);
    }
    return sim_leave(NULL, CUDA_SUCCESS);
}

CUresult cuCtxGetDevice(CUdevice *device) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuCtxGetDevice, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (device == NULL) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuCtxGetDevice: NULL"));
    }
    *device = context->device;
    return sim_leave(NULL, CUDA_SUCCESS);
}

CUresult cuCtxSynchronize(void) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuCtxSynchronize, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    for (const sim_stream *stream = context->streams; stream != NULL; stream = stream->next) {
        if (stream->capturing) {
            return sim_leave(NULL, sim_refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                                              "cuCtxSynchronize: a stream captures"));
        }
    }
    sim_context_wait(context);
    return sim_leave(context, CUDA_SUCCESS);
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuCtxEnablePeerAccess, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_context *other = NULL;
    result = active_get("cuCtxEnablePeerAccess", peer, &other);
    if (result == CUDA_SUCCESS && flags != 0) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuCtxEnablePeerAccess: flags");
    } else if (result == CUDA_SUCCESS && other == context) {
        result = sim_refuse(CUDA_ERROR_INVALID_CONTEXT, "cuCtxEnablePeerAccess: with itself");
    } else if (result == CUDA_SUCCESS && !sim.options.peers) {
        result = sim_refuse(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "cuCtxEnablePeerAccess");
    } else if (result == CUDA_SUCCESS && context->peers[other->device]) {
        result = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    } else if (result == CUDA_SUCCESS) {
        context->peers[other->device] = true;
    }
    return sim_leave(context, result);
}
