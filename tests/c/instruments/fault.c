/* fault.c - a backend whose nth fallible call fails, once or from then on. */
#include <stdlib.h>

#include "base/thread.h"
#include "instruments/instruments.h"
#include "instruments/interpose.h"

static const char fault_name[] = "fault";

typedef struct fault {
    sk__interposer base;
    uint64_t calls SK_GUARDED_BY(base.lock); /* fallible ones since armed */
    uint64_t nth SK_GUARDED_BY(base.lock);   /* 0: disarmed */
    bool forever SK_GUARDED_BY(base.lock);
    sk_status status SK_GUARDED_BY(base.lock);
} fault;

static sk_status fault_before(sk__interposer *self, const sk__call *call) {
    fault *state = (fault *)self;
    if (!call->fallible) {
        return SK_OK;
    }
    sk__lock(&state->base.lock);
    state->calls++;
    uint64_t n = state->calls;
    bool failing = state->nth != 0 && (n == state->nth || (state->forever && n > state->nth));
    sk_status status = failing ? state->status : SK_OK;
    sk__unlock(&state->base.lock);
    if (!failing) {
        return SK_OK;
    }
    return sk__fail(status, "fault: call %llu, %s, was made to fail", (unsigned long long)n,
                    call->name);
}

static void fault_destroy(sk__interposer *self) { free(self); }

sk_status sk_backend_fault(sk_backend *inner, sk_backend **out) {
    if (inner == NULL) {
        return sk__fail(SK_INVALID, "fault: no backend to wrap");
    }
    fault *state = calloc(1, sizeof *state);
    if (state == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "fault: no host memory for its state");
    }
    state->base =
        (sk__interposer){.inner = inner, .before = fault_before, .destroy = fault_destroy};
    sk_status status = sk__interpose(&state->base, fault_name, out);
    if (status != SK_OK) {
        fault_destroy(&state->base);
    }
    return status;
}

void sk_fault_arm(sk_backend *backend, uint64_t nth, bool forever, sk_status status) {
    fault *state = (fault *)sk__interposer_of(backend, fault_name);
    if (state == NULL) {
        return;
    }
    sk__lock(&state->base.lock);
    state->calls = 0;
    state->nth = nth;
    state->forever = forever;
    state->status = status;
    sk__unlock(&state->base.lock);
}

uint64_t sk_fault_calls(sk_backend *backend) {
    fault *state = (fault *)sk__interposer_of(backend, fault_name);
    if (state == NULL) {
        return 0;
    }
    sk__lock(&state->base.lock);
    uint64_t calls = state->calls;
    sk__unlock(&state->base.lock);
    return calls;
}
