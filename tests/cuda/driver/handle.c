/* handle.c - handles, checked.
 *
 * A handle is kind, generation and slot in one number. Its top byte is not that of an address, so
 * that whoever takes it for a pointer faults. A closed handle does not come again: the slot's next
 * use has another generation.
 */
#include <stdlib.h>

#include "sim.h"

enum { SLOT_BITS = 24, KIND_SHIFT = 56 };
#define SLOT_MASK ((1ULL << SLOT_BITS) - 1)

typedef struct slot {
    void *object; /* NULL: free */
    sim_kind kind;
    uint32_t generation;
    size_t next_free; /* index + 1; 0 ends the list */
} slot;

static slot *slots;
static size_t slot_count, slot_capacity, first_free;

static uint64_t handle_of(size_t index) {
    return ((uint64_t)slots[index].kind << KIND_SHIFT) |
           ((uint64_t)slots[index].generation << SLOT_BITS) | index;
}

static bool slot_take(size_t *index) {
    if (first_free != 0) {
        *index = first_free - 1;
        first_free = slots[*index].next_free;
        return true;
    }
    if (slot_count == slot_capacity) {
        size_t capacity = slot_capacity == 0 ? 256 : 2 * slot_capacity;
        slot *grown = capacity > SLOT_MASK ? NULL : realloc(slots, capacity * sizeof *slots);
        if (grown == NULL) {
            return false;
        }
        slots = grown;
        slot_capacity = capacity;
    }
    *index = slot_count++;
    slots[*index].generation = 1;
    return true;
}

uint64_t sim_handle_open(sim_kind kind, void *object) {
    size_t index = 0;
    if (!slot_take(&index)) {
        return 0;
    }
    slots[index].object = object;
    slots[index].kind = kind;
    return handle_of(index);
}

static bool handle_find(uint64_t handle, size_t *index) {
    *index = handle & SLOT_MASK;
    return *index < slot_count && slots[*index].object != NULL && handle_of(*index) == handle;
}

void *sim_handle_get(sim_kind kind, uint64_t handle) {
    size_t index = 0;
    return handle_find(handle, &index) && slots[index].kind == kind ? slots[index].object : NULL;
}

void sim_handle_close(uint64_t handle) {
    size_t index = 0;
    if (handle_find(handle, &index)) {
        slots[index].object = NULL;
        slots[index].generation++;
        slots[index].next_free = first_free;
        first_free = index + 1;
    }
}

size_t sim_handle_count(sim_kind kind) {
    size_t count = 0;
    for (size_t i = 0; i < slot_count; i++) {
        count += slots[i].object != NULL && slots[i].kind == kind;
    }
    return count;
}
