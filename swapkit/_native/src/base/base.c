/* base.c - status names, the error text of each thread, assertions, address space, the clock. */
#include "base/base.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { ERROR_TEXT_BYTES = 512, NS_PER_S = 1000000000, LINE_BYTES = 128, DECIMAL = 10 };

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

size_t sk__address_room(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return SIZE_MAX;
    }
    char line[LINE_BYTES];
    size_t mapped = 0;
    FILE *stream = fopen("/proc/self/statm", "re"); /* its first number: mapped pages */
    if (stream != NULL) {
        const char *text = fgets(line, sizeof line, stream);
        (void)fclose(stream);
        mapped = text == NULL ? 0 : strtoull(text, NULL, DECIMAL) * (size_t)sysconf(_SC_PAGESIZE);
    }
    return limit.rlim_cur - sk__min(mapped, limit.rlim_cur);
}

uint64_t sk__now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}
