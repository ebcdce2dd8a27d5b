/* test_range.c - a pool whose range of addresses has no room for what its memory would make up.
 *
 * Free memory can have other addresses, but there are only so many in a range: as many as the
 * device has bytes. Then there is another range. */
#include "fixture.h"

enum { PART = 2 * MIB, BUDGET = 4 * PART, WANTED = 2 * PART };

typedef struct scene {
    fixture f;
    void *kept[2];
} scene;

/* Two free parts between two that are kept, and addresses for one more. */
static scene scene_open(void) {
    scene made = {.f = {.backend = make_fault(make_aliasing(BUDGET + PART))}};
    sk_pool_params params = {.budget_bytes = BUDGET};
    CHECK_OK(sk_pool_create(made.f.backend, &params, &made.f.pool));
    void *gone[2];
    for (int i = 0; i < 2; i++) {
        gone[i] = take(&made.f, PART, NULL);
        made.kept[i] = take(&made.f, PART, NULL);
        pattern_write(made.kept[i], PART, (unsigned)i);
    }
    give(&made.f, gone[0]);
    give(&made.f, gone[1]);
    CHECK_EQUAL(1, sk_pool_segments(made.f.pool, NULL, 0));
    return made;
}

static void check_kept(scene *s) {
    CHECK_OK(sk_pool_check(s->f.pool));
    CHECK(pattern_holds(s->kept[0], PART, 0) && pattern_holds(s->kept[1], PART, 1));
    CHECK(stats_of(&s->f).reserved_bytes[0].peak <= BUDGET);
}

static void scene_close(scene *s, void *taken) {
    pattern_write(taken, WANTED, 2);
    check_kept(s);
    CHECK(pattern_holds(taken, WANTED, 2));
    give(&s->f, taken);
    give(&s->f, s->kept[0]);
    give(&s->f, s->kept[1]);
    fixture_close(&s->f);
}

SK_TEST(range, test_take_when_the_range_has_no_room_then_free_memory_is_mapped_in_another) {
    scene s = scene_open();
    void *taken = take(&s.f, WANTED, NULL);
    CHECK_EQUAL(2, sk_pool_segments(s.f.pool, NULL, 0));
    CHECK_EQUAL(WANTED, stats_of(&s.f).moved_bytes);
    CHECK_EQUAL(0, stats_of(&s.f).unmaps);
    scene_close(&s, taken);
}

SK_TEST(range, test_take_when_the_device_refuses_while_there_is_no_room_then_sound_and_goes_on) {
    for (int forever = 0; forever < 2; forever++) {
        uint64_t nth = 0;
        for (bool failed = true; failed;) {
            nth++;
            scene s = scene_open();
            void *taken = NULL;
            sk_fault_arm(s.f.backend, nth, forever == 1, SK_BACKEND_FAILED);
            sk_status status = sk_pool_take(s.f.pool, WANTED, NULL, &taken);
            failed = sk_fault_calls(s.f.backend) >= nth;
            sk_fault_arm(s.f.backend, 0, false, SK_OK);
            CHECK(status == SK_OK || (failed && taken == NULL));
            check_kept(&s);
            scene_close(&s, status == SK_OK ? taken : take(&s.f, WANTED, NULL));
        }
        CHECK(nth > 2);
    }
}

SK_TEST(range, test_take_when_host_memory_runs_out_while_there_is_no_room_then_sound_and_goes_on) {
    for (int forever = 0; forever < 2; forever++) {
        uint64_t nth = 0;
        for (bool failed = true; failed;) {
            nth++;
            scene s = scene_open();
            void *taken = NULL;
            host_memory_fail(nth, forever == 1);
            sk_status status = sk_pool_take(s.f.pool, WANTED, NULL, &taken);
            failed = host_memory_calls() >= nth;
            host_memory_fail(0, false);
            CHECK(status == SK_OK || (failed && status == SK_OUT_OF_HOST_MEMORY));
            check_kept(&s);
            scene_close(&s, status == SK_OK ? taken : take(&s.f, WANTED, NULL));
        }
        CHECK(nth > 2);
    }
}
