/* timed.c - the virtual GPU: a device on which work does nothing but take time.
 *
 * No thread works and no byte of device memory is touched. What is queued is given the time at
 * which it will be done, from the stream's time, the engine's, and how long it takes on the machine
 * (rates.c); an event is given the time of its stream. The host runs as it is, waits until such a
 * time has come (clock.c), and is kept busy for as long as the calls of a real driver take. So a
 * step takes as long as it would with that device under this host.
 *
 *   engines  copies in, copies out, kernels: each does one thing after the other, in the order of
 *            the calls
 *   link     a copy that begins while the other direction is busy is slower until that ends
 *
 * Only what the host does for a stream (cuLaunchHostFunc) is still done by the stream's thread, at
 * its time; what comes behind it in the stream does not wait for it to end.
 */
#include <stdlib.h>

#include "settings.h"
#include "sim.h"

#define FLOPS_PER_NS_OF_TFLOPS 1e3
#define MIB 1048576.0

static atomic_bool timed;
static cusim_times times;
static atomic_uint_fast64_t calls, host_call_ns; /* also counted outside of the lock */
static uint64_t waited_from_ns, waited_until_ns; /* the host's last wait, for the gap it made */

bool sim_is_timed(void) { return atomic_load_explicit(&timed, memory_order_relaxed); }

bool cusim_timed(void) { return sim_is_timed(); }

void sim_timed_set(bool wanted) { atomic_store(&timed, wanted); }

void sim_timed_reset(void) {
    sim_rates_load();
    sim_spans_drop();
    times = (cusim_times){0};
    atomic_store(&calls, 0);
    atomic_store(&host_call_ns, 0);
    waited_from_ns = waited_until_ns = 0;
    sim_timed_set(sim_setting_number(SIM_SET_TIMED, 0) != 0);
}

/* The clock is asked before the driver is initialised. */
__attribute__((constructor)) static void begin(void) { sim_timed_reset(); }

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

void cusim_times_read(cusim_times *out) {
    (void)pthread_mutex_lock(&sim.lock);
    times.now_ns = sim_now_ns();
    *out = times;
    out->calls = atomic_load(&calls);
    out->host_call_ns = atomic_load(&host_call_ns);
    (void)pthread_mutex_unlock(&sim.lock);
}

/* ---- the host -------------------------------------------------------------------------------- */

static void keep_busy(double duration_ns) {
    atomic_fetch_add(&calls, 1);
    atomic_fetch_add(&host_call_ns, (uint64_t)duration_ns);
    sim_clock_spend(duration_ns);
}

void sim_timed_cost(cusim_cost cost) {
    static const sim_rate rates[] = {
        [CUSIM_COST_LAUNCH] = SIM_RATE_COST_LAUNCH, [CUSIM_COST_COPY] = SIM_RATE_COST_COPY,
        [CUSIM_COST_RECORD] = SIM_RATE_COST_RECORD, [CUSIM_COST_WAIT] = SIM_RATE_COST_WAIT,
        [CUSIM_COST_QUERY] = SIM_RATE_COST_QUERY,   [CUSIM_COST_BLAS] = SIM_RATE_COST_BLAS,
    };
    if (sim_is_timed()) {
        keep_busy(sim_rate_value(rates[cost]));
    }
}

void cusim_spend(cusim_cost cost) { sim_timed_cost(cost); }

void sim_timed_map(size_t bytes) {
    if (sim_is_timed()) {
        times.maps++;
        keep_busy(sim_rate_value(SIM_RATE_COST_MAP) +
                  sim_rate_value(SIM_RATE_COST_MAP_MIB) * (double)bytes / MIB);
    }
}

void sim_timed_unmap(size_t bytes) {
    if (sim_is_timed()) {
        times.unmaps++;
        keep_busy(sim_rate_value(SIM_RATE_COST_UNMAP) +
                  sim_rate_value(SIM_RATE_COST_UNMAP_MIB) * (double)bytes / MIB);
    }
}

void sim_timed_stage(size_t bytes) {
    if (sim_is_timed()) {
        keep_busy((double)bytes / sim_rate_value(SIM_RATE_LINK_PAGEABLE));
    }
}

