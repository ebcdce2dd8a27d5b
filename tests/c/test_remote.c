/* test_remote.c - what backends promise of devices whose memory the host cannot touch: what is
 * undone when a call of the library fails, memory at several addresses, locked host memory.
 *
 * The same on every such device, but for the names of the library's functions.
 */
#include <stdlib.h>
#include <string.h>

#include "ascend_device.h"
#include "backend/backend.h"
#include "cuda_device.h"
#include "sched_fixture.h"

enum { SIZE = 256 * KIB, PIECE = 64 * KIB, NPIECES = 4 };

/* ---- libraries ------------------------------------------------------------------------------- */

/* The nth call of a function, which is to fail. */
typedef struct call {
    const char *function; /* NULL ends a list */
    unsigned nth;
} call;

typedef struct library {
    call commits[8], decommits[4], aliases[4]; /* on the way of each operation */
    const char *copy_in, *lock, *unlock;
    int out_of_memory, failure;
} library_names;

static const library_names *library(void) {
    static const library_names on_cuda = {
        .commits = {{"cuMemCreate", 1},
                    {"cuMemCreate", 4},
                    {"cuMemMap", 1},
                    {"cuMemMap", 7},
                    {"cuMemSetAccess", 1}},
        .decommits = {{"cuMemUnmap", 4}},
        .aliases = {{"cuMemRetainAllocationHandle", 2}, {"cuMemMap", 2}, {"cuMemSetAccess", 1}},
        .copy_in = "cuMemcpyHtoDAsync_v2",
        .lock = "cuMemHostRegister_v2",
        .unlock = "cuMemHostUnregister",
        .out_of_memory = CUDA_ERROR_OUT_OF_MEMORY,
        .failure = CUDA_ERROR_UNKNOWN,
    };
    static const library_names on_ascend = {
        .commits = {{"aclrtGetMemInfo", 1},
                    {"aclrtMallocPhysical", 1},
                    {"aclrtMallocPhysical", 4},
                    {"aclrtMapMem", 1},
                    {"aclrtMapMem", 7}},
        .decommits = {{"aclrtUnmapMem", 4}, {"aclrtFreePhysical", 4}},
        .aliases = {{"aclrtMapMem", 2}},
        .copy_in = "aclrtMemcpyAsync",
        .lock = "aclrtHostRegister",
        .unlock = "aclrtHostUnregister",
        .out_of_memory = ACL_ERROR_RT_MEMORY_ALLOCATION,
        .failure = ACL_ERROR_RT_DRV_INTERNAL_ERROR,
    };
    return device_is_ascend() ? &on_ascend : &on_cuda;
}

static void fail(const char *function, unsigned nth, int error) {
    (void)cusim();
    CHECK(device_is_ascend() ? acl()->aclsim_fail(function, nth, error)
                             : cusim()->cusim_fail(function, nth, (CUresult)error));
}

static cusim_open report(void) {
    cusim_open open;
    cusim()->cusim_report(&open);
    return open;
}

static void need_two_devices(void) {
    int32_t count = 0;
    CHECK_OK(device_is_ascend() ? sk_ascend_device_count(&count) : sk_cuda_device_count(&count));
    if (count < 2) {
        test_skip("there is only one device");
    }
}

/* ---- virtual memory -------------------------------------------------------------------------- */

/* A range of eight granules, the first committed. */
typedef struct range {
    sk_backend *backend;
    char *address;
} range;

enum { NGRANULES = 8 };

