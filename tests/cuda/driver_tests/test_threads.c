/* test_threads.c - many threads at once; worth most under ThreadSanitizer. */
#include "harness.h"

#include <pthread.h>

enum { THREADS = 4, ROUNDS = 60, BYTES = 64 << 10 };

static void round_trip(CUstream stream, unsigned char value) {
    CUdeviceptr address = alloc(BYTES);
    mapped_range range = map_range(GRANULE);
    CUevent event = NULL;
    CUstream second = stream_of(CU_STREAM_NON_BLOCKING);
    unsigned char *from = pinned(BYTES);
    unsigned char *to = pinned(BYTES);
    memset(from, value, BYTES);
    memset(to, 0, BYTES);
    CHECK_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, from, BYTES, stream));
    CHECK_OK(cuEventRecord(event, stream));
    CHECK_OK(cuStreamWaitEvent(second, event, 0));
    CHECK_OK(cuMemcpyDtoDAsync_v2(range.address + 7, address, BYTES, second));
    CHECK_OK(cuMemcpyDtoHAsync_v2(to, range.address + 7, BYTES, second));
    CHECK_OK(cuEventRecord(event, second));
    CHECK_OK(cuEventSynchronize(event));
    CHECK(all_bytes(to, value, BYTES));
    CHECK_OK(cuStreamSynchronize(second));
    CHECK_OK(cuStreamDestroy_v2(second));
    CHECK_OK(cuEventDestroy_v2(event));
    unmap_range(&range);
    CHECK_OK(cuMemFree_v2(address));
    CHECK_OK(cuMemFreeHost(from));
    CHECK_OK(cuMemFreeHost(to));
}

static void *work(void *arg) {
    CHECK_OK(cuCtxSetCurrent(arg));
    CUstream stream = stream_of(CU_STREAM_DEFAULT);
    for (int i = 0; i < ROUNDS; i++) {
        round_trip(i % 3 == 0 ? NULL : stream, (unsigned char)(i + 1));
    }
    CHECK_OK(cuStreamDestroy_v2(stream));
    return NULL;
}

TEST(threads_do_not_disturb_each_other) {
    CUcontext context = open_driver(NULL);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        CHECK_EQUAL(0, pthread_create(&threads[i], NULL, work, context));
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK_EQUAL(0, pthread_join(threads[i], NULL));
    }
    CHECK_EQUAL(1024 * MIB, free_bytes());
    CHECK_EQUAL(0, report().problems);
    close_driver();
}
