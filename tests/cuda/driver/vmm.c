/* vmm.c - virtual memory management: reservations, physical memory, mappings, access.
 *
 * Physical memory is a piece of its device's file, which keeps its bytes wherever they are mapped.
 * It counts against the capacity until it is released and no mapping is left. Unmapping does not
 * wait for work; work that still uses what is unmapped is a problem.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

static bool is_granular(size_t size) { return size % sim.options.granularity == 0; }

static CUresult vmm_check(const char *name, CUdeviceptr address, size_t size) {
    if (!sim.options.vmm) {
        return sim_refuse(CUDA_ERROR_NOT_SUPPORTED, "%s: the device has no such memory", name);
    }
    if (size == 0 || !is_granular(size) || !is_granular(address)) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE,
                          "%s: %#llx, %zu bytes: not multiples of the granularity", name, address,
                          size);
    }
    return CUDA_SUCCESS;
}

static CUresult range_reserve(CUdeviceptr *address, size_t size, size_t alignment,
                              CUdeviceptr hint) {
    if (alignment < sim.options.granularity) {
        alignment = sim.options.granularity;
    }
    bool hinted = hint != 0 && hint % alignment == 0 && hint >= sim.window &&
                  size <= sim.window_size && hint - sim.window <= sim.window_size - size &&
                  !sim_table_overlaps(&sim.spans, hint, size);
    sim_range *range = calloc(1, sizeof *range);
    if (range != NULL) {
        *range = (sim_range){.base = hinted ? hint : sim_space_find(size, alignment), .size = size};
        if (range->base != 0 && sim_table_insert(&sim.spans, range)) {
            if (sim_table_insert(&sim.reservations, range)) {
                *address = range->base;
                return CUDA_SUCCESS;
            }
            sim_table_remove(&sim.spans, range);
        }
    }
    free(range);
    return sim_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cuMemAddressReserve: no %zu addresses left", size);
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    CUresult result = sim_enter(SIM_cuMemAddressReserve, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = vmm_check("cuMemAddressReserve", 0, size);
    if (result == CUDA_SUCCESS &&
        (address == NULL || flags != 0 || (alignment & (alignment - 1)) != 0)) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemAddressReserve: flags or alignment");
    }
    if (result == CUDA_SUCCESS) {
        result = range_reserve(address, size, alignment, hint);
    }
    return sim_leave(NULL, result);
}

static CUresult range_release(CUdeviceptr address, size_t size) {
    sim_range *range = sim_table_at(&sim.reservations, address);
    if (range == NULL || range->size != size) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE,
                          "cuMemAddressFree: %#llx, %zu bytes: not one whole reservation", address,
                          size);
    }
    if (sim_table_overlaps(&sim.mappings, address, size)) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemAddressFree: %#llx is still mapped",
                          address);
    }
    sim_table_remove(&sim.reservations, range);
    sim_table_remove(&sim.spans, range);
    free(range);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    CUresult result = sim_enter(SIM_cuMemAddressFree, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = vmm_check("cuMemAddressFree", address, size);
    return sim_leave(NULL, result == CUDA_SUCCESS ? range_release(address, size) : result);
}

static CUresult prop_check(const char *name, const CUmemAllocationProp *prop) {
    if (prop == NULL || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "%s: only pinned memory of a device", name);
    }
    if (prop->location.id < 0 || prop->location.id >= sim.options.devices) {
        return sim_refuse(CUDA_ERROR_INVALID_DEVICE, "%s: no device %d", name, prop->location.id);
    }
    return CUDA_SUCCESS;
}

/* The file's new bytes, before anybody else knows of them. Needs no lock. */
static bool physical_fill(int file, off_t offset, size_t size, bool wipe) {
    if (!wipe) {
        return true;
    }
    void *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, offset);
    if (bytes == MAP_FAILED) {
        return false;
    }
    memset(bytes, CUSIM_FRESH, size);
    (void)munmap(bytes, size);
    return true;
}

static void physical_drop(sim_physical *physical) {
    if (physical->references > 0 || physical->mapped > 0) {
        return;
    }
    sim_device *device = &sim.devices[physical->device];
    (void)fallocate(device->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, physical->offset,
                    (off_t)physical->size);
    device->used -= physical->size;
    sim.physical_count--;
    sim.physical_bytes -= physical->size;
    free(physical);
}

