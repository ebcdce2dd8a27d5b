/* harness.h - tests of the simulated driver: they register themselves, and a failed check ends the
 * program.
 *
 *     TEST(memory_free_twice) { ... CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address)); }
 *
 * Every test begins with a driver that is not initialised and must leave nothing open.
 */
#ifndef CUSIM_HARNESS_H
#define CUSIM_HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_abi.h"
#include "cusim.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GRANULE (2 * MIB)
#define MS_IN_NS 1000000ULL
#define LONG_NS (300 * MS_IN_NS) /* longer than a busy machine delays a test's next calls */

typedef struct test_case {
    const char *name;
    void (*run)(void);
    struct test_case *next;
} test_case;

void test_register(test_case *test);
_Noreturn void test_fail(const char *file, int line, const char *what, long long expected,
                         long long actual);

#define TEST(name_)                                                                                \
    static void test_##name_(void);                                                                \
    __attribute__((constructor)) static void register_##name_(void) {                              \
        static test_case test = {.name = #name_, .run = test_##name_};                             \
        test_register(&test);                                                                      \
    }                                                                                              \
    static void test_##name_(void)

#define CHECK_EQUAL(expected, actual)                                                              \
    do {                                                                                           \
        long long expected_ = (long long)(expected);                                               \
        long long actual_ = (long long)(actual);                                                   \
        if (expected_ != actual_) {                                                                \
            test_fail(__FILE__, __LINE__, #actual, expected_, actual_);                            \
        }                                                                                          \
    } while (0)
#define CHECK(condition) CHECK_EQUAL(true, (bool)(condition))
#define CHECK_IS(result, call) CHECK_EQUAL(result, call)
#define CHECK_OK(call) CHECK_EQUAL(CUDA_SUCCESS, call)

/* Initialise with default options, which `change` (or NULL) may alter, and make the primary context
 * of device 0 current. close_driver() undoes it. */
CUcontext open_driver(void (*change)(cusim_options *));
void close_driver(void);
size_t free_bytes(void);

/* A mapped range with access for device 0. */
typedef struct mapped_range {
    CUdeviceptr address;
    size_t size;
    CUmemGenericAllocationHandle handle;
} mapped_range;

CUmemAllocationProp prop_of(int device);
CUmemAccessDesc access_of(int device, int flags);
mapped_range map_range(size_t size);
void unmap_range(const mapped_range *range);

CUdeviceptr alloc(size_t size);
unsigned char *pinned(size_t size);
CUstream stream_of(unsigned flags);
bool all_bytes(const void *memory, unsigned char value, size_t size);
cusim_open report(void);
uint64_t now_ns(void);

/* Run `child` in a forked process; its exit status, or 128 + the signal that ended it. What it
 * writes to stderr is returned in `output`, if that is not NULL. */
int run_child(void (*child)(void), char *output, size_t room);

#endif
