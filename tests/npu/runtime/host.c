/* host.c - host memory that copies do not wait for: allocated, or registered. */
#include "runtime.h"

aclError aclrtMallocHost(void **out, size_t size) {
    ACL_ENTER_ON_DEVICE(aclrtMallocHost);
    return acl_done(cuMemHostAlloc(out, size, CU_MEMHOSTALLOC_PORTABLE));
}

aclError aclrtFreeHost(void *address) {
    ACL_ENTER_ON_DEVICE(aclrtFreeHost);
    return acl_done(cuMemFreeHost(address));
}

static unsigned flags_of(aclrtHostRegisterType type) {
    unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    flags |= type == ACL_HOST_REGISTER_IOMEMORY ? (unsigned)CU_MEMHOSTREGISTER_IOMEMORY : 0;
    flags |= type == ACL_HOST_REGISTER_READONLY ? (unsigned)CU_MEMHOSTREGISTER_READ_ONLY : 0;
    return flags;
}

/* The device sees the memory at the host's address. */
aclError aclrtHostRegister(void *address, uint64_t size, aclrtHostRegisterType type, void **out) {
    ACL_ENTER_ON_DEVICE(aclrtHostRegister);
    if (out == NULL) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostRegister: no place for the address");
    }
    CUresult result = cuMemHostRegister_v2(address, size, flags_of(type));
    if (result == CUDA_SUCCESS) {
        *out = address;
    }
    return acl_done(result);
}

aclError aclrtHostUnregister(void *address) {
    ACL_ENTER_ON_DEVICE(aclrtHostUnregister);
    return acl_done(cuMemHostUnregister(address));
}
