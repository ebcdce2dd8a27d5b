/* The few functions of the management library that torch calls: without them its expandable
 * segments jump to address 0. There are as many devices as the driver will have (CUSIM_DEVICES),
 * and no processes on them. */
#include <stdio.h>

#include "driver/settings.h"

#define NVML_SUCCESS 0
#define NVML_INVALID_ARGUMENT 2
#define NVML_NOT_SUPPORTED 3
#define NVML_CUDA_VERSION 13000

#pragma GCC visibility push(default)
int nvmlInit(void);
int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetCount_v2(unsigned *count);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device);
int nvmlDeviceGetUUID(void *device, char *text, unsigned nbytes);
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes);
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type);
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info);
int nvmlSystemGetCudaDriverVersion_v2(int *version);
#pragma GCC visibility pop

static char devices[64]; /* only their addresses matter */

int nvmlInit(void) { return NVML_SUCCESS; }

int nvmlInit_v2(void) { return NVML_SUCCESS; }

int nvmlShutdown(void) { return NVML_SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)sim_setting_number(SIM_SET_DEVICES, 1);
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    unsigned count = 0;
    (void)nvmlDeviceGetCount_v2(&count);
    if (index >= count || index >= sizeof(devices)) {
        return NVML_INVALID_ARGUMENT;
    }
    *device = &devices[index];
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    (void)bus;
    return nvmlDeviceGetHandleByIndex_v2(0, device);
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned nbytes) {
    (void)snprintf(text, nbytes, "GPU-00000000-0000-0000-0000-%012x",
                   (unsigned)((char *)device - devices));
    return NVML_SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    (void)device;
    (void)processes;
    *count = 0;
    return NVML_SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) {
    (void)device;
    (void)link;
    (void)type;
    return NVML_NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) {
    (void)device;
    (void)link;
    (void)info;
    return NVML_NOT_SUPPORTED;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = NVML_CUDA_VERSION;
    return NVML_SUCCESS;
}
