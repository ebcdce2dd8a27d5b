/* test_virtual.c - virtual memory. */
#include "acl_harness.h"

static aclrtPhysicalMemProp prop_acl(aclrtMemAttr attribute) {
    return (aclrtPhysicalMemProp){.memAttr = attribute,
                                  .location = {.type = ACL_MEM_LOCATION_TYPE_DEVICE}};
}

TEST(virtual_addresses_can_be_reserved_before_a_device_is_set) {
    void *address = NULL;
    CHECK_OK(aclrtReserveMemAddress(&address, 512, 0, NULL, 1)); /* as torch_npu does */
    CHECK_OK(aclrtReleaseMemAddress(address));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtReleaseMemAddress(address));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtReserveMemAddress(&address, 512, 0, NULL, 2));
}

TEST(virtual_memory_holds_its_bytes_wherever_it_is_mapped) {
    open_acl(NULL);
    char *address = NULL;
    aclrtDrvMemHandle handle = NULL;
    aclrtPhysicalMemProp prop = prop_acl(ACL_HBM_MEM_HUGE);
    CHECK_OK(aclrtReserveMemAddress((void **)&address, 2 * GRANULE, 0, NULL, 1));
    CHECK_OK(aclrtMallocPhysical(&handle, GRANULE, &prop, 0));
    CHECK_OK(aclrtMapMem(address, GRANULE, 0, handle, 0));
    CHECK_EQUAL(ACL_HBM_MEM_HUGE, aclsim_memory_attribute(address + 1));
    CHECK_OK(aclrtMemset(address, GRANULE, 7, GRANULE)); /* accessible at once */
    CHECK_OK(aclrtMapMem(address + GRANULE, GRANULE, 0, handle, 0));
    CHECK_OK(aclrtUnmapMem(address));
    CHECK_EQUAL(-1, aclsim_memory_attribute(address));
    unsigned char byte = 0;
    CHECK_OK(aclrtMemcpy(&byte, 1, address + 2 * GRANULE - 1, 1, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK_EQUAL(7, byte);
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtFreePhysical(handle)); /* still mapped */
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtReleaseMemAddress(address));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtUnmapMem(address)); /* no mapping begins there */
    CHECK_OK(aclrtUnmapMem(address + GRANULE));
    CHECK_OK(aclrtFreePhysical(handle));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtFreePhysical(handle));
    CHECK_OK(aclrtReleaseMemAddress(address));
    close_acl();
}

TEST(virtual_memory_needs_a_mapping_for_each_handle) {
    open_acl(NULL);
    char *address = NULL;
    aclrtDrvMemHandle handles[2];
    aclrtPhysicalMemProp prop = prop_acl(ACL_HBM_MEM_HUGE);
    CHECK_OK(aclrtReserveMemAddress((void **)&address, 2 * GRANULE, 0, NULL, 1));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(aclrtMallocPhysical(&handles[i], GRANULE, &prop, 0));
        CHECK_OK(aclrtMapMem(address + (size_t)i * GRANULE, GRANULE, 0, handles[i], 0));
    }
    CHECK_OK(aclrtUnmapMem(address)); /* the first alone */
    CHECK_EQUAL(1, report().mappings);
    CHECK_OK(aclrtUnmapMem(address + GRANULE));
    CHECK_OK(aclrtFreePhysical(handles[0]));
    CHECK_OK(aclrtFreePhysical(handles[1]));
    CHECK_OK(aclrtReleaseMemAddress(address));
    close_acl();
}

TEST(virtual_memory_arguments_are_checked) {
    open_acl(NULL);
    aclrtDrvMemHandle handle = NULL;
    aclrtPhysicalMemProp prop = prop_acl(ACL_HBM_MEM_HUGE);
    size_t granularity = 0;
    CHECK_OK(aclrtMemGetAllocationGranularity(&prop, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM,
                                              &granularity));
    CHECK_EQUAL(GRANULE, granularity);
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtMallocPhysical(&handle, GRANULE - 1, &prop, 0));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtMallocPhysical(&handle, GRANULE, &prop, 1));
    CHECK_IS(ACL_ERROR_RT_MEMORY_ALLOCATION, aclrtMallocPhysical(&handle, 2048 * MIB, &prop, 0));
    prop.memAttr = ACL_DDR_MEM;
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtMallocPhysical(&handle, GRANULE, &prop, 0));
    prop = prop_acl(ACL_HBM_MEM_HUGE1G);
    CHECK_OK(aclrtMemGetAllocationGranularity(&prop, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM,
                                              &granularity));
    CHECK_EQUAL(1024 * MIB, granularity);
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtMallocPhysical(&handle, GRANULE, &prop, 0));
    CHECK(handle == NULL);
    close_acl();
}
