/* test_open.c - what sk_backend_open() accepts, and what it makes of absent members.
 *
 * The backend here is the least that is legal: whole segments from malloc, streams without work.
 */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

typedef struct least {
    int ndestroyed;
    size_t held_bytes;
} least;

static void least_destroy(void *self) { ((least *)self)->ndestroyed++; }

static sk_status least_memory_info(void *self, sk_memory_info *out) {
    *out = (sk_memory_info){.free_bytes = CAPACITY - ((least *)self)->held_bytes,
                            .total_bytes = CAPACITY};
    return SK_OK;
}

static sk_status least_memory_alloc(void *self, size_t nbytes, void **out) {
    void *address = aligned_alloc(ROUNDING, nbytes);
    if (address == NULL) {
        return SK_OUT_OF_DEVICE_MEMORY;
    }
    ((least *)self)->held_bytes += nbytes;
    *out = address;
    return SK_OK;
}

static sk_status least_memory_free(void *self, void *address, size_t nbytes) {
    ((least *)self)->held_bytes -= nbytes;
    free(address);
    return SK_OK;
}

static sk_status least_stream_create(void *self, sk_stream **out) {
    *out = self;
    return SK_OK;
}

static sk_status least_stream(void *self, sk_stream *stream) {
    (void)self;
    (void)stream;
    return SK_OK;
}

static sk_status least_stream_wait(void *self, sk_stream *stream, sk_event *event) {
    (void)self;
    (void)stream;
    (void)event;
    return SK_OK;
}

static sk_status least_event_create(void *self, sk_event **out) {
    *out = self;
    return SK_OK;
}

static sk_status least_event(void *self, sk_event *event) {
    (void)self;
    (void)event;
    return SK_OK;
}

static sk_status least_event_record(void *self, sk_event *event, sk_stream *stream) {
    (void)self;
    (void)event;
    (void)stream;
    return SK_OK;
}

static sk_status least_copy(void *self, void *to, const void *from, size_t nbytes,
                            sk_copy_kind kind, sk_stream *stream) {
    (void)self;
    (void)kind;
    (void)stream;
    memcpy(to, from, nbytes);
    return SK_OK;
}

static sk_status least_range_reserve(void *self, size_t nbytes, void **out) {
    (void)self;
    (void)nbytes;
    (void)out;
    return SK_OUT_OF_DEVICE_MEMORY;
}

static sk_status least_range(void *self, void *address, size_t nbytes) {
    (void)self;
    (void)address;
    (void)nbytes;
    return SK_OUT_OF_DEVICE_MEMORY;
}

static sk_backend_ops least_ops(void) {
    return (sk_backend_ops){
        .struct_size = sizeof(sk_backend_ops),
        .name = "least",
        .destroy = least_destroy,
        .memory_info = least_memory_info,
        .memory_alloc = least_memory_alloc,
        .memory_free = least_memory_free,
        .stream_create = least_stream_create,
        .stream_destroy = least_stream,
        .stream_sync = least_stream,
        .stream_wait = least_stream_wait,
        .event_create = least_event_create,
        .event_destroy = least_event,
        .event_record = least_event_record,
        .event_query = least_event,
        .event_sync = least_event,
        .copy_async = least_copy,
    };
}

static void check_refused(const sk_backend_ops *ops, const char *member) {
    least self = {0};
    sk_backend *backend = NULL;
    CHECK_STATUS(SK_INVALID, sk_backend_open(ops, &self, &backend));
    CHECK(backend == NULL);
    CHECK_CONTAINS(sk_error_text(), member);
    CHECK_EQUAL(0, self.ndestroyed);
}

