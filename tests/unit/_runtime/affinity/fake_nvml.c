/* fake_nvml.c - NVIDIA's management library, as far as swapkit asks it, with one GPU. */
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_FOUND = 6 };

static int initialized;
static const char gpu;

int nvmlInit_v2(void) {
    initialized++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    initialized--;
    return SUCCESS;
}

int fake_initialized(void) { return initialized; }

static int find(int found, const void **out) {
    if (initialized == 0) {
        return UNINITIALIZED;
    }
    *out = found ? &gpu : NULL;
    return found ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, const void **out) {
    return find(strcmp(address, "0001:9d:02.0") == 0, out);
}

int nvmlDeviceGetCpuAffinity(const void *device, unsigned nwords, unsigned long *words) {
    (void)device;
    memset(words, 0, nwords * sizeof *words);
    words[0] = 0xf0;
    words[nwords - 1] = 1UL << 63U;
    return SUCCESS;
}
