/* test_timed.c - the virtual GPU: how long things take, and that nothing else happens.
 *
 * What the host computes between two calls is on the clock, too, so times that it has a part in are
 * only bounded. Everything here is over in no time: waits are skipped.
 */
#include "harness.h"

#include <stdatomic.h>

#define S_IN_NS (1000 * MS_IN_NS)
/* What the host may take for a few calls. Its clock is its CPU time, which sanitisers multiply. */
#define CALLS_NS (20 * MS_IN_NS)

static void be_virtual(cusim_options *options) {
    options->timed = 1;
    options->wipe = 0;
    options->capacity = (size_t)16 << 30;
}

/* Round figures: a byte or an operation a nanosecond, and nothing beside it. */
static void open_virtual(void) {
    static const char *const nothing[] = {
        "LINK_LATENCY_NS", "KERNEL_NS",         "KERNEL_LEAST_NS", "LAUNCH_LATENCY_NS",
        "COST_LAUNCH_NS",  "COST_COPY_NS",      "COST_RECORD_NS",  "COST_WAIT_NS",
        "COST_QUERY_NS",   "COST_BLAS_NS",      "COST_MAP_NS",     "COST_MAP_MIB_NS",
        "COST_UNMAP_NS",   "COST_UNMAP_MIB_NS",
    };
    static const char *const one[] = {"GB_PER_S", "LINK_IN", "LINK_OUT", "LINK_PAGEABLE"};
    open_driver(be_virtual);
    for (size_t i = 0; i < sizeof nothing / sizeof nothing[0]; i++) {
        CHECK(cusim_parameter(nothing[i], 0, 1) == 0);
    }
    for (size_t i = 0; i < sizeof one / sizeof one[0]; i++) {
        CHECK(cusim_parameter(one[i], 1, 1) == 1);
    }
    CHECK(cusim_parameter("LINK_SECOND", 0.5, 1) == 0.5);
}

static cusim_times times(void) {
    cusim_times read;
    cusim_times_read(&read);
    return read;
}

static void run_kernel(CUstream stream, uint64_t nanoseconds) {
    CHECK_OK(cusim_launch(
        stream, &(cusim_work){.kind = CUSIM_MEMORY, .bytes = nanoseconds, .name = "kernel"}));
}

static CUevent mark(CUstream stream) {
    CUevent event = NULL;
    CHECK_OK(cuEventCreate(&event, CU_EVENT_DEFAULT));
    CHECK_OK(cuEventRecord(event, stream));
    return event;
}

/* Microseconds between two events, which are destroyed. */
static long long between(CUevent from, CUevent until) {
    float milliseconds = 0;
    CHECK_OK(cuEventSynchronize(until));
    CHECK_OK(cuEventElapsedTime(&milliseconds, from, until));
    CHECK_OK(cuEventDestroy_v2(from));
    CHECK_OK(cuEventDestroy_v2(until));
    return (long long)((double)milliseconds * 1e3 + 0.5);
}

TEST(timed_kernels_run_one_after_the_other) {
    open_virtual();
    CUstream first = stream_of(CU_STREAM_NON_BLOCKING);
    CUstream second = stream_of(CU_STREAM_NON_BLOCKING);
    run_kernel(first, S_IN_NS);
    CUevent from = mark(first);
    run_kernel(second, 2 * S_IN_NS);
    run_kernel(first, 3 * S_IN_NS);
    CHECK_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(first));
    CHECK_EQUAL(5000000, between(from, mark(first)));
    CHECK_OK(cuStreamQuery(second));
    cusim_times read = times();
    CHECK_EQUAL(3, read.kernels);
    CHECK_EQUAL(6 * S_IN_NS, read.compute_busy_ns);
    CHECK_OK(cuStreamDestroy_v2(first));
    CHECK_OK(cuStreamDestroy_v2(second));
    close_driver();
}

