/* ascend_runtime.c - opening libascendcl.so, once per process, and its errors. */
#include "backend/ascend_runtime.h"

#include <dlfcn.h>

#include "backend/library.h"

#define DEFAULT_LIBRARY "libascendcl.so"
#define LIBRARY_VARIABLE "SWAPKIT_ASCEND_RUNTIME"

static sk_status runtime_start(void);
static void runtime_prepare(void);

static sk__library library = {
    .backend = "ascend",
    .exiting = "the ACL runtime has shut down: the process is exiting",
    .forked = "an Ascend device cannot be used in a forked child; start processes with 'spawn' or "
              "'forkserver'",
    .start = runtime_start,
    .prepare = runtime_prepare,
    .at_exit = sk__ascend_shut_down,
    .once = PTHREAD_ONCE_INIT,
};

static sk__ascend_runtime process_runtime; /* never changes once the library is ready */

static void runtime_prepare(void) { sk__library_prepare(&library); }

const char *sk__ascend_gone(void) { return sk__library_gone(&library); }

void sk__ascend_shut_down(void) { sk__library_end(&library); }

/* ---- errors ---------------------------------------------------------------------------------- */

/* Of CANN's rt_error_codes.h, as far as the calls here can return them. The sticky ones are those
 * after which the device's context runs nothing any more. */
static const struct {
    sk__acl_error error;
    bool sticky;
    const char *name;
} errors[] = {
    {100000, false, "invalid parameter"},
    {100001, false, "ACL is not initialised"},
    {100002, false, "ACL is initialised already"},
    {107000, false, "invalid parameter"},
    {107001, false, "invalid device"},
    {107002, false, "the thread has set no device"},
    {107003, false, "the stream belongs to another context"},
    {107008, false, "unaligned address"},
    {107017, false, "invalid handle"},
    {107019, false, "timeout"},
    {107022, true, "the device's tasks are being aborted"},
    {107027, false, "the stream is being captured"},
    {107030, false, "not possible while a stream is captured"},
    {200000, false, "out of host memory"},
    {200001, false, "not supported"},
    {200006, false, "not supported"},
    {207000, false, "not supported"},
    {207001, false, "out of memory"},
    {207002, false, "memory cannot be freed"},
    {207004, false, "no device"},
    {207005, false, "no resources"},
    {207006, false, "no permission"},
    {207007, false, "no more events"},
    {207008, false, "no more streams"},
    {207018, false, "out of device memory"},
    {507000, false, "internal error of the runtime"},
    {507006, false, "the event is not complete"},
    {507007, false, "a context cannot be released"},
    {507010, true, "the device's task scheduler has stopped"},
    {507011, true, "a model failed"},
    {507013, true, "a copy engine failed"},
    {507014, true, "a kernel on an AI core took too long"},
    {507015, true, "a kernel on an AI core failed"},
    {507016, true, "a kernel on an AI core trapped"},
    {507017, true, "a kernel on an AI CPU took too long"},
    {507018, true, "a kernel on an AI CPU failed"},
    {507033, false, "the device cannot be set up"},
    {507034, true, "a kernel on a vector core took too long"},
    {507035, true, "a kernel on a vector core failed"},
    {507036, true, "a kernel on a vector core trapped"},
    {507042, true, "a kernel on an AI core read outside its memory"},
    {507043, true, "a kernel on an AI core wrote outside its memory"},
    {507044, true, "a kernel on a vector core read outside its memory"},
    {507045, true, "a kernel on a vector core wrote outside its memory"},
    {507046, false, "a stream took too long"},
    {507047, false, "an event took too long"},
    {507048, true, "a fused kernel took too long"},
    {507049, true, "a fused kernel failed"},
    {507050, true, "a fused kernel trapped"},
    {507053, true, "device memory is faulty"},
    {507054, true, "device memory has an error that cannot be corrected"},
    {507055, true, "device memory is probably faulty"},
    {507056, true, "a link between devices failed"},
    {507057, true, "a remote device probably failed"},
    {507899, false, "internal error of the driver"},
    {507901, true, "the connection to the device was closed"},
    {507910, false, "the host memory is registered already"},
    {507911, false, "the host memory is not registered"},
    {507914, true, "a port of the device failed"},
    {507915, true, "a collective communication took too long"},
    {507916, true, "a collective communication failed"},
};

enum { NERRORS = sizeof errors / sizeof errors[0] };

static size_t error_find(sk__acl_error error) {
    size_t index = 0;
    while (index < NERRORS && errors[index].error != error) {
        index++;
    }
    return index;
}

bool sk__ascend_is_sticky(sk__acl_error error) {
    size_t index = error_find(error);
    return index < NERRORS && errors[index].sticky;
}

bool sk__ascend_is_unsupported(sk__acl_error error) {
    return error == SK_ACL_NOT_SUPPORTED || error == SK_ACL_API_NOT_SUPPORTED ||
           error == SK_ACL_FEATURE_UNSUPPORTED;
}

sk_status sk__ascend_fail(const sk__ascend_runtime *runtime, sk_status status, const char *what,
                          sk__acl_error error) {
    size_t index = error_find(error);
    const char *name = index < NERRORS ? errors[index].name : "unknown error";
    const char *text = runtime->aclGetRecentErrMsg();
    if (text == NULL || text[0] == '\0') {
        text = "ACL has no message";
    }
    const char *more = "";
    if (sk__ascend_is_sticky(error)) {
        more = "; the error happened earlier, in a kernel or a copy, and the device is unusable "
               "for this process from then on: restart the process";
    }
    return sk__fail(status, "ascend backend: %s failed: %s (%d)%s: %s", what, name, error, more,
                    text);
}

/* ---- opening --------------------------------------------------------------------------------- */

sk_status sk__ascend_runtime_open(const char *path, sk__ascend_runtime *out) {
#define NAME(type, name, arguments) #name,
    static const char *const needed[] = {SK_ASCEND_CALLS(NAME)};
#undef NAME
    void *handle = sk__library_open(&library, "CANN runtime", path, LIBRARY_VARIABLE);
    if (handle == NULL) {
        return SK_UNSUPPORTED;
    }
    sk__ascend_runtime table;
    const char *missing =
        sk__library_find(handle, needed, sizeof needed / sizeof needed[0], &table);
    if (missing != NULL) {
        (void)dlclose(handle);
        return sk__fail(SK_UNSUPPORTED,
                        "ascend backend: the runtime library %s has no %s: install a newer CANN",
                        path, missing);
    }
#define FIND(type, name, arguments) *(void **)&table.name = dlsym(handle, #name);
    SK_ASCEND_OPTIONAL_CALLS(FIND)
#undef FIND
    *out = table;
    return SK_OK;
}

/* torch_npu may have initialised ACL before, or do so later: each accepts the other's. */
static sk_status runtime_start(void) {
    sk__ascend_runtime *runtime = &process_runtime;
    sk_status status =
        sk__ascend_runtime_open(sk__library_path(LIBRARY_VARIABLE, DEFAULT_LIBRARY), runtime);
    if (status != SK_OK) {
        return status;
    }
    sk__acl_error error = runtime->aclInit(NULL);
    return error == SK_ACL_SUCCESS || error == SK_ACL_REPEAT_INITIALIZE
               ? SK_OK
               : sk__ascend_fail(runtime, SK_BACKEND_FAILED, "aclInit", error);
}

sk_status sk__ascend_runtime_get(const sk__ascend_runtime **out) {
    sk_status status = sk__library_get(&library);
    if (status == SK_OK) {
        *out = &process_runtime;
    }
    return status;
}
