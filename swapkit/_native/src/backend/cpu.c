/* cpu.c - opening and closing the CPU backend. */
#include "backend/cpu.h"

#include <stdlib.h>

static SK_NO_ANALYSIS void cpu_destroy(void *self) { /* there are no other users any more */
    sk__cpu *cpu = self;
    sk__fork_unregister(&cpu->fork_node);
    sk_assert(cpu->streams == NULL);
    (void)pthread_cond_destroy(&cpu->changed);
    sk__mutex_destroy(&cpu->lock);
    if (cpu->locker != NULL) {
        sk__backend_drop(cpu->locker);
    }
    free(cpu);
}

static const sk_backend_ops cpu_ops = {
    .struct_size = sizeof(sk_backend_ops),
    .null_stream_is_host = 1,
    .name = "cpu",
    .destroy = cpu_destroy,
    .memory_info = sk__cpu_memory_info,
    .memory_alloc = sk__cpu_memory_alloc,
    .memory_free = sk__cpu_memory_free,
    .range_reserve = sk__cpu_range_reserve,
    .range_release = sk__cpu_range_release,
    .range_commit = sk__cpu_range_commit,
    .range_decommit = sk__cpu_range_decommit,
    .range_move = sk__cpu_range_move,
};

static sk_status cpu_open(const sk_cpu_params *params, sk__cpu *cpu, sk_backend **out) {
    cpu->params = *params;
    if (cpu->params.capacity_bytes == 0) {
        sk_memory_info machine;
        sk_status status = sk__cpu_machine_memory(&machine);
        if (status != SK_OK) {
            return status;
        }
        cpu->params.capacity_bytes = machine.total_bytes;
    }
    sk_backend_ops ops = cpu_ops;
    sk__cpu_stream_ops(&ops);
    if (params->granule_bytes % sk__cpu_granule_bytes() != 0 ||
        params->granule_bytes > SK__CPU_RANGE_ALIGNMENT) {
        return sk__fail(SK_INVALID, "cpu backend: granules of %zu bytes are not possible",
                        params->granule_bytes);
    }
    ops.granule_bytes = sk__max(params->granule_bytes, sk__cpu_granule_bytes());
    return sk_backend_open(&ops, cpu, out);
}

sk_status sk_backend_cpu(const sk_cpu_params *params, sk_backend **out) {
    if (params == NULL || out == NULL || params->capacity_bytes > SK_MAX_BYTES) {
        return sk__fail(SK_INVALID, "cpu backend: the capacity must be below %zu bytes",
                        SK_MAX_BYTES);
    }
    sk__cpu *cpu = calloc(1, sizeof *cpu);
    if (cpu == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "cpu backend: no host memory for its state");
    }
    sk_status status = cpu_open(params, cpu, out);
    if (status != SK_OK) {
        free(cpu);
        return status;
    }
    sk__mutex_init(&cpu->lock, SK_RANK_BACKEND);
    (void)pthread_cond_init(&cpu->changed, NULL);
    cpu->fork_node =
        (sk__fork_node){.lock = &cpu->lock, .child = sk__cpu_streams_after_fork, .owner = cpu};
    sk__fork_register(&cpu->fork_node);
    return SK_OK;
}
