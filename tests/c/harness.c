/* harness.c - the list of tests and the runner's command line.
 *
 *     run [--list] [FILTER ...]     a test runs if one FILTER is part of "subject.name"
 *
 * Exit status: 0 if at least one test ran and none failed, else 1; 2 after a hang.
 */
#include "harness.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "device.h"

enum {
#ifdef SK_TEST_SANITISED
    TIME_LIMIT_SECONDS = 360,
#else
    TIME_LIMIT_SECONDS = 120,
#endif
    OUTCOME_FAILED = 1,
    OUTCOME_SKIPPED = 2,
    EXIT_HUNG = 2,
    SLOW_SECONDS = 5
};

static test_case *tests; /* by subject, then in order of registration */
static const test_case *running;
static pthread_t runner;
static jmp_buf leave;
static atomic_bool failed;

void test_register(test_case *test) {
    test_case **link = &tests;
    while (*link != NULL && strcmp((*link)->subject, test->subject) <= 0) {
        link = &(*link)->next;
    }
    test->next = *link;
    *link = test;
}

void test_time_limit(unsigned seconds) { (void)alarm(seconds); }

void test_fail(const char *file, int line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)fprintf(stderr, "%s:%d: %s: ", file, line, running == NULL ? "?" : running->name);
    (void)vfprintf(stderr, format, arguments);
    (void)fputc('\n', stderr);
    va_end(arguments);
    atomic_store(&failed, true);
    if (pthread_equal(pthread_self(), runner)) {
        longjmp(leave, OUTCOME_FAILED);
    }
    pthread_exit(NULL);
}

void test_skip(const char *reason) {
    (void)printf("SKIP %s: %s\n", running->name, reason);
    longjmp(leave, OUTCOME_SKIPPED);
}

void test_check_status(const char *file, int line, const char *what, sk_status expected,
                       sk_status actual) {
    if (expected != actual) {
        test_fail(file, line, "%s: expected %s, got %s (%s)", what, sk_status_name(expected),
                  sk_status_name(actual), sk_error_text());
    }
}

void test_check_equal(const char *file, int line, const char *what, long long expected,
                      long long actual) {
    if (expected != actual) {
        test_fail(file, line, "%s: expected %lld, got %lld", what, expected, actual);
    }
}

void test_check_contains(const char *file, int line, const char *text, const char *part) {
    if (text == NULL || strstr(text, part) == NULL) {
        test_fail(file, line, "\"%s\" is not in \"%s\"", part, text == NULL ? "(null)" : text);
    }
}

/* Only async-signal-safe calls. */
static void on_alarm(int number) {
    static const char text[] = "hung: ";
    (void)number;
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
    (void)!write(STDERR_FILENO, running->name, strlen(running->name));
    (void)!write(STDERR_FILENO, "\n", 1);
    _exit(EXIT_HUNG);
}

static bool test_matches(const test_case *test, int nfilters, char **filters) {
    char full[512];
    (void)snprintf(full, sizeof full, "%s.%s", test->subject, test->name);
    for (int i = 0; i < nfilters; i++) {
        if (strstr(full, filters[i]) != NULL) {
            return true;
        }
    }
    return nfilters == 0;
}

static int test_run(const test_case *test) {
    running = test;
    atomic_store(&failed, false);
    (void)fflush(stdout);
    (void)alarm(TIME_LIMIT_SECONDS);
    device_test_begin();
    int outcome = setjmp(leave);
    if (outcome == 0) {
        test->run();
    }
    const char *left = device_test_end();
    if (outcome == 0 && left != NULL) {
        (void)fprintf(stderr, "%s: %s\n", test->name, left);
        atomic_store(&failed, true);
    }
    (void)alarm(0);
    return atomic_load(&failed) ? OUTCOME_FAILED : outcome;
}

/* Run one test and say so if it took long. */
static int test_run_timed(const test_case *test) {
    time_t begin = time(NULL);
    int outcome = test_run(test);
    long seconds = (long)(time(NULL) - begin);
    if (seconds >= SLOW_SECONDS) {
        (void)printf("slow: %s.%s, %ld s\n", test->subject, test->name, seconds);
    }
    return outcome;
}

/* Tests of subjects that do not fit the device count as skipped; the reason is printed once. */
static bool is_unfit(const test_case *test) {
    static const char *last;
    const char *reason = device_unfit(test->subject);
    if (reason != NULL && (last == NULL || strcmp(last, test->subject) != 0)) {
        (void)printf("SKIP %s.*: %s\n", test->subject, reason);
        last = test->subject;
    }
    return reason != NULL;
}

static void list_tests(int nfilters, char **filters) {
    for (const test_case *test = tests; test != NULL; test = test->next) {
        if (test_matches(test, nfilters, filters)) {
            (void)printf("%s.%s\n", test->subject, test->name);
        }
    }
}

int main(int argc, char **argv) {
    bool only_list = argc > 1 && strcmp(argv[1], "--list") == 0;
    int skip_arguments = only_list ? 2 : 1;
    int nfilters = argc - skip_arguments;
    if (only_list) {
        list_tests(nfilters, argv + skip_arguments);
        return EXIT_SUCCESS;
    }
    runner = pthread_self();
    (void)signal(SIGALRM, on_alarm);
    int npassed = 0;
    int nfailed = 0;
    int nskipped = 0;
    for (const test_case *test = tests; test != NULL; test = test->next) {
        if (!test_matches(test, nfilters, argv + skip_arguments)) {
            continue;
        }
        int outcome = is_unfit(test) ? OUTCOME_SKIPPED : test_run_timed(test);
        npassed += outcome == 0;
        nfailed += outcome == OUTCOME_FAILED;
        nskipped += outcome == OUTCOME_SKIPPED;
        if (outcome == OUTCOME_FAILED) {
            (void)printf("FAILED %s.%s\n", test->subject, test->name);
        }
    }
    (void)printf("%d passed, %d failed, %d skipped\n", npassed, nfailed, nskipped);
    return nfailed == 0 && npassed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
