/* test_memory.c - plain device memory. */
#include "harness.h"

TEST(memory_info_is_exact) {
    open_driver(NULL);
    size_t before = free_bytes();
    CHECK_EQUAL(1024 * MIB, before);
    CUdeviceptr small = alloc(100);
    CHECK_EQUAL(before - 512, free_bytes());
    CUdeviceptr medium = alloc(MIB - 1);
    CHECK_EQUAL(before - 512 - MIB, free_bytes());
    CUdeviceptr big = alloc(MIB);
    CHECK_EQUAL(before - 512 - MIB - 2 * MIB, free_bytes());
    CUdeviceptr odd = alloc(2 * MIB + 1);
    CHECK_EQUAL(before - 512 - MIB - 6 * MIB, free_bytes());
    CHECK_EQUAL(4, report().allocations);
    CHECK_EQUAL(100 + 4 * MIB, report().allocation_bytes);
    CHECK_OK(cuMemFree_v2(small));
    CHECK_OK(cuMemFree_v2(medium));
    CHECK_OK(cuMemFree_v2(big));
    CHECK_OK(cuMemFree_v2(odd));
    CHECK_EQUAL(before, free_bytes());
    close_driver();
}

TEST(memory_alloc_when_it_does_not_fit) {
    open_driver(NULL);
    CUdeviceptr half = alloc(512 * MIB);
    CUdeviceptr address = 7;
    CHECK_IS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&address, 512 * MIB + 1));
    CHECK_IS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&address, SIZE_MAX));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(&address, 0));
    CHECK_EQUAL(7, address);
    CHECK_OK(cuMemAlloc_v2(&address, 512 * MIB));
    CHECK_EQUAL(0, free_bytes());
    CHECK_OK(cuMemFree_v2(address));
    CHECK_OK(cuMemFree_v2(half));
    close_driver();
}

TEST(memory_free_of_what_is_none) {
    open_driver(NULL);
    CUdeviceptr address = alloc(4096);
    mapped_range range = map_range(GRANULE);
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address + 512));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(range.address));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(12345));
    CHECK_OK(cuMemFree_v2(address));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address));
    unmap_range(&range);
    close_driver();
}

TEST(memory_small_allocations_share_a_page) {
    open_driver(NULL);
    CUdeviceptr first = alloc(1);
    CUdeviceptr second = alloc(1);
    CHECK_EQUAL(first + 512, second);
    CHECK_OK(cuMemFree_v2(first));
    CHECK(all_bytes(cusim_shadow(second, 1), CUSIM_FRESH, 1));
    CHECK_EQUAL(0, (uintptr_t)cusim_shadow(first, 1));
    CUdeviceptr third = alloc(1);
    CHECK(third > second); /* freed addresses do not come again at once */
    CHECK_OK(cuMemFree_v2(second));
    CHECK_OK(cuMemFree_v2(third));
    close_driver();
}

static void with_reuse(cusim_options *options) { options->reuse = 1; }

TEST(memory_addresses_come_again_if_told_so) {
    open_driver(with_reuse);
    CUdeviceptr small = alloc(1);
    CUdeviceptr big = alloc(4 * MIB);
    CUdeviceptr other = alloc(1);
    CHECK_OK(cuMemFree_v2(small));
    CHECK_OK(cuMemFree_v2(big));
    CHECK_EQUAL(small, alloc(1));
    CHECK_EQUAL(big, alloc(4 * MIB));
    CHECK_OK(cuMemFree_v2(small));
    CHECK_OK(cuMemFree_v2(big));
    CHECK_OK(cuMemFree_v2(other));
    close_driver();
}

