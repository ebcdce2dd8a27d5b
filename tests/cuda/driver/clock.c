/* clock.c - the time: the system's, or the virtual GPU's.
 *
 * On the virtual GPU time is what the process's threads have computed, as long as that would take
 * at a quiet moment (speed.c) on the GPU's host (CUSIM_HOST_SLOWNESS), and what they would have
 * waited for the device: that is skipped. So a step takes as long as if the process had its cores
 * for itself, whatever else runs, and waits take no real time. Threads that compute at the same
 * time are counted one after the other.
 *
 * A thread that waits for a time may skip to it when no other thread of the process can run: each
 * is asleep, or waits for a later time. What looking for that takes is taken off the clock.
 *
 * Two locks: `clock_lock` for the clock's own numbers, held for a moment; `wait_lock` for who
 * waits, taken first.
 */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "settings.h"
#include "sim.h"

#define NS_PER_S 1000000000U
#define NAP_NS 30000
#define SAMPLE_EVERY_NS 2000000
/* Whoever sees nobody run looks once more: a thread that takes a lock is asleep for a moment. */
enum { MOST_WAITERS = 256, CALIBRATIONS = 2000, LOOKS = 2, SLOWEST = 8 };

typedef struct waiter {
    pid_t thread;
    uint64_t until_ns;
} waiter;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t clock_lock = PTHREAD_MUTEX_INITIALIZER;
static double told_ns;      /* computed until `counted_ns`, scaled, and what was skipped */
static uint64_t latest_ns;  /* told last: the clock does not go back */
static uint64_t counted_ns; /* of the process's CPU time */
static uint64_t next_sample_ns;
static double asked_slowness; /* beside a quiet moment of this host */
static double slowness;       /* beside this moment */
static double reading_ns;     /* what it takes to read the clock */

static pthread_mutex_t wait_lock = PTHREAD_MUTEX_INITIALIZER;
static waiter waiters[MOST_WAITERS];
static size_t waiter_count;

