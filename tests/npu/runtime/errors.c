/* errors.c - what every function does first and last; errors and their texts. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "book.h"
#include "runtime.h"
#include "settings.h"

enum { TEXT_BYTES = 320, POLL_NS = 50000, NS_PER_MS = 1000000, NS_PER_S = 1000000000 };

#define FUNCTION_NAME(name) #name,
static const char *const names[ACL_FUNCTION_COUNT] = {ACL_FUNCTIONS(FUNCTION_NAME)};

SIM_BOOK(book, names, ACL_FUNCTION_COUNT);

static _Thread_local struct {
    aclError error;
    char text[TEXT_BYTES]; /* not asked for yet */
    char told[TEXT_BYTES]; /* returned by the last aclGetRecentErrMsg() */
} last;

bool aclsim_fail(const char *function, unsigned nth, int error) {
    return sim_book_fail(&book, function, nth, error);
}

uint64_t aclsim_calls(const char *function) { return sim_book_calls(&book, function); }

void aclsim_reset(void) { sim_book_reset(&book); }

aclError acl_fail(aclError error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(last.text, sizeof last.text, format, arguments);
    va_end(arguments);
    last.error = error;
    if (sim_setting_number(SIM_SET_LOG, 0) > 0) {
        (void)fprintf(stderr, "aclsim: %d: %s\n", error, last.text);
    }
    return error;
}

static aclError out_of_memory(void) {
    return sim_setting_number(SIM_SET_DEVICE_OOM, 0) != 0 ? ACL_ERROR_RT_DEVICE_OOM
                                                          : ACL_ERROR_RT_MEMORY_ALLOCATION;
}

static const struct {
    CUresult result;
    aclError error;
} errors[] = {
    {CUDA_ERROR_INVALID_VALUE, ACL_ERROR_RT_PARAM_INVALID},
    {CUDA_ERROR_NOT_FOUND, ACL_ERROR_RT_PARAM_INVALID},
    {CUDA_ERROR_NOT_INITIALIZED, ACL_ERROR_RT_CONTEXT_NULL}, /* no thread has set a device */
    {CUDA_ERROR_DEINITIALIZED, ACL_ERROR_UNINITIALIZE},      /* the process exits */
    {CUDA_ERROR_NO_DEVICE, ACL_ERROR_RT_INVALID_DEVICEID},
    {CUDA_ERROR_INVALID_DEVICE, ACL_ERROR_RT_INVALID_DEVICEID},
    {CUDA_ERROR_INVALID_CONTEXT, ACL_ERROR_RT_CONTEXT_NULL},
    {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, ACL_ERROR_RT_FEATURE_NOT_SUPPORT},
    {CUDA_ERROR_INVALID_HANDLE, ACL_ERROR_RT_INVALID_HANDLE},
    {CUDA_ERROR_NOT_READY, ACL_ERROR_RT_EVENT_NOT_COMPLETE},
    {CUDA_ERROR_ILLEGAL_ADDRESS, ACL_ERROR_RT_AICORE_EXCEPTION},
    {CUDA_ERROR_LAUNCH_FAILED, ACL_ERROR_RT_VECTOR_CORE_EXCEPTION},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, ACL_ERROR_RT_CONTEXT_RELEASE_ERROR},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, ACL_ERROR_HOST_MEMORY_NOT_REGISTERED},
    {CUDA_ERROR_NOT_PERMITTED, ACL_ERROR_RT_NO_PERMISSION},
    {CUDA_ERROR_NOT_SUPPORTED, ACL_ERROR_RT_FEATURE_NOT_SUPPORT},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, ACL_ERROR_RT_STREAM_CAPTURED},
};

/* A result that is an error of ACL already was put there by a test, with cusim_fail() or
 * cusim_break(). */
static aclError error_of(CUresult result) {
    enum { LEAST_ERROR = 100000 };
    if (result == CUDA_SUCCESS || (int)result >= LEAST_ERROR) {
        return (aclError)result;
    }
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        return out_of_memory();
    }
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        if (errors[i].result == result) {
            return errors[i].error;
        }
    }
    return ACL_ERROR_RT_DRV_INTERNAL_ERROR;
}

aclError acl_done(CUresult result) {
    if (result == CUDA_SUCCESS) {
        return ACL_SUCCESS;
    }
    bool later = result == CUDA_ERROR_ILLEGAL_ADDRESS; /* the work's fault, not this call's */
    return acl_fail(error_of(result), "%s", later ? cusim_last_problem() : cusim_last_refusal());
}

aclError acl_enter(acl_function function) {
    sim_book_count(&book, function);
    aclError told = sim_book_failure_due(&book, function);
    if (told != ACL_SUCCESS) {
        return acl_fail(told, "%s: told to fail", names[function]);
    }
    int version = 0;
    return acl_done(cuDriverGetVersion(&version));
}

aclError acl_enter_on_device(acl_function function) {
    aclError error = acl_enter(function);
    if (error != ACL_SUCCESS) {
        return error;
    }
    CUcontext context = NULL;
    error = acl_done(cuCtxGetCurrent(&context));
    if (error == ACL_SUCCESS && context == NULL) {
        error = acl_fail(ACL_ERROR_RT_CONTEXT_NULL, "%s: no device is set on this thread",
                         names[function]);
    }
    return error;
}

const char *aclGetRecentErrMsg(void) {
    sim_book_count(&book, ACL_FN_aclGetRecentErrMsg);
    memcpy(last.told, last.text, sizeof last.told);
    last.text[0] = '\0';
    return last.told;
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel level) {
    sim_book_count(&book, ACL_FN_aclrtPeekAtLastError);
    (void)level;
    return last.error;
}

aclError aclrtGetLastError(aclrtLastErrLevel level) {
    sim_book_count(&book, ACL_FN_aclrtGetLastError);
    (void)level;
    aclError error = last.error;
    last.error = ACL_SUCCESS;
    return error;
}

static uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

CUresult acl_poll(CUresult (*query)(void *), void *argument, int32_t milliseconds) {
    uint64_t deadline = now_ns() + (uint64_t)(milliseconds < 0 ? 0 : milliseconds) * NS_PER_MS;
    CUresult result = query(argument);
    while (result == CUDA_ERROR_NOT_READY && (milliseconds < 0 || now_ns() < deadline)) {
        (void)nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
        result = query(argument);
    }
    return result;
}
