/* test_cuda.c - the cuda backend's own promises: errors, what is undone, contexts, locked memory.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "cuda_device.h"
#include "sched_fixture.h"

enum { SIZE = 256 * KIB, PIECE = 64 * KIB, NPIECES = 4 };

static void need_two_devices(void) {
    int32_t count = 0;
    CHECK_OK(sk_cuda_device_count(&count));
    if (count < 2) {
        test_skip("there is only one device");
    }
}

static cusim_open report(void) {
    cusim_open open;
    cusim()->cusim_report(&open);
    return open;
}

/* ---- opening --------------------------------------------------------------------------------- */

SK_TEST(cuda, test_open_when_arguments_wrong_then_invalid) {
    sk_cuda_params params = {0};
    sk_backend *backend = NULL;
    int32_t count = 0;
    CHECK_STATUS(SK_INVALID, sk_backend_cuda(NULL, &backend));
    CHECK_STATUS(SK_INVALID, sk_backend_cuda(&params, NULL));
    CHECK_STATUS(SK_INVALID, sk_cuda_device_count(NULL));
    CHECK_OK(sk_cuda_device_count(&count));
    CHECK(count >= 1);
    const int32_t wrong[] = {-1, count, INT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        params.device = wrong[i];
        CHECK_STATUS(SK_INVALID, sk_backend_cuda(&params, &backend));
        CHECK_CONTAINS(sk_error_text(), "there is no device");
    }
    params = (sk_cuda_params){.granule_bytes = KIB};
    CHECK_STATUS(SK_INVALID, sk_backend_cuda(&params, &backend));
    CHECK_CONTAINS(sk_error_text(), "granules of 1024 bytes are not supported");
    CHECK(backend == NULL);
}

SK_TEST(cuda, test_open_when_granule_is_0_then_at_least_2_mib) {
    sk_cuda_params params = {0};
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_cuda(&params, &backend));
    size_t granule = sk_backend_table(backend)->granule_bytes;
    CHECK(granule >= 2 * MIB && granule % (2 * MIB) == 0);
    CHECK_EQUAL(0, sk_backend_table(backend)->null_stream_is_host);
    sk_backend_close(backend);
}

SK_TEST(cuda, test_open_when_any_call_fails_then_its_name_is_told_and_nothing_is_left) {
    static const char *const functions[] = {"cuDeviceGetCount", "cuDeviceGet",
                                            "cuDevicePrimaryCtxRetain",
                                            "cuMemGetAllocationGranularity"};
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        sk_cuda_params params = {0};
        sk_backend *backend = NULL;
        CHECK(cusim()->cusim_fail(functions[i], 1, CUDA_ERROR_UNKNOWN));
        CHECK_STATUS(SK_BACKEND_FAILED, sk_backend_cuda(&params, &backend));
        CHECK_CONTAINS(sk_error_text(), functions[i]);
        CHECK_CONTAINS(sk_error_text(), "CUDA_ERROR_UNKNOWN (999)");
    }
}

