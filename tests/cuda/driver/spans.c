/* spans.c - what the virtual GPU did when: the last ones, in a ring. */
#include <stdlib.h>

#include "sim.h"

static cusim_span *spans;
static size_t capacity, count; /* count: of all, also those that were overwritten */

void sim_span_add(const cusim_span *span) {
    if (capacity > 0) {
        spans[count++ % capacity] = *span;
    }
}

void sim_spans_drop(void) {
    free(spans);
    spans = NULL;
    capacity = 0;
    count = 0;
}

void cusim_spans_keep(size_t wanted) {
    (void)pthread_mutex_lock(&sim.lock);
    sim_spans_drop();
    spans = wanted == 0 ? NULL : calloc(wanted, sizeof *spans);
    capacity = spans == NULL ? 0 : wanted;
    (void)pthread_mutex_unlock(&sim.lock);
}

size_t cusim_spans_read(cusim_span *out, size_t room) {
    (void)pthread_mutex_lock(&sim.lock);
    size_t kept = count < capacity ? count : capacity;
    size_t read = kept < room ? kept : room;
    for (size_t i = 0; i < read; i++) {
        out[i] = spans[(count - kept + i) % capacity];
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return read;
}
