/* backend.c - validation of a table of operations, and calls through the handle.
 *
 * A handle is a validated copy of the table plus `self`; absent optional members become functions
 * that return SK_UNSUPPORTED, so that no caller ever tests for NULL (as in UMF). */
#include "backend/backend.h"

#include <stdlib.h>

static sk_status unsupported_range_reserve(void *self, size_t nbytes, void **out) {
    (void)self, (void)nbytes, (void)out;
    return sk__fail(SK_UNSUPPORTED, "backend: virtual memory is not supported");
}

static sk_status unsupported_range(void *self, void *address, size_t nbytes) {
    (void)self, (void)address, (void)nbytes;
    return sk__fail(SK_UNSUPPORTED, "backend: virtual memory is not supported");
}

static sk_status unsupported_range_move(void *self, void *from, void *to, size_t nbytes) {
    (void)self, (void)from, (void)to, (void)nbytes;
    return sk__fail(SK_UNSUPPORTED, "backend: moving memory to other addresses is not supported");
}

static sk_status unsupported_range_alias(void *self, void *from, void *to, size_t nbytes) {
    (void)self, (void)from, (void)to, (void)nbytes;
    return sk__fail(SK_UNSUPPORTED, "backend: memory at several addresses is not supported");
}

static sk_status unsupported_memory_alloc(void *self, size_t nbytes, void **out) {
    (void)self, (void)nbytes, (void)out;
    return sk__fail(SK_UNSUPPORTED,
                    "backend: whole segments are not supported, only virtual memory");
}

static sk_status unsupported_memory_free(void *self, void *address, size_t nbytes) {
    (void)self, (void)address, (void)nbytes;
    return sk__fail(SK_UNSUPPORTED,
                    "backend: whole segments are not supported, only virtual memory");
}

static sk_status unsupported_stream_call(void *self, sk_stream *stream, void (*call)(void *),
                                         void *argument) {
    (void)self, (void)stream, (void)call, (void)argument;
    return sk__fail(SK_UNSUPPORTED, "backend: host calls in stream order are not supported");
}

static sk_status unsupported_host(void *self, void *address, size_t nbytes) {
    (void)self, (void)address, (void)nbytes;
    return sk__fail(SK_UNSUPPORTED, "backend: locking host memory is not supported");
}

static void do_nothing(void *self) { (void)self; }

/* Return the name of the first mandatory member that is absent, or NULL. */
static const char *missing_member(const sk_backend_ops *ops) {
    const struct {
        const char *name;
        bool present;
    } members[] = {
        {"name", ops->name != NULL},
        {"memory_info", ops->memory_info != NULL},
        {"stream_create", ops->stream_create != NULL},
        {"stream_destroy", ops->stream_destroy != NULL},
        {"stream_sync", ops->stream_sync != NULL},
        {"stream_wait", ops->stream_wait != NULL},
        {"event_create", ops->event_create != NULL},
        {"event_destroy", ops->event_destroy != NULL},
        {"event_record", ops->event_record != NULL},
        {"event_query", ops->event_query != NULL},
        {"event_sync", ops->event_sync != NULL},
        {"copy_async", ops->copy_async != NULL},
    };
    for (size_t i = 0; i < sizeof members / sizeof members[0]; i++) {
        if (!members[i].present) {
            return members[i].name;
        }
    }
    return NULL;
}

enum { MOST_OVER_READ_BYTES = 1 << 20 }; /* more would be a mistake */

static bool is_power_of_two(size_t n) { return n != 0 && (n & (n - 1)) == 0; }

static sk_status pairs_check(const sk_backend_ops *ops) {
    if ((ops->visit_begin == NULL) != (ops->visit_end == NULL)) {
        return sk__fail(SK_INVALID, "backend '%s': visit_begin and visit_end go together",
                        ops->name);
    }
    if ((ops->host_lock == NULL) != (ops->host_unlock == NULL)) {
        return sk__fail(SK_INVALID, "backend '%s': host_lock and host_unlock go together",
                        ops->name);
    }
    if (ops->host_lock != NULL && !is_power_of_two(ops->host_lock_bytes)) {
        return sk__fail(SK_INVALID, "backend '%s': host_lock_bytes must be a power of two, not %zu",
                        ops->name, ops->host_lock_bytes);
    }
    return SK_OK;
}

static sk_status groups_check(const sk_backend_ops *ops) {
    if ((ops->memory_alloc == NULL) != (ops->memory_free == NULL)) {
        return sk__fail(SK_INVALID, "backend '%s': memory_alloc and memory_free go together",
                        ops->name);
    }
    int present = (ops->range_reserve != NULL) + (ops->range_release != NULL) +
                  (ops->range_commit != NULL) + (ops->range_decommit != NULL);
    const int all = 4;
    if (present != 0 && present != all) {
        return sk__fail(SK_INVALID,
                        "backend '%s': range_reserve, range_release, range_commit and "
                        "range_decommit go together",
                        ops->name);
    }
    if (present == all && !is_power_of_two(ops->granule_bytes)) {
        return sk__fail(SK_INVALID, "backend '%s': granule_bytes must be a power of two, not %zu",
                        ops->name, ops->granule_bytes);
    }
    if (present == 0 && ops->memory_alloc == NULL) {
        return sk__fail(SK_INVALID, "backend '%s': memory_alloc or range_reserve is required",
                        ops->name);
    }
    if (ops->over_read_bytes > MOST_OVER_READ_BYTES) {
        return sk__fail(SK_INVALID, "backend '%s': over_read_bytes is at most %d, not %zu",
                        ops->name, MOST_OVER_READ_BYTES, ops->over_read_bytes);
    }
    return pairs_check(ops);
}

