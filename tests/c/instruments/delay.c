/* delay.c - a backend whose asynchronous copies wait until they are released.
 *
 * Before each copy a host call is queued in the same stream. It blocks while the gate is shut, so
 * the order of all other work stays the same. */
#include <pthread.h>
#include <stdlib.h>

#include "base/thread.h"
#include "instruments/instruments.h"
#include "instruments/interpose.h"

static const char delay_name[] = "delay";

typedef struct delay {
    sk__interposer base;
    pthread_cond_t opened;
    uint64_t permits SK_GUARDED_BY(base.lock); /* copies that may pass; UINT64_MAX: all */
} delay;

static void gate_pass(void *argument) {
    delay *state = argument;
    sk__lock(&state->base.lock);
    while (state->permits == 0) {
        sk__wait(&state->opened, &state->base.lock);
    }
    if (state->permits != UINT64_MAX) {
        state->permits--;
    }
    sk__unlock(&state->base.lock);
}

static void gate_open(delay *state, uint64_t ncopies) {
    sk__lock(&state->base.lock);
    bool saturated = ncopies > UINT64_MAX - state->permits;
    state->permits = saturated ? UINT64_MAX : state->permits + ncopies;
    (void)pthread_cond_broadcast(&state->opened);
    sk__unlock(&state->base.lock);
}

static sk_status delay_before(sk__interposer *self, const sk__call *call) {
    if (!call->fallible &&
        call->stream != NULL) { /* stream_destroy, which waits for the stream's work */
        gate_open((delay *)self, UINT64_MAX);
    }
    if (call->stream == NULL || call->nbytes == 0) {
        return SK_OK; /* only copies have both; on the NULL stream they are not asynchronous */
    }
    sk_backend *inner = self->inner;
    return inner->ops.stream_call(inner->self, call->stream, gate_pass, self);
}

static void delay_destroy(sk__interposer *self) {
    delay *state = (delay *)self;
    (void)pthread_cond_destroy(&state->opened);
    free(state);
}

static SK_NO_ANALYSIS void delay_after_fork(void *self) {
    (void)pthread_cond_init(&((delay *)self)->opened, NULL);
}

sk_status sk_backend_delay(sk_backend *inner, sk_backend **out) {
    if (inner == NULL) {
        return sk__fail(SK_INVALID, "delay: no backend to wrap");
    }
    delay *state = calloc(1, sizeof *state);
    if (state == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "delay: no host memory for its state");
    }
    state->base = (sk__interposer){.inner = inner,
                                   .before = delay_before,
                                   .destroy = delay_destroy,
                                   .child = delay_after_fork};
    (void)pthread_cond_init(&state->opened, NULL);
    sk_status status = sk__interpose(&state->base, delay_name, out);
    if (status != SK_OK) {
        delay_destroy(&state->base);
    }
    return status;
}

void sk_delay_release(sk_backend *backend, uint64_t ncopies) {
    delay *state = (delay *)sk__interposer_of(backend, delay_name);
    if (state != NULL) {
        gate_open(state, ncopies);
    }
}
