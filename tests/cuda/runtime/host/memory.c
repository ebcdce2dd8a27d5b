/* memory.c - the virtual GPU's host has as much memory as it says, and gives none of it before it
 * is touched.
 *
 * Preloaded on the virtual GPU only, where neither the device's memory nor the host's copies of it
 * are ever touched: a program can have hundreds of GiB of them. Whoever sizes its copies by the
 * machine's memory, or has pages made in advance, would see or fill the machine that this runs on.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "driver/settings.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

int sysinfo(struct sysinfo *out) {
    int result = (int)syscall(SYS_sysinfo, out);
    if (result == 0) {
        out->mem_unit = 4096; /* of all the numbers, which fit into any type then */
        out->totalram = sim_setting_number(SIM_SET_HOST_MEMORY, 0) / out->mem_unit;
        out->freeram = out->totalram;
        out->sharedram = out->bufferram = out->totalswap = out->freeswap = 0;
        out->totalhigh = out->freehigh = 0;
    }
    return result;
}

/* A control group's limit is this machine's. */
FILE *fopen(const char *path, const char *mode) {
    static FILE *(*real)(const char *, const char *);
    if (strcmp(path, "/proc/self/cgroup") == 0) {
        errno = ENOENT;
        return NULL;
    }
    if (real == NULL) {
        real = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, "fopen");
    }
    return real(path, mode);
}

int madvise(void *address, size_t nbytes, int advice) {
    if (advice == MADV_POPULATE_READ || advice == MADV_POPULATE_WRITE) {
        return 0;
    }
    return (int)syscall(SYS_madvise, address, nbytes, advice);
}
