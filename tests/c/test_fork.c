/* test_fork.c - a forked child can use its copy of the pool, whatever the parent was doing.
 *
 * The child must not return into the runner: it reports the line of its first failure as its exit
 * status (modulo 256, 0 for none). An alarm ends a child that hangs.
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fixture.h"

enum { COPY_BYTES = 128 * KIB, CHILD_SECONDS = 20, BUDGET = 8 * MIB };

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            return __LINE__;                                                                       \
        }                                                                                          \
    } while (0)

/* Run `child` in a fork and check that it ends with 0. */
static void in_child(int (*child)(fixture *f, void *argument), fixture *f, void *argument) {
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)signal(SIGALRM, SIG_DFL);
        (void)alarm(CHILD_SECONDS);
        int line = child(f, argument);
        coverage_write();
        _exit(line == 0 ? 0 : line % 255 + 1);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(!WIFSIGNALED(status) || WTERMSIG(status) != SIGALRM); /* hung */
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(0, WEXITSTATUS(status));
}

static int take_in_child(fixture *f, void *parents) {
    EXPECT(pattern_holds(parents, MIB, 1)); /* the parent's block came along */
    void *block = NULL;
    EXPECT(sk_pool_take(f->pool, 3 * MIB, NULL, &block) == SK_OK);
    pattern_write(block, 3 * MIB, 2);
    EXPECT(pattern_holds(block, 3 * MIB, 2));
    EXPECT(sk_pool_give(f->pool, block) == SK_OK);
    EXPECT(sk_pool_give(f->pool, parents) == SK_OK);
    EXPECT(sk_pool_trim(f->pool) == SK_OK);
    EXPECT(sk_pool_check(f->pool) == SK_OK);
    return 0;
}

SK_TEST(fork, test_fork_when_child_takes_and_gives_then_parent_is_not_touched) {
    for (int whole = 0; whole < 2; whole++) {
        fixture f = fixture_open(BUDGET, whole == 1);
        void *block = take(&f, MIB, NULL);
        pattern_write(block, MIB, 1);
        in_child(take_in_child, &f, block);
        CHECK(pattern_holds(block, MIB, 1));
        CHECK_EQUAL(MIB, stats_of(&f).allocated_bytes[0].current);
        give(&f, block);
        fixture_close(&f);
    }
}

static size_t never(void *context, size_t needed_bytes) {
    (void)needed_bytes;
    *(int *)context += 1;
    return 0;
}

static void never_making(void *context, bool begins) {
    (void)begins;
    *(int *)context += 1;
}

static int no_budget_in_child(fixture *f, void *ncalls) {
    void *block = NULL;
    EXPECT(sk_pool_take(f->pool, (size_t)4 * BUDGET, NULL, &block) == SK_OK);
    pattern_write(block, (size_t)4 * BUDGET, 3);
    EXPECT(sk_pool_give(f->pool, block) == SK_OK);
    EXPECT(*(int *)ncalls == 0);
    EXPECT(sk_pool_check(f->pool) == SK_OK);
    return 0;
}

SK_TEST(fork, test_fork_when_child_needs_more_than_the_budget_then_no_budget_and_no_rescue) {
    fixture f = fixture_open(BUDGET, false);
    int ncalls = 0;
    sk_pool_set_rescue(f.pool, never, &ncalls);
    void *held = take(&f, MIB, NULL);
    sk_pool_set_making(f.pool, never_making, &ncalls);
    in_child(no_budget_in_child, &f, &ncalls);
    sk_pool_set_making(f.pool, NULL, NULL);
    void *block = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(f.pool, BUDGET, NULL, &block));
    CHECK_EQUAL(1, ncalls);
    give(&f, held);
    fixture_close(&f);
}

