/* cuda_memory.c - device memory, whole or in granules behind a range of addresses; host memory that
 * its copy engines may read and write.
 *
 * A granule is separate physical memory, mapped where it is committed, and where it has aliases.
 * Its handle is released at once: the mappings keep the memory, and the last unmap gives it back.
 * The driver does not wait for work on memory that is unmapped; the caller of decommit has waited.
 *
 * Granules are created and mapped one by one, although a piece costs the host some 46 us on an H100
 * whatever its size. The reason: cuMemMap maps a handle from its beginning only (its offset must be
 * 0), and cuMemUnmap only removes whole mappings. Of several granules in one handle none could move
 * while another is in use, as if granules were larger. But with 8 MiB a Llama of 1b (1b_4k of
 * benchmarks/virtual) at recompute's peak runs out of memory that is free in pieces, while 4 MiB
 * saves 0.2 s once: its first five steps map 9,600 granules of 2 MiB (0.45 s), those after the
 * sixth none. */
#include "backend/cuda.h"

static sk__cu_address device_address(const void *address) { return (uintptr_t)address; }

/* ---- opening --------------------------------------------------------------------------------- */

static bool device_has(const sk__cuda *cuda, int attribute) {
    int value = 0;
    return cuda->driver->cuDeviceGetAttribute(&value, attribute, cuda->device) == SK_CU_SUCCESS &&
           value != 0;
}

static void access_add(sk__cuda *cuda, sk__cu_device device) {
    cuda->access[cuda->naccess++] =
        (sk__cu_access){.location = {.type = SK_CU_LOCATION_DEVICE, .id = device},
                        .flags = SK_CU_ACCESS_READ_WRITE};
}

/* Let the other named devices use the memory, too, if the machine connects them. */
static void access_open(sk__cuda *cuda, uint64_t peers) {
    access_add(cuda, cuda->device);
    for (int number = 0; number < SK_CUDA_DEVICES; number++) {
        sk__cu_device peer = 0;
        int reaches = 0;
        bool usable =
            ((peers >> (unsigned)number) & 1) != 0 &&
            cuda->driver->cuDeviceGet(&peer, number) == SK_CU_SUCCESS && peer != cuda->device &&
            cuda->driver->cuDeviceCanAccessPeer(&reaches, peer, cuda->device) == SK_CU_SUCCESS &&
            reaches != 0;
        if (usable) {
            access_add(cuda, peer);
        }
    }
}

sk_status sk__cuda_memory_open(sk__cuda *cuda, const sk_cuda_params *params) {
    cuda->kind = (sk__cu_allocation){
        .type = SK_CU_ALLOCATION_PINNED,
        .location = {.type = SK_CU_LOCATION_DEVICE, .id = cuda->device},
        .rdma_capable = device_has(cuda, SK_CU_RDMA_WITH_VIRTUAL_MEMORY),
    };
    if (params->no_virtual_memory || !device_has(cuda, SK_CU_VIRTUAL_MEMORY)) {
        return SK_OK;
    }
    size_t least = 0;
    sk__cu_result result =
        cuda->driver->cuMemGetAllocationGranularity(&least, &cuda->kind, SK_CU_GRANULARITY_MINIMUM);
    if (result != SK_CU_SUCCESS) {
        return sk__cuda_fail(cuda->driver, SK_BACKEND_FAILED, "cuMemGetAllocationGranularity",
                             result);
    }
    sk_status status =
        sk__granule_choose("cuda", params->granule_bytes, least, &cuda->granule_bytes);
    if (status == SK_OK) {
        access_open(cuda, params->peer_devices);
    }
    return status;
}

/* ---- whole segments -------------------------------------------------------------------------- */

static sk_status memory_info(void *self, sk_memory_info *out) {
    sk_memory_info info = {0};
    SK_CUDA_VISIT(self, sk__visit_leave, cuMemGetInfo_v2, (&info.free_bytes, &info.total_bytes),
                  *out = info);
}

static sk_status memory_alloc(void *self, size_t nbytes, void **out) {
    sk__cu_address address = 0;
    SK_CUDA_VISIT(self, sk__visit_leave, cuMemAlloc_v2, (&address, nbytes),
                  *out = (void *)(uintptr_t)address);
}

static sk_status memory_free(void *self, void *address, size_t nbytes) {
    (void)nbytes;
    SK_CUDA_VISIT(self, sk__visit_leave_released, cuMemFree_v2, (device_address(address)), );
}

/* ---- virtual memory -------------------------------------------------------------------------- */

static sk_status range_reserve(void *self, size_t nbytes, void **out) {
    const sk__cuda *cuda = self;
    sk__cu_address address = 0;
    SK_CUDA_VISIT(cuda, sk__visit_leave, cuMemAddressReserve,
                  (&address, nbytes, cuda->granule_bytes, 0, 0), *out = (void *)(uintptr_t)address);
}

static sk_status range_release(void *self, void *address, size_t nbytes) {
    SK_CUDA_VISIT(self, sk__visit_leave_released, cuMemAddressFree,
                  (device_address(address), nbytes), );
}

/* Map physical memory behind one granule of addresses: new memory, or the memory at `twin`. */
static sk__cu_result granule_map(const sk__cuda *cuda, sk__cu_address address, sk__cu_address twin,
                                 const char **what) {
    sk__cu_memory memory = 0;
    sk__cu_result result = SK_CU_SUCCESS;
    if (twin != 0) {
        *what = "cuMemRetainAllocationHandle";
        result = cuda->driver->cuMemRetainAllocationHandle(&memory, (void *)(uintptr_t)twin);
    } else {
        *what = "cuMemCreate";
        result = cuda->driver->cuMemCreate(&memory, cuda->granule_bytes, &cuda->kind, 0);
    }
    if (result != SK_CU_SUCCESS) {
        return result;
    }
    *what = "cuMemMap";
    result = cuda->driver->cuMemMap(address, cuda->granule_bytes, 0, memory, 0);
    (void)cuda->driver->cuMemRelease(memory); /* a mapping keeps it */
    return result;
}

