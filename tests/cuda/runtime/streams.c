/* Streams, events and functions of the host that run in a stream. */
#include "runtime.h"
#include "timed.h"

#include <stdlib.h>

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    RT_CALL(cuStreamCreateWithPriority(out, flags, priority));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *out) {
    return cudaStreamCreateWithFlags(out, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { RT_CALL(cuStreamDestroy(stream)); }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    RT_CALL_IN_ORDER(cuStreamSynchronize(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) { RT_CALL_IN_ORDER(cuStreamQuery(stream)); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    RT_CALL_IN_ORDER(cuStreamWaitEvent(stream, event, flags));
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    CUresult (*ask)(CUstream, int *) =
        (CUresult (*)(CUstream, int *))(uintptr_t)rt_driver_symbol("cuStreamGetPriority");
    return ask == NULL ? cudaSuccess : rt_done(ask(stream, priority));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    CUstreamCaptureStatus found = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = rt_enter();
    if (result == CUDA_SUCCESS) {
        result = rt_driver.cuStreamIsCapturing(stream, &found);
    }
    *status = (enum cudaStreamCaptureStatus)found;
    return rt_done(result);
}

/* No more is known of a capture than whether there is one. The older versions of this function have
 * fewer results after the first two. */
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *ndependencies) {
    (void)graph;
    (void)dependencies;
    (void)edges;
    (void)ndependencies;
    if (id != NULL) {
        *id = 0;
    }
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    static _Thread_local enum cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode former = current;
    current = *mode;
    *mode = former;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    RT_CALL(cuEventCreate(out, flags));
}

cudaError_t cudaEventCreate(cudaEvent_t *out) {
    return cudaEventCreateWithFlags(out, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { RT_CALL(cuEventDestroy(event)); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    RT_CALL_IN_ORDER(cuEventRecord(event, stream));
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)flags; /* they matter to captures only */
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { RT_CALL_IN_ORDER(cuEventQuery(event)); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) { RT_CALL_IN_ORDER(cuEventSynchronize(event)); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t until) {
    RT_CALL(cuEventElapsedTime(milliseconds, from, until));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    RT_CALL_IN_ORDER(cuLaunchHostFunc(stream, function, argument));
}

struct callback {
    cudaStreamCallback_t function;
    void *argument;
    cudaStream_t stream;
};

static void call_back(void *argument) {
    struct callback *callback = argument;
    callback->function(callback->stream, cudaSuccess, callback->argument);
    free(callback);
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                  void *argument, unsigned flags) {
    (void)flags;
    struct callback *callback = malloc(sizeof(*callback));
    if (callback == NULL) {
        return rt_done(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *callback = (struct callback){.function = function, .argument = argument, .stream = stream};
    cudaError_t error = cudaLaunchHostFunc(stream, call_back, callback);
    if (error != cudaSuccess) {
        free(callback);
    }
    return error;
}
