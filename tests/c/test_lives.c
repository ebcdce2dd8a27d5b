/* test_lives.c - how long blocks live, by call site: what is noted of a step's requests. */
#include <stdlib.h>

#include "fixture.h"
#include "swapkit_lives.h"

enum { MOST = 4096, TAG = 7, LARGE = 2 * MIB };

static void step_end(fixture *f) { sk_pool_note(f->pool, SK_RING_MARK, 0); }

static void *take_at(fixture *f, uint32_t tag, size_t nbytes) {
    uint32_t before = sk_tag_set(tag);
    void *address = take(f, nbytes, NULL);
    (void)sk_tag_set(before);
    return address;
}

/* The latest life of a request; fails the test if there is none. */
static sk_life life_at(fixture *f, uint32_t phase, uint32_t tag, size_t nbytes, uint32_t turn) {
    static sk_life lives[MOST];
    size_t count = sk_pool_lives(f->pool, lives, MOST, NULL);
    CHECK(count <= MOST);
    const sk_life *latest = NULL;
    for (size_t i = 0; i < count; i++) {
        const sk_life *each = &lives[i];
        if (each->phase == phase && each->tag == tag && each->nbytes == nbytes &&
            each->turn == turn && (latest == NULL || latest->step[0] < each->step[0])) {
            latest = each;
        }
    }
    if (latest != NULL) {
        return *latest;
    }
    test_fail(__FILE__, __LINE__, "no life of %zu bytes in phase %u", nbytes, phase);
}

static fixture noting_open(sk_lives_mode mode) {
    fixture f = fixture_open(0, false);
    sk_pool_set_lives(f.pool, mode);
    return f;
}

/* One step: what the last step left goes first. Returns what the next step frees. */
static void *step_run(fixture *f, void *before, void **kept) {
    if (before != NULL) {
        give(f, before);
    }
    give(f, take_at(f, TAG, 1 * KIB));
    void *activation = take_at(f, TAG, 2 * KIB);
    void *gradient = take_at(f, TAG | SK_TAG_BACKWARD, 3 * KIB);
    give(f, activation);
    *kept = take_at(f, SK_TAG_OPTIMIZER, 4 * KIB);
    step_end(f);
    return gradient;
}

SK_TEST(lives, test_blocks_when_steps_repeat_then_their_classes_are_observed) {
    enum { STEPS = 4 };
    fixture f = noting_open(SK_LIVES_NOTED);
    void *kept[STEPS];
    void *gradient = NULL;
    for (int i = 0; i < STEPS; i++) {
        gradient = step_run(&f, gradient, &kept[i]);
        CHECK_OK(sk_pool_check(f.pool));
    }
    CHECK_EQUAL(SK_LIFE_TRANSIENT, life_at(&f, 0, TAG, 1 * KIB, 0).predicted);
    CHECK_EQUAL(SK_LIFE_ACTIVATION, life_at(&f, 0, TAG, 2 * KIB, 0).predicted);
    CHECK_EQUAL(SK_LIFE_CROSSING, life_at(&f, 1, TAG | SK_TAG_BACKWARD, 3 * KIB, 0).predicted);
    CHECK_EQUAL(SK_LIFE_LASTING, life_at(&f, 2, SK_TAG_OPTIMIZER, 4 * KIB, 0).predicted);
    CHECK_EQUAL(SK_LIFE_LASTING, life_at(&f, 2, SK_TAG_OPTIMIZER, 4 * KIB, 0).observed);
    for (int i = 0; i < STEPS; i++) {
        give(&f, kept[i]);
    }
    give(&f, gradient);
    fixture_close(&f);
}

SK_TEST(lives, test_lives_when_read_then_their_times_are_those_of_the_steps) {
    fixture f = noting_open(SK_LIVES_NOTED);
    void *kept[3];
    void *gradient = step_run(&f, NULL, &kept[0]);
    gradient = step_run(&f, gradient, &kept[1]);
    gradient = step_run(&f, gradient, &kept[2]);
    sk_step_times times;
    (void)sk_pool_lives(f.pool, NULL, 0, &times);
    CHECK_EQUAL(3, times.step);
    sk_life life = life_at(&f, 1, TAG | SK_TAG_BACKWARD, 3 * KIB, 0);
    CHECK_EQUAL(2, life.step[0]);
    CHECK_EQUAL(1, life.step[1]);
    CHECK_EQUAL(0, life.freed_at[0]); /* lives on */
    CHECK(times.began_at[2] < life.taken_at[1] && life.taken_at[1] < times.began_at[1]);
    CHECK(times.began_at[1] < life.freed_at[1] && life.freed_at[1] < life.taken_at[0]);
    CHECK(life.taken_at[0] < times.began_at[0] && times.began_at[0] <= times.now);
    for (int i = 0; i < 3; i++) {
        give(&f, kept[i]);
    }
    give(&f, gradient);
    fixture_close(&f);
}

