/* device.c - see device.h. */
#include "device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ascend_device.h"
#include "backend/backend.h"
#include "cuda_device.h"
#include "fixture.h"

/* Not those that fail on demand. */
void *__real_malloc(size_t nbytes);
void *__real_calloc(size_t count, size_t nbytes);

static bool device_is(const char *kind) {
    const char *name = getenv("SK_TEST_DEVICE");
    return name != NULL && strcmp(name, kind) == 0;
}

bool device_is_cuda(void) { return device_is("cuda"); }

bool device_is_ascend(void) { return device_is("ascend"); }

bool device_is_remote(void) { return device_is_cuda() || device_is_ascend(); }

/* ---- the driver ------------------------------------------------------------------------------ */

static cuda_calls calls;
static acl_calls runtime;
static CUcontext context;
static pthread_once_t calls_once = PTHREAD_ONCE_INIT;

static void give_up(const char *what, const char *why) {
    (void)fprintf(stderr, "SK_TEST_DEVICE: %s%s\n", what, why);
    abort();
}

static void *find(void *library, const char *name, bool needed) {
    void *symbol = dlsym(library, name);
    if (symbol == NULL && needed) {
        give_up("the library has no ", name);
    }
    return symbol;
}

static void *library_find(void) {
    const char *variable = device_is_ascend() ? "SWAPKIT_ASCEND_RUNTIME" : "SWAPKIT_CUDA_DRIVER";
    const char *path = getenv(variable);
    if (path == NULL) {
        path = device_is_ascend() ? "libascendcl.so" : "libcuda.so.1";
    }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        give_up("", dlerror());
    }
    return library;
}

/* Every device is set once, so that none of the tests is the first to do so. */
static void runtime_open(void *library) {
#define FIND(name) *(void **)&runtime.name = find(library, #name, true);
    ACL_TEST_CALLS(FIND)
#undef FIND
    uint32_t count = 0;
    (void)runtime.aclrtGetDeviceCount(&count);
    while (count > 0) {
        count--;
        (void)runtime.aclrtSetDevice((int32_t)count);
    }
    (void)calls.cuCtxSetCurrent(NULL);
}

static void calls_find(void) {
    void *library = library_find();
    bool simulated = dlsym(library, "cusim_report") != NULL;
#define FIND(name) *(void **)&calls.name = find(library, #name, true);
#define FIND_SIMULATED(name) *(void **)&calls.name = find(library, #name, simulated);
    CUDA_TEST_CALLS(FIND)
    CUSIM_TEST_CALLS(FIND_SIMULATED)
#undef FIND
#undef FIND_SIMULATED
    if (calls.cuInit(0) != CUDA_SUCCESS ||
        calls.cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS) {
        give_up("there is no device", "");
    }
    if (device_is_ascend()) {
        runtime_open(library);
    }
}

const cuda_calls *cuda(void) {
    (void)pthread_once(&calls_once, calls_find);
    return &calls;
}

const acl_calls *acl(void) {
    (void)cuda();
    return &runtime;
}

const cuda_calls *cusim(void) {
    if (cuda()->cusim_report == NULL) {
        test_skip("only the simulated driver can be made to do that");
    }
    return &calls;
}

/* ---- devices -------------------------------------------------------------------------------- */

sk_backend *make_ascend(int32_t device, bool whole) {
    (void)acl();
    sk_ascend_params params = {
        .device = device, .granule_bytes = GRANULE, .no_virtual_memory = whole};
    sk_backend *out = NULL;
    CHECK_OK(sk_backend_ascend(&params, &out));
    return out;
}

sk_backend *make_cuda(int32_t device, bool whole) {
    sk_cuda_params params = {
        .device = device, .granule_bytes = GRANULE, .no_virtual_memory = whole};
    sk_backend *out = NULL;
    sk_status status = sk_backend_cuda(&params, &out);
    if (status == SK_INVALID) { /* this device's granules are larger */
        params.granule_bytes = 0;
        status = sk_backend_cuda(&params, &out);
    }
    CHECK_OK(status);
    return out;
}

sk_backend *make_remote(int32_t device, bool whole) {
    return device_is_ascend() ? make_ascend(device, whole) : make_cuda(device, whole);
}

