/* calls.c - what every driver call does first and last. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "settings.h"
#include "sim.h"

typedef struct call_site {
    const char *name;
    sim_need need;
} call_site;

#define CALL_SITE(name, need) {#name, SIM_NEEDS_##need},
static const call_site sites[SIM_FUNCTION_COUNT] = {SIM_FUNCTIONS(CALL_SITE)};

/* A failure that was asked for. The last one is that of "*". */
typedef struct call_failure {
    CUresult result;
    uint64_t countdown; /* calls until it happens; 0: every call */
} call_failure;

static atomic_uint_fast64_t call_counts[SIM_FUNCTION_COUNT];
static pthread_mutex_t failure_lock = PTHREAD_MUTEX_INITIALIZER;
static call_failure failures[SIM_FUNCTION_COUNT + 1];
static atomic_uint failures_set;
static _Thread_local char refusal[256];
static _Thread_local bool calls_forbidden;

sim_state sim = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static CUresult failure_due(call_failure *failure) {
    if (failure->result == CUDA_SUCCESS || failure->countdown == 0) {
        return failure->result;
    }
    failure->countdown--;
    if (failure->countdown > 0) {
        return CUDA_SUCCESS;
    }
    CUresult result = failure->result;
    *failure = (call_failure){0};
    atomic_fetch_sub(&failures_set, 1);
    return result;
}

static CUresult failure_of(sim_function function) {
    if (atomic_load(&failures_set) == 0) {
        return CUDA_SUCCESS;
    }
    (void)pthread_mutex_lock(&failure_lock);
    CUresult any = failure_due(&failures[SIM_FUNCTION_COUNT]);
    CUresult own = failure_due(&failures[function]);
    (void)pthread_mutex_unlock(&failure_lock);
    return own != CUDA_SUCCESS ? own : any;
}

/* Names are equal, or differ by the version only: cuMemAlloc means cuMemAlloc_v2. */
static bool name_matches(const char *full, const char *asked) {
    size_t length = strlen(asked);
    return strncmp(full, asked, length) == 0 &&
           (full[length] == '\0' || strncmp(full + length, "_v", 2) == 0);
}

static int function_index(const char *name) {
    if (strcmp(name, "*") == 0) {
        return SIM_FUNCTION_COUNT;
    }
    for (int i = 0; i < SIM_FUNCTION_COUNT; i++) {
        if (name_matches(sites[i].name, name)) {
            return i;
        }
    }
    return -1;
}

bool cusim_fail(const char *function, unsigned nth, CUresult result) {
    int index = function_index(function);
    if (index < 0) {
        return false;
    }
    (void)pthread_mutex_lock(&failure_lock);
    bool was = failures[index].result != CUDA_SUCCESS;
    bool is = result != CUDA_SUCCESS;
    failures[index] = (call_failure){.result = result, .countdown = nth};
    atomic_fetch_add(&failures_set, (unsigned)is - (unsigned)was);
    (void)pthread_mutex_unlock(&failure_lock);
    return true;
}

uint64_t cusim_calls(const char *function) {
    int index = function_index(function);
    uint64_t calls = 0;
    for (int i = 0; i < SIM_FUNCTION_COUNT; i++) {
        if (i == index || index == SIM_FUNCTION_COUNT) {
            calls += atomic_load(&call_counts[i]);
        }
    }
    return calls;
}

void sim_calls_reset(void) {
    (void)pthread_mutex_lock(&failure_lock);
    memset(failures, 0, sizeof failures);
    atomic_store(&failures_set, 0);
    (void)pthread_mutex_unlock(&failure_lock);
    for (int i = 0; i < SIM_FUNCTION_COUNT; i++) {
        atomic_store(&call_counts[i], 0);
    }
    refusal[0] = '\0';
}

void sim_forbid_calls(bool forbid) { calls_forbidden = forbid; }

static void exit_call(const char *name) {
    atomic_fetch_add(&sim.exit_calls, 1);
    if (sim_setting_number(SIM_SET_STRICT_EXIT, 0) == 1) {
        (void)fprintf(stderr, "cusim: %s was called while the process was exiting\n", name);
    }
}