TEST(timed_waits_are_skipped) {
    open_virtual();
    uint64_t begin = now_ns();
    uint64_t begin_virtual = cusim_now_ns();
    run_kernel(NULL, 1000 * S_IN_NS);
    CHECK_OK(cuCtxSynchronize());
    CHECK(cusim_now_ns() - begin_virtual >= 1000 * S_IN_NS);
    CHECK(cusim_now_ns() - begin_virtual < 1000 * S_IN_NS + CALLS_NS);
    CHECK(now_ns() - begin < 30 * S_IN_NS);
    cusim_times read = times();
    CHECK_EQUAL(1, read.host_waits);
    CHECK(read.host_wait_ns > 999 * S_IN_NS);
    close_driver();
}

TEST(timed_kernels_take_what_bounds_them) {
    open_virtual();
    CHECK(cusim_parameter("TFLOPS16", 1e-3, 1) > 0); /* one operation a nanosecond */
    CHECK(cusim_parameter("KERNEL_NS", 10e6, 1) > 0);
    CUevent from = mark(NULL);
    run_kernel(NULL, S_IN_NS);
    CUevent moved = mark(NULL);
    cusim_work product = {
        .kind = CUSIM_MATMUL16, .flops = 2e9, .bytes = S_IN_NS, .launches = 2, .name = "product"};
    CHECK_OK(cusim_launch(NULL, &product));
    CUevent computed = mark(NULL);
    CHECK_OK(cuEventSynchronize(computed));
    float milliseconds = 0;
    CHECK_OK(cuEventElapsedTime(&milliseconds, moved, computed));
    CHECK_EQUAL(2020, (long long)milliseconds);
    CHECK_OK(cuEventDestroy_v2(computed));
    CHECK(between(from, moved) >= 1010000);
    close_driver();
}

TEST(timed_streams_wait_for_events_and_the_default_stream) {
    open_virtual();
    CUstream apart = stream_of(CU_STREAM_NON_BLOCKING);
    CUstream blocking = stream_of(CU_STREAM_DEFAULT);
    CUdeviceptr address = alloc(GRANULE);
    unsigned char *host = pinned(GRANULE);
    CHECK(cusim_parameter("LINK_OUT", 2e-3, 1) > 0); /* 2 MiB in a second and a bit */
    run_kernel(blocking, 2 * S_IN_NS);
    CUevent from = mark(blocking);
    CHECK_OK(cuStreamWaitEvent(apart, from, 0));
    CHECK_OK(cuMemcpyDtoHAsync_v2(host, address, GRANULE, apart));
    CUevent until = mark(apart);
    CHECK_IS(CUDA_ERROR_NOT_READY, cuEventQuery(from));
    CHECK_EQUAL(1048576, between(from, until));
    CHECK_OK(cuMemcpyDtoHAsync_v2(host, address, GRANULE, blocking));
    from = mark(blocking);
    CHECK_EQUAL(0, between(from, mark(NULL)));
    CHECK_OK(cuMemFreeHost(host));
    CHECK_OK(cuMemFree_v2(address));
    CHECK_OK(cuStreamDestroy_v2(apart));
    CHECK_OK(cuStreamDestroy_v2(blocking));
    close_driver();
}

TEST(timed_copies_share_the_link) {
    open_virtual();
    size_t size = (size_t)1 << 30;
    CUstream in = stream_of(CU_STREAM_NON_BLOCKING);
    CUstream out = stream_of(CU_STREAM_NON_BLOCKING);
    CUdeviceptr address = alloc(2 * size);
    unsigned char *host = pinned(2 * size); /* never touched */
    run_kernel(out, S_IN_NS);               /* so that both begin together */
    CUevent from = mark(out);
    CHECK_OK(cuStreamWaitEvent(in, from, 0));
    CHECK_OK(cuMemcpyDtoHAsync_v2(host, address, size, out));
    CHECK_OK(cuMemcpyHtoDAsync_v2(address + size, host + size, size, in));
    CUevent until = mark(in);
    CHECK_OK(cuEventSynchronize(until));
    float milliseconds = 0;
    CUevent out_until = mark(out);
    CHECK_OK(cuEventElapsedTime(&milliseconds, from, until));
    CHECK_EQUAL(1610, (long long)milliseconds); /* half of it at half the speed */
    CHECK_OK(cuEventDestroy_v2(until));
    CHECK(between(from, out_until) >= 1073742);
    cusim_times read = times();
    CHECK_EQUAL(size, read.copy_bytes[CUSIM_ENGINE_IN]);
    CHECK_EQUAL(size, read.copy_bytes[CUSIM_ENGINE_OUT]);
    CHECK_OK(cuMemFreeHost(host));
    CHECK_OK(cuMemFree_v2(address));
    CHECK_OK(cuStreamDestroy_v2(in));
    CHECK_OK(cuStreamDestroy_v2(out));
    close_driver();
}

