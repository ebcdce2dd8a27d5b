/* test_context.c - initialisation, devices, contexts. */
#include "harness.h"

#include <pthread.h>

TEST(context_calls_need_cuinit) {
    int count = 0;
    CUcontext context = NULL;
    CHECK_IS(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&count));
    CHECK_IS(CUDA_ERROR_NOT_INITIALIZED, cuCtxGetCurrent(&context));
    CHECK_IS(CUDA_ERROR_NOT_INITIALIZED, cuCtxSynchronize());
    CHECK_OK(cuDriverGetVersion(&count));
    CHECK(count >= 12000);
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuInit(1));
    CHECK_OK(cuInit(0));
    CHECK_OK(cuInit(0));
    CHECK_OK(cuDeviceGetCount(&count));
    CHECK_EQUAL(1, count);
    CHECK_OK(cuCtxGetCurrent(&context));
    CHECK(context == NULL);
    CHECK_IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxSynchronize());
}

static void without_devices(cusim_options *options) { options->devices = 0; }

TEST(context_machine_without_devices) {
    cusim_options options;
    cusim_options_init(&options);
    without_devices(&options);
    CHECK(cusim_configure(&options));
    CHECK_IS(CUDA_ERROR_NO_DEVICE, cuInit(0));
}

TEST(context_errors_have_names) {
    const char *text = NULL;
    CHECK_OK(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
    CHECK_EQUAL(0, strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY"));
    CHECK_OK(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
    CHECK_EQUAL(0, strcmp(text, "out of memory"));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuGetErrorName((CUresult)12345, &text));
    CHECK(text == NULL);
}

TEST(context_device_facts) {
    open_driver(NULL);
    char name[64];
    size_t bytes = 0;
    int value = 0;
    CUdevice device = 9;
    CUuuid uuid;
    CHECK_OK(cuDeviceGet(&device, 0));
    CHECK_IS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, 1));
    CHECK_IS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, -1));
    CHECK_OK(cuDeviceGetName(name, sizeof name, 0));
    CHECK_EQUAL(0, strcmp(name, "Simulated GPU"));
    CHECK_OK(cuDeviceTotalMem_v2(&bytes, 0));
    CHECK_EQUAL(1024 * MIB, bytes);
    CHECK_OK(cuDeviceGetAttribute(&value, 75, 0));
    CHECK_EQUAL(9, value);
    CHECK_OK(cuDeviceGetAttribute(&value, 102, 0));
    CHECK_EQUAL(1, value);
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuDeviceGetAttribute(&value, 0, 0));
    CHECK_OK(cuDeviceGetUuid_v2(&uuid, 0));
    close_driver();
}

TEST(context_stack_of_a_thread) {
    CUcontext context = open_driver(NULL);
    CUcontext seen = NULL;
    CUdevice device = 9;
    int least = 1;
    int greatest = 1;
    CHECK_OK(cuCtxGetDevice(&device));
    CHECK_EQUAL(0, device);
    CHECK_OK(cuCtxGetStreamPriorityRange(&least, &greatest));
    CHECK(least == 0 && greatest < 0);
    CHECK_OK(cuCtxPushCurrent_v2(context));
    CHECK_OK(cuCtxPopCurrent_v2(&seen));
    CHECK(seen == context);
    CHECK_OK(cuCtxPopCurrent_v2(&seen));
    CHECK_IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxPopCurrent_v2(&seen));
    CHECK_IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxGetDevice(&device));
    CHECK_IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxSetCurrent((CUcontext)&device));
    CHECK_IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxPushCurrent_v2(NULL));
    CHECK_OK(cuCtxSetCurrent(context));
    close_driver();
}

static void *other_thread(void *arg) {
    CUdeviceptr address = 0;
    CHECK_IS(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc_v2(&address, 512));
    CHECK_OK(cuCtxSetCurrent(arg));
    CHECK_OK(cuMemAlloc_v2(&address, 512));
    CHECK_OK(cuMemFree_v2(address));
    return NULL;
}

TEST(context_is_current_by_thread) {
    CUcontext context = open_driver(NULL);
    pthread_t thread;
    CHECK_EQUAL(0, pthread_create(&thread, NULL, other_thread, context));
    CHECK_EQUAL(0, pthread_join(thread, NULL));
    close_driver();
}

TEST(context_release_frees_what_is_its_own) {
    CUcontext context = open_driver(NULL);
    CUcontext again = NULL;
    unsigned flags = 0;
    int active = 0;
    CUdeviceptr address = alloc(4096);
    CUstream stream = stream_of(0);
    CUevent event = NULL;
    CHECK_OK(cuEventCreate(&event, 0));
    (void)pinned(4096);
    CHECK_OK(cuDevicePrimaryCtxRetain(&again, 0));
    CHECK(again == context);
    CHECK_OK(cuDevicePrimaryCtxRelease_v2(0));
    CHECK_OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
    CHECK_EQUAL(1, active);
    CHECK_OK(cuDevicePrimaryCtxRelease_v2(0));
    CHECK_OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
    CHECK_EQUAL(0, active);
    CHECK_IS(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease_v2(0));
    CHECK_IS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuMemFree_v2(address));
    CHECK_IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxSetCurrent(context));
    CHECK_EQUAL(0, report().allocations + report().streams + report().events);
    CHECK_OK(cuDevicePrimaryCtxRetain(&again, 0));
    CHECK_OK(cuCtxSetCurrent(again));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(stream));
    CHECK_IS(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(event));
    close_driver();
}

static void with_two(cusim_options *options) { options->devices = 2; }

TEST(context_peers) {
    CUcontext first = open_driver(with_two);
    CUcontext second = NULL;
    int can = 9;
    CHECK_OK(cuDevicePrimaryCtxRetain(&second, 1));
    CHECK_OK(cuDeviceCanAccessPeer(&can, 0, 1));
    CHECK_EQUAL(1, can);
    CHECK_OK(cuDeviceCanAccessPeer(&can, 0, 0));
    CHECK_EQUAL(0, can);
    CHECK_IS(CUDA_ERROR_INVALID_DEVICE, cuDeviceCanAccessPeer(&can, 0, 2));
    CHECK_IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxEnablePeerAccess(first, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuCtxEnablePeerAccess(second, 1));
    CHECK_OK(cuCtxEnablePeerAccess(second, 0));
    CHECK_IS(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, cuCtxEnablePeerAccess(second, 0));
    CHECK_OK(cuDevicePrimaryCtxRelease_v2(1));
    close_driver();
}
