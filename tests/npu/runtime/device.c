/* device.c - the process, its devices, and the device that each thread has set.
 *
 * The context of a device is its primary one. It is retained by the first aclrtSetDevice() and
 * released by aclrtResetDevice(), however often the device was set.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime.h"
#include "settings.h"

/* Of an Ascend 910B3. */
enum { CUBE_CORES = 20, VECTOR_CORES = 40, L2_BYTES = 192 << 20 };

static atomic_bool initialised;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext contexts[CUSIM_MAX_DEVICES]; /* NULL: not set, or reset */

/* The driver forgets its contexts when a test resets it. */
static CUresult context_of(int32_t device, CUcontext *out) {
    CUresult result = cuInit(0);
    int count = 0;
    if (result == CUDA_SUCCESS) {
        result = cuDeviceGetCount(&count);
    }
    if (result != CUDA_SUCCESS || device < 0 || device >= count) {
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_DEVICE;
    }
    (void)pthread_mutex_lock(&lock);
    if (contexts[device] == NULL) {
        result = cuDevicePrimaryCtxRetain(&contexts[device], device);
    }
    *out = contexts[device];
    (void)pthread_mutex_unlock(&lock);
    return result;
}

aclError aclInit(const char *path) {
    ACL_ENTER(aclInit);
    (void)path;
    (void)cuInit(0); /* a machine without devices is no error */
    if (atomic_exchange(&initialised, true)) {
        return acl_fail(ACL_ERROR_REPEAT_INITIALIZE, "aclInit: was called before");
    }
    return ACL_SUCCESS;
}

aclError aclFinalize(void) {
    ACL_ENTER(aclFinalize);
    if (!atomic_exchange(&initialised, false)) {
        return acl_fail(ACL_ERROR_REPEAT_FINALIZE, "aclFinalize: without aclInit");
    }
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t *out) {
    ACL_ENTER(aclrtGetDeviceCount);
    int count = 0;
    CUresult result = cuInit(0);
    if (result == CUDA_SUCCESS) {
        result = cuDeviceGetCount(&count);
    } else if (result == CUDA_ERROR_NO_DEVICE) {
        result = CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS) {
        *out = (uint32_t)count;
    }
    return acl_done(result);
}

aclError aclrtSetDevice(int32_t device) {
    ACL_ENTER(aclrtSetDevice);
    CUcontext context = NULL;
    CUresult result = context_of(device, &context);
    return acl_done(result != CUDA_SUCCESS ? result : cuCtxSetCurrent(context));
}

aclError aclrtGetDevice(int32_t *device) {
    ACL_ENTER_ON_DEVICE(aclrtGetDevice);
    return acl_done(cuCtxGetDevice(device));
}

aclError aclrtResetDevice(int32_t device) {
    ACL_ENTER(aclrtResetDevice);
    int32_t current = -1;
    (void)cuCtxGetDevice(&current);
    (void)pthread_mutex_lock(&lock);
    bool known = device >= 0 && device < CUSIM_MAX_DEVICES && contexts[device] != NULL;
    if (known) {
        contexts[device] = NULL;
    }
    (void)pthread_mutex_unlock(&lock);
    if (!known) {
        return acl_fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtResetDevice: %d was not set", device);
    }
    if (current == device) {
        (void)cuCtxSetCurrent(NULL);
    }
    return acl_done(cuDevicePrimaryCtxRelease_v2(device));
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
    ACL_ENTER_ON_DEVICE(aclrtGetCurrentContext);
    return acl_done(cuCtxGetCurrent((CUcontext *)context));
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    ACL_ENTER(aclrtSetCurrentContext);
    if (context == NULL) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtSetCurrentContext: NULL");
    }
    return acl_done(cuCtxSetCurrent(context));
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    ACL_ENTER(aclrtGetPrimaryCtxState);
    uint32_t unused = 0;
    CUresult result = cuInit(0);
    return acl_done(result != CUDA_SUCCESS ? result
                                           : cuDevicePrimaryCtxGetState(
                                                 device, flags == NULL ? &unused : flags, active));
}

