/* acl_abi.h - the part of the public binary interface of libascendcl.so that is simulated.
 *
 * With ACLSIM_REAL_HEADERS the headers of CANN take this one's place, as they lie in the wheel of
 * torch_npu: compiling against both proves that they agree (`make check-headers`).
 */
#ifndef ACLSIM_ACL_ABI_H
#define ACLSIM_ACL_ABI_H

#ifdef ACLSIM_REAL_HEADERS
#define FUNC_VISIBILITY
#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#else
#include "acl_types.h"

#define ACL_API __attribute__((visibility("default")))

/* Process, devices, contexts: device.c, errors.c. */
ACL_API aclError aclInit(const char *path);
ACL_API aclError aclFinalize(void);
ACL_API const char *aclGetRecentErrMsg(void);
ACL_API aclError aclrtGetLastError(aclrtLastErrLevel level);
ACL_API aclError aclrtPeekAtLastError(aclrtLastErrLevel level);
ACL_API aclError aclrtGetDeviceCount(uint32_t *count);
ACL_API aclError aclrtSetDevice(int32_t device);
ACL_API aclError aclrtGetDevice(int32_t *device);
ACL_API aclError aclrtResetDevice(int32_t device);
ACL_API aclError aclrtGetCurrentContext(aclrtContext *context);
ACL_API aclError aclrtSetCurrentContext(aclrtContext context);
ACL_API aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active);
ACL_API aclError aclrtSynchronizeDevice(void);
ACL_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds);
ACL_API const char *aclrtGetSocName(void);
ACL_API aclError aclrtGetRunMode(aclrtRunMode *mode);
ACL_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode);
ACL_API aclError aclrtSetOpExecuteTimeOut(uint32_t timeout);
ACL_API aclError aclrtSetOpWaitTimeout(uint32_t timeout);
ACL_API aclError aclrtGetDeviceUtilizationRate(int32_t device, aclrtUtilizationInfo *info);
ACL_API aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value);
ACL_API aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value);
ACL_API aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value);
ACL_API aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count);
ACL_API aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version);
ACL_API aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer);
ACL_API aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags);
ACL_API aclError aclrtDeviceGetBareTgid(int32_t *pid);
ACL_API aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic);

/* Device memory: memory.c. */
ACL_API aclError aclrtMalloc(void **out, size_t size, aclrtMemMallocPolicy policy);
ACL_API aclError aclrtMallocAlign32(void **out, size_t size, aclrtMemMallocPolicy policy);
ACL_API aclError aclrtMallocCached(void **out, size_t size, aclrtMemMallocPolicy policy);
ACL_API aclError aclrtFree(void *address);
ACL_API aclError aclrtFreeWithDevSync(void *address);
ACL_API aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *free_bytes, size_t *total_bytes);
ACL_API aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *out);

/* Virtual memory: virtual.c. */
ACL_API aclError aclrtReserveMemAddress(void **out, size_t size, size_t alignment, void *expected,
                                        uint64_t flags);
ACL_API aclError aclrtReleaseMemAddress(void *address);
ACL_API aclError aclrtMallocPhysical(aclrtDrvMemHandle *out, size_t size,
                                     const aclrtPhysicalMemProp *prop, uint64_t flags);
ACL_API aclError aclrtFreePhysical(aclrtDrvMemHandle handle);
ACL_API aclError aclrtMemSetAccess(void *address, size_t size, aclrtMemAccessDesc *desc,
                                   size_t count);
ACL_API aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle,
                             uint64_t flags);
ACL_API aclError aclrtUnmapMem(void *address);
ACL_API aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *prop,
                                                  aclrtMemGranularityOptions option, size_t *out);

/* Host memory: host.c. */
ACL_API aclError aclrtMallocHost(void **out, size_t size);
ACL_API aclError aclrtFreeHost(void *address);
ACL_API aclError aclrtHostRegister(void *address, uint64_t size, aclrtHostRegisterType type,
                                   void **out);
ACL_API aclError aclrtHostUnregister(void *address);

/* Streams: stream.c. */
ACL_API aclError aclrtCreateStream(aclrtStream *out);
ACL_API aclError aclrtCreateStreamWithConfig(aclrtStream *out, uint32_t priority, uint32_t flags);
ACL_API aclError aclrtDestroyStream(aclrtStream stream);
ACL_API aclError aclrtDestroyStreamForce(aclrtStream stream);
ACL_API aclError aclrtSynchronizeStream(aclrtStream stream);
ACL_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds);
ACL_API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status);
ACL_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
ACL_API aclError aclrtStreamGetId(aclrtStream stream, int32_t *out);
ACL_API aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode);
ACL_API aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag);
ACL_API aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag);
ACL_API aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr attribute,
                                         aclrtStreamAttrValue *value);
ACL_API aclError aclrtCtxGetCurrentDefaultStream(aclrtStream *out);
ACL_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *data);
ACL_API aclError aclrtLaunchCallback(aclrtCallback function, void *data,
                                     aclrtCallbackBlockType block, aclrtStream stream);
ACL_API aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream);
ACL_API aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream stream);
ACL_API aclError aclrtProcessReport(int32_t milliseconds);

/* Events: event.c. */
ACL_API aclError aclrtCreateEvent(aclrtEvent *out);
ACL_API aclError aclrtCreateEventWithFlag(aclrtEvent *out, uint32_t flags);
ACL_API aclError aclrtCreateEventExWithFlag(aclrtEvent *out, uint32_t flags);
ACL_API aclError aclrtDestroyEvent(aclrtEvent event);
ACL_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
ACL_API aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream);
ACL_API aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus *status);
ACL_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status);
ACL_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status);
ACL_API aclError aclrtSynchronizeEvent(aclrtEvent event);
ACL_API aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t milliseconds);
ACL_API aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end);
ACL_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds);

/* Copies and fills: copy.c. */
ACL_API aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size,
                             aclrtMemcpyKind kind);
ACL_API aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size,
                                  aclrtMemcpyKind kind, aclrtStream stream);
ACL_API aclError aclrtMemset(void *to, size_t room, int32_t value, size_t size);
ACL_API aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size,
                                  aclrtStream stream);

/* Operators: operators.c. */
ACL_API aclError aclopCompileAndExecute(const char *name, int input_count,
                                        const aclTensorDesc *const input_descs[],
                                        const aclDataBuffer *const inputs[], int output_count,
                                        const aclTensorDesc *const output_descs[],
                                        aclDataBuffer *const outputs[], const aclopAttr *attributes,
                                        aclopEngineType engine, aclopCompileType compile,
                                        const char *path, aclrtStream stream);

#endif
#endif
