/* harness.h - tests that register themselves, and the checks that they make.
 *
 *     SK_TEST(pool, test_take_when_zero_bytes_then_invalid) { CHECK_STATUS(SK_INVALID, ...); }
 *
 * is a whole test: a constructor puts it on the list before main() runs, so none can be forgotten.
 * A failed check ends its test. From the thread that runs the test it jumps out, leaving what the
 * test owned as it was; from any other thread it ends that thread. The runner then goes on with the
 * next test. A test that hangs is ended by an alarm, with its name.
 */
#ifndef SWAPKIT_TESTS_HARNESS_H
#define SWAPKIT_TESTS_HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "swapkit_pool.h"

typedef struct test_case {
    const char *subject;
    const char *name;
    void (*run)(void);
    struct test_case *next;
} test_case;

/* Called by the constructors that SK_TEST makes. `test` is static and borrowed for good. */
void test_register(test_case *test);

/* Report a failed check and leave the test. */
_Noreturn void test_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Leave the test uncounted: neither passed nor failed. The reason is printed. */
_Noreturn void test_skip(const char *reason);
/* Give the running test this long before it counts as hung. */
void test_time_limit(unsigned seconds);

void test_check_status(const char *file, int line, const char *what, sk_status expected,
                       sk_status actual);
void test_check_equal(const char *file, int line, const char *what, long long expected,
                      long long actual);

#define SK_TEST(subject_, name_)                                                                   \
    static void name_(void);                                                                       \
    __attribute__((constructor)) static void register_##name_(void) {                              \
        static test_case test = {.subject = #subject_, .name = #name_, .run = name_};              \
        test_register(&test);                                                                      \
    }                                                                                              \
    static void name_(void)

#define CHECK(condition)                                                                           \
    ((condition) ? (void)0 : test_fail(__FILE__, __LINE__, "not true: %s", #condition))
#define CHECK_STATUS(expected, call)                                                               \
    test_check_status(__FILE__, __LINE__, #call, (expected), (call))
#define CHECK_OK(call) CHECK_STATUS(SK_OK, call)
#define CHECK_EQUAL(expected, actual)                                                              \
    test_check_equal(__FILE__, __LINE__, #actual, (long long)(expected), (long long)(actual))
#define CHECK_CONTAINS(text, part) test_check_contains(__FILE__, __LINE__, (text), (part))

void test_check_contains(const char *file, int line, const char *text, const char *part);

#endif
