/* test_control.c - what tests can make the driver do, forks, and the process's end. */
#include "harness.h"

#include <unistd.h>

TEST(control_fail_the_nth_call) {
    open_driver(NULL);
    CUdeviceptr address = 0;
    CHECK(!cusim_fail("cuNoSuchFunction", 1, CUDA_ERROR_UNKNOWN));
    CHECK(cusim_fail("cuMemAlloc", 2, CUDA_ERROR_UNKNOWN));
    CHECK_OK(cuMemAlloc_v2(&address, 512));
    CHECK_OK(cuMemFree_v2(address));
    CHECK_IS(CUDA_ERROR_UNKNOWN, cuMemAlloc_v2(&address, 512));
    CHECK_OK(cuMemAlloc_v2(&address, 512));
    CHECK(cusim_fail("cuMemFree_v2", 0, CUDA_ERROR_LAUNCH_FAILED));
    CHECK_IS(CUDA_ERROR_LAUNCH_FAILED, cuMemFree_v2(address));
    CHECK_IS(CUDA_ERROR_LAUNCH_FAILED, cuMemFree_v2(address));
    CHECK(cusim_fail("cuMemFree_v2", 0, CUDA_SUCCESS));
    CHECK_OK(cuMemFree_v2(address));
    CHECK(cusim_fail("*", 1, CUDA_ERROR_OPERATING_SYSTEM));
    CHECK_IS(CUDA_ERROR_OPERATING_SYSTEM, cuCtxSynchronize());
    CHECK_OK(cuCtxSynchronize());
    CHECK_EQUAL(3, cusim_calls("cuMemAlloc"));
    CHECK_EQUAL(2, cusim_calls("cuCtxSynchronize"));
    CHECK(cusim_calls("*") > 10);
    close_driver();
}

TEST(control_break_and_heal) {
    open_driver(NULL);
    CUdeviceptr address = alloc(512);
    CUstream stream = stream_of(CU_STREAM_NON_BLOCKING);
    CUdevice device = 9;
    cusim_hold(true);
    CHECK_OK(cuMemsetD8Async(address, 1, 512, stream));
    cusim_break(CUDA_ERROR_LAUNCH_FAILED); /* held work is skipped */
    CHECK_IS(CUDA_ERROR_LAUNCH_FAILED, cuStreamSynchronize(stream));
    CHECK_IS(CUDA_ERROR_LAUNCH_FAILED, cuMemAlloc_v2(&address, 512));
    CHECK_OK(cuCtxGetDevice(&device)); /* asks nothing of the device */
    CHECK_EQUAL(0, device);
    cusim_hold(false);
    cusim_break(CUDA_SUCCESS);
    CHECK_OK(cuStreamDestroy_v2(stream));
    CHECK_OK(cuMemFree_v2(address));
    close_driver();
}

TEST(control_options_after_cuinit) {
    open_driver(NULL);
    cusim_options options;
    cusim_options_init(&options);
    options.latency_ns = 5 * MS_IN_NS;
    CHECK(cusim_configure(&options));
    options.capacity = 2 * GRANULE;
    CHECK(!cusim_configure(&options));
    CHECK(!cusim_reset()); /* a context is open */
    CUdeviceptr address = alloc(512);
    char byte = 0;
    uint64_t start = now_ns();
    CHECK_OK(cuMemcpyDtoH_v2(&byte, address, 1));
    CHECK(now_ns() - start >= 5 * MS_IN_NS);
    CHECK_OK(cuMemFree_v2(address));
    close_driver();
}

static void add(void *const *bytes, void *arg) {
    const int *from = bytes[0];
    int *to = bytes[1];
    for (int i = 0; i < *(int *)arg; i++) {
        to[i] += from[i];
    }
}

TEST(control_kernels) {
    open_driver(NULL);
    CUdeviceptr device = alloc(4 * sizeof(int));
    int *host = (int *)pinned(4 * sizeof(int));
    int start[4] = {1, 2, 3, 4};
    int count = 4;
    int back[4];
    for (int i = 0; i < 4; i++) {
        host[i] = 10;
    }
    cusim_use uses[] = {{.address = (uintptr_t)host, .size = sizeof start},
                        {.address = device, .size = sizeof start, .write = true}};
    CHECK_OK(cuMemcpyHtoD_v2(device, start, sizeof start));
    CHECK_OK(cusim_run(NULL, add, &count, uses, 2));
    CHECK_OK(cuMemcpyDtoH_v2(back, device, sizeof back));
    CHECK_EQUAL(14, back[3]);
    uses[1].size += 1;
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cusim_run(NULL, add, &count, uses, 2));
    uses[0].address = (uintptr_t)start;
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cusim_run(NULL, add, &count, uses, 1));
    CHECK_OK(cuMemFreeHost(host));
    CHECK_OK(cuMemFree_v2(device));
    close_driver();
}

