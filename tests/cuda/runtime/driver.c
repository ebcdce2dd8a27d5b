/* The driver that is loaded: its functions by name. */
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define RT_NAME_BYTES 128

struct rt_driver rt_driver;

static void *library;
static CUresult loaded = CUDA_ERROR_NO_DEVICE;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Older drivers lack the newest version of a function: then the version before it will do. */
static void *find(const char *name) {
    void *found = dlsym(library, name);
    const char *version = strstr(name, "_v");
    if (found == NULL && version != NULL) {
        char plain[RT_NAME_BYTES];
        (void)snprintf(plain, sizeof(plain), "%.*s", (int)(version - name), name);
        found = dlsym(library, plain);
    }
    return found;
}

static bool load_functions(void) {
    bool complete = true;
#define RT_LOAD_AS(symbol)                                                                         \
    *(void **)&rt_driver.symbol = find(#symbol);                                                   \
    if (rt_driver.symbol == NULL) {                                                                \
        (void)fprintf(stderr, "simulated runtime: the driver has no %s\n", #symbol);               \
        complete = false;                                                                          \
    }
#define RT_LOAD(symbol) RT_LOAD_AS(symbol)
    RT_DRIVER_FUNCTIONS(RT_LOAD)
#undef RT_LOAD
#undef RT_LOAD_AS
    return complete;
}

static void load(void) {
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) {
        (void)fprintf(stderr, "simulated runtime: %s\n", dlerror());
        return;
    }
    loaded = load_functions() ? rt_driver.cuInit(0) : CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
}

CUresult rt_load(void) {
    (void)pthread_once(&once, load);
    return loaded;
}

void *rt_driver_symbol(const char *name) {
    if (rt_load() != CUDA_SUCCESS) {
        return NULL;
    }
    char second[RT_NAME_BYTES];
    (void)snprintf(second, sizeof(second), "%s_v2", name);
    void *found = dlsym(library, second);
    return found != NULL ? found : dlsym(library, name);
}
