/* fixture.c - backends, pools and patterns for tests; and the host allocator's fault switch. */
#include "fixture.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* The linker puts the functions of the same name with __wrap_ before these, for the core's own
 * calls and the tests'; see the end of this file. */
void *__real_malloc(size_t nbytes);
void *__real_calloc(size_t count, size_t nbytes);
void *__real_realloc(void *address, size_t nbytes);
int __real_pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*start)(void *),
                          void *argument);

/* ---- backends -------------------------------------------------------------------------------- */

sk_backend *make_cpu(size_t capacity_bytes) {
    sk_cpu_params params = {.capacity_bytes = capacity_bytes};
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_cpu(&params, &backend));
    return backend;
}

sk_backend *make_fault(sk_backend *inner) {
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_fault(inner, &backend));
    return backend;
}

sk_backend *make_delay(sk_backend *inner) {
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_delay(inner, &backend));
    return backend;
}

sk_backend *make_trace(sk_backend *inner, size_t capacity) {
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_trace(inner, capacity, &backend));
    return backend;
}

static sk_backend *make_plain(void) { return make_device(CAPACITY); }
static sk_backend *make_whole(void) { return make_whole_device(CAPACITY); }
static sk_backend *make_faulty(void) { return make_fault(make_device(CAPACITY)); }
static sk_backend *make_traced(void) { return make_trace(make_device(CAPACITY), KIB); }

static sk_backend *make_open_gate(void) {
    sk_backend *delay = make_delay(make_device(CAPACITY));
    sk_delay_release(delay, UINT64_MAX);
    return delay;
}

static sk_backend *make_stack(void) {
    sk_backend *delay = make_open_gate();
    return make_trace(make_fault(delay), KIB);
}

static sk_backend *make_limited(void) {
    sk_cpu_params params = {
        .capacity_bytes = CAPACITY, .copy_bytes_per_s = UINT64_C(4) << 30, .copy_latency_ns = KIB};
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_cpu(&params, &backend));
    return backend;
}

const backend_kind *backend_kinds(size_t *count) {
    static const backend_kind on_cpu[] = {
        {"cpu", make_plain},    {"cpu with limits", make_limited},
        {"fault", make_faulty}, {"delay", make_open_gate},
        {"trace", make_traced}, {"trace, fault, delay", make_stack},
    };
    static const backend_kind on_device[] = {
        {"device", make_plain},
        {"device without virtual memory", make_whole},
        {"fault over device", make_faulty},
        {"delay over device", make_open_gate},
        {"trace over device", make_traced},
        {"trace, fault, delay over device", make_stack},
    };
    bool remote = device_is_remote();
    *count = remote ? sizeof on_device / sizeof on_device[0] : sizeof on_cpu / sizeof on_cpu[0];
    return remote ? on_device : on_cpu;
}

sk_stream *make_stream(sk_backend *backend) {
    sk_stream *stream = NULL;
    CHECK_OK(sk_stream_create(backend, &stream));
    CHECK(stream != NULL);
    return stream;
}

void drop_stream(sk_backend *backend, sk_stream *stream) {
    CHECK_OK(sk_stream_destroy(backend, stream));
}

size_t granule_of(void) {
    enum { PAGE = 4 * KIB };
    return device_is_remote() ? GRANULE : PAGE;
}

size_t device_bytes(sk_backend *backend) {
    sk_memory_info info = {0};
    CHECK_OK(sk_memory_info_get(backend, &info));
    CHECK(info.free_bytes <= info.total_bytes);
    return info.total_bytes - info.free_bytes;
}

/* ---- pools ----------------------------------------------------------------------------------- */

static fixture fixture_over(sk_backend *backend, size_t budget_bytes, bool whole_segments) {
    fixture made = {.backend = backend};
    sk_pool_params params = {.budget_bytes = budget_bytes, .whole_segments = whole_segments};
    CHECK_OK(sk_pool_create(backend, &params, &made.pool));
    CHECK(made.pool != NULL);
    return made;
}

fixture fixture_open(size_t budget_bytes, bool whole_segments) {
    return fixture_over(make_device(CAPACITY), budget_bytes, whole_segments);
}

fixture fixture_open_gated(size_t budget_bytes, bool whole_segments) {
    sk_backend *gate = make_delay(make_device(CAPACITY));
    fixture made = fixture_over(gate, budget_bytes, whole_segments);
    made.gate = gate;
    return made;
}

fixture fixture_open_aliasing(size_t budget_bytes) {
    sk_backend *gate = make_delay(make_aliasing(CAPACITY));
    sk_backend *fault = make_fault(gate);
    fixture made = fixture_over(fault, budget_bytes, false);
    made.gate = gate;
    made.fault = fault;
    return made;
}

void fixture_close(fixture *fixture) {
    if (fixture->gate != NULL) {
        sk_delay_release(fixture->gate, UINT64_MAX);
    }
    CHECK_OK(sk_pool_check(fixture->pool));
    CHECK_OK(sk_pool_destroy(fixture->pool));
    CHECK_EQUAL(0, device_bytes(fixture->backend));
    for (int i = 0; i < fixture->ndropped; i++) {
        drop_stream(fixture->backend, fixture->dropped[i]);
    }
    sk_backend_close(fixture->backend);
}

