/* test_ascend.c - the ascend backend's own promises: opening, pages, padding, errors, the thread's
 * device, events. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ascend_device.h"
#include "backend/backend.h"
#include "cuda_device.h"
#include "sched_fixture.h"

enum { SIZE = 256 * KIB, OVER_READ = 32 };

static void need_two_devices(void) {
    int32_t count = 0;
    CHECK_OK(sk_ascend_device_count(&count));
    if (count < 2) {
        test_skip("there is only one device");
    }
}

static cusim_open report(void) {
    cusim_open open;
    cusim()->cusim_report(&open);
    return open;
}

static void fail_next(const char *function, unsigned nth, int error) {
    CHECK(acl()->aclsim_fail(function, nth, error));
}

static sk_backend *open_with(sk_ascend_params params) {
    sk_backend *backend = NULL;
    (void)acl();
    CHECK_OK(sk_backend_ascend(&params, &backend));
    return backend;
}

/* ---- opening --------------------------------------------------------------------------------- */

SK_TEST(ascend, test_open_when_arguments_wrong_then_invalid) {
    sk_ascend_params params = {0};
    sk_backend *backend = NULL;
    int32_t count = 0;
    CHECK_STATUS(SK_INVALID, sk_backend_ascend(NULL, &backend));
    CHECK_STATUS(SK_INVALID, sk_backend_ascend(&params, NULL));
    CHECK_STATUS(SK_INVALID, sk_ascend_device_count(NULL));
    CHECK_OK(sk_ascend_device_count(&count));
    CHECK(count >= 1);
    const int32_t wrong[] = {-1, count, INT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        params.device = wrong[i];
        CHECK_STATUS(SK_INVALID, sk_backend_ascend(&params, &backend));
        CHECK_CONTAINS(sk_error_text(), "there is no device");
    }
    params = (sk_ascend_params){.granule_bytes = KIB};
    CHECK_STATUS(SK_INVALID, sk_backend_ascend(&params, &backend));
    CHECK_CONTAINS(sk_error_text(), "granules of 1024 bytes are not supported");
    params = (sk_ascend_params){.pages = SK_ASCEND_GIANT + 1};
    CHECK_STATUS(SK_INVALID, sk_backend_ascend(&params, &backend));
    CHECK(backend == NULL);
}

SK_TEST(ascend, test_open_when_granule_is_0_then_a_huge_page_or_a_giant_one) {
    static const struct {
        uint32_t pages;
        size_t granule;
    } expected[] = {{SK_ASCEND_HUGE_FIRST, 2 * MIB},
                    {SK_ASCEND_HUGE_ONLY, 2 * MIB},
                    {SK_ASCEND_NORMAL, 2 * MIB},
                    {SK_ASCEND_GIANT, 1024 * MIB}};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        sk_backend *backend = open_with((sk_ascend_params){.pages = expected[i].pages});
        CHECK_EQUAL(expected[i].granule, sk_backend_table(backend)->granule_bytes);
        CHECK_EQUAL(OVER_READ, sk_backend_table(backend)->over_read_bytes);
        CHECK_EQUAL(0, sk_backend_table(backend)->null_stream_is_host);
        sk_backend_close(backend);
    }
}

SK_TEST(ascend, test_open_when_any_call_fails_then_its_name_is_told_and_nothing_is_left) {
    static const char *const functions[] = {"aclrtGetDeviceCount", "aclrtSetDevice",
                                            "aclrtCreateStreamWithConfig",
                                            "aclrtMemGetAllocationGranularity"};
    enum { NO_SUCH_ERROR = 512345 };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        sk_ascend_params params = {0};
        sk_backend *backend = NULL;
        fail_next(functions[i], 1, NO_SUCH_ERROR);
        CHECK_STATUS(SK_BACKEND_FAILED, sk_backend_ascend(&params, &backend));
        CHECK_CONTAINS(sk_error_text(), functions[i]);
        CHECK_CONTAINS(sk_error_text(), "failed: unknown error (512345)");
        CHECK_CONTAINS(sk_error_text(), "told to fail"); /* ACL's own message */
    }
}