/* Unmap granules from `address` on, up to the first refusal; return the unmapped bytes. */
static size_t granules_unmap(const sk__cuda *cuda, sk__cu_address address, size_t nbytes,
                             sk__cu_result *result) {
    size_t done = 0;
    *result = SK_CU_SUCCESS;
    while (done < nbytes && *result == SK_CU_SUCCESS) {
        *result = cuda->driver->cuMemUnmap(address + done, cuda->granule_bytes);
        done += *result == SK_CU_SUCCESS ? cuda->granule_bytes : 0;
    }
    return done;
}

/* Fail if the device has too little left: otherwise a large request would map all of it in vain. */
static sk__cu_result memory_require(const sk__cuda *cuda, size_t nbytes, const char **what) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    *what = "cuMemGetInfo_v2";
    sk__cu_result result = cuda->driver->cuMemGetInfo_v2(&free_bytes, &total_bytes);
    if (result == SK_CU_SUCCESS && free_bytes < nbytes) {
        *what = "cuMemCreate";
        result = SK_CU_OUT_OF_MEMORY;
    }
    return result;
}

/* Map all of `nbytes`, or nothing: new memory, or the memory from `twin` on. */
static sk__cu_result granules_map(const sk__cuda *cuda, sk__cu_address address, sk__cu_address twin,
                                  size_t nbytes, const char **what) {
    const size_t granule = cuda->granule_bytes;
    size_t done = 0;
    bool much = twin == 0 && nbytes > granule;
    sk__cu_result result = much ? memory_require(cuda, nbytes, what) : SK_CU_SUCCESS;
    while (done < nbytes && result == SK_CU_SUCCESS) {
        result = granule_map(cuda, address + done, twin == 0 ? 0 : twin + done, what);
        done += result == SK_CU_SUCCESS ? granule : 0;
    }
    if (result == SK_CU_SUCCESS) {
        *what = "cuMemSetAccess";
        result = cuda->driver->cuMemSetAccess(address, nbytes, cuda->access, cuda->naccess);
    }
    if (result != SK_CU_SUCCESS) {
        sk__cu_result ignored = SK_CU_SUCCESS;
        (void)granules_unmap(cuda, address, done, &ignored);
    }
    return result;
}

static sk_status range_map(const sk__cuda *cuda, void *to, void *from, size_t nbytes) {
    const char *what = from == NULL ? "cuMemCreate" : "cuMemMap";
    sk_assert(nbytes % cuda->granule_bytes == 0);
    SK__VISIT(&sk__cuda_visitor, cuda, sk__visit_leave, what,
              granules_map(cuda, device_address(to), device_address(from), nbytes, &what), );
}

static sk_status range_commit(void *self, void *address, size_t nbytes) {
    return range_map(self, address, NULL, nbytes);
}

static sk_status range_alias(void *self, void *from, void *to, size_t nbytes) {
    return range_map(self, to, from, nbytes);
}

/* Unmap all of `nbytes`, or nothing. */
static sk__cu_result range_unmap(const sk__cuda *cuda, sk__cu_address address, size_t nbytes) {
    sk__cu_result result = SK_CU_SUCCESS;
    size_t done = granules_unmap(cuda, address, nbytes, &result);
    if (result != SK_CU_SUCCESS && done > 0) { /* map free memory again */
        const char *what = NULL;
        (void)granules_map(cuda, address, 0, done, &what);
    }
    return result;
}

static sk_status range_decommit(void *self, void *address, size_t nbytes) {
    const sk__cuda *cuda = self;
    sk_assert(nbytes % cuda->granule_bytes == 0);
    SK__VISIT(&sk__cuda_visitor, cuda, sk__visit_leave_released, "cuMemUnmap",
              range_unmap(cuda, device_address(address), nbytes), );
}

/* ---- host memory ----------------------------------------------------------------------------- */

static sk_status host_lock(void *self, void *address, size_t nbytes) {
    sk__cuda *cuda = self;
    sk_assert((nbytes & (nbytes - 1)) == 0 && (uintptr_t)address % nbytes == 0);
    SK_CUDA_VISIT(cuda, sk__visit_leave_locking, cuMemHostRegister_v2,
                  (address, nbytes, SK_CU_HOST_PORTABLE), sk__pieces_locked(&cuda->pieces, nbytes));
}

static sk_status host_unlock(void *self, void *address, size_t nbytes) {
    sk__cuda *cuda = self;
    SK_CUDA_VISIT(cuda, sk__visit_leave_released, cuMemHostUnregister, (address),
                  sk__pieces_unlocked(&cuda->pieces, nbytes));
}

void sk__cuda_memory_ops(const sk__cuda *cuda, sk_backend_ops *ops) {
    ops->memory_info = memory_info;
    ops->memory_alloc = memory_alloc;
    ops->memory_free = memory_free;
    ops->host_lock_bytes = SK_HOST_LOCK_BYTES;
    ops->host_lock = host_lock;
    ops->host_unlock = host_unlock;
    ops->granule_bytes = cuda->granule_bytes;
    if (cuda->granule_bytes != 0) {
        ops->range_reserve = range_reserve;
        ops->range_release = range_release;
        ops->range_commit = range_commit;
        ops->range_decommit = range_decommit;
        bool aliases = cuda->driver->cuMemRetainAllocationHandle != NULL;
        ops->range_alias = aliases ? range_alias : NULL;
    }
}