static bool is_in_backward;
static int times_asked;

static bool backward_ask(void) {
    times_asked++;
    return is_in_backward;
}

/* What no session labels is asked for its phase; nothing else is. */
SK_TEST(lives, test_phase_when_threads_have_no_tag_then_they_are_asked) {
    fixture f = fixture_open(0, false);
    sk_pool_set_backward(f.pool, backward_ask);
    give(&f, take_at(&f, 0, 1 * KIB));
    CHECK_EQUAL(0, times_asked);
    sk_pool_set_lives(f.pool, SK_LIVES_SEPARATE);
    give(&f, take_at(&f, 0, 1 * KIB));
    is_in_backward = true;
    give(&f, take_at(&f, 0, 1 * KIB));
    CHECK_EQUAL(2, times_asked);
    give(&f, take_at(&f, TAG | SK_TAG_BACKWARD, 1 * KIB));
    CHECK_EQUAL(2, times_asked);
    CHECK_EQUAL(0, life_at(&f, 0, 0, 1 * KIB, 0).step[0]);
    CHECK_EQUAL(0, life_at(&f, 1, SK_TAG_BACKWARD, 1 * KIB, 0).step[0]);
    CHECK_EQUAL(0, life_at(&f, 1, TAG | SK_TAG_BACKWARD, 1 * KIB, 0).step[0]);
    step_end(&f);
    sk_pool_set_lives(f.pool, SK_LIVES_OFF); /* forgets lives, not the function */
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    give(&f, take_at(&f, 0, 1 * KIB));
    CHECK_EQUAL(1, life_at(&f, 1, SK_TAG_BACKWARD, 1 * KIB, 0).step[0]);
    sk_pool_set_backward(f.pool, NULL);
    give(&f, take_at(&f, 0, 1 * KIB));
    CHECK_EQUAL(3, times_asked);
    fixture_close(&f);
}

/* Requests of another size or tag, and those of another phase, do not count as turns. */
SK_TEST(lives, test_turns_when_a_request_is_added_then_other_sites_keep_theirs) {
    fixture f = noting_open(SK_LIVES_NOTED);
    for (int i = 0; i < 3; i++) {
        give(&f, take_at(&f, TAG, 1 * KIB));
        if (i == 2) {
            give(&f, take_at(&f, TAG, 8 * KIB));
            give(&f, take_at(&f, TAG + 1, 1 * KIB));
        }
        give(&f, take_at(&f, TAG, 1 * KIB));
        give(&f, take_at(&f, TAG | SK_TAG_BACKWARD, 1 * KIB));
        give(&f, take_at(&f, TAG, 1 * KIB));
        step_end(&f);
    }
    CHECK_EQUAL(2, life_at(&f, 0, TAG, 1 * KIB, 1).step[0]);
    CHECK_EQUAL(1, life_at(&f, 0, TAG, 1 * KIB, 1).step[1]);
    CHECK_EQUAL(1, life_at(&f, 2, TAG, 1 * KIB, 0).step[1]);
    CHECK_EQUAL(-1, (int64_t)life_at(&f, 0, TAG, 8 * KIB, 0).step[1]);
    fixture_close(&f);
}

SK_TEST(lives, test_lives_when_sizes_vary_then_they_share_a_call_site_until_they_repeat) {
    fixture f = noting_open(SK_LIVES_NOTED);
    for (size_t i = 0; i < 6; i++) {
        size_t nbytes = (i < 3 ? i + 1 : 4) * KIB;
        give(&f, take_at(&f, TAG, nbytes));
        sk_life latest = life_at(&f, 0, TAG, nbytes, 0);
        CHECK_EQUAL(i, latest.step[0]);
        /* The first size might repeat; 4 KiB do, once two steps in a row have requested them. */
        CHECK_EQUAL(i == 0 || i == 5 ? 0 : 1, latest.varies);
        if (i == 2) {
            CHECK_EQUAL(2 * KIB, latest.former_bytes);
            CHECK_EQUAL(1, latest.step[1]);
        }
        if (i == 4) {
            CHECK_EQUAL(4 * KIB, latest.most_bytes);
        }
        step_end(&f);
    }
    fixture_close(&f);
}

