/* Device code: it is registered and never runs. On the virtual GPU a launch takes time.
 *
 * The functions that begin with two underscores are what the device compiler puts into libraries;
 * no header declares them, and arguments that nobody reads here are left out. A kernel is named by
 * the address of its stub on the host. */
#include "runtime.h"
#include "timed.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HOPPER = 90, MOST_SHARED_BYTES = 227 * 1024 };

struct kernel {
    const void *stub;
    const char *name;
};

struct launch {
    dim3 grid;
    dim3 block;
    size_t shared_bytes;
    cudaStream_t stream;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kernel *kernels;
static size_t nkernels;
static size_t capacity;
static _Thread_local struct launch pushed;

void **__cudaRegisterFatBinary(void *code);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *stub, const char *device_stub,
                            const char *name);
void __cudaRegisterVar(void **handle);
char __cudaInitModule(void **handle);
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream);
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared_bytes, cudaStream_t stream);

void **__cudaRegisterFatBinary(void *code) {
    static void *handle;
    (void)code;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }

void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

void __cudaRegisterFunction(void **handle, const char *stub, const char *device_stub,
                            const char *name) {
    (void)handle;
    (void)device_stub;
    (void)pthread_mutex_lock(&lock);
    if (nkernels == capacity) {
        size_t wanted = capacity == 0 ? 1024 : 2 * capacity;
        struct kernel *larger = realloc(kernels, wanted * sizeof(*kernels));
        if (larger != NULL) {
            kernels = larger;
            capacity = wanted;
        }
    }
    if (nkernels < capacity) {
        kernels[nkernels++] = (struct kernel){.stub = stub, .name = name};
    }
    (void)pthread_mutex_unlock(&lock);
}

void __cudaRegisterVar(void **handle) { (void)handle; }

char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
    pushed = (struct launch){
        .grid = grid, .block = block, .shared_bytes = shared_bytes, .stream = stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes,
                                       void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared_bytes = pushed.shared_bytes;
    *(cudaStream_t *)stream = pushed.stream;
    return cudaSuccess;
}

static const char *name_of(const void *stub) {
    const char *name = "a kernel that was not registered";
    (void)pthread_mutex_lock(&lock);
    for (size_t i = 0; i < nkernels; i++) {
        if (kernels[i].stub == stub) {
            name = kernels[i].name;
        }
    }
    (void)pthread_mutex_unlock(&lock);
    return name;
}

static cudaError_t refuse(const void *stub) {
    (void)fprintf(stderr, "simulated runtime: cannot run device code: %s\n", name_of(stub));
    return rt_done(CUDA_ERROR_NOT_SUPPORTED);
}

/* On the virtual GPU it takes time. */
static cudaError_t launch(const void *stub, cudaStream_t stream) {
    if (!cusimrt_timed()) {
        return refuse(stub);
    }
    cusimrt_launched(stream);
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub) {
    *kernel = (cudaKernel_t)(uintptr_t)stub;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared_bytes, cudaStream_t stream) {
    (void)grid;
    (void)block;
    (void)arguments;
    (void)shared_bytes;
    return launch((const void *)kernel, stream);
}

cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **arguments,
                             size_t shared_bytes, cudaStream_t stream) {
    (void)grid;
    (void)block;
    (void)arguments;
    (void)shared_bytes;
    return launch(stub, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *stub, dim3 grid, dim3 block, void **arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
    (void)grid;
    (void)block;
    (void)arguments;
    (void)shared_bytes;
    return launch(stub, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *stub,
                                void **arguments) {
    (void)arguments;
    return launch(stub, config->stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *stub) {
    (void)stub;
    memset(out, 0, sizeof(*out));
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = HOPPER; /* attention asks for which it was compiled */
    out->maxDynamicSharedSizeBytes = MOST_SHARED_BYTES;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *stub, enum cudaFuncAttribute attribute, int value) {
    (void)stub;
    (void)attribute;
    (void)value;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *stub, int threads,
                                                          size_t shared_bytes) {
    (void)stub;
    (void)threads;
    (void)shared_bytes;
    *out = 1;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *stub,
                                                                   int threads, size_t shared_bytes,
                                                                   unsigned flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(out, stub, threads, shared_bytes);
}

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }

cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