SK_TEST(ascend, test_open_when_virtual_memory_is_unsupported_then_whole_segments) {
    fail_next("aclrtMemGetAllocationGranularity", 1, ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    sk_backend *backend = open_with((sk_ascend_params){0});
    CHECK_EQUAL(0, sk_backend_table(backend)->granule_bytes);
    fixture f = {.backend = backend};
    sk_pool_params params = {0};
    CHECK_OK(sk_pool_create(backend, &params, &f.pool));
    void *block = take(&f, 4 * MIB, NULL);
    pattern_write(block, 4 * MIB, 1);
    CHECK(pattern_holds(block, 4 * MIB, 1));
    give(&f, block);
    fixture_close(&f);
}

/* ---- pages and padding ----------------------------------------------------------------------- */

SK_TEST(ascend, test_pages_when_chosen_then_all_memory_is_made_of_them) {
    static const struct {
        uint32_t pages;
        int policy, attribute;
    } expected[] = {
        {SK_ASCEND_HUGE_FIRST, ACL_MEM_MALLOC_HUGE_FIRST, ACL_HBM_MEM_HUGE},
        {SK_ASCEND_HUGE_ONLY, ACL_MEM_MALLOC_HUGE_ONLY, ACL_HBM_MEM_HUGE},
        {SK_ASCEND_NORMAL, ACL_MEM_MALLOC_NORMAL_ONLY, ACL_HBM_MEM_NORMAL},
        {SK_ASCEND_GIANT, ACL_MEM_MALLOC_HUGE1G_ONLY, ACL_HBM_MEM_HUGE1G},
    };
    device_wipe_not();
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        sk_backend *backend = open_with((sk_ascend_params){.pages = expected[i].pages});
        const sk_backend_ops *ops = sk_backend_table(backend);
        void *address = NULL;
        CHECK_OK(ops->memory_alloc(backend->self, SIZE, &address));
        CHECK_EQUAL(expected[i].policy, acl()->aclsim_policy(address));
        CHECK_OK(ops->memory_free(backend->self, address, SIZE));
        CHECK_OK(ops->range_reserve(backend->self, 2 * ops->granule_bytes, &address));
        CHECK_EQUAL(0, (uintptr_t)address % ops->granule_bytes);
        CHECK_OK(ops->range_commit(backend->self, address, ops->granule_bytes));
        CHECK_EQUAL(expected[i].attribute, acl()->aclsim_memory_attribute(address));
        CHECK_OK(ops->range_decommit(backend->self, address, ops->granule_bytes));
        CHECK_OK(ops->range_release(backend->self, address, 2 * ops->granule_bytes));
        sk_backend_close(backend);
    }
}

static void do_nothing(void *const *bytes, void *argument) { (void)bytes, (void)argument; }

/* Let a kernel read a block and what lies behind it. */
static CUresult read_past(void *block, size_t nbytes) {
    cusim_use use = {.address = (uintptr_t)block, .size = nbytes + OVER_READ};
    CHECK_EQUAL(ACL_SUCCESS, acl()->aclrtSetDevice(0));
    CUresult result = cusim()->cusim_run(NULL, do_nothing, NULL, &use, 1);
    if (result == CUDA_SUCCESS) {
        CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuStreamSynchronize(NULL));
    }
    return result;
}

/* A segment of one block, and one that ends where a large segment does. */
SK_TEST(ascend, test_kernel_when_it_reads_past_a_block_then_the_memory_is_there) {
    static const size_t sizes[] = {2 * MIB, 12 * MIB, 20 * MIB};
    for (int whole = 0; whole < 2; whole++) {
        fixture f = {.backend = make_ascend(0, whole == 1)};
        sk_pool_params params = {0};
        CHECK_OK(sk_pool_create(f.backend, &params, &f.pool));
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            void *block = take(&f, sizes[i], NULL);
            CHECK_EQUAL(CUDA_SUCCESS, read_past(block, sizes[i]));
            give(&f, block);
            CHECK_OK(sk_pool_trim(f.pool));
        }
        fixture_close(&f);
    }
}

SK_TEST(ascend, test_kernel_when_the_pool_keeps_no_room_then_the_simulation_notices) {
    fixture f = {.backend = make_ascend(0, true)};
    sk_pool_params params = {0};
    f.backend->ops.over_read_bytes = 0;
    CHECK_OK(sk_pool_create(f.backend, &params, &f.pool));
    void *block = take(&f, 20 * MIB, NULL);
    CHECK_EQUAL(CUDA_ERROR_INVALID_VALUE, read_past(block, 20 * MIB));
    give(&f, block);
    fixture_close(&f);
}

/* ---- errors ---------------------------------------------------------------------------------- */

SK_TEST(ascend, test_error_when_acl_returns_one_then_its_status_and_name_are_told) {
    static const struct {
        int error;
        sk_status status;
        const char *text;
    } expected[] = {
        {ACL_ERROR_RT_MEMORY_ALLOCATION, SK_OUT_OF_DEVICE_MEMORY, "out of memory (207001)"},
        {ACL_ERROR_RT_DEVICE_OOM, SK_OUT_OF_DEVICE_MEMORY, "out of device memory (207018)"},
        {200000, SK_OUT_OF_HOST_MEMORY, "out of host memory (200000)"},
        {ACL_ERROR_RT_FEATURE_NOT_SUPPORT, SK_UNSUPPORTED, "not supported (207000)"},
        {ACL_ERROR_RT_PARAM_INVALID, SK_BACKEND_FAILED, "invalid parameter (107000)"},
        {507899, SK_BACKEND_FAILED, "internal error of the driver (507899)"},
        {512345, SK_BACKEND_FAILED, "unknown error (512345)"},
    };
    sk_backend *backend = make_ascend(0, false);
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        void *address = NULL;
        fail_next("aclrtMallocAlign32", 1, expected[i].error);
        CHECK_STATUS(expected[i].status, backend->ops.memory_alloc(backend->self, MIB, &address));
        CHECK_CONTAINS(sk_error_text(), "ascend backend: aclrtMallocAlign32 failed: ");
        CHECK_CONTAINS(sk_error_text(), expected[i].text);
        CHECK_CONTAINS(sk_error_text(), ": aclrtMallocAlign32: told to fail");
        CHECK(address == NULL);
    }
    sk_backend_close(backend);
}

