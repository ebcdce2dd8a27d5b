/* book.h - how often each function of a library was called, and which calls are to fail.
 *
 * One for the driver (calls.c), one for each runtime that stands on it. Threads: any; takes no lock
 * but its own.
 */
#ifndef CUSIM_BOOK_H
#define CUSIM_BOOK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* A failure that was asked for. */
typedef struct sim_book_failure {
    int result;         /* 0: none */
    uint64_t countdown; /* calls until it happens; 0: every call */
} sim_book_failure;

typedef struct sim_book {
    const char *const *names;
    unsigned count;
    atomic_uint_fast64_t *calls; /* `count` of them */
    sim_book_failure *failures;  /* one more; the last one is that of "*" */
    pthread_mutex_t lock;
    atomic_uint failures_set;
} sim_book;

/* Define a book over `count_` names. */
#define SIM_BOOK(book_, names_, count_)                                                            \
    static atomic_uint_fast64_t book_##_calls[count_];                                             \
    static sim_book_failure book_##_failures[(count_) + 1];                                        \
    static sim_book book_ = {.names = (names_),                                                    \
                             .count = (count_),                                                    \
                             .calls = book_##_calls,                                               \
                             .failures = book_##_failures,                                         \
                             .lock = PTHREAD_MUTEX_INITIALIZER}

void sim_book_count(sim_book *book, unsigned function);
/* What this call of the function is told to fail with; 0: nothing. */
int sim_book_failure_due(sim_book *book, unsigned function);
/* See cusim_fail() and cusim_calls(): a name may lack its version, "*" is any function. */
bool sim_book_fail(sim_book *book, const char *name, unsigned nth, int result);
uint64_t sim_book_calls(sim_book *book, const char *name);
void sim_book_reset(sim_book *book);

#endif