TEST(memory_fresh_bytes_are_a_pattern) {
    open_driver(NULL);
    CUdeviceptr address = alloc(3 * MIB + 5);
    const unsigned char *bytes = cusim_shadow(address, 3 * MIB + 5);
    CHECK(all_bytes(bytes, CUSIM_FRESH, 3 * MIB + 5));
    CHECK_EQUAL(0, (uintptr_t)cusim_shadow(address, 3 * MIB + 6));
    CHECK(cusim_is_device(address));
    CHECK(!cusim_is_device((CUdeviceptr)(uintptr_t)bytes));
    CHECK_OK(cuMemFree_v2(address));
    close_driver();
}

static void touch(void) {
    open_driver(NULL);
    *(volatile char *)(uintptr_t)alloc(4096) = 1; /* NOLINT */
}

static void touch_freed(void) {
    open_driver(NULL);
    CUdeviceptr address = alloc(2 * MIB);
    volatile char *bytes = cusim_shadow(address, 2 * MIB);
    CHECK_OK(cuMemFree_v2(address));
    *bytes = 1;
}

TEST(memory_faults_when_the_host_touches_it) {
    char output[4096];
    CHECK(run_child(touch, output, sizeof output) != 0);
    CHECK(run_child(touch_freed, output, sizeof output) != 0);
}

TEST(memory_address_range) {
    open_driver(NULL);
    CUdeviceptr address = alloc(5000);
    mapped_range range = map_range(GRANULE);
    CUdeviceptr base = 0;
    size_t size = 0;
    CHECK_OK(cuMemGetAddressRange_v2(&base, &size, address + 4999));
    CHECK_EQUAL(address, base);
    CHECK_EQUAL(5000, size);
    CHECK_OK(cuMemGetAddressRange_v2(&base, NULL, range.address + 1));
    CHECK_EQUAL(range.address, base);
    CHECK_IS(CUDA_ERROR_NOT_FOUND, cuMemGetAddressRange_v2(&base, &size, address + 5000));
    unmap_range(&range);
    CHECK_OK(cuMemFree_v2(address));
    close_driver();
}

TEST(memory_pointer_attributes) {
    open_driver(NULL);
    CUdeviceptr address = alloc(5000);
    unsigned char *host = pinned(100);
    unsigned type = 0;
    int ordinal = 9;
    CUdeviceptr seen = 0;
    int pageable = 0;
    CHECK_OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address + 10));
    CHECK_EQUAL(CU_MEMORYTYPE_DEVICE, type);
    CHECK_OK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address));
    CHECK_EQUAL(0, ordinal);
    CHECK_OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)host));
    CHECK_EQUAL(CU_MEMORYTYPE_HOST, type);
    CHECK_OK(cuPointerGetAttribute(&seen, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, (uintptr_t)host));
    CHECK_EQUAL((uintptr_t)host, seen);
    CHECK_IS(CUDA_ERROR_INVALID_VALUE,
             cuPointerGetAttribute(&seen, CU_POINTER_ATTRIBUTE_HOST_POINTER, address));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE,
             cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)&pageable));
    CHECK_OK(cuMemFreeHost(host));
    CHECK_OK(cuMemFree_v2(address));
    close_driver();
}

#ifdef __SANITIZE_ADDRESS__

static volatile char *victim;

static void write_victim(void) { *victim = 1; }

TEST(memory_overruns_are_reported_by_the_sanitiser) {
    open_driver(NULL);
    char output[4096];
    CUdeviceptr first = alloc(504);
    CUdeviceptr second = alloc(512);
    unsigned char *host = pinned(96);
    victim = (volatile char *)cusim_shadow(first, 504) + 504;
    CHECK(run_child(write_victim, output, sizeof output) != 0);
    CHECK(strstr(output, "use-after-poison") != NULL);
    victim = (volatile char *)host + 96;
    CHECK(run_child(write_victim, output, sizeof output) != 0);
    CHECK(strstr(output, "use-after-poison") != NULL);
    CHECK_OK(cuMemFreeHost(host));
    CHECK_OK(cuMemFree_v2(first));
    CHECK_OK(cuMemFree_v2(second));
    close_driver();
}

#endif
