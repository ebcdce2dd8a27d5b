/* device.c - what a device says of itself: a GPU of compute capability 9.0, or of the virtual one.
 */
#include <stdio.h>

#include "sim.h"

typedef struct device_attribute {
    int attribute;
    int value;
} device_attribute;

/* By the numbers of CUdevice_attribute. What is not listed is 0: not there. */
static const device_attribute attributes[] = {
    {1, 1024},                                     /* threads per block */
    {2, 1024},                                     /* block size x, y, z */
    {3, 1024},        {4, 64},    {5, 2147483647}, /* grid size x, y, z */
    {6, 65535},       {7, 65535}, {8, 49152},      /* shared memory per block */
    {9, 65536},                                    /* constant memory */
    {10, 32},                                      /* warp size */
    {11, 2147483647},                              /* pitch */
    {12, 65536},                                   /* registers per block */
    {13, 1980000},                                 /* clock, kHz */
    {14, 512},                                     /* texture alignment */
    {15, 1},                                       /* copies overlap kernels */
    {16, 132},                                     /* multiprocessors */
    {19, 1},                                       /* can map host memory */
    {31, 1},                                       /* concurrent kernels */
    {36, 2619000},                                 /* memory clock, kHz */
    {37, 5120},                                    /* memory bus width */
    {38, 52428800},                                /* L2 cache */
    {39, 2048},                                    /* threads per multiprocessor */
    {40, 3},                                       /* copy engines */
    {41, 1},                                       /* unified addresses */
    {78, 1},                                       /* stream priorities */
    {81, 233472},                                  /* shared memory per multiprocessor */
    {82, 65536},                                   /* registers per multiprocessor */
    {90, 0},                                       /* concurrent managed access */
    {91, 1},                                       /* compute preemption */
    {92, 1},      /* registered host memory has the host's address */
    {95, 1},      /* cooperative launch */
    {97, 232448}, /* shared memory per block, on request */
    {99, 1},      /* host memory can be registered */
    {103, 1},     /* handles can be exported as file descriptors */
    {106, 32},    /* blocks per multiprocessor */
};

/* Of capability 8.9, where that differs. */
static const device_attribute of_ada[] = {
    {13, 2520000},  /* clock, kHz */
    {16, 128},      /* multiprocessors */
    {36, 10501000}, /* memory clock, kHz */
    {37, 384},      /* memory bus width */
    {38, 75497472}, /* L2 cache */
    {39, 1536},     /* threads per multiprocessor */
    {40, 2},        /* copy engines */
    {81, 102400},   /* shared memory per multiprocessor */
    {97, 101376},   /* shared memory per block, on request */
    {106, 24},      /* blocks per multiprocessor */
};

static CUresult device_check(const char *name, CUdevice device) {
    if (device < 0 || device >= sim.options.devices) {
        return sim_refuse(CUDA_ERROR_INVALID_DEVICE, "%s: no device %d", name, device);
    }
    return CUDA_SUCCESS;
}

/* Enter, and check the device and where the answer goes. */
static CUresult device_enter(sim_function function, const char *name, CUdevice device,
                             const void *out) {
    CUresult result = sim_enter(function, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = device_check(name, device);
    if (result == CUDA_SUCCESS && out == NULL) {
        result = sim_refuse(CUDA_ERROR_INVALID_VALUE, "%s: NULL", name);
    }
    if (result != CUDA_SUCCESS) {
        (void)sim_leave(NULL, result);
    }
    return result;
}

CUresult cuDeviceGetCount(int *count) {
    CUresult result = sim_enter(SIM_cuDeviceGetCount, NULL);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (count == NULL) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuDeviceGetCount: NULL"));
    }
    *count = sim.options.devices;
    return sim_leave(NULL, CUDA_SUCCESS);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CUresult result = device_enter(SIM_cuDeviceGet, "cuDeviceGet", ordinal, device);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    *device = ordinal;
    return sim_leave(NULL, CUDA_SUCCESS);
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    CUresult result = device_enter(SIM_cuDeviceGetName, "cuDeviceGetName", device, name);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (length <= 0) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE, "cuDeviceGetName: no room"));
    }
    if (sim_is_timed()) {
        sim_rates_name(name, (size_t)length);
    } else {
        (void)snprintf(name, (size_t)length, "Simulated GPU");
    }
    return sim_leave(NULL, CUDA_SUCCESS);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    CUresult result = device_enter(SIM_cuDeviceTotalMem_v2, "cuDeviceTotalMem", device, bytes);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    *bytes = sim.options.capacity;
    return sim_leave(NULL, CUDA_SUCCESS);
}

enum {
    ATTRIBUTE_PCI_BUS = 33,
    ATTRIBUTE_MAJOR = 75,
    ATTRIBUTE_MINOR = 76,
    ATTRIBUTE_VMM = 102,
    ATTRIBUTES = 160, /* numbers from here on are not known */
    HOPPER = 90,
    ADA = 89,
};

/* False: the list does not say. */
static bool listed_value(const device_attribute *list, size_t count, int attribute, int *value) {
    for (size_t i = 0; i < count; i++) {
        if (list[i].attribute == attribute) {
            *value = list[i].value;
            return true;
        }
    }
    return false;
}

static int attribute_value(int attribute, CUdevice device) {
    int capability = sim_is_timed() ? (int)sim_rate_value(SIM_RATE_CAPABILITY) : HOPPER;
    int value = 0;
    switch (attribute) {
    case ATTRIBUTE_PCI_BUS:
        return device + 1;
    case ATTRIBUTE_MAJOR:
        return capability / 10;
    case ATTRIBUTE_MINOR:
        return capability % 10;
    case ATTRIBUTE_VMM:
        return sim.options.vmm != 0;
    default:
        if (capability != ADA ||
            !listed_value(of_ada, sizeof of_ada / sizeof *of_ada, attribute, &value)) {
            (void)listed_value(attributes, sizeof attributes / sizeof *attributes, attribute,
                               &value);
        }
        return value;
    }
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    CUresult result = device_enter(SIM_cuDeviceGetAttribute, "cuDeviceGetAttribute", device, value);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (attribute <= 0 || attribute >= ATTRIBUTES) {
        return sim_leave(NULL, sim_refuse(CUDA_ERROR_INVALID_VALUE,
                                          "cuDeviceGetAttribute: attribute %d", attribute));
    }
    *value = attribute_value(attribute, device);
    return sim_leave(NULL, CUDA_SUCCESS);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    CUresult result = device_enter(SIM_cuDeviceGetUuid_v2, "cuDeviceGetUuid", device, uuid);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    memcpy(uuid->bytes, "simulated device", sizeof uuid->bytes);
    uuid->bytes[sizeof uuid->bytes - 1] = (char)('0' + device);
    return sim_leave(NULL, CUDA_SUCCESS);
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    CUresult result = device_enter(SIM_cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", device, can);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = device_check("cuDeviceCanAccessPeer", peer);
    if (result == CUDA_SUCCESS) {
        *can = device != peer && sim.options.peers;
    }
    return sim_leave(NULL, result);
}
