/* memory.c - plain device memory.
 *
 * aclrtMalloc() adds 32 bytes behind what was asked for, which a kernel may read; neither
 * aclrtMallocAlign32() nor mapped memory has them, and a kernel that reads there is a problem.
 * aclrtFree() does not wait: work that still uses the memory is a problem.
 */
#include <pthread.h>
#include <stdlib.h>

#include "runtime.h"
#include "sim.h"

enum { UNIT = 32, PADDING = 32, POLICIES = ACL_MEM_MALLOC_HUGE1G_ONLY_P2P + 1 };
#define HUGE_PAGE ((size_t)2 << 20)
#define GIANT_PAGE ((size_t)1 << 30)

typedef struct allocation {
    sim_range range; /* first, as the table needs it */
    int policy;
} allocation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static sim_table allocations;

static size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

/* The pages that are taken for the bytes are the allocation's, if nothing else will do. */
static size_t page_of(int kind) {
    switch (kind) {
    case ACL_MEM_MALLOC_HUGE_ONLY:
    case ACL_MEM_MALLOC_HUGE_ONLY_P2P:
        return HUGE_PAGE;
    case ACL_MEM_MALLOC_HUGE1G_ONLY:
    case ACL_MEM_MALLOC_HUGE1G_ONLY_P2P:
        return GIANT_PAGE;
    default:
        return UNIT;
    }
}

static bool note(uintptr_t base, size_t size, int policy) {
    allocation *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return false;
    }
    *made = (allocation){.range = {.base = base, .size = size}, .policy = policy};
    (void)pthread_mutex_lock(&lock);
    bool noted = sim_table_insert(&allocations, &made->range);
    (void)pthread_mutex_unlock(&lock);
    if (!noted) {
        free(made);
    }
    return noted;
}

static void forget(const void *address) {
    (void)pthread_mutex_lock(&lock);
    allocation *found = sim_table_at(&allocations, (uintptr_t)address);
    if (found != NULL) {
        sim_table_remove(&allocations, &found->range);
    }
    (void)pthread_mutex_unlock(&lock);
    free(found);
}

int aclsim_policy(const void *address) {
    (void)pthread_mutex_lock(&lock);
    const allocation *found = sim_table_find(&allocations, (uintptr_t)address);
    int policy = found == NULL ? -1 : found->policy;
    (void)pthread_mutex_unlock(&lock);
    return policy;
}

static aclError allocate(void **out, size_t size, size_t padding, unsigned policy) {
    enum { KIND_MASK = 0xff, SIZES = 2 };
    unsigned known = ACL_MEM_TYPE_LOW_BAND_WIDTH | ACL_MEM_TYPE_HIGH_BAND_WIDTH |
                     ACL_MEM_ACCESS_USER_SPACE_READONLY;
    unsigned kind = policy & KIND_MASK;
    if (out == NULL || size == 0 || kind >= POLICIES || (policy & ~(known | KIND_MASK)) != 0) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMalloc: %zu bytes, policy %#x", size,
                        policy);
    }
    size_t page = page_of((int)kind);
    if (size > SIZE_MAX / SIZES) {
        return acl_done(CUDA_ERROR_OUT_OF_MEMORY);
    }
    size = round_up(round_up(size, UNIT) + padding, page);
    CUdeviceptr address = 0;
    CUresult result = cuMemAlloc_v2(&address, size);
    if (result == CUDA_SUCCESS && !note(address, size, (int)policy)) {
        (void)cusim_free(address);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS) {
        *out = (void *)(uintptr_t)address;
    }
    return acl_done(result);
}

aclError aclrtMalloc(void **out, size_t size, aclrtMemMallocPolicy policy) {
    ACL_ENTER_ON_DEVICE(aclrtMalloc);
    return allocate(out, size, PADDING, policy);
}

aclError aclrtMallocCached(void **out, size_t size, aclrtMemMallocPolicy policy) {
    ACL_ENTER_ON_DEVICE(aclrtMallocCached);
    return allocate(out, size, PADDING, policy);
}

aclError aclrtMallocAlign32(void **out, size_t size, aclrtMemMallocPolicy policy) {
    ACL_ENTER_ON_DEVICE(aclrtMallocAlign32);
    return allocate(out, size, 0, policy);
}

/* Forgotten first: the address may be given out again at once. */
static aclError release(void *address, CUresult (*free_memory)(CUdeviceptr)) {
    int policy = aclsim_policy(address);
    if (policy < 0) {
        return acl_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: %p was not allocated", address);
    }
    forget(address);
    return acl_done(free_memory(acl_address(address)));
}

aclError aclrtFree(void *address) {
    ACL_ENTER_ON_DEVICE(aclrtFree);
    return release(address, cusim_free);
}

aclError aclrtFreeWithDevSync(void *address) {
    ACL_ENTER_ON_DEVICE(aclrtFreeWithDevSync);
    return release(address, cuMemFree_v2);
}

static bool is_ddr(aclrtMemAttr attribute) {
    return attribute == ACL_DDR_MEM || attribute == ACL_DDR_MEM_HUGE ||
           attribute == ACL_DDR_MEM_NORMAL || attribute == ACL_DDR_MEM_P2P_HUGE ||
           attribute == ACL_DDR_MEM_P2P_NORMAL;
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *free_bytes, size_t *total_bytes) {
    ACL_ENTER_ON_DEVICE(aclrtGetMemInfo);
    CUresult result = cuMemGetInfo_v2(free_bytes, total_bytes);
    if (result == CUDA_SUCCESS && is_ddr(attribute)) { /* the device has none */
        *free_bytes = *total_bytes = 0;
    }
    return acl_done(result);
}

aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *out) {
    ACL_ENTER(aclrtPointerGetAttributes);
    unsigned type = 0;
    int device = 0;
    CUdeviceptr where = acl_address(address);
    *out = (aclrtPtrAttributes){.location = {.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED}};
    if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, where) == CUDA_SUCCESS &&
        cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, where) ==
            CUDA_SUCCESS) {
        out->location.type = type == CU_MEMORYTYPE_DEVICE ? ACL_MEM_LOCATION_TYPE_DEVICE
                                                          : ACL_MEM_LOCATION_TYPE_HOST;
        out->location.id = (uint32_t)device;
    }
    return ACL_SUCCESS;
}
