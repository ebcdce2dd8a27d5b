/* test_stream.c - streams, the default stream, events. */
#include "harness.h"

#include <stdatomic.h>

static void set_flag(void *data) { atomic_store((atomic_int *)data, 1); }

TEST(stream_handles_are_checked) {
    open_driver(NULL);
    CUstream stream = NULL;
    CUevent event = NULL;
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuStreamCreate(&stream, 2));
    CHECK_OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, -1));
    CHECK_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize((CUstream)event));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuEventQuery((CUevent)stream));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuStreamQuery((CUstream)&stream));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuStreamDestroy_v2(NULL));
    CHECK_OK(cuStreamDestroy_v2(stream));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuStreamDestroy_v2(stream));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(event, stream));
    CHECK_OK(cuEventDestroy_v2(event));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuEventDestroy_v2(event));
    close_driver();
}

TEST(stream_does_one_thing_after_the_other) {
    open_driver(NULL);
    CUstream stream = stream_of(CU_STREAM_NON_BLOCKING);
    atomic_int flag = 0;
    CHECK_OK(cusim_delay_stream(stream, LONG_NS));
    CHECK_OK(cuLaunchHostFunc(stream, set_flag, &flag));
    CHECK_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    CHECK_EQUAL(0, atomic_load(&flag));
    CHECK_OK(cuStreamSynchronize(stream));
    CHECK_EQUAL(1, atomic_load(&flag));
    CHECK_OK(cuStreamQuery(stream));
    CHECK_OK(cuStreamDestroy_v2(stream));
    close_driver();
}

TEST(stream_destroy_lets_work_finish) {
    open_driver(NULL);
    CUstream stream = stream_of(CU_STREAM_NON_BLOCKING);
    atomic_int flag = 0;
    CHECK_OK(cusim_delay_stream(stream, LONG_NS));
    CHECK_OK(cuLaunchHostFunc(stream, set_flag, &flag));
    CHECK_OK(cuStreamDestroy_v2(stream));
    CHECK_EQUAL(0, atomic_load(&flag));
    CHECK_EQUAL(2, report().tasks);
    CHECK_OK(cuCtxSynchronize());
    CHECK_EQUAL(1, atomic_load(&flag));
    close_driver();
}

/* Check whether work in `second` waits for work in `first`. */
static void check_order(CUstream first, CUstream second, bool waits) {
    atomic_int flag = 0;
    CUdeviceptr address = alloc(512);
    CHECK_OK(cuCtxSynchronize());
    cusim_hold(true);
    CHECK_OK(cuMemsetD8Async(address, 1, 512, first));
    CHECK_OK(cuLaunchHostFunc(second, set_flag, &flag));
    uint64_t end = now_ns() + (waits ? 20 * MS_IN_NS : 10000 * MS_IN_NS);
    while (atomic_load(&flag) == 0 && now_ns() < end) {
    }
    CHECK_EQUAL(!waits, atomic_load(&flag));
    cusim_hold(false);
    CHECK_OK(cuCtxSynchronize());
    CHECK_EQUAL(1, atomic_load(&flag));
    CHECK_OK(cuMemFree_v2(address));
}

TEST(stream_legacy_default_stream_is_a_barrier) {
    open_driver(NULL);
    CUstream blocking = stream_of(CU_STREAM_DEFAULT);
    CUstream other = stream_of(CU_STREAM_DEFAULT);
    CUstream apart = stream_of(CU_STREAM_NON_BLOCKING);
    check_order(blocking, NULL, true);
    check_order(NULL, blocking, true);
    check_order(CU_STREAM_LEGACY, blocking, true);
    check_order(NULL, CU_STREAM_LEGACY, true);
    check_order(blocking, other, false);
    check_order(apart, NULL, false);
    check_order(NULL, apart, false);
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(CU_STREAM_PER_THREAD));
    CHECK_OK(cuStreamDestroy_v2(blocking));
    CHECK_OK(cuStreamDestroy_v2(other));
    CHECK_OK(cuStreamDestroy_v2(apart));
    close_driver();
}

TEST(stream_synchronize_of_the_default_stream_waits_for_blocking_ones) {
    open_driver(NULL);
    CUstream blocking = stream_of(CU_STREAM_DEFAULT);
    atomic_int flag = 0;
    CHECK_OK(cusim_delay_stream(blocking, LONG_NS));
    CHECK_OK(cuLaunchHostFunc(blocking, set_flag, &flag));
    CHECK_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(NULL));
    CHECK_OK(cuStreamSynchronize(NULL));
    CHECK_EQUAL(1, atomic_load(&flag));
    CHECK_OK(cuStreamDestroy_v2(blocking));
    close_driver();
}

static atomic_int call_result;

static void call_driver(void *data) { atomic_store(&call_result, (int)cuStreamSynchronize(data)); }

TEST(stream_host_functions_must_not_call_the_driver) {
    open_driver(NULL);
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuLaunchHostFunc(NULL, NULL, NULL));
    CHECK_OK(cuLaunchHostFunc(NULL, call_driver, NULL));
    CHECK_OK(cuCtxSynchronize());
    CHECK_EQUAL(CUDA_ERROR_NOT_PERMITTED, atomic_load(&call_result));
    close_driver();
}

