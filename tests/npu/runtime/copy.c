/* copy.c - copies and fills. `room` is what fits at the target: more than that is refused. */
#include <string.h>

#include "runtime.h"

static aclError room_check(const char *name, size_t room, size_t size) {
    return size <= room ? ACL_SUCCESS
                        : acl_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes into room for %zu",
                                   name, size, room);
}

/* The driver refuses memory that is not where `kind` says. */
static CUresult copy(void *to, const void *from, size_t size, aclrtMemcpyKind kind,
                     CUstream stream) {
    switch ((int)kind) {
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE:
        return cuMemcpyHtoDAsync_v2(acl_address(to), from, size, stream);
    case ACL_MEMCPY_DEVICE_TO_HOST:
        return cuMemcpyDtoHAsync_v2(to, acl_address(from), size, stream);
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INNER_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INTER_DEVICE_TO_DEVICE:
        return cuMemcpyDtoDAsync_v2(acl_address(to), acl_address(from), size, stream);
    case ACL_MEMCPY_HOST_TO_HOST:
        if (cusim_is_device(acl_address(to)) || cusim_is_device(acl_address(from))) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        return cuMemcpyAsync(acl_address(to), acl_address(from), size, stream);
    case ACL_MEMCPY_DEFAULT:
        return cuMemcpyAsync(acl_address(to), acl_address(from), size, stream);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size,
                          aclrtMemcpyKind kind, aclrtStream stream) {
    ACL_ENTER_ON_DEVICE(aclrtMemcpyAsync);
    aclError error = room_check("aclrtMemcpyAsync", room, size);
    return error != ACL_SUCCESS ? error : acl_done(copy(to, from, size, kind, stream));
}

/* In the default stream, and over when the call returns. */
aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind) {
    ACL_ENTER_ON_DEVICE(aclrtMemcpy);
    aclError error = room_check("aclrtMemcpy", room, size);
    if (error != ACL_SUCCESS) {
        return error;
    }
    CUresult result = copy(to, from, size, kind, NULL);
    return acl_done(result != CUDA_SUCCESS ? result : cuStreamSynchronize(NULL));
}

aclError aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    ACL_ENTER_ON_DEVICE(aclrtMemset);
    aclError error = room_check("aclrtMemset", room, size);
    if (error != ACL_SUCCESS) {
        return error;
    }
    if (!cusim_is_device(acl_address(to))) {
        memset(to, value, size);
        return ACL_SUCCESS;
    }
    CUresult result = cuMemsetD8Async(acl_address(to), (unsigned char)value, size, NULL);
    return acl_done(result != CUDA_SUCCESS ? result : cuStreamSynchronize(NULL));
}

aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, aclrtStream stream) {
    ACL_ENTER_ON_DEVICE(aclrtMemsetAsync);
    aclError error = room_check("aclrtMemsetAsync", room, size);
    return error != ACL_SUCCESS
               ? error
               : acl_done(cuMemsetD8Async(acl_address(to), (unsigned char)value, size, stream));
}