SK_TEST(ascend, test_alloc_when_the_device_is_full_then_out_of_device_memory) {
    sk_backend *backend = make_ascend(0, false);
    sk_memory_info info = {0};
    CHECK_OK(sk_memory_info_get(backend, &info));
    void *address = NULL;
    CHECK_STATUS(SK_OUT_OF_DEVICE_MEMORY,
                 backend->ops.memory_alloc(backend->self, info.total_bytes + MIB, &address));
    CHECK(address == NULL);
    sk_backend_close(backend);
}

SK_TEST(ascend, test_error_when_it_is_sticky_then_it_says_what_to_do_and_releasing_works) {
    static const int errors[] = {ACL_ERROR_RT_AICORE_EXCEPTION, 507010, 507053};
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        sk_backend *backend = make_ascend(0, false);
        sk_stream *stream = make_stream(backend);
        sk_event *event = NULL;
        void *address = NULL;
        sk_memory_info info;
        CHECK_OK(sk_event_create(backend, &event));
        CHECK_OK(backend->ops.memory_alloc(backend->self, MIB, &address));
        cusim()->cusim_break((CUresult)errors[i]);
        CHECK_STATUS(SK_BACKEND_FAILED, sk_memory_info_get(backend, &info));
        CHECK_CONTAINS(sk_error_text(), "aclrtGetMemInfo failed: ");
        CHECK_CONTAINS(sk_error_text(),
                       "unusable for this process from then on: restart the process");
        CHECK_STATUS(SK_BACKEND_FAILED, sk_stream_sync(backend, stream));
        CHECK_STATUS(SK_BACKEND_FAILED, sk_event_query(backend, event));
        CHECK_OK(backend->ops.memory_free(backend->self, address, MIB));
        CHECK_OK(sk_event_destroy(backend, event));
        CHECK_OK(sk_stream_destroy(backend, stream));
        sk_backend_close(backend);
        cusim()->cusim_break(CUDA_SUCCESS);
    }
}

/* ---- virtual memory -------------------------------------------------------------------------- */

SK_TEST(ascend, test_range_when_it_is_unknown_or_not_committed_then_refused) {
    sk_backend *backend = make_ascend(0, false);
    const sk_backend_ops *ops = sk_backend_table(backend);
    void *address = NULL;
    CHECK_OK(ops->range_reserve(backend->self, 4 * GRANULE, &address));
    char *end = (char *)address + 4 * GRANULE;
    CHECK_STATUS(SK_INVALID, ops->range_commit(backend->self, end - GRANULE, 2 * GRANULE));
    CHECK_CONTAINS(sk_error_text(), "not in a range of addresses");
    CHECK_STATUS(SK_INVALID, ops->range_decommit(backend->self, end, GRANULE));
    CHECK_STATUS(SK_BACKEND_FAILED, ops->range_decommit(backend->self, address, GRANULE));
    CHECK_STATUS(SK_BACKEND_FAILED,
                 ops->range_alias(backend->self, address, end - GRANULE, GRANULE));
    CHECK_OK(ops->range_release(backend->self, address, 4 * GRANULE));
    sk_backend_close(backend);
}

SK_TEST(ascend, test_release_when_it_is_refused_then_the_range_is_still_there) {
    sk_backend *backend = make_ascend(0, false);
    const sk_backend_ops *ops = sk_backend_table(backend);
    void *address = NULL;
    CHECK_OK(ops->range_reserve(backend->self, GRANULE, &address));
    fail_next("aclrtReleaseMemAddress", 1, ACL_ERROR_RT_PARAM_INVALID);
    CHECK_STATUS(SK_BACKEND_FAILED, ops->range_release(backend->self, address, GRANULE));
    CHECK_OK(ops->range_commit(backend->self, address, GRANULE));
    CHECK_OK(ops->range_decommit(backend->self, address, GRANULE));
    CHECK_OK(ops->range_release(backend->self, address, GRANULE));
    sk_backend_close(backend);
}

/* ---- the thread's device --------------------------------------------------------------------- */

