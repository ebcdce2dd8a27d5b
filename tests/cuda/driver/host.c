/* host.c - pinned host memory, allocated here or registered. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* Memory between two inaccessible pages. It begins at a page. */
static void *guarded_map(size_t size, size_t *mapped) {
    size_t page = page_size();
    *mapped = (size + page - 1) / page * page + 2 * page;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE; /* the virtual GPU's is not touched */
    char *base = mmap(NULL, *mapped, PROT_NONE, flags, -1, 0);
    if (base == MAP_FAILED) {
        return NULL;
    }
    if (mprotect(base + page, *mapped - 2 * page, PROT_READ | PROT_WRITE) != 0) {
        (void)munmap(base, *mapped);
        return NULL;
    }
    size_t tail = *mapped - 2 * page - size;
    sim_poison(base + page + size, tail);
    return base + page;
}

static void guarded_unmap(void *memory, size_t mapped) {
    size_t page = page_size();
    sim_unpoison(memory, mapped - 2 * page);
    (void)munmap((char *)memory - page, mapped);
}

static bool pin(sim_context *context, const sim_range *range, size_t mapped) {
    sim_pinned *pinned = calloc(1, sizeof *pinned);
    if (pinned == NULL) {
        return false;
    }
    *pinned = (sim_pinned){
        .range = *range, .registered = mapped == 0, .context = context, .mapped = mapped};
    if (!sim_table_insert(&sim.pinned, &pinned->range)) {
        free(pinned);
        return false;
    }
    return true;
}

static void unpin(sim_pinned *pinned) {
    sim_table_remove(&sim.pinned, &pinned->range);
    if (pinned->mapped > 0) {
        guarded_unmap((void *)pinned->range.base, pinned->mapped);
    }
    free(pinned);
}

CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuMemHostAlloc, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    unsigned known =
        CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    bool wipe = sim.options.wipe;
    (void)sim_leave(NULL, CUDA_SUCCESS);
    if (address == NULL || size == 0 || (flags & ~known) != 0) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemHostAlloc: size or flags");
    }
    size_t mapped = 0;
    void *memory = size > SIZE_MAX / 2 ? NULL : guarded_map(size, &mapped);
    if (memory == NULL) {
        return sim_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cuMemHostAlloc: %zu bytes", size);
    }
    if (wipe) {
        memset(memory, CUSIM_FRESH, size);
    }
    (void)pthread_mutex_lock(&sim.lock);
    if (!pin(context, &(sim_range){.base = (uintptr_t)memory, .size = size}, mapped)) {
        guarded_unmap(memory, mapped);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        *address = memory;
    }
    return sim_leave(NULL, result);
}

/* The pinned memory that begins here and is of this kind, after the work of its context is done. */
static sim_pinned *pinned_settle(uintptr_t base, bool registered, const char *what) {
    const sim_pinned *pinned = sim_table_at(&sim.pinned, base);
    if (pinned == NULL || pinned->registered != registered) {
        return NULL;
    }
    sim_context_wait(pinned->context);
    pinned = sim_table_at(&sim.pinned, base);
    if (pinned != NULL) {
        sim_uses_end(pinned->range.base, pinned->range.size, what);
    }
    return sim_table_at(&sim.pinned, base);
}

CUresult cuMemFreeHost(void *address) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuMemFreeHost, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_pinned *pinned = pinned_settle((uintptr_t)address, false, "cuMemFreeHost");
    if (pinned == NULL) {
        result =
            sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemFreeHost: %p was not allocated", address);
    } else {
        unpin(pinned);
    }
    return sim_leave(context, result);
}

bool sim_host_mapped(uintptr_t base, size_t size) {
    size_t page = page_size();
    uintptr_t first = base / page * page;
    return msync((void *)first, base + size - first, MS_ASYNC) == 0;
}

/* Whole pages are given back, if they are the process's own: they read as zeros, and take no
 * memory. MADV_FREE is only there to ask, since it refuses all others. */
void sim_host_zero(const sim_range *range) {
    size_t page = page_size();
    char *start = (char *)range->base;
    char *end = start + range->size;
    char *first = (char *)((range->base + page - 1) / page * page);
    char *last = (char *)((range->base + range->size) / page * page);
    if (first < last && madvise(first, (size_t)(last - first), MADV_FREE) == 0 &&
        madvise(first, (size_t)(last - first), MADV_DONTNEED) == 0) {
        memset(start, 0, (size_t)(first - start));
        memset(last, 0, (size_t)(end - last));
    } else {
        memset(start, 0, range->size);
    }
}

static CUresult host_register(sim_context *context, const sim_range *range, unsigned flags) {
    unsigned known = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                     CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
    if (range->base == 0 || range->size == 0 || range->size > UINTPTR_MAX - range->base ||
        (flags & ~known) != 0) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemHostRegister: range or flags");
    }
    if ((flags & CU_MEMHOSTREGISTER_IOMEMORY) != 0) {
        return sim_refuse(CUDA_ERROR_NOT_SUPPORTED, "cuMemHostRegister: memory of a device");
    }
    if (sim_in_window(range->base, range->size) || !sim_host_mapped(range->base, range->size)) {
        return sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemHostRegister: %#zx is not host memory",
                          range->base);
    }
    if (sim_table_overlaps(&sim.pinned, range->base, range->size)) {
        return sim_refuse(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                          "cuMemHostRegister: %#zx is pinned already", range->base);
    }
    return pin(context, range, 0) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuMemHostRegister_v2, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_range range = {.base = (uintptr_t)address, .size = size};
    return sim_leave(NULL, host_register(context, &range, flags));
}

CUresult cuMemHostUnregister(void *address) {
    sim_context *context = NULL;
    CUresult result = sim_enter(SIM_cuMemHostUnregister, &context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    sim_pinned *pinned = pinned_settle((uintptr_t)address, true, "cuMemHostUnregister");
    if (pinned == NULL) {
        result = sim_refuse(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
                            "cuMemHostUnregister: %p was not registered", address);
    } else {
        unpin(pinned);
    }
    return sim_leave(context, result);
}

bool sim_host_pinned(const sim_range *range, bool *legal) {
    const sim_pinned *pinned = sim_table_find(&sim.pinned, range->base);
    bool whole = pinned != NULL && sim_range_contains(&pinned->range, range->base, range->size);
    *legal = whole || !sim_table_overlaps(&sim.pinned, range->base, range->size);
    return whole;
}

void sim_host_close(const sim_context *context) {
    size_t index = sim.pinned.count;
    while (index-- > 0) {
        sim_pinned *pinned = (sim_pinned *)sim.pinned.items[index];
        if (pinned->context == context) {
            unpin(pinned);
        }
    }
}
