/* capacity.c - a backend of which only so much can be had, whatever the device has, and one whose
 * memory has aliases, whatever the device can. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fixture.h"
#include "instruments/interpose.h"

/* The linker wraps these; tests make the others fail. */
void *__real_calloc(size_t count, size_t nbytes);

static const char capacity_name[] = "capacity";

enum { FIRST_CAPACITY = 1024 };

/* Physical memory by the addresses that it is mapped at. Addresses come again and are never removed
 * from the table: open addressing, power-of-two capacity. */
typedef struct memory {
    size_t mappings;
    off_t offset; /* in the file, if there is one */
} memory;

typedef struct place {
    uintptr_t address;
    memory *memory; /* mapped there; NULL: none is */
} place;

typedef struct capacity {
    sk__interposer base;
    size_t granule_bytes;
    size_t total_bytes;
    int file; /* of a device that has no aliases of its own: where memory comes from; else -1 */
    off_t file_bytes SK_GUARDED_BY(base.lock);
    size_t used_bytes SK_GUARDED_BY(base.lock);
    place *places SK_GUARDED_BY(base.lock);
    size_t nslots SK_GUARDED_BY(base.lock), count SK_GUARDED_BY(base.lock);
} capacity;

static void *take_host(size_t count, size_t nbytes) {
    void *memory = __real_calloc(count, nbytes);
    CHECK(memory != NULL);
    return memory;
}

static place *place_find(place *places, size_t nslots, uintptr_t address) {
    size_t slot = (address >> 12) * 0x9E3779B97F4A7C15 % nslots;
    while (places[slot].address != 0 && places[slot].address != address) {
        slot = (slot + 1) % nslots;
    }
    return &places[slot];
}

static place *place_of(capacity *state, uintptr_t address) SK_REQUIRES(state->base.lock) {
    if (2 * (state->count + 1) > state->nslots) {
        size_t nslots = state->nslots == 0 ? FIRST_CAPACITY : 2 * state->nslots;
        place *places = take_host(nslots, sizeof *places);
        for (size_t i = 0; i < state->nslots; i++) {
            if (state->places[i].address != 0) {
                *place_find(places, nslots, state->places[i].address) = state->places[i];
            }
        }
        free(state->places);
        state->places = places;
        state->nslots = nslots;
    }
    place *found = place_find(state->places, state->nslots, address);
    state->count += found->address == 0 ? 1 : 0;
    found->address = address;
    return found;
}

static bool claim(capacity *state, size_t nbytes) {
    sk__lock(&state->base.lock);
    bool fits = nbytes <= state->total_bytes - state->used_bytes;
    state->used_bytes += fits ? nbytes : 0;
    sk__unlock(&state->base.lock);
    return fits;
}

static void give_back(capacity *state, size_t nbytes) {
    sk__lock(&state->base.lock);
    state->used_bytes -= nbytes;
    sk__unlock(&state->base.lock);
}

static sk_status refuse(void) {
    return sk__fail(SK_OUT_OF_DEVICE_MEMORY, "the test's device is full");
}

static sk_status capacity_alloc(void *self, size_t nbytes, void **out) {
    capacity *state = self;
    const sk_backend *inner = state->base.inner;
    if (!claim(state, nbytes)) {
        return refuse();
    }
    sk_status status = inner->ops.memory_alloc(inner->self, nbytes, out);
    give_back(state, status == SK_OK ? 0 : nbytes);
    return status;
}

static sk_status capacity_free(void *self, void *address, size_t nbytes) {
    capacity *state = self;
    const sk_backend *inner = state->base.inner;
    sk_status status = inner->ops.memory_free(inner->self, address, nbytes);
    give_back(state, status == SK_OK ? nbytes : 0);
    return status;
}

/* Note what is mapped at `address` now, new memory or that at `twin`; and map it from the file, if
 * there is one. */
static void places_map(capacity *state, uintptr_t address, uintptr_t twin, size_t nbytes) {
    sk__lock(&state->base.lock);
    for (size_t done = 0; done < nbytes; done += state->granule_bytes) {
        memory *mapped =
            twin != 0 ? place_of(state, twin + done)->memory : take_host(1, sizeof *mapped);
        place *made = place_of(state, address + done);
        CHECK(made->memory == NULL && mapped != NULL);
        made->memory = mapped;
        if (mapped->mappings++ == 0) {
            mapped->offset = state->file_bytes;
            state->file_bytes += (off_t)state->granule_bytes;
        }
        if (state->file >= 0) {
            CHECK_EQUAL(0, ftruncate(state->file, state->file_bytes));
            CHECK(mmap((void *)made->address, state->granule_bytes, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_FIXED, state->file, mapped->offset) != MAP_FAILED);
        }
    }
    sk__unlock(&state->base.lock);
}