static CUresult physical_create(int ordinal, size_t size, sim_physical **out) {
    sim_device *device = &sim.devices[ordinal];
    if (!sim_charge(ordinal, size)) {
        return sim_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cuMemCreate: %zu bytes do not fit", size);
    }
    sim_physical *physical = calloc(1, sizeof *physical);
    if (physical != NULL) {
        *physical = (sim_physical){
            .device = ordinal, .size = size, .offset = device->file_end, .references = 1};
        physical->handle = sim_handle_open(SIM_KIND_PHYSICAL, physical);
        if (physical->handle != 0 && ftruncate(device->file, device->file_end + (off_t)size) == 0) {
            device->file_end += (off_t)size;
            sim.physical_count++;
            sim.physical_bytes += size;
            *out = physical;
            return CUDA_SUCCESS;
        }
        sim_handle_close(physical->handle);
        free(physical);
    }
    device->used -= size;
    return sim_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cuMemCreate: no host memory for %zu bytes", size);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const CUmemAllocationProp *prop, unsigned long long flags) {
    CUresult result = sim_enter(SIM_cuMemCreate, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = vmm_check("cuMemCreate", 0, size);
    if (result == CUDA_SUCCESS && (handle == NULL || flags != 0)) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemCreate: flags");
    }
    if (result == CUDA_SUCCESS) {
        result = prop_check("cuMemCreate", prop);
    }
    sim_physical *physical = NULL;
    if (result == CUDA_SUCCESS) {
        result = physical_create(prop->location.id, size, &physical);
    }
    if (result != CUDA_SUCCESS) {
        return sim_leave(NULL, result);
    }
    int file = sim.devices[physical->device].file;
    bool wipe = sim.options.wipe;
    (void)sim_leave(NULL, CUDA_SUCCESS);
    if (!physical_fill(file, physical->offset, size, wipe)) {
        (void)pthread_mutex_lock(&sim.lock);
        sim_handle_close(physical->handle);
        physical->references = 0;
        physical_drop(physical);
        return sim_leave(NULL, CUDA_ERROR_OUT_OF_MEMORY);
    }
    *handle = physical->handle;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    CUresult result = sim_enter(SIM_cuMemRelease, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_physical *physical = sim_handle_get(SIM_KIND_PHYSICAL, handle);
    if (physical == NULL) {
        return sim_leave(
            NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemRelease: %#llx is no handle", handle));
    }
    if (--physical->references == 0) {
        sim_handle_close(handle);
        physical_drop(physical);
    }
    return sim_leave(NULL, CUDA_SUCCESS);
}

static CUresult physical_retain(CUdeviceptr address, CUmemGenericAllocationHandle *handle) {
    sim_mapping *mapping = (sim_mapping *)sim_table_find(&sim.mappings, address);
    if (handle == NULL || mapping == NULL) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE,
                          "cuMemRetainAllocationHandle: nothing is mapped at %#llx", address);
    }
    sim_physical *physical = mapping->physical;
    if (physical->references == 0) {
        physical->handle = sim_handle_open(SIM_KIND_PHYSICAL, physical);
    }
    if (physical->handle == 0) {
        return sim_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cuMemRetainAllocationHandle: no handle left");
    }
    physical->references++;
    *handle = physical->handle;
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CUresult result = sim_enter(SIM_cuMemRetainAllocationHandle, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    return sim_leave(NULL, physical_retain((CUdeviceptr)(uintptr_t)address, handle));
}

/* The virtual GPU's memory is never touched, and a map of the host for each mapping would soon be
 * more than a process may have (vm.max_map_count). */
static bool shadow_map(const sim_range *range, const sim_physical *physical) {
    int file = sim.devices[physical->device].file;
    return sim_is_timed() || sim_space_commit(range->base, range->size, file, physical->offset);
}

static CUresult range_map(const sim_range *range, sim_physical *physical) {
    const sim_range *reservation = sim_table_find(&sim.reservations, range->base);
    if (reservation == NULL || !sim_range_contains(reservation, range->base, range->size)) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemMap: %#zx is not inside a reservation",
                          range->base);
    }
    if (sim_table_overlaps(&sim.mappings, range->base, range->size)) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemMap: %#zx is mapped already",
                          range->base);
    }
    sim_mapping *mapping = calloc(1, sizeof *mapping);
    if (mapping != NULL) {
        mapping->range = *range;
        mapping->physical = physical;
        if (sim_table_insert(&sim.mappings, &mapping->range)) {
            if (shadow_map(range, physical)) {
                physical->mapped++;
                sim_timed_map(range->size); /* create, map and access, as it was measured */
                return CUDA_SUCCESS;
            }
            sim_table_remove(&sim.mappings, &mapping->range);
        }
        free(mapping);
    }
    return sim_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cuMemMap: the host cannot map it");
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
    CUresult result = sim_enter(SIM_cuMemMap, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = vmm_check("cuMemMap", address, size);
    if (result == CUDA_SUCCESS && (offset != 0 || flags != 0)) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemMap: offset and flags must be 0");
    }
    sim_physical *physical = sim_handle_get(SIM_KIND_PHYSICAL, handle);
    if (result == CUDA_SUCCESS && (physical == NULL || physical->size < size)) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemMap: no handle with %zu bytes", size);
    }
    if (result == CUDA_SUCCESS) {
        result = range_map(&(sim_range){.base = address, .size = size}, physical);
    }
    return sim_leave(NULL, result);
}