SK_TEST(open, test_open_when_least_table_then_pool_works_and_self_is_destroyed_once) {
    least self = {0};
    sk_backend_ops ops = least_ops();
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_open(&ops, &self, &backend));
    sk_pool_params params = {.budget_bytes = 8 * MIB};
    sk_pool *pool = NULL;
    CHECK_OK(sk_pool_create(backend, &params, &pool));
    void *block = NULL;
    CHECK_OK(sk_pool_take(pool, 3 * MIB, NULL, &block));
    pattern_write(block, 3 * MIB, 1);
    CHECK(self.held_bytes >= 3 * MIB && self.held_bytes <= 8 * MIB);
    CHECK(pattern_holds(block, 3 * MIB, 1));
    CHECK_OK(sk_pool_give(pool, block));
    CHECK_OK(sk_pool_check(pool));
    CHECK_OK(sk_pool_destroy(pool));
    CHECK_EQUAL(0, self.held_bytes);
    sk_backend_close(backend);
    CHECK_EQUAL(1, self.ndestroyed);
}

SK_TEST(open, test_open_when_table_changes_afterwards_then_backend_keeps_its_copy) {
    least self = {0};
    sk_backend_ops ops = least_ops();
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_open(&ops, &self, &backend));
    memset(&ops, 0, sizeof ops);
    CHECK_EQUAL(0, device_bytes(backend));
    CHECK_CONTAINS(sk_backend_table(backend)->name, "least");
    sk_backend_close(backend);
}

SK_TEST(open, test_open_when_optional_members_absent_then_they_say_unsupported) {
    least self = {0};
    sk_backend_ops ops = least_ops();
    ops.destroy = NULL;
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_open(&ops, &self, &backend));
    const sk_backend_ops *table = sk_backend_table(backend);
    CHECK_STATUS(SK_UNSUPPORTED, table->stream_call(&self, NULL, NULL, NULL));
    CHECK_STATUS(SK_UNSUPPORTED, table->range_commit(&self, NULL, GRANULE));
    CHECK_STATUS(SK_UNSUPPORTED, table->host_lock(&self, NULL, GRANULE));
    CHECK_STATUS(SK_UNSUPPORTED, table->host_unlock(&self, NULL, GRANULE));
    CHECK_EQUAL(0, table->host_lock_bytes);
    void *address = NULL;
    CHECK_STATUS(SK_UNSUPPORTED, table->range_reserve(&self, GRANULE, &address));
    CHECK_STATUS(SK_UNSUPPORTED, table->range_decommit(&self, NULL, GRANULE));
    CHECK_STATUS(SK_UNSUPPORTED, table->range_release(&self, NULL, GRANULE));
    CHECK_STATUS(SK_UNSUPPORTED, table->range_move(&self, NULL, NULL, GRANULE));
    CHECK_STATUS(SK_UNSUPPORTED, table->range_alias(&self, NULL, NULL, GRANULE));
    sk_backend_close(backend);
    CHECK_EQUAL(0, self.ndestroyed);
}

SK_TEST(open, test_delay_when_inner_has_no_stream_call_then_copies_say_unsupported) {
    least self = {0};
    sk_backend_ops ops = least_ops();
    sk_backend *inner = NULL;
    CHECK_OK(sk_backend_open(&ops, &self, &inner));
    sk_backend *delay = make_delay(inner);
    sk_stream *stream = make_stream(delay);
    char from = 1;
    char to = 0;
    CHECK_STATUS(SK_UNSUPPORTED, sk_copy_async(delay, &to, &from, 1, SK_DEVICE_TO_HOST, stream));
    CHECK_EQUAL(0, to);
    CHECK_OK(sk_copy_async(delay, &to, &from, 1, SK_DEVICE_TO_HOST, NULL)); /* not asynchronous */
    CHECK_EQUAL(1, to);
    drop_stream(delay, stream);
    sk_backend_close(delay);
    CHECK_EQUAL(1, self.ndestroyed);
}

