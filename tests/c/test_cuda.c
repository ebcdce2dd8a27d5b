/* test_cuda.c - the cuda backend's own promises: opening, errors, contexts, peers. */
#include <pthread.h>
#include <stdlib.h>

#include "backend/backend.h"
#include "cuda_device.h"
#include "sched_fixture.h"

enum { SIZE = 256 * KIB };

static void need_two_devices(void) {
    int32_t count = 0;
    CHECK_OK(sk_cuda_device_count(&count));
    if (count < 2) {
        test_skip("there is only one device");
    }
}

/* ---- opening --------------------------------------------------------------------------------- */

SK_TEST(cuda, test_open_when_arguments_wrong_then_invalid) {
    sk_cuda_params params = {0};
    sk_backend *backend = NULL;
    int32_t count = 0;
    CHECK_STATUS(SK_INVALID, sk_backend_cuda(NULL, &backend));
    CHECK_STATUS(SK_INVALID, sk_backend_cuda(&params, NULL));
    CHECK_STATUS(SK_INVALID, sk_cuda_device_count(NULL));
    CHECK_OK(sk_cuda_device_count(&count));
    CHECK(count >= 1);
    const int32_t wrong[] = {-1, count, INT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        params.device = wrong[i];
        CHECK_STATUS(SK_INVALID, sk_backend_cuda(&params, &backend));
        CHECK_CONTAINS(sk_error_text(), "there is no device");
    }
    params = (sk_cuda_params){.granule_bytes = KIB};
    CHECK_STATUS(SK_INVALID, sk_backend_cuda(&params, &backend));
    CHECK_CONTAINS(sk_error_text(), "granules of 1024 bytes are not supported");
    CHECK(backend == NULL);
}

SK_TEST(cuda, test_open_when_granule_is_0_then_at_least_2_mib) {
    sk_cuda_params params = {0};
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_cuda(&params, &backend));
    size_t granule = sk_backend_table(backend)->granule_bytes;
    CHECK(granule >= 2 * MIB && granule % (2 * MIB) == 0);
    CHECK_EQUAL(0, sk_backend_table(backend)->null_stream_is_host);
    sk_backend_close(backend);
}

SK_TEST(cuda, test_open_when_any_call_fails_then_its_name_is_told_and_nothing_is_left) {
    static const char *const functions[] = {"cuDeviceGetCount", "cuDeviceGet",
                                            "cuDevicePrimaryCtxRetain",
                                            "cuMemGetAllocationGranularity"};
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        sk_cuda_params params = {0};
        sk_backend *backend = NULL;
        CHECK(cusim()->cusim_fail(functions[i], 1, CUDA_ERROR_UNKNOWN));
        CHECK_STATUS(SK_BACKEND_FAILED, sk_backend_cuda(&params, &backend));
        CHECK_CONTAINS(sk_error_text(), functions[i]);
        CHECK_CONTAINS(sk_error_text(), "CUDA_ERROR_UNKNOWN (999)");
    }
}

SK_TEST(cuda, test_open_when_the_device_has_no_virtual_memory_then_whole_segments) {
    sk_backend *backend = make_whole_device(CAPACITY);
    CHECK_EQUAL(0, sk_backend_table(backend)->granule_bytes);
    fixture f = {.backend = backend};
    sk_pool_params params = {0};
    CHECK_OK(sk_pool_create(backend, &params, &f.pool));
    void *block = take(&f, 4 * MIB, NULL);
    pattern_write(block, 4 * MIB, 1);
    CHECK(pattern_holds(block, 4 * MIB, 1));
    give(&f, block);
    fixture_close(&f);
}

/* ---- errors ---------------------------------------------------------------------------------- */

SK_TEST(cuda, test_alloc_when_the_device_is_full_then_out_of_device_memory_and_named) {
    sk_backend *backend = make_cuda(0, false);
    sk_memory_info info = {0};
    CHECK_OK(sk_memory_info_get(backend, &info));
    void *address = NULL;
    CHECK_STATUS(SK_OUT_OF_DEVICE_MEMORY,
                 backend->ops.memory_alloc(backend->self, info.total_bytes + MIB, &address));
    CHECK_CONTAINS(sk_error_text(),
                   "cuda backend: cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2): ");
    CHECK(address == NULL);
    sk_backend_close(backend);
}

