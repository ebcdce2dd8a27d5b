/* errors.c - names and texts of results. */
#include "sim.h"

typedef struct error_text {
    CUresult result;
    const char *name;
    const char *text;
} error_text;

#define ERROR(name, text) {CUDA_##name, "CUDA_" #name, text}

static const error_text errors[] = {
    ERROR(SUCCESS, "no error"),
    ERROR(ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    ERROR(ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    ERROR(ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(ERROR_NOT_READY, "device not ready"),
    ERROR(ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    ERROR(ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(ERROR_HOST_MEMORY_ALREADY_REGISTERED,
          "part or all of the requested memory range is already mapped"),
    ERROR(ERROR_HOST_MEMORY_NOT_REGISTERED,
          "pointer does not correspond to a registered memory region"),
    ERROR(ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
    ERROR(ERROR_SYSTEM_DRIVER_MISMATCH,
          "system has unsupported display driver / cuda driver combination"),
    ERROR(ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(ERROR_UNKNOWN, "unknown error"),
};

static const error_text *find(CUresult result) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].result == result) {
            return &errors[i];
        }
    }
    return NULL;
}

/* Never refused, and without the lock: errors are named in forked children and at exit, too. */
static CUresult text_give(const char *text, const char **out) {
    if (out == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = text;
    return text == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    sim_count(SIM_cuGetErrorName);
    const error_text *found = find(error);
    return text_give(found == NULL ? NULL : found->name, text);
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    sim_count(SIM_cuGetErrorString);
    const error_text *found = find(error);
    return text_give(found == NULL ? NULL : found->text, text);
}
