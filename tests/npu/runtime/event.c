/* event.c - events. One that was never recorded is not complete, but nothing waits for it. */
#include "runtime.h"

static aclError create(aclrtEvent *out, uint32_t flags, const char *name) {
    unsigned known = ACL_EVENT_SYNC | ACL_EVENT_CAPTURE_STREAM_PROGRESS | ACL_EVENT_TIME_LINE |
                     ACL_EVENT_DEVICE_USE_ONLY | ACL_EVENT_EXTERNAL | ACL_EVENT_IPC;
    if ((flags & ~known) != 0) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: flags %#x", name, flags);
    }
    bool timed = (flags & ACL_EVENT_TIME_LINE) != 0;
    unsigned untimed = timed ? 0 : (unsigned)CU_EVENT_DISABLE_TIMING;
    return acl_done(cuEventCreate((CUevent *)out, CU_EVENT_BLOCKING_SYNC | untimed));
}

aclError aclrtCreateEvent(aclrtEvent *out) {
    ACL_ENTER_ON_DEVICE(aclrtCreateEvent);
    return create(out, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE, "aclrtCreateEvent");
}

aclError aclrtCreateEventWithFlag(aclrtEvent *out, uint32_t flags) {
    ACL_ENTER_ON_DEVICE(aclrtCreateEventWithFlag);
    return create(out, flags, "aclrtCreateEventWithFlag");
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *out, uint32_t flags) {
    ACL_ENTER_ON_DEVICE(aclrtCreateEventExWithFlag);
    return create(out, flags, "aclrtCreateEventExWithFlag");
}

/* torch_npu destroys events on threads that have set no device. */
aclError aclrtDestroyEvent(aclrtEvent event) {
    ACL_ENTER(aclrtDestroyEvent);
    return acl_done(cusim_destroy_event(event));
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    ACL_ENTER_ON_DEVICE(aclrtRecordEvent);
    return acl_done(cuEventRecord(event, stream));
}

/* Whether the latest recording was reached; NOT_READY: not yet, or there is none. A broken device
 * says so. */
static CUresult reached(aclrtEvent event) {
    uint64_t time_ns = 0;
    CUresult result = cuEventQuery(event);
    if (result == CUDA_SUCCESS) {
        result = cusim_event_time(event, &time_ns);
    }
    return result == CUDA_ERROR_NOT_FOUND ? CUDA_ERROR_NOT_READY : result;
}

/* As `reached`, but nothing waits for an event that was never recorded. */
static CUresult waited_for(aclrtEvent event) { return cuEventQuery(event); }

/* An event that is reused by itself needs no reset. */
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
    ACL_ENTER_ON_DEVICE(aclrtResetEvent);
    (void)stream;
    CUresult result = waited_for(event);
    return acl_done(result == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : result);
}

/* Put `complete` or `not_ready` into `status`, whichever holds. */
static aclError query(CUresult result, int *status, int complete, int not_ready) {
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY) {
        *status = result == CUDA_SUCCESS ? complete : not_ready;
        result = CUDA_SUCCESS;
    }
    return acl_done(result);
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    ACL_ENTER_ON_DEVICE(aclrtQueryEventStatus);
    int found = ACL_EVENT_RECORDED_STATUS_NOT_READY;
    aclError error = query(reached(event), &found, ACL_EVENT_RECORDED_STATUS_COMPLETE,
                           ACL_EVENT_RECORDED_STATUS_NOT_READY);
    *status = (aclrtEventRecordedStatus)found;
    return error;
}

aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus *status) {
    ACL_ENTER_ON_DEVICE(aclrtQueryEvent);
    int found = ACL_EVENT_STATUS_NOT_READY;
    aclError error =
        query(reached(event), &found, ACL_EVENT_STATUS_COMPLETE, ACL_EVENT_STATUS_NOT_READY);
    *status = (aclrtEventStatus)found;
    return error;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    ACL_ENTER_ON_DEVICE(aclrtQueryEventWaitStatus);
    int found = ACL_EVENT_WAIT_STATUS_NOT_READY;
    aclError error = query(waited_for(event), &found, ACL_EVENT_WAIT_STATUS_COMPLETE,
                           ACL_EVENT_WAIT_STATUS_NOT_READY);
    *status = (aclrtEventWaitStatus)found;
    return error;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
    ACL_ENTER_ON_DEVICE(aclrtSynchronizeEvent);
    return acl_done(cuEventSynchronize(event));
}

static CUresult event_query(void *event) { return waited_for(event); }

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t milliseconds) {
    ACL_ENTER_ON_DEVICE(aclrtSynchronizeEventWithTimeout);
    if (milliseconds >= 0 && acl_poll(event_query, event, milliseconds) == CUDA_ERROR_NOT_READY) {
        return acl_fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
                        "aclrtSynchronizeEventWithTimeout: %d ms are over", milliseconds);
    }
    return acl_done(cuEventSynchronize(event));
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    ACL_ENTER_ON_DEVICE(aclrtEventElapsedTime);
    CUresult result = cuEventElapsedTime(milliseconds, start, end);
    if (result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_NOT_READY) {
        return acl_fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
                        "aclrtEventElapsedTime: not recorded, not reached, or without time");
    }
    return acl_done(result);
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) {
    enum { NS_PER_US = 1000 };
    ACL_ENTER_ON_DEVICE(aclrtEventGetTimestamp);
    uint64_t time_ns = 0;
    CUresult result = cusim_event_time(event, &time_ns);
    if (result == CUDA_ERROR_NOT_FOUND || result == CUDA_ERROR_NOT_READY) {
        return acl_fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
                        "aclrtEventGetTimestamp: not recorded, or not reached");
    }
    *microseconds = time_ns / NS_PER_US;
    return acl_done(result);
}