static sk_status capacity_commit(void *self, void *address, size_t nbytes) {
    capacity *state = self;
    const sk_backend *inner = state->base.inner;
    if (!claim(state, nbytes)) {
        return refuse();
    }
    sk_status status =
        state->file >= 0 ? SK_OK : inner->ops.range_commit(inner->self, address, nbytes);
    if (status == SK_OK) {
        places_map(state, (uintptr_t)address, 0, nbytes);
    } else {
        give_back(state, nbytes);
    }
    return status;
}

static sk_status capacity_alias(void *self, void *from, void *to, size_t nbytes) {
    capacity *state = self;
    const sk_backend *inner = state->base.inner;
    sk_status status =
        state->file >= 0 ? SK_OK : inner->ops.range_alias(inner->self, from, to, nbytes);
    if (status == SK_OK) {
        places_map(state, (uintptr_t)to, (uintptr_t)from, nbytes);
    }
    return status;
}

static sk_status capacity_decommit(void *self, void *address, size_t nbytes) {
    capacity *state = self;
    const sk_backend *inner = state->base.inner;
    sk_status status = SK_OK;
    if (state->file < 0) {
        status = inner->ops.range_decommit(inner->self, address, nbytes);
    } else {
        CHECK(mmap(address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
              MAP_FAILED);
    }
    if (status != SK_OK) {
        return status;
    }
    sk__lock(&state->base.lock);
    for (size_t done = 0; done < nbytes; done += state->granule_bytes) {
        place *left = place_of(state, (uintptr_t)address + done);
        CHECK(left->memory != NULL);
        if (--left->memory->mappings == 0) {
            free(left->memory);
            state->used_bytes -= state->granule_bytes;
        }
        left->memory = NULL;
    }
    sk__unlock(&state->base.lock);
    return SK_OK;
}

static sk_status capacity_info(void *self, sk_memory_info *out) {
    capacity *state = self;
    sk__lock(&state->base.lock);
    *out = (sk_memory_info){.free_bytes = state->total_bytes - state->used_bytes,
                            .total_bytes = state->total_bytes};
    sk__unlock(&state->base.lock);
    return SK_OK;
}

static void capacity_destroy(sk__interposer *self) {
    capacity *state = (capacity *)self;
    if (state->file >= 0) {
        (void)close(state->file);
    }
    free(state->places);
    free(state);
}

static sk_backend *make_over(sk_backend *inner, size_t capacity_bytes, int file) {
    sk_backend *out = NULL;
    capacity *state = take_host(1, sizeof *state);
    state->base = (sk__interposer){.inner = inner, .destroy = capacity_destroy};
    state->granule_bytes = inner->ops.granule_bytes;
    state->total_bytes = capacity_bytes;
    state->file = file;
    CHECK_OK(sk__interpose(&state->base, capacity_name, &out));
    out->ops.memory_info = capacity_info;
    out->ops.memory_alloc = capacity_alloc;
    out->ops.memory_free = capacity_free;
    if (inner->ops.granule_bytes != 0) {
        out->ops.range_commit = capacity_commit;
        out->ops.range_decommit = capacity_decommit;
    }
    if (inner->has_aliases || file >= 0) {
        out->ops.range_alias = capacity_alias;
        out->has_aliases = true;
    }
    return out;
}

sk_backend *make_capped(sk_backend *inner, size_t capacity_bytes) {
    return make_over(inner, capacity_bytes, -1);
}

sk_backend *make_aliasing(size_t capacity_bytes) {
    if (device_is_remote()) {
        return make_device(capacity_bytes);
    }
    int file = memfd_create("aliases", MFD_CLOEXEC);
    CHECK(file >= 0);
    sk_cpu_params params = {.capacity_bytes = capacity_bytes, .granule_bytes = GRANULE};
    sk_backend *cpu = NULL;
    CHECK_OK(sk_backend_cpu(&params, &cpu));
    return make_over(cpu, capacity_bytes, file);
}