TEST(stream_capture_forbids_waiting) {
    open_driver(NULL);
    CUstream stream = stream_of(CU_STREAM_NON_BLOCKING);
    int status = 9;
    CHECK_OK(cuStreamIsCapturing(stream, &status));
    CHECK_EQUAL(CU_STREAM_CAPTURE_STATUS_NONE, status);
    CHECK_OK(cusim_capture(stream, true));
    CHECK_OK(cuStreamIsCapturing(stream, &status));
    CHECK_EQUAL(CU_STREAM_CAPTURE_STATUS_ACTIVE, status);
    CHECK_IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(stream));
    CHECK_IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuCtxSynchronize());
    CHECK_OK(cusim_capture(stream, false));
    CHECK_OK(cuStreamSynchronize(stream));
    CHECK_OK(cuStreamDestroy_v2(stream));
    close_driver();
}

TEST(event_means_its_latest_recording) {
    open_driver(NULL);
    CUstream slow = stream_of(CU_STREAM_NON_BLOCKING);
    CUstream fast = stream_of(CU_STREAM_NON_BLOCKING);
    CUevent event = NULL;
    CHECK_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK_OK(cuEventQuery(event)); /* never recorded: done */
    CHECK_OK(cuEventSynchronize(event));
    CHECK_OK(cusim_delay_stream(slow, LONG_NS));
    CHECK_OK(cuStreamWaitEvent(fast, event, 0)); /* not recorded when it was called */
    CHECK_OK(cuEventRecord(event, slow));
    CHECK_IS(CUDA_ERROR_NOT_READY, cuEventQuery(event));
    CHECK_OK(cuStreamSynchronize(fast));
    CHECK_OK(cuStreamWaitEvent(fast, event, 0));
    CHECK_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(fast));
    CHECK_OK(cuEventRecord(event, fast));
    CHECK_OK(cuEventSynchronize(event));
    CHECK_OK(cuStreamQuery(slow));
    CHECK_OK(cuEventDestroy_v2(event));
    CHECK_OK(cuStreamDestroy_v2(slow));
    CHECK_OK(cuStreamDestroy_v2(fast));
    close_driver();
}

TEST(event_wait_outlives_the_event) {
    open_driver(NULL);
    CUstream slow = stream_of(CU_STREAM_NON_BLOCKING);
    CUstream waiting = stream_of(CU_STREAM_NON_BLOCKING);
    CUevent event = NULL;
    uint64_t start = now_ns();
    CHECK_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK_OK(cusim_delay_stream(slow, 20 * MS_IN_NS));
    CHECK_OK(cuEventRecord(event, slow));
    CHECK_OK(cuStreamWaitEvent(waiting, event, 0));
    CHECK_OK(cuEventDestroy_v2(event));
    CHECK_OK(cuStreamDestroy_v2(slow));
    CHECK_OK(cuStreamSynchronize(waiting));
    CHECK(now_ns() - start >= 20 * MS_IN_NS);
    CHECK_OK(cuStreamDestroy_v2(waiting));
    close_driver();
}

TEST(event_times) {
    open_driver(NULL);
    CUstream stream = stream_of(CU_STREAM_NON_BLOCKING);
    CUevent start = NULL;
    CUevent end = NULL;
    CUevent untimed = NULL;
    float milliseconds = 0;
    CHECK_OK(cuEventCreate(&start, CU_EVENT_DEFAULT));
    CHECK_OK(cuEventCreate(&end, CU_EVENT_BLOCKING_SYNC));
    CHECK_OK(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuEventCreate(&untimed, CU_EVENT_INTERPROCESS));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuEventCreate(&untimed, 64));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&milliseconds, start, end));
    CHECK_OK(cuEventRecord(start, stream));
    CHECK_OK(cusim_delay_stream(stream, LONG_NS));
    CHECK_OK(cuEventRecord(end, stream));
    CHECK_OK(cuEventRecord(untimed, stream));
    CHECK_IS(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&milliseconds, start, end));
    CHECK_OK(cuStreamSynchronize(stream));
    CHECK_OK(cuEventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds >= 300.0F && milliseconds < 30000.0F);
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&milliseconds, start, untimed));
    CHECK_OK(cuEventDestroy_v2(start));
    CHECK_OK(cuEventDestroy_v2(end));
    CHECK_OK(cuEventDestroy_v2(untimed));
    CHECK_OK(cuStreamDestroy_v2(stream));
    close_driver();
}

static void with_two(cusim_options *options) { options->devices = 2; }

TEST(event_and_stream_of_different_contexts) {
    open_driver(with_two);
    CUcontext other = NULL;
    CUstream here = stream_of(CU_STREAM_NON_BLOCKING);
    CUevent event = NULL;
    CHECK_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK_OK(cusim_delay_stream(here, 10 * MS_IN_NS));
    CHECK_OK(cuEventRecord(event, here));
    CHECK_OK(cuDevicePrimaryCtxRetain(&other, 1));
    CHECK_OK(cuCtxPushCurrent_v2(other));
    CUstream there = stream_of(CU_STREAM_NON_BLOCKING);
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(event, there));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(event, NULL));
    CHECK_OK(cuStreamWaitEvent(there, event, 0));
    CHECK_OK(cuStreamSynchronize(there));
    CHECK_OK(cuStreamQuery(here));
    CHECK_OK(cuEventDestroy_v2(event));
    CHECK_OK(cuStreamDestroy_v2(there));
    CHECK_OK(cuCtxPopCurrent_v2(NULL));
    CHECK_OK(cuDevicePrimaryCtxRelease_v2(1));
    CHECK_OK(cuStreamDestroy_v2(here));
    close_driver();
}
