/* book.c - see book.h. */
#include "book.h"

#include <string.h>

void sim_book_count(sim_book *book, unsigned function) {
    atomic_fetch_add_explicit(&book->calls[function], 1, memory_order_relaxed);
}

static int failure_due(sim_book *book, sim_book_failure *failure) {
    if (failure->result == 0 || failure->countdown == 0) {
        return failure->result;
    }
    failure->countdown--;
    if (failure->countdown > 0) {
        return 0;
    }
    int result = failure->result;
    *failure = (sim_book_failure){0};
    atomic_fetch_sub(&book->failures_set, 1);
    return result;
}

int sim_book_failure_due(sim_book *book, unsigned function) {
    if (atomic_load(&book->failures_set) == 0) {
        return 0;
    }
    (void)pthread_mutex_lock(&book->lock);
    int any = failure_due(book, &book->failures[book->count]);
    int own = failure_due(book, &book->failures[function]);
    (void)pthread_mutex_unlock(&book->lock);
    return own != 0 ? own : any;
}

/* Names are equal, or differ by the version only: cuMemAlloc means cuMemAlloc_v2. */
static bool name_matches(const char *full, const char *asked) {
    size_t length = strlen(asked);
    return strncmp(full, asked, length) == 0 &&
           (full[length] == '\0' || strncmp(full + length, "_v", 2) == 0);
}

/* `count` for "*"; more than that: there is no such function. */
static unsigned index_of(const sim_book *book, const char *name) {
    if (strcmp(name, "*") == 0) {
        return book->count;
    }
    unsigned index = 0;
    while (index < book->count && !name_matches(book->names[index], name)) {
        index++;
    }
    return index < book->count ? index : book->count + 1;
}

bool sim_book_fail(sim_book *book, const char *name, unsigned nth, int result) {
    unsigned index = index_of(book, name);
    if (index > book->count) {
        return false;
    }
    (void)pthread_mutex_lock(&book->lock);
    bool was = book->failures[index].result != 0;
    bool is = result != 0;
    book->failures[index] = (sim_book_failure){.result = result, .countdown = nth};
    atomic_fetch_add(&book->failures_set, (unsigned)is - (unsigned)was);
    (void)pthread_mutex_unlock(&book->lock);
    return true;
}

uint64_t sim_book_calls(sim_book *book, const char *name) {
    unsigned index = index_of(book, name);
    uint64_t calls = 0;
    for (unsigned i = 0; i < book->count; i++) {
        if (i == index || index == book->count) {
            calls += atomic_load(&book->calls[i]);
        }
    }
    return calls;
}

void sim_book_reset(sim_book *book) {
    (void)pthread_mutex_lock(&book->lock);
    memset(book->failures, 0, (book->count + 1) * sizeof book->failures[0]);
    atomic_store(&book->failures_set, 0);
    (void)pthread_mutex_unlock(&book->lock);
    for (unsigned i = 0; i < book->count; i++) {
        atomic_store(&book->calls[i], 0);
    }
}
