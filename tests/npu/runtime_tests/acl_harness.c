/* acl_harness.c - see acl_harness.h. */
#include "acl_harness.h"

void with_two_devices(cusim_options *options) { options->devices = 2; }

void open_acl(void (*change)(cusim_options *)) {
    cusim_options options;
    cusim_options_init(&options);
    if (change != NULL) {
        change(&options);
    }
    CHECK(cusim_configure(&options));
    CHECK_OK(aclrtSetDevice(0));
}

void close_acl(void) {
    CHECK_OK(aclrtResetDevice(0));
    aclsim_reset();
}

void *alloc_acl(size_t size) {
    void *address = NULL;
    CHECK_OK(aclrtMallocAlign32(&address, size, ACL_MEM_MALLOC_HUGE_FIRST));
    return address;
}

aclrtStream stream_acl(void) {
    aclrtStream stream = NULL;
    CHECK_OK(
        aclrtCreateStreamWithConfig(&stream, 0, ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC));
    return stream;
}
