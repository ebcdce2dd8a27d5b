/* test_memory.c - device memory: padding, pages, freeing; host memory. */
#include <time.h>

#include "acl_harness.h"

enum { PADDING = 32 };

static void nothing(void *const *bytes, void *arg) { (void)bytes, (void)arg; }

/* Let a kernel read so much of the memory. */
static CUresult read_memory(void *address, size_t size) {
    cusim_use use = {.address = (CUdeviceptr)(uintptr_t)address, .size = size};
    CUresult result = cusim_run(NULL, nothing, NULL, &use, 1);
    CHECK_OK(aclrtSynchronizeStream(NULL));
    return result;
}

TEST(memory_has_padding_only_by_malloc) {
    open_acl(NULL);
    void *padded = NULL;
    CHECK_OK(aclrtMalloc(&padded, 4096, ACL_MEM_MALLOC_HUGE_FIRST));
    void *exact = alloc_acl(4096);
    CHECK_EQUAL(CUDA_SUCCESS, read_memory(padded, 4096 + PADDING));
    CHECK_EQUAL(CUDA_ERROR_INVALID_VALUE, read_memory(padded, 4096 + PADDING + 1));
    CHECK_EQUAL(CUDA_SUCCESS, read_memory(exact, 4096));
    CHECK_EQUAL(CUDA_ERROR_INVALID_VALUE, read_memory(exact, 4096 + 1));
    CHECK_OK(aclrtFree(padded));
    CHECK_OK(aclrtFree(exact));
    close_acl();
}

TEST(memory_policy_is_remembered) {
    open_acl(NULL);
    static const aclrtMemMallocPolicy policies[] = {
        ACL_MEM_MALLOC_HUGE_FIRST, ACL_MEM_MALLOC_HUGE_ONLY, ACL_MEM_MALLOC_NORMAL_ONLY,
        (aclrtMemMallocPolicy)(ACL_MEM_MALLOC_HUGE_ONLY | ACL_MEM_TYPE_HIGH_BAND_WIDTH)};
    for (size_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
        void *address = NULL;
        CHECK_OK(aclrtMallocAlign32(&address, 100, policies[i]));
        CHECK_EQUAL(policies[i], aclsim_policy((char *)address + 99));
        CHECK_OK(aclrtFree(address));
        CHECK_EQUAL(-1, aclsim_policy(address));
    }
    void *address = NULL;
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID,
             aclrtMallocAlign32(&address, 100, (aclrtMemMallocPolicy)8));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID,
             aclrtMallocAlign32(&address, 0, ACL_MEM_MALLOC_HUGE_FIRST));
    close_acl();
}

TEST(memory_free_does_not_wait) {
    open_acl(NULL);
    aclrtStream stream = stream_acl();
    void *address = alloc_acl(4096);
    void *other = alloc_acl(4096);
    CHECK_OK(cusim_delay_stream(stream, LONG_NS));
    uint64_t before = now_ns();
    CHECK_OK(aclrtFree(other));
    CHECK(now_ns() - before < LONG_NS);
    CHECK_OK(aclrtMemsetAsync(address, 4096, 1, 4096, stream));
    CHECK_EQUAL(0, report().problems);
    CHECK_OK(aclrtFree(address)); /* queued work uses it: what a device would do is undefined */
    CHECK_EQUAL(1, report().problems);
    CHECK_IS(ACL_ERROR_RT_AICORE_EXCEPTION, aclrtSynchronizeStream(stream));
    CHECK(strstr(aclGetRecentErrMsg(), "while queued work uses it") != NULL);
    while (report().tasks > 0) { /* what is queued must be skipped */
        (void)nanosleep(&(struct timespec){.tv_nsec = MS_IN_NS}, NULL);
    }
    cusim_break(CUDA_SUCCESS);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtFree(address));
    close_acl();
}

TEST(memory_free_with_sync_waits) {
    open_acl(NULL);
    aclrtStream stream = stream_acl();
    void *address = alloc_acl(4096);
    CHECK_OK(cusim_delay_stream(stream, 20 * MS_IN_NS));
    CHECK_OK(aclrtMemsetAsync(address, 4096, 1, 4096, stream));
    CHECK_OK(aclrtFreeWithDevSync(address));
    CHECK_EQUAL(0, report().problems);
    CHECK_OK(aclrtDestroyStream(stream));
    close_acl();
}

TEST(memory_info_is_of_hbm) {
    open_acl(NULL);
    size_t free_before = 0;
    size_t free_now = 0;
    size_t total = 0;
    CHECK_OK(aclrtGetMemInfo(ACL_HBM_MEM, &free_before, &total));
    CHECK_EQUAL(1024 * MIB, total);
    void *address = NULL;
    CHECK_OK(aclrtMallocAlign32(&address, 1, ACL_MEM_MALLOC_HUGE_ONLY));
    CHECK_OK(aclrtGetMemInfo(ACL_HBM_MEM, &free_now, &total));
    CHECK_EQUAL(free_before - 2 * MIB, free_now);
    CHECK_OK(aclrtGetMemInfo(ACL_DDR_MEM, &free_now, &total));
    CHECK_EQUAL(0, total);
    CHECK_OK(aclrtFree(address));
    close_acl();
}

TEST(memory_pointers_tell_where_they_point) {
    open_acl(with_two_devices);
    aclrtPtrAttributes attributes;
    int local = 0;
    void *host = NULL;
    CHECK_OK(aclrtSetDevice(1));
    void *address = alloc_acl(64);
    CHECK_OK(aclrtMallocHost(&host, 64));
    CHECK_OK(aclrtPointerGetAttributes(address, &attributes));
    CHECK_EQUAL(ACL_MEM_LOCATION_TYPE_DEVICE, attributes.location.type);
    CHECK_EQUAL(1, attributes.location.id);
    CHECK_OK(aclrtPointerGetAttributes(host, &attributes));
    CHECK_EQUAL(ACL_MEM_LOCATION_TYPE_HOST, attributes.location.type);
    CHECK_OK(aclrtPointerGetAttributes(&local, &attributes));
    CHECK_EQUAL(ACL_MEM_LOCATION_TYPE_UNREGISTERED, attributes.location.type);
    CHECK_OK(aclrtFreeHost(host));
    CHECK_OK(aclrtFree(address));
    CHECK_OK(aclrtResetDevice(1));
    close_acl();
}

TEST(host_memory_is_registered_once) {
    open_acl(NULL);
    void *memory = aligned_alloc(4096, 8192);
    void *seen = NULL;
    CHECK_OK(aclrtHostRegister(memory, 8192, ACL_HOST_REGISTER_MAPPED, &seen));
    CHECK(seen == memory);
    CHECK_IS(ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
             aclrtHostRegister(memory, 4096, ACL_HOST_REGISTER_MAPPED, &seen));
    CHECK_EQUAL(1, report().registrations);
    CHECK_OK(aclrtHostUnregister(memory));
    CHECK_IS(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, aclrtHostUnregister(memory));
    free(memory);
    close_acl();
}
