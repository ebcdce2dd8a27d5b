/* cpu_memory.c - host memory as device memory.
 *
 * A range is reserved as inaccessible address space. A commit makes granules readable and writable;
 * a decommit returns their pages to the kernel and makes them inaccessible again. So the hardware
 * enforces that no page outside the committed bytes can ever be resident, huge pages included: the
 * kernel only builds one inside a range that is writable throughout. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "backend/cpu.h"

enum {
    /* For commit and decommit, if pages are not larger: holes between small tensors can move, too.
     * The pool commits more at once while there is room. */
    GRANULE_BYTES = 4 * 1024,
    PATH_BYTES = 512,
    LINE_BYTES = 512,
    /* Of moved memory: the kernel keeps each piece separate, and a process can have 65530 of them
     * (vm.max_map_count). */
    MOST_PIECES = 8192,
    DECIMAL = 10,
    NODE_BITS = 64, /* of sk_cpu_params.numa_nodes */
    /* The kernel's values; its headers may be older, and libnuma's may be missing. */
    MPOL_PREFERRED = 1,
    MPOL_PREFERRED_MANY = 5, /* Linux 5.15 */
};
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4 /* Linux 5.7 */
#endif

/* ---- available memory ------------------------------------------------------------------------ */

/* Return the number in a control group's file; `otherwise` if there is none or it says "max". */
static size_t cgroup_number(const char *directory, const char *file, size_t otherwise) {
    char path[PATH_BYTES];
    char line[LINE_BYTES];
    (void)snprintf(path, sizeof path, "%s/%s", directory, file);
    FILE *stream = fopen(path, "re");
    if (stream == NULL) {
        return otherwise;
    }
    const char *text = fgets(line, sizeof line, stream);
    (void)fclose(stream);
    char *end = line;
    unsigned long long number = text != NULL ? strtoull(line, &end, DECIMAL) : 0;
    return end != line ? (size_t)number : otherwise;
}

/* Apply the limit of one control group directory and of all its parents. */
static void cgroup_apply(char *directory, size_t root_length, const char *limit_file,
                         const char *usage_file, sk_memory_info *info) {
    for (;;) {
        size_t limit = cgroup_number(directory, limit_file, SIZE_MAX);
        size_t usage = cgroup_number(directory, usage_file, 0);
        info->total_bytes = sk__min(info->total_bytes, limit);
        info->free_bytes = sk__min(info->free_bytes, limit > usage ? limit - usage : 0);
        char *slash = strrchr(directory, '/');
        if (slash == NULL || (size_t)(slash - directory) < root_length) {
            return;
        }
        *slash = '\0';
    }
}

/* Apply a line of /proc/self/cgroup: "0::/path" (version 2) or "4:memory:/path" (version 1). */
static void cgroup_line_apply(char *line, const char *root, sk_memory_info *info) {
    char *newline = strchr(line, '\n');
    if (newline != NULL) {
        *newline = '\0';
    }
    const char *controllers = strchr(line, ':');
    const char *path = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
    bool second = strncmp(line, "0::", 3) == 0;
    if (path == NULL || (!second && strncmp(controllers, ":memory:", 8) != 0)) {
        return;
    }
    const char *below = second ? "" : "/memory";
    char directory[PATH_BYTES];
    (void)snprintf(directory, sizeof directory, "%s%s%s", root, below, path + 1);
    cgroup_apply(directory, strlen(root) + strlen(below),
                 second ? "memory.max" : "memory.limit_in_bytes",
                 second ? "memory.current" : "memory.usage_in_bytes", info);
}

void sk__cpu_groups_apply(const char *list, const char *root, sk_memory_info *info) {
    FILE *stream = fopen(list, "re");
    if (stream == NULL) {
        return;
    }
    char line[LINE_BYTES];
    while (fgets(line, sizeof line, stream) != NULL) {
        cgroup_line_apply(line, root, info);
    }
    (void)fclose(stream);
}

sk_status sk__cpu_machine_memory(sk_memory_info *out) {
    struct sysinfo machine;
    if (sysinfo(&machine) != 0) {
        return sk__fail(SK_BACKEND_FAILED, "cpu backend: sysinfo failed: %s", strerror(errno));
    }
    sk_memory_info info = {
        .free_bytes = (size_t)(machine.freeram + machine.bufferram) * machine.mem_unit,
        .total_bytes = (size_t)machine.totalram * machine.mem_unit,
    };
    sk__cpu_groups_apply("/proc/self/cgroup", "/sys/fs/cgroup", &info);
    *out = info;
    return SK_OK;
}