SK_TEST(cuda, test_open_when_the_device_has_no_virtual_memory_then_whole_segments) {
    sk_backend *backend = make_whole_device(CAPACITY);
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

/* ---- errors ---------------------------------------------------------------------------------- */

SK_TEST(cuda, test_alloc_when_the_device_is_full_then_out_of_device_memory_and_named) {
    sk_backend *backend = make_cuda(0, false);
    sk_memory_info info = {0};
    CHECK_OK(sk_memory_info_get(backend, &info));
    void *address = NULL;
    CHECK_STATUS(SK_OUT_OF_DEVICE_MEMORY,
                 backend->ops.memory_alloc(backend->self, info.total_bytes + MIB, &address));
    CHECK_CONTAINS(sk_error_text(),
                   "cuda backend: cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2): ");
    CHECK(address == NULL);
    sk_backend_close(backend);
}

/* A range of eight granules, the first committed. */
typedef struct range {
    sk_backend *backend;
    char *address;
} range;

enum { NGRANULES = 8 };

static range range_open(void) {
    need_small_granules();
    range made = {.backend = make_cuda(0, false)};
    void *address = NULL;
    CHECK_OK(made.backend->ops.range_reserve(made.backend->self, NGRANULES * GRANULE, &address));
    made.address = address;
    CHECK_OK(made.backend->ops.range_commit(made.backend->self, made.address, GRANULE));
    return made;
}

static sk_status range_commit_rest(range *r) {
    return r->backend->ops.range_commit(r->backend->self, r->address + GRANULE,
                                        (NGRANULES - 1) * GRANULE);
}

static sk_status range_decommit(range *r, size_t nbytes) {
    return r->backend->ops.range_decommit(r->backend->self, r->address, nbytes);
}

static void range_close(range *r) {
    CHECK_OK(r->backend->ops.range_release(r->backend->self, r->address, NGRANULES * GRANULE));
    sk_backend_close(r->backend);
}

SK_TEST(cuda, test_commit_when_a_call_on_the_way_fails_then_all_is_undone) {
    static const struct {
        const char *function;
        unsigned nth;
    } failures[] = {{"cuMemCreate", 1},
                    {"cuMemCreate", 4},
                    {"cuMemMap", 1},
                    {"cuMemMap", 7},
                    {"cuMemSetAccess", 1}};
    range r = range_open();
    pattern_write(r.address, GRANULE, 1);
    cusim_open before = report();
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++) {
        CHECK(cusim()->cusim_fail(failures[i].function, failures[i].nth, CUDA_ERROR_OUT_OF_MEMORY));
        CHECK_STATUS(SK_OUT_OF_DEVICE_MEMORY, range_commit_rest(&r));
        CHECK_CONTAINS(sk_error_text(), failures[i].function);
        CHECK_EQUAL(before.handles, report().handles);
        CHECK_EQUAL(before.mappings, report().mappings);
    }
    CHECK(pattern_holds(r.address, GRANULE, 1));
    CHECK_OK(range_commit_rest(&r));
    pattern_write(r.address + GRANULE, (NGRANULES - 1) * GRANULE, 2);
    CHECK(pattern_holds(r.address + GRANULE, (NGRANULES - 1) * GRANULE, 2));
    CHECK(pattern_holds(r.address, GRANULE, 1));
    CHECK_EQUAL(before.handle_bytes + (NGRANULES - 1) * GRANULE, report().handle_bytes);
    CHECK_OK(range_decommit(&r, NGRANULES * GRANULE));
    CHECK_EQUAL(before.handle_bytes - GRANULE, report().handle_bytes);
    range_close(&r);
}

SK_TEST(cuda, test_decommit_when_a_call_on_the_way_fails_then_all_is_still_committed) {
    range r = range_open();
    CHECK_OK(range_commit_rest(&r));
    CHECK(cusim()->cusim_fail("cuMemUnmap", 4, CUDA_ERROR_UNKNOWN));
    CHECK_STATUS(SK_BACKEND_FAILED, range_decommit(&r, NGRANULES * GRANULE));
    CHECK_CONTAINS(sk_error_text(), "cuMemUnmap");
    pattern_write(r.address, NGRANULES * GRANULE, 3);
    CHECK(pattern_holds(r.address, NGRANULES * GRANULE, 3));
    CHECK_OK(range_decommit(&r, NGRANULES * GRANULE));
    range_close(&r);
}

SK_TEST(cuda, test_alias_when_made_then_both_addresses_are_one_memory_until_the_last_goes) {
    range r = range_open();
    cusim_open before = report();
    const sk_backend_ops *ops = sk_backend_table(r.backend);
    char *alias = r.address + 4 * GRANULE;
    CHECK_OK(ops->range_commit(r.backend->self, r.address + GRANULE, GRANULE));
    CHECK_OK(ops->range_alias(r.backend->self, r.address, alias, 2 * GRANULE));
    CHECK_EQUAL(before.handle_bytes + GRANULE, report().handle_bytes);
    CHECK_EQUAL(before.mappings + 3, report().mappings);
    pattern_write(r.address, 2 * GRANULE, 5);
    CHECK(pattern_holds(alias, 2 * GRANULE, 5));
    CHECK_OK(range_decommit(&r, 2 * GRANULE));
    CHECK(pattern_holds(alias, 2 * GRANULE, 5));
    CHECK_EQUAL(before.handle_bytes + GRANULE, report().handle_bytes);
    CHECK_OK(ops->range_decommit(r.backend->self, alias, 2 * GRANULE));
    CHECK_EQUAL(0, report().handle_bytes);
    range_close(&r);
}

SK_TEST(cuda, test_alias_when_a_call_on_the_way_fails_then_all_is_undone) {
    static const char *const functions[] = {"cuMemRetainAllocationHandle", "cuMemMap",
                                            "cuMemSetAccess"};
    range r = range_open();
    const sk_backend_ops *ops = sk_backend_table(r.backend);
    CHECK_OK(ops->range_commit(r.backend->self, r.address + GRANULE, GRANULE));
    cusim_open before = report();
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        unsigned nth = i == 2 ? 1 : 2; /* after one granule was mapped */
        CHECK(cusim()->cusim_fail(functions[i], nth, CUDA_ERROR_UNKNOWN));
        CHECK_STATUS(SK_BACKEND_FAILED, ops->range_alias(r.backend->self, r.address,
                                                         r.address + 4 * GRANULE, 2 * GRANULE));
        CHECK_CONTAINS(sk_error_text(), functions[i]);
        CHECK_EQUAL(before.handles, report().handles);
        CHECK_EQUAL(before.mappings, report().mappings);
    }
    CHECK_OK(range_decommit(&r, 2 * GRANULE));
    range_close(&r);
}

