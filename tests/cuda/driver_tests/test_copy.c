/* test_copy.c - copies, fills, pinned memory, and work that outlives its memory. */
#include "harness.h"

TEST(copy_there_and_back) {
    open_driver(NULL);
    CUdeviceptr first = alloc(5000);
    CUdeviceptr second = alloc(5000);
    unsigned char *from = pinned(5000);
    unsigned char to[5000];
    CUstream stream = stream_of(CU_STREAM_NON_BLOCKING);
    memset(from, 3, 5000);
    CHECK_OK(cuMemcpyHtoDAsync_v2(first, from, 5000, stream));
    CHECK_OK(cuMemcpyDtoDAsync_v2(second + 10, first, 4990, stream));
    CHECK_OK(cuMemsetD8Async(second, 7, 10, stream));
    CHECK_OK(cuMemcpyDtoHAsync_v2(to, second, 5000, stream)); /* pageable: waits */
    CHECK(all_bytes(to, 7, 10));
    CHECK(all_bytes(to + 10, 3, 4990));
    CHECK_OK(cuMemcpyAsync((uintptr_t)from, second, 10, stream));
    CHECK_OK(cuStreamSynchronize(stream));
    CHECK(all_bytes(from, 7, 10));
    CHECK_OK(cuMemcpyDtoD_v2(first, second, 100));
    CHECK_OK(cuMemcpyDtoH_v2(to, first, 10));
    CHECK(all_bytes(to, 7, 10));
    CHECK_OK(cuMemFreeHost(from));
    CHECK_OK(cuMemFree_v2(first));
    CHECK_OK(cuMemFree_v2(second));
    CHECK_OK(cuStreamDestroy_v2(stream));
    close_driver();
}

TEST(copy_checks_ranges_and_kinds) {
    open_driver(NULL);
    CUdeviceptr address = alloc(1000);
    CUdeviceptr beside = alloc(1000);
    char host[2000];
    CHECK_EQUAL(address + 1024, beside);
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(address, host, 1001));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(address, host, 2000));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(host, address + 1, 1000));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2((uintptr_t)host, host, 8));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(address, (void *)(uintptr_t)beside, 8));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(NULL, address, 8));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoD_v2(address, (uintptr_t)host, 8));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(host, address, SIZE_MAX));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(address, 0, 1001));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2((uintptr_t)host, 0, 1));
    CHECK_OK(cuMemcpyDtoH_v2(NULL, 0, 0));
    CHECK_OK(cuMemsetD8_v2(0, 0, 0));
    CHECK_OK(cuMemFree_v2(address));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(host, address, 8));
    CHECK_OK(cuMemFree_v2(beside));
    CHECK_EQUAL(0, report().problems);
    close_driver();
}

TEST(copy_of_overlapping_memory_is_a_problem) {
    open_driver(NULL);
    CUdeviceptr address = alloc(1000);
    CHECK_OK(cuMemcpyDtoD_v2(address, address + 10, 900));
    CHECK_EQUAL(1, report().problems);
    CHECK_OK(cuMemFree_v2(address));
    close_driver();
}

TEST(copy_reads_pageable_memory_at_the_call) {
    open_driver(NULL);
    CUdeviceptr address = alloc(64);
    unsigned char from[64];
    unsigned char *fixed = pinned(64);
    memset(from, 1, 64);
    memset(fixed, 1, 64);
    cusim_hold(true);
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, from, 64, NULL));
    memset(from, 2, 64); /* too late */
    cusim_hold(false);
    CHECK_OK(cuCtxSynchronize());
    CHECK(all_bytes(cusim_shadow(address, 64), 1, 64));
    CHECK_OK(cuMemFreeHost(fixed));
    CHECK_OK(cuMemFree_v2(address));
    close_driver();
}

TEST(copy_reads_pinned_memory_when_it_runs) {
    open_driver(NULL);
    CUdeviceptr address = alloc(64);
    unsigned char *from = pinned(64);
    unsigned char *to = pinned(64);
    memset(from, 1, 64);
    cusim_hold(true);
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, from, 64, NULL));
    CHECK_OK(cuMemcpyDtoHAsync_v2(to, address, 64, NULL)); /* returns at once */
    memset(from, 2, 64);
    CHECK(all_bytes(to, CUSIM_FRESH, 64));
    cusim_hold(false);
    CHECK_OK(cuStreamSynchronize(NULL));
    CHECK(all_bytes(to, 2, 64));
    CHECK_OK(cuMemFreeHost(from));
    CHECK_OK(cuMemFreeHost(to));
    CHECK_OK(cuMemFree_v2(address));
    close_driver();
}

