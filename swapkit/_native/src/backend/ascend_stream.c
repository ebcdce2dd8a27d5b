/* ascend_stream.c - ACL's streams and events, and copies between the device and the host. */
#include "backend/ascend.h"

/* ---- streams --------------------------------------------------------------------------------- */

sk__acl_error sk__ascend_stream_make(const sk__ascend *ascend, sk_stream **out) {
    return ascend->runtime->aclrtCreateStreamWithConfig(
        out, 0, SK_ACL_STREAM_FAST_LAUNCH | SK_ACL_STREAM_FAST_SYNC);
}

sk_status sk__ascend_stream_create(void *self, sk_stream **out) {
    const sk__ascend *ascend = self;
    sk_stream *stream = NULL;
    void *undo = NULL;
    sk__acl_error error = sk__ascend_enter(ascend, &undo);
    if (error == SK_ACL_SUCCESS) {
        error = sk__ascend_stream_make(ascend, &stream);
    }
    sk_status status = sk__ascend_leave(ascend, undo, "aclrtCreateStreamWithConfig", error);
    if (status == SK_OK) {
        *out = stream;
    }
    return status;
}

sk_status sk__ascend_stream_destroy(void *self, sk_stream *stream) {
    const sk__ascend *ascend = self;
    const char *what = "aclrtSynchronizeStream";
    void *undo = NULL;
    sk__acl_error error = sk__ascend_enter(ascend, &undo);
    if (error == SK_ACL_SUCCESS) {
        error = ascend->runtime->aclrtSynchronizeStream(stream);
    }
    if (error == SK_ACL_SUCCESS || sk__ascend_is_sticky(error)) { /* no work runs any more */
        what = "aclrtDestroyStream";
        error = ascend->runtime->aclrtDestroyStream(stream);
    }
    return sk__ascend_leave_released(ascend, undo, what, error);
}

sk_status sk__ascend_stream_sync(void *self, sk_stream *stream) {
    const sk__ascend *ascend = self;
    SK_ASCEND_VISIT(ascend, sk__ascend_leave, aclrtSynchronizeStream, (stream));
}

sk_status sk__ascend_stream_wait(void *self, sk_stream *stream, sk_event *event) {
    const sk__ascend *ascend = self;
    SK_ASCEND_VISIT(ascend, sk__ascend_leave, aclrtStreamWaitEvent, (stream, event));
}

sk_status sk__ascend_stream_call(void *self, sk_stream *stream, void (*call)(void *),
                                 void *argument) {
    const sk__ascend *ascend = self;
    SK_ASCEND_VISIT(ascend, sk__ascend_leave, aclrtLaunchHostFunc, (stream, call, argument));
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

sk_status sk__ascend_event_create(void *self, sk_event **out) {
    const sk__ascend *ascend = self;
    const char *what = "aclrtCreateEventExWithFlag";
    sk_event *event = NULL;
    void *undo = NULL;
    sk__acl_error error = sk__ascend_enter(ascend, &undo);
    if (error == SK_ACL_SUCCESS) {
        error = event_make(ascend, &event, &what);
    }
    sk_status status = sk__ascend_leave(ascend, undo, what, error);
    if (status == SK_OK) {
        *out = event;
    }
    return status;
}

sk_status sk__ascend_event_destroy(void *self, sk_event *event) {
    const sk__ascend *ascend = self;
    SK_ASCEND_VISIT(ascend, sk__ascend_leave_released, aclrtDestroyEvent, (event));
}

sk_status sk__ascend_event_record(void *self, sk_event *event, sk_stream *stream) {
    const sk__ascend *ascend = self;
    SK_ASCEND_VISIT(ascend, sk__ascend_leave, aclrtRecordEvent, (event, stream));
}

sk_status sk__ascend_event_query(void *self, sk_event *event) {
    const sk__ascend *ascend = self;
    int found = SK_ACL_EVENT_RECORDED;
    void *undo = NULL;
    sk__acl_error error = sk__ascend_enter(ascend, &undo);
    if (error == SK_ACL_SUCCESS) {
        error = ascend->runtime->aclrtQueryEventStatus(event, &found);
    }
    sk_status status = sk__ascend_leave(ascend, undo, "aclrtQueryEventStatus", error);
    return status == SK_OK && found != SK_ACL_EVENT_RECORDED ? SK_NOT_READY : status;
}

sk_status sk__ascend_event_sync(void *self, sk_event *event) {
    const sk__ascend *ascend = self;
    SK_ASCEND_VISIT(ascend, sk__ascend_leave, aclrtSynchronizeEvent, (event));
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

sk_status sk__ascend_copy_async(void *self, void *to, const void *from, size_t nbytes,
                                sk_copy_kind kind, sk_stream *stream) {
    static const sk__copier copier = {.start = piece_start, .settle = stream_settle};
    sk__ascend *ascend = self;
    sk__copy copy = {
        .to = to, .from = from, .nbytes = nbytes, .kind = kind, .stream = stream, .what = "a copy"};
    void *undo = NULL;
    sk__acl_error error = sk__ascend_enter(ascend, &undo);
    if (error == SK_ACL_SUCCESS) {
        error = sk__pieces_copy(&ascend->pieces, &copier, ascend, &copy);
    }
    return sk__ascend_leave(ascend, undo, copy.what, error);
}
