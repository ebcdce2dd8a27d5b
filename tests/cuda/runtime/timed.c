/* timed.c - kernels on the virtual GPU: see timed.h. */
#include "timed.h"

#include <pthread.h>

#include "runtime.h"

/* Found again at every launch: cheap only in the static part of thread-local storage. */
static _Thread_local struct cusimrt_frame *innermost __attribute__((tls_model("initial-exec")));

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool timed;
static void (*spend)(cusim_cost cost);
static int (*launch)(void *stream, const cusim_work *work);

/* Another driver has none of these: then kernels are refused as ever. */
static void find(void) {
    bool (*is_timed)(void) = (bool (*)(void))(uintptr_t)rt_driver_symbol("cusim_timed");
    spend = (void (*)(cusim_cost))(uintptr_t)rt_driver_symbol("cusim_spend");
    launch = (int (*)(void *, const cusim_work *))(uintptr_t)rt_driver_symbol("cusim_launch");
    timed = is_timed != NULL && spend != NULL && launch != NULL && is_timed();
}

bool cusimrt_timed(void) {
    (void)pthread_once(&once, find);
    return timed;
}

struct cusimrt_frame **cusimrt_frame(void) { return &innermost; }

void cusimrt_flush(void) {
    struct cusimrt_frame *frame = innermost;
    if (frame == NULL || frame->work.launches == 0) {
        return;
    }
    (void)launch(frame->stream, &frame->work);
    frame->work.launches = 0;
    frame->work.bytes = 0; /* the rest of the operator works on the same */
    frame->work.flops = 0;
}

void cusimrt_launched(void *stream) {
    (void)rt_enter();
    spend(CUSIM_COST_LAUNCH);
    struct cusimrt_frame *frame = innermost;
    if (frame == NULL) {
        (void)launch(stream, &(cusim_work){.launches = 1, .name = "kernel"});
        return;
    }
    if (frame->stream != stream) {
        cusimrt_flush();
    }
    frame->stream = stream;
    frame->work.launches++;
}

void cusimrt_worked(void *stream, const cusim_work *work) {
    (void)rt_enter();
    spend(CUSIM_COST_LAUNCH);
    spend(CUSIM_COST_BLAS);
    cusimrt_flush();
    cusim_work named = *work;
    if (innermost != NULL) {
        innermost->work.bytes = 0; /* those were the product's */
        named.name = innermost->work.name;
    }
    (void)launch(stream, &named);
}
