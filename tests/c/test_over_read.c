/* test_over_read.c - kernels that read past a block: its end must hold what they may read. */
#include "backend/backend.h"
#include "fixture.h"

enum { OVER_READ = 32 };

/* A pool over a wrapper of a device whose kernels read so far. */
static fixture fixture_open_over_read(bool whole) {
    sk_backend *device = whole ? make_whole_device(CAPACITY) : make_device(CAPACITY);
    device->ops.over_read_bytes = OVER_READ;
    fixture made = {.backend = make_trace(make_fault(device), KIB)};
    sk_pool_params params = {.whole_segments = whole};
    CHECK_EQUAL(OVER_READ, sk_backend_table(made.backend)->over_read_bytes);
    CHECK_OK(sk_pool_create(made.backend, &params, &made.pool));
    return made;
}

SK_TEST(over_read, test_take_when_kernels_read_past_then_the_block_holds_what_they_read) {
    static const size_t asked[] = {
        1, ROUNDING - OVER_READ, ROUNDING - OVER_READ + 1, ROUNDING, MIB - OVER_READ, MIB, 4 * MIB};
    for (int whole = 0; whole < 2; whole++) {
        fixture f = fixture_open_over_read(whole == 1);
        for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
            void *block = take(&f, asked[i], NULL);
            size_t expected = (asked[i] + OVER_READ + ROUNDING - 1) / ROUNDING * ROUNDING;
            sk_block_info info = block_at(&f, block);
            CHECK_EQUAL(expected, info.nbytes);
            CHECK_EQUAL(asked[i], info.requested_bytes);
            CHECK_EQUAL(asked[i], stats_of(&f).requested_bytes[0].current);
            CHECK_EQUAL(expected, stats_of(&f).allocated_bytes[0].current);
            give(&f, block);
        }
        fixture_close(&f);
    }
}

SK_TEST(over_read, test_take_when_what_is_read_makes_a_request_large_then_it_is_a_large_block) {
    fixture f = fixture_open_over_read(false);
    void *small = take(&f, SMALL_LIMIT - OVER_READ, NULL);
    void *large = take(&f, SMALL_LIMIT, NULL);
    CHECK_EQUAL(1, stats_of(&f).allocation[1].current);
    CHECK_EQUAL(1, stats_of(&f).allocation[2].current);
    give(&f, small);
    give(&f, large);
    fixture_close(&f);
}

SK_TEST(over_read, test_check_when_a_block_has_no_room_to_be_read_past_then_corrupt) {
    fixture f = {.backend = make_device(CAPACITY)};
    sk_pool_params params = {0};
    CHECK_OK(sk_pool_create(f.backend, &params, &f.pool));
    void *block = take(&f, ROUNDING, NULL);
    f.backend->ops.over_read_bytes = OVER_READ;
    CHECK_STATUS(SK_CORRUPT, sk_pool_check(f.pool));
    CHECK_CONTAINS(sk_error_text(), "is smaller than requested");
    f.backend->ops.over_read_bytes = 0;
    give(&f, block);
    fixture_close(&f);
}