SK_TEST(open, test_open_when_mandatory_member_missing_then_invalid_and_named) {
#define CHECK_MANDATORY(member)                                                                    \
    do {                                                                                           \
        sk_backend_ops ops = least_ops();                                                          \
        ops.member = NULL;                                                                         \
        check_refused(&ops, #member);                                                              \
    } while (0)
    CHECK_MANDATORY(name);
    CHECK_MANDATORY(memory_info);
    CHECK_MANDATORY(stream_create);
    CHECK_MANDATORY(stream_destroy);
    CHECK_MANDATORY(stream_sync);
    CHECK_MANDATORY(stream_wait);
    CHECK_MANDATORY(event_create);
    CHECK_MANDATORY(event_destroy);
    CHECK_MANDATORY(event_record);
    CHECK_MANDATORY(event_query);
    CHECK_MANDATORY(event_sync);
    CHECK_MANDATORY(copy_async);
#undef CHECK_MANDATORY
}

SK_TEST(open, test_open_when_half_of_a_group_then_invalid_and_named) {
    sk_backend_ops no_free = least_ops();
    no_free.memory_free = NULL;
    check_refused(&no_free, "memory_");
    sk_backend_ops no_alloc = least_ops();
    no_alloc.memory_alloc = NULL;
    check_refused(&no_alloc, "memory_");
    sk_backend_ops some_range = least_ops();
    some_range.granule_bytes = GRANULE;
    some_range.range_reserve = least_range_reserve;
    check_refused(&some_range, "range_");
    sk_backend_ops all_but_release = least_ops();
    all_but_release.granule_bytes = GRANULE;
    all_but_release.range_reserve = least_range_reserve;
    all_but_release.range_commit = least_range;
    all_but_release.range_decommit = least_range;
    check_refused(&all_but_release, "range_");
}

static sk_status least_host(void *self, void *address, size_t nbytes) {
    (void)self;
    (void)address;
    (void)nbytes;
    return SK_OK;
}

SK_TEST(open, test_open_when_host_locking_is_incomplete_then_invalid_and_named) {
    sk_backend_ops no_unlock = least_ops();
    no_unlock.host_lock = least_host;
    no_unlock.host_lock_bytes = GRANULE;
    check_refused(&no_unlock, "host_lock and host_unlock");
    sk_backend_ops no_lock = least_ops();
    no_lock.host_unlock = least_host;
    check_refused(&no_lock, "host_lock and host_unlock");
    sk_backend_ops no_size = least_ops();
    no_size.host_lock = least_host;
    no_size.host_unlock = least_host;
    check_refused(&no_size, "host_lock_bytes");
    no_size.host_lock_bytes = GRANULE + 1;
    check_refused(&no_size, "host_lock_bytes");
}

static void least_visit(void *self) { (void)self; }

SK_TEST(open, test_open_when_a_visit_cannot_begin_or_end_then_invalid_and_named) {
    sk_backend_ops no_end = least_ops();
    no_end.visit_begin = least_visit;
    check_refused(&no_end, "visit_begin and visit_end");
    sk_backend_ops no_begin = least_ops();
    no_begin.visit_end = least_visit;
    check_refused(&no_begin, "visit_begin and visit_end");
}

SK_TEST(open, test_open_when_no_memory_group_at_all_then_invalid) {
    sk_backend_ops ops = least_ops();
    ops.memory_alloc = NULL;
    ops.memory_free = NULL;
    check_refused(&ops, "memory_");
}

SK_TEST(open, test_open_when_granule_is_no_power_of_two_then_invalid) {
    sk_backend_ops ops = least_ops();
    ops.range_reserve = least_range_reserve;
    ops.range_release = least_range;
    ops.range_commit = least_range;
    ops.range_decommit = least_range;
    ops.granule_bytes = 0;
    check_refused(&ops, "granule_bytes");
    ops.granule_bytes = GRANULE + 1;
    check_refused(&ops, "granule_bytes");
}

SK_TEST(open, test_open_when_only_virtual_memory_then_whole_segments_are_unsupported) {
    least self = {0};
    sk_backend_ops ops = least_ops();
    ops.memory_alloc = NULL;
    ops.memory_free = NULL;
    ops.range_reserve = least_range_reserve;
    ops.range_release = least_range;
    ops.range_commit = least_range;
    ops.range_decommit = least_range;
    ops.granule_bytes = GRANULE;
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_open(&ops, &self, &backend));
    const sk_backend_ops *table = sk_backend_table(backend);
    void *address = NULL;
    CHECK_STATUS(SK_UNSUPPORTED, table->memory_alloc(&self, MIB, &address));
    CHECK_STATUS(SK_UNSUPPORTED, table->memory_free(&self, address, MIB));
    sk_pool_params params = {.whole_segments = true};
    sk_pool *pool = NULL;
    CHECK_STATUS(SK_UNSUPPORTED, sk_pool_create(backend, &params, &pool));
    CHECK(pool == NULL);
    sk_backend_close(backend);
}

