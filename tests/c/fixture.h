/* fixture.h - what many tests need: backends by name, a pool over one, patterns in memory.
 *
 * Everything here checks what it calls; a test that only needs a pool is three lines long.
 */
#ifndef SWAPKIT_TESTS_FIXTURE_H
#define SWAPKIT_TESTS_FIXTURE_H

#include <stdatomic.h>

#include "device.h"
#include "harness.h"
#include "instruments/instruments.h"

enum {
    KIB = 1024,
    MIB = 1024 * KIB,
    GRANULE = 64 * KIB, /* of the simulated devices' virtual memory; the cpu backend's is a page */
    ROUNDING = 512,     /* of the pool's blocks */
    SMALL_LIMIT = MIB,  /* requests up to here live in the small arena */
    CAPACITY = 512 * MIB,  /* of the backends that tests make, unless said */
    MAX_DROPPED = 32,      /* streams of one fixture */
    PATTERN_STRIDE = 1021, /* bytes between samples of a large block: prime, so no alignment */
};

/* Every way to get a backend that must keep the contract of sk_backend_ops. */
typedef struct backend_kind {
    const char *name;
    sk_backend *(*make)(void);
} backend_kind;

/* Of the device that the tests run on; how many in `*count`. */
const backend_kind *backend_kinds(size_t *count);

sk_backend *make_cpu(size_t capacity_bytes);
sk_backend *make_fault(sk_backend *inner);
sk_backend *make_delay(sk_backend *inner);
sk_backend *make_trace(sk_backend *inner, size_t capacity);

sk_stream *make_stream(sk_backend *backend);
void drop_stream(sk_backend *backend, sk_stream *stream);
size_t device_bytes(sk_backend *backend); /* that the backend says are held */
size_t granule_of(void); /* of the virtual memory of the device that the tests run on */

/* A pool over its own backend; both go away with pool_close(), which checks that nothing leaked. */
typedef struct fixture {
    sk_backend *backend;
    sk_backend *gate;  /* the delay wrapper inside `backend`, or NULL */
    sk_backend *fault; /* the fault wrapper inside `backend`, or NULL */
    sk_pool *pool;
    sk_stream *dropped[MAX_DROPPED]; /* to be destroyed after the pool */
    atomic_int ndropped;
} fixture;

fixture fixture_open(size_t budget_bytes, bool whole_segments);
/* Memory can be mapped at several addresses; calls that the backend is asked for can be made to
 * fail: fixture.fault. Copies wait as below. */
fixture fixture_open_aliasing(size_t budget_bytes);
/* Copies wait for sk_delay_release(fixture.gate, n). */
fixture fixture_open_gated(size_t budget_bytes, bool whole_segments);
void fixture_close(fixture *fixture);

/* Drop a stream that the pool was told of: it must outlive the pool, so fixture_close() does it. */
void drop_used_stream(fixture *fixture, sk_stream *stream);

void *take(fixture *fixture, size_t nbytes, sk_stream *stream);
void give(fixture *fixture, void *address);
sk_pool_stats stats_of(fixture *fixture);
/* The state of the block that starts at `address`; fails the test if there is none. */
sk_block_info block_at(fixture *fixture, const void *address);

/* Whole block if small, else samples: enough to see that no other block overlaps. */
void pattern_write(void *address, size_t nbytes, unsigned seed);
bool pattern_holds(const void *address, size_t nbytes, unsigned seed);

/* A generator with a fixed seed: the same numbers in every run. */
uint64_t random_next(uint64_t *state);
size_t random_below(uint64_t *state, size_t limit);

/* What this process has counted: a forked child's _exit() would lose it. */
void coverage_write(void);

/* Fails the `nth` allocation of host memory from now on; 0 disarms. Needs the linker's --wrap. */
void host_memory_fail(uint64_t nth, bool forever);
uint64_t host_memory_calls(void); /* since the last host_memory_fail() */

#endif
