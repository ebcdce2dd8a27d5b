/* memory.c - plain device memory: cuMemAlloc and what belongs to it.
 *
 * Counted against the capacity as the real driver nearly does: an allocation of 1 MiB and more
 * takes whole pages of 2 MiB, a smaller one a multiple of 512 bytes. Addresses are multiples of 512
 * and, for small allocations, usually of nothing more. An allocation ends where the caller asked
 * for: the bytes that rounding adds are not part of it.
 */
#include <stdlib.h>

#include "sim.h"

#define PAGE ((size_t)2 << 20)
#define BIG ((size_t)1 << 20)
#define UNIT ((size_t)512)

static sim_chunk *chunks;

static size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

bool sim_charge(int device, size_t bytes) {
    if (bytes > sim.options.capacity - sim.devices[device].used) {
        return false;
    }
    sim.devices[device].used += bytes;
    return true;
}

static sim_chunk *chunk_open(sim_context *context, size_t size) {
    sim_chunk *chunk = calloc(1, sizeof *chunk);
    if (chunk == NULL) {
        return NULL;
    }
    uintptr_t base = sim_space_find(size, PAGE);
    *chunk = (sim_chunk){.range = {.base = base, .size = size}, .context = context, .cursor = base};
    if (base == 0 || !sim_table_insert(&sim.spans, &chunk->range)) {
        free(chunk);
        return NULL;
    }
    if (!sim_space_commit(base, size, -1, 0)) {
        sim_table_remove(&sim.spans, &chunk->range);
        free(chunk);
        return NULL;
    }
    sim_poison(sim_shadow_of(base), size);
    chunk->next = chunks;
    chunks = chunk;
    return chunk;
}

/* Inside; leaves the lock while pages are given back. */
static void chunk_close(sim_chunk *chunk) {
    for (sim_chunk **link = &chunks; *link != NULL; link = &(*link)->next) {
        if (*link == chunk) {
            *link = chunk->next;
            break;
        }
    }
    (void)pthread_mutex_unlock(&sim.lock);
    sim_space_decommit(chunk->range.base, chunk->range.size);
    (void)pthread_mutex_lock(&sim.lock);
    sim_table_remove(&sim.spans, &chunk->range);
    free(chunk);
}

static uintptr_t chunk_gap(const sim_chunk *chunk, uintptr_t start, size_t size) {
    uintptr_t end = chunk->range.base + chunk->range.size;
    size_t index = sim_table_first(&sim.allocations, start);
    while (size <= end - start) {
        if (index == sim.allocations.count || sim.allocations.items[index]->base >= start + size) {
            return start;
        }
        const sim_range *range = sim.allocations.items[index++];
        start = round_up(range->base + range->size, UNIT);
    }
    return 0;
}

/* A free piece of a chunk that small allocations share. */
static sim_chunk *chunk_with_room(const sim_context *context, size_t size, uintptr_t *base) {
    for (sim_chunk *chunk = chunks; chunk != NULL; chunk = chunk->next) {
        if (chunk->context != context || chunk->range.size != PAGE || chunk->live == 0) {
            continue;
        }
        *base = sim.options.reuse ? 0 : chunk_gap(chunk, chunk->cursor, size);
        if (*base == 0) {
            *base = chunk_gap(chunk, chunk->range.base, size);
        }
        if (*base != 0) {
            return chunk;
        }
    }
    return NULL;
}

/* The chunk is not freed while it has something live, so that counts at once. */
static sim_chunk *chunk_take(sim_context *context, size_t size, uintptr_t *base) {
    sim_chunk *chunk = size < BIG ? chunk_with_room(context, size, base) : NULL;
    if (chunk == NULL) {
        chunk = chunk_open(context, round_up(size, PAGE));
        *base = chunk == NULL ? 0 : chunk->range.base;
    }
    if (chunk != NULL) {
        chunk->cursor = *base + size;
        chunk->live++;
    }
    return chunk;
}

static void chunk_give(sim_chunk *chunk) {
    chunk->live--;
    if (chunk->live == 0) {
        chunk_close(chunk);
    }
}

static CUresult memory_alloc(sim_context *context, size_t size, CUdeviceptr *address) {
    static uint64_t last_id;
    size_t charged = round_up(size, size < BIG ? UNIT : PAGE);
    if (charged < size || !sim_charge(context->device, charged)) {
        return sim_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cuMemAlloc: %zu bytes do not fit", size);
    }
    sim_allocation *allocation = calloc(1, sizeof *allocation);
    uintptr_t base = 0;
    sim_chunk *chunk = NULL;
    if (allocation != NULL) {
        chunk = chunk_take(context, round_up(size, UNIT), &base);
    }
    if (chunk != NULL) {
        *allocation = (sim_allocation){.range = {.base = base, .size = size},
                                       .context = context,
                                       .chunk = chunk,
                                       .charged = charged,
                                       .id = ++last_id};
        if (sim_table_insert(&sim.allocations, &allocation->range)) {
            sim_unpoison(sim_shadow_of(base), size);
            sim_timed_map(charged);
            *address = base;
            return CUDA_SUCCESS;
        }
        chunk_give(chunk);
    }
    free(allocation);
    sim.devices[context->device].used -= charged;
    return sim_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cuMemAlloc: no host memory for %zu bytes", size);
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuMemAlloc_v2, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (address == NULL || size == 0) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemAlloc: of 0 bytes"));
    }
    CUdeviceptr base = 0;
    result = memory_alloc(context, size, &base);
    bool wipe = sim.options.wipe;
    (void)sim_leave(NULL, result);
    if (result == CUDA_SUCCESS) {
        if (wipe) {
            memset(sim_shadow_of(base), CUSIM_FRESH, size);
        }
        *address = base;
    }
    return result;
}

