/* test_cuda_calls.c - how often the driver is called for a copy. A call costs the host about a
 * microsecond, so this is what small copies cost the thread that trains.
 */
#include "backend/backend.h"
#include "cuda_device.h"
#include "sched_fixture.h"

enum { SIZE = 64 * KIB, MANY = 32, MOST_FOR_ONE = 8, MOST_FOR_EACH_OF_MANY = 7 };

static uint64_t calls_of(const char *name) { return cusim()->cusim_calls(name); }

/* ---- visits ---------------------------------------------------------------------------------- */

static void ask_twice(sk_backend *backend) {
    sk_memory_info info;
    CHECK_OK(sk_memory_info_get(backend, &info));
    CHECK_OK(sk_memory_info_get(backend, &info));
}

static CUcontext current(void) {
    CUcontext now = NULL;
    CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxGetCurrent(&now));
    return now;
}

static sk_backend *open_device(int32_t number) {
    sk_backend *backend = NULL;
    CHECK_OK(sk_backend_cuda(&(sk_cuda_params){.device = number}, &backend));
    return backend;
}

SK_TEST(cuda, test_visit_when_calls_follow_then_only_the_first_looks_for_the_context) {
    sk_backend *backend = open_device(0);
    CUcontext before = current();
    uint64_t looks = calls_of("cuCtxGetCurrent");
    sk__visit_begin(backend);
    ask_twice(backend);
    sk__visit_begin(backend); /* they nest */
    ask_twice(backend);
    sk__visit_end(backend);
    ask_twice(backend);
    sk__visit_end(backend);
    CHECK_EQUAL(looks + 1, calls_of("cuCtxGetCurrent"));
    CHECK(current() == before);
    looks = calls_of("cuCtxGetCurrent");
    ask_twice(backend);
    CHECK_EQUAL(looks + 2, calls_of("cuCtxGetCurrent"));
    looks = calls_of("*");
    sk__visit_begin(backend); /* of which nothing comes */
    sk__visit_end(backend);
    CHECK_EQUAL(looks, calls_of("*"));
    sk_backend_close(backend);
}

SK_TEST(cuda, test_visit_when_another_device_is_used_inside_then_each_call_has_its_own_context) {
    int32_t count = 0;
    CHECK_OK(sk_cuda_device_count(&count));
    if (count < 2) {
        test_skip("there is only one device");
    }
    sk_backend *first = open_device(0);
    sk_backend *second = open_device(1);
    CUcontext before = current();
    void *memory[2] = {NULL, NULL};
    sk__visit_begin(first);
    CHECK_OK(first->ops.memory_alloc(first->self, SIZE, &memory[0]));
    CUcontext inside = current();
    sk__visit_begin(second);
    CHECK_OK(second->ops.memory_alloc(second->self, SIZE, &memory[1]));
    sk__visit_end(second);
    CHECK(current() == inside);
    for (int i = 0; i < 2; i++) {
        int device = -1;
        CHECK_EQUAL(CUDA_SUCCESS,
                    cuda()->cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                                  (CUdeviceptr)(uintptr_t)memory[i]));
        CHECK_EQUAL(i, device);
    }
    CHECK_OK(first->ops.memory_free(first->self, memory[0], SIZE));
    sk__visit_end(first);
    CHECK_OK(second->ops.memory_free(second->self, memory[1], SIZE));
    CHECK(current() == before);
    sk_backend_close(first);
    sk_backend_close(second);
}

/* ---- copies ---------------------------------------------------------------------------------- */

typedef struct rig {
    scene s;
    sk_stream *stream;
    CUcontext context;
    parcel parcels[MANY];
} rig;

/* As where torch is: the device's context is current. */
static void rig_open(rig *r) {
    (void)calls_of("*"); /* or skip */
    scene_open(&r->s, &(scene_options){0});
    CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuDevicePrimaryCtxRetain(&r->context, 0));
    CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxPushCurrent_v2(r->context));
    r->stream = make_stream(r->s.backend);
    for (int i = 0; i < MANY; i++) {
        r->parcels[i] = parcel_make(&r->s, SIZE, SK_TIER_ANY, 1);
    }
}

static void rig_close(rig *r) {
    for (int i = 0; i < MANY; i++) {
        parcel_drop(&r->parcels[i]);
    }
    drop_stream(r->s.backend, r->stream);
    CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuCtxPopCurrent_v2(&r->context));
    CHECK_EQUAL(CUDA_SUCCESS, cuda()->cuDevicePrimaryCtxRelease_v2(0));
    scene_close(&r->s);
}

/* Calls for copying so many out, or back, each waited for by a stream while it runs. */
static uint64_t copy_all(rig *r, int count, bool out) {
    cusim()->cusim_hold(true);
    uint64_t before = calls_of("*");
    for (int i = 0; i < count; i++) {
        CHECK_OK((out ? parcel_out : parcel_in)(&r->parcels[i], r->stream));
    }
    for (int i = 0; i < count; i++) {
        CHECK_OK((out ? sk_group_finish_out : sk_group_finish_in)(r->parcels[i].group, r->stream,
                                                                  false));
    }
    cusim()->cusim_hold(false);
    sk_sched_drain(r->s.sched);
    uint64_t after = calls_of("*");
    CHECK_OK(sk_stream_sync(r->s.backend, r->stream));
    for (int i = 0; i < count; i++) {
        CHECK(parcel_holds(&r->parcels[i]));
        CHECK_OK(sk_group_evict(r->parcels[i].group));
        if (!out) { /* as if it had never gone */
            sk_group_destroy(r->parcels[i].group);
            CHECK_OK(sk_group_create(r->s.sched, SIZE, SK_TIER_ANY, &r->parcels[i].group));
        }
    }
    return after - before;
}

SK_TEST(cuda, test_calls_when_one_tensor_is_copied_then_8_in_each_direction) {
    rig r;
    rig_open(&r);
    for (int round = 0; round < 3; round++) {
        for (int out = 1; out >= 0; out--) {
            uint64_t calls = copy_all(&r, 1, out == 1);
            CHECK(round == 0 || calls <= MOST_FOR_ONE); /* before, events are made */
        }
    }
    rig_close(&r);
}

SK_TEST(cuda, test_calls_when_many_tensors_are_copied_then_fewer_for_each) {
    rig r;
    rig_open(&r);
    for (int round = 0; round < 3; round++) {
        for (int out = 1; out >= 0; out--) {
            uint64_t calls = copy_all(&r, MANY, out == 1);
            CHECK(round == 0 || calls <= (uint64_t)MOST_FOR_EACH_OF_MANY * MANY);
        }
    }
    rig_close(&r);
}
