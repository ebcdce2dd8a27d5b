/* base.h - shared by every floor of the core: failures, assertions, the clock.
 *
 * Floor 0 of the C core: base <- backend <- pool <- entry; includes go only towards base. */
#ifndef SWAPKIT_BASE_BASE_H
#define SWAPKIT_BASE_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "swapkit.h"

/* Two levels of assertion: cheap ones in debug builds, walks over whole structures in test builds.
 * Mistakes of a caller are never asserted but returned as a status. */
#ifdef SK_DEBUG
#define sk_assert(condition)                                                                       \
    ((condition) ? (void)0 : sk__assert_failed(#condition, __FILE__, __LINE__))
#else
#define sk_assert(condition) ((void)0)
#endif

_Noreturn void sk__assert_failed(const char *condition, const char *file, int line);

/* SK_API with a name of our own, sk__: no part of the interface, but backends in a library of their
 * own, those of the tests, are built with these headers and need it. */

/* Set this thread's error text and return `status`, so that failing is one statement. */
SK_API sk_status sk__fail(sk_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* For failures that no caller can handle, such as in destroy functions. */
static inline void sk__ignore(sk_status status) { (void)status; }

/* Return the bytes of address space that RLIMIT_AS leaves to the process; SIZE_MAX: no limit. */
size_t sk__address_room(void);

/* CLOCK_MONOTONIC. */
uint64_t sk__now_ns(void);

static inline size_t sk__round_up(size_t nbytes, size_t multiple) {
    return (nbytes + multiple - 1) / multiple * multiple;
}

static inline size_t sk__round_down(size_t nbytes, size_t multiple) {
    return nbytes / multiple * multiple;
}

static inline size_t sk__min(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t sk__max(size_t a, size_t b) { return a > b ? a : b; }

/* Sizes above this are refused everywhere, so that rounding up can never overflow. */
#define SK_MAX_BYTES ((size_t)1 << 46)

#endif