sk_status sk__cpu_memory_info(void *self, sk_memory_info *out) {
    sk__cpu *cpu = self;
    sk__lock(&cpu->lock);
    out->total_bytes = cpu->params.capacity_bytes;
    out->free_bytes = out->total_bytes - cpu->used_bytes;
    sk__unlock(&cpu->lock);
    return SK_OK;
}

/* ---- capacity -------------------------------------------------------------------------------- */

static sk_status capacity_claim(sk__cpu *cpu, size_t nbytes) {
    sk__lock(&cpu->lock);
    size_t free_bytes = cpu->params.capacity_bytes - cpu->used_bytes;
    if (nbytes <= free_bytes) {
        cpu->used_bytes += nbytes;
    }
    sk__unlock(&cpu->lock);
    if (nbytes > free_bytes) {
        return sk__fail(SK_OUT_OF_DEVICE_MEMORY,
                        "cpu backend: %zu bytes requested, %zu of %zu are free", nbytes, free_bytes,
                        cpu->params.capacity_bytes);
    }
    return SK_OK;
}

static void capacity_return(sk__cpu *cpu, size_t nbytes) {
    sk__lock(&cpu->lock);
    sk_assert(nbytes <= cpu->used_bytes);
    cpu->used_bytes -= nbytes;
    sk__unlock(&cpu->lock);
}

static sk_status map_failed(const char *what, size_t nbytes) {
    sk_status status = errno == ENOMEM ? SK_OUT_OF_DEVICE_MEMORY : SK_BACKEND_FAILED;
    const char *hint = errno == ENOMEM ? " (or vm.max_map_count mappings are in use)" : "";
    return sk__fail(status, "cpu backend: %s of %zu bytes failed: %s%s", what, nbytes,
                    strerror(errno), hint);
}

/* ---- whole segments -------------------------------------------------------------------------- */

/* Huge pages make first touches several times cheaper. A hint: all works without them. */
static void huge_pages_advise(void *address, size_t nbytes) {
    (void)madvise(address, nbytes, MADV_HUGEPAGE);
}

/* Prefer memory of the requested nodes. A hint: it has no effect if a kernel or a control group
 * does not let us choose, or if a node does not exist; when nodes are full, others are used. */
static void nodes_prefer(const sk__cpu *cpu, void *address, size_t nbytes) {
    static const unsigned long policies[] = {MPOL_PREFERRED_MANY, MPOL_PREFERRED};
    const uint64_t nodes = cpu->params.numa_nodes;
    long refused = nodes == 0 ? 0 : -1;
    for (size_t i = 0; refused != 0 && i < sizeof policies / sizeof policies[0]; i++) {
        refused = syscall(SYS_mbind, address, nbytes, policies[i], &nodes, NODE_BITS + 1, 0);
    }
}

/* Touch every page now, if requested. SK_OUT_OF_DEVICE_MEMORY: the machine has too few pages. On
 * any other error, for example of an older kernel, the pages come at the first touch. */
static sk_status pages_populate(const sk__cpu *cpu, void *address, size_t nbytes) {
    if (cpu->params.populate && madvise(address, nbytes, MADV_POPULATE_WRITE) != 0 &&
        errno == ENOMEM) {
        return map_failed("populating", nbytes);
    }
    return SK_OK;
}

sk_status sk__cpu_memory_alloc(void *self, size_t nbytes, void **out) {
    sk_status status = capacity_claim(self, nbytes);
    if (status != SK_OK) {
        return status;
    }
    void *address = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
        capacity_return(self, nbytes);
        return map_failed("mmap", nbytes);
    }
    huge_pages_advise(address, nbytes);
    nodes_prefer(self, address, nbytes);
    status = pages_populate(self, address, nbytes);
    if (status != SK_OK) {
        (void)munmap(address, nbytes);
        capacity_return(self, nbytes);
        return status;
    }
    *out = address;
    return SK_OK;
}

sk_status sk__cpu_memory_free(void *self, void *address, size_t nbytes) {
    if (munmap(address, nbytes) != 0) {
        return map_failed("munmap", nbytes);
    }
    capacity_return(self, nbytes);
    return SK_OK;
}

/* ---- virtual memory -------------------------------------------------------------------------- */

size_t sk__cpu_granule_bytes(void) {
    long page = sysconf(_SC_PAGESIZE);
    return sk__max(GRANULE_BYTES, page > 0 ? (size_t)page : 0);
}