/* What can be said without the lock. */
static CUresult enter_check(sim_function function) {
    const call_site *site = &sites[function];
    if (atomic_load(&sim.forked)) {
        return sim_refuse(CUDA_ERROR_NOT_INITIALIZED, "%s: in a forked child", site->name);
    }
    if (atomic_load(&sim.exiting)) {
        exit_call(site->name);
        return CUDA_ERROR_DEINITIALIZED;
    }
    if (calls_forbidden) {
        return sim_refuse(CUDA_ERROR_NOT_PERMITTED, "%s: called by a host function in a stream",
                          site->name);
    }
    CUresult failed = failure_of(function);
    if (failed != CUDA_SUCCESS) {
        return sim_refuse(failed, "%s: told to fail", site->name);
    }
    if (site->need != SIM_NEEDS_NOTHING && !atomic_load(&sim.initialised)) {
        return sim_refuse(CUDA_ERROR_NOT_INITIALIZED, "%s: before cuInit", site->name);
    }
    return CUDA_SUCCESS;
}

static CUresult context_check(const call_site *site, const sim_context *context) {
    if (context == NULL) {
        return sim_refuse(CUDA_ERROR_INVALID_CONTEXT, "%s: no context is current", site->name);
    }
    if (context->retained == 0) {
        return sim_refuse(CUDA_ERROR_CONTEXT_IS_DESTROYED, "%s: the current context is destroyed",
                          site->name);
    }
    return site->need == SIM_NEEDS_CONTEXT ? context->sticky : CUDA_SUCCESS;
}

void sim_count(sim_function function) {
    atomic_fetch_add_explicit(&call_counts[function], 1, memory_order_relaxed);
}

CUresult sim_enter(sim_function function, sim_context **context) {
    const call_site *site = &sites[function];
    sim_count(function);
    CUresult result = enter_check(function);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    (void)pthread_mutex_lock(&sim.lock);
    if (atomic_load(&sim.log) > 1) {
        (void)fprintf(stderr, "cusim: %s\n", site->name);
    }
    if (site->need != SIM_NEEDS_CONTEXT && site->need != SIM_NEEDS_ANY_CONTEXT) {
        return CUDA_SUCCESS;
    }
    *context = sim_context_current();
    result = context_check(site, *context);
    if (result != CUDA_SUCCESS) {
        (void)pthread_mutex_unlock(&sim.lock);
    }
    return result;
}

CUresult sim_leave(const sim_context *context, CUresult result) {
    if (result == CUDA_SUCCESS && context != NULL) {
        result = context->sticky;
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return result;
}

CUresult sim_refuse(CUresult result, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(refusal, sizeof refusal, format, arguments);
    va_end(arguments);
    if (atomic_load(&sim.log) > 0) {
        (void)fprintf(stderr, "cusim: %d: %s\n", result, refusal);
    }
    return result;
}

void sim_problem(sim_context *context, CUresult result, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(sim.problem, sizeof sim.problem, format, arguments);
    va_end(arguments);
    sim.problems++;
    if (atomic_load(&sim.log) > 0) {
        (void)fprintf(stderr, "cusim: problem: %s\n", sim.problem);
    }
    if (context != NULL && context->sticky == CUDA_SUCCESS) {
        context->sticky = result;
        sim_notify();
    }
}

const char *cusim_last_refusal(void) { return refusal; }

const char *cusim_last_problem(void) {
    static _Thread_local char copy[sizeof sim.problem];
    (void)pthread_mutex_lock(&sim.lock);
    memcpy(copy, sim.problem, sizeof copy);
    (void)pthread_mutex_unlock(&sim.lock);
    return copy;
}

void sim_wait(void) {
    sim.waiters++;
    (void)pthread_cond_wait(&sim.changed, &sim.lock);
    sim.waiters--;
}

void sim_notify(void) {
    if (sim.waiters > 0) {
        (void)pthread_cond_broadcast(&sim.changed);
    }
}
