/* runtime.h - the inside of the simulated ACL runtime.
 *
 * It is ACL's interface over the simulated driver of tests/cuda/driver, to which it is linked. A
 * stream, an event, a context and a physical memory handle are the driver's own, as are all rules
 * about memory, streams and work. Here is what ACL does in another way.
 *
 * Every function begins with ACL_ENTER and returns through acl_done() or acl_fail(), which remember
 * the thread's last error and its text.
 */
#ifndef ACLSIM_RUNTIME_H
#define ACLSIM_RUNTIME_H

#include <stdbool.h>

#include "acl_abi.h"
#include "aclsim.h"
#include "cuda_abi.h"
#include "cusim.h"

#define ACL_FUNCTIONS(X)                                                                           \
    X(aclInit)                                                                                     \
    X(aclFinalize)                                                                                 \
    X(aclGetRecentErrMsg)                                                                          \
    X(aclrtGetLastError)                                                                           \
    X(aclrtPeekAtLastError)                                                                        \
    X(aclrtGetDeviceCount)                                                                         \
    X(aclrtSetDevice)                                                                              \
    X(aclrtGetDevice)                                                                              \
    X(aclrtResetDevice)                                                                            \
    X(aclrtGetCurrentContext)                                                                      \
    X(aclrtSetCurrentContext)                                                                      \
    X(aclrtGetPrimaryCtxState)                                                                     \
    X(aclrtSynchronizeDevice)                                                                      \
    X(aclrtSynchronizeDeviceWithTimeout)                                                           \
    X(aclrtGetSocName)                                                                             \
    X(aclrtGetRunMode)                                                                             \
    X(aclrtSetDeviceSatMode)                                                                       \
    X(aclrtSetOpExecuteTimeOut)                                                                    \
    X(aclrtSetOpWaitTimeout)                                                                       \
    X(aclrtGetDeviceUtilizationRate)                                                               \
    X(aclGetDeviceCapability)                                                                      \
    X(aclrtGetDeviceInfo)                                                                          \
    X(aclGetCannAttribute)                                                                         \
    X(aclGetCannAttributeList)                                                                     \
    X(aclsysGetCANNVersion)                                                                        \
    X(aclrtDeviceCanAccessPeer)                                                                    \
    X(aclrtDeviceEnablePeerAccess)                                                                 \
    X(aclrtDeviceGetBareTgid)                                                                      \
    X(aclrtGetLogicDevIdByUserDevId)                                                               \
    X(aclrtMalloc)                                                                                 \
    X(aclrtMallocAlign32)                                                                          \
    X(aclrtMallocCached)                                                                           \
    X(aclrtFree)                                                                                   \
    X(aclrtFreeWithDevSync)                                                                        \
    X(aclrtGetMemInfo)                                                                             \
    X(aclrtPointerGetAttributes)                                                                   \
    X(aclrtReserveMemAddress)                                                                      \
    X(aclrtReleaseMemAddress)                                                                      \
    X(aclrtMallocPhysical)                                                                         \
    X(aclrtFreePhysical)                                                                           \
    X(aclrtMemSetAccess)                                                                           \
    X(aclrtMapMem)                                                                                 \
    X(aclrtUnmapMem)                                                                               \
    X(aclrtMemGetAllocationGranularity)                                                            \
    X(aclrtMallocHost)                                                                             \
    X(aclrtFreeHost)                                                                               \
    X(aclrtHostRegister)                                                                           \
    X(aclrtHostUnregister)                                                                         \
    X(aclrtCreateStream)                                                                           \
    X(aclrtCreateStreamWithConfig)                                                                 \
    X(aclrtDestroyStream)                                                                          \
    X(aclrtDestroyStreamForce)                                                                     \
    X(aclrtSynchronizeStream)                                                                      \
    X(aclrtSynchronizeStreamWithTimeout)                                                           \
    X(aclrtStreamQuery)                                                                            \
    X(aclrtStreamWaitEvent)                                                                        \
    X(aclrtStreamGetId)                                                                            \
    X(aclrtSetStreamFailureMode)                                                                   \
    X(aclrtSetStreamOverflowSwitch)                                                                \
    X(aclrtGetStreamOverflowSwitch)                                                                \
    X(aclrtSetStreamAttribute)                                                                     \
    X(aclrtCtxGetCurrentDefaultStream)                                                             \
    X(aclrtLaunchHostFunc)                                                                         \
    X(aclrtLaunchCallback)                                                                         \
    X(aclrtSubscribeReport)                                                                        \
    X(aclrtUnSubscribeReport)                                                                      \
    X(aclrtProcessReport)                                                                          \
    X(aclrtCreateEvent)                                                                            \
    X(aclrtCreateEventWithFlag)                                                                    \
    X(aclrtCreateEventExWithFlag)                                                                  \
    X(aclrtDestroyEvent)                                                                           \
    X(aclrtRecordEvent)                                                                            \
    X(aclrtResetEvent)                                                                             \
    X(aclrtQueryEvent)                                                                             \
    X(aclrtQueryEventStatus)                                                                       \
    X(aclrtQueryEventWaitStatus)                                                                   \
    X(aclrtSynchronizeEvent)                                                                       \
    X(aclrtSynchronizeEventWithTimeout)                                                            \
    X(aclrtEventElapsedTime)                                                                       \
    X(aclrtEventGetTimestamp)                                                                      \
    X(aclrtMemcpy)                                                                                 \
    X(aclrtMemcpyAsync)                                                                            \
    X(aclrtMemset)                                                                                 \
    X(aclrtMemsetAsync)                                                                            \
    X(aclopCompileAndExecute)

#define ACL_FUNCTION_MEMBER(name) ACL_FN_##name,
typedef enum acl_function { ACL_FUNCTIONS(ACL_FUNCTION_MEMBER) ACL_FUNCTION_COUNT } acl_function;
#undef ACL_FUNCTION_MEMBER

/* Count the call; say whether it is to fail, or the driver cannot be called any more. */
aclError acl_enter(acl_function function);
/* The same for a function that works only on a thread with a device. */
aclError acl_enter_on_device(acl_function function);
/* The driver's result as an error of ACL, remembered. */
aclError acl_done(CUresult result);
/* Remember an error and why. */
aclError acl_fail(aclError error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define ACL_ENTER(name)                                                                            \
    do {                                                                                           \
        aclError entered_ = acl_enter(ACL_FN_##name);                                              \
        if (entered_ != ACL_SUCCESS) {                                                             \
            return entered_;                                                                       \
        }                                                                                          \
    } while (0)
#define ACL_ENTER_ON_DEVICE(name)                                                                  \
    do {                                                                                           \
        aclError entered_ = acl_enter_on_device(ACL_FN_##name);                                    \
        if (entered_ != ACL_SUCCESS) {                                                             \
            return entered_;                                                                       \
        }                                                                                          \
    } while (0)
/* What most functions are: enter, one call of the driver, done. */
#define ACL_CALL(name, call)                                                                       \
    do {                                                                                           \
        ACL_ENTER(name);                                                                           \
        return acl_done(call);                                                                     \
    } while (0)

/* Poll `query` until it says something else than NOT_READY, or for so long (-1: without end).
 * Returns what it said last. */
CUresult acl_poll(CUresult (*query)(void *), void *argument, int32_t milliseconds);

static inline CUdeviceptr acl_address(const void *address) {
    return (CUdeviceptr)(uintptr_t)address;
}

#endif
