/* test_wrappers.c - the wrappers for tests: what fails, what is remembered, what is taken over. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

static sk_pool *make_pool(sk_backend *backend) {
    sk_pool_params params = {0};
    sk_pool *pool = NULL;
    CHECK_OK(sk_pool_create(backend, &params, &pool));
    return pool;
}

SK_TEST(wrappers, test_fault_when_armed_once_then_only_the_nth_call_fails) {
    sk_backend *fault = make_fault(make_cpu(CAPACITY));
    sk_memory_info info = {0};
    sk_fault_arm(fault, 2, false, SK_BACKEND_FAILED);
    CHECK_OK(sk_memory_info_get(fault, &info));
    CHECK_STATUS(SK_BACKEND_FAILED, sk_memory_info_get(fault, &info));
    CHECK_OK(sk_memory_info_get(fault, &info));
    CHECK_EQUAL(3, sk_fault_calls(fault));
    sk_backend_close(fault);
}

SK_TEST(wrappers, test_fault_when_armed_forever_then_all_later_calls_fail_until_disarmed) {
    sk_backend *fault = make_fault(make_cpu(CAPACITY));
    sk_memory_info info = {0};
    sk_fault_arm(fault, 2, true, SK_OUT_OF_DEVICE_MEMORY);
    CHECK_OK(sk_memory_info_get(fault, &info));
    for (int i = 0; i < 3; i++) {
        CHECK_STATUS(SK_OUT_OF_DEVICE_MEMORY, sk_memory_info_get(fault, &info));
    }
    sk_fault_arm(fault, 0, false, SK_OK);
    CHECK_OK(sk_memory_info_get(fault, &info));
    CHECK_EQUAL(1, sk_fault_calls(fault));
    sk_backend_close(fault);
}

SK_TEST(wrappers, test_fault_when_call_fails_then_out_is_untouched_and_text_says_so) {
    sk_backend *fault = make_fault(make_cpu(CAPACITY));
    sk_fault_arm(fault, 1, false, SK_BACKEND_FAILED);
    sk_stream *stream = NULL;
    CHECK_STATUS(SK_BACKEND_FAILED, sk_stream_create(fault, &stream));
    CHECK(stream == NULL);
    CHECK_CONTAINS(sk_error_text(), "stream_create");
    sk_backend_close(fault);
}

SK_TEST(wrappers, test_fault_when_forever_then_releasing_calls_still_work) {
    sk_backend *fault = make_fault(make_cpu(CAPACITY));
    sk_stream *stream = make_stream(fault);
    sk_event *event = NULL;
    CHECK_OK(sk_event_create(fault, &event));
    sk_fault_arm(fault, 1, true, SK_BACKEND_FAILED);
    CHECK_OK(sk_event_destroy(fault, event));
    CHECK_OK(sk_stream_destroy(fault, stream));
    sk_backend_close(fault);
}

SK_TEST(wrappers, test_trace_when_calls_made_then_remembered_in_order) {
    sk_backend *trace = make_trace(make_cpu(CAPACITY), KIB);
    sk_stream *stream = make_stream(trace);
    char from[ROUNDING] = {0};
    char to[ROUNDING];
    CHECK_OK(sk_copy_async(trace, to, from, sizeof to, SK_DEVICE_TO_HOST, stream));
    CHECK_OK(sk_stream_sync(trace, stream));
    sk_trace_call calls[8];
    size_t ncalls = sk_trace_read(trace, calls, 8);
    CHECK_EQUAL(3, ncalls);
    CHECK(strcmp(calls[0].name, "stream_create") == 0);
    CHECK(strcmp(calls[1].name, "copy_async") == 0);
    CHECK_EQUAL(ROUNDING, calls[1].nbytes);
    CHECK(strcmp(calls[2].name, "stream_sync") == 0);
    CHECK_EQUAL(0, calls[2].nbytes);
    CHECK_EQUAL(SK_OK, calls[2].status);
    drop_stream(trace, stream);
    sk_backend_close(trace);
}

SK_TEST(wrappers, test_trace_when_more_calls_than_capacity_then_the_last_are_kept) {
    enum { KEPT = 4 };
    sk_backend *trace = make_trace(make_cpu(CAPACITY), KEPT);
    sk_memory_info info = {0};
    sk_stream *stream = make_stream(trace);
    for (int i = 0; i < 2 * KEPT; i++) {
        CHECK_OK(sk_memory_info_get(trace, &info));
    }
    CHECK_OK(sk_stream_sync(trace, stream));
    sk_trace_call calls[2 * KEPT];
    CHECK_EQUAL(KEPT, sk_trace_read(trace, calls, (size_t)2 * KEPT));
    CHECK(strcmp(calls[0].name, "memory_info") == 0);
    CHECK(strcmp(calls[KEPT - 1].name, "stream_sync") == 0);
    drop_stream(trace, stream);
    sk_backend_close(trace);
}

SK_TEST(wrappers, test_trace_when_inner_fails_then_status_is_remembered) {
    sk_backend *fault = make_fault(make_cpu(CAPACITY));
    sk_backend *trace = make_trace(fault, KIB);
    sk_fault_arm(fault, 1, false, SK_OUT_OF_HOST_MEMORY);
    sk_event *event = NULL;
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, sk_event_create(trace, &event));
    sk_trace_call call;
    CHECK_EQUAL(1, sk_trace_read(trace, &call, 1));
    CHECK_EQUAL(SK_OUT_OF_HOST_MEMORY, call.status);
    sk_backend_close(trace);
}

SK_TEST(wrappers, test_trace_when_capacity_impossible_then_invalid_and_inner_stays_ours) {
    sk_backend *cpu = make_cpu(CAPACITY);
    sk_backend *out = NULL;
    CHECK_STATUS(SK_INVALID, sk_backend_trace(cpu, 0, &out));
    CHECK_STATUS(SK_INVALID, sk_backend_trace(cpu, SIZE_MAX, &out));
    CHECK(out == NULL);
    sk_backend_close(cpu);
}

SK_TEST(wrappers, test_controls_when_given_another_backend_then_nothing_happens) {
    sk_backend *cpu = make_cpu(CAPACITY);
    sk_fault_arm(cpu, 1, true, SK_BACKEND_FAILED);
    sk_delay_release(cpu, 1);
    sk_trace_call call;
    CHECK_EQUAL(0, sk_fault_calls(cpu));
    CHECK_EQUAL(0, sk_trace_read(cpu, &call, 1));
    CHECK_EQUAL(0, device_bytes(cpu));
    sk_backend_close(cpu);
}

SK_TEST(wrappers, test_pool_when_traced_then_take_commits_only_what_it_needs) {
    sk_backend *trace = make_trace(make_cpu(CAPACITY), KIB);
    sk_pool *pool = make_pool(trace);
    void *block = NULL;
    CHECK_OK(sk_pool_take(pool, 4 * MIB, NULL, &block));
    sk_trace_call calls[KIB];
    size_t ncalls = sk_trace_read(trace, calls, KIB);
    size_t committed = 0;
    for (size_t i = 0; i < ncalls; i++) {
        committed += strcmp(calls[i].name, "range_commit") == 0 ? calls[i].nbytes : 0;
    }
    CHECK_EQUAL(4 * MIB, committed);
    CHECK_OK(sk_pool_give(pool, block));
    CHECK_OK(sk_pool_destroy(pool));
    sk_backend_close(trace);
}
