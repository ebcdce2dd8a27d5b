/* test_vmm.c - virtual memory management. */
#include "harness.h"

TEST(vmm_granularity) {
    open_driver(NULL);
    CUmemAllocationProp prop = prop_of(0);
    CUmemAllocationProp other = prop_of(3);
    size_t granularity = 0;
    CHECK_OK(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CHECK_EQUAL(GRANULE, granularity);
    CHECK_IS(CUDA_ERROR_INVALID_DEVICE, cuMemGetAllocationGranularity(&granularity, &other, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemGetAllocationGranularity(&granularity, &prop, 5));
    CUdeviceptr address = 0;
    CUmemGenericAllocationHandle handle = 0;
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(&address, GRANULE / 2, 0, 0, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(&address, 0, 0, 0, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(&address, GRANULE, 3 * GRANULE, 0, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&handle, GRANULE + 4096, &prop, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&handle, GRANULE, NULL, 0));
    CHECK_IS(CUDA_ERROR_INVALID_DEVICE, cuMemCreate(&handle, GRANULE, &other, 0));
    close_driver();
}

TEST(vmm_reserve_aligns) {
    open_driver(NULL);
    CUdeviceptr address = 0;
    CUdeviceptr hinted = 0;
    CHECK_OK(cuMemAddressReserve(&address, GRANULE, 64 * MIB, 0, 0));
    CHECK_EQUAL(0, address % (64 * MIB));
    CHECK_OK(cuMemAddressReserve(&hinted, GRANULE, 0, address + 512 * MIB, 0));
    CHECK_EQUAL(address + 512 * MIB, hinted);
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(address, 2 * GRANULE));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(address + GRANULE, GRANULE));
    CHECK_OK(cuMemAddressFree(address, GRANULE));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(address, GRANULE));
    CHECK_OK(cuMemAddressFree(hinted, GRANULE));
    close_driver();
}

TEST(vmm_access_is_needed) {
    open_driver(NULL);
    mapped_range range = map_range(2 * GRANULE);
    char byte = 1;
    CUmemAccessDesc none = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_NONE);
    CUmemAccessDesc reading = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READ);
    CUmemAccessDesc writing = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUmemAccessDesc nobody = access_of(5, CU_MEM_ACCESS_FLAGS_PROT_READ);
    CHECK_OK(cuMemcpyHtoD_v2(range.address, &byte, 1));
    CHECK_OK(cuMemSetAccess(range.address, range.size, &reading, 1));
    CHECK_OK(cuMemcpyDtoH_v2(&byte, range.address, 1));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(range.address, &byte, 1));
    CHECK_OK(cuMemSetAccess(range.address, range.size, &none, 1));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(&byte, range.address, 1));
    CHECK_OK(cuMemSetAccess(range.address, range.size, &writing, 1));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(range.address, GRANULE, &writing, 1));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(range.address, 4 * GRANULE, &writing, 1));
    CHECK_IS(CUDA_ERROR_INVALID_DEVICE, cuMemSetAccess(range.address, range.size, &nobody, 1));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(range.address, range.size, &writing, 0));
    unmap_range(&range);
    close_driver();
}

