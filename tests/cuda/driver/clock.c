/* clock.c - the time: the system's, or the virtual GPU's.
 *
 * On the virtual GPU time is what the process's threads have computed, as long as that would take
 * at a quiet moment (speed.c) on the GPU's host (CUSIM_HOST_SLOWNESS), and what they would have
 * waited for the device: that is skipped. So a step takes as long as if the process had its cores
 * for itself, whatever else runs, and waits take no real time. Threads that compute at the same
 * time are counted one after the other. Only one that launches no kernels counts for nothing when
 * its time comes while others compute, until it waits again: it has a core of its own.
 *
 * Whoever reads the clock wakes those whose time has come. When no thread of the process can run,
 * each being asleep or waiting, one of those that wait skips to the first of their times. What
 * waking and looking take is taken off the clock; but a thread that naps and looks also disturbs
 * those that compute, by some 30 us of theirs each time: so one that only waits looks seldom.
 *
 * Two locks: `clock_lock` for the clock's own numbers, held for a moment; `wait_lock` for who
 * waits, taken first.
 */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "settings.h"
#include "sim.h"

#define NS_PER_S 1000000000U
#define NAP_NS 30000
#define LONG_NAP_NS 4000000
#define SAMPLE_EVERY_NS 2000000
/* Whoever sees nobody run looks once more: a thread that takes a lock is asleep for a moment. */
enum { CALIBRATIONS = 2000, LOOKS = 2, SLOWEST = 8 };

