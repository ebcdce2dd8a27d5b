/* test_stream.c - streams, events and copies. */
#include <pthread.h>

#include "acl_harness.h"

TEST(stream_of_the_driver_is_the_same) {
    open_acl(NULL);
    aclrtStream stream = stream_acl();
    aclrtStreamStatus status = ACL_STREAM_STATUS_COMPLETE;
    CHECK_EQUAL(1, report().streams);
    CHECK_OK(cusim_delay_stream(stream, LONG_NS));
    CHECK_OK(aclrtStreamQuery(stream, &status));
    CHECK_EQUAL(ACL_STREAM_STATUS_NOT_READY, status);
    CHECK_IS(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, aclrtSynchronizeStreamWithTimeout(stream, 1));
    CHECK_IS(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, aclrtSynchronizeDeviceWithTimeout(0));
    CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, -1));
    CHECK_OK(aclrtSynchronizeDeviceWithTimeout(1000));
    CHECK_OK(aclrtStreamQuery(stream, &status));
    CHECK_EQUAL(ACL_STREAM_STATUS_COMPLETE, status);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_IS(ACL_ERROR_RT_INVALID_HANDLE, aclrtSynchronizeStream(stream));
    close_acl();
}

TEST(stream_does_not_wait_for_the_default_one) {
    open_acl(NULL);
    aclrtStream stream = stream_acl();
    aclrtStreamStatus status = ACL_STREAM_STATUS_COMPLETE;
    CHECK_OK(cusim_delay_stream(NULL, LONG_NS));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtStreamQuery(NULL, &status));
    CHECK_EQUAL(ACL_STREAM_STATUS_NOT_READY, status);
    CHECK_OK(aclrtSynchronizeDevice());
    CHECK_OK(aclrtDestroyStreamForce(stream));
    close_acl();
}

TEST(stream_flags_are_checked) {
    open_acl(NULL);
    aclrtStream stream = NULL;
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtCreateStreamWithConfig(&stream, 8, 0));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtCreateStreamWithConfig(&stream, 0, 0x40));
    CHECK(stream == NULL);
    close_acl();
}

static void note(void *data) { *(int *)data = aclrtSynchronizeDevice(); }

TEST(stream_host_functions_must_not_call_acl) {
    open_acl(NULL);
    aclrtStream stream = stream_acl();
    int result = 0;
    CHECK_OK(aclrtLaunchHostFunc(stream, note, &result));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQUAL(ACL_ERROR_RT_NO_PERMISSION, result);
    CHECK_OK(aclrtDestroyStream(stream));
    close_acl();
}

static int recorded(aclrtEvent event) {
    aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
    CHECK_OK(aclrtQueryEventStatus(event, &status));
    return status;
}

static int status_of(aclrtEvent event) {
    aclrtEventStatus status = ACL_EVENT_STATUS_NOT_READY;
    CHECK_OK(aclrtQueryEvent(event, &status));
    return status;
}

static int waited(aclrtEvent event) {
    aclrtEventWaitStatus status = ACL_EVENT_WAIT_STATUS_NOT_READY;
    CHECK_OK(aclrtQueryEventWaitStatus(event, &status));
    return status;
}

TEST(event_status_has_its_own_numbers_in_each_function) {
    open_acl(NULL);
    aclrtStream stream = stream_acl();
    aclrtEvent event = NULL;
    CHECK_OK(aclrtCreateEventExWithFlag(&event, ACL_EVENT_SYNC));
    CHECK_EQUAL(0, recorded(event)); /* never recorded: not ready, but nothing waits for it */
    CHECK_EQUAL(1, status_of(event));
    CHECK_EQUAL(0, waited(event));
    CHECK_OK(aclrtStreamWaitEvent(stream, event));
    CHECK_OK(aclrtSynchronizeEvent(event));
    CHECK_OK(cusim_delay_stream(stream, LONG_NS));
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_EQUAL(0, recorded(event));
    CHECK_EQUAL(1, status_of(event));
    CHECK_EQUAL(1, waited(event));
    CHECK_IS(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, aclrtSynchronizeEventWithTimeout(event, 1));
    CHECK_OK(aclrtSynchronizeEventWithTimeout(event, -1));
    CHECK_EQUAL(1, recorded(event));
    CHECK_EQUAL(0, status_of(event));
    CHECK_EQUAL(0, waited(event));
    CHECK_IS(ACL_ERROR_RT_INVALID_HANDLE, aclrtRecordEvent(stream, event)); /* the wrong order */
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtCreateEventExWithFlag(&event, 0x1000));
    CHECK_OK(aclrtDestroyEvent(event));
    CHECK_OK(aclrtDestroyStream(stream));
    close_acl();
}

