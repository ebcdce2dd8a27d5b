/* test_beside.c - the virtual GPU's clock, and threads that wait while another computes. */
#include "harness.h"

#include <pthread.h>
#include <sys/resource.h>
#include <time.h>

enum { EVENTS = 8, EVERY_MS = 5, BUSY_MS = 4, WAITING_MS = 40 };
#define TOGETHER_NS (EVENTS * (EVERY_MS * MS_IN_NS))

static CUevent marks[EVENTS];

static void be_virtual(cusim_options *options) {
    options->timed = 1;
    options->wipe = 0;
}

static uint64_t computed_ns(void) {
    struct timespec now;
    CHECK_EQUAL(0, clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now));
    return (uint64_t)now.tv_sec * 1000 * MS_IN_NS + (uint64_t)now.tv_nsec;
}

/* Compute, and read the clock now and then, as whoever launches does. How much of that is on the
 * clock. */
static double compute(uint64_t duration_ns) {
    uint64_t begin = cusim_now_ns();
    uint64_t began = computed_ns();
    uint64_t computed = 0;
    volatile unsigned sum = 0;
    while ((computed = computed_ns() - began) < duration_ns) {
        for (unsigned i = 0; i < 50000; i++) {
            sum += i;
        }
        (void)cusim_now_ns();
    }
    return (double)(cusim_now_ns() - begin) / (double)computed;
}

/* A device that is done with `count` events, one each `every_ms`. */
static CUcontext open_busy(int count, uint64_t every_ms) {
    CUcontext context = open_driver(be_virtual);
    CHECK(cusim_parameter("GB_PER_S", 1, 1) == 1);
    for (int i = 0; i < count; i++) {
        CHECK_OK(cusim_launch(
            NULL,
            &(cusim_work){.kind = CUSIM_MEMORY, .bytes = every_ms * MS_IN_NS, .name = "kernel"}));
        CHECK_OK(cuEventCreate(&marks[i], CU_EVENT_DISABLE_TIMING));
        CHECK_OK(cuEventRecord(marks[i], NULL));
    }
    return context;
}

static void close_busy(int count) {
    for (int i = 0; i < count; i++) {
        CHECK_OK(cuEventDestroy_v2(marks[i]));
    }
    close_driver();
}

static void *compute_after_each(void *context) {
    CHECK_OK(cuCtxSetCurrent(context));
    for (int i = 0; i < EVENTS; i++) {
        CHECK_OK(cuEventSynchronize(marks[i]));
        (void)compute(BUSY_MS * MS_IN_NS);
    }
    return NULL;
}

TEST(beside_another_thread_who_waits_in_between_computes_for_nothing) {
    CUcontext context = open_busy(EVENTS, EVERY_MS);
    pthread_t thread;
    CHECK_EQUAL(0, pthread_create(&thread, NULL, compute_after_each, context));
    double together = compute(TOGETHER_NS);
    CHECK_EQUAL(0, pthread_join(thread, NULL));
    double alone = compute(TOGETHER_NS);
    CHECK(together < 1.4 * alone); /* 1.8 if both were counted */
    close_busy(EVENTS);
}

static void *count_sleeps(void *context) {
    struct rusage usage;
    CHECK_OK(cuCtxSetCurrent(context));
    CHECK_OK(cuEventSynchronize(marks[0]));
    CHECK_EQUAL(0, getrusage(RUSAGE_THREAD, &usage));
    return (void *)(uintptr_t)usage.ru_nvcsw; /* NOLINT(performance-no-int-to-ptr) */
}

TEST(beside_another_thread_who_waits_sleeps_until_it_is_time) {
    CUcontext context = open_busy(1, WAITING_MS);
    pthread_t thread;
    void *sleeps = NULL;
    CHECK_EQUAL(0, pthread_create(&thread, NULL, count_sleeps, context));
    (void)compute(2 * (WAITING_MS * MS_IN_NS));
    CHECK_EQUAL(0, pthread_join(thread, &sleeps));
    CHECK((uintptr_t)sleeps < WAITING_MS); /* hundreds, if it looked every 30 us */
    close_busy(1);
}
