/* cuda_abi.h - the part of the CUDA driver's public ABI that the simulated driver answers.
 *
 * Names, values and layouts are those of libcuda.so.1 (CUDA 12 and 13, 64 bit), as exported: a
 * function that has a version carries it (cuMemAlloc_v2). Only what is used here is declared.
 */
#ifndef CUSIM_CUDA_ABI_H
#define CUSIM_CUDA_ABI_H

#include <stddef.h>

#define SIM_API __attribute__((visibility("default")))

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef void (*CUhostFn)(void *data);

typedef struct CUuuid {
    char bytes[16];
} CUuuid;

typedef enum CUresult {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_SYSTEM_NOT_READY = 802,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_UNKNOWN = 999,
} CUresult;

enum {
    CU_STREAM_DEFAULT = 0,
    CU_STREAM_NON_BLOCKING = 1,
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
};

#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

enum {
    CU_EVENT_DEFAULT = 0,
    CU_EVENT_BLOCKING_SYNC = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_EVENT_INTERPROCESS = 4,
};

enum {
    CU_MEMHOSTALLOC_PORTABLE = 1,
    CU_MEMHOSTALLOC_DEVICEMAP = 2,
    CU_MEMHOSTALLOC_WRITECOMBINED = 4,
};

enum {
    CU_MEMHOSTREGISTER_PORTABLE = 1,
    CU_MEMHOSTREGISTER_DEVICEMAP = 2,
    CU_MEMHOSTREGISTER_IOMEMORY = 4,
    CU_MEMHOSTREGISTER_READ_ONLY = 8,
};

enum {
    CU_MEMORYTYPE_HOST = 1,
    CU_MEMORYTYPE_DEVICE = 2,
};

enum {
    CU_POINTER_ATTRIBUTE_CONTEXT = 1,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
    CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
    CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
    CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
    CU_POINTER_ATTRIBUTE_MAPPED = 13,
};

enum {
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
};

typedef struct CUmemLocation {
    int type;
    int id;
} CUmemLocation;

typedef struct CUmemAllocationProp {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

_Static_assert(sizeof(CUmemAllocationProp) == 32, "the driver's layout");
_Static_assert(sizeof(CUmemAccessDesc) == 12, "the driver's layout");

/* Process and errors. */
SIM_API CUresult cuInit(unsigned flags);
SIM_API CUresult cuDriverGetVersion(int *version);
SIM_API CUresult cuGetErrorName(CUresult error, const char **text);
SIM_API CUresult cuGetErrorString(CUresult error, const char **text);

/* Devices. */
SIM_API CUresult cuDeviceGetCount(int *count);
SIM_API CUresult cuDeviceGet(CUdevice *device, int ordinal);
SIM_API CUresult cuDeviceGetName(char *name, int length, CUdevice device);
SIM_API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device);
SIM_API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
SIM_API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device);
SIM_API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer);

/* Contexts. */
SIM_API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
SIM_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
SIM_API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device);
SIM_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active);
SIM_API CUresult cuCtxGetCurrent(CUcontext *context);
SIM_API CUresult cuCtxSetCurrent(CUcontext context);
SIM_API CUresult cuCtxPushCurrent_v2(CUcontext context);
SIM_API CUresult cuCtxPopCurrent_v2(CUcontext *context);
SIM_API CUresult cuCtxGetDevice(CUdevice *device);
SIM_API CUresult cuCtxSynchronize(void);
SIM_API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags);
SIM_API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest);

/* Plain device memory. */
SIM_API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes);
SIM_API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size);
SIM_API CUresult cuMemFree_v2(CUdeviceptr address);
SIM_API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address);
SIM_API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address);

/* Virtual memory management. */
SIM_API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment,
                                     CUdeviceptr hint, unsigned long long flags);
SIM_API CUresult cuMemAddressFree(CUdeviceptr address, size_t size);
SIM_API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                             const CUmemAllocationProp *prop, unsigned long long flags);
SIM_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
SIM_API CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags);
SIM_API CUresult cuMemUnmap(CUdeviceptr address, size_t size);
SIM_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address);
SIM_API CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc,
                                size_t count);
SIM_API CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                               int option);

/* Pinned host memory. */
SIM_API CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags);
SIM_API CUresult cuMemFreeHost(void *address);
SIM_API CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags);
SIM_API CUresult cuMemHostUnregister(void *address);

/* Streams and events. */
SIM_API CUresult cuStreamCreate(CUstream *stream, unsigned flags);
SIM_API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority);
SIM_API CUresult cuStreamDestroy_v2(CUstream stream);
SIM_API CUresult cuStreamSynchronize(CUstream stream);
SIM_API CUresult cuStreamQuery(CUstream stream);
SIM_API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
SIM_API CUresult cuStreamIsCapturing(CUstream stream, int *status);
SIM_API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn fn, void *data);
SIM_API CUresult cuEventCreate(CUevent *event, unsigned flags);
SIM_API CUresult cuEventDestroy_v2(CUevent event);
SIM_API CUresult cuEventRecord(CUevent event, CUstream stream);
SIM_API CUresult cuEventQuery(CUevent event);
SIM_API CUresult cuEventSynchronize(CUevent event);
SIM_API CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);

/* Copies and fills. */
SIM_API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream);
SIM_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size,
                                      CUstream stream);
SIM_API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream);
SIM_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size,
                                      CUstream stream);
SIM_API CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                                   CUcontext from_context, size_t size, CUstream stream);
SIM_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size);
SIM_API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size);
SIM_API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size);
SIM_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream stream);
SIM_API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t size);

#endif
