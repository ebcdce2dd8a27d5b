/* calls.c - what every driver call does first and last. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "book.h"
#include "settings.h"
#include "sim.h"

#define CALL_NAME(name, need) #name,
static const char *const names[SIM_FUNCTION_COUNT] = {SIM_FUNCTIONS(CALL_NAME)};
#define CALL_NEED(name, need) SIM_NEEDS_##need,
static const sim_need needs[SIM_FUNCTION_COUNT] = {SIM_FUNCTIONS(CALL_NEED)};

SIM_BOOK(book, names, SIM_FUNCTION_COUNT);
static _Thread_local char refusal[256];
static _Thread_local bool calls_forbidden;

sim_state sim = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

bool cusim_fail(const char *function, unsigned nth, CUresult result) {
    return sim_book_fail(&book, function, nth, (int)result);
}

uint64_t cusim_calls(const char *function) { return sim_book_calls(&book, function); }

void sim_calls_reset(void) {
    sim_book_reset(&book);
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
    const char *name = names[function];
    if (atomic_load(&sim.forked)) {
        return sim_refuse(CUDA_ERROR_NOT_INITIALIZED, "%s: in a forked child", name);
    }
    if (atomic_load(&sim.exiting)) {
        exit_call(name);
        return CUDA_ERROR_DEINITIALIZED;
    }
    if (calls_forbidden) {
        return sim_refuse(CUDA_ERROR_NOT_PERMITTED, "%s: called by a host function in a stream",
                          name);
    }
    CUresult failed = (CUresult)sim_book_failure_due(&book, function);
    if (failed != CUDA_SUCCESS) {
        return sim_refuse(failed, "%s: told to fail", name);
    }
    if (needs[function] != SIM_NEEDS_NOTHING && !atomic_load(&sim.initialised)) {
        return sim_refuse(CUDA_ERROR_NOT_INITIALIZED, "%s: before cuInit", name);
    }
    return CUDA_SUCCESS;
}

static CUresult context_check(sim_function function, const sim_context *context) {
    const char *name = names[function];
    if (context == NULL) {
        return sim_refuse(CUDA_ERROR_INVALID_CONTEXT, "%s: no context is current", name);
    }
    if (context->retained == 0) {
        return sim_refuse(CUDA_ERROR_CONTEXT_IS_DESTROYED, "%s: the current context is destroyed",
                          name);
    }
    return needs[function] == SIM_NEEDS_CONTEXT ? context->sticky : CUDA_SUCCESS;
}

void sim_count(sim_function function) { sim_book_count(&book, function); }

CUresult sim_enter(sim_function function, sim_context **context) {
    sim_need need = needs[function];
    sim_count(function);
    CUresult result = enter_check(function);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    (void)pthread_mutex_lock(&sim.lock);
    if (atomic_load(&sim.log) > 1) {
        (void)fprintf(stderr, "cusim: %s\n", names[function]);
    }
    if (need != SIM_NEEDS_CONTEXT && need != SIM_NEEDS_ANY_CONTEXT) {
        return CUDA_SUCCESS;
    }
    *context = sim_context_current();
    result = context_check(function, *context);
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
