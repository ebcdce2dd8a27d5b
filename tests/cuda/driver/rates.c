/* rates.c - the machines that the virtual GPU can be.
 *
 * What is achieved on them, not what is on the box. Sources:
 *   R   benchmarks/results/<machine>: `python -m tests.cuda.timed.refit` prints where the table
 *       differs from it; refit after every real run
 *   D   the vendor's data sheet, times the share of it that kernels bound by it achieve
 *   A   assumed: no measurement of ours yet
 *   P   swapkit/planning/hardware.py, with its sources: one set of figures (test_rates.py)
 * Nobody has measured the H200 for us: its chip is the H100's, its memory is faster. Nor the RTX
 * 4090: its column is P; its link and memory agree with what others measured (NVIDIA/nvbandwidth
 * issue 15: 26.3 GB/s in, 26.8 out; krrishnarraj/clpeak issue 106: 921 GB/s), its products are
 * slower (float16, mli/transformers-benchmarks issue 4: 159 TFLOP/s). Every rate can be set by the
 * environment (CUSIM_<name>) and while a program runs (cusim_parameter).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "settings.h"
#include "sim.h"

enum { H100, H200, RTX4090, MACHINES };
static const char *const machine_names[MACHINES] = {"H100", "H200", "RTX4090"};

typedef struct rate_row {
    const char *name;
    double values[MACHINES];
} rate_row;

static const rate_row rows[SIM_RATES] = {
    /* TFLOP/s. Large bf16 products reach 730 (R: link_products_alone_ms); 690 makes the plain step
     * of 1b_4k, most of whose products are smaller, take the 70 ms that it took (R): the only
     * figure that was fitted. H200: as much less than the 790 seen there. P */
    [SIM_RATE_TFLOPS16] = {"TFLOPS16", {690, 745, 115}},
    [SIM_RATE_TFLOPS32] = {"TFLOPS32", {45, 45, 55}}, /* D: 67, 82.6 */
    /* FlashAttention 2 on Hopper, TFLOP/s. A: its authors' figures for a head of 128; P */
    [SIM_RATE_ATTENTION] = {"ATTENTION", {400, 400, 100}},
    [SIM_RATE_ATTENTION_BACKWARD] = {"ATTENTION_BACKWARD", {300, 300, 100}},
    [SIM_RATE_GB_PER_S] = {"GB_PER_S", {2850, 4080, 900}}, /* D: 85 % of 3350 and 4800; P */
    /* Pinned copies, GB/s. R: link_back, link_out, link_both of 64 and 256 MiB; P */
    [SIM_RATE_LINK_IN] = {"LINK_IN", {54, 54, 26}},
    [SIM_RATE_LINK_OUT] = {"LINK_OUT", {54.5, 54.5, 26}},
    [SIM_RATE_LINK_SECOND] = {"LINK_SECOND",
                              {32.5, 32.5, 15.6}},           /* while the other direction is busy */
    [SIM_RATE_LINK_PAGEABLE] = {"LINK_PAGEABLE", {9, 9, 9}}, /* A */
    [SIM_RATE_LINK_LATENCY] = {"LINK_LATENCY_NS",
                               {2460, 2460, 2460}},        /* R: link_out_1MiB, link_back_1MiB */
    [SIM_RATE_KERNEL] = {"KERNEL_NS", {1500, 1500, 1500}}, /* A: begin and end of each */
    [SIM_RATE_KERNEL_LEAST] = {"KERNEL_LEAST_NS", {2500, 2500, 2500}}, /* A */
    [SIM_RATE_GAP] = {"LAUNCH_LATENCY_NS", {4000, 4000, 4000}}, /* A: from call to first work */
    /* What calls cost the host. A, but for memory. */
    [SIM_RATE_COST_LAUNCH] = {"COST_LAUNCH_NS", {2000, 2000, 2000}},
    [SIM_RATE_COST_COPY] = {"COST_COPY_NS", {2500, 2500, 2500}},
    [SIM_RATE_COST_RECORD] = {"COST_RECORD_NS", {700, 700, 700}},
    [SIM_RATE_COST_WAIT] = {"COST_WAIT_NS", {500, 500, 500}},
    [SIM_RATE_COST_QUERY] = {"COST_QUERY_NS", {300, 300, 300}},
    [SIM_RATE_COST_BLAS] = {"COST_BLAS_NS", {2000, 2000, 2000}},
    /* A piece of memory, and each MiB of it. R: pool_map_* and pool_alloc_*: create, map and set
     * access together, as they were measured; likewise unmap and release. */
    [SIM_RATE_COST_MAP] = {"COST_MAP_NS", {46200, 46200, 46200}},
    [SIM_RATE_COST_MAP_MIB] = {"COST_MAP_MIB_NS", {75, 75, 75}},
    [SIM_RATE_COST_UNMAP] = {"COST_UNMAP_NS", {34400, 34400, 34400}},
    [SIM_RATE_COST_UNMAP_MIB] = {"COST_UNMAP_MIB_NS", {620, 620, 620}},
    /* torch.empty of 512 bytes and its release on this machine's host. R: pool_empty_512B */
    [SIM_RATE_HOST_EMPTY] = {"HOST_EMPTY_NS", {4115, 4115, 4115}},
    [SIM_RATE_CAPACITY] = {"CAPACITY_MIB",
                           {81559, 143771, 24217}}, /* R: machine_memory; D; as torch gives it */
    [SIM_RATE_CAPABILITY] = {"CAPABILITY", {90, 90, 89}}, /* what programs take it for; D */
};

