/* cusim.h - what tests can ask of the simulated driver beside the driver's own functions.
 *
 * Link against libcuda.so.1 of this folder, or look the names up in it with dlsym(). Every function
 * may be called from any thread, except where it says otherwise; none needs a current context
 * unless it takes a stream, and none counts as a driver call. None may be called in a forked child.
 *
 *   refusal    a call that was answered with an error because its arguments were wrong
 *   problem    a fault of the program under test that a real GPU would meet later, for example work
 *              that uses memory which is gone; it makes the context's error sticky
 *   pattern    fresh memory is filled with CUSIM_FRESH, freed memory with CUSIM_FREED
 */
#ifndef CUSIM_H
#define CUSIM_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "timed.h"

#define CUSIM_FRESH 0xCB
#define CUSIM_FREED 0xDD
#define CUSIM_MAX_DEVICES 8

/* How the simulated machine is made. cusim_options_init() gives the defaults, changed by the
 * environment variables that stand behind the members (settings.h has all of them). */
typedef struct cusim_options {
    int devices;              /* CUSIM_DEVICES, 1; 0 means a machine without a GPU */
    size_t capacity;          /* CUSIM_CAPACITY, 1 GiB of memory per device; suffixes K, M, G.
                               * The virtual GPU has as much as the machine of that name */
    size_t granularity;       /* CUSIM_GRANULARITY, 2 MiB; of virtual memory management */
    uint64_t h2d_bytes_per_s; /* CUSIM_BYTES_PER_S sets these three; 0 means no limit. Copies of */
    uint64_t d2h_bytes_per_s; /* one direction share the device's link, as they share a copy */
    uint64_t d2d_bytes_per_s; /* engine. */
    uint64_t latency_ns;      /* CUSIM_LATENCY_NS, 0; time of a copy without its bytes */
    uint64_t delay_ns;        /* CUSIM_DELAY_NS, 0; every copy starts this much later */
    int wipe;                 /* CUSIM_WIPE, 1; 0, as on the virtual GPU, touches no memory */
    int vmm;                  /* CUSIM_VMM, 1; 0 makes a device without virtual memory management */
    int peers;                /* CUSIM_PEERS, 1; 0 means that no device can access another */
    int reuse;                /* CUSIM_REUSE, 0; 1 gives freed addresses out again at once */
    int log;                  /* CUSIM_LOG, 0; 1 prints refusals and problems, 2 calls as well */
    int timed;                /* CUSIM_TIMED, 0; 1: the virtual GPU, see timed.h */
} cusim_options;

/* What is still open, to be zero at the end of a test. Bytes are those the caller asked for. */
typedef struct cusim_open {
    size_t contexts; /* retained primary contexts, each counted as often as it is retained */
    size_t streams, events;
    size_t allocations, allocation_bytes;   /* cuMemAlloc */
    size_t handles, handle_bytes;           /* cuMemCreate; until released and unmapped */
    size_t reservations, reservation_bytes; /* cuMemAddressReserve */
    size_t mappings, mapping_bytes;         /* cuMemMap */
    size_t host_allocations, host_allocation_bytes;
    size_t registrations, registration_bytes;
    size_t tasks;      /* queued or running in any stream; not part of what must be closed */
    size_t problems;   /* since cuInit or cusim_reset() */
    size_t exit_calls; /* driver calls made while the process was exiting */
} cusim_open;

/* A range that a kernel uses. Device memory, or pinned host memory. */
typedef struct cusim_use {
    CUdeviceptr address;
    size_t size;
    bool write;
} cusim_use;

/* Stands for a kernel: `bytes[i]` is where the bytes of use i really lie. */
typedef void cusim_kernel(void *const *bytes, void *arg);

SIM_API void cusim_options_init(cusim_options *options);
/* Before cuInit() everything can be set; after it all but devices, capacity,
 * granularity and timed.
 * NULL: as cusim_options_init(). False: not possible, and nothing was changed. */
