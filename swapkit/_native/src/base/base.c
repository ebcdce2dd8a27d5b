/* base.c - status names, the error text of each thread, assertions, the clock. */
#include "base/base.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ERROR_TEXT_BYTES = 512, NS_PER_S = 1000000000 };

static _Thread_local char error_text[ERROR_TEXT_BYTES];

const char *sk_status_name(sk_status status) {
#define STATUS_CASE(name, value)                                                                   \
    case name:                                                                                     \
        return #name;
    switch (status) {
        SK_STATUS_LIST(STATUS_CASE)
    default:
        return "unknown sk_status";
    }
#undef STATUS_CASE
}

const char *sk_error_text(void) { return error_text; }

sk_status sk__fail(sk_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return status;
}

void sk__assert_failed(const char *condition, const char *file, int line) {
    (void)fprintf(stderr, "swapkit: %s:%d: assertion failed: %s\n", file, line, condition);
    abort();
}

uint64_t sk__now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}