/* Every kind of call. */
static void use_all(sk_backend *backend) {
    char bytes[ROUNDING] = {0};
    void *address = NULL;
    sk_event *event = NULL;
    sk_memory_info info;
    sk_stream *stream = make_stream(backend);
    CHECK_OK(sk_memory_info_get(backend, &info));
    CHECK_OK(backend->ops.memory_alloc(backend->self, sizeof bytes, &address));
    CHECK_OK(sk_copy_async(backend, address, bytes, sizeof bytes, SK_HOST_TO_DEVICE, stream));
    CHECK_OK(sk_event_create(backend, &event));
    CHECK_OK(sk_event_record(backend, event, stream));
    CHECK_OK(sk_stream_wait(backend, NULL, event));
    CHECK_OK(sk_stream_sync(backend, NULL));
    CHECK_OK(sk_event_query(backend, event));
    CHECK_OK(sk_event_sync(backend, event));
    CHECK_OK(sk_event_destroy(backend, event));
    CHECK_OK(sk_stream_sync(backend, stream));
    CHECK_OK(backend->ops.memory_free(backend->self, address, sizeof bytes));
    drop_stream(backend, stream);
}

static int32_t device_set(void) {
    int32_t device = -1;
    int error = acl()->aclrtGetDevice(&device);
    CHECK(error == ACL_SUCCESS || error == ACL_ERROR_RT_CONTEXT_NULL);
    return error == ACL_SUCCESS ? device : -1;
}

/* A new thread has set no device. */
static void *use_from_thread(void *argument) {
    sk_backend *const *backends = argument;
    CHECK_EQUAL(-1, device_set());
    use_all(backends[1]);
    CHECK_EQUAL(1, device_set()); /* ACL cannot unset it */
    use_all(backends[0]);
    CHECK_EQUAL(1, device_set());
    return NULL;
}

SK_TEST(ascend, test_calls_when_a_thread_has_another_device_or_none_then_it_gets_its_own_back) {
    need_two_devices();
    sk_backend *backends[2] = {make_ascend(0, false), make_ascend(1, false)};
    for (int32_t device = 0; device < 2; device++) {
        CHECK_EQUAL(ACL_SUCCESS, acl()->aclrtSetDevice(device));
        use_all(backends[0]);
        use_all(backends[1]);
        CHECK_EQUAL(device, device_set());
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, use_from_thread, (void *)backends) == 0);
    (void)pthread_join(thread, NULL);
    sk_backend_close(backends[0]);
    sk_backend_close(backends[1]);
}

SK_TEST(ascend, test_visit_when_calls_follow_then_only_the_first_looks_for_the_device) {
    sk_backend *backend = make_ascend(0, false);
    sk_memory_info info;
    uint64_t before = acl()->aclsim_calls("aclrtGetCurrentContext");
    sk__visit_begin(backend);
    CHECK_OK(sk_memory_info_get(backend, &info));
    CHECK_OK(sk_memory_info_get(backend, &info));
    sk__visit_end(backend);
    CHECK_EQUAL(before + 1, acl()->aclsim_calls("aclrtGetCurrentContext"));
    CHECK_OK(sk_memory_info_get(backend, &info));
    CHECK_EQUAL(before + 2, acl()->aclsim_calls("aclrtGetCurrentContext"));
    sk_backend_close(backend);
}

/* ---- events ---------------------------------------------------------------------------------- */

SK_TEST(ascend, test_event_create_when_a_call_on_the_way_fails_then_nothing_is_left) {
    static const char *const functions[] = {"aclrtCreateEventExWithFlag", "aclrtRecordEvent",
                                            "aclrtSynchronizeEvent"};
    sk_backend *backend = make_ascend(0, false);
    cusim_open before = report();
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        sk_event *event = NULL;
        fail_next(functions[i], 1, ACL_ERROR_RT_PARAM_INVALID);
        CHECK_STATUS(SK_BACKEND_FAILED, sk_event_create(backend, &event));
        CHECK_CONTAINS(sk_error_text(), functions[i]);
        CHECK(event == NULL);
        CHECK_EQUAL(before.events, report().events);
    }
    sk_backend_close(backend);
}

/* ---- locked host memory ---------------------------------------------------------------------- */

SK_TEST(ascend, test_lock_when_the_device_cannot_then_the_scheduler_copies_without) {
    fail_next("aclrtHostRegister", 1, ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    sk_backend *backend = make_ascend(0, false);
    CHECK_EQUAL(0, sk_backend_table(backend)->host_lock_bytes);
    scene s;
    scene_open_over(&s, make_capped(backend, CAPACITY), &(scene_options){0});
    cusim_open before = report();
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel_send(&p);
    CHECK_EQUAL(before.registrations, report().registrations);
    parcel_fetch(&p);
    parcel_drop(&p);
    scene_close(&s);
}
