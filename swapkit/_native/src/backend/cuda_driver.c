/* cuda_driver.c - opening libcuda.so.1, once per process, and its errors. */
#include "backend/cuda_driver.h"

#include <dlfcn.h>
#include <stdio.h>

#include "backend/library.h"

#define DEFAULT_LIBRARY "libcuda.so.1"
#define LIBRARY_VARIABLE "SWAPKIT_CUDA_DRIVER"

enum { TEXT_BYTES = 256, VERSION_MAJOR = 1000, VERSION_MINOR = 10 };

static sk_status driver_start(void);
static void driver_prepare(void);

static sk__library library = {
    .backend = "cuda",
    .exiting = "the CUDA driver has shut down: the process is exiting",
    .forked = "a CUDA device cannot be used in a forked child; start processes with 'spawn' or "
              "'forkserver'",
    .start = driver_start,
    .prepare = driver_prepare,
    .at_exit = sk__cuda_shut_down,
    .once = PTHREAD_ONCE_INIT,
};

static sk__cuda_driver process_driver; /* never changes once the library is ready */

static void driver_prepare(void) { sk__library_prepare(&library); }

const char *sk__cuda_gone(void) { return sk__library_gone(&library); }

void sk__cuda_shut_down(void) { sk__library_end(&library); }

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

static sk_status symbol_missing(void *handle, const char *path, const char *symbol) {
    char found[TEXT_BYTES] = "of unknown version";
    sk__cu_result (*get_version)(int *) = NULL;
    *(void **)&get_version = dlsym(handle, "cuDriverGetVersion");
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
#define NAME(name, arguments) #name,
    static const char *const needed[] = {SK_CUDA_CALLS(NAME)};
#undef NAME
    void *handle = sk__library_open(&library, "NVIDIA driver", path, LIBRARY_VARIABLE);
    if (handle == NULL) {
        return SK_UNSUPPORTED;
    }
    sk__cuda_driver table;
    const char *missing =
        sk__library_find(handle, needed, sizeof needed / sizeof needed[0], &table);
    if (missing != NULL) {
        sk_status status = symbol_missing(handle, path, missing);
        (void)dlclose(handle);
        return status;
    }
#define FIND(name, arguments) *(void **)&table.name = dlsym(handle, #name);
    SK_CUDA_OPTIONAL_CALLS(FIND)
#undef FIND
    *out = table;
    return SK_OK;
}

static sk_status driver_start(void) {
    sk__cuda_driver *driver = &process_driver;
    sk_status status =
        sk__cuda_driver_open(sk__library_path(LIBRARY_VARIABLE, DEFAULT_LIBRARY), driver);
    if (status != SK_OK) {
        return status;
    }
    sk__cu_result result = driver->cuInit(0);
    if (result == SK_CU_SUCCESS) {
        return SK_OK;
    }
    return sk__cuda_fail(driver, result == SK_CU_NO_DEVICE ? SK_UNSUPPORTED : SK_BACKEND_FAILED,
                         "cuInit", result);
}

sk_status sk__cuda_driver_get(const sk__cuda_driver **out) {
    sk_status status = sk__library_get(&library);
    if (status == SK_OK) {
        *out = &process_driver;
    }
    return status;
}
