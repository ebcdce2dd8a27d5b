/* cuda.c - opening and closing an NVIDIA device, and the frame around every call to its driver. */
#include "backend/cuda.h"

#include <stdlib.h>

/* ---- a visit to the driver ------------------------------------------------------------------- */

static int context_push(const void *self, void **undo) {
    const sk__cuda *cuda = self;
    sk__cu_context *current = NULL;
    sk__cu_result result = cuda->driver->cuCtxGetCurrent(&current);
    if (result == SK_CU_SUCCESS && current != cuda->context) {
        result = cuda->driver->cuCtxPushCurrent_v2(cuda->context);
        *undo = result == SK_CU_SUCCESS ? cuda->context : NULL;
    }
    return result;
}

static void context_pop(const void *self, void *undo) {
    const sk__cuda *cuda = self;
    sk__cu_context *popped = NULL;
    (void)undo;
    (void)cuda->driver->cuCtxPopCurrent_v2(&popped);
}

static sk_status result_status(const void *self, const char *what, sk__cu_result result) {
    const sk__cuda *cuda = self;
    switch (result) {
    case SK_CU_SUCCESS:
        return SK_OK;
    case SK_CU_NOT_READY:
        return SK_NOT_READY;
    case SK_CU_OUT_OF_MEMORY:
        return sk__cuda_fail(cuda->driver, SK_OUT_OF_DEVICE_MEMORY, what, result);
    case SK_CU_DEINITIALIZED:
        if (sk__cuda_gone() == NULL) {
            sk__cuda_shut_down(); /* the driver's exit handler ran before ours */
        }
        return sk__fail(SK_BACKEND_FAILED, "cuda backend: %s was not called: %s", what,
                        sk__cuda_gone());
    default:
        return sk__cuda_fail(cuda->driver, SK_BACKEND_FAILED, what, result);
    }
}

const sk__visitor sk__cuda_visitor = {.gone = sk__cuda_gone,
                                      .gone_result = SK_CU_DEINITIALIZED,
                                      .enter = context_push,
                                      .leave = context_pop,
                                      .status = result_status,
                                      .is_sticky = sk__cuda_is_sticky};

static void cuda_visit_begin(void *self) { sk__visit_begin_with(self); }

static void cuda_visit_end(void *self) { sk__visit_end_with(&sk__cuda_visitor, self); }

/* ---- life ------------------------------------------------------------------------------------ */

static void cuda_free(sk__cuda *cuda) {
    if (cuda->context != NULL && sk__cuda_gone() == NULL) {
        (void)cuda->driver->cuDevicePrimaryCtxRelease_v2(cuda->device);
    }
    free(cuda);
}

static void cuda_destroy(void *self) {
    sk__cuda *cuda = self;
    sk__pieces_close(&cuda->pieces);
    cuda_free(cuda);
}

sk_status sk_cuda_device_count(int32_t *out) {
    if (out == NULL) {
        return sk__fail(SK_INVALID, "cuda backend: expected a pointer for the number of devices");
    }
    const sk__cuda_driver *driver = NULL;
    sk_status status = sk__cuda_driver_get(&driver);
    if (status != SK_OK) {
        return status;
    }
    int count = 0;
    sk__cu_result result = driver->cuDeviceGetCount(&count);
    if (result != SK_CU_SUCCESS) {
        return sk__cuda_fail(driver, SK_BACKEND_FAILED, "cuDeviceGetCount", result);
    }
    *out = count;
    return SK_OK;
}

/* Open the device and its primary context. */
static sk_status device_open(sk__cuda *cuda, int32_t number) {
    int32_t count = 0;
    sk_status status = sk_cuda_device_count(&count);
    if (status != SK_OK) {
        return status;
    }
    if (number < 0 || number >= count) {
        return sk__fail(SK_INVALID, "cuda backend: there is no device %d: the driver has %d",
                        (int)number, (int)count);
    }
    sk__cu_result result = cuda->driver->cuDeviceGet(&cuda->device, number);
    if (result != SK_CU_SUCCESS) {
        return sk__cuda_fail(cuda->driver, SK_BACKEND_FAILED, "cuDeviceGet", result);
    }
    sk__cu_context *context = NULL;
    result = cuda->driver->cuDevicePrimaryCtxRetain(&context, cuda->device);
    if (result != SK_CU_SUCCESS) {
        return result_status(cuda, "cuDevicePrimaryCtxRetain", result);
    }
    cuda->context = context;
    return SK_OK;
}

static sk_status cuda_open(const sk_cuda_params *params, sk__cuda *cuda, sk_backend **out) {
    sk_status status = sk__cuda_driver_get(&cuda->driver);
    if (status == SK_OK) {
        status = device_open(cuda, params->device);
    }
    if (status == SK_OK) {
        status = sk__cuda_memory_open(cuda, params);
    }
    if (status != SK_OK) {
        return status;
    }
    sk_backend_ops ops = {
        .struct_size = sizeof(sk_backend_ops),
        .name = "cuda",
        .destroy = cuda_destroy,
        .visit_begin = cuda_visit_begin,
        .visit_end = cuda_visit_end,
    };
    sk__cuda_memory_ops(cuda, &ops);
    sk__cuda_stream_ops(&ops);
    return sk_backend_open(&ops, cuda, out);
}

sk_status sk_backend_cuda(const sk_cuda_params *params, sk_backend **out) {
    if (params == NULL || out == NULL) {
        return sk__fail(SK_INVALID,
                        "cuda backend: expected parameters and a pointer for the result");
    }
    sk__cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "cuda backend: no host memory for its state");
    }
    sk_status status = cuda_open(params, cuda, out);
    if (status != SK_OK) {
        cuda_free(cuda);
        return status;
    }
    sk__pieces_open(&cuda->pieces);
    return SK_OK;
}