SIM_API bool cusim_configure(const cusim_options *options);
/* Back to the state before cuInit(), with counters at zero, failures and holds taken back. False
 * when something is still open. Waits for destroyed streams that still work. */
SIM_API bool cusim_reset(void);

/* Copies and fills that have not begun wait until hold(false). */
SIM_API void cusim_hold(bool hold);
/* Let a stream sleep for this long, as if a kernel were busy. */
SIM_API CUresult cusim_delay_stream(CUstream stream, uint64_t nanoseconds);
/* Run `kernel` in the stream with all the checks that copies get. The stream must belong to the
 * current context. `arg` must live until it ran. */
SIM_API CUresult cusim_run(CUstream stream, cusim_kernel *kernel, void *arg, const cusim_use *uses,
                           size_t count);
/* Free what cuMemAlloc() gave, without waiting for any work; work that still uses it is a problem.
 */
SIM_API CUresult cusim_free(CUdeviceptr address);
/* As cuEventDestroy(), whether the thread has a context or not. */
SIM_API CUresult cusim_destroy_event(CUevent event);
/* When the event's latest recording was reached. NOT_FOUND: it was never recorded. */
SIM_API CUresult cusim_event_time(CUevent event, uint64_t *time_ns);
/* Let cuStreamIsCapturing() say that the stream captures. Then calls that a capture forbids
 * (synchronising or querying it, or the context) return STREAM_CAPTURE_UNSUPPORTED. */
SIM_API CUresult cusim_capture(CUstream stream, bool active);

/* Let the nth coming call of a function return `result` and do nothing; 1 is the next, 0 every one.
 * "*" means any function. CUDA_SUCCESS takes it back. False: no such function. */
SIM_API bool cusim_fail(const char *function, unsigned nth, CUresult result);
/* Make `result` the sticky error of every active context; CUDA_SUCCESS heals them. */
SIM_API void cusim_break(CUresult result);
/* How often a function was called since the process began or since cusim_reset(); "*": all. */
SIM_API uint64_t cusim_calls(const char *function);

SIM_API void cusim_report(cusim_open *open);
/* Text of the last problem, or of this thread's last refusal; "" if there was none. Borrowed until
 * the next one. */
SIM_API const char *cusim_last_problem(void);
SIM_API const char *cusim_last_refusal(void);

/* The virtual GPU (timed.h). */
SIM_API bool cusim_timed(void);
/* Queue a kernel that does this much. */
SIM_API CUresult cusim_launch(CUstream stream, const cusim_work *work);
/* Keep the host busy for what a call costs. */
SIM_API void cusim_spend(cusim_cost cost);
SIM_API uint64_t cusim_now_ns(void);
/* How much longer the GPU's host takes for what this one computes at a quiet moment; 0: no time at
 * all. Negative: only ask. Returns what held before. */
SIM_API double cusim_host_slowness(double wanted);
/* What speed.c's sample takes here at a quiet moment. */
SIM_API double cusim_host_quiet_ns(void);
/* A rate of the machine (rates.c), which is changed first if `set` is not 0. -1: no such rate. */
SIM_API double cusim_parameter(const char *name, double value, int set);
/* What the table says of a machine; -1: no such machine or rate. */
SIM_API double cusim_rate_of(const char *machine, const char *name);
SIM_API void cusim_times_read(cusim_times *times);
/* Keep the last `capacity` spans; 0 ends it. spans_read() returns how many it wrote. */
SIM_API void cusim_spans_keep(size_t capacity);
SIM_API size_t cusim_spans_read(cusim_span *spans, size_t capacity);

/* Where the bytes at a device address really lie; NULL unless all of them are allocated or mapped.
 * Reading them while a stream writes is the caller's race. */
SIM_API void *cusim_shadow(CUdeviceptr address, size_t size);
/* Whether an address lies in the window that device addresses come from. */
SIM_API bool cusim_is_device(CUdeviceptr address);

#endif
