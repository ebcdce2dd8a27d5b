/* space.c - device addresses and the bytes behind them.
 *
 * Window and shadow are reserved once, side by side. The window stays inaccessible, so a host
 * access to a device address faults; the same holds for every byte of the shadow that is not
 * committed. Spans lie apart, so that running over the end of one is noticed.
 */
#include <stdio.h>
#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include "sim.h"

#define LEAST_WINDOW ((size_t)64 << 30)
/* A GPU has 128 TiB of addresses; users reserve ranges as large as the memory, again and again. */
#define CAPACITIES_PER_WINDOW 16
#define SPAN_GAP ((size_t)2 << 20)

static bool map_nothing(uintptr_t base, size_t size, int fixed) {
    void *address = mmap((void *)base, size, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
    return address != MAP_FAILED;
}

bool sim_space_open(void) {
    size_t all = sim.options.capacity * (size_t)sim.options.devices * CAPACITIES_PER_WINDOW;
    size_t gap = sim.options.granularity > SPAN_GAP ? sim.options.granularity : SPAN_GAP;
    sim.window_size = (all > LEAST_WINDOW ? all : LEAST_WINDOW) / gap * gap;
    void *address = mmap(NULL, 2 * sim.window_size + gap, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) {
        return false;
    }
    uintptr_t start = (uintptr_t)address;
    sim.window = (start + gap - 1) / gap * gap;
    /* Only the aligned part is kept, so that closing needs to know nothing else. */
    if (sim.window > start) {
        (void)munmap(address, sim.window - start);
    }
    if (start + gap > sim.window) {
        (void)munmap((void *)(sim.window + 2 * sim.window_size), start + gap - sim.window);
    }
    sim.cursor = sim.window;
    return true;
}

void sim_space_close(void) {
    (void)munmap((void *)sim.window, 2 * sim.window_size);
    sim.window = 0;
    sim.window_size = 0;
}

static uintptr_t find_from(uintptr_t start, size_t size, size_t alignment) {
    uintptr_t end = sim.window + sim.window_size;
    uintptr_t base = (start + alignment - 1) / alignment * alignment;
    size_t index = sim_table_first(&sim.spans, base);
    while (base < end && size <= end - base) {
        if (index == sim.spans.count || sim.spans.items[index]->base >= base + size + SPAN_GAP) {
            return base;
        }
        const sim_range *span = sim.spans.items[index++];
        base = (span->base + span->size + SPAN_GAP + alignment - 1) / alignment * alignment;
    }
    return 0;
}

uintptr_t sim_space_find(size_t size, size_t alignment) {
    uintptr_t base = find_from(sim.options.reuse ? sim.window : sim.cursor, size, alignment);
    if (base == 0) {
        base = find_from(sim.window, size, alignment);
    }
    if (base != 0) {
        sim.cursor = base + size + SPAN_GAP;
    }
    return base;
}

bool sim_in_window(uintptr_t base, size_t size) {
    sim_range both = {.base = sim.window, .size = 2 * sim.window_size};
    return sim.window != 0 && sim_range_overlaps(&both, base, size);
}

void *sim_shadow_of(uintptr_t address) { return (void *)(address + sim.window_size); }

bool sim_space_commit(uintptr_t base, size_t size, int file, off_t offset) {
    int flags = MAP_FIXED | (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED);
    void *shadow = sim_shadow_of(base);
    return mmap(shadow, size, PROT_READ | PROT_WRITE, flags, file, offset) == shadow;
}

void sim_poison(void *bytes, size_t size) {
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(bytes, size);
#else
    (void)bytes;
    (void)size;
#endif
}

void sim_unpoison(void *bytes, size_t size) {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(bytes, size);
#else
    (void)bytes;
    (void)size;
#endif
}

void sim_space_decommit(uintptr_t base, size_t size) {
    sim_unpoison(sim_shadow_of(base), size);
    if (!map_nothing((uintptr_t)sim_shadow_of(base), size, MAP_FIXED)) {
        (void)fprintf(stderr, "cusim: the shadow of freed memory cannot be unmapped\n");
    }
}

static const char *allocation_problem(const sim_allocation *allocation, const sim_range *range,
                                      int device, bool copy) {
    if (!sim_range_contains(&allocation->range, range->base, range->size)) {
        return "runs over the end of its allocation";
    }
    int owner = allocation->context->device;
    if (!copy && owner != device && !sim.devices[device].primary.peers[owner]) {
        return "lies on a device without peer access";
    }
    return NULL;
}

const char *sim_access_problem(const sim_range *range, int device, bool write, bool copy) {
    const sim_allocation *allocation = sim_table_find(&sim.allocations, range->base);
    if (allocation != NULL) {
        return allocation_problem(allocation, range, device, copy);
    }
    unsigned char needed =
        write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    uintptr_t address = range->base;
    uintptr_t end = range->base + range->size;
    size_t index = sim_table_first(&sim.mappings, address);
    while (address < end) {
        const sim_mapping *mapping =
            index < sim.mappings.count ? (sim_mapping *)sim.mappings.items[index++] : NULL;
        if (mapping == NULL || mapping->range.base > address) {
            return address == range->base ? "is not allocated or mapped"
                                          : "is not mapped to its end";
        }
        if ((mapping->access[device] & needed) != needed) {
            return "is mapped without the access it needs";
        }
        address = mapping->range.base + mapping->range.size;
    }
    return NULL;
}

void *cusim_shadow(CUdeviceptr address, size_t size) {
    (void)pthread_mutex_lock(&sim.lock);
    sim_range range = {.base = address, .size = size == 0 ? 1 : size};
    const sim_allocation *allocation = sim_table_find(&sim.allocations, address);
    bool whole = false;
    if (allocation != NULL) {
        whole = sim_range_contains(&allocation->range, range.base, range.size);
    } else {
        uintptr_t end = address;
        const sim_mapping *mapping = sim_table_find(&sim.mappings, end);
        while (mapping != NULL && end < address + range.size) {
            end = mapping->range.base + mapping->range.size;
            mapping = sim_table_at(&sim.mappings, end);
        }
        whole = end >= address + range.size;
    }
    void *shadow = whole ? sim_shadow_of(address) : NULL;
    (void)pthread_mutex_unlock(&sim.lock);
    return shadow;
}

bool cusim_is_device(CUdeviceptr address) {
    (void)pthread_mutex_lock(&sim.lock);
    bool is = address - sim.window < sim.window_size;
    (void)pthread_mutex_unlock(&sim.lock);
    return is;
}
