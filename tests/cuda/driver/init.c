/* init.c - options, cuInit(), the process's end and its forks, and going back to the beginning. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "settings.h"
#include "sim.h"

enum { DRIVER_VERSION = 12080 };

void cusim_options_init(cusim_options *options) {
    bool timed = sim_setting_number(SIM_SET_TIMED, 0) != 0;
    uint64_t capacity = timed ? (uint64_t)sim_rate_value(SIM_RATE_CAPACITY) << 20 : 1ULL << 30;
    uint64_t rate = sim_setting_number(SIM_SET_BYTES_PER_S, 0);
    *options = (cusim_options){
        .devices = (int)sim_setting_number(SIM_SET_DEVICES, 1),
        .capacity = sim_setting_number(SIM_SET_CAPACITY, capacity),
        .granularity = sim_setting_number(SIM_SET_GRANULARITY, 0),
        .h2d_bytes_per_s = rate,
        .d2h_bytes_per_s = rate,
        .d2d_bytes_per_s = rate,
        .latency_ns = sim_setting_number(SIM_SET_LATENCY_NS, 0),
        .delay_ns = sim_setting_number(SIM_SET_DELAY_NS, 0),
        .wipe = (int)sim_setting_number(SIM_SET_WIPE, !timed),
        .vmm = (int)sim_setting_number(SIM_SET_VMM, 1),
        .peers = (int)sim_setting_number(SIM_SET_PEERS, 1),
        .reuse = (int)sim_setting_number(SIM_SET_REUSE, 0),
        .log = (int)sim_setting_number(SIM_SET_LOG, 0),
        .timed = timed,
    };
}

static bool options_legal(const cusim_options *options) {
    long page = sysconf(_SC_PAGESIZE);
    size_t granularity = options->granularity;
    return options->devices >= 0 && options->devices <= CUSIM_MAX_DEVICES &&
           options->capacity > 0 && options->capacity <= (size_t)1 << 42 &&
           granularity >= (size_t)page && (granularity & (granularity - 1)) == 0;
}

static bool options_change_machine(const cusim_options *options) {
    return options->devices != sim.options.devices || options->capacity != sim.options.capacity ||
           options->granularity != sim.options.granularity || options->timed != sim.options.timed;
}

bool cusim_configure(const cusim_options *options) {
    cusim_options wanted;
    cusim_options_init(&wanted);
    if (options != NULL) {
        wanted = *options;
    }
    (void)pthread_mutex_lock(&sim.lock);
    bool done = options_legal(&wanted) &&
                (!atomic_load(&sim.initialised) || !options_change_machine(&wanted));
    if (done) {
        sim.options = wanted;
        sim.configured = true;
        atomic_store(&sim.log, wanted.log);
        sim_timed_set(wanted.timed != 0);
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return done;
}

static void at_exit(void) { atomic_store(&sim.exiting, true); }

static void in_child(void) {
    if (atomic_load(&sim.initialised)) {
        atomic_store(&sim.forked, true);
    }
}

__attribute__((constructor)) static void watch_forks(void) {
    (void)pthread_atfork(NULL, NULL, in_child);
}

__attribute__((destructor)) static void watch_unloading(void) { at_exit(); }

static void devices_close(int count) {
    for (int i = 0; i < count; i++) {
        (void)close(sim.devices[i].file);
        sim_handle_close(sim.devices[i].primary.handle);
    }
}

static CUresult devices_open(void) {
    if (!sim_space_open()) {
        return sim_refuse(CUDA_ERROR_OPERATING_SYSTEM, "cuInit: no address space");
    }
    for (int i = 0; i < sim.options.devices; i++) {
        sim.devices[i] = (sim_device){.file = memfd_create("cusim", MFD_CLOEXEC)};
        sim.devices[i].primary = (sim_context){.device = i};
        sim.devices[i].primary.handle = sim_handle_open(SIM_KIND_CONTEXT, &sim.devices[i].primary);
        if (sim.devices[i].file < 0 || sim.devices[i].primary.handle == 0) {
            devices_close(i);
            sim_space_close();
            return sim_refuse(CUDA_ERROR_OPERATING_SYSTEM, "cuInit: no memory for device %d", i);
        }
    }
    return CUDA_SUCCESS;
}

static CUresult initialise(void) {
    if (!sim.configured) {
        cusim_options_init(&sim.options);
        atomic_store(&sim.log, sim.options.log);
        sim_timed_set(sim.options.timed != 0);
    }
    if (!options_legal(&sim.options)) {
        return sim_refuse(CUDA_ERROR_UNKNOWN, "cuInit: the options in the environment are wrong");
    }
    if (sim.options.devices == 0) {
        return sim_refuse(CUDA_ERROR_NO_DEVICE, "cuInit: no device");
    }
    CUresult result = devices_open();
    if (result != CUDA_SUCCESS) {
        return result;
    }
    (void)atexit(
        at_exit); /* again after each reset: what the program registers later runs before */
    sim.epoch++;
    atomic_store(&sim.initialised, true);
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) {
    CUresult result = sim_enter(SIM_cuInit, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (flags != 0) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuInit: flags must be 0"));
    }
    return sim_leave(NULL, atomic_load(&sim.initialised) ? CUDA_SUCCESS : initialise());
}

CUresult cuDriverGetVersion(int *version) {
    CUresult result = sim_enter(SIM_cuDriverGetVersion, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (version == NULL) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuDriverGetVersion: NULL"));
    }
    *version = DRIVER_VERSION;
    return sim_leave(NULL, CUDA_SUCCESS);
}

static bool anything_open(void) {
    for (int i = 0; i < sim.options.devices; i++) {
        if (sim.devices[i].primary.retained > 0) {
            return true;
        }
    }
    return sim.allocations.count > 0 || sim.reservations.count > 0 || sim.mappings.count > 0 ||
           sim.pinned.count > 0 || sim.physical_count > 0;
}

bool cusim_reset(void) {
    if (atomic_load(&sim.forked)) {
        return false;
    }
    (void)pthread_mutex_lock(&sim.lock);
    bool done = !atomic_load(&sim.initialised) || !anything_open();
    if (done) {
        while (sim.workers > 0) {
            sim_wait();
        }
        if (atomic_load(&sim.initialised)) {
            devices_close(sim.options.devices);
            sim_space_close();
        }
        atomic_store(&sim.initialised, false);
        atomic_store(&sim.exit_calls, 0);
        atomic_store(&sim.log, 0);
        sim.configured = false;
        sim.hold = false;
        sim.problems = 0;
        sim.problem[0] = '\0';
        sim_calls_reset();
        sim_timed_reset();
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return done;
}