void need_small_granules(void) {
    if (device_is_remote()) {
        sk_backend *backend = make_remote(0, false);
        bool small = sk_backend_table(backend)->granule_bytes <= GRANULE;
        sk_backend_close(backend);
        if (!small) {
            test_skip("the device's granules are larger than what this test is about");
        }
    }
}

static sk_backend *make_exact(size_t capacity_bytes, bool whole) {
    if (!device_is_remote()) {
        return make_cpu(capacity_bytes);
    }
    sk_backend *capped = make_capped(make_remote(0, whole), capacity_bytes);
    capped->ops.over_read_bytes = 0;
    return capped;
}

sk_backend *make_device(size_t capacity_bytes) { return make_exact(capacity_bytes, false); }

sk_backend *make_whole_device(size_t capacity_bytes) { return make_exact(capacity_bytes, true); }

/* ---- memory ---------------------------------------------------------------------------------- */

static bool is_device(const void *address) {
    unsigned type = 0;
    return device_is_remote() &&
           cuda()->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                         (uintptr_t)address) == CUDA_SUCCESS &&
           type == CU_MEMORYTYPE_DEVICE;
}

/* Calls of the driver that a test makes itself, with the context current. */
static void enter(void) { CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxPushCurrent_v2(context)); }

static void leave(CUresult result) {
    CUcontext popped = NULL;
    (void)cuda()->cuCtxPopCurrent_v2(&popped);
    CHECK_EQUAL(CUDA_SUCCESS, result);
}

void device_read(void *to, const void *from, size_t nbytes) {
    if (!is_device(from)) {
        memcpy(to, from, nbytes);
        return;
    }
    enter();
    leave(cuda()->cuMemcpyDtoH_v2(to, (uintptr_t)from, nbytes));
}

void device_write(void *to, const void *from, size_t nbytes) {
    if (!is_device(to)) {
        memcpy(to, from, nbytes);
        return;
    }
    enter();
    CUresult result = cuda()->cuMemcpyHtoD_v2((uintptr_t)to, from, nbytes);
    if (result == CUDA_SUCCESS) { /* the bytes were read, but perhaps not written yet */
        result = cuda()->cuStreamSynchronize(NULL);
    }
    leave(result);
}

static void fill_on(CUstream stream, void *to, unsigned char value, size_t nbytes) {
    enter();
    CUresult result = cuda()->cuMemsetD8Async((uintptr_t)to, value, nbytes, stream);
    if (result == CUDA_SUCCESS) {
        result = cuda()->cuStreamSynchronize(stream);
    }
    leave(result);
}

void device_fill(void *to, unsigned char value, size_t nbytes) {
    if (!is_device(to)) {
        memset(to, value, nbytes);
        return;
    }
    fill_on(NULL, to, value, nbytes);
}

void device_slow(sk_stream *stream, uint64_t nanoseconds) {
    (void)cusim();
    enter();
    leave(calls.cusim_delay_stream((CUstream)stream, nanoseconds));
}

void *host_take(size_t nbytes) {
    void *address = NULL;
    if (device_is_remote()) {
        enter();
        leave(cuda()->cuMemHostAlloc(&address, nbytes, CU_MEMHOSTALLOC_PORTABLE));
        memset(address, 0, nbytes);
    } else {
        address = __real_calloc(1, nbytes);
    }
    CHECK(address != NULL);
    return address;
}

void host_give(void *address) {
    if (!device_is_remote()) {
        free(address);
        return;
    }
    enter();
    leave(cuda()->cuMemFreeHost(address));
}

static void wipe(bool on) {
    cusim_options options;
    calls.cusim_options_init(&options);
    options.wipe = options.wipe && on;
    CHECK(calls.cusim_configure(&options));
}

void device_wipe_not(void) {
    if (device_is_remote() && cuda()->cusim_configure != NULL) {
        wipe(false);
    }
}

void need_host_order(void) {
    if (device_is_remote()) {
        test_skip("the NULL stream is a real one here, not the host's own order");
    }
}

/* Where device_take() takes from. Freeing would wait for all work; a pool does not. Memory that is
 * given back is overwritten at once, so who still works on it is found out. */
static sk_backend *own_backend;
static sk_pool *own_pool;
static sk_stream *own_stream;
static pthread_mutex_t own_lock = PTHREAD_MUTEX_INITIALIZER;

