/* cuda_stream.c - the driver's streams and events, and copies between the device and the host. */
#include "backend/cuda.h"

/* ---- streams --------------------------------------------------------------------------------- */

sk_status sk__cuda_stream_create(void *self, sk_stream **out) {
    const sk__cuda *cuda = self;
    sk_stream *stream = NULL;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuStreamCreate(&stream, SK_CU_STREAM_NON_BLOCKING);
    }
    sk_status status = sk__cuda_leave(cuda, pushed, "cuStreamCreate", result);
    if (status == SK_OK) {
        *out = stream;
    }
    return status;
}

sk_status sk__cuda_stream_destroy(void *self, sk_stream *stream) {
    const sk__cuda *cuda = self;
    const char *what = "cuStreamSynchronize";
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuStreamSynchronize(stream);
    }
    if (result == SK_CU_SUCCESS || sk__cuda_is_sticky(result)) { /* no work runs any more */
        what = "cuStreamDestroy_v2";
        result = cuda->driver->cuStreamDestroy_v2(stream);
    }
    return sk__cuda_leave_released(cuda, pushed, what, result);
}

sk_status sk__cuda_stream_sync(void *self, sk_stream *stream) {
    const sk__cuda *cuda = self;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuStreamSynchronize(stream);
    }
    return sk__cuda_leave(cuda, pushed, "cuStreamSynchronize", result);
}

sk_status sk__cuda_stream_wait(void *self, sk_stream *stream, sk_event *event) {
    const sk__cuda *cuda = self;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuStreamWaitEvent(stream, event, 0);
    }
    return sk__cuda_leave(cuda, pushed, "cuStreamWaitEvent", result);
}

sk_status sk__cuda_stream_call(void *self, sk_stream *stream, void (*call)(void *),
                               void *argument) {
    const sk__cuda *cuda = self;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuLaunchHostFunc(stream, call, argument);
    }
    return sk__cuda_leave(cuda, pushed, "cuLaunchHostFunc", result);
}

/* ---- events ---------------------------------------------------------------------------------- */

sk_status sk__cuda_event_create(void *self, sk_event **out) {
    const sk__cuda *cuda = self;
    sk_event *event = NULL;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) { /* blocking: waiting threads would spin for milliseconds */
        result =
            cuda->driver->cuEventCreate(&event, SK_CU_EVENT_NO_TIMING | SK_CU_EVENT_BLOCKING_SYNC);
    }
    sk_status status = sk__cuda_leave(cuda, pushed, "cuEventCreate", result);
    if (status == SK_OK) {
        *out = event;
    }
    return status;
}

sk_status sk__cuda_event_destroy(void *self, sk_event *event) {
    const sk__cuda *cuda = self;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuEventDestroy_v2(event);
    }
    return sk__cuda_leave_released(cuda, pushed, "cuEventDestroy_v2", result);
}

sk_status sk__cuda_event_record(void *self, sk_event *event, sk_stream *stream) {
    const sk__cuda *cuda = self;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuEventRecord(event, stream);
    }
    return sk__cuda_leave(cuda, pushed, "cuEventRecord", result);
}

sk_status sk__cuda_event_query(void *self, sk_event *event) {
    const sk__cuda *cuda = self;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuEventQuery(event);
    }
    return sk__cuda_leave(cuda, pushed, "cuEventQuery", result);
}

sk_status sk__cuda_event_sync(void *self, sk_event *event) {
    const sk__cuda *cuda = self;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuEventSynchronize(event);
    }
    return sk__cuda_leave(cuda, pushed, "cuEventSynchronize", result);
}

/* ---- copies ---------------------------------------------------------------------------------- */

static int piece_start(const void *self, sk__copy *piece) {
    const sk__cuda *cuda = self;
    void *to = piece->to;
    const void *from = piece->from;
    switch (piece->kind) {
    case SK_HOST_TO_DEVICE:
        piece->what = "cuMemcpyHtoDAsync_v2";
        return cuda->driver->cuMemcpyHtoDAsync_v2((uintptr_t)to, from, piece->nbytes,
                                                  piece->stream);
    case SK_DEVICE_TO_HOST:
        piece->what = "cuMemcpyDtoHAsync_v2";
        return cuda->driver->cuMemcpyDtoHAsync_v2(to, (uintptr_t)from, piece->nbytes,
                                                  piece->stream);
    case SK_DEVICE_TO_DEVICE:
        break;
    }
    piece->what = "cuMemcpyDtoDAsync_v2";
    return cuda->driver->cuMemcpyDtoDAsync_v2((uintptr_t)to, (uintptr_t)from, piece->nbytes,
                                              piece->stream);
}

static void stream_settle(const void *self, sk_stream *stream) {
    const sk__cuda *cuda = self;
    (void)cuda->driver->cuStreamSynchronize(stream);
}

/* The driver refuses a copy that crosses from one locked piece of host memory into the next. */
sk_status sk__cuda_copy_async(void *self, void *to, const void *from, size_t nbytes,
                              sk_copy_kind kind, sk_stream *stream) {
    static const sk__copier copier = {.start = piece_start, .settle = stream_settle};
    sk__cuda *cuda = self;
    sk__copy copy = {
        .to = to, .from = from, .nbytes = nbytes, .kind = kind, .stream = stream, .what = "a copy"};
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = sk__pieces_copy(&cuda->pieces, &copier, cuda, &copy);
    }
    return sk__cuda_leave(cuda, pushed, copy.what, result);
}
