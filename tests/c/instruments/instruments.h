/* instruments.h - backends that wrap another one, and faults on demand.
 *
 * They use the core's own headers, are built with it and live in a library of their own, which no
 * user gets. The rules are those of swapkit.h. Each wrapper takes `inner` over (transferred on
 * success) and is itself a backend; the functions that steer it do nothing on any other backend. */
#ifndef SWAPKIT_TESTS_INSTRUMENTS_H
#define SWAPKIT_TESTS_INSTRUMENTS_H

#include "swapkit.h"

/* Fail the `nth` fallible call from now (1: the next) with `status`; with `forever` every later one
 * too. nth 0 disarms. Calls that destroy or free something are neither counted nor failed. */
SK_API SK_NODISCARD sk_status sk_backend_fault(sk_backend *inner, sk_backend **out);
SK_API void sk_fault_arm(sk_backend *fault, uint64_t nth, bool forever, sk_status status);
SK_API uint64_t sk_fault_calls(sk_backend *fault); /* fallible calls since the last arm */

/* Hold every asynchronous copy back until sk_delay_release() releases it. `inner` must support
 * stream_call. Destroying a stream releases all copies, forever. */
SK_API SK_NODISCARD sk_status sk_backend_delay(sk_backend *inner, sk_backend **out);
SK_API void sk_delay_release(sk_backend *delay, uint64_t ncopies); /* UINT64_MAX: all, forever */

/* Remember the last calls. */
typedef struct sk_trace_call {
    const char *name; /* the member of sk_backend_ops; static */
    size_t nbytes;    /* 0 where the call has none */
    sk_status status;
} sk_trace_call;

SK_API SK_NODISCARD sk_status sk_backend_trace(sk_backend *inner, size_t capacity,
                                               sk_backend **out);
/* Copy up to `capacity` of the remembered calls, oldest first; return how many. */
SK_API size_t sk_trace_read(sk_backend *trace, sk_trace_call *out, size_t capacity);

/* The system calls of a scheduler's disk. */
typedef enum sk_disk_call {
    SK_DISK_CALL_OPEN = 1,      /* of the file, either way */
    SK_DISK_CALL_DIRECT = 2,    /* switching direct I/O on */
    SK_DISK_CALL_ALLOCATE = 4,  /* fallocate: space for an extent */
    SK_DISK_CALL_GIVE_BACK = 8, /* fallocate: a hole */
    SK_DISK_CALL_WRITE = 16,
    SK_DISK_CALL_READ = 32,
    SK_DISK_CALL_FLUSH = 64, /* buffered I/O: sync_file_range */
    SK_DISK_CALL_ANY = 127
} sk_disk_call;

/* Make the `nth` (1: the next) of the calls named by `calls` (of sk_disk_call), in the whole
 * process, fail with the errno `error`; with `forever` every later one too. error 0: a write or
 * read is short instead, and moves at most `short_bytes`. nth 0 disarms.
 * Threads: any; a call under way may see either. */
SK_API void sk_disk_fault_arm(uint32_t calls, uint64_t nth, bool forever, int error,
                              size_t short_bytes);
SK_API uint64_t sk_disk_fault_calls(void); /* calls named by the last arm, since then */

#endif