static void own_open(void) {
    sk_pool_params pool_params = {0};
    own_backend = make_remote(0, false);
    CHECK_OK(sk_stream_create(own_backend, &own_stream));
    CHECK_OK(sk_pool_create(own_backend, &pool_params, &own_pool));
}

void *device_take(size_t nbytes) {
    void *address = NULL;
    if (!device_is_remote()) {
        address = __real_malloc(nbytes);
        CHECK(address != NULL);
        return address;
    }
    (void)pthread_mutex_lock(&own_lock);
    if (own_pool == NULL) {
        own_open();
    }
    (void)pthread_mutex_unlock(&own_lock);
    CHECK_OK(sk_pool_take(own_pool, nbytes, own_stream, &address));
    return address;
}

void device_give(void *address, size_t nbytes) {
    enum { GONE = 0xdd };
    if (!device_is_remote()) {
        free(address);
        return;
    }
    enter();
    leave(cuda()->cuStreamSynchronize(NULL)); /* it was in the order of this one until now */
    fill_on((CUstream)own_stream, address, GONE, nbytes);
    CHECK_OK(sk_pool_give(own_pool, address));
}

/* ---- around a test --------------------------------------------------------------------------- */

static cusim_open open_before;

void device_test_begin(void) {
    if (device_is_remote() && cuda()->cusim_report != NULL) {
        wipe(true);
        calls.cusim_hold(false);
        (void)calls.cusim_fail("*", 0, CUDA_SUCCESS);
        if (device_is_ascend()) {
            (void)runtime.aclsim_fail("*", 0, 0);
        }
        calls.cusim_break(CUDA_SUCCESS);
        calls.cusim_report(&open_before);
    }
}

const char *device_test_end(void) {
    static char text[512];
    if (own_pool != NULL && sk_pool_destroy(own_pool) == SK_OK) {
        sk__ignore(sk_stream_destroy(own_backend, own_stream));
        sk_backend_close(own_backend);
        own_pool = NULL;
    }
    if (!device_is_remote() || cuda()->cusim_report == NULL) {
        return NULL;
    }
    cusim_open now;
    calls.cusim_report(&now);
#define STAYED(member) (now.member == open_before.member)
    bool clean = STAYED(contexts) && STAYED(streams) && STAYED(events) && STAYED(allocations) &&
                 STAYED(handles) && STAYED(reservations) && STAYED(mappings) &&
                 STAYED(registrations) && STAYED(host_allocations) && STAYED(problems);
#undef STAYED
    if (clean) {
        return NULL;
    }
#define MORE(member) ((long)now.member - (long)open_before.member)
    (void)snprintf(text, sizeof text,
                   "left on the device: %ld contexts, %ld streams, %ld events, %ld allocations, "
                   "%ld handles, %ld ranges, %ld mappings, %ld locked pieces; %ld problems (%s)",
                   MORE(contexts), MORE(streams), MORE(events), MORE(allocations), MORE(handles),
                   MORE(reservations), MORE(mappings), MORE(registrations), MORE(problems),
                   now.problems == open_before.problems ? "" : calls.cusim_last_problem());
#undef MORE
    return text;
}

static bool device_is_local(void) { return !device_is_remote(); }

const char *device_unfit(const char *subject) {
    static const struct {
        const char *subject;
        bool (*fits)(void);
        const char *reason;
    } only[] = {
        {"cpu", device_is_local, "about the cpu backend itself"},
        {"fork", device_is_local, "a forked child cannot use such a device"},
        {"cuda", device_is_cuda, "needs a CUDA device, or its simulation: SK_TEST_DEVICE=cuda"},
        {"ascend", device_is_ascend, "needs a simulated NPU: SK_TEST_DEVICE=ascend"},
        {"gone", device_is_remote, "needs a simulated device: SK_TEST_DEVICE=cuda or ascend"},
        {"remote", device_is_remote, "needs a device that the host cannot touch: SK_TEST_DEVICE"},
        {"wait", device_is_remote, "needs a simulated device: SK_TEST_DEVICE=cuda or ascend"},
    };
    const char *alone = strstr(subject, "_alone");
    if (alone != NULL && getenv("SK_TEST_ALONE") == NULL) {
        return "run by other tests, in processes of their own";
    }
    for (size_t i = 0; i < sizeof only / sizeof only[0]; i++) {
        if (strcmp(only[i].subject, subject) == 0 && !only[i].fits()) {
            return only[i].reason;
        }
    }
    return NULL;
}