bool sim_timed_done(uint64_t time_ns) { return sim_is_timed() && sim_now_ns() >= time_ns; }

void sim_timed_wait(uint64_t time_ns) {
    uint64_t begin = sim_is_timed() ? sim_now_ns() : time_ns;
    if (begin >= time_ns) {
        return;
    }
    (void)pthread_mutex_unlock(&sim.lock);
    sim_clock_wait(time_ns);
    (void)pthread_mutex_lock(&sim.lock);
    uint64_t end = sim_now_ns();
    times.host_wait_ns += end - begin;
    times.host_waits++;
    waited_from_ns = begin;
    waited_until_ns = end;
    sim_span_add(&(cusim_span){.issued_ns = begin,
                               .start_ns = begin,
                               .end_ns = end,
                               .name = "wait",
                               .engine = CUSIM_ENGINE_HOST});
}

/* ---- the device ------------------------------------------------------------------------------ */

void sim_timed_after(sim_stream *stream, uint64_t time_ns) {
    stream->ready_ns = later(stream->ready_ns, time_ns);
}

/* When the stream can begin, by the rules of the default stream. */
static uint64_t ready_of(const sim_stream *stream) {
    uint64_t ready = stream->ready_ns;
    if (!stream->blocking) {
        return ready;
    }
    for (const sim_stream *other = stream->context->streams; other != NULL; other = other->next) {
        bool before = stream->legacy ? other->blocking : other->legacy;
        ready = before ? later(ready, other->ready_ns) : ready;
    }
    return ready;
}

/* Say whose fault it is that no kernel runs from `from` to `until`: work that was issued at
 * `issued` waited for its stream, or there was none. */
static void gap_count(uint64_t from, uint64_t until, uint64_t issued, uint64_t ready) {
    uint64_t gap = until - from;
    uint64_t streamed = ready > issued ? until - later(issued, from) : 0;
    uint64_t waited = later(waited_until_ns, from) - later(waited_from_ns, from);
    uint64_t synced = waited < gap - streamed ? waited : gap - streamed;
    times.gap_stream_ns += streamed;
    times.gap_sync_ns += synced;
    times.gap_host_ns += gap - streamed - synced;
}

static void compute(sim_stream *stream, double duration_ns, uint64_t bytes, const char *name) {
    uint64_t *free_ns = &sim.devices[stream->context->device].compute_free_ns;
    uint64_t now = sim_now_ns();
    uint64_t issued = now + (uint64_t)sim_rate_value(SIM_RATE_GAP);
    uint64_t ready = ready_of(stream);
    uint64_t start = later(later(ready, issued), *free_ns);
    if (*free_ns > 0 && start > *free_ns) {
        gap_count(*free_ns, start, issued, ready);
    }
    uint64_t end = start + (uint64_t)duration_ns;
    *free_ns = end;
    stream->ready_ns = end;
    times.kernels++;
    times.compute_busy_ns += end - start;
    sim_span_add(&(cusim_span){.issued_ns = now,
                               .start_ns = start,
                               .end_ns = end,
                               .bytes = bytes,
                               .stream = stream->handle,
                               .name = name,
                               .engine = CUSIM_ENGINE_COMPUTE});
}

/* When so many bytes have crossed the link that begin at `begin`, if the other direction is busy
 * until `other`. */
static double link_end(double begin, double other, double bytes, double rate) {
    double second = sim_rate_value(SIM_RATE_LINK_SECOND);
    if (other <= begin || second >= rate) {
        return begin + bytes / rate;
    }
    double shared = (other - begin) * second;
    return shared >= bytes ? begin + bytes / second : other + (bytes - shared) / rate;
}

static double link_rate(const sim_task *task) {
    if (task->as.copy.pageable) {
        return sim_rate_value(SIM_RATE_LINK_PAGEABLE);
    }
    return sim_rate_value(task->as.copy.direction == SIM_H2D ? SIM_RATE_LINK_IN
                                                             : SIM_RATE_LINK_OUT);
}