TEST(timed_pageable_copies_read_zeros) {
    open_virtual();
    enum { BYTES = 3 * 4096 + 100 };
    CUdeviceptr address = alloc(BYTES);
    unsigned char *whole = malloc(BYTES + 2);
    CHECK(whole != NULL);
    memset(whole, 7, BYTES + 2);
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, whole + 1, BYTES, NULL));
    CHECK_EQUAL(BYTES, times().host_call_ns); /* the host copies, and does not wait */
    CHECK_EQUAL(0, times().host_waits);
    CHECK(all_bytes(whole, 7, BYTES + 2));
    CHECK_OK(cuMemcpyDtoHAsync_v2(whole + 1, address, BYTES, NULL));
    CHECK(all_bytes(whole + 1, 0, BYTES));
    CHECK(whole[0] == 7 && whole[BYTES + 1] == 7);
    free(whole);
    unsigned char *number = pinned(8);
    memset(number, 7, 8);
    CHECK_OK(cuMemcpyDtoHAsync_v2(number, address, 8, NULL));
    CHECK(all_bytes(number, 0, 8));
    CHECK_OK(cuMemFreeHost(number));
    CHECK_OK(cuMemFree_v2(address));
    close_driver();
}

/* What mapping so much in one piece costs the host, in microseconds. */
static uint64_t map_us(size_t size) {
    uint64_t before = times().host_call_ns;
    mapped_range range = map_range(size);
    uint64_t cost = times().host_call_ns - before;
    unmap_range(&range);
    return cost / 1000;
}

TEST(timed_maps_cost_by_piece_and_by_size) {
    open_virtual();
    CHECK(cusim_parameter("COST_MAP_NS", 48e3, 1) > 0);
    CHECK(cusim_parameter("COST_MAP_MIB_NS", 1e3, 1) > 0);
    CHECK_EQUAL(50, map_us(GRANULE));
    CHECK_EQUAL(68, map_us(20 * MIB));
    CHECK_EQUAL(2, times().maps);
    CHECK_EQUAL(2, times().unmaps);
    CHECK(cusim_parameter("COST_UNMAP_NS", 36e3, 1) > 0);
    CUdeviceptr address = alloc(20 * MIB);
    uint64_t before = times().host_call_ns;
    CHECK_OK(cuMemFree_v2(address));
    CHECK_EQUAL(36, (times().host_call_ns - before) / 1000);
    CHECK_EQUAL(3, times().unmaps);
    close_driver();
}

TEST(timed_calls_keep_the_host_busy) {
    open_virtual();
    CHECK(cusim_parameter("COST_RECORD_NS", 1e9, 1) > 0);
    CHECK(cusim_parameter("COST_LAUNCH_NS", 2e9, 1) > 0);
    uint64_t begin = cusim_now_ns();
    CUevent event = mark(NULL);
    cusim_spend(CUSIM_COST_LAUNCH);
    uint64_t took = cusim_now_ns() - begin;
    CHECK(took >= 3 * S_IN_NS && took < 3 * S_IN_NS + CALLS_NS);
    CHECK_EQUAL(2, times().calls);
    run_kernel(NULL, S_IN_NS);
    CHECK_OK(cuCtxSynchronize());
    cusim_spend(CUSIM_COST_LAUNCH);
    run_kernel(NULL, S_IN_NS);
    cusim_times read = times();
    CHECK(read.gap_host_ns >= 2 * S_IN_NS && read.gap_host_ns < 2 * S_IN_NS + CALLS_NS);
    CHECK_EQUAL(0, read.gap_stream_ns);
    CHECK_OK(cuEventDestroy_v2(event));
    close_driver();
}