SK_TEST(cuda, test_error_when_it_is_sticky_then_it_says_what_to_do_and_releasing_works) {
    static const CUresult results[] = {CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_FAILED,
                                       CUDA_ERROR_CONTEXT_IS_DESTROYED};
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
        sk_backend *backend = make_cuda(0, false);
        sk_stream *stream = make_stream(backend);
        sk_event *event = NULL;
        void *address = NULL;
        sk_memory_info info;
        CHECK_OK(sk_event_create(backend, &event));
        CHECK_OK(backend->ops.memory_alloc(backend->self, MIB, &address));
        cusim()->cusim_break(results[i]);
        CHECK_STATUS(SK_BACKEND_FAILED, sk_memory_info_get(backend, &info));
        CHECK_CONTAINS(sk_error_text(), "cuMemGetInfo_v2 failed: CUDA_ERROR_");
        CHECK_CONTAINS(sk_error_text(), "unusable from then on: restart the process");
        CHECK_STATUS(SK_BACKEND_FAILED, sk_stream_sync(backend, stream));
        CHECK_STATUS(SK_BACKEND_FAILED, sk_event_query(backend, event));
        CHECK_OK(backend->ops.memory_free(backend->self, address, MIB));
        CHECK_OK(sk_event_destroy(backend, event));
        CHECK_OK(sk_stream_destroy(backend, stream));
        sk_backend_close(backend);
        cusim()->cusim_break(CUDA_SUCCESS);
    }
}

SK_TEST(cuda, test_error_when_it_is_unknown_then_its_number_is_told) {
    enum { NO_SUCH_RESULT = 12345 };
    sk_backend *backend = make_cuda(0, false);
    sk_memory_info info = {.free_bytes = 1};
    CHECK(cusim()->cusim_fail("cuMemGetInfo_v2", 1, (CUresult)NO_SUCH_RESULT));
    CHECK_STATUS(SK_BACKEND_FAILED, sk_memory_info_get(backend, &info));
    CHECK_CONTAINS(sk_error_text(), "unknown error (12345)");
    CHECK_EQUAL(1, info.free_bytes);
    sk_backend_close(backend);
}

/* ---- contexts -------------------------------------------------------------------------------- */

/* Every kind of call, in a thread whose context is `own`; which has to stay current. */
static void use_all(sk_backend *backend, CUcontext own) {
    CUcontext now = NULL;
    char bytes[ROUNDING];
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
    CHECK_OK(backend->ops.memory_free(backend->self, address, sizeof bytes));
    drop_stream(backend, stream);
    CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxGetCurrent(&now));
    CHECK(now == own);
}

static void *use_without_context(void *argument) {
    use_all(argument, NULL);
    return NULL;
}

SK_TEST(cuda, test_calls_when_a_thread_has_another_context_or_none_then_it_stays_so) {
    need_two_devices();
    sk_backend *first = make_cuda(0, false);
    sk_backend *second = make_cuda(1, false);
    CUcontext before = NULL;
    CUcontext own[2];
    CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxGetCurrent(&before));
    for (int device = 0; device < 2; device++) {
        CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuDevicePrimaryCtxRetain(&own[device], device));
        CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxSetCurrent(own[device]));
        use_all(first, own[device]);
        use_all(second, own[device]);
    }
    CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxSetCurrent(before));
    for (int device = 0; device < 2; device++) {
        CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuDevicePrimaryCtxRelease_v2(device));
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, use_without_context, second) == 0);
    (void)pthread_join(thread, NULL);
    sk_backend_close(first);
    sk_backend_close(second);
}

SK_TEST(cuda, test_copy_when_from_one_device_to_another_then_bytes_are_equal) {
    need_two_devices();
    sk_backend *backends[2] = {make_cuda(0, false), make_cuda(1, false)};
    sk_stream *stream = make_stream(backends[0]);
    void *addresses[2];
    for (int i = 0; i < 2; i++) {
        CHECK_OK(backends[i]->ops.memory_alloc(backends[i]->self, SIZE, &addresses[i]));
    }
    pattern_write(addresses[0], SIZE, 1);
    CHECK_OK(
        sk_copy_async(backends[0], addresses[1], addresses[0], SIZE, SK_DEVICE_TO_DEVICE, stream));
    CHECK_OK(sk_stream_sync(backends[0], stream));
    CHECK(pattern_holds(addresses[1], SIZE, 1));
    drop_stream(backends[0], stream);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(backends[i]->ops.memory_free(backends[i]->self, addresses[i], SIZE));
        sk_backend_close(backends[i]);
    }
}

