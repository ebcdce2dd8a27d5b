/* fake_nvml.c - NVIDIA's management library, as far as swapkit asks it, with one GPU. */
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_FOUND = 6, BUS_LEGACY = 16, BUS = 32 };

typedef struct pci_info {
    char bus_legacy[BUS_LEGACY];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[BUS];
} pci_info;

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

int nvmlDeviceGetHandleByUUID(const char *uuid, const void **out) {
    return find(strcmp(uuid, "GPU-12-34") == 0, out);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, const void **out) {
    return find(strcmp(address, "0001:9d:02.0") == 0, out);
}

int nvmlDeviceGetPciInfo_v3(const void *device, pci_info *out) {
    (void)device;
    *out = (pci_info){.domain = 1, .bus = 0x9d, .device = 2, .bus_id = "00000001:9D:02.0"};
    return SUCCESS;
}

int nvmlDeviceGetCpuAffinity(const void *device, unsigned nwords, unsigned long *words) {
    (void)device;
    memset(words, 0, nwords * sizeof *words);
    words[0] = 0xf0;
    words[nwords - 1] = 1UL << 63U;
    return SUCCESS;
}