static int machine; /* a column */
static double values[SIM_RATES];

static int machine_of(const char *name) {
    for (int i = 0; i < MACHINES; i++) {
        if (strcmp(machine_names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

static int rate_of(const char *name) {
    for (int i = 0; i < SIM_RATES; i++) {
        if (strcmp(rows[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

void sim_rates_load(void) {
    const char *name = sim_setting_text(SIM_SET_MACHINE);
    int column = machine_of(name);
    if (column < 0) {
        (void)fprintf(stderr, "cusim: CUSIM_MACHINE=%s is none of those in rates.c\n", name);
        abort(); /* figures of another machine would be taken for its own */
    }
    machine = column;
    for (int i = 0; i < SIM_RATES; i++) {
        double value = sim_setting_rate(rows[i].name, rows[i].values[machine]);
        __atomic_store(&values[i], &value, __ATOMIC_RELAXED);
    }
}

double sim_rate_value(sim_rate rate) {
    double value = 0;
    __atomic_load(&values[rate], &value, __ATOMIC_RELAXED);
    return value;
}

/* FNV-1a of the rates that are not the table's; 0: all are. */
static uint32_t changes(void) {
    uint32_t hash = 0;
    for (int i = 0; i < SIM_RATES; i++) {
        double value = sim_rate_value((sim_rate)i);
        unsigned char bytes[sizeof value + 1] = {(unsigned char)i};
        memcpy(bytes + 1, &value, sizeof value);
        for (size_t b = 0; value != rows[i].values[machine] && b < sizeof bytes; b++) {
            hash = ((hash == 0 ? 2166136261U : hash) ^ bytes[b]) * 16777619U;
        }
    }
    return hash;
}

void sim_rates_name(char *out, size_t room) {
    const char *slowness = sim_setting_text(SIM_SET_HOST_SLOWNESS);
    uint32_t hash = changes();
    char changed[32] = "";
    if (hash != 0) {
        (void)snprintf(changed, sizeof changed, ", changed to %08x", hash);
    }
    (void)snprintf(out, room, "Virtual %s, host %s%s", machine_names[machine], slowness, changed);
}

double cusim_parameter(const char *name, double value, int set) {
    int rate = rate_of(name);
    if (rate < 0) {
        return -1;
    }
    if (set != 0) {
        __atomic_store(&values[rate], &value, __ATOMIC_RELAXED);
    }
    return sim_rate_value((sim_rate)rate);
}

double cusim_rate_of(const char *of, const char *name) {
    int column = machine_of(of);
    int rate = rate_of(name);
    return column < 0 || rate < 0 ? -1 : rows[rate].values[column];
}
