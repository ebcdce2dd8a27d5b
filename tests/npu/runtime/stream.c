/* stream.c - streams, what waits for them, and host functions in them.
 *
 * No stream waits for another by itself: the NULL stream is the device's default one, which is like
 * all others.
 */
#include <time.h>

#include "runtime.h"

static CUresult create(aclrtStream *out) {
    return cuStreamCreate((CUstream *)out, CU_STREAM_NON_BLOCKING);
}

aclError aclrtCreateStream(aclrtStream *out) {
    ACL_ENTER_ON_DEVICE(aclrtCreateStream);
    return acl_done(create(out));
}

aclError aclrtCreateStreamWithConfig(aclrtStream *out, uint32_t priority, uint32_t flags) {
    enum { LEAST_PRIORITY = 7 };
    ACL_ENTER_ON_DEVICE(aclrtCreateStreamWithConfig);
    unsigned known = ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC | ACL_STREAM_PERSISTENT |
                     ACL_STREAM_HUGE | ACL_STREAM_CPU_SCHEDULE | ACL_STREAM_DEVICE_USE_ONLY;
    if (priority > LEAST_PRIORITY || (flags & ~known) != 0) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID,
                        "aclrtCreateStreamWithConfig: priority %u, flags %#x", priority, flags);
    }
    return acl_done(create(out));
}

aclError aclrtDestroyStream(aclrtStream stream) {
    ACL_ENTER_ON_DEVICE(aclrtDestroyStream);
    return acl_done(cuStreamDestroy_v2(stream));
}

aclError aclrtDestroyStreamForce(aclrtStream stream) {
    ACL_ENTER_ON_DEVICE(aclrtDestroyStreamForce);
    return acl_done(cuStreamDestroy_v2(stream));
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
    ACL_ENTER_ON_DEVICE(aclrtSynchronizeStream);
    return acl_done(cuStreamSynchronize(stream));
}

static CUresult stream_query(void *stream) { return cuStreamQuery(stream); }

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds) {
    ACL_ENTER_ON_DEVICE(aclrtSynchronizeStreamWithTimeout);
    if (milliseconds >= 0 && acl_poll(stream_query, stream, milliseconds) == CUDA_ERROR_NOT_READY) {
        return acl_fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                        "aclrtSynchronizeStreamWithTimeout: %d ms are over", milliseconds);
    }
    return acl_done(cuStreamSynchronize(stream));
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    ACL_ENTER_ON_DEVICE(aclrtStreamQuery);
    CUresult result = cuStreamQuery(stream);
    bool ready = result == CUDA_SUCCESS;
    if (ready || result == CUDA_ERROR_NOT_READY) {
        *status = ready ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
        result = CUDA_SUCCESS;
    }
    return acl_done(result);
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    ACL_ENTER_ON_DEVICE(aclrtStreamWaitEvent);
    return acl_done(cuStreamWaitEvent(stream, event, 0));
}

/* The part of the handle that tells streams apart; the default stream is 0. */
aclError aclrtStreamGetId(aclrtStream stream, int32_t *out) {
    enum { ID_MASK = 0xffffff };
    ACL_ENTER(aclrtStreamGetId);
    *out = (int32_t)((uintptr_t)stream & ID_MASK);
    return ACL_SUCCESS;
}

aclError aclrtCtxGetCurrentDefaultStream(aclrtStream *out) {
    ACL_ENTER_ON_DEVICE(aclrtCtxGetCurrentDefaultStream);
    *out = CU_STREAM_LEGACY;
    return ACL_SUCCESS;
}

/* ---- settings, which change nothing here ----------------------------------------------------- */

aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
    ACL_ENTER(aclrtSetStreamFailureMode);
    (void)stream, (void)mode;
    return ACL_SUCCESS;
}

aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) {
    ACL_ENTER(aclrtSetStreamOverflowSwitch);
    (void)stream, (void)flag;
    return ACL_SUCCESS;
}

aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag) {
    ACL_ENTER(aclrtGetStreamOverflowSwitch);
    (void)stream;
    *flag = 0;
    return ACL_SUCCESS;
}

aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr attribute,
                                 aclrtStreamAttrValue *value) {
    ACL_ENTER(aclrtSetStreamAttribute);
    (void)stream, (void)attribute, (void)value;
    return ACL_SUCCESS;
}

/* ---- host functions -------------------------------------------------------------------------- */

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *data) {
    ACL_ENTER_ON_DEVICE(aclrtLaunchHostFunc);
    return acl_done(cuLaunchHostFunc(stream, function, data));
}

/* In the stream's own thread, not in the one that was subscribed for it. */
aclError aclrtLaunchCallback(aclrtCallback function, void *data, aclrtCallbackBlockType block,
                             aclrtStream stream) {
    ACL_ENTER_ON_DEVICE(aclrtLaunchCallback);
    (void)block;
    return acl_done(cuLaunchHostFunc(stream, function, data));
}

aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream) {
    ACL_ENTER(aclrtSubscribeReport);
    (void)thread, (void)stream;
    return ACL_SUCCESS;
}

aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream stream) {
    ACL_ENTER(aclrtUnSubscribeReport);
    (void)thread, (void)stream;
    return ACL_SUCCESS;
}

aclError aclrtProcessReport(int32_t milliseconds) {
    enum { NS_PER_MS = 1000000, MS_PER_S = 1000 };
    ACL_ENTER(aclrtProcessReport);
    if (milliseconds > 0) {
        (void)nanosleep(&(struct timespec){.tv_sec = milliseconds / MS_PER_S,
                                           .tv_nsec = (long)(milliseconds % MS_PER_S) * NS_PER_MS},
                        NULL);
    }
    return ACL_ERROR_WAIT_CALLBACK_TIMEOUT;
}