static range range_open(void) {
    need_small_granules();
    range made = {.backend = make_remote(0, false)};
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

SK_TEST(remote, test_commit_when_a_call_on_the_way_fails_then_all_is_undone) {
    range r = range_open();
    pattern_write(r.address, GRANULE, 1);
    cusim_open before = report();
    for (const call *c = library()->commits; c->function != NULL; c++) {
        fail(c->function, c->nth, library()->out_of_memory);
        CHECK_STATUS(SK_OUT_OF_DEVICE_MEMORY, range_commit_rest(&r));
        CHECK_CONTAINS(sk_error_text(), c->function);
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

SK_TEST(remote, test_decommit_when_a_call_on_the_way_fails_then_all_is_still_committed) {
    for (const call *c = library()->decommits; c->function != NULL; c++) {
        range r = range_open();
        CHECK_OK(range_commit_rest(&r));
        fail(c->function, c->nth, library()->failure);
        CHECK_STATUS(SK_BACKEND_FAILED, range_decommit(&r, NGRANULES * GRANULE));
        CHECK_CONTAINS(sk_error_text(), c->function);
        pattern_write(r.address, NGRANULES * GRANULE, 3);
        CHECK(pattern_holds(r.address, NGRANULES * GRANULE, 3));
        CHECK_OK(range_decommit(&r, NGRANULES * GRANULE));
        CHECK_EQUAL(0, report().handle_bytes);
        range_close(&r);
    }
}

SK_TEST(remote, test_alias_when_made_then_both_addresses_are_one_memory_until_the_last_goes) {
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

SK_TEST(remote, test_alias_when_a_call_on_the_way_fails_then_all_is_undone) {
    range r = range_open();
    const sk_backend_ops *ops = sk_backend_table(r.backend);
    CHECK_OK(ops->range_commit(r.backend->self, r.address + GRANULE, GRANULE));
    cusim_open before = report();
    for (const call *c = library()->aliases; c->function != NULL; c++) {
        fail(c->function, c->nth, library()->failure);
        CHECK_STATUS(SK_BACKEND_FAILED, ops->range_alias(r.backend->self, r.address,
                                                         r.address + 4 * GRANULE, 2 * GRANULE));
        CHECK_CONTAINS(sk_error_text(), c->function);
        CHECK_EQUAL(before.handles, report().handles);
        CHECK_EQUAL(before.mappings, report().mappings);
    }
    CHECK_OK(range_decommit(&r, 2 * GRANULE));
    range_close(&r);
}

SK_TEST(remote, test_copy_when_from_one_device_to_another_then_bytes_are_equal) {
    need_two_devices();
    sk_backend *backends[2] = {make_remote(0, false), make_remote(1, false)};
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

/* ---- locked host memory ---------------------------------------------------------------------- */

/* Host memory of a few locked pieces, and device memory as large. */
typedef struct pieces {
    sk_backend *backend;
    char *host;
    void *device;
    sk_stream *stream;
} pieces;

static pieces pieces_open(void) {
    pieces made = {.backend = make_remote(0, false)};
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

SK_TEST(remote, test_copy_when_it_crosses_locked_pieces_then_bytes_are_equal) {
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

SK_TEST(remote, test_copy_when_a_later_piece_is_refused_then_the_earlier_are_over) {
    enum { NS_PER_MS = 1000000 };
    pieces p = pieces_open();
    memset(p.host, 7, NPIECES * PIECE);
    device_slow(p.stream, (uint64_t)20 * NS_PER_MS);
    fail(library()->copy_in, 3, library()->failure);
    CHECK_STATUS(SK_BACKEND_FAILED, sk_copy_async(p.backend, p.device, p.host, NPIECES * PIECE,
                                                  SK_HOST_TO_DEVICE, p.stream));
    CHECK_CONTAINS(sk_error_text(), library()->copy_in);
    char second[PIECE];
    device_read(second, (char *)p.device + PIECE, PIECE);
    CHECK_EQUAL(7, second[PIECE - 1]);
    pieces_close(&p);
}

SK_TEST(remote, test_lock_when_refused_then_out_of_host_memory) {
    sk_backend *backend = make_remote(0, false);
    char *host = aligned_alloc(PIECE, PIECE);
    CHECK(host != NULL);
    const int errors[] = {library()->out_of_memory, library()->failure};
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        fail(library()->lock, 1, errors[i]);
        CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, backend->ops.host_lock(backend->self, host, PIECE));
        CHECK_CONTAINS(sk_error_text(), library()->lock);
    }
    free(host);
    sk_backend_close(backend);
}

static size_t locked_bytes(const cusim_open *before) {
    return report().registration_bytes - before->registration_bytes;
}

SK_TEST(remote, test_sched_when_it_takes_host_memory_then_all_of_it_is_locked) {
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

SK_TEST(remote, test_sched_when_host_memory_cannot_be_locked_then_refused_and_usable_later) {
    enum { LIMIT = 4 * MIB, GRANULES = SIZE / PIECE };
    cusim_open before = report();
    for (unsigned nth = 1; nth <= GRANULES; nth++) {
        scene s;
        scene_open(&s, &(scene_options){.host_limit_bytes = LIMIT});
        parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
        fail(library()->lock, nth, library()->out_of_memory);
        CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, parcel_out(&p, NULL));
        CHECK_CONTAINS(sk_error_text(), library()->lock);
        CHECK_EQUAL(SK_GROUP_RESIDENT, parcel_state(&p));
        CHECK_EQUAL(0, locked_bytes(&before));
        CHECK_EQUAL(0, scene_stats(&s).host_reserved_bytes);
        parcel_send(&p);
        parcel_fetch(&p);
        parcel_drop(&p);
        scene_close(&s);
    }
}

SK_TEST(remote, test_trim_when_unlocking_is_refused_then_the_memory_stays_usable) {
    enum { LIMIT = 4 * MIB };
    cusim_open before = report();
    scene s;
    scene_open(&s, &(scene_options){.host_limit_bytes = LIMIT});
    parcel p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel_send(&p);
    parcel_fetch(&p);
    parcel_drop(&p);
    sk_sched_drain(s.sched);
    fail(library()->unlock, 3, library()->failure);
    sk_sched_trim(s.sched);
    CHECK_EQUAL(scene_stats(&s).host_reserved_bytes, locked_bytes(&before));
    CHECK(locked_bytes(&before) > 0);
    p = parcel_make(&s, SIZE, SK_TIER_ANY, 1);
    parcel_send(&p);
    parcel_fetch(&p);
    parcel_drop(&p);
    scene_close(&s);
}

SK_TEST(remote, test_close_when_the_scheduler_is_last_then_the_device_goes_after_its_memory) {
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
