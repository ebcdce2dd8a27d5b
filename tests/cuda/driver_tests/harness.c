/* harness.c - the program's main, and what tests share. */
#include "harness.h"

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef SIM_TESTED
#define SIM_TESTED "cuda driver"
#endif

enum { TEST_SECONDS = 60 };

static test_case *tests;
static const char *running = "";

void test_register(test_case *test) {
    test->next = tests;
    tests = test;
}

void test_fail(const char *file, int line, const char *what, long long expected, long long actual) {
    (void)fprintf(
        stderr, "%s: %s:%d: %s is %lld, not %lld\n  last refusal: %s\n  last problem: %s\n",
        running, file, line, what, actual, expected, cusim_last_refusal(), cusim_last_problem());
    (void)fflush(stderr);
    _exit(1);
}

CUcontext open_driver(void (*change)(cusim_options *)) {
    cusim_options options;
    cusim_options_init(&options);
    if (change != NULL) {
        change(&options);
    }
    CHECK(cusim_configure(&options));
    CHECK_OK(cuInit(0));
    CUcontext context = NULL;
    CHECK_OK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK_OK(cuCtxSetCurrent(context));
    return context;
}

void close_driver(void) {
    CHECK_OK(cuCtxSetCurrent(NULL));
    CHECK_OK(cuDevicePrimaryCtxRelease_v2(0));
}

size_t free_bytes(void) {
    size_t available = 0;
    size_t total = 0;
    CHECK_OK(cuMemGetInfo_v2(&available, &total));
    return available;
}

CUmemAllocationProp prop_of(int device) {
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
    };
}

CUmemAccessDesc access_of(int device, int flags) {
    return (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                             .flags = flags};
}

mapped_range map_range(size_t size) {
    mapped_range range = {.size = size};
    CUmemAllocationProp prop = prop_of(0);
    CUmemAccessDesc desc = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CHECK_OK(cuMemAddressReserve(&range.address, size, 0, 0, 0));
    CHECK_OK(cuMemCreate(&range.handle, size, &prop, 0));
    CHECK_OK(cuMemMap(range.address, size, 0, range.handle, 0));
    CHECK_OK(cuMemSetAccess(range.address, size, &desc, 1));
    return range;
}

void unmap_range(const mapped_range *range) {
    CHECK_OK(cuMemUnmap(range->address, range->size));
    CHECK_OK(cuMemRelease(range->handle));
    CHECK_OK(cuMemAddressFree(range->address, range->size));
}

CUdeviceptr alloc(size_t size) {
    CUdeviceptr address = 0;
    CHECK_OK(cuMemAlloc_v2(&address, size));
    return address;
}

unsigned char *pinned(size_t size) {
    void *memory = NULL;
    CHECK_OK(cuMemHostAlloc(&memory, size, 0));
    return memory;
}

CUstream stream_of(unsigned flags) {
    CUstream stream = NULL;
    CHECK_OK(cuStreamCreate(&stream, flags));
    return stream;
}

bool all_bytes(const void *memory, unsigned char value, size_t size) {
    const unsigned char *bytes = memory;
    for (size_t i = 0; i < size; i++) {
        if (bytes[i] != value) {
            return false;
        }
    }
    return true;
}

cusim_open report(void) {
    cusim_open open;
    cusim_report(&open);
    return open;
}

uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

static void read_all(int from, char *output, size_t room) {
    size_t length = 0;
    char rest[256];
    ssize_t got = 1;
    while (got > 0) {
        bool fits = output != NULL && length + 1 < room;
        got = read(from, fits ? output + length : rest, fits ? room - 1 - length : sizeof rest);
        length += fits && got > 0 ? (size_t)got : 0;
    }
    if (output != NULL) {
        output[length] = '\0';
    }
}

int run_child(void (*child)(void), char *output, size_t room) {
    int ends[2];
    CHECK_EQUAL(0, pipe(ends));
    (void)fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)close(ends[0]);
        if (output != NULL) {
            (void)dup2(ends[1], STDERR_FILENO);
        }
        child();
        exit(0);
    }
    (void)close(ends[1]);
    read_all(ends[0], output, room);
    (void)close(ends[0]);
    int status = 0;
    CHECK_EQUAL(pid, waitpid(pid, &status, 0));
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static void check_nothing_open(void) {
    cusim_open open = report();
    CHECK_EQUAL(0, open.contexts);
    CHECK_EQUAL(0, open.streams);
    CHECK_EQUAL(0, open.events);
    CHECK_EQUAL(0, open.allocations);
    CHECK_EQUAL(0, open.handles);
    CHECK_EQUAL(0, open.reservations);
    CHECK_EQUAL(0, open.mappings);
    CHECK_EQUAL(0, open.host_allocations);
    CHECK_EQUAL(0, open.registrations);
    CHECK(cusim_reset());
}

int main(int count, char **arguments) {
    unsigned done = 0;
    for (test_case *test = tests; test != NULL; test = test->next) {
        if (count > 1 && strstr(test->name, arguments[1]) == NULL) {
            continue;
        }
        running = test->name;
        (void)alarm(TEST_SECONDS);
        test->run();
        check_nothing_open();
        done++;
    }
    printf("%s: %u tests passed\n", SIM_TESTED, done);
    return done == 0;
}