static char pages[4 * 4096] __attribute__((aligned(4096)));

TEST(copy_of_partly_registered_memory) {
    open_driver(NULL);
    CUdeviceptr address = alloc(sizeof pages);
    CHECK_OK(cuMemHostRegister_v2(pages, 4096, 0));
    CHECK_OK(cuMemHostRegister_v2(pages + 4096, 4096, CU_MEMHOSTREGISTER_PORTABLE));
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, pages, 4096, NULL));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoDAsync_v2(address, pages, 8192, NULL));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoDAsync_v2(address, pages + 4097, 4096, NULL));
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, pages + 8192, 4096, NULL)); /* not registered at all */
    CHECK_OK(cuMemHostUnregister(pages));
    CHECK_OK(cuMemHostUnregister(pages + 4096));
    CHECK_OK(cuMemFree_v2(address));
    close_driver();
}

TEST(host_registration_errors) {
    open_driver(NULL);
    unsigned char *owned = pinned(8192);
    CUdeviceptr address = alloc(4096);
    CHECK_OK(cuMemHostRegister_v2(pages + 4096, 8192, 0));
    CHECK_EQUAL(8192, report().registration_bytes);
    CHECK_IS(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister_v2(pages, 8192, 0));
    CHECK_IS(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister_v2(owned, 64, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister_v2(NULL, 64, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister_v2(pages, 0, 0));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister_v2(pages, 64, 32));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister_v2((void *)(uintptr_t)address, 4096, 0));
    CHECK_IS(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(pages));
    CHECK_IS(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(pages + 8192));
    CHECK_IS(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(owned));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(pages + 4096));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(owned + 1));
    CHECK_OK(cuMemHostUnregister(pages + 4096));
    CHECK_IS(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(pages + 4096));
    CHECK_OK(cuMemFreeHost(owned));
    CHECK_IS(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(owned));
    CHECK_OK(cuMemFree_v2(address));
    close_driver();
}

TEST(copy_frees_wait_for_work) {
    open_driver(NULL);
    CUdeviceptr address = alloc(4096);
    unsigned char *host = pinned(4096);
    CUstream stream = stream_of(CU_STREAM_NON_BLOCKING);
    CHECK_OK(cusim_delay_stream(stream, 10 * MS_IN_NS));
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, host, 4096, stream));
    CHECK_OK(cuMemFree_v2(address));
    CHECK_OK(cuStreamQuery(stream));
    address = alloc(4096);
    CHECK_OK(cusim_delay_stream(stream, 10 * MS_IN_NS));
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, host, 4096, stream));
    CHECK_OK(cuMemFreeHost(host));
    CHECK_OK(cuStreamQuery(stream));
    CHECK_OK(cuMemHostRegister_v2(pages, 4096, 0));
    CHECK_OK(cusim_delay_stream(stream, 10 * MS_IN_NS));
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, pages, 4096, stream));
    CHECK_OK(cuMemHostUnregister(pages));
    CHECK_OK(cuStreamQuery(stream));
    CHECK_EQUAL(0, report().problems);
    CHECK_OK(cuMemFree_v2(address));
    CHECK_OK(cuStreamDestroy_v2(stream));
    close_driver();
}