SK_TEST(cuda, test_error_when_it_is_sticky_then_it_says_what_to_do_and_releasing_works) {
    static const CUresult results[] = {CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_FAILED,
                                       CUDA_ERROR_CONTEXT_IS_DESTROYED};
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
        sk_backend *backend = make_cuda(0, false);
        sk_stream *stream = make_stream(backend);
        sk_event *event = NULL;
        void *address = NULL;
        sk_memory_info info;
        CHECK_OK(sk_event_create(backend, &event));
        CHECK_OK(backend->ops.memory_alloc(backend->self, MIB, &address));
        cusim()->cusim_break(results[i]);
        CHECK_STATUS(SK_BACKEND_FAILED, sk_memory_info_get(backend, &info));
        CHECK_CONTAINS(sk_error_text(), "cuMemGetInfo_v2 failed: CUDA_ERROR_");
        CHECK_CONTAINS(sk_error_text(), "unusable from then on: restart the process");
        CHECK_STATUS(SK_BACKEND_FAILED, sk_stream_sync(backend, stream));
        CHECK_STATUS(SK_BACKEND_FAILED, sk_event_query(backend, event));
        CHECK_OK(backend->ops.memory_free(backend->self, address, MIB));
        CHECK_OK(sk_event_destroy(backend, event));
        CHECK_OK(sk_stream_destroy(backend, stream));
        sk_backend_close(backend);
        cusim()->cusim_break(CUDA_SUCCESS);
    }
}

SK_TEST(cuda, test_error_when_it_is_unknown_then_its_number_is_told) {
    enum { NO_SUCH_RESULT = 12345 };
    sk_backend *backend = make_cuda(0, false);
    sk_memory_info info = {.free_bytes = 1};
    CHECK(cusim()->cusim_fail("cuMemGetInfo_v2", 1, (CUresult)NO_SUCH_RESULT));
    CHECK_STATUS(SK_BACKEND_FAILED, sk_memory_info_get(backend, &info));
    CHECK_CONTAINS(sk_error_text(), "unknown error (12345)");
    CHECK_EQUAL(1, info.free_bytes);
    sk_backend_close(backend);
}

/* ---- contexts -------------------------------------------------------------------------------- */

/* Every kind of call, in a thread whose context is `own`; which has to stay current. */
static void use_all(sk_backend *backend, CUcontext own) {
    CUcontext now = NULL;
    char bytes[ROUNDING];
    void *address = NULL;
    sk_event *event = NULL;
    sk_memory_info info;
    sk_stream *stream = make_stream(backend);
    CHECK_OK(sk_memory_info_get(backend, &info));
    CHECK_OK(backend->ops.memory_alloc(backend->self, sizeof bytes, &address));
    CHECK_OK(sk_copy_async(backend, address, bytes, sizeof bytes, SK_HOST_TO_DEVICE, stream));
    CHECK_OK(sk_event_create(backend, &event));
    CHECK_OK(sk_event_record(backend, event, stream));
    CHECK_OK(sk_stream_wait(backend, NULL, event));
    CHECK_OK(sk_stream_sync(backend, NULL));
    CHECK_OK(sk_event_query(backend, event));
    CHECK_OK(sk_event_sync(backend, event));
    CHECK_OK(sk_event_destroy(backend, event));
    CHECK_OK(backend->ops.memory_free(backend->self, address, sizeof bytes));
    drop_stream(backend, stream);
    CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxGetCurrent(&now));
    CHECK(now == own);
}

static void *use_without_context(void *argument) {
    use_all(argument, NULL);
    return NULL;
}

SK_TEST(cuda, test_calls_when_a_thread_has_another_context_or_none_then_it_stays_so) {
    need_two_devices();
    sk_backend *first = make_cuda(0, false);
    sk_backend *second = make_cuda(1, false);
    CUcontext before = NULL;
    CUcontext own[2];
    CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxGetCurrent(&before));
    for (int device = 0; device < 2; device++) {
        CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuDevicePrimaryCtxRetain(&own[device], device));
        CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxSetCurrent(own[device]));
        use_all(first, own[device]);
        use_all(second, own[device]);
    }
    CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxSetCurrent(before));
    for (int device = 0; device < 2; device++) {
        CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuDevicePrimaryCtxRelease_v2(device));
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, use_without_context, second) == 0);
    (void)pthread_join(thread, NULL);
    sk_backend_close(first);
    sk_backend_close(second);
}

SK_TEST(cuda, test_virtual_memory_when_a_peer_is_named_then_it_can_use_it) {
    need_two_devices();
    sk_cuda_params params = {.peer_devices = ~(uint64_t)0};
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_cuda(&params, &backend));
    sk_backend *peer = make_cuda(1, false);
    fixture f = {.backend = backend};
    sk_pool_params pool_params = {0};
    CHECK_OK(sk_pool_create(backend, &pool_params, &f.pool));
    sk_stream *stream = make_stream(peer);
    void *block = take(&f, SIZE, NULL);
    void *address = NULL;
    CHECK_OK(peer->ops.memory_alloc(peer->self, SIZE, &address));
    pattern_write(block, SIZE, 2);
    CHECK_OK(sk_copy_async(peer, address, block, SIZE, SK_DEVICE_TO_DEVICE, stream));
    CHECK_OK(sk_stream_sync(peer, stream));
    CHECK(pattern_holds(address, SIZE, 2));
    CHECK_OK(peer->ops.memory_free(peer->self, address, SIZE));
    drop_stream(peer, stream);
    sk_backend_close(peer);
    give(&f, block);
    CHECK_OK(sk_pool_destroy(f.pool));
    sk_backend_close(backend);
}