static void *destroy_event(void *event) {
    CHECK_OK(aclrtDestroyEvent(event));
    return NULL;
}

TEST(event_goes_on_a_thread_without_a_device) {
    open_acl(NULL);
    aclrtEvent event = NULL;
    pthread_t thread;
    CHECK_OK(aclrtCreateEventExWithFlag(&event, ACL_EVENT_SYNC));
    CHECK_OK(aclrtRecordEvent(event, NULL));
    CHECK_EQUAL(0, pthread_create(&thread, NULL, destroy_event, event));
    (void)pthread_join(thread, NULL);
    CHECK_IS(ACL_ERROR_RT_INVALID_HANDLE, aclrtDestroyEvent(event));
    close_acl();
}

TEST(event_time_needs_its_flag) {
    open_acl(NULL);
    aclrtEvent events[2];
    aclrtEvent untimed = NULL;
    float milliseconds = -1;
    uint64_t before = 0;
    uint64_t after = 0;
    for (int i = 0; i < 2; i++) {
        CHECK_OK(aclrtCreateEventExWithFlag(&events[i], ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE));
    }
    CHECK_OK(aclrtCreateEventExWithFlag(&untimed, ACL_EVENT_SYNC));
    CHECK_IS(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, aclrtEventGetTimestamp(untimed, &before));
    CHECK_OK(aclrtRecordEvent(events[0], NULL));
    CHECK_OK(cusim_delay_stream(NULL, MS_IN_NS));
    CHECK_OK(aclrtRecordEvent(events[1], NULL));
    CHECK_OK(aclrtRecordEvent(untimed, NULL));
    CHECK_OK(aclrtSynchronizeStream(NULL));
    CHECK_OK(aclrtEventElapsedTime(&milliseconds, events[0], events[1]));
    CHECK(milliseconds >= 1);
    CHECK_OK(aclrtEventGetTimestamp(events[0], &before));
    CHECK_OK(aclrtEventGetTimestamp(events[1], &after));
    CHECK(after >= before + 1000);
    CHECK_IS(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
             aclrtEventElapsedTime(&milliseconds, events[0], untimed));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(aclrtDestroyEvent(events[i]));
    }
    CHECK_OK(aclrtDestroyEvent(untimed));
    close_acl();
}

TEST(copy_checks_room_and_kinds) {
    open_acl(NULL);
    char host[64] = "bytes";
    char back[64] = "";
    char *device = alloc_acl(2 * sizeof host);
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID,
             aclrtMemcpy(device, 63, host, 64, ACL_MEMCPY_HOST_TO_DEVICE));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID,
             aclrtMemcpyAsync(device, 63, host, 64, ACL_MEMCPY_HOST_TO_DEVICE, NULL));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtMemset(device, 63, 0, 64));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID,
             aclrtMemcpy(device, 64, host, 64, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID,
             aclrtMemcpy(back, 64, host, 64, ACL_MEMCPY_HOST_TO_DEVICE));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID,
             aclrtMemcpy(device, 64, host, 64, ACL_MEMCPY_HOST_TO_HOST));
    CHECK_IS(ACL_ERROR_RT_PARAM_INVALID, aclrtMemcpy(device, 64, host, 64, (aclrtMemcpyKind)99));
    CHECK_OK(aclrtMemcpy(device, 64, host, 64, ACL_MEMCPY_HOST_TO_DEVICE));
    CHECK_OK(aclrtMemcpy(device + 64, 64, device, 64, ACL_MEMCPY_DEVICE_TO_DEVICE));
    CHECK_OK(aclrtMemcpy(back, 64, device + 64, 64, ACL_MEMCPY_DEFAULT));
    CHECK(memcmp(host, back, 64) == 0);
    CHECK_OK(aclrtMemcpy(back, 64, device, 0, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK_OK(aclrtMemset(back, 64, 3, 64)); /* of the host, too */
    CHECK_EQUAL(3, back[63]);
    CHECK_OK(aclrtFree(device));
    close_acl();
}

TEST(copy_is_over_when_the_blocking_call_returns) {
    open_acl(NULL);
    unsigned char *device = alloc_acl(MIB);
    unsigned char *host = calloc(1, MIB);
    CHECK_OK(cusim_delay_stream(NULL, 20 * MS_IN_NS));
    CHECK_OK(aclrtMemcpy(device, MIB, host, MIB, ACL_MEMCPY_HOST_TO_DEVICE));
    CHECK(all_bytes(cusim_shadow((CUdeviceptr)(uintptr_t)device, MIB), 0, MIB));
    free(host);
    CHECK_OK(aclrtFree(device));
    close_acl();
}
