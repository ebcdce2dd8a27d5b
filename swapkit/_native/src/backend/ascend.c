/* ascend.c - opening and closing an Ascend NPU, and the frame around every call to its runtime. */
#include "backend/ascend.h"

#include <stdlib.h>

#include "backend/visit.h"

enum { HOST_LOCK_BYTES = 16 * 1024 * 1024 }; /* a copy this long hides the cost of its start */

/* ---- a visit to the runtime ------------------------------------------------------------------ */

/* ACL cannot unset a device, so a thread that had set none keeps this one. */
static int context_set(const void *self, void **undo) {
    const sk__ascend *ascend = self;
    sk__acl_context *current = NULL;
    sk__acl_error error = ascend->runtime->aclrtGetCurrentContext(&current);
    if (error == SK_ACL_NO_CONTEXT || (error == SK_ACL_SUCCESS && current == NULL)) {
        return ascend->runtime->aclrtSetDevice(ascend->device);
    }
    if (error == SK_ACL_SUCCESS && current != ascend->context) {
        error = ascend->runtime->aclrtSetCurrentContext(ascend->context);
        *undo = error == SK_ACL_SUCCESS ? current : NULL;
    }
    return error;
}

static void context_restore(const void *self, void *undo) {
    const sk__ascend *ascend = self;
    (void)ascend->runtime->aclrtSetCurrentContext(undo);
}

static const sk__visitor visitor = {.gone = sk__ascend_gone,
                                    .gone_result = SK_ACL_UNINITIALIZED,
                                    .enter = context_set,
                                    .leave = context_restore};

static void ascend_visit_begin(void *self) { sk__visit_begin_with(self); }

static void ascend_visit_end(void *self) { sk__visit_end_with(&visitor, self); }

sk__acl_error sk__ascend_enter(const sk__ascend *ascend, void **undo) {
    return sk__visit_enter(&visitor, ascend, undo);
}

static sk_status error_status(const sk__ascend *ascend, const char *what, sk__acl_error error) {
    switch (error) {
    case SK_ACL_SUCCESS:
        return SK_OK;
    case SK_ACL_OUT_OF_MEMORY:
    case SK_ACL_DEVICE_OUT_OF_MEMORY:
        return sk__ascend_fail(ascend->runtime, SK_OUT_OF_DEVICE_MEMORY, what, error);
    case SK_ACL_HOST_NO_MEMORY:
        return sk__ascend_fail(ascend->runtime, SK_OUT_OF_HOST_MEMORY, what, error);
    case SK_ACL_UNINITIALIZED:
        if (sk__ascend_gone() == NULL) {
            sk__ascend_shut_down(); /* the runtime's exit handler ran before ours */
        }
        return sk__fail(SK_BACKEND_FAILED, "ascend backend: %s was not called: %s", what,
                        sk__ascend_gone());
    default:
        return sk__ascend_fail(
            ascend->runtime, sk__ascend_is_unsupported(error) ? SK_UNSUPPORTED : SK_BACKEND_FAILED,
            what, error);
    }
}

sk_status sk__ascend_leave(const sk__ascend *ascend, void *undo, const char *what,
                           sk__acl_error error) {
    sk_status status = error_status(ascend, what, error); /* first: it asks for ACL's message */
    sk__visit_leave(&visitor, ascend, undo);
    return status;
}

sk_status sk__ascend_leave_released(const sk__ascend *ascend, void *undo, const char *what,
                                    sk__acl_error error) {
    sk_status status = sk__ascend_leave(ascend, undo, what, error);
    return error == SK_ACL_UNINITIALIZED || sk__ascend_is_sticky(error) ? SK_OK : status;
}

/* ---- life ------------------------------------------------------------------------------------ */

/* The device stays set: it belongs to the process, which torch_npu may use, too. */
static void ascend_free(sk__ascend *ascend) {
    void *undo = NULL;
    if (ascend->idle != NULL && sk__ascend_enter(ascend, &undo) == SK_ACL_SUCCESS) {
        (void)ascend->runtime->aclrtDestroyStream(ascend->idle);
        sk__visit_leave(&visitor, ascend, undo);
    }
    free(ascend);
}

static void ascend_destroy(void *self) {
    sk__ascend *ascend = self;
    sk__ascend_memory_close(ascend);
    sk__pieces_close(&ascend->pieces);
    ascend_free(ascend);
}

static const sk_backend_ops ascend_ops = {
    .struct_size = sizeof(sk_backend_ops),
    .null_stream_is_host = 0,
    .name = "ascend",
    .destroy = ascend_destroy,
    .memory_info = sk__ascend_memory_info,
    .memory_alloc = sk__ascend_memory_alloc,
    .memory_free = sk__ascend_memory_free,
    .stream_create = sk__ascend_stream_create,
    .stream_destroy = sk__ascend_stream_destroy,
    .stream_sync = sk__ascend_stream_sync,
    .stream_wait = sk__ascend_stream_wait,
    .event_create = sk__ascend_event_create,
    .event_destroy = sk__ascend_event_destroy,
    .event_record = sk__ascend_event_record,
    .event_query = sk__ascend_event_query,
    .event_sync = sk__ascend_event_sync,
    .copy_async = sk__ascend_copy_async,
    .visit_begin = ascend_visit_begin,
    .visit_end = ascend_visit_end,
    .over_read_bytes = SK_ASCEND_OVER_READ_BYTES,
};