sk_status sk__cpu_range_reserve(void *self, size_t nbytes, void **out) {
    /* Map more than requested, so that an aligned part can be cut out. */
    size_t mapped = nbytes + SK__CPU_RANGE_ALIGNMENT;
    char *start = mmap(NULL, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        return map_failed("reserving a range", nbytes);
    }
    char *address = (char *)sk__round_up((uintptr_t)start, SK__CPU_RANGE_ALIGNMENT);
    size_t before = (size_t)(address - start);
    if (before > 0) {
        (void)munmap(start, before);
    }
    (void)munmap(address + nbytes, mapped - before - nbytes);
    huge_pages_advise(address, nbytes);
    nodes_prefer(self, address, nbytes);
    *out = address;
    return SK_OK;
}

sk_status sk__cpu_range_release(void *self, void *address, size_t nbytes) {
    (void)self;
    return munmap(address, nbytes) == 0 ? SK_OK : map_failed("releasing a range", nbytes);
}

sk_status sk__cpu_range_commit(void *self, void *address, size_t nbytes) {
    sk_status status = capacity_claim(self, nbytes);
    if (status != SK_OK) {
        return status;
    }
    if (mprotect(address, nbytes, PROT_READ | PROT_WRITE) != 0) {
        status = map_failed("mprotect", nbytes);
    } else {
        status = pages_populate(self, address, nbytes);
    }
    if (status != SK_OK) {
        (void)mprotect(address, nbytes, PROT_NONE); /* a part may have changed */
        (void)madvise(address, nbytes, MADV_DONTNEED);
        capacity_return(self, nbytes);
    }
    return status;
}

sk_status sk__cpu_range_decommit(void *self, void *address, size_t nbytes) {
    /* Inaccessible first: if the pages were dropped first, a stray write could bring one back.
     * ENOMEM: the process has no mappings left to cut (vm.max_map_count); drop the pages anyway. */
    if (mprotect(address, nbytes, PROT_NONE) != 0 && errno != ENOMEM) {
        sk_status status = map_failed("mprotect", nbytes);
        (void)mprotect(address, nbytes, PROT_READ | PROT_WRITE); /* it may have changed a part */
        return status;
    }
    if (madvise(address, nbytes, MADV_DONTNEED) != 0) {
        sk_status status = map_failed("madvise", nbytes);
        (void)mprotect(address, nbytes, PROT_READ | PROT_WRITE);
        return status;
    }
    capacity_return(self, nbytes);
    return SK_OK;
}

/* Reset addresses that lost their pages to the state after `sk__cpu_range_reserve`, so that memory
 * that comes to lie there later is one piece with its neighbours again. */
static void addresses_renew(const sk__cpu *cpu, void *address, size_t nbytes) {
    if (nbytes == 0) {
        return;
    }
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(address, nbytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) {
        (void)mprotect(address, nbytes, PROT_NONE); /* the old mappings serve as well */
        return;
    }
    huge_pages_advise(address, nbytes);
    nodes_prefer(cpu, address, nbytes);
}

/* Move pages to other addresses, up to the first refusal; return the moved bytes. The pages are
 * neither cleared nor touched again, and no other thread's mapping can take their old addresses.
 * The kernel only moves a single piece; its refusal of more shows where the next piece ends. */
static size_t pages_move(char *from, char *to, size_t nbytes) {
    const size_t granule = sk__cpu_granule_bytes();
    const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    size_t done = 0;
    size_t piece = nbytes;
    while (done < nbytes && piece > 0) {
        if (mremap(from + done, piece, piece, flags, to + done) != MAP_FAILED) {
            done += piece;
            piece = sk__min(2 * piece, nbytes - done);
        } else {
            piece = sk__round_down(piece / 2, granule);
        }
    }
    return done;
}

sk_status sk__cpu_range_move(void *self, void *from, void *to, size_t nbytes) {
    sk__cpu *cpu = self;
    sk__lock(&cpu->lock);
    size_t least_bytes = cpu->used_bytes / MOST_PIECES;
    sk__unlock(&cpu->lock);
    if (nbytes < least_bytes) {
        return sk__fail(SK_UNSUPPORTED, "cpu backend: %zu bytes are too few to move", nbytes);
    }
    size_t done = pages_move(from, to, nbytes);
    if (done < nbytes) { /* the pages moved so far are lost: new ones come at the first touch */
        sk_status status = map_failed("mremap", nbytes);
        addresses_renew(cpu, to, done);
        return status;
    }
    addresses_renew(cpu, from, nbytes);
    return SK_OK;
}
