/* virtual.h - the inside of the virtual GPU: its time, its rates, and the host's clock.
 *
 * Included by sim.h. Where nothing else is said, to be called inside.
 */
#ifndef CUSIM_VIRTUAL_H
#define CUSIM_VIRTUAL_H

/* timed.c: work that only takes time. */
bool sim_is_timed(void); /* anywhere */
void sim_timed_set(bool timed);
void sim_timed_reset(void);
/* Takes time for the task and frees it; false: a worker has to do it. */
bool sim_timed_queue(sim_stream *stream, sim_task *task);
/* Whether the virtual GPU has come to this time; false without one. */
bool sim_timed_done(uint64_t time_ns);
/* Wait for it; leaves the lock meanwhile. Nothing without the virtual GPU. */
void sim_timed_wait(uint64_t time_ns);
void sim_timed_after(sim_stream *stream, uint64_t time_ns);
/* Keep the host busy for what a call costs. Nothing without the virtual GPU. */
void sim_timed_cost(cusim_cost cost);
void sim_timed_map(size_t bytes); /* one piece of memory */
void sim_timed_unmap(size_t bytes);
void sim_timed_stage(size_t bytes); /* pageable memory is copied for the device to read */

/* spans.c: what ran when. */
void sim_span_add(const cusim_span *span);
void sim_spans_drop(void);

/* rates.c: how fast the virtual GPU is. Anywhere. */
typedef enum sim_rate {
    SIM_RATE_TFLOPS16,
    SIM_RATE_TFLOPS32,
    SIM_RATE_ATTENTION,
    SIM_RATE_ATTENTION_BACKWARD,
    SIM_RATE_GB_PER_S,
    SIM_RATE_LINK_IN,
    SIM_RATE_LINK_OUT,
    SIM_RATE_LINK_SECOND,
    SIM_RATE_LINK_PAGEABLE,
    SIM_RATE_LINK_LATENCY,
    SIM_RATE_KERNEL,
    SIM_RATE_KERNEL_LEAST,
    SIM_RATE_GAP,
    SIM_RATE_COST_LAUNCH,
    SIM_RATE_COST_COPY,
    SIM_RATE_COST_RECORD,
    SIM_RATE_COST_WAIT,
    SIM_RATE_COST_QUERY,
    SIM_RATE_COST_BLAS,
    SIM_RATE_COST_MAP,
    SIM_RATE_COST_MAP_MIB,
    SIM_RATE_COST_UNMAP,
    SIM_RATE_COST_UNMAP_MIB,
    SIM_RATE_HOST_EMPTY,
    SIM_RATE_CAPACITY,
    SIM_RATE_CAPABILITY, /* compute capability, times ten */
    SIM_RATES,
} sim_rate;
void sim_rates_load(void); /* from the environment */
double sim_rate_value(sim_rate rate);
/* What the device is called: it is another one whenever a rate or its host is, since programs
 * remember what they measured of a device by its name. */
void sim_rates_name(char *out, size_t room);

/* clock.c. Anywhere. */
uint64_t sim_now_ns(void);
void sim_clock_spend(double duration_ns); /* virtual GPU: the host was busy for so long */
void sim_clock_wait(uint64_t until_ns);   /* virtual GPU: skip to it; not inside */
void sim_clock_launched(void);            /* by this thread, which is then never beside others */

/* speed.c: within the clock. */
void sim_speed_begin(void);
double sim_speed_sample_ns(void); /* what a bit of work takes now */
double sim_speed_quiet_ns(void);  /* what it takes at a quiet moment */
void sim_speed_end(void);

#endif
