/* ascend_device.h - the functions of the simulated ACL runtime that tests call themselves. */
#ifndef SWAPKIT_TESTS_ASCEND_DEVICE_H
#define SWAPKIT_TESTS_ASCEND_DEVICE_H

#include "../npu/runtime/acl_abi.h"
#include "../npu/runtime/aclsim.h"

#define ACL_TEST_CALLS(X)                                                                          \
    X(aclrtGetDeviceCount)                                                                         \
    X(aclrtSetDevice)                                                                              \
    X(aclrtGetDevice)                                                                              \
    X(aclrtGetCurrentContext)                                                                      \
    X(aclrtPointerGetAttributes)                                                                   \
    X(aclsim_fail)                                                                                 \
    X(aclsim_calls)                                                                                \
    X(aclsim_policy)                                                                               \
    X(aclsim_memory_attribute)

#define ACL_TEST_MEMBER(name) __typeof__(name) *name;
typedef struct acl_calls {
    ACL_TEST_CALLS(ACL_TEST_MEMBER)
} acl_calls;
#undef ACL_TEST_MEMBER

/* Found at the first call, which also sets every device once. */
const acl_calls *acl(void);

#endif