TEST(vmm_map_without_access_is_not_usable) {
    open_driver(NULL);
    CUmemAllocationProp prop = prop_of(0);
    CUdeviceptr address = 0;
    CUmemGenericAllocationHandle handle = 0;
    char byte = 1;
    CHECK_OK(cuMemAddressReserve(&address, 2 * GRANULE, 0, 0, 0));
    CHECK_OK(cuMemCreate(&handle, GRANULE, &prop, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemMap(address, 2 * GRANULE, 0, handle, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemMap(address + 4096, GRANULE, 0, handle, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemMap(address + 2 * GRANULE, GRANULE, 0, handle, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemMap(address, GRANULE, 0, handle + 1, 0));
    CHECK_OK(cuMemMap(address, GRANULE, 0, handle, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemMap(address, GRANULE, 0, handle, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(address, &byte, 1));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(address, 2 * GRANULE));
    CHECK_OK(cuMemUnmap(address, GRANULE));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(address, GRANULE));
    CHECK_OK(cuMemRelease(handle));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemRelease(handle));
    CHECK_OK(cuMemAddressFree(address, 2 * GRANULE));
    close_driver();
}

TEST(vmm_bytes_follow_the_handle) {
    open_driver(NULL);
    mapped_range range = map_range(GRANULE);
    CUdeviceptr other = 0;
    CUmemAccessDesc desc = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    char byte = 0;
    CHECK_OK(cuMemcpyDtoH_v2(&byte, range.address, 1));
    CHECK_EQUAL((char)CUSIM_FRESH, byte);
    CHECK_OK(cuMemsetD8_v2(range.address, 42, GRANULE));
    CHECK_OK(cuCtxSynchronize());
    CHECK_OK(cuMemAddressReserve(&other, GRANULE, 0, 0, 0));
    CHECK_OK(cuMemMap(other, GRANULE, 0, range.handle, 0)); /* twice at once */
    CHECK(all_bytes(cusim_shadow(other, GRANULE), 42, GRANULE));
    CHECK_OK(cuMemUnmap(range.address, GRANULE));
    CHECK_OK(cuMemSetAccess(other, GRANULE, &desc, 1));
    CHECK_OK(cuMemcpyDtoH_v2(&byte, other + GRANULE - 1, 1));
    CHECK_EQUAL(42, byte);
    CHECK_OK(cuMemUnmap(other, GRANULE));
    CHECK_OK(cuMemMap(range.address, GRANULE, 0, range.handle, 0));
    CHECK(all_bytes(cusim_shadow(range.address, GRANULE), 42, GRANULE));
    CHECK_OK(cuMemAddressFree(other, GRANULE));
    unmap_range(&range);
    close_driver();
}

TEST(vmm_a_handle_comes_back_from_an_address) {
    open_driver(NULL);
    size_t before = free_bytes();
    mapped_range range = map_range(GRANULE);
    CUdeviceptr other = 0;
    CUmemGenericAllocationHandle again = 0;
    CHECK_OK(cuMemRetainAllocationHandle(&again, (void *)range.address));
    CHECK_EQUAL(range.handle, again);
    CHECK_OK(cuMemRelease(again));
    CHECK_OK(cuMemRelease(range.handle));
    CHECK_OK(cuMemRetainAllocationHandle(&again, (void *)(range.address + GRANULE / 2)));
    CHECK_OK(cuMemAddressReserve(&other, GRANULE, 0, 0, 0));
    CHECK_OK(cuMemMap(other, GRANULE, 0, again, 0));
    CHECK_OK(cuMemRelease(again));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemRelease(again));
    CHECK_OK(cuMemsetD8_v2(range.address, 42, GRANULE));
    CHECK_OK(cuCtxSynchronize());
    CHECK(all_bytes(cusim_shadow(other, GRANULE), 42, GRANULE));
    CHECK_EQUAL(before - GRANULE, free_bytes());
    CHECK_OK(cuMemUnmap(range.address, GRANULE));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemRetainAllocationHandle(&again, (void *)range.address));
    CHECK_EQUAL(before - GRANULE, free_bytes());
    CHECK_OK(cuMemUnmap(other, GRANULE));
    CHECK_EQUAL(before, free_bytes());
    CHECK_OK(cuMemAddressFree(range.address, GRANULE));
    CHECK_OK(cuMemAddressFree(other, GRANULE));
    close_driver();
}

TEST(vmm_memory_lives_while_it_is_mapped) {
    open_driver(NULL);
    size_t before = free_bytes();
    mapped_range range = map_range(GRANULE);
    CHECK_OK(cuMemRelease(range.handle));
    CHECK_EQUAL(before - GRANULE, free_bytes());
    CHECK_EQUAL(1, report().handles);
    CHECK_OK(cuMemsetD8_v2(range.address, 1, GRANULE));
    CHECK_OK(cuCtxSynchronize());
    CHECK_OK(cuMemUnmap(range.address, GRANULE));
    CHECK_EQUAL(before, free_bytes());
    CHECK_EQUAL(0, report().handles);
    CHECK_OK(cuMemAddressFree(range.address, GRANULE));
    close_driver();
}

TEST(vmm_unmap_takes_whole_mappings) {
    open_driver(NULL);
    CUdeviceptr address = 0;
    CUmemAllocationProp prop = prop_of(0);
    CUmemGenericAllocationHandle handles[3];
    CHECK_OK(cuMemAddressReserve(&address, 8 * GRANULE, 0, 0, 0));
    for (size_t i = 0; i < 3; i++) { /* 2 granules each; a hole before the third */
        CHECK_OK(cuMemCreate(&handles[i], 2 * GRANULE, &prop, 0));
        CHECK_OK(cuMemMap(address + (i == 2 ? 6 : 2 * i) * GRANULE, 2 * GRANULE, 0, handles[i], 0));
        CHECK_OK(cuMemRelease(handles[i]));
    }
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(address, GRANULE));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(address + GRANULE, GRANULE));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(address, 3 * GRANULE));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(address, 8 * GRANULE));
    CHECK_OK(cuMemUnmap(address, 4 * GRANULE));
    CHECK_OK(cuMemUnmap(address + 6 * GRANULE, 2 * GRANULE));
    CHECK_OK(cuMemAddressFree(address, 8 * GRANULE));
    close_driver();
}