TEST(timed_gaps_have_a_cause) {
    open_virtual();
    CUstream copies = stream_of(CU_STREAM_NON_BLOCKING);
    CUstream kernels = stream_of(CU_STREAM_NON_BLOCKING);
    CUdeviceptr address = alloc(GRANULE);
    unsigned char *host = pinned(GRANULE);
    CHECK(cusim_parameter("LINK_IN", 2e-3, 1) > 0);
    run_kernel(kernels, MS_IN_NS);
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, host, GRANULE, copies));
    CUevent there = mark(copies);
    CHECK_OK(cuStreamWaitEvent(kernels, there, 0));
    run_kernel(kernels, MS_IN_NS);
    cusim_times read = times();
    CHECK(read.gap_stream_ns > S_IN_NS && read.gap_sync_ns == 0);
    CHECK_OK(cuMemcpyHtoDAsync_v2(address, host, GRANULE, copies));
    CHECK_OK(cuStreamSynchronize(copies));
    run_kernel(kernels, MS_IN_NS);
    read = times();
    CHECK(read.gap_sync_ns > S_IN_NS - 100 * MS_IN_NS);
    CHECK_OK(cuEventDestroy_v2(there));
    CHECK_OK(cuMemFreeHost(host));
    CHECK_OK(cuMemFree_v2(address));
    CHECK_OK(cuStreamDestroy_v2(copies));
    CHECK_OK(cuStreamDestroy_v2(kernels));
    close_driver();
}

static void note_time(void *data) { atomic_store((_Atomic uint64_t *)data, cusim_now_ns()); }

TEST(timed_host_functions_run_at_their_time) {
    open_virtual();
    _Atomic uint64_t called_ns = 0;
    uint64_t begin = cusim_now_ns();
    run_kernel(NULL, 5 * S_IN_NS);
    CHECK_OK(cuLaunchHostFunc(NULL, note_time, &called_ns));
    CHECK_OK(cuCtxSynchronize());
    CHECK(atomic_load(&called_ns) - begin >= 5 * S_IN_NS);
    close_driver();
}

TEST(timed_host_can_be_slower_and_take_no_time) {
    open_virtual();
    CHECK(cusim_host_quiet_ns() > 0);
    double usual = cusim_host_slowness(0);
    uint64_t begin = cusim_now_ns();
    uint64_t begin_real = now_ns();
    while (now_ns() - begin_real < 5 * MS_IN_NS) {
    }
    CHECK_EQUAL(0, cusim_now_ns() - begin);
    CHECK(cusim_host_slowness(1000) == 0);
    begin = cusim_now_ns();
    begin_real = now_ns();
    while (now_ns() - begin_real < 5 * MS_IN_NS) {
    }
    CHECK(cusim_now_ns() - begin > 50 * MS_IN_NS);
    CHECK(cusim_host_slowness(usual) == 1000);
    close_driver();
}

TEST(timed_spans_say_what_ran_when) {
    open_virtual();
    CUstream stream = stream_of(CU_STREAM_NON_BLOCKING);
    run_kernel(stream, 1);
    cusim_spans_keep(2);
    run_kernel(stream, 1);
    run_kernel(stream, S_IN_NS);
    CUdeviceptr address = alloc(512);
    CHECK_OK(cuMemcpyDtoDAsync_v2(address, address + 256, 256, stream));
    cusim_span spans[3];
    CHECK_EQUAL(2, cusim_spans_read(spans, 3));
    CHECK_EQUAL(CUSIM_ENGINE_COMPUTE, spans[0].engine);
    CHECK_EQUAL(S_IN_NS, spans[0].end_ns - spans[0].start_ns);
    CHECK_EQUAL((uintptr_t)stream, spans[0].stream);
    CHECK(strcmp(spans[0].name, "kernel") == 0 && strcmp(spans[1].name, "copy within") == 0);
    CHECK(spans[1].start_ns >= spans[0].end_ns);
    CHECK_OK(cuMemFree_v2(address));
    CHECK_OK(cuStreamDestroy_v2(stream));
    close_driver();
}

