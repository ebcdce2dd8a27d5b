/* cuda_driver.c - opening libcuda.so.1, once per process; its errors; and when not to call it.
 *
 * The driver shuts down at some point of the process's exit, and does not work in a forked child. A
 * handler for each case, registered after the driver's own, notes it; from then on no code here
 * calls the driver. */
#include "backend/cuda_driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/thread.h"

#define DEFAULT_LIBRARY "libcuda.so.1"
#define LIBRARY_VARIABLE "SWAPKIT_CUDA_DRIVER"

enum { TEXT_BYTES = 256, VERSION_MAJOR = 1000, VERSION_MINOR = 10 };

typedef enum presence { PRESENT, EXITING, FORKED } presence;

static struct {
    sk__mutex lock;
    sk__fork_node fork_node;
    bool ready SK_GUARDED_BY(lock);
    sk__cuda_driver table; /* never changes once it is ready */
    presence presence;     /* atomic */
} process;

static pthread_once_t process_once = PTHREAD_ONCE_INIT;

/* ---- the end of the driver ------------------------------------------------------------------- */

const char *sk__cuda_gone(void) {
    switch (__atomic_load_n(&process.presence, __ATOMIC_RELAXED)) {
    case EXITING:
        return "the CUDA driver has shut down: the process is exiting";
    case FORKED:
        return "a CUDA device cannot be used in a forked child; start processes with 'spawn' or "
               "'forkserver'";
    case PRESENT:
        break;
    }
    return NULL;
}

void sk__cuda_shut_down(void) { __atomic_store_n(&process.presence, EXITING, __ATOMIC_RELAXED); }

static SK_NO_ANALYSIS void driver_after_fork(void *owner) {
    (void)owner;
    if (process.ready) { /* otherwise the child may open a driver of its own */
        __atomic_store_n(&process.presence, FORKED, __ATOMIC_RELAXED);
    }
}

/* ---- errors ---------------------------------------------------------------------------------- */

bool sk__cuda_is_sticky(sk__cu_result result) {
    static const sk__cu_result sticky[] = {
        214, 220,                         /* uncorrected memory or link errors */
        700, 702,                         /* an illegal address, a timeout */
        709, 710,                         /* the context was destroyed, an assertion in a kernel */
        714, 715, 716, 717, 718, 719, 721 /* other kernel failures */
    };
    for (size_t i = 0; i < sizeof sticky / sizeof sticky[0]; i++) {
        if (result == sticky[i]) {
            return true;
        }
    }
    return false;
}

sk_status sk__cuda_fail(const sk__cuda_driver *driver, sk_status status, const char *what,
                        sk__cu_result result) {
    const char *name = NULL;
    const char *text = NULL;
    if (driver->cuGetErrorName(result, &name) != SK_CU_SUCCESS || name == NULL) {
        name = "unknown error";
    }
    if (driver->cuGetErrorString(result, &text) != SK_CU_SUCCESS || text == NULL) {
        text = "the driver has no description";
    }
    const char *more = "";
    if (sk__cuda_is_sticky(result)) {
        more = "; the error happened earlier, in a kernel or a copy, and its CUDA context is "
               "unusable from then on: restart the process";
    }
    return sk__fail(status, "cuda backend: %s failed: %s (%d): %s%s", what, name, result, text,
                    more);
}

/* ---- opening --------------------------------------------------------------------------------- */

static sk_status symbol_missing(void *library, const char *path, const char *symbol) {
    char found[TEXT_BYTES] = "of unknown version";
    sk__cu_result (*get_version)(int *) = NULL;
    *(void **)&get_version = dlsym(library, "cuDriverGetVersion");
    int version = 0;
    if (get_version != NULL && get_version(&version) == SK_CU_SUCCESS) {
        (void)snprintf(found, sizeof found, "for CUDA %d.%d", version / VERSION_MAJOR,
                       version % VERSION_MAJOR / VERSION_MINOR);
    }
    return sk__fail(SK_UNSUPPORTED,
                    "cuda backend: the driver library %s, %s, has no %s: install a newer driver",
                    path, found, symbol);
}

sk_status sk__cuda_driver_open(const char *path, sk__cuda_driver *out) {
    /* A user who sets the environment chooses the process's libraries anyway. */
    /* NOLINTNEXTLINE(clang-analyzer-optin.taint.GenericTaint) */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        return sk__fail(SK_UNSUPPORTED,
                        "cuda backend: no NVIDIA driver found: tried %s (%s); set " LIBRARY_VARIABLE
                        " to use another library",
                        path, why == NULL ? "no reason given" : why);
    }
    sk__cuda_driver table;
#define FIND(name, arguments)                                                                      \
    *(void **)&table.name = dlsym(library, #name);                                                 \
    if (table.name == NULL) {                                                                      \
        sk_status missing = symbol_missing(library, path, #name);                                  \
        (void)dlclose(library);                                                                    \
        return missing;                                                                            \
    }
    SK_CUDA_CALLS(FIND)
#undef FIND
#define FIND(name, arguments) *(void **)&table.name = dlsym(library, #name);
    SK_CUDA_OPTIONAL_CALLS(FIND)
#undef FIND
    *out = table;
    return SK_OK;
}

static sk_status driver_start(sk__cuda_driver *out) {
    const char *path = getenv(LIBRARY_VARIABLE);
    sk_status status =
        sk__cuda_driver_open(path == NULL || path[0] == '\0' ? DEFAULT_LIBRARY : path, out);
    if (status != SK_OK) {
        return status;
    }
    sk__cu_result result = out->cuInit(0);
    if (result == SK_CU_SUCCESS) {
        return SK_OK;
    }
    return sk__cuda_fail(out, result == SK_CU_NO_DEVICE ? SK_UNSUPPORTED : SK_BACKEND_FAILED,
                         "cuInit", result);
}

static void process_init(void) {
    sk__mutex_init(&process.lock, SK_RANK_BACKEND);
    process.fork_node = (sk__fork_node){.lock = &process.lock, .child = driver_after_fork};
    sk__fork_register(&process.fork_node);
}

sk_status sk__cuda_driver_get(const sk__cuda_driver **out) {
    (void)pthread_once(&process_once, process_init);
    const char *gone = sk__cuda_gone();
    if (gone != NULL) {
        return sk__fail(SK_BACKEND_FAILED, "cuda backend: %s", gone);
    }
    sk_status status = SK_OK;
    sk__lock(&process.lock);
    if (!process.ready) {
        status = driver_start(&process.table);
        process.ready = status == SK_OK;
        if (process.ready) {
            (void)atexit(sk__cuda_shut_down); /* registered after the driver's: runs before it */
        }
    }
    sk__unlock(&process.lock);
    if (status == SK_OK) {
        *out = &process.table;
    }
    return status;
}