static void defaults_fill(sk_backend_ops *ops) {
    if (ops->destroy == NULL) {
        ops->destroy = do_nothing;
    }
    if (ops->memory_alloc == NULL) {
        ops->memory_alloc = unsupported_memory_alloc;
        ops->memory_free = unsupported_memory_free;
    }
    if (ops->range_reserve == NULL) {
        ops->range_reserve = unsupported_range_reserve;
        ops->range_release = unsupported_range;
        ops->range_commit = unsupported_range;
        ops->range_decommit = unsupported_range;
        ops->granule_bytes = 0;
    }
    if (ops->range_move == NULL) {
        ops->range_move = unsupported_range_move;
    }
    if (ops->range_alias == NULL) {
        ops->range_alias = unsupported_range_alias;
    }
    if (ops->stream_call == NULL) {
        ops->stream_call = unsupported_stream_call;
    }
    if (ops->host_lock == NULL) {
        ops->host_lock = unsupported_host;
        ops->host_unlock = unsupported_host;
        ops->host_lock_bytes = 0;
    }
    if (ops->visit_begin == NULL) {
        ops->visit_begin = do_nothing;
        ops->visit_end = do_nothing;
    }
}

sk_status sk_backend_open(const sk_backend_ops *ops, void *self, sk_backend **out) {
    if (ops == NULL || out == NULL) {
        return sk__fail(SK_INVALID, "backend: no table of operations");
    }
    if (ops->struct_size != sizeof *ops) {
        return sk__fail(SK_INVALID, "backend: struct_size is %u, this library expects %zu",
                        (unsigned)ops->struct_size, sizeof *ops);
    }
    const char *missing = missing_member(ops);
    if (missing != NULL) {
        return sk__fail(SK_INVALID, "backend: the table has no %s", missing);
    }
    sk_status status = groups_check(ops);
    if (status != SK_OK) {
        return status;
    }
    sk_backend *backend = malloc(sizeof *backend);
    if (backend == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "backend: no host memory for a handle");
    }
    *backend = (sk_backend){
        .ops = *ops,
        .self = self,
        .has_segments = ops->memory_alloc != NULL,
        .has_aliases = ops->range_reserve != NULL && ops->range_alias != NULL,
        .users = 1,
    };
    defaults_fill(&backend->ops);
    *out = backend;
    return SK_OK;
}

sk_status sk__granule_choose(const char *backend, size_t asked, size_t least, size_t *out) {
    const size_t usual = (size_t)2 * 1024 * 1024; /* the large page of all devices so far */
    size_t granule = asked == 0 ? sk__max(usual, least) : asked;
    if (least == 0 || granule % least != 0 || granule > SK_MAX_BYTES) {
        return sk__fail(SK_INVALID,
                        "%s backend: granules of %zu bytes are not supported: the device maps "
                        "multiples of %zu",
                        backend, granule, least);
    }
    *out = granule;
    return SK_OK;
}

void sk__backend_hold(sk_backend *backend) {
    (void)__atomic_fetch_add(&backend->users, 1, __ATOMIC_RELAXED);
}

void sk__backend_drop(sk_backend *backend) {
    if (__atomic_sub_fetch(&backend->users, 1, __ATOMIC_ACQ_REL) == 0) {
        backend->ops.destroy(backend->self);
        free(backend);
    }
}

void sk_backend_close(sk_backend *backend) {
    if (backend != NULL) {
        sk__backend_drop(backend);
    }
}

const sk_backend_ops *sk_backend_table(const sk_backend *backend) { return &backend->ops; }

sk_status sk_memory_info_get(sk_backend *backend, sk_memory_info *out) {
    return backend->ops.memory_info(backend->self, out);
}

sk_status sk_stream_create(sk_backend *backend, sk_stream **out) {
    sk_status status = backend->ops.stream_create(backend->self, out);
    if (status == SK_OK) {
        sk__backend_hold(backend);
    }
    return status;
}

sk_status sk_stream_destroy(sk_backend *backend, sk_stream *stream) {
    sk_status status = SK_OK;
    if (stream != NULL) {
        status = backend->ops.stream_destroy(backend->self, stream);
        if (status == SK_OK) {
            sk__backend_drop(backend);
        }
    }
    return status;
}

sk_status sk_stream_sync(sk_backend *backend, sk_stream *stream) {
    return backend->ops.stream_sync(backend->self, stream);
}

sk_status sk_stream_wait(sk_backend *backend, sk_stream *stream, sk_event *event) {
    return backend->ops.stream_wait(backend->self, stream, event);
}

sk_status sk_event_create(sk_backend *backend, sk_event **out) {
    sk_status status = backend->ops.event_create(backend->self, out);
    if (status == SK_OK) {
        sk__backend_hold(backend);
    }
    return status;
}

sk_status sk_event_destroy(sk_backend *backend, sk_event *event) {
    sk_status status = SK_OK;
    if (event != NULL) {
        status = backend->ops.event_destroy(backend->self, event);
        if (status == SK_OK) {
            sk__backend_drop(backend);
        }
    }
    return status;
}

sk_status sk_event_record(sk_backend *backend, sk_event *event, sk_stream *stream) {
    return backend->ops.event_record(backend->self, event, stream);
}

sk_status sk_event_query(sk_backend *backend, sk_event *event) {
    return backend->ops.event_query(backend->self, event);
}

sk_status sk_event_sync(sk_backend *backend, sk_event *event) {
    return backend->ops.event_sync(backend->self, event);
}

sk_status sk_copy_async(sk_backend *backend, void *to, const void *from, size_t nbytes,
                        sk_copy_kind kind, sk_stream *stream) {
    return backend->ops.copy_async(backend->self, to, from, nbytes, kind, stream);
}