SK_TEST(lives, test_take_when_memory_lasts_then_it_lies_apart) {
    fixture f = noting_open(SK_LIVES_NOTED);
    void *weight = take_at(&f, 0, 4 * KIB); /* before training */
    void *activation = take_at(&f, TAG, 4 * KIB);
    void *state = take_at(&f, SK_TAG_OPTIMIZER, 4 * KIB);
    sk_segment_info a, b, c;
    CHECK_OK(sk_pool_segment_at(f.pool, weight, &a));
    CHECK_OK(sk_pool_segment_at(f.pool, activation, &b));
    CHECK_OK(sk_pool_segment_at(f.pool, state, &c));
    CHECK(a.address != b.address && b.address != c.address && a.address != c.address);
    CHECK(b.is_small && !a.is_small);
    give(&f, weight);
    give(&f, activation);
    give(&f, state);
    fixture_close(&f);
}

SK_TEST(lives, test_take_when_lives_are_separate_then_activations_and_gradients_lie_apart) {
    enum { STEPS = 3 };
    fixture f = noting_open(SK_LIVES_SEPARATE);
    void *crossing = NULL;
    sk_segment_info segments[3];
    for (int i = 0; i < STEPS; i++) {
        if (crossing != NULL) {
            give(&f, crossing);
        }
        void *transient = take_at(&f, TAG, LARGE);
        CHECK_OK(sk_pool_segment_at(f.pool, transient, &segments[0]));
        give(&f, transient);
        void *activation = take_at(&f, TAG, LARGE + MIB);
        CHECK_OK(sk_pool_segment_at(f.pool, activation, &segments[1]));
        crossing = take_at(&f, TAG | SK_TAG_BACKWARD, LARGE);
        CHECK_OK(sk_pool_segment_at(f.pool, crossing, &segments[2]));
        give(&f, activation);
        step_end(&f);
    }
    CHECK(segments[0].address != segments[1].address);
    CHECK(segments[1].address != segments[2].address);
    CHECK(segments[0].address != segments[2].address);
    give(&f, crossing);
    fixture_close(&f);
}

/* Where memory is short, it serves whatever needs it. */
SK_TEST(lives, test_take_when_only_another_class_has_room_then_it_serves) {
    fixture f = fixture_open(1 * MIB, false);
    sk_pool_set_lives(f.pool, SK_LIVES_SEPARATE);
    enum { NBLOCKS = 16 };
    void *blocks[NBLOCKS];
    size_t each = MIB / NBLOCKS - 3 * ROUNDING; /* leaves no granule free */
    for (int i = 0; i < NBLOCKS; i++) {
        blocks[i] = take_at(&f, 0, each);
    }
    give(&f, blocks[3]);
    void *other = take_at(&f, TAG | SK_TAG_BACKWARD, each);
    CHECK(other == blocks[3] || stats_of(&f).unmaps > 0);
    blocks[3] = other;
    for (int i = 0; i < NBLOCKS; i++) {
        give(&f, blocks[i]);
    }
    fixture_close(&f);
}

SK_TEST(lives, test_lives_when_sizes_never_repeat_then_old_ones_are_forgotten) {
    enum { STEPS = 60, SIZES = 200 };
    fixture f = noting_open(SK_LIVES_NOTED);
    for (size_t i = 0; i < STEPS; i++) {
        for (size_t j = 0; j < SIZES; j++) {
            give(&f, take_at(&f, TAG, (i * SIZES + j + 1) * ROUNDING));
        }
        step_end(&f);
    }
    CHECK(sk_pool_lives(f.pool, NULL, 0, NULL) < STEPS * SIZES / 2);
    CHECK_OK(sk_pool_check(f.pool));
    fixture_close(&f);
}