static uint64_t read_clock(clockid_t clock) {
    struct timespec now;
    (void)clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

static void before_fork(void) { (void)pthread_mutex_lock(&clock_lock); }

static void in_parent(void) { (void)pthread_mutex_unlock(&clock_lock); }

/* A child begins without CPU time. */
static void in_child(void) {
    counted_ns = 0;
    next_sample_ns = 0;
    (void)pthread_mutex_unlock(&clock_lock);
}

static void at_exit(void) {
    (void)pthread_mutex_lock(&clock_lock);
    sim_speed_end();
    (void)pthread_mutex_unlock(&clock_lock);
}

static void begin(void) {
    uint64_t start = read_clock(CLOCK_PROCESS_CPUTIME_ID);
    for (int i = 0; i < CALIBRATIONS; i++) {
        (void)read_clock(CLOCK_PROCESS_CPUTIME_ID);
    }
    reading_ns = (double)(read_clock(CLOCK_PROCESS_CPUTIME_ID) - start) / CALIBRATIONS;
    sim_speed_begin();
    asked_slowness = sim_setting_fraction(SIM_SET_HOST_SLOWNESS);
    slowness = asked_slowness;
    told_ns = (double)read_clock(CLOCK_MONOTONIC);
    counted_ns = read_clock(CLOCK_PROCESS_CPUTIME_ID);
    (void)pthread_atfork(before_fork, in_parent, in_child);
    (void)atexit(at_exit);
}

/* ---- inside clock_lock ----------------------------------------------------------------------- */

static void count(uint64_t computed) {
    told_ns += slowness * (double)(computed - counted_ns);
    counted_ns = computed;
}

/* What was computed since the last sample is scaled by what this one and that one say. */
static void sample(void) {
    uint64_t computed = read_clock(CLOCK_PROCESS_CPUTIME_ID);
    if (computed < next_sample_ns) {
        return;
    }
    double took = sim_speed_sample_ns();
    double quiet = sim_speed_quiet_ns();
    if (took < SLOWEST * quiet) { /* else it was interrupted */
        slowness = (slowness + asked_slowness * quiet / took) / 2;
    }
    count(computed);
    counted_ns += (uint64_t)took;
    next_sample_ns = computed + SAMPLE_EVERY_NS;
}

static uint64_t tell(void) {
    uint64_t computed = read_clock(CLOCK_PROCESS_CPUTIME_ID);
    if (computed > counted_ns) { /* a sample is counted before it may have been read */
        count(computed);
    }
    latest_ns = told_ns > (double)latest_ns ? (uint64_t)told_ns : latest_ns;
    return latest_ns;
}

/* ---- the clock ------------------------------------------------------------------------------- */

static uint64_t virtual_now_ns(void) {
    (void)pthread_once(&once, begin);
    (void)pthread_mutex_lock(&clock_lock);
    sample();
    told_ns -= slowness * reading_ns;
    uint64_t now = tell();
    (void)pthread_mutex_unlock(&clock_lock);
    return now;
}

uint64_t sim_now_ns(void) {
    return sim_is_timed() ? virtual_now_ns() : read_clock(CLOCK_MONOTONIC);
}

uint64_t cusim_now_ns(void) { return sim_now_ns(); }

double cusim_host_quiet_ns(void) {
    (void)pthread_once(&once, begin);
    return sim_speed_quiet_ns();
}

void sim_clock_spend(double duration_ns) {
    (void)pthread_once(&once, begin);
    (void)pthread_mutex_lock(&clock_lock);
    told_ns += duration_ns;
    (void)pthread_mutex_unlock(&clock_lock);
}

double cusim_host_slowness(double wanted) {
    (void)pthread_once(&once, begin);
    (void)pthread_mutex_lock(&clock_lock);
    double before = asked_slowness;
    if (wanted >= 0) {
        (void)tell();
        slowness = before > 0 ? slowness * wanted / before : wanted;
        asked_slowness = wanted;
        next_sample_ns = 0;
    }
    (void)pthread_mutex_unlock(&clock_lock);
    return before;
}

/* ---- waiting --------------------------------------------------------------------------------- */

static bool is_waiting(pid_t thread) {
    for (size_t i = 0; i < waiter_count; i++) {
        if (waiters[i].thread == thread) {
            return true;
        }
    }
    return false;
}

/* Whether the thread runs, or could: by the letter behind its name in /proc. */
static bool thread_runs(pid_t thread) {
    char text[128];
    (void)snprintf(text, sizeof text, "/proc/self/task/%d/stat", (int)thread);
    int file = open(text, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return false; /* it has ended */
    }
    /* NOLINTNEXTLINE(clang-analyzer-unix.BlockInCriticalSection): what is in /proc is there */
    ssize_t length = read(file, text, sizeof text - 1);
    (void)close(file);
    text[length > 0 ? length : 0] = '\0';
    const char *state = strrchr(text, ')');
    return state != NULL && state[1] == ' ' && strchr("SZXTt", state[2]) == NULL;
}

/* Whether a thread that does not wait for a time could go on. Inside wait_lock. */
static bool others_run(void) {
    DIR *folder = opendir("/proc/self/task");
    const struct dirent *entry = NULL;
    bool run = false;
    while (!run && folder != NULL && (entry = readdir(folder)) != NULL) {
        pid_t thread = (pid_t)strtol(entry->d_name, NULL, 10);
        run = thread != 0 && !is_waiting(thread) && thread_runs(thread);
    }
    if (folder != NULL) {
        (void)closedir(folder);
    }
    return run;
}

/* Inside wait_lock. */
static bool is_first(uint64_t until_ns) {
    for (size_t i = 0; i < waiter_count; i++) {
        if (waiters[i].until_ns < until_ns) {
            return false;
        }
    }
    return true;
}

/* Tell the time without what telling it took, which whoever waits takes off anyway. */
static uint64_t look(double taken_ns) {
    (void)pthread_mutex_lock(&clock_lock);
    told_ns -= slowness * taken_ns;
    uint64_t now = tell();
    (void)pthread_mutex_unlock(&clock_lock);
    return now;
}

static void skip_to(uint64_t until_ns) {
    (void)pthread_mutex_lock(&clock_lock);
    (void)tell();
    told_ns = told_ns > (double)until_ns ? told_ns : (double)until_ns;
    latest_ns = until_ns > latest_ns ? until_ns : latest_ns;
    (void)pthread_mutex_unlock(&clock_lock);
}

/* Inside wait_lock, which it leaves while it sleeps. */
static void wait_inside(uint64_t until_ns) {
    uint64_t began = read_clock(CLOCK_THREAD_CPUTIME_ID);
    uint64_t taken = 0;
    int looks = 0;
    while (look((double)taken) < until_ns) {
        looks = is_first(until_ns) && !others_run() ? looks + 1 : 0;
        taken = read_clock(CLOCK_THREAD_CPUTIME_ID) - began;
        began += taken;
        if (looks == LOOKS) {
            skip_to(until_ns);
            break;
        }
        (void)pthread_mutex_unlock(&wait_lock);
        (void)nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
        (void)pthread_mutex_lock(&wait_lock);
    }
}

void sim_clock_wait(uint64_t until_ns) {
    pid_t thread = (pid_t)syscall(SYS_gettid);
    (void)pthread_mutex_lock(&wait_lock);
    if (waiter_count == MOST_WAITERS) {
        abort();
    }
    waiters[waiter_count++] = (waiter){.thread = thread, .until_ns = until_ns};
    wait_inside(until_ns);
    for (size_t i = 0; i < waiter_count; i++) {
        if (waiters[i].thread == thread) {
            waiters[i] = waiters[--waiter_count];
            break;
        }
    }
    (void)pthread_mutex_unlock(&wait_lock);
}
