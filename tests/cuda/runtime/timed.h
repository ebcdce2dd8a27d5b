/* timed.h - kernels on the virtual GPU: what an operator launches is charged to the stream at once.
 *
 * A frame stands for an operator (kernels/costs.cpp): it says how many bytes the operator moves,
 * and counts its launches. It is charged when the operator ends, or before anything else goes into
 * a stream, so that copies and events find it there.
 */
#ifndef SIMULATED_TIMED_H
#define SIMULATED_TIMED_H

#include "driver/timed.h"

#include <stdbool.h>

struct cusimrt_frame {
    struct cusimrt_frame *above;
    cusim_work work; /* launches: those not charged yet */
    void *stream;
};

/* Whether there is a virtual GPU below. */
bool cusimrt_timed(void);
/* The calling thread's innermost frame. */
struct cusimrt_frame **cusimrt_frame(void);
/* Charge what the innermost frame has launched. */
void cusimrt_flush(void);
/* A kernel of which no more is known than what the frame says. */
void cusimrt_launched(void *stream);
/* A kernel whose work is known: a product of matrices. */
void cusimrt_worked(void *stream, const cusim_work *work);

/* RT_CALL, for what goes into a stream, or asks what is there. */
#define RT_CALL_IN_ORDER(call)                                                                     \
    do {                                                                                           \
        cusimrt_flush();                                                                           \
        RT_CALL(call);                                                                             \
    } while (0)

#endif
