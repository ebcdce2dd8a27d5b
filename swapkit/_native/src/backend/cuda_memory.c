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

enum { GRANULE_BYTES = 2 * 1024 * 1024 }; /* the device's own large page */

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
    size_t granule =
        params->granule_bytes == 0 ? sk__max(GRANULE_BYTES, least) : params->granule_bytes;
    if (least == 0 || granule % least != 0 || granule > SK_MAX_BYTES) {
        return sk__fail(SK_INVALID,
                        "cuda backend: granules of %zu bytes are not supported: the device maps "
                        "multiples of %zu",
                        granule, least);
    }
    cuda->granule_bytes = granule;
    access_open(cuda, params->peer_devices);
    return SK_OK;
}

/* ---- whole segments -------------------------------------------------------------------------- */

sk_status sk__cuda_memory_info(void *self, sk_memory_info *out) {
    const sk__cuda *cuda = self;
    sk_memory_info info = {0};
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuMemGetInfo_v2(&info.free_bytes, &info.total_bytes);
    }
    sk_status status = sk__cuda_leave(cuda, pushed, "cuMemGetInfo_v2", result);
    if (status == SK_OK) {
        *out = info;
    }
    return status;
}

sk_status sk__cuda_memory_alloc(void *self, size_t nbytes, void **out) {
    const sk__cuda *cuda = self;
    sk__cu_address address = 0;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuMemAlloc_v2(&address, nbytes);
    }
    sk_status status = sk__cuda_leave(cuda, pushed, "cuMemAlloc_v2", result);
    if (status == SK_OK) {
        *out = (void *)(uintptr_t)address;
    }
    return status;
}

sk_status sk__cuda_memory_free(void *self, void *address, size_t nbytes) {
    const sk__cuda *cuda = self;
    (void)nbytes;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuMemFree_v2(device_address(address));
    }
    return sk__cuda_leave_released(cuda, pushed, "cuMemFree_v2", result);
}

/* ---- virtual memory -------------------------------------------------------------------------- */

sk_status sk__cuda_range_reserve(void *self, size_t nbytes, void **out) {
    const sk__cuda *cuda = self;
    sk__cu_address address = 0;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuMemAddressReserve(&address, nbytes, cuda->granule_bytes, 0, 0);
    }
    sk_status status = sk__cuda_leave(cuda, pushed, "cuMemAddressReserve", result);
    if (status == SK_OK) {
        *out = (void *)(uintptr_t)address;
    }
    return status;
}

sk_status sk__cuda_range_release(void *self, void *address, size_t nbytes) {
    const sk__cuda *cuda = self;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuMemAddressFree(device_address(address), nbytes);
    }
    return sk__cuda_leave_released(cuda, pushed, "cuMemAddressFree", result);
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

sk_status sk__cuda_range_commit(void *self, void *address, size_t nbytes) {
    const sk__cuda *cuda = self;
    const char *what = "cuMemCreate";
    bool pushed = false;
    sk_assert(nbytes % cuda->granule_bytes == 0);
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = granules_map(cuda, device_address(address), 0, nbytes, &what);
    }
    return sk__cuda_leave(cuda, pushed, what, result);
}

sk_status sk__cuda_range_decommit(void *self, void *address, size_t nbytes) {
    const sk__cuda *cuda = self;
    bool pushed = false;
    sk_assert(nbytes % cuda->granule_bytes == 0);
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        size_t done = granules_unmap(cuda, device_address(address), nbytes, &result);
        if (result != SK_CU_SUCCESS && done > 0) { /* all or nothing: map free memory again */
            const char *what = NULL;
            (void)granules_map(cuda, device_address(address), 0, done, &what);
        }
    }
    return sk__cuda_leave_released(cuda, pushed, "cuMemUnmap", result);
}

sk_status sk__cuda_range_alias(void *self, void *from, void *to, size_t nbytes) {
    const sk__cuda *cuda = self;
    const char *what = "cuMemMap";
    bool pushed = false;
    sk_assert(nbytes % cuda->granule_bytes == 0);
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = granules_map(cuda, device_address(to), device_address(from), nbytes, &what);
    }
    return sk__cuda_leave(cuda, pushed, what, result);
}

/* ---- host memory ----------------------------------------------------------------------------- */

sk_status sk__cuda_host_lock(void *self, void *address, size_t nbytes) {
    sk__cuda *cuda = self;
    bool pushed = false;
    sk_assert((nbytes & (nbytes - 1)) == 0 && (uintptr_t)address % nbytes == 0);
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuMemHostRegister_v2(address, nbytes, SK_CU_HOST_PORTABLE);
    }
    sk_status status = sk__cuda_leave(cuda, pushed, "cuMemHostRegister_v2", result);
    if (status == SK_OK) {
        sk__pieces_locked(&cuda->pieces, nbytes);
    } else if (result != SK_CU_DEINITIALIZED && !sk__cuda_is_sticky(result)) {
        status = SK_OUT_OF_HOST_MEMORY; /* the system's limits, under any error name */
    }
    return status;
}

sk_status sk__cuda_host_unlock(void *self, void *address, size_t nbytes) {
    sk__cuda *cuda = self;
    bool pushed = false;
    sk__cu_result result = sk__cuda_enter(cuda, &pushed);
    if (result == SK_CU_SUCCESS) {
        result = cuda->driver->cuMemHostUnregister(address);
    }
    sk_status status = sk__cuda_leave_released(cuda, pushed, "cuMemHostUnregister", result);
    if (status == SK_OK) {
        sk__pieces_unlocked(&cuda->pieces, nbytes);
    }
    return status;
}
