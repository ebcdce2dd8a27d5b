/* interpose.c - the forwarding table that all wrappers share. */
#include "instruments/interpose.h"

#define INNER(self) (((sk__interposer *)(self))->inner)

static sk_status enter(void *self, const sk__call *call) {
    sk__interposer *wrapper = self;
    return wrapper->before != NULL ? wrapper->before(wrapper, call) : SK_OK;
}

static sk_status leave(void *self, const sk__call *call, sk_status status) {
    sk__interposer *wrapper = self;
    if (wrapper->after != NULL) {
        wrapper->after(wrapper, call, status);
    }
    return status;
}

/* Call `before`, then the operation unless refused, then `after`. */
#define FORWARD(self, call, expression)                                                            \
    do {                                                                                           \
        sk_status status_ = enter((self), (call));                                                 \
        return leave((self), (call), status_ == SK_OK ? (expression) : status_);                   \
    } while (0)

static void forward_destroy(void *self) {
    sk__interposer *wrapper = self;
    sk_backend *inner = wrapper->inner;
    sk__fork_unregister(&wrapper->fork_node);
    sk__mutex_destroy(&wrapper->lock);
    wrapper->destroy(wrapper);
    sk_backend_close(inner);
}

static sk_status forward_memory_info(void *self, sk_memory_info *out) {
    sk__call call = {.name = "memory_info", .fallible = true};
    FORWARD(self, &call, sk_memory_info_get(INNER(self), out));
}

static sk_status forward_memory_alloc(void *self, size_t nbytes, void **out) {
    sk__call call = {.name = "memory_alloc", .nbytes = nbytes, .fallible = true};
    FORWARD(self, &call, INNER(self)->ops.memory_alloc(INNER(self)->self, nbytes, out));
}

static sk_status forward_memory_free(void *self, void *address, size_t nbytes) {
    sk__call call = {.name = "memory_free", .nbytes = nbytes};
    FORWARD(self, &call, INNER(self)->ops.memory_free(INNER(self)->self, address, nbytes));
}

static sk_status forward_range_reserve(void *self, size_t nbytes, void **out) {
    sk__call call = {.name = "range_reserve", .nbytes = nbytes, .fallible = true};
    FORWARD(self, &call, INNER(self)->ops.range_reserve(INNER(self)->self, nbytes, out));
}

static sk_status forward_range_release(void *self, void *address, size_t nbytes) {
    sk__call call = {.name = "range_release", .nbytes = nbytes};
    FORWARD(self, &call, INNER(self)->ops.range_release(INNER(self)->self, address, nbytes));
}

static sk_status forward_range_commit(void *self, void *address, size_t nbytes) {
    sk__call call = {.name = "range_commit", .nbytes = nbytes, .fallible = true};
    FORWARD(self, &call, INNER(self)->ops.range_commit(INNER(self)->self, address, nbytes));
}

static sk_status forward_range_decommit(void *self, void *address, size_t nbytes) {
    sk__call call = {.name = "range_decommit", .nbytes = nbytes, .fallible = true};
    FORWARD(self, &call, INNER(self)->ops.range_decommit(INNER(self)->self, address, nbytes));
}

static sk_status forward_range_move(void *self, void *from, void *to, size_t nbytes) {
    sk__call call = {.name = "range_move", .nbytes = nbytes, .fallible = true};
    FORWARD(self, &call, INNER(self)->ops.range_move(INNER(self)->self, from, to, nbytes));
}

static sk_status forward_range_alias(void *self, void *from, void *to, size_t nbytes) {
    sk__call call = {.name = "range_alias", .nbytes = nbytes, .fallible = true};
    FORWARD(self, &call, INNER(self)->ops.range_alias(INNER(self)->self, from, to, nbytes));
}

static sk_status forward_stream_create(void *self, sk_stream **out) {
    sk__call call = {.name = "stream_create", .fallible = true};
    FORWARD(self, &call, sk_stream_create(INNER(self), out));
}

static sk_status forward_stream_destroy(void *self, sk_stream *stream) {
    sk__call call = {.name = "stream_destroy", .stream = stream};
    FORWARD(self, &call, sk_stream_destroy(INNER(self), stream));
}

static sk_status forward_stream_sync(void *self, sk_stream *stream) {
    sk__call call = {.name = "stream_sync", .stream = stream, .fallible = true};
    FORWARD(self, &call, sk_stream_sync(INNER(self), stream));
}

static sk_status forward_stream_wait(void *self, sk_stream *stream, sk_event *event) {
    sk__call call = {.name = "stream_wait", .stream = stream, .fallible = true};
    FORWARD(self, &call, sk_stream_wait(INNER(self), stream, event));
}

static sk_status forward_event_create(void *self, sk_event **out) {
    sk__call call = {.name = "event_create", .fallible = true};
    FORWARD(self, &call, sk_event_create(INNER(self), out));
}