/* Of this process, as the host counts them. */
static size_t host_maps(void) {
    FILE *file = fopen("/proc/self/maps", "re");
    size_t count = 0;
    CHECK(file != NULL);
    for (int c = fgetc(file); c != EOF; c = fgetc(file)) {
        count += c == '\n';
    }
    (void)fclose(file);
    return count;
}

TEST(timed_memory_is_mapped_and_reserved_as_often_as_on_a_gpu) {
    enum { RANGES = 12, ALIASES = 200 };
    open_virtual();
    size_t capacity = free_bytes();
    CUdeviceptr ranges[RANGES];
    for (size_t i = 0; i < RANGES; i++) {
        CHECK_OK(cuMemAddressReserve(&ranges[i], capacity, 0, 0, 0));
    }
    mapped_range range = map_range(GRANULE);
    size_t before = host_maps();
    for (size_t i = 0; i < ALIASES; i++) {
        CHECK_OK(cuMemMap(ranges[0] + 2 * i * GRANULE, GRANULE, 0, range.handle, 0));
    }
    CHECK(host_maps() < before + ALIASES / 2);
    for (size_t i = 0; i < ALIASES; i++) {
        CHECK_OK(cuMemUnmap(ranges[0] + 2 * i * GRANULE, GRANULE));
    }
    unmap_range(&range);
    for (size_t i = 0; i < RANGES; i++) {
        CHECK_OK(cuMemAddressFree(ranges[i], capacity));
    }
    close_driver();
}

TEST(timed_machine_is_what_programs_take_it_for) {
    CHECK_EQUAL(0, setenv("CUSIM_MACHINE", "RTX4090", 1));
    CHECK_EQUAL(0, setenv("CUSIM_TIMED", "1", 1));
    CHECK(cusim_reset());
    open_driver(NULL);
    char name[64] = "";
    CHECK_OK(cuDeviceGetName(name, (int)sizeof name, 0));
    CHECK(strncmp(name, "Virtual RTX4090, ", strlen("Virtual RTX4090, ")) == 0);
    size_t bytes = 0;
    CHECK_OK(cuDeviceTotalMem_v2(&bytes, 0));
    CHECK_EQUAL((size_t)cusim_rate_of("RTX4090", "CAPACITY_MIB") << 20, bytes);
    /* Capability, multiprocessors, and one that all machines have. */
    static const int expected[][2] = {{75, 8}, {76, 9}, {16, 128}, {10, 32}};
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        int value = 0;
        CHECK_OK(cuDeviceGetAttribute(&value, expected[i][0], 0));
        CHECK_EQUAL(expected[i][1], value);
    }
    close_driver();
    CHECK_EQUAL(0, unsetenv("CUSIM_MACHINE"));
    CHECK_EQUAL(0, unsetenv("CUSIM_TIMED"));
}

TEST(timed_machines_have_rates) {
    CHECK(cusim_rate_of("H200", "GB_PER_S") > cusim_rate_of("H100", "GB_PER_S"));
    CHECK(cusim_rate_of("H100", "NOTHING") == -1);
    CHECK(cusim_rate_of("NONE", "GB_PER_S") == -1);
    CHECK(cusim_parameter("NOTHING", 1, 1) == -1);
    CHECK(cusim_parameter("LINK_OUT", 1, 1) == 1);
    CHECK(cusim_reset());
    CHECK(cusim_parameter("LINK_OUT", 0, 0) == cusim_rate_of("H100", "LINK_OUT"));
    CHECK(!cusim_timed());
}