TEST(vmm_copy_may_span_mappings_but_no_hole) {
    open_driver(NULL);
    CUdeviceptr address = 0;
    CUmemAllocationProp prop = prop_of(0);
    CUmemAccessDesc desc = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUmemGenericAllocationHandle handle = 0;
    CHECK_OK(cuMemAddressReserve(&address, 4 * GRANULE, 0, 0, 0));
    for (size_t i = 0; i < 2; i++) {
        CHECK_OK(cuMemCreate(&handle, GRANULE, &prop, 0));
        CHECK_OK(cuMemMap(address + i * GRANULE, GRANULE, 0, handle, 0));
        CHECK_OK(cuMemRelease(handle));
    }
    CHECK_OK(cuMemSetAccess(address, 2 * GRANULE, &desc, 1));
    CHECK_OK(cuMemsetD8_v2(address + 5, 9, 2 * GRANULE - 5));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(address + 6, 9, 2 * GRANULE - 5));
    CHECK_OK(cuCtxSynchronize());
    CHECK(all_bytes((char *)cusim_shadow(address, 2 * GRANULE) + 5, 9, 2 * GRANULE - 5));
    CHECK_OK(cuMemUnmap(address, 2 * GRANULE));
    CHECK_OK(cuMemAddressFree(address, 4 * GRANULE));
    close_driver();
}

TEST(vmm_capacity) {
    open_driver(NULL);
    CUmemAllocationProp prop = prop_of(0);
    CUmemGenericAllocationHandle handle = 0;
    CUmemGenericAllocationHandle other = 0;
    CUdeviceptr plain = alloc(1000 * MIB);
    CHECK_IS(CUDA_ERROR_OUT_OF_MEMORY, cuMemCreate(&handle, 26 * MIB, &prop, 0));
    CHECK_OK(cuMemCreate(&handle, 24 * MIB, &prop, 0));
    CHECK_EQUAL(0, free_bytes());
    CHECK_IS(CUDA_ERROR_OUT_OF_MEMORY, cuMemCreate(&other, GRANULE, &prop, 0));
    CHECK_OK(cuMemRelease(handle));
    CHECK_EQUAL(24 * MIB, free_bytes());
    CHECK_OK(cuMemFree_v2(plain));
    close_driver();
}

static void with_other_granules(cusim_options *options) { options->granularity = 64 * KIB; }

TEST(vmm_granularity_can_be_set) {
    open_driver(with_other_granules);
    mapped_range range = map_range(64 * KIB);
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(range.address, 4096));
    unmap_range(&range);
    close_driver();
}

static void without_vmm(cusim_options *options) { options->vmm = 0; }

TEST(vmm_can_be_absent) {
    open_driver(without_vmm);
    CUdeviceptr address = 0;
    int supported = 1;
    CHECK_OK(cuDeviceGetAttribute(&supported, 102, 0));
    CHECK_EQUAL(0, supported);
    CHECK_IS(CUDA_ERROR_NOT_SUPPORTED, cuMemAddressReserve(&address, GRANULE, 0, 0, 0));
    close_driver();
}

static void with_two(cusim_options *options) { options->devices = 2; }

TEST(vmm_access_is_by_device) {
    open_driver(with_two);
    CUcontext other = NULL;
    CUdeviceptr there = 0;
    mapped_range range = map_range(GRANULE);
    CUmemAccessDesc both[] = {access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
                              access_of(1, CU_MEM_ACCESS_FLAGS_PROT_READ)};
    char byte = 0;
    CHECK_OK(cuDevicePrimaryCtxRetain(&other, 1));
    CHECK_OK(cuCtxPushCurrent_v2(other));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(&byte, range.address, 1));
    CHECK_OK(cuMemSetAccess(range.address, GRANULE, both, 2));
    CHECK_OK(cuMemcpyDtoH_v2(&byte, range.address, 1));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(range.address, &byte, 1));
    CHECK_OK(cuMemAlloc_v2(&there, GRANULE));
    CHECK_OK(cuMemcpyPeerAsync(there, other, range.address, other, GRANULE, NULL));
    CHECK_OK(cuCtxSynchronize());
    CHECK_OK(cuMemFree_v2(there));
    CHECK_OK(cuCtxPopCurrent_v2(NULL));
    CHECK_OK(cuDevicePrimaryCtxRelease_v2(1));
    unmap_range(&range);
    close_driver();
}