SK_TEST(cuda, test_virtual_memory_when_a_peer_is_named_then_it_can_use_it) {
    need_two_devices();
    sk_cuda_params params = {.peer_devices = ~(uint64_t)0};
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_cuda(&params, &backend));
    sk_backend *peer = make_cuda(1, false);
    fixture f = {.backend = backend};
    sk_pool_params pool_params = {0};
    CHECK_OK(sk_pool_create(backend, &pool_params, &f.pool));
    sk_stream *stream = make_stream(peer);
    void *block = take(&f, SIZE, NULL);
    void *address = NULL;
    CHECK_OK(peer->ops.memory_alloc(peer->self, SIZE, &address));
    pattern_write(block, SIZE, 2);
    CHECK_OK(sk_copy_async(peer, address, block, SIZE, SK_DEVICE_TO_DEVICE, stream));
    CHECK_OK(sk_stream_sync(peer, stream));
    CHECK(pattern_holds(address, SIZE, 2));
    CHECK_OK(peer->ops.memory_free(peer->self, address, SIZE));
    drop_stream(peer, stream);
    sk_backend_close(peer);
    give(&f, block);
    CHECK_OK(sk_pool_destroy(f.pool));
    sk_backend_close(backend);
}

/* ---- locked host memory ---------------------------------------------------------------------- */

/* Host memory of a few locked pieces, and device memory as large. */
typedef struct pieces {
    sk_backend *backend;
    char *host;
    void *device;
    sk_stream *stream;
} pieces;

static pieces pieces_open(void) {
    pieces made = {.backend = make_cuda(0, false)};
    made.host = aligned_alloc(PIECE, NPIECES * PIECE);
    CHECK(made.host != NULL);
    for (size_t i = 0; i < NPIECES; i++) {
        CHECK_OK(made.backend->ops.host_lock(made.backend->self, made.host + i * PIECE, PIECE));
    }
    made.device = device_take(NPIECES * PIECE);
    made.stream = make_stream(made.backend);
    return made;
}

static void pieces_close(pieces *p) {
    drop_stream(p->backend, p->stream);
    device_give(p->device, NPIECES * PIECE);
    for (size_t i = 0; i < NPIECES; i++) {
        CHECK_OK(p->backend->ops.host_unlock(p->backend->self, p->host + i * PIECE, PIECE));
    }
    free(p->host);
    sk_backend_close(p->backend);
}

SK_TEST(cuda, test_copy_when_it_crosses_locked_pieces_then_bytes_are_equal) {
    enum { FIRST = PIECE - 100, NBYTES = 2 * PIECE + 300 };
    pieces p = pieces_open();
    pattern_write(p.host + FIRST, NBYTES, 1);
    CHECK_OK(
        sk_copy_async(p.backend, p.device, p.host + FIRST, NBYTES, SK_HOST_TO_DEVICE, p.stream));
    CHECK_OK(sk_stream_sync(p.backend, p.stream));
    CHECK(pattern_holds(p.device, NBYTES, 1));
    memset(p.host, 0, NPIECES * PIECE);
    CHECK_OK(
        sk_copy_async(p.backend, p.host + FIRST, p.device, NBYTES, SK_DEVICE_TO_HOST, p.stream));
    CHECK_OK(sk_stream_sync(p.backend, p.stream));
    CHECK(pattern_holds(p.host + FIRST, NBYTES, 1));
    CHECK_EQUAL(0, p.host[FIRST - 1]);
    CHECK_EQUAL(0, p.host[FIRST + NBYTES]);
    pieces_close(&p);
}

SK_TEST(cuda, test_copy_when_a_later_piece_is_refused_then_the_earlier_are_over) {
    enum { NS_PER_MS = 1000000 };
    pieces p = pieces_open();
    memset(p.host, 7, NPIECES * PIECE);
    device_slow(p.stream, (uint64_t)20 * NS_PER_MS);
    CHECK(cusim()->cusim_fail("cuMemcpyHtoDAsync_v2", 3, CUDA_ERROR_INVALID_VALUE));
    CHECK_STATUS(SK_BACKEND_FAILED, sk_copy_async(p.backend, p.device, p.host, NPIECES * PIECE,
                                                  SK_HOST_TO_DEVICE, p.stream));
    CHECK_CONTAINS(sk_error_text(), "cuMemcpyHtoDAsync_v2 failed: CUDA_ERROR_INVALID_VALUE (1)");
    char second[PIECE];
    device_read(second, (char *)p.device + PIECE, PIECE);
    CHECK_EQUAL(7, second[PIECE - 1]);
    pieces_close(&p);
}

