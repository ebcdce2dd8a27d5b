/* test_device.c - the device of each thread, errors, and what the machine says of itself. */
#include <pthread.h>

#include "acl_harness.h"

static void *use_without_device(void *result) {
    void *address = NULL;
    int32_t device = 0;
    CHECK_IS(ACL_ERROR_RT_CONTEXT_NULL, aclrtGetDevice(&device));
    CHECK_IS(ACL_ERROR_RT_CONTEXT_NULL, aclrtMalloc(&address, 1, ACL_MEM_MALLOC_HUGE_FIRST));
    *(int *)result = aclrtSynchronizeStream(NULL);
    return NULL;
}

TEST(device_is_set_for_each_thread) {
    open_acl(NULL);
    int result = 0;
    pthread_t thread;
    CHECK_EQUAL(0, pthread_create(&thread, NULL, use_without_device, &result));
    (void)pthread_join(thread, NULL);
    CHECK_EQUAL(ACL_ERROR_RT_CONTEXT_NULL, result);
    int32_t device = -1;
    CHECK_OK(aclrtGetDevice(&device));
    CHECK_EQUAL(0, device);
    close_acl();
    CHECK_IS(ACL_ERROR_RT_CONTEXT_NULL, aclrtGetDevice(&device));
}

TEST(device_context_can_be_made_current_again) {
    open_acl(with_two_devices);
    aclrtContext first = NULL;
    aclrtContext second = NULL;
    int32_t device = -1;
    CHECK_OK(aclrtGetCurrentContext(&first));
    CHECK_OK(aclrtSetDevice(1));
    CHECK_OK(aclrtGetCurrentContext(&second));
    CHECK(first != second);
    CHECK_OK(aclrtSetCurrentContext(first));
    CHECK_OK(aclrtGetDevice(&device));
    CHECK_EQUAL(0, device);
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtSetCurrentContext(NULL));
    CHECK_OK(aclrtResetDevice(1));
    CHECK_IS(ACL_ERROR_RT_INVALID_DEVICEID, aclrtResetDevice(1));
    CHECK_IS(ACL_ERROR_RT_INVALID_DEVICEID, aclrtSetDevice(2));
    close_acl();
}

static void without_devices(cusim_options *options) { options->devices = 0; }

TEST(device_count_is_0_where_there_is_none) {
    cusim_options options;
    cusim_options_init(&options);
    without_devices(&options);
    CHECK(cusim_configure(&options));
    uint32_t count = 1;
    CHECK_OK(aclrtGetDeviceCount(&count));
    CHECK_EQUAL(0, count);
    CHECK_IS(ACL_ERROR_RT_INVALID_DEVICEID, aclrtSetDevice(0));
}

TEST(device_says_what_it_is) {
    open_acl(NULL);
    int64_t value = 0;
    aclCANNPackageVersion version;
    CHECK(strcmp(aclrtGetSocName(), "Ascend910B3") == 0);
    CHECK_OK(aclsysGetCANNVersion(ACL_PKG_NAME_CANN, &version));
    CHECK(strcmp(version.version, "8.1.RC1") == 0);
    CHECK_OK(aclrtGetDeviceInfo(0, ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE, &value));
    CHECK_EQUAL(1024 * MIB, value);
    close_acl();
}

TEST(errors_can_be_asked_for_once) {
    open_acl(NULL);
    void *address = NULL;
    CHECK(aclsim_fail("aclrtMalloc", 2, ACL_ERROR_RT_DEVICE_OOM));
    CHECK(!aclsim_fail("aclrtNothing", 1, ACL_ERROR_RT_DEVICE_OOM));
    CHECK_OK(aclrtMalloc(&address, 1, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK_OK(aclrtFree(address));
    CHECK_IS(ACL_ERROR_RT_DEVICE_OOM, aclrtMalloc(&address, 1, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK_EQUAL(2, aclsim_calls("aclrtMalloc"));
    CHECK_EQUAL(ACL_ERROR_RT_DEVICE_OOM, aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL));
    CHECK_EQUAL(ACL_ERROR_RT_DEVICE_OOM, aclrtGetLastError(ACL_RT_THREAD_LEVEL));
    CHECK_EQUAL(ACL_SUCCESS, aclrtGetLastError(ACL_RT_THREAD_LEVEL));
    CHECK(strstr(aclGetRecentErrMsg(), "aclrtMalloc: told to fail") != NULL);
    CHECK(aclGetRecentErrMsg()[0] == '\0');
    close_acl();
}

TEST(errors_of_the_driver_become_those_of_acl) {
    static const struct {
        CUresult result;
        aclError error;
    } expected[] = {{CUDA_ERROR_OUT_OF_MEMORY, ACL_ERROR_RT_MEMORY_ALLOCATION},
                    {CUDA_ERROR_NOT_SUPPORTED, ACL_ERROR_RT_FEATURE_NOT_SUPPORT},
                    {CUDA_ERROR_UNKNOWN, ACL_ERROR_RT_DRV_INTERNAL_ERROR},
                    {(CUresult)ACL_ERROR_RT_DEVICE_OOM, ACL_ERROR_RT_DEVICE_OOM}};
    open_acl(NULL);
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        void *address = NULL;
        CHECK(cusim_fail("cuMemAlloc", 1, expected[i].result));
        CHECK_IS(expected[i].error, aclrtMalloc(&address, 1, ACL_MEM_MALLOC_HUGE_FIRST));
    }
    CHECK_EQUAL(0, setenv("CUSIM_DEVICE_OOM", "1", 1));
    void *address = NULL;
    CHECK_IS(ACL_ERROR_RT_DEVICE_OOM, aclrtMalloc(&address, 2048 * MIB, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK_EQUAL(0, unsetenv("CUSIM_DEVICE_OOM"));
    close_acl();
}

TEST(init_twice_is_told) {
    open_acl(NULL);
    CHECK_OK(aclInit(NULL));
    CHECK_IS(ACL_ERROR_REPEAT_INITIALIZE, aclInit(NULL));
    CHECK_OK(aclFinalize());
    CHECK_IS(ACL_ERROR_REPEAT_FINALIZE, aclFinalize());
    close_acl();
}