static void with_two(cusim_options *options) { options->devices = 2; }

TEST(control_kernels_need_peer_access) {
    CUcontext first = open_driver(with_two);
    CUcontext second = NULL;
    CUdeviceptr here = alloc(64);
    CUstream stream = stream_of(CU_STREAM_NON_BLOCKING);
    int count = 4;
    cusim_use uses[] = {{.address = here, .size = 16},
                        {.address = here + 16, .size = 16, .write = true}};
    CHECK_OK(cuDevicePrimaryCtxRetain(&second, 1));
    CHECK_OK(cuCtxPushCurrent_v2(second));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cusim_run(stream, add, &count, uses, 2));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cusim_run(NULL, add, &count, uses, 2));
    CHECK_OK(cuCtxEnablePeerAccess(first, 0));
    CHECK_OK(cusim_run(NULL, add, &count, uses, 2));
    CHECK_OK(cuCtxSynchronize());
    CHECK_OK(cuCtxPopCurrent_v2(NULL));
    CHECK_OK(cuDevicePrimaryCtxRelease_v2(1));
    CHECK_OK(cuStreamDestroy_v2(stream));
    CHECK_OK(cuMemFree_v2(here));
    close_driver();
}

static CUdeviceptr before_fork;

static void use_after_fork(void) {
    int count = 0;
    CUdeviceptr address = 0;
    const char *text = NULL;
    CHECK_IS(CUDA_ERROR_NOT_INITIALIZED, cuInit(0));
    CHECK_IS(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&count));
    CHECK_IS(CUDA_ERROR_NOT_INITIALIZED, cuMemAlloc_v2(&address, 512));
    CHECK_IS(CUDA_ERROR_NOT_INITIALIZED, cuMemFree_v2(before_fork));
    CHECK_OK(cuGetErrorName(CUDA_ERROR_NOT_INITIALIZED, &text));
    _exit(23);
}

TEST(control_forked_children_have_no_driver) {
    open_driver(NULL);
    before_fork = alloc(512);
    CUstream stream = stream_of(0);
    CHECK_EQUAL(23, run_child(use_after_fork, NULL, 0));
    CHECK_OK(cuStreamDestroy_v2(stream));
    CHECK_OK(cuMemFree_v2(before_fork));
    close_driver();
}

static void call_at_exit(void) {
    CUdeviceptr address = 0;
    const char *text = NULL;
    CHECK_IS(CUDA_ERROR_DEINITIALIZED, cuMemAlloc_v2(&address, 512));
    CHECK_OK(cuGetErrorName(CUDA_ERROR_DEINITIALIZED, &text));
    CHECK_EQUAL(1, report().exit_calls);
    _exit(24);
}

static void exit_with_call(void) {
    CHECK_EQUAL(0, setenv("CUSIM_STRICT_EXIT", "1", 1));
    CHECK_EQUAL(0, atexit(call_at_exit)); /* before cuInit, so it runs after the driver's */
    open_driver(NULL);
    (void)stream_of(0);
    exit(0);
}

TEST(control_calls_at_exit_are_told) {
    char output[4096];
    CHECK_EQUAL(24, run_child(exit_with_call, output, sizeof output));
    CHECK(strstr(output, "cuMemAlloc_v2 was called while the process was exiting") != NULL);
}

TEST(control_environment) {
    CHECK_EQUAL(0, setenv("CUSIM_CAPACITY", "64M", 1));
    CHECK_EQUAL(0, setenv("CUSIM_DEVICES", "3", 1));
    CHECK_EQUAL(0, setenv("CUSIM_WIPE", "0", 1));
    CHECK_OK(cuInit(0));
    int count = 0;
    size_t bytes = 0;
    CHECK_OK(cuDeviceGetCount(&count));
    CHECK_EQUAL(3, count);
    CHECK_OK(cuDeviceTotalMem_v2(&bytes, 2));
    CHECK_EQUAL(64 * MIB, bytes);
    CHECK_EQUAL(0, unsetenv("CUSIM_CAPACITY"));
    CHECK_EQUAL(0, unsetenv("CUSIM_DEVICES"));
    CHECK_EQUAL(0, unsetenv("CUSIM_WIPE"));
}
