/* ascend_stream.c - ACL's streams and events, and copies between the device and the host. */
#include "backend/ascend.h"

/* ---- streams --------------------------------------------------------------------------------- */

sk__acl_error sk__ascend_stream_make(const sk__ascend *ascend, sk_stream **out) {
    return ascend->runtime->aclrtCreateStreamWithConfig(
        out, 0, SK_ACL_STREAM_FAST_LAUNCH | SK_ACL_STREAM_FAST_SYNC);
}

static sk_status stream_create(void *self, sk_stream **out) {
    sk_stream *stream = NULL;
    SK__VISIT(&sk__ascend_visitor, self, sk__visit_leave, "aclrtCreateStreamWithConfig",
              sk__ascend_stream_make(self, &stream), *out = stream);
}

static sk__acl_error stream_end(const sk__ascend *ascend, sk_stream *stream, const char **what) {
    sk__acl_error error = ascend->runtime->aclrtSynchronizeStream(stream);
    if (error == SK_ACL_SUCCESS || sk__ascend_is_sticky(error)) { /* no work runs any more */
        *what = "aclrtDestroyStream";
        error = ascend->runtime->aclrtDestroyStream(stream);
    }
    return error;
}

static sk_status stream_destroy(void *self, sk_stream *stream) {
    const char *what = "aclrtSynchronizeStream";
    SK__VISIT(&sk__ascend_visitor, self, sk__visit_leave_released, what,
              stream_end(self, stream, &what), );
}

static sk_status stream_sync(void *self, sk_stream *stream) {
    SK_ASCEND_VISIT(self, sk__visit_leave, aclrtSynchronizeStream, (stream), );
}

static sk_status stream_wait(void *self, sk_stream *stream, sk_event *event) {
    SK_ASCEND_VISIT(self, sk__visit_leave, aclrtStreamWaitEvent, (stream, event), );
}

static sk_status stream_call(void *self, sk_stream *stream, void (*call)(void *), void *argument) {
    SK_ASCEND_VISIT(self, sk__visit_leave, aclrtLaunchHostFunc, (stream, call, argument), );
}

/* ---- events ---------------------------------------------------------------------------------- */

/* ACL does not say what waiting for an event does that was never recorded, and its status is then
 * not "complete". So a new event is recorded at once, where nothing is queued before it. */
static sk__acl_error event_make(const sk__ascend *ascend, sk_event **out, const char **what) {
    *what = "aclrtCreateEventExWithFlag";
    sk__acl_error error = ascend->runtime->aclrtCreateEventExWithFlag(out, SK_ACL_EVENT_SYNC);
    if (error != SK_ACL_SUCCESS) {
        return error;
    }
    *what = "aclrtRecordEvent";
    error = ascend->runtime->aclrtRecordEvent(*out, ascend->idle);
    if (error == SK_ACL_SUCCESS) {
        *what = "aclrtSynchronizeEvent";
        error = ascend->runtime->aclrtSynchronizeEvent(*out);
    }
    if (error != SK_ACL_SUCCESS) {
        (void)ascend->runtime->aclrtDestroyEvent(*out);
    }
    return error;
}

static sk_status event_create(void *self, sk_event **out) {
    const char *what = "aclrtCreateEventExWithFlag";
    sk_event *event = NULL;
    SK__VISIT(&sk__ascend_visitor, self, sk__visit_leave, what, event_make(self, &event, &what),
              *out = event);
}

static sk_status event_destroy(void *self, sk_event *event) {
    SK_ASCEND_VISIT(self, sk__visit_leave_released, aclrtDestroyEvent, (event), );
}

static sk_status event_record(void *self, sk_event *event, sk_stream *stream) {
    SK_ASCEND_VISIT(self, sk__visit_leave, aclrtRecordEvent, (event, stream), );
}

static sk_status event_query(void *self, sk_event *event) {
    int found = SK_ACL_EVENT_RECORDED;
    SK_ASCEND_VISIT(self, sk__visit_leave, aclrtQueryEventStatus, (event, &found),
                    return found == SK_ACL_EVENT_RECORDED ? SK_OK : SK_NOT_READY);
}

static sk_status event_sync(void *self, sk_event *event) {
    SK_ASCEND_VISIT(self, sk__visit_leave, aclrtSynchronizeEvent, (event), );
}

/* ---- copies ---------------------------------------------------------------------------------- */

static int piece_start(const void *self, sk__copy *piece) {
    static const int kinds[] = {[SK_HOST_TO_DEVICE] = SK_ACL_HOST_TO_DEVICE,
                                [SK_DEVICE_TO_HOST] = SK_ACL_DEVICE_TO_HOST,
                                [SK_DEVICE_TO_DEVICE] = SK_ACL_DEVICE_TO_DEVICE};
    const sk__ascend *ascend = self;
    piece->what = "aclrtMemcpyAsync";
    return ascend->runtime->aclrtMemcpyAsync(piece->to, piece->nbytes, piece->from, piece->nbytes,
                                             kinds[piece->kind], piece->stream);
}

static void stream_settle(const void *self, sk_stream *stream) {
    const sk__ascend *ascend = self;
    (void)ascend->runtime->aclrtSynchronizeStream(stream);
}

static sk_status copy_async(void *self, void *to, const void *from, size_t nbytes,
                            sk_copy_kind kind, sk_stream *stream) {
    static const sk__copier copier = {.start = piece_start, .settle = stream_settle};
    sk__ascend *ascend = self;
    sk__copy copy = {
        .to = to, .from = from, .nbytes = nbytes, .kind = kind, .stream = stream, .what = "a copy"};
    SK__VISIT(&sk__ascend_visitor, ascend, sk__visit_leave, copy.what,
              sk__pieces_copy(&ascend->pieces, &copier, ascend, &copy), );
}

void sk__ascend_stream_ops(const sk__ascend *ascend, sk_backend_ops *ops) {
    ops->stream_create = stream_create;
    ops->stream_destroy = stream_destroy;
    ops->stream_sync = stream_sync;
    ops->stream_wait = stream_wait;
    ops->stream_call = ascend->runtime->aclrtLaunchHostFunc != NULL ? stream_call : NULL;
    ops->event_create = event_create;
    ops->event_destroy = event_destroy;
    ops->event_record = event_record;
    ops->event_query = event_query;
    ops->event_sync = event_sync;
    ops->copy_async = copy_async;
}
