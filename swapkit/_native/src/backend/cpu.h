/* cpu.h - the CPU as a device: state shared by its memory half and its stream half. */
#ifndef SWAPKIT_BACKEND_CPU_H
#define SWAPKIT_BACKEND_CPU_H

#include <pthread.h>

#include "backend/backend.h"
#include "base/thread.h"
#include "swapkit_devices.h"

typedef struct sk__cpu {
    sk__mutex lock;
    pthread_cond_t changed; /* an awaited mark was passed, or awaited work is done */
    sk__fork_node fork_node;
    sk_cpu_params params; /* capacity_bytes resolved; never changes */
    size_t used_bytes SK_GUARDED_BY(lock);
    sk_stream *streams SK_GUARDED_BY(lock); /* all live ones */
    sk_backend *locker;                     /* of committed memory: pinned.c; NULL: none */
    size_t locked_bytes;                    /* of one piece that it locks */
} sk__cpu;

/* Memory half: cpu_memory.c. The free memory within the limits of the machine and its groups. */
sk_status sk__cpu_machine_memory(sk_memory_info *out);
/* Apply the limits of the control groups listed in a file such as /proc/self/cgroup, whose
 * directories lie below `root`. */
void sk__cpu_groups_apply(const char *list, const char *root, sk_memory_info *info);
sk_status sk__cpu_memory_info(void *self, sk_memory_info *out);
sk_status sk__cpu_memory_alloc(void *self, size_t nbytes, void **out);
sk_status sk__cpu_memory_free(void *self, void *address, size_t nbytes);
/* The huge page of x86-64 and most AArch64 kernels. */
enum { SK__CPU_RANGE_ALIGNMENT = 2 * 1024 * 1024 };
size_t sk__cpu_granule_bytes(void); /* the least */
sk_status sk__cpu_range_reserve(void *self, size_t nbytes, void **out);
sk_status sk__cpu_range_release(void *self, void *address, size_t nbytes);
sk_status sk__cpu_range_commit(void *self, void *address, size_t nbytes);
sk_status sk__cpu_range_decommit(void *self, void *address, size_t nbytes);
sk_status sk__cpu_range_move(void *self, void *from, void *to, size_t nbytes);

/* Stream half: cpu_stream.c. Fill in its operations. */
void sk__cpu_stream_ops(sk_backend_ops *ops);
/* Repair a forked child: the streams' threads are gone; they start again at the next task. */
void sk__cpu_streams_after_fork(void *self);

#endif