static sk_status forward_event_destroy(void *self, sk_event *event) {
    sk__call call = {.name = "event_destroy"};
    FORWARD(self, &call, sk_event_destroy(INNER(self), event));
}

static sk_status forward_event_record(void *self, sk_event *event, sk_stream *stream) {
    sk__call call = {.name = "event_record", .stream = stream, .fallible = true};
    FORWARD(self, &call, sk_event_record(INNER(self), event, stream));
}

static sk_status forward_event_query(void *self, sk_event *event) {
    sk__call call = {.name = "event_query", .fallible = true};
    FORWARD(self, &call, sk_event_query(INNER(self), event));
}

static sk_status forward_event_sync(void *self, sk_event *event) {
    sk__call call = {.name = "event_sync", .fallible = true};
    FORWARD(self, &call, sk_event_sync(INNER(self), event));
}

static sk_status forward_copy_async(void *self, void *to, const void *from, size_t nbytes,
                                    sk_copy_kind kind, sk_stream *stream) {
    sk__call call = {.name = "copy_async", .nbytes = nbytes, .stream = stream, .fallible = true};
    FORWARD(self, &call, sk_copy_async(INNER(self), to, from, nbytes, kind, stream));
}

static sk_status forward_stream_call(void *self, sk_stream *stream, void (*function)(void *),
                                     void *argument) {
    sk__call call = {.name = "stream_call", .stream = stream, .fallible = true};
    FORWARD(self, &call,
            INNER(self)->ops.stream_call(INNER(self)->self, stream, function, argument));
}

static sk_status forward_host_lock(void *self, void *address, size_t nbytes) {
    sk__call call = {.name = "host_lock", .nbytes = nbytes, .fallible = true};
    FORWARD(self, &call, INNER(self)->ops.host_lock(INNER(self)->self, address, nbytes));
}

static sk_status forward_host_unlock(void *self, void *address, size_t nbytes) {
    sk__call call = {.name = "host_unlock", .nbytes = nbytes};
    FORWARD(self, &call, INNER(self)->ops.host_unlock(INNER(self)->self, address, nbytes));
}

static void forward_visit_begin(void *self) { sk__visit_begin(INNER(self)); }

static void forward_visit_end(void *self) { sk__visit_end(INNER(self)); }

sk_status sk__interpose(sk__interposer *self, const char *name, sk_backend **out) {
    const sk_backend_ops ops = {
        .struct_size = sizeof ops,
        .null_stream_is_host = self->inner->ops.null_stream_is_host,
        .name = name,
        .destroy = forward_destroy,
        .memory_info = forward_memory_info,
        .memory_alloc = forward_memory_alloc,
        .memory_free = forward_memory_free,
        .granule_bytes = self->inner->ops.granule_bytes,
        .range_reserve = self->inner->ops.granule_bytes != 0 ? forward_range_reserve : NULL,
        .range_release = self->inner->ops.granule_bytes != 0 ? forward_range_release : NULL,
        .range_commit = self->inner->ops.granule_bytes != 0 ? forward_range_commit : NULL,
        .range_decommit = self->inner->ops.granule_bytes != 0 ? forward_range_decommit : NULL,
        .range_move = self->inner->ops.granule_bytes != 0 ? forward_range_move : NULL,
        .range_alias = self->inner->has_aliases ? forward_range_alias : NULL,
        .stream_create = forward_stream_create,
        .stream_destroy = forward_stream_destroy,
        .stream_sync = forward_stream_sync,
        .stream_wait = forward_stream_wait,
        .event_create = forward_event_create,
        .event_destroy = forward_event_destroy,
        .event_record = forward_event_record,
        .event_query = forward_event_query,
        .event_sync = forward_event_sync,
        .copy_async = forward_copy_async,
        .stream_call = forward_stream_call,
        .host_lock_bytes = self->inner->ops.host_lock_bytes,
        .host_lock = self->inner->ops.host_lock_bytes != 0 ? forward_host_lock : NULL,
        .host_unlock = self->inner->ops.host_lock_bytes != 0 ? forward_host_unlock : NULL,
        .visit_begin = forward_visit_begin,
        .visit_end = forward_visit_end,
        .over_read_bytes = self->inner->ops.over_read_bytes,
    };
    sk_status status = sk_backend_open(&ops, self, out);
    if (status == SK_OK) {
        sk__mutex_init(&self->lock, SK_RANK_WRAPPER);
        self->fork_node = (sk__fork_node){.lock = &self->lock, .child = self->child, .owner = self};
        sk__fork_register(&self->fork_node);
    }
    return status;
}

sk__interposer *sk__interposer_of(sk_backend *backend, const char *name) {
    return backend->ops.name == name ? backend->self : NULL; /* the same pointer, not equal text */
}
