/* timed.h - the virtual GPU's side of the driver, as the runtime, the kernels and Python know it.
 *
 * The virtual GPU (CUSIM_TIMED=1) computes nothing: what is queued takes the time that it would
 * take on a machine of rates.c, and the host runs as it is. No type of CUDA is named here, so that
 * this can be included beside the real headers.
 */
#ifndef CUSIM_TIMED_H
#define CUSIM_TIMED_H

#include <stdint.h>

/* What bounds a kernel, beside the bytes that it moves. */
typedef enum cusim_kind {
    CUSIM_MEMORY, /* nothing else */
    CUSIM_MATMUL16,
    CUSIM_MATMUL32,
    CUSIM_ATTENTION,
    CUSIM_ATTENTION_BACKWARD,
} cusim_kind;

typedef struct cusim_work {
    cusim_kind kind;
    double flops;
    uint64_t bytes;    /* read and written */
    unsigned launches; /* of kernels that share the work, one after the other */
    const char *name;  /* lives as long as the process */
} cusim_work;

/* Calls that keep the host busy. */
typedef enum cusim_cost {
    CUSIM_COST_LAUNCH,
    CUSIM_COST_COPY,
    CUSIM_COST_RECORD,
    CUSIM_COST_WAIT,
    CUSIM_COST_QUERY,
    CUSIM_COST_BLAS, /* beside the launch */
} cusim_cost;

typedef enum cusim_engine {
    CUSIM_ENGINE_IN, /* copies from the host */
    CUSIM_ENGINE_OUT,
    CUSIM_ENGINE_WITHIN, /* copies from device memory to device memory: done by kernels */
    CUSIM_ENGINE_COMPUTE,
    CUSIM_ENGINE_HOST, /* not of the device: the host waits in a call */
} cusim_engine;

/* Sums since cuInit() or cusim_reset(); differences of two readings say what happened between. A
 * gap is time in which no kernel ran, between two that did. */
typedef struct cusim_times {
    uint64_t now_ns;
    uint64_t kernels, compute_busy_ns;
    uint64_t gap_host_ns;              /* nothing was queued, and the host was not waiting */
    uint64_t gap_sync_ns;              /* nothing was queued, and the host was waiting */
    uint64_t gap_stream_ns;            /* what was queued waited for another stream: for a copy */
    uint64_t host_wait_ns, host_waits; /* the host waited in a call */
    uint64_t host_call_ns;             /* what calls cost the host */
    uint64_t copies[3], copy_bytes[3], copy_busy_ns[3]; /* in, out, within */
    uint64_t calls, maps, unmaps;                       /* calls with a cost; pieces of memory */
} cusim_times;

typedef struct cusim_span {
    uint64_t issued_ns, start_ns, end_ns, bytes, stream;
    const char *name;
    cusim_engine engine;
} cusim_span;

#endif