aclError aclrtSynchronizeDevice(void) { ACL_CALL(aclrtSynchronizeDevice, cuCtxSynchronize()); }

/* All streams of all devices. */
static CUresult work_query(void *unused) {
    (void)unused;
    cusim_open open;
    cusim_report(&open);
    return open.tasks == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
    ACL_ENTER_ON_DEVICE(aclrtSynchronizeDeviceWithTimeout);
    if (milliseconds >= 0 && acl_poll(work_query, NULL, milliseconds) != CUDA_SUCCESS) {
        return acl_fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "aclrtSynchronizeDevice: %d ms are over",
                        milliseconds);
    }
    return acl_done(cuCtxSynchronize());
}

/* ---- what the device says of itself ---------------------------------------------------------- */

const char *aclrtGetSocName(void) { return sim_setting_text(SIM_SET_SOC); }

aclError aclrtGetRunMode(aclrtRunMode *mode) {
    ACL_ENTER(aclrtGetRunMode);
    *mode = ACL_HOST;
    return ACL_SUCCESS;
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    ACL_ENTER(aclrtSetDeviceSatMode);
    (void)mode;
    return ACL_SUCCESS;
}

aclError aclrtSetOpExecuteTimeOut(uint32_t timeout) {
    ACL_ENTER(aclrtSetOpExecuteTimeOut);
    (void)timeout;
    return ACL_SUCCESS;
}

aclError aclrtSetOpWaitTimeout(uint32_t timeout) {
    ACL_ENTER(aclrtSetOpWaitTimeout);
    (void)timeout;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceUtilizationRate(int32_t device, aclrtUtilizationInfo *info) {
    ACL_ENTER(aclrtGetDeviceUtilizationRate);
    (void)device;
    memset(info, 0, sizeof *info);
    return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value) {
    ACL_ENTER(aclGetDeviceCapability);
    (void)device;
    *value = info == ACL_DEVICE_INFO_AI_CORE_NUM       ? CUBE_CORES
             : info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? VECTOR_CORES
                                                       : L2_BYTES;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
    ACL_ENTER(aclrtGetDeviceInfo);
    size_t total = 0;
    switch (attribute) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM:
        *value = CUBE_CORES;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM:
        *value = VECTOR_CORES;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_L2_CACHE_SIZE:
        *value = L2_BYTES;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: {
        CUresult result = cuDeviceTotalMem_v2(&total, (CUdevice)device);
        *value = (int64_t)total;
        return acl_done(result);
    }
    default:
        *value = 0; /* what is not listed is not there */
        return ACL_SUCCESS;
    }
}

static const aclCannAttr attributes[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16,
                                         ACL_CANN_ATTR_JIT_COMPILE};

aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) {
    ACL_ENTER(aclGetCannAttribute);
    (void)attribute;
    *value = 1;
    return ACL_SUCCESS;
}

aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
    ACL_ENTER(aclGetCannAttributeList);
    *list = attributes;
    *count = sizeof attributes / sizeof attributes[0];
    return ACL_SUCCESS;
}

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
    ACL_ENTER(aclsysGetCANNVersion);
    (void)name;
    memset(version, 0, sizeof *version);
    (void)snprintf(version->version, sizeof version->version, "%s", sim_setting_text(SIM_SET_CANN));
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    ACL_CALL(aclrtDeviceCanAccessPeer, cuDeviceCanAccessPeer(can, device, peer));
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
    ACL_ENTER_ON_DEVICE(aclrtDeviceEnablePeerAccess);
    CUcontext context = NULL;
    CUresult result = context_of(peer, &context);
    if (result == CUDA_SUCCESS) {
        result = cuCtxEnablePeerAccess(context, flags);
    }
    return acl_done(result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED ? CUDA_SUCCESS : result);
}

aclError aclrtDeviceGetBareTgid(int32_t *pid) {
    ACL_ENTER(aclrtDeviceGetBareTgid);
    *pid = getpid();
    return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic) {
    ACL_ENTER(aclrtGetLogicDevIdByUserDevId);
    *logic = user;
    return ACL_SUCCESS;
}