static void allocation_close(sim_allocation *allocation) {
    sim_table_remove(&sim.allocations, &allocation->range);
    sim.devices[allocation->context->device].used -= allocation->charged;
    if (sim.options.wipe && allocation->chunk->live > 1) {
        memset(sim_shadow_of(allocation->range.base), CUSIM_FREED, allocation->range.size);
    }
    sim_poison(sim_shadow_of(allocation->range.base), allocation->range.size);
    chunk_give(allocation->chunk);
    free(allocation);
}

/* `waits`: for the work of the memory's context first. */
static CUresult memory_free(CUdeviceptr address, bool waits) {
    const sim_allocation *allocation = sim_table_at(&sim.allocations, address);
    if (allocation != NULL && waits) {
        sim_context_wait(allocation->context);
        allocation =
            sim_table_at(&sim.allocations, address); /* somebody else may have been faster */
    }
    if (allocation == NULL) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE,
                          "cuMemFree: %#llx is not the start of an allocation", address);
    }
    sim_uses_end(allocation->range.base, allocation->range.size, "cuMemFree");
    sim_allocation *found = sim_table_at(&sim.allocations, address);
    if (found != NULL) {
        sim_timed_unmap(found->charged);
        allocation_close(found);
    }
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuMemFree_v2, &context);
    return result != CUDA_SUCCESS ? result : sim_leave(context, memory_free(address, true));
}

CUresult cusim_free(CUdeviceptr address) {
    if (atomic_load(&sim.forked) || !atomic_load(&sim.initialised)) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    (void)pthread_mutex_lock(&sim.lock);
    return sim_leave(NULL, memory_free(address, false));
}

void sim_memory_close(const sim_context *context) {
    size_t index = 0;
    while (index < sim.allocations.count) {
        sim_allocation *allocation = (sim_allocation *)sim.allocations.items[index];
        if (allocation->context == context) {
            allocation_close(allocation);
            index = 0; /* the lock was left */
        } else {
            index++;
        }
    }
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuMemGetInfo_v2, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (free_bytes == NULL || total_bytes == NULL) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemGetInfo: NULL"));
    }
    *total_bytes = sim.options.capacity;
    *free_bytes = sim.options.capacity - sim.devices[context->device].used;
    return sim_leave(context, CUDA_SUCCESS);
}

static const sim_range *device_range(CUdeviceptr address) {
    const sim_range *range = sim_table_find(&sim.allocations, address);
    return range != NULL ? range : sim_table_find(&sim.mappings, address);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuMemGetAddressRange_v2, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    const sim_range *range = device_range(address);
    if (range == NULL) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_NOT_FOUND,
                                          "cuMemGetAddressRange: %#llx is unknown", address));
    }
    if (base != NULL) {
        *base = range->base;
    }
    if (size != NULL) {
        *size = range->size;
    }
    return sim_leave(context, CUDA_SUCCESS);
}

/* What cuPointerGetAttribute can say about an address. */
typedef struct pointer_facts {
    sim_range range;
    unsigned type;
    int device;
    uint64_t id;
    const sim_context *context;
} pointer_facts;

static bool pointer_look_up(CUdeviceptr address, pointer_facts *facts) {
    const sim_allocation *allocation = sim_table_find(&sim.allocations, address);
    const sim_mapping *mapping = sim_table_find(&sim.mappings, address);
    const sim_pinned *pinned = sim_table_find(&sim.pinned, address);
    if (allocation != NULL) {
        *facts = (pointer_facts){allocation->range, CU_MEMORYTYPE_DEVICE,
                                 allocation->context->device, allocation->id, allocation->context};
    } else if (mapping != NULL) {
        *facts = (pointer_facts){mapping->range, CU_MEMORYTYPE_DEVICE, mapping->physical->device,
                                 mapping->physical->handle, NULL};
    } else if (pinned != NULL) {
        *facts = (pointer_facts){pinned->range, CU_MEMORYTYPE_HOST, pinned->context->device,
                                 pinned->range.base, pinned->context};
    }
    return allocation != NULL || mapping != NULL || pinned != NULL;
}

static CUresult pointer_attribute(void *data, int attribute, CUdeviceptr address) {
    pointer_facts facts;
    if (data == NULL || !pointer_look_up(address, &facts)) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE,
                          "cuPointerGetAttribute: %#llx is neither device memory nor pinned",
                          address);
    }
    bool host = facts.type == CU_MEMORYTYPE_HOST;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(uint64_t *)data = facts.context == NULL ? 0 : facts.context->handle;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = facts.type;
        break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (!host) {
            return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuPointerGetAttribute: no host pointer");
        }
        *(uint64_t *)data = address;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(uint64_t *)data = address;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(uint64_t *)data = facts.id;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = 0;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = facts.device;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(uint64_t *)data = facts.range.base;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = facts.range.size;
        break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned *)data = 1;
        break;
    default:
        return sim_refuse(CUDA_ERROR_NOT_SUPPORTED, "cuPointerGetAttribute: attribute %d",
                          attribute);
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    CUresult result = sim_enter(SIM_cuPointerGetAttribute, NULL);
    return result != CUDA_SUCCESS ? result
                                  : sim_leave(NULL, pointer_attribute(data, attribute, address));
}
