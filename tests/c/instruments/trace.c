/* trace.c - a backend that remembers the last calls made to it. */
#include <stdlib.h>

#include "base/thread.h"
#include "instruments/instruments.h"
#include "instruments/interpose.h"

static const char trace_name[] = "trace";

typedef struct trace {
    sk__interposer base;
    size_t capacity;
    uint64_t added SK_GUARDED_BY(base.lock);
    sk_trace_call calls[]; /* call i in slot i mod capacity */
} trace;

static void trace_after(sk__interposer *self, const sk__call *call, sk_status status) {
    trace *state = (trace *)self;
    sk__lock(&state->base.lock);
    state->calls[state->added % state->capacity] =
        (sk_trace_call){.name = call->name, .nbytes = call->nbytes, .status = status};
    state->added++;
    sk__unlock(&state->base.lock);
}

static void trace_destroy(sk__interposer *self) { free(self); }

sk_status sk_backend_trace(sk_backend *inner, size_t capacity, sk_backend **out) {
    if (inner == NULL) {
        return sk__fail(SK_INVALID, "trace: no backend to wrap");
    }
    if (capacity == 0 || capacity > SK_MAX_BYTES / sizeof(sk_trace_call)) {
        return sk__fail(SK_INVALID, "trace: a capacity of %zu calls is not possible", capacity);
    }
    trace *state = calloc(1, sizeof *state + capacity * sizeof state->calls[0]);
    if (state == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "trace: no host memory for %zu calls", capacity);
    }
    state->base = (sk__interposer){.inner = inner, .after = trace_after, .destroy = trace_destroy};
    state->capacity = capacity;
    sk_status status = sk__interpose(&state->base, trace_name, out);
    if (status != SK_OK) {
        trace_destroy(&state->base);
    }
    return status;
}

size_t sk_trace_read(sk_backend *backend, sk_trace_call *out, size_t capacity) {
    trace *state = (trace *)sk__interposer_of(backend, trace_name);
    if (state == NULL) {
        return 0;
    }
    sk__lock(&state->base.lock);
    uint64_t kept = sk__min((size_t)state->added, state->capacity);
    size_t count = sk__min((size_t)kept, capacity);
    for (size_t i = 0; i < count; i++) {
        out[i] = state->calls[(state->added - kept + i) % state->capacity];
    }
    sk__unlock(&state->base.lock);
    return count;
}