/* Whether the range is whole mappings without a hole: their indices. */
static bool mappings_cover(uintptr_t base, size_t size, size_t *first, size_t *count) {
    uintptr_t address = base;
    *first = sim_table_first(&sim.mappings, base);
    size_t index = *first;
    while (address < base + size) {
        if (index == sim.mappings.count || sim.mappings.items[index]->base != address) {
            return false;
        }
        address += sim.mappings.items[index++]->size;
    }
    *count = index - *first;
    return address == base + size;
}

static CUresult range_unmap(CUdeviceptr address, size_t size) {
    size_t first = 0;
    size_t count = 0;
    if (mappings_cover(address, size, &first, &count)) {
        sim_uses_end(address, size, "cuMemUnmap");
    }
    if (!mappings_cover(address, size, &first, &count)) { /* also if it was unmapped meanwhile */
        return sim_refuse(CUDA_ERROR_INVALID_VALUE,
                          "cuMemUnmap: %#llx, %zu bytes: not whole mappings", address, size);
    }
    if (!sim_is_timed()) {
        sim_space_decommit(address, size);
    }
    while (count-- > 0) {
        sim_mapping *mapping = (sim_mapping *)sim.mappings.items[first];
        sim_table_remove(&sim.mappings, &mapping->range);
        sim_timed_unmap(mapping->range.size); /* each, though one call might cost less */
        mapping->physical->mapped--;
        physical_drop(mapping->physical);
        free(mapping);
    }
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CUresult result = sim_enter(SIM_cuMemUnmap, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = vmm_check("cuMemUnmap", address, size);
    return sim_leave(NULL, result == CUDA_SUCCESS ? range_unmap(address, size) : result);
}

static CUresult access_check(const CUmemAccessDesc *desc) {
    bool flags = desc->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ||
                 desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
                 desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!flags || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemSetAccess: location or flags");
    }
    if (desc->location.id < 0 || desc->location.id >= sim.options.devices) {
        return sim_refuse(CUDA_ERROR_INVALID_DEVICE, "cuMemSetAccess: no device %d",
                          desc->location.id);
    }
    return CUDA_SUCCESS;
}

static CUresult access_set(const sim_range *range, const CUmemAccessDesc *desc, size_t count) {
    size_t first = 0;
    size_t mapped = 0;
    if (desc == NULL || count == 0 || !mappings_cover(range->base, range->size, &first, &mapped)) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE,
                          "cuMemSetAccess: %#zx, %zu bytes: not whole mappings", range->base,
                          range->size);
    }
    for (size_t i = 0; i < count; i++) {
        CUresult result = access_check(&desc[i]);
        for (size_t m = first; result == CUDA_SUCCESS && m < first + mapped; m++) {
            const sim_mapping *mapping = (sim_mapping *)sim.mappings.items[m];
            if (mapping->physical->device != desc[i].location.id && !sim.options.peers) {
                result = sim_refuse(CUDA_ERROR_INVALID_DEVICE, "cuMemSetAccess: no peers");
            }
        }
        if (result != CUDA_SUCCESS) {
            return result;
        }
    }
    for (size_t m = first; m < first + mapped; m++) {
        sim_mapping *mapping = (sim_mapping *)sim.mappings.items[m];
        for (size_t i = 0; i < count; i++) {
            mapping->access[desc[i].location.id] = (unsigned char)desc[i].flags;
        }
    }
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc,
                        size_t count) {
    CUresult result = sim_enter(SIM_cuMemSetAccess, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = vmm_check("cuMemSetAccess", address, size);
    if (result == CUDA_SUCCESS) {
        result = access_set(&(sim_range){.base = address, .size = size}, desc, count);
    }
    return sim_leave(NULL, result);
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       int option) {
    CUresult result = sim_enter(SIM_cuMemGetAllocationGranularity, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = prop_check("cuMemGetAllocationGranularity", prop);
    if (result == CUDA_SUCCESS &&
        (granularity == NULL || (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
                                 option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemGetAllocationGranularity: option");
    }
    if (result == CUDA_SUCCESS && !sim.options.vmm) {
        result = sim_refuse(CUDA_ERROR_NOT_SUPPORTED, "the device has no virtual memory");
    }
    if (result == CUDA_SUCCESS) {
        *granularity = sim.options.granularity;
    }
    return sim_leave(NULL, result);
}