void drop_used_stream(fixture *fixture, sk_stream *stream) {
    int slot = atomic_fetch_add(&fixture->ndropped, 1);
    CHECK(slot < MAX_DROPPED);
    fixture->dropped[slot] = stream;
}

void *take(fixture *fixture, size_t nbytes, sk_stream *stream) {
    void *address = NULL;
    CHECK_OK(sk_pool_take(fixture->pool, nbytes, stream, &address));
    CHECK(address != NULL);
    return address;
}

void give(fixture *fixture, void *address) { CHECK_OK(sk_pool_give(fixture->pool, address)); }

sk_pool_stats stats_of(fixture *fixture) {
    sk_pool_stats stats;
    sk_pool_stats_get(fixture->pool, &stats);
    return stats;
}

sk_block_info block_at(fixture *fixture, const void *address) {
    size_t capacity = sk_pool_blocks(fixture->pool, NULL, 0);
    sk_block_info *blocks = calloc(capacity, sizeof *blocks);
    CHECK(blocks != NULL);
    sk_block_info found = {0};
    size_t nblocks = sk_pool_blocks(fixture->pool, blocks, capacity);
    for (size_t i = 0; i < nblocks && i < capacity; i++) {
        if (blocks[i].address == (uintptr_t)address) {
            found = blocks[i];
        }
    }
    free(blocks);
    CHECK(found.address != 0);
    return found;
}

/* ---- patterns -------------------------------------------------------------------------------- */

static unsigned char pattern_byte(size_t offset, unsigned seed) {
    enum { MIX = 131, SHIFT = 9 };
    return (unsigned char)(seed * MIX + offset + (offset >> SHIFT));
}

static size_t pattern_step(size_t nbytes) {
    enum { WHOLE = 4 * KIB };
    return nbytes <= WHOLE ? 1 : PATTERN_STRIDE;
}

static void pattern_fill(unsigned char *bytes, size_t nbytes, unsigned seed) {
    size_t step = pattern_step(nbytes);
    for (size_t i = 0; i < nbytes; i += step) {
        bytes[i] = pattern_byte(i, seed);
    }
    bytes[nbytes - 1] = pattern_byte(nbytes - 1, seed);
}

static bool pattern_is(const unsigned char *bytes, size_t nbytes, unsigned seed) {
    size_t step = pattern_step(nbytes);
    for (size_t i = 0; i < nbytes; i += step) {
        if (bytes[i] != pattern_byte(i, seed)) {
            return false;
        }
    }
    return bytes[nbytes - 1] == pattern_byte(nbytes - 1, seed);
}

/* Host memory to look at device memory through, also while none is to be had. */
static unsigned char *mirror_take(size_t nbytes) {
    unsigned char *mirror = __real_calloc(1, nbytes);
    CHECK(mirror != NULL);
    return mirror;
}

void pattern_write(void *address, size_t nbytes, unsigned seed) {
    if (!device_is_remote()) {
        pattern_fill(address, nbytes, seed);
        return;
    }
    unsigned char *mirror = mirror_take(nbytes);
    pattern_fill(mirror, nbytes, seed);
    device_write(address, mirror, nbytes);
    free(mirror);
}

bool pattern_holds(const void *address, size_t nbytes, unsigned seed) {
    if (!device_is_remote()) {
        return pattern_is(address, nbytes, seed);
    }
    unsigned char *mirror = mirror_take(nbytes);
    device_read(mirror, address, nbytes);
    bool holds = pattern_is(mirror, nbytes, seed);
    free(mirror);
    return holds;
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* splitmix64 (Steele, Lea, Flood 2014). */
uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

size_t random_below(uint64_t *state, size_t limit) { return (size_t)(random_next(state) % limit); }

/* ---- host memory that runs out --------------------------------------------------------------- */

static atomic_uint_least64_t host_calls;
static atomic_uint_least64_t host_nth;
static atomic_bool host_forever;

void host_memory_fail(uint64_t nth, bool forever) {
    atomic_store(&host_nth, 0);
    atomic_store(&host_calls, 0);
    atomic_store(&host_forever, forever);
    atomic_store(&host_nth, nth);
}

uint64_t host_memory_calls(void) { return atomic_load(&host_calls); }

static bool host_call_fails(void) {
    uint64_t nth = atomic_load(&host_nth);
    if (nth == 0) {
        return false;
    }
    uint64_t call = atomic_fetch_add(&host_calls, 1) + 1;
    return call == nth || (call > nth && atomic_load(&host_forever));
}

void *__wrap_malloc(size_t nbytes);
void *__wrap_calloc(size_t count, size_t nbytes);
void *__wrap_realloc(void *address, size_t nbytes);
int __wrap_pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*start)(void *),
                          void *argument);

void *__wrap_malloc(size_t nbytes) { return host_call_fails() ? NULL : __real_malloc(nbytes); }

void *__wrap_calloc(size_t count, size_t nbytes) {
    return host_call_fails() ? NULL : __real_calloc(count, nbytes);
}

void *__wrap_realloc(void *address, size_t nbytes) {
    return host_call_fails() ? NULL : __real_realloc(address, nbytes);
}

int __wrap_pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*start)(void *),
                          void *argument) {
    return host_call_fails() ? EAGAIN : __real_pthread_create(out, attributes, start, argument);
}

void coverage_write(void) {
#ifdef SK_TEST_COVERAGE
    extern void __gcov_dump(void);
    __gcov_dump();
#endif
}