typedef struct waiter {
    pid_t thread;
    uint64_t until_ns;
    bool woken;
    bool skipped; /* to its time: nobody had computed until then */
    pthread_cond_t wake;
    struct waiter *next;
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
static waiter *waiters; /* on their stacks */
static pid_t runner;    /* the last thread that was seen to run; 0: none */
/* When the first of those that were not woken wants to be; also read outside of the lock. */
static atomic_uint_fast64_t first_ns = UINT64_MAX;

/* Of this thread. Since when it computes beside others, by its own CPU time; 0: it does not. */
static _Thread_local uint64_t beside_since_ns;
static _Thread_local bool has_launched;

static uint64_t read_clock(clockid_t clock) {
    struct timespec now;
    (void)clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

static void before_fork(void) {
    (void)pthread_mutex_lock(&wait_lock);
    (void)pthread_mutex_lock(&clock_lock);
}

static void in_parent(void) {
    (void)pthread_mutex_unlock(&clock_lock);
    (void)pthread_mutex_unlock(&wait_lock);
}

/* A child begins without CPU time, and nobody waits there. */
static void in_child(void) {
    counted_ns = 0;
    next_sample_ns = 0;
    waiters = NULL;
    atomic_store(&first_ns, UINT64_MAX);
    in_parent();
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
    /* Else it was interrupted; or a virtual machine's clock of threads has stood still. */
    if (took < SLOWEST * quiet && took > quiet / SLOWEST) {
        slowness = (slowness + asked_slowness * quiet / took) / 2;
    }
    count(computed);
    counted_ns += took > 0 ? (uint64_t)took : 0;
    next_sample_ns = computed + SAMPLE_EVERY_NS;
}

static void count_until_now(void) {
    uint64_t computed = read_clock(CLOCK_PROCESS_CPUTIME_ID);
    if (computed > counted_ns) { /* a sample is counted before it may have been read */
        count(computed);
    }
}

static uint64_t tell(void) {
    count_until_now();
    latest_ns = told_ns > (double)latest_ns ? (uint64_t)told_ns : latest_ns;
    return latest_ns;
}

/* Take what this thread has computed since `began` off the clock, which has come to `reached_ns`.
 * Returns how much that was. */
static uint64_t take_off_since(uint64_t began, uint64_t reached_ns) {
    uint64_t taken = read_clock(CLOCK_THREAD_CPUTIME_ID) - began;
    (void)pthread_mutex_lock(&clock_lock);
    count_until_now();
    told_ns -= slowness * (double)taken;
    told_ns = told_ns > (double)reached_ns ? told_ns : (double)reached_ns;
    (void)pthread_mutex_unlock(&clock_lock);
    return taken;
}

/* ---- who is woken -------------------------------------------------------------------------------
 */

/* Inside wait_lock. Wake those whose time has come. */
static void wake_until(uint64_t now_ns, bool skipped) {
    uint64_t first = UINT64_MAX;
    for (waiter *each = waiters; each != NULL; each = each->next) {
        if (each->until_ns <= now_ns && !each->woken) {
            each->woken = true;
            each->skipped = skipped;
            (void)pthread_cond_signal(&each->wake);
        }
        first = !each->woken && each->until_ns < first ? each->until_ns : first;
    }
    atomic_store(&first_ns, first);
}

/* What it takes to wake others is no part of what this thread does on the machine that is shown. */
static void wake_due(uint64_t now_ns) {
    uint64_t began = read_clock(CLOCK_THREAD_CPUTIME_ID);
    (void)pthread_mutex_lock(&wait_lock);
    wake_until(now_ns, false);
    (void)pthread_mutex_unlock(&wait_lock);
    (void)take_off_since(began, 0);
}

/* ---- the clock ------------------------------------------------------------------------------- */

static uint64_t virtual_now_ns(void) {
    (void)pthread_once(&once, begin);
    if (beside_since_ns != 0) {
        beside_since_ns += take_off_since(beside_since_ns, 0);
    }
    (void)pthread_mutex_lock(&clock_lock);
    if (beside_since_ns == 0) { /* else what the sample takes would be taken off twice */
        sample();
    }
    told_ns -= slowness * reading_ns;
    uint64_t now = tell();
    (void)pthread_mutex_unlock(&clock_lock);
    if (now >= atomic_load(&first_ns)) {
        wake_due(now);
    }
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

/* Inside wait_lock. */
static bool is_waiting(pid_t thread) {
    const waiter *each = waiters;
    while (each != NULL && each->thread != thread) {
        each = each->next;
    }
    return each != NULL;
}

/* Inside wait_lock, for which it may just be asleep. */
static bool one_is_woken(void) {
    const waiter *each = waiters;
    while (each != NULL && !each->woken) {
        each = each->next;
    }
    return each != NULL;
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

/* Whether a thread that does not wait for a time could go on: the one that did is asked first,
 * which is cheap. Inside wait_lock. */
static bool others_run(void) {
    if (one_is_woken() || (runner != 0 && !is_waiting(runner) && thread_runs(runner))) {
        return true;
    }
    DIR *folder = opendir("/proc/self/task");
    const struct dirent *entry = NULL;
    runner = 0;
    while (runner == 0 && folder != NULL && (entry = readdir(folder)) != NULL) {
        pid_t thread = (pid_t)strtol(entry->d_name, NULL, 10);
        runner = thread != 0 && !is_waiting(thread) && thread_runs(thread) ? thread : 0;
    }
    if (folder != NULL) {
        (void)closedir(folder);
    }
    return runner != 0;
}

/* Tell the time, but do not count telling it: whoever waits takes off all that looking takes. */
static uint64_t look(void) {
    (void)pthread_mutex_lock(&clock_lock);
    uint64_t now = tell();
    (void)pthread_mutex_unlock(&clock_lock);
    return now;
}

/* Inside wait_lock: to the first time that is waited for. */
static void skip(void) {
    uint64_t until_ns = atomic_load(&first_ns);
    (void)pthread_mutex_lock(&clock_lock);
    (void)tell();
    told_ns = told_ns > (double)until_ns ? told_ns : (double)until_ns;
    latest_ns = until_ns > latest_ns ? until_ns : latest_ns;
    (void)pthread_mutex_unlock(&clock_lock);
    wake_until(until_ns, true);
}

/* Inside wait_lock, which it leaves meanwhile. Until it is woken, or so many have passed. */
static void nap(waiter *self, uint64_t length_ns) {
    uint64_t until_ns = read_clock(CLOCK_REALTIME) + length_ns;
    struct timespec until = {.tv_sec = (time_t)(until_ns / NS_PER_S),
                             .tv_nsec = (long)(until_ns % NS_PER_S)};
    int slept = 0;
    while (!self->woken && slept == 0) {
        slept = pthread_cond_timedwait(&self->wake, &wait_lock, &until);
    }
}

/* Inside wait_lock. Those who compute tell the time, and wake whose it is; but if they sleep for
 * something else meanwhile nobody does. */
static void wait_inside(waiter *self) {
    uint64_t began = read_clock(CLOCK_THREAD_CPUTIME_ID);
    int looks = 0;
    while (!self->woken) {
        wake_until(look(), false);
        looks = !self->woken && !others_run() ? looks + 1 : 0;
        began += take_off_since(began, 0);
        if (looks == LOOKS) {
            skip();
            looks = 0;
        } else if (!self->woken) {
            nap(self, has_launched || looks > 0 ? NAP_NS : LONG_NAP_NS);
        }
    }
    (void)take_off_since(began, self->until_ns);
}

void sim_clock_wait(uint64_t until_ns) {
    if (beside_since_ns != 0) {
        (void)take_off_since(beside_since_ns, 0);
    }
    waiter self = {.thread = (pid_t)syscall(SYS_gettid),
                   .until_ns = until_ns,
                   .wake = PTHREAD_COND_INITIALIZER};
    (void)pthread_mutex_lock(&wait_lock);
    self.next = waiters;
    waiters = &self;
    wait_inside(&self);
    waiter **link = &waiters;
    while (*link != &self) {
        link = &(*link)->next;
    }
    *link = self.next;
    (void)pthread_mutex_unlock(&wait_lock);
    (void)pthread_cond_destroy(&self.wake);
    bool beside = !has_launched && !self.skipped;
    beside_since_ns = beside ? read_clock(CLOCK_THREAD_CPUTIME_ID) : 0;
}

void sim_clock_launched(void) {
    has_launched = true;
    beside_since_ns = 0;
}