static int copy_in_child(fixture *f, void *argument) {
    sk_stream *stream = argument;
    unsigned char *host = malloc(COPY_BYTES);
    unsigned char *back = malloc(COPY_BYTES);
    EXPECT(host != NULL && back != NULL);
    void *block = NULL;
    EXPECT(sk_pool_take(f->pool, COPY_BYTES, stream, &block) == SK_OK);
    pattern_write(host, COPY_BYTES, 4);
    EXPECT(sk_copy_async(f->backend, block, host, COPY_BYTES, SK_HOST_TO_DEVICE, stream) == SK_OK);
    EXPECT(sk_copy_async(f->backend, back, block, COPY_BYTES, SK_DEVICE_TO_HOST, stream) == SK_OK);
    EXPECT(sk_stream_sync(f->backend, stream) == SK_OK);
    EXPECT(pattern_holds(back, COPY_BYTES, 4));
    EXPECT(sk_pool_give(f->pool, block) == SK_OK);
    sk_stream *fresh = NULL;
    EXPECT(sk_stream_create(f->backend, &fresh) == SK_OK);
    EXPECT(sk_copy_async(f->backend, back, host, COPY_BYTES, SK_DEVICE_TO_HOST, fresh) == SK_OK);
    EXPECT(sk_stream_destroy(f->backend, fresh) == SK_OK);
    free(host);
    free(back);
    return 0;
}

SK_TEST(fork, test_fork_when_child_uses_the_parents_stream_then_it_works) {
    fixture f = fixture_open(BUDGET, false);
    sk_stream *stream = make_stream(f.backend);
    unsigned char byte = 0;
    CHECK_OK(sk_copy_async(f.backend, &byte, &f, 1, SK_DEVICE_TO_HOST, stream));
    CHECK_OK(sk_stream_sync(f.backend, stream));
    in_child(copy_in_child, &f, stream);
    CHECK_EQUAL(0, copy_in_child(&f, stream)); /* and still does here */
    drop_used_stream(&f, stream);
    fixture_close(&f);
}

/* A copy is on its way (held at the gate) and a block pending when the fork happens. */
static int pending_in_child(fixture *f, void *argument) {
    sk_stream *stream = argument;
    void *block = NULL;
    EXPECT(sk_pool_take(f->pool, BUDGET / 2, NULL, &block) == SK_OK);
    EXPECT(sk_pool_give(f->pool, block) == SK_OK);
    sk_delay_release(f->gate, UINT64_MAX);
    EXPECT(sk_pool_trim(f->pool) == SK_OK);
    EXPECT(sk_stream_sync(f->backend, stream) == SK_OK);
    EXPECT(sk_pool_check(f->pool) == SK_OK);
    return 0;
}

SK_TEST(fork, test_fork_when_copy_is_pending_then_child_does_not_hang) {
    fixture f = fixture_open_gated(BUDGET, false);
    sk_stream *stream = make_stream(f.backend);
    unsigned char *host = calloc(1, COPY_BYTES);
    CHECK(host != NULL);
    void *block = take(&f, COPY_BYTES, NULL);
    CHECK_OK(sk_pool_use(f.pool, block, stream));
    pattern_write(block, COPY_BYTES, 5);
    CHECK_OK(sk_copy_async(f.backend, host, block, COPY_BYTES, SK_DEVICE_TO_HOST, stream));
    give(&f, block);
    in_child(pending_in_child, &f, stream);
    sk_delay_release(f.gate, UINT64_MAX);
    CHECK_OK(sk_stream_sync(f.backend, stream));
    CHECK(pattern_holds(host, COPY_BYTES, 5));
    CHECK_OK(sk_pool_trim(f.pool));
    drop_used_stream(&f, stream);
    fixture_close(&f);
    free(host);
}

/* Other threads are inside the pool and its streams at the moment of every fork. */
typedef struct busy {
    fixture *f;
    atomic_bool stop;
} busy;

static void *stay_busy(void *argument) {
    busy *mine = argument;
    sk_stream *stream = make_stream(mine->f->backend);
    unsigned char *host = malloc(COPY_BYTES);
    CHECK(host != NULL);
    while (!atomic_load(&mine->stop)) {
        void *block = NULL;
        if (sk_pool_take(mine->f->pool, COPY_BYTES, stream, &block) != SK_OK) {
            continue;
        }
        CHECK_OK(
            sk_copy_async(mine->f->backend, host, block, COPY_BYTES, SK_DEVICE_TO_HOST, stream));
        give(mine->f, block);
        CHECK_OK(sk_stream_sync(mine->f->backend, stream));
    }
    drop_used_stream(mine->f, stream);
    free(host);
    return NULL;
}

