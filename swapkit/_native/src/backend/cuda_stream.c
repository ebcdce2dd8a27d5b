/* cuda_stream.c - the driver's streams and events, and copies between the device and the host. */
#include "backend/cuda.h"

/* ---- streams --------------------------------------------------------------------------------- */

static sk_status stream_create(void *self, sk_stream **out) {
    sk_stream *stream = NULL;
    SK_CUDA_VISIT(self, sk__visit_leave, cuStreamCreate, (&stream, SK_CU_STREAM_NON_BLOCKING),
                  *out = stream);
}

static sk__cu_result stream_end(const sk__cuda *cuda, sk_stream *stream, const char **what) {
    sk__cu_result result = cuda->driver->cuStreamSynchronize(stream);
    if (result == SK_CU_SUCCESS || sk__cuda_is_sticky(result)) { /* no work runs any more */
        *what = "cuStreamDestroy_v2";
        result = cuda->driver->cuStreamDestroy_v2(stream);
    }
    return result;
}

static sk_status stream_destroy(void *self, sk_stream *stream) {
    const char *what = "cuStreamSynchronize";
    SK__VISIT(&sk__cuda_visitor, self, sk__visit_leave_released, what,
              stream_end(self, stream, &what), );
}

static sk_status stream_sync(void *self, sk_stream *stream) {
    SK_CUDA_VISIT(self, sk__visit_leave, cuStreamSynchronize, (stream), );
}

static sk_status stream_wait(void *self, sk_stream *stream, sk_event *event) {
    SK_CUDA_VISIT(self, sk__visit_leave, cuStreamWaitEvent, (stream, event, 0), );
}

static sk_status stream_call(void *self, sk_stream *stream, void (*call)(void *), void *argument) {
    SK_CUDA_VISIT(self, sk__visit_leave, cuLaunchHostFunc, (stream, call, argument), );
}

/* ---- events ---------------------------------------------------------------------------------- */

/* Blocking: waiting threads would spin for milliseconds. */
static sk_status event_create(void *self, sk_event **out) {
    sk_event *event = NULL;
    SK_CUDA_VISIT(self, sk__visit_leave, cuEventCreate,
                  (&event, SK_CU_EVENT_NO_TIMING | SK_CU_EVENT_BLOCKING_SYNC), *out = event);
}

static sk_status event_destroy(void *self, sk_event *event) {
    SK_CUDA_VISIT(self, sk__visit_leave_released, cuEventDestroy_v2, (event), );
}

static sk_status event_record(void *self, sk_event *event, sk_stream *stream) {
    SK_CUDA_VISIT(self, sk__visit_leave, cuEventRecord, (event, stream), );
}

static sk_status event_query(void *self, sk_event *event) {
    SK_CUDA_VISIT(self, sk__visit_leave, cuEventQuery, (event), );
}

static sk_status event_sync(void *self, sk_event *event) {
    SK_CUDA_VISIT(self, sk__visit_leave, cuEventSynchronize, (event), );
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
static sk_status copy_async(void *self, void *to, const void *from, size_t nbytes,
                            sk_copy_kind kind, sk_stream *stream) {
    static const sk__copier copier = {.start = piece_start, .settle = stream_settle};
    sk__cuda *cuda = self;
    sk__copy copy = {
        .to = to, .from = from, .nbytes = nbytes, .kind = kind, .stream = stream, .what = "a copy"};
    SK__VISIT(&sk__cuda_visitor, cuda, sk__visit_leave, copy.what,
              sk__pieces_copy(&cuda->pieces, &copier, cuda, &copy), );
}

void sk__cuda_stream_ops(sk_backend_ops *ops) {
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