/* The members that depend on the device and the parameters. */
static sk_backend_ops ops_of(const sk__ascend *ascend) {
    sk_backend_ops ops = ascend_ops;
    ops.granule_bytes = ascend->granule_bytes;
    if (ascend->granule_bytes != 0) {
        ops.range_reserve = sk__ascend_range_reserve;
        ops.range_release = sk__ascend_range_release;
        ops.range_commit = sk__ascend_range_commit;
        ops.range_decommit = sk__ascend_range_decommit;
        ops.range_alias = sk__ascend_range_alias;
    }
    if (ascend->locks_host) {
        ops.host_lock_bytes = HOST_LOCK_BYTES;
        ops.host_lock = sk__ascend_host_lock;
        ops.host_unlock = sk__ascend_host_unlock;
    }
    if (ascend->runtime->aclrtLaunchHostFunc != NULL) {
        ops.stream_call = sk__ascend_stream_call;
    }
    return ops;
}

sk_status sk_ascend_device_count(int32_t *out) {
    if (out == NULL) {
        return sk__fail(SK_INVALID, "ascend backend: expected a pointer for the number of devices");
    }
    const sk__ascend_runtime *runtime = NULL;
    sk_status status = sk__ascend_runtime_get(&runtime);
    if (status != SK_OK) {
        return status;
    }
    uint32_t count = 0;
    sk__acl_error error = runtime->aclrtGetDeviceCount(&count);
    if (error != SK_ACL_SUCCESS) {
        return sk__ascend_fail(runtime, SK_BACKEND_FAILED, "aclrtGetDeviceCount", error);
    }
    *out = (int32_t)count;
    return SK_OK;
}

/* Find the device's default context, and leave the thread with the context that it had. */
static sk_status device_open(sk__ascend *ascend, int32_t number) {
    int32_t count = 0;
    sk_status status = sk_ascend_device_count(&count);
    if (status != SK_OK) {
        return status;
    }
    if (count == 0) {
        return sk__fail(SK_UNSUPPORTED, "ascend backend: the runtime has found no device");
    }
    if (number < 0 || number >= count) {
        return sk__fail(SK_INVALID, "ascend backend: there is no device %d: the runtime has %d",
                        (int)number, (int)count);
    }
    const char *what = "aclrtSetDevice";
    sk__acl_context *before = NULL;
    (void)ascend->runtime->aclrtGetCurrentContext(&before); /* an error: there is none */
    sk__acl_error error = ascend->runtime->aclrtSetDevice(number);
    if (error == SK_ACL_SUCCESS) {
        ascend->device = number;
        what = "aclrtGetCurrentContext";
        error = ascend->runtime->aclrtGetCurrentContext(&ascend->context);
    }
    status = error_status(ascend, what, error);
    if (before != NULL) {
        (void)ascend->runtime->aclrtSetCurrentContext(before);
    }
    return status;
}

/* With the device current. */
static sk_status parts_open(sk__ascend *ascend, const sk_ascend_params *params) {
    sk__acl_error error = sk__ascend_stream_make(ascend, &ascend->idle);
    if (error != SK_ACL_SUCCESS) {
        return error_status(ascend, "aclrtCreateStreamWithConfig", error);
    }
    return sk__ascend_memory_open(ascend, params);
}

static sk_status ascend_open(const sk_ascend_params *params, sk__ascend *ascend, sk_backend **out) {
    sk_status status = sk__ascend_runtime_get(&ascend->runtime);
    if (status == SK_OK) {
        status = device_open(ascend, params->device);
    }
    if (status != SK_OK) {
        return status;
    }
    void *undo = NULL;
    sk__acl_error error = sk__ascend_enter(ascend, &undo);
    status = error == SK_ACL_SUCCESS ? parts_open(ascend, params) : SK_OK;
    if (status != SK_OK) {
        sk__visit_leave(&visitor, ascend, undo);
        return status;
    }
    status = sk__ascend_leave(ascend, undo, "aclrtSetCurrentContext", error);
    if (status != SK_OK) {
        return status;
    }
    sk_backend_ops ops = ops_of(ascend);
    return sk_backend_open(&ops, ascend, out);
}

sk_status sk_backend_ascend(const sk_ascend_params *params, sk_backend **out) {
    if (params == NULL || out == NULL || params->pages > SK_ASCEND_GIANT) {
        return sk__fail(SK_INVALID, "ascend backend: expected parameters, pages of sk_ascend_pages "
                                    "and a pointer for the result");
    }
    sk__ascend *ascend = calloc(1, sizeof *ascend);
    if (ascend == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "ascend backend: no host memory for its state");
    }
    sk_status status = ascend_open(params, ascend, out);
    if (status != SK_OK) {
        ascend_free(ascend);
        return status;
    }
    sk__pieces_open(&ascend->pieces);
    sk__mutex_init(&ascend->lock, SK_RANK_BACKEND);
    ascend->fork_node = (sk__fork_node){.lock = &ascend->lock};
    sk__fork_register(&ascend->fork_node);
    return SK_OK;
}
