/* virtual.c - virtual memory: reserved addresses, physical memory, and mappings.
 *
 * As the driver's, but for this: memory is accessible to its own device once it is mapped. A
 * mapping is removed by its address alone, so it is always a whole one. Physical memory cannot be
 * freed while it is mapped: the documentation does not say that it stays.
 */
#include <pthread.h>
#include <stdlib.h>

#include "runtime.h"
#include "sim.h"

#define GIANT_PAGE ((size_t)1 << 30)

/* A reservation, a mapping (by address), or physical memory (by handle, as long as 1). */
typedef struct piece {
    sim_range range; /* first, as the table needs it */
    aclrtDrvMemHandle handle;
    int attribute;
    int device;
    size_t mappings;
} piece;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static sim_table reservations, mappings, physical;

static bool insert(sim_table *table, const piece *made) {
    piece *copy = malloc(sizeof *copy);
    if (copy != NULL) {
        *copy = *made;
        if (!sim_table_insert(table, &copy->range)) {
            free(copy);
            copy = NULL;
        }
    }
    return copy != NULL;
}

static void drop(sim_table *table, piece *gone) {
    sim_table_remove(table, &gone->range);
    free(gone);
}

/* Torch reserves a few bytes before any thread has set a device, to see whether it can. */
aclError aclrtReserveMemAddress(void **out, size_t size, size_t alignment, void *expected,
                                uint64_t flags) {
    ACL_ENTER(aclrtReserveMemAddress);
    size_t granule = 0;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    if (out == NULL || size == 0 || alignment != 0 || expected != NULL || flags > 1) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID,
                        "aclrtReserveMemAddress: size, alignment, expected address or flags");
    }
    CUresult result = cuInit(0);
    if (result == CUDA_SUCCESS) {
        result = cuMemGetAllocationGranularity(&granule, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    }
    CUdeviceptr address = 0;
    if (result == CUDA_SUCCESS) {
        size = (size + granule - 1) / granule * granule;
        result = cuMemAddressReserve(&address, size, 0, 0, 0);
    }
    if (result != CUDA_SUCCESS) {
        return acl_done(result);
    }
    (void)pthread_mutex_lock(&lock);
    bool noted = insert(&reservations, &(piece){.range = {.base = address, .size = size}});
    (void)pthread_mutex_unlock(&lock);
    if (!noted) {
        (void)cuMemAddressFree(address, size);
        return acl_done(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *out = (void *)(uintptr_t)address;
    return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void *address) {
    ACL_ENTER(aclrtReleaseMemAddress);
    (void)pthread_mutex_lock(&lock);
    piece *found = sim_table_at(&reservations, (uintptr_t)address);
    CUresult result = found == NULL ? CUDA_ERROR_INVALID_VALUE
                                    : cuMemAddressFree(acl_address(address), found->range.size);
    if (result == CUDA_SUCCESS) {
        drop(&reservations, found);
    }
    (void)pthread_mutex_unlock(&lock);
    if (found == NULL) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID,
                        "aclrtReleaseMemAddress: %p is not the start of a reservation", address);
    }
    return acl_done(result);
}

static bool is_giant(aclrtMemAttr attribute) {
    return attribute == ACL_HBM_MEM_HUGE1G || attribute == ACL_HBM_MEM_P2P_HUGE1G;
}

static aclError prop_check(const char *name, const aclrtPhysicalMemProp *prop) {
    if (prop == NULL || prop->handleType != ACL_MEM_HANDLE_TYPE_NONE ||
        prop->allocationType != ACL_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != ACL_MEM_LOCATION_TYPE_DEVICE || prop->reserve != 0) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: only pinned memory of a device", name);
    }
    bool hbm = prop->memAttr == ACL_HBM_MEM_HUGE || prop->memAttr == ACL_HBM_MEM_NORMAL ||
               prop->memAttr == ACL_HBM_MEM_P2P_HUGE || prop->memAttr == ACL_HBM_MEM_P2P_NORMAL ||
               is_giant(prop->memAttr);
    if (!hbm) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: memory attribute %d", name,
                        (int)prop->memAttr);
    }
    return ACL_SUCCESS;
}