SK_TEST(open, test_open_when_struct_size_wrong_then_invalid) {
    sk_backend_ops ops = least_ops();
    ops.struct_size = 0;
    check_refused(&ops, "struct_size");
    ops.struct_size = sizeof ops + 1;
    check_refused(&ops, "struct_size");
}

SK_TEST(open, test_open_when_arguments_null_then_invalid) {
    least self = {0};
    sk_backend_ops ops = least_ops();
    sk_backend *backend = NULL;
    CHECK_STATUS(SK_INVALID, sk_backend_open(NULL, &self, &backend));
    CHECK_STATUS(SK_INVALID, sk_backend_open(&ops, &self, NULL));
    sk_backend_close(NULL);
}

SK_TEST(open, test_status_name_when_any_code_then_its_own_name) {
#define CHECK_NAME(name, value)                                                                    \
    CHECK(strcmp(#name, sk_status_name(name)) == 0);                                               \
    CHECK_EQUAL(value, name);
    SK_STATUS_LIST(CHECK_NAME)
#undef CHECK_NAME
    enum { NO_SUCH_STATUS = 99 };
    CHECK_CONTAINS(sk_status_name((sk_status)NO_SUCH_STATUS), "unknown");
}

SK_TEST(open, test_close_when_stream_event_and_pool_are_left_then_destroyed_with_the_last) {
    least self = {0};
    sk_backend_ops ops = least_ops();
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_open(&ops, &self, &backend));
    sk_stream *stream = make_stream(backend);
    sk_event *event = NULL;
    CHECK_OK(sk_event_create(backend, &event));
    sk_pool_params params = {0};
    sk_pool *pool = NULL;
    CHECK_OK(sk_pool_create(backend, &params, &pool));
    sk_backend_close(backend);
    CHECK_EQUAL(0, self.ndestroyed);
    void *block = NULL;
    CHECK_OK(sk_pool_take(pool, MIB, stream, &block));
    CHECK_OK(sk_pool_give(pool, block));
    CHECK_OK(sk_pool_destroy(pool));
    CHECK_EQUAL(0, self.ndestroyed);
    CHECK_OK(sk_event_record(backend, event, stream));
    CHECK_OK(sk_event_destroy(backend, event));
    CHECK_EQUAL(0, self.ndestroyed);
    CHECK_OK(sk_stream_destroy(backend, stream));
    CHECK_EQUAL(1, self.ndestroyed);
}

SK_TEST(open, test_close_when_creating_had_failed_then_nothing_is_waited_for) {
    least self = {0};
    sk_backend_ops ops = least_ops();
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_open(&ops, &self, &backend));
    sk_backend *fault = make_fault(backend);
    sk_fault_arm(fault, 1, true, SK_BACKEND_FAILED);
    sk_stream *stream = NULL;
    sk_event *event = NULL;
    sk_pool *pool = NULL;
    sk_pool_params params = {0};
    CHECK_STATUS(SK_BACKEND_FAILED, sk_stream_create(fault, &stream));
    CHECK_STATUS(SK_BACKEND_FAILED, sk_event_create(fault, &event));
    CHECK_STATUS(SK_BACKEND_FAILED, sk_pool_create(fault, &params, &pool));
    sk_backend_close(fault);
    CHECK_EQUAL(1, self.ndestroyed);
}

SK_TEST(open, test_close_when_wrapper_has_a_stream_left_then_both_go_with_it) {
    least self = {0};
    sk_backend_ops ops = least_ops();
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_open(&ops, &self, &backend));
    sk_backend *trace = make_trace(backend, 4);
    sk_stream *stream = make_stream(trace);
    sk_backend_close(trace);
    CHECK_EQUAL(0, self.ndestroyed);
    CHECK_OK(sk_stream_sync(trace, stream));
    CHECK_OK(sk_stream_destroy(trace, stream));
    CHECK_EQUAL(1, self.ndestroyed);
}