TEST(copy_whose_memory_is_unmapped_breaks_the_context) {
    open_driver(NULL);
    mapped_range range = map_range(GRANULE);
    unsigned char *host = pinned(4096);
    CUstream stream = stream_of(CU_STREAM_NON_BLOCKING);
    CUevent event = NULL;
    size_t available = 0;
    size_t total = 0;
    CHECK_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK_OK(cusim_delay_stream(stream, LONG_NS));
    CHECK_OK(cuMemcpyHtoDAsync_v2(range.address, host, 4096, stream));
    CHECK_OK(cuEventRecord(event, stream));
    CHECK_OK(cuMemUnmap(range.address, range.size));
    CHECK_EQUAL(1, report().problems);
    CHECK(strstr(cusim_last_problem(), "cuMemUnmap") != NULL);
    CHECK_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
    CHECK_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamQuery(stream));
    CHECK_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuEventQuery(event));
    CHECK_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuEventSynchronize(event));
    CHECK_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemGetInfo_v2(&available, &total));
    CHECK_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
    CHECK_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemFreeHost(host)); /* yet it is freed */
    CHECK_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuEventDestroy_v2(event));
    CHECK_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamDestroy_v2(stream));
    CHECK_EQUAL(0, report().host_allocations + report().events + report().streams);
    CHECK_OK(cuMemRelease(range.handle));
    CHECK_OK(cuMemAddressFree(range.address, range.size));
    close_driver();
}

TEST(copy_elsewhere_is_no_reason_to_break) {
    open_driver(NULL);
    mapped_range used = map_range(GRANULE);
    mapped_range idle = map_range(GRANULE);
    cusim_hold(true);
    CHECK_OK(cuMemsetD8_v2(used.address, 1, GRANULE));
    CHECK_OK(cuMemUnmap(idle.address, GRANULE));
    CHECK_EQUAL(0, report().problems);
    cusim_hold(false);
    CHECK_OK(cuCtxSynchronize());
    unmap_range(&used);
    CHECK_OK(cuMemRelease(idle.handle));
    CHECK_OK(cuMemAddressFree(idle.address, GRANULE));
    close_driver();
}

static void with_speed(cusim_options *options) {
    options->h2d_bytes_per_s = 100 * MIB;
    options->latency_ns = 2 * MS_IN_NS;
}

TEST(copy_speed_is_shared_by_streams) {
    open_driver(with_speed);
    CUdeviceptr address = alloc(2 * MIB);
    unsigned char *host = pinned(2 * MIB);
    CUstream first = stream_of(CU_STREAM_NON_BLOCKING);
    CUstream second = stream_of(CU_STREAM_NON_BLOCKING);
    uint64_t start = now_ns();
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, host, MIB, first));
    CHECK_OK(cuMemcpyHtoDAsync_v2(address + MIB, host + MIB, MIB, second));
    CHECK_OK(cuCtxSynchronize());
    CHECK(now_ns() - start >= 24 * MS_IN_NS);
    CHECK_OK(cuMemFreeHost(host));
    CHECK_OK(cuMemFree_v2(address));
    CHECK_OK(cuStreamDestroy_v2(first));
    CHECK_OK(cuStreamDestroy_v2(second));
    close_driver();
}

static void with_two(cusim_options *options) { options->devices = 2; }

TEST(copy_between_devices) {
    CUcontext here = open_driver(with_two);
    CUcontext there = NULL;
    CUdeviceptr from = alloc(4096);
    CUdeviceptr to = 0;
    unsigned char bytes[4096];
    CHECK_OK(cuMemsetD8_v2(from, 5, 4096));
    CHECK_OK(cuCtxSynchronize());
    CHECK_OK(cuDevicePrimaryCtxRetain(&there, 1));
    CHECK_OK(cuCtxPushCurrent_v2(there));
    CHECK_EQUAL(1024 * MIB, free_bytes());
    CHECK_OK(cuMemAlloc_v2(&to, 4096));
    CHECK_OK(cuMemcpyPeerAsync(to, there, from, here, 4096, NULL));
    CHECK_IS(CUDA_ERROR_INVALID_CONTEXT, cuMemcpyPeerAsync(to, NULL, from, here, 4096, NULL));
    CHECK_OK(cuMemcpyDtoH_v2(bytes, to, 4096));
    CHECK(all_bytes(bytes, 5, 4096));
    CHECK_OK(cuMemcpyDtoDAsync_v2(to, from, 4096, NULL));
    CHECK_OK(cuCtxSynchronize());
    CHECK_OK(cuMemFree_v2(to));
    CHECK_OK(cuDevicePrimaryCtxRelease_v2(1));
    CHECK_OK(cuCtxPopCurrent_v2(NULL));
    CHECK_OK(cuMemFree_v2(from));
    close_driver();
}