static CUmemAllocationProp prop_of(const aclrtPhysicalMemProp *prop) {
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)prop->location.id}};
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *out, size_t size, const aclrtPhysicalMemProp *prop,
                             uint64_t flags) {
    ACL_ENTER_ON_DEVICE(aclrtMallocPhysical);
    aclError error = prop_check("aclrtMallocPhysical", prop);
    if (error != ACL_SUCCESS) {
        return error;
    }
    if (out == NULL || flags != 0 || (is_giant(prop->memAttr) && size % GIANT_PAGE != 0)) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMallocPhysical: flags, or %zu bytes",
                        size);
    }
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp wanted = prop_of(prop);
    CUresult result = cuMemCreate(&handle, size, &wanted, 0);
    if (result != CUDA_SUCCESS) {
        return acl_done(result);
    }
    piece made = {.range = {.base = handle, .size = 1},
                  .attribute = (int)prop->memAttr,
                  .device = (int)prop->location.id};
    (void)pthread_mutex_lock(&lock);
    bool noted = insert(&physical, &made);
    (void)pthread_mutex_unlock(&lock);
    if (!noted) {
        (void)cuMemRelease(handle);
        return acl_done(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *out = (aclrtDrvMemHandle)(uintptr_t)handle;
    return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    ACL_ENTER_ON_DEVICE(aclrtFreePhysical);
    (void)pthread_mutex_lock(&lock);
    piece *found = sim_table_at(&physical, (uintptr_t)handle);
    bool free_able = found != NULL && found->mappings == 0;
    if (free_able) {
        drop(&physical, found);
    }
    (void)pthread_mutex_unlock(&lock);
    if (!free_able) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreePhysical: %p is %s", handle,
                        found == NULL ? "no handle" : "still mapped");
    }
    return acl_done(cuMemRelease((CUmemGenericAllocationHandle)(uintptr_t)handle));
}

/* With the lock held. */
static CUresult map(void *address, size_t size, piece *memory) {
    CUdeviceptr where = acl_address(address);
    CUresult result = cuMemMap(where, size, 0, memory->range.base, 0);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = memory->device},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    result = cuMemSetAccess(where, size, &access, 1);
    piece made = {.range = {.base = where, .size = size},
                  .handle = (aclrtDrvMemHandle)memory->range.base,
                  .attribute = memory->attribute};
    if (result == CUDA_SUCCESS && !insert(&mappings, &made)) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result != CUDA_SUCCESS) {
        (void)cuMemUnmap(where, size);
    }
    return result;
}

aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle,
                     uint64_t flags) {
    ACL_ENTER_ON_DEVICE(aclrtMapMem);
    if (offset != 0 || flags != 0) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: offset and flags must be 0");
    }
    (void)pthread_mutex_lock(&lock);
    piece *memory = sim_table_at(&physical, (uintptr_t)handle);
    CUresult result = memory == NULL ? CUDA_ERROR_INVALID_HANDLE : map(address, size, memory);
    if (result == CUDA_SUCCESS) {
        memory->mappings++;
    }
    (void)pthread_mutex_unlock(&lock);
    return acl_done(result);
}

/* Give other devices access to what is mapped at `address`; its own device keeps its access. */
aclError aclrtMemSetAccess(void *address, size_t size, aclrtMemAccessDesc *desc, size_t count) {
    ACL_ENTER_ON_DEVICE(aclrtMemSetAccess);
    CUresult result = desc == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        CUmemAccessDesc access = {
            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)desc[i].location.id},
            .flags = (int)desc[i].flags};
        result = desc[i].location.type == ACL_MEM_LOCATION_TYPE_DEVICE
                     ? cuMemSetAccess(acl_address(address), size, &access, 1)
                     : CUDA_ERROR_INVALID_VALUE;
    }
    return acl_done(result);
}

/* The driver may wait here for running work, so it is called without the lock. */
aclError aclrtUnmapMem(void *address) {
    ACL_ENTER_ON_DEVICE(aclrtUnmapMem);
    (void)pthread_mutex_lock(&lock);
    piece *found = sim_table_at(&mappings, (uintptr_t)address);
    piece gone = found == NULL ? (piece){0} : *found;
    if (found != NULL) {
        drop(&mappings, found);
    }
    (void)pthread_mutex_unlock(&lock);
    if (found == NULL) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID,
                        "aclrtUnmapMem: %p is not the start of a mapping", address);
    }
    CUresult result = cuMemUnmap(acl_address(address), gone.range.size);
    (void)pthread_mutex_lock(&lock);
    piece *memory = sim_table_at(&physical, (uintptr_t)gone.handle);
    if (result == CUDA_SUCCESS && memory != NULL) {
        memory->mappings--;
    } else if (result != CUDA_SUCCESS && !insert(&mappings, &gone)) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    (void)pthread_mutex_unlock(&lock);
    return acl_done(result);
}

int aclsim_memory_attribute(const void *address) {
    (void)pthread_mutex_lock(&lock);
    const piece *found = sim_table_find(&mappings, (uintptr_t)address);
    int attribute = found == NULL ? -1 : found->attribute;
    (void)pthread_mutex_unlock(&lock);
    return attribute;
}

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *prop,
                                          aclrtMemGranularityOptions option, size_t *out) {
    ACL_ENTER(aclrtMemGetAllocationGranularity);
    aclError error = prop_check("aclrtMemGetAllocationGranularity", prop);
    if (error != ACL_SUCCESS) {
        return error;
    }
    if (is_giant(prop->memAttr)) {
        *out = GIANT_PAGE;
        return ACL_SUCCESS;
    }
    CUmemAllocationProp wanted = prop_of(prop);
    CUresult result = cuInit(0);
    return acl_done(
        result != CUDA_SUCCESS ? result : cuMemGetAllocationGranularity(out, &wanted, (int)option));
}
