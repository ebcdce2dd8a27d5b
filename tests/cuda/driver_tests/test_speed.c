/* test_speed.c - the virtual GPU's clock where the host's own are wrong for a moment. */
#include "harness.h"

#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { TURNS = 20, SAMPLE_EVERY_MS = 2 };
#define NS_PER_S (1000 * MS_IN_NS)

static atomic_bool stands_still;

/* Instead of the C library's, for the driver, too: on a virtual machine the clock of a thread may
 * stand still for a moment. */
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_THREAD_CPUTIME_ID && atomic_load(&stands_still)) {
        *now = (struct timespec){.tv_sec = 1};
    }
    return failed;
}

static void be_virtual(cusim_options *options) { options->timed = 1; }

static uint64_t computed_ns(void) {
    struct timespec now;
    CHECK_EQUAL(0, clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now));
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

/* How much of what this thread computes meanwhile is on the clock, which does not go back. */
static double compute(uint64_t duration_ns) {
    uint64_t begin = cusim_now_ns();
    uint64_t latest = begin;
    uint64_t began = computed_ns();
    uint64_t computed = 0;
    while ((computed = computed_ns() - began) < duration_ns) {
        uint64_t now = cusim_now_ns();
        CHECK(now >= latest);
        latest = now;
    }
    return (double)(latest - begin) / (double)computed;
}

TEST(speed_is_kept_where_the_clock_of_a_thread_stands_still) {
    (void)open_driver(be_virtual);
    for (int turn = 0; turn < TURNS; turn++) {
        atomic_store(&stands_still, turn % 2 == 1);
        double counted = compute(2 * (SAMPLE_EVERY_MS * MS_IN_NS));
        CHECK(counted > 0.1 && counted < 10); /* endless or none, once a sample took no time */
    }
    atomic_store(&stands_still, false);
    close_driver();
}
