/* ascend.c - opening and closing an Ascend NPU, and the frame around every call to its runtime. */
#include "backend/ascend.h"

#include <stdlib.h>

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

static sk_status error_status(const void *self, const char *what, sk__acl_error error) {
    const sk__ascend *ascend = self;
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

const sk__visitor sk__ascend_visitor = {.gone = sk__ascend_gone,
                                        .gone_result = SK_ACL_UNINITIALIZED,
                                        .enter = context_set,
                                        .leave = context_restore,
                                        .status = error_status,
                                        .is_sticky = sk__ascend_is_sticky};

static void ascend_visit_begin(void *self) { sk__visit_begin_with(self); }

static void ascend_visit_end(void *self) { sk__visit_end_with(&sk__ascend_visitor, self); }

/* ---- life ------------------------------------------------------------------------------------ */

/* The device stays set: it belongs to the process, which torch_npu may use, too. */
static void ascend_free(sk__ascend *ascend) {
    void *undo = NULL;
    if (ascend->idle != NULL &&
        sk__visit_enter(&sk__ascend_visitor, ascend, &undo) == SK_ACL_SUCCESS) {
        (void)ascend->runtime->aclrtDestroyStream(ascend->idle);
        sk__visit_undo(&sk__ascend_visitor, ascend, undo);
    }
    free(ascend);
}

static void ascend_destroy(void *self) {
    sk__ascend *ascend = self;
    sk__ascend_memory_close(ascend);
    sk__pieces_close(&ascend->pieces);
    ascend_free(ascend);
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
    sk__acl_error error = sk__visit_enter(&sk__ascend_visitor, ascend, &undo);
    status = error == SK_ACL_SUCCESS ? parts_open(ascend, params) : SK_OK;
    if (status != SK_OK) {
        sk__visit_undo(&sk__ascend_visitor, ascend, undo);
        return status;
    }
    status = sk__visit_leave(&sk__ascend_visitor, ascend, undo, "aclrtSetCurrentContext", error);
    if (status != SK_OK) {
        return status;
    }
    sk_backend_ops ops = {
        .struct_size = sizeof(sk_backend_ops),
        .name = "ascend",
        .destroy = ascend_destroy,
        .visit_begin = ascend_visit_begin,
        .visit_end = ascend_visit_end,
    };
    sk__ascend_memory_ops(ascend, &ops);
    sk__ascend_stream_ops(ascend, &ops);
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