SK_TEST(cuda, test_lock_when_refused_then_out_of_host_memory) {
    sk_backend *backend = make_cuda(0, false);
    char *host = aligned_alloc(PIECE, PIECE);
    CHECK(host != NULL);
    static const CUresult results[] = {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_OPERATING_SYSTEM};
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
        CHECK(cusim()->cusim_fail("cuMemHostRegister_v2", 1, results[i]));
        CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, backend->ops.host_lock(backend->self, host, PIECE));
        CHECK_CONTAINS(sk_error_text(), "cuMemHostRegister_v2 failed");
    }
    free(host);
    sk_backend_close(backend);
}

static size_t locked_bytes(const cusim_open *before) {
    return report().registration_bytes - before->registration_bytes;
}

SK_TEST(cuda, test_sched_when_it_takes_host_memory_then_all_of_it_is_locked) {
    enum { NPARCELS = 12 };
    static const size_t limits[] = {0, NPARCELS * SIZE, 64 * MIB};
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        cusim_open before = report();
        scene s;
        scene_open(&s, &(scene_options){.host_limit_bytes = limits[i]});
        parcel parcels[NPARCELS];
        for (int n = 0; n < NPARCELS; n++) {
            parcels[n] = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
            parcel_send(&parcels[n]);
            CHECK_EQUAL(scene_stats(&s).host_reserved_bytes, locked_bytes(&before));
            CHECK(limits[i] == 0 || locked_bytes(&before) <= limits[i]);
        }
        for (int n = 0; n < NPARCELS; n++) {
            parcel_fetch(&parcels[n]);
            parcel_drop(&parcels[n]);
        }
        sk_sched_drain(s.sched);
        sk_sched_trim(s.sched);
        CHECK_EQUAL(0, locked_bytes(&before));
        scene_close(&s);
    }
}

SK_TEST(cuda, test_sched_when_host_memory_cannot_be_locked_then_refused_and_usable_later) {
    enum { LIMIT = 4 * MIB, GRANULES = SIZE / PIECE };
    cusim_open before = report();
    for (unsigned nth = 1; nth <= GRANULES; nth++) {
        scene s;
        scene_open(&s, &(scene_options){.host_limit_bytes = LIMIT});
        parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
        CHECK(cusim()->cusim_fail("cuMemHostRegister_v2", nth, CUDA_ERROR_OUT_OF_MEMORY));
        CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, parcel_out(&p, NULL));
        CHECK_CONTAINS(sk_error_text(),
                       "cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
        CHECK_EQUAL(SK_GROUP_RESIDENT, parcel_state(&p));
        CHECK_EQUAL(0, locked_bytes(&before));
        CHECK_EQUAL(0, scene_stats(&s).host_reserved_bytes);
        parcel_send(&p);
        parcel_fetch(&p);
        parcel_drop(&p);
        scene_close(&s);
    }
}

SK_TEST(cuda, test_trim_when_unlocking_is_refused_then_the_memory_stays_usable) {
    enum { LIMIT = 4 * MIB };
    cusim_open before = report();
    scene s;
    scene_open(&s, &(scene_options){.host_limit_bytes = LIMIT});
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel_send(&p);
    parcel_fetch(&p);
    parcel_drop(&p);
    sk_sched_drain(s.sched);
    CHECK(cusim()->cusim_fail("cuMemHostUnregister", 3, CUDA_ERROR_UNKNOWN));
    sk_sched_trim(s.sched);
    CHECK_EQUAL(scene_stats(&s).host_reserved_bytes, locked_bytes(&before));
    CHECK(locked_bytes(&before) > 0);
    p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel_send(&p);
    parcel_fetch(&p);
    parcel_drop(&p);
    scene_close(&s);
}

SK_TEST(cuda, test_close_when_the_scheduler_is_last_then_the_device_goes_after_its_memory) {
    scene s;
    scene_open(&s, &(scene_options){0});
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel_send(&p);
    parcel_fetch(&p);
    sk_backend_close(s.backend); /* the scheduler and its host memory keep it */
    parcel_drop(&p);
    CHECK_OK(sk_sched_destroy(s.sched));
    CHECK_EQUAL(0, atomic_load(&s.nslabs));
}
