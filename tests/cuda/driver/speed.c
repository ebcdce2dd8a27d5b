/* speed.c - how fast this host is now, beside a quiet moment.
 *
 * What else runs on the same processor makes it up to half as fast, and the CPU time of a process
 * does not show that. So a bit of work like an interpreter's is timed now and then; what it takes
 * now, beside what it takes at a quiet moment, says how much of the computing since was delay.
 *
 * The quiet moment is measured: of each SAMPLES samples the 2 % quantile (less than that is
 * chance), and of those the least. CUSIM_HOST_QUIET_FILE keeps it from process to process, so that
 * one that never meets a quiet moment knows what it would be; it may go down, and is only removed
 * by hand.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "settings.h"
#include "sim.h"

enum { SAMPLES = 400, QUANTILE = SAMPLES / 50, TABLE = 4096, ROUNDS = 1500 };
#define NS_PER_S 1000000000.0

static double quiet_ns; /* by which this process scales */
static double least_ns; /* found by now: for the processes to come */
static double found[SAMPLES];
static size_t found_count;

/* Loads that depend on one another, and branches. */
static void work(void) {
    static uint32_t table[TABLE];
    static volatile uint32_t state = 1;
    uint32_t x = state;
    for (int i = 0; i < ROUNDS; i++) {
        uint32_t *cell = &table[(x ^ (x >> 13)) % TABLE];
        switch ((x >> 5) & 7U) {
        case 0:
            x += *cell;
            break;
        case 1:
            x ^= *cell << 1;
            break;
        case 2:
            *cell = x;
            x *= 2654435761U;
            break;
        case 3:
            x = (x << 7) | (x >> 25);
            break;
        case 4:
            *cell += x >> 3;
            x += 17;
            break;
        case 5:
            x ^= x << 13;
            break;
        case 6:
            x -= *cell;
            break;
        default:
            x = x * 1664525U + 1013904223U;
            break;
        }
    }
    state = x == 0 ? 1 : x;
}

static double thread_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * NS_PER_S + (double)now.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    double difference = *(const double *)a - *(const double *)b;
    return difference < 0 ? -1 : difference > 0;
}

double sim_speed_sample_ns(void) {
    double start = thread_ns();
    work();
    double took = thread_ns() - start;
    if (took <= 0) { /* its clock has stood still */
        return took;
    }
    found[found_count++] = took;
    if (found_count == SAMPLES) {
        found_count = 0;
        qsort(found, SAMPLES, sizeof found[0], by_value);
        least_ns = least_ns == 0 || found[QUANTILE] < least_ns ? found[QUANTILE] : least_ns;
    }
    return took;
}

static double remembered_ns(const char *path) {
    double value = 0;
    FILE *file = *path == '\0' ? NULL : fopen(path, "re");
    if (file != NULL) {
        char text[64] = "";
        value = fgets(text, sizeof text, file) != NULL ? strtod(text, NULL) : 0;
        (void)fclose(file);
    }
    return value;
}

/* Of two processes that end at once one wins; the next one makes up for it. */
static void remember(const char *path) {
    char aside[4096];
    int length = snprintf(aside, sizeof aside, "%s.%d", path, (int)getpid());
    FILE *file = length < (int)sizeof aside ? fopen(aside, "we") : NULL;
    if (file != NULL) {
        (void)fprintf(file, "%.0f\n", least_ns);
        (void)fclose(file);
        (void)rename(aside, path);
    }
}

void sim_speed_begin(void) {
    double given = sim_setting_fraction(SIM_SET_HOST_QUIET_NS);
    double known = given > 0 ? given : remembered_ns(sim_setting_text(SIM_SET_HOST_QUIET_FILE));
    while (least_ns == 0) {
        (void)sim_speed_sample_ns();
    }
    quiet_ns = known > 0 && (given > 0 || known < least_ns) ? known : least_ns;
}

void sim_speed_end(void) {
    const char *path = sim_setting_text(SIM_SET_HOST_QUIET_FILE);
    double known = remembered_ns(path);
    if (*path != '\0' && (known == 0 || least_ns < known)) {
        remember(path);
    }
}

double sim_speed_quiet_ns(void) { return quiet_ns; }