SK_TEST(lives, test_lives_when_switched_off_then_forgotten_and_blocks_stay) {
    fixture f = noting_open(SK_LIVES_NOTED);
    void *block = take_at(&f, TAG, 1 * KIB);
    pattern_write(block, 1 * KIB, 1);
    sk_pool_set_lives(f.pool, SK_LIVES_OFF);
    CHECK_EQUAL(0, sk_pool_lives(f.pool, NULL, 0, NULL));
    CHECK(pattern_holds(block, 1 * KIB, 1));
    give(&f, block);
    CHECK_OK(sk_pool_check(f.pool));
    CHECK_EQUAL(0, sk_pool_lives(f.pool, NULL, 0, NULL));
    fixture_close(&f);
}

SK_TEST(lives, test_take_when_no_host_memory_then_served_without_a_life) {
    fixture f = noting_open(SK_LIVES_NOTED);
    give(&f, take_at(&f, 0, 4 * KIB)); /* whatever the pool itself needs is there now */
    sk_pool_set_lives(f.pool, SK_LIVES_OFF);
    give(&f, take_at(&f, TAG, 1 * KIB));
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    for (uint64_t nth = 1; nth <= 2; nth++) {
        host_memory_fail(nth, true);
        void *block = take_at(&f, TAG, 1 * KIB);
        host_memory_fail(0, false);
        CHECK_EQUAL(0, sk_pool_lives(f.pool, NULL, 0, NULL));
        give(&f, block);
    }
    give(&f, take_at(&f, TAG, 1 * KIB));
    CHECK_EQUAL(1, sk_pool_lives(f.pool, NULL, 0, NULL));
    fixture_close(&f);
}

/* ---- requests that release the lock ---------------------------------------------------------- */

enum { BUDGET = 10 * MIB, REPEATED = 4 * MIB };

/* What another thread does while a request waits: end the step, and make the same request. */
typedef struct meanwhile {
    fixture *f;
    void *other, *same;
} meanwhile;

static size_t meanwhile_rescue(void *context, size_t needed_bytes) {
    meanwhile *state = context;
    (void)needed_bytes;
    if (state->other == NULL) {
        return 0;
    }
    step_end(state->f);
    give(state->f, state->other);
    state->other = NULL;
    state->same = take_at(state->f, TAG, REPEATED);
    return 1;
}

SK_TEST(lives,
        test_request_when_the_next_step_makes_it_meanwhile_then_each_block_has_its_own_life) {
    fixture f = fixture_open(BUDGET, false);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    meanwhile state = {.f = &f, .other = take_at(&f, TAG, BUDGET)};
    sk_pool_set_rescue(f.pool, meanwhile_rescue, &state);
    void *late = take_at(&f, TAG, REPEATED);
    CHECK_OK(sk_pool_check(f.pool));
    sk_pool_set_lives(f.pool, SK_LIVES_OFF); /* frees the records */
    give(&f, state.same);
    give(&f, late);
    sk_pool_set_rescue(f.pool, NULL, NULL);
    fixture_close(&f);
}

/* Generation, or an evaluation: no step ends for long. */
SK_TEST(lives, test_lives_when_no_step_ends_then_they_are_bounded_and_go_with_the_next_steps) {
    enum { REQUESTS = 300 * 1000, BOUND = 1 << 17 };
    fixture f = noting_open(SK_LIVES_NOTED);
    for (int i = 0; i < REQUESTS; i++) {
        give(&f, take_at(&f, TAG, 1 * KIB));
    }
    CHECK_EQUAL(BOUND, sk_pool_lives(f.pool, NULL, 0, NULL));
    for (int i = 0; i < 2; i++) {
        step_end(&f);
        give(&f, take_at(&f, TAG, 1 * KIB));
    }
    step_end(&f);
    CHECK_EQUAL(1, sk_pool_lives(f.pool, NULL, 0, NULL));
    CHECK_OK(sk_pool_check(f.pool));
    fixture_close(&f);
}

SK_TEST(lives, test_take_when_lives_are_off_again_then_free_memory_of_whole_segments_serves) {
    fixture f = fixture_open(20 * MIB, true);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    void *state = take_at(&f, SK_TAG_OPTIMIZER, LARGE); /* in a segment of 20 MiB */
    sk_pool_set_lives(f.pool, SK_LIVES_OFF);
    give(&f, take(&f, LARGE, NULL));
    give(&f, state);
    fixture_close(&f);
}