static int busy_child(fixture *f, void *argument) {
    (void)argument;
    void *block = NULL;
    EXPECT(sk_pool_take(f->pool, MIB, NULL, &block) == SK_OK);
    EXPECT(sk_pool_give(f->pool, block) == SK_OK);
    EXPECT(sk_pool_check(f->pool) == SK_OK);
    sk_stream *stream = NULL;
    EXPECT(sk_stream_create(f->backend, &stream) == SK_OK);
    char from = 1;
    char to = 0;
    EXPECT(sk_copy_async(f->backend, &to, &from, 1, SK_DEVICE_TO_HOST, stream) == SK_OK);
    EXPECT(sk_stream_destroy(f->backend, stream) == SK_OK);
    EXPECT(to == 1);
    return 0;
}

SK_TEST(fork, test_fork_when_other_threads_are_inside_the_pool_then_child_works) {
    enum { NTHREADS = 3, NFORKS = 20 };
#ifdef SK_TEST_SANITISED
    test_skip(
        "sanitisers do not survive a fork of busy threads: the child may hang in their locks");
#endif
    fixture f = fixture_open(BUDGET, false);
    busy mine = {.f = &f};
    pthread_t threads[NTHREADS];
    for (int i = 0; i < NTHREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, stay_busy, &mine) == 0);
    }
    for (int i = 0; i < NFORKS; i++) {
        in_child(busy_child, &f, NULL);
    }
    atomic_store(&mine.stop, true);
    for (int i = 0; i < NTHREADS; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    CHECK_OK(sk_pool_trim(f.pool));
    fixture_close(&f);
}

/* Two pools, two backends and wrappers: every lock is taken in some order before the fork. */
static int two_pools_child(fixture *f, void *argument) {
    fixture *other = argument;
    void *block = NULL;
    EXPECT(sk_pool_take(f->pool, MIB, NULL, &block) == SK_OK);
    EXPECT(sk_pool_give(f->pool, block) == SK_OK);
    EXPECT(sk_pool_take(other->pool, MIB, NULL, &block) == SK_OK);
    EXPECT(sk_pool_give(other->pool, block) == SK_OK);
    EXPECT(sk_pool_destroy(other->pool) == SK_OK);
    return 0;
}

SK_TEST(fork, test_fork_when_two_pools_exist_then_both_work_in_the_child) {
    fixture f = fixture_open(BUDGET, false);
    fixture other = {.backend = make_trace(make_fault(make_delay(make_device(CAPACITY))), KIB)};
    sk_pool_params params = {0};
    CHECK_OK(sk_pool_create(other.backend, &params, &other.pool));
    sk_pool *second = NULL; /* and a second one over the same backend */
    CHECK_OK(sk_pool_create(other.backend, &params, &second));
    in_child(two_pools_child, &f, &other);
    CHECK_OK(sk_pool_destroy(second));
    fixture_close(&other);
    in_child(busy_child, &f, NULL); /* after pools have gone again */
    fixture_close(&f);
}

static int grandchild(fixture *f, void *argument) {
    (void)argument;
    pid_t pid = fork();
    if (pid == 0) {
        (void)alarm(CHILD_SECONDS);
        int line = busy_child(f, NULL);
        coverage_write();
        _exit(line == 0 ? 0 : 1);
    }
    int status = 0;
    EXPECT(pid > 0 && waitpid(pid, &status, 0) == pid);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return busy_child(f, NULL);
}

SK_TEST(fork, test_fork_when_child_forks_again_then_grandchild_works) {
    fixture f = fixture_open(BUDGET, false);
    in_child(grandchild, &f, NULL);
    fixture_close(&f);
}

static int close_in_child(fixture *f, void *stream) {
    EXPECT(sk_pool_destroy(f->pool) == SK_OK);
    EXPECT(sk_stream_destroy(f->backend, stream) == SK_OK);
    sk_backend_close(f->backend);
    return 0;
}

SK_TEST(fork, test_fork_when_child_closes_everything_then_parent_goes_on) {
    fixture f = fixture_open(BUDGET, false);
    sk_stream *stream = make_stream(f.backend);
    in_child(close_in_child, &f, stream);
    give(&f, take(&f, MIB, stream));
    CHECK_OK(sk_stream_sync(f.backend, stream));
    CHECK_OK(sk_pool_trim(f.pool));
    drop_used_stream(&f, stream);
    fixture_close(&f);
}