static void copy(sim_stream *stream, const sim_task *task) {
    sim_direction direction = task->as.copy.direction;
    size_t bytes = task->as.copy.size;
    times.copies[direction]++;
    times.copy_bytes[direction] += bytes;
    if (direction == SIM_D2D) { /* which reads and writes */
        double moving = 2 * (double)bytes / sim_rate_value(SIM_RATE_GB_PER_S);
        compute(stream, sim_rate_value(SIM_RATE_KERNEL) + moving, 2 * bytes, "copy within");
        times.copy_busy_ns[direction] += (uint64_t)moving;
        return;
    }
    uint64_t *free_ns = sim.devices[stream->context->device].link_free_ns;
    uint64_t now = sim_now_ns();
    uint64_t start = later(later(now, ready_of(stream)), free_ns[direction]);
    double begin = (double)start + sim_rate_value(SIM_RATE_LINK_LATENCY);
    double other = (double)free_ns[direction == SIM_H2D ? SIM_D2H : SIM_H2D];
    uint64_t end = (uint64_t)link_end(begin, other, (double)bytes, link_rate(task));
    free_ns[direction] = end;
    stream->ready_ns = end;
    times.copy_busy_ns[direction] += end - start;
    sim_span_add(&(cusim_span){.issued_ns = now,
                               .start_ns = start,
                               .end_ns = end,
                               .bytes = bytes,
                               .stream = stream->handle,
                               .name = "copy",
                               .engine = (cusim_engine)direction});
}

static void fill(sim_stream *stream, size_t bytes) {
    double moving = (double)bytes / sim_rate_value(SIM_RATE_GB_PER_S);
    compute(stream, sim_rate_value(SIM_RATE_KERNEL) + moving, bytes, "fill");
}

bool sim_timed_queue(sim_stream *stream, sim_task *task) {
    switch (task->kind) {
    case SIM_TASK_CALL:
        task->due_ns = ready_of(stream);
        return false;
    case SIM_TASK_COPY:
        copy(stream, task);
        break;
    case SIM_TASK_FILL:
        fill(stream, task->as.fill.size);
        break;
    case SIM_TASK_SLEEP:
        compute(stream, (double)task->as.sleep_ns, 0, "sleep");
        break;
    case SIM_TASK_RECORD:
        task->as.recording->time_ns = later(ready_of(stream), sim_now_ns());
        break;
    case SIM_TASK_KERNEL: /* what it does is in its arguments, which nobody can read */
    case SIM_TASK_WAIT:   /* sim_timed_after() */
        break;
    }
    sim_task_free(task);
    return true;
}

static double duration_of(const cusim_work *work) {
    static const sim_rate rates[] = {
        [CUSIM_MATMUL16] = SIM_RATE_TFLOPS16,
        [CUSIM_MATMUL32] = SIM_RATE_TFLOPS32,
        [CUSIM_ATTENTION] = SIM_RATE_ATTENTION,
        [CUSIM_ATTENTION_BACKWARD] = SIM_RATE_ATTENTION_BACKWARD,
    };
    double computing = 0;
    if (work->kind != CUSIM_MEMORY) {
        computing = work->flops / (sim_rate_value(rates[work->kind]) * FLOPS_PER_NS_OF_TFLOPS);
    }
    double moving = (double)work->bytes / sim_rate_value(SIM_RATE_GB_PER_S);
    double bound = computing > moving ? computing : moving;
    unsigned launches = work->launches == 0 ? 1 : work->launches;
    double least = launches * sim_rate_value(SIM_RATE_KERNEL_LEAST);
    double duration = bound + launches * sim_rate_value(SIM_RATE_KERNEL);
    return duration > least ? duration : least;
}

CUresult cusim_launch(CUstream handle, const cusim_work *work) {
    sim_clock_launched();
    (void)pthread_mutex_lock(&sim.lock);
    sim_context *context = sim_context_current();
    if (context == NULL || context->retained == 0) {
        return sim_leave(NULL, CUDA_ERROR_INVALID_CONTEXT);
    }
    sim_stream *stream = NULL;
    CUresult result = sim_stream_get(context, handle, &stream);
    if (result == CUDA_SUCCESS) {
        compute(stream, duration_of(work), work->bytes, work->name);
    }
    return sim_leave(NULL, result);
}
