/* test_gone.c - a device whose library has shut down: at the process's end, and in a forked child.
 *
 * It ends for good, so most of it is tested in processes of their own: see alone.h.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "alone.h"
#include "ascend_device.h"
#include "backend/backend.h"
#include "cuda_device.h"
#include "fixture.h"
#include "swapkit_sched.h"

enum { CHILD_SECONDS = 60, EXIT_CALLED = 77 };

/* ---- the device's own ------------------------------------------------------------------------ */

static sk_status another_open(sk_backend **out) {
    return device_is_ascend() ? sk_backend_ascend(&(sk_ascend_params){0}, out)
                              : sk_backend_cuda(&(sk_cuda_params){0}, out);
}

static sk_status device_count(int32_t *out) {
    return device_is_ascend() ? sk_ascend_device_count(out) : sk_cuda_device_count(out);
}

static uint64_t library_calls(void) {
    return device_is_ascend() ? acl()->aclsim_calls("*") : cuda()->cusim_calls("*");
}

static const char *text_of_exit(void) {
    return device_is_ascend() ? "the ACL runtime has shut down: the process is exiting"
                              : "the CUDA driver has shut down: the process is exiting";
}

static const char *text_of_fork(void) {
    return device_is_ascend() ? "an Ascend device cannot be used in a forked child; start "
                                "processes with 'spawn' or 'forkserver'"
                              : "a CUDA device cannot be used in a forked child; start "
                                "processes with 'spawn' or 'forkserver'";
}

/* ---- a library that is gone ------------------------------------------------------------------ */

typedef struct belongings {
    fixture f;
    sk_stream *stream;
    sk_event *event;
    void *block;
    sk_sched *sched;
    sk_group *group;
} belongings;

static void drop_nothing(void *owner) { (void)owner; }

static belongings belongings_open(void) {
    belongings made = {.f = fixture_open(0, false)};
    sk_backend *backend = made.f.backend;
    made.stream = make_stream(backend);
    CHECK_OK(sk_event_create(backend, &made.event));
    made.block = take(&made.f, MIB, NULL);
    sk_sched_params params = {.drop_owner = drop_nothing};
    CHECK_OK(sk_sched_create(backend, &params, &made.sched));
    CHECK_OK(sk_group_create(made.sched, MIB, SK_TIER_ANY, &made.group));
    CHECK_OK(sk_group_copy_out(made.group, made.block, NULL, 1, NULL));
    CHECK_OK(sk_group_finish_out(made.group, NULL, false));
    sk_sched_drain(made.sched);
    return made;
}

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition,              \
                          sk_error_text());                                                        \
            return __LINE__;                                                                       \
        }                                                                                          \
    } while (0)

/* Everything fails with a text that says `why`, and calls no driver. */
static int all_fails(belongings *b, const char *why) {
    sk_backend *backend = b->f.backend;
    sk_memory_info info;
    sk_backend *other = NULL;
    sk_stream *stream = NULL;
    sk_event *event = NULL;
    void *address = NULL;
    int32_t count = 0;
    char bytes[ROUNDING];
#define EXPECT_FAILS(call)                                                                         \
    EXPECT((call) == SK_BACKEND_FAILED);                                                           \
    EXPECT(strstr(sk_error_text(), why) != NULL)
    EXPECT_FAILS(another_open(&other));
    EXPECT_FAILS(device_count(&count));
    EXPECT_FAILS(backend->ops.memory_alloc(backend->self, MIB, &address));
    EXPECT_FAILS(backend->ops.range_reserve(backend->self, GRANULE, &address));
    EXPECT_FAILS(backend->ops.host_lock(backend->self, bytes, 1));
    EXPECT_FAILS(sk_stream_create(backend, &stream));
    EXPECT_FAILS(sk_stream_sync(backend, b->stream));
    EXPECT_FAILS(sk_stream_wait(backend, b->stream, b->event));
    EXPECT_FAILS(sk_event_create(backend, &event));
    EXPECT_FAILS(sk_event_record(backend, b->event, b->stream));
    EXPECT_FAILS(sk_event_query(backend, b->event));
    EXPECT_FAILS(sk_event_sync(backend, b->event));
    EXPECT_FAILS(sk_copy_async(backend, b->block, bytes, 1, SK_HOST_TO_DEVICE, b->stream));
    EXPECT_FAILS(sk_copy_async(backend, b->block, bytes, 1, SK_HOST_TO_DEVICE, NULL));
#undef EXPECT_FAILS
    EXPECT(sk_memory_info_get(backend, &info) == SK_OK); /* the test's own: see device.c */
    return 0;
}

/* All that only gives something back works. */
static int all_goes(belongings *b) {
    sk_backend *backend = b->f.backend;
    sk_group_destroy(b->group);
    EXPECT(sk_sched_destroy(b->sched) == SK_OK);
    EXPECT(sk_event_destroy(backend, b->event) == SK_OK);
    EXPECT(sk_stream_destroy(backend, b->stream) == SK_OK);
    EXPECT(sk_pool_give(b->f.pool, b->block) == SK_OK);
    sk_backend_close(backend);
    return 0;
}

static int belongings_end(belongings *b, const char *why) {
    uint64_t ncalls = library_calls();
    int line = all_fails(b, why);
    if (line == 0) {
        line = all_goes(b);
    }
    if (line == 0) {
        EXPECT(library_calls() == ncalls);
    }
    return line;
}

static void run_alone_on_device(const char *name, int expected) {
    (void)cusim();
    run_alone(name, "SK_TEST_DEVICE", getenv("SK_TEST_DEVICE"), expected);
}

SK_TEST(gone, test_driver_when_it_has_shut_down_then_errors_are_clear_and_releasing_works) {
    run_alone_on_device("gone_alone.test_shut_down", 0);
}

SK_TEST(gone_alone, test_shut_down) {
    belongings b = belongings_open();
    CHECK(cusim()->cusim_fail("*", 0, CUDA_ERROR_DEINITIALIZED));
    CHECK_STATUS(SK_BACKEND_FAILED, sk_stream_sync(b.f.backend, b.stream));
    CHECK_EQUAL(0, belongings_end(&b, text_of_exit()));
    _exit(0); /* what the driver has is left */
}

SK_TEST(gone, test_exit_when_everything_is_open_then_no_driver_call_is_made) {
    run_alone_on_device("gone_alone.test_exit", EXIT_CALLED);
}

static belongings at_exit;

/* Registered before the driver's own handler, so it runs after that. */
static void close_at_exit(void) {
    if (at_exit.sched == NULL) {
        return; /* another test's process */
    }
    int line = all_fails(&at_exit, "the process is exiting");
    line = line == 0 ? all_goes(&at_exit) : line;
    cusim_open open;
    cuda()->cusim_report(&open);
    _exit(line == 0 && open.exit_calls == 0 ? EXIT_CALLED : 1);
}

__attribute__((constructor)) static void exit_register(void) {
    if (getenv("SK_TEST_ALONE") != NULL) {
        (void)atexit(close_at_exit);
    }
}

SK_TEST(gone_alone, test_exit) {
    at_exit = belongings_open();
    exit(0); /* NOLINT: the handler above is the test */
}

SK_TEST(gone, test_fork_when_the_child_uses_the_device_then_errors_are_clear_and_releasing_works) {
    belongings b = belongings_open();
    (void)cusim();
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)signal(SIGALRM, SIG_DFL);
        (void)alarm(CHILD_SECONDS);
        int line = belongings_end(&b, text_of_fork());
        _exit(line == 0 ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(0, WEXITSTATUS(status));
    CHECK_OK(sk_stream_sync(b.f.backend, b.stream)); /* the parent's are as they were */
    CHECK_OK(sk_group_evict(b.group));
    sk_group_destroy(b.group);
    CHECK_OK(sk_sched_destroy(b.sched));
    CHECK_OK(sk_event_destroy(b.f.backend, b.event));
    give(&b.f, b.block);
    drop_used_stream(&b.f, b.stream);
    fixture_close(&b.f);
}
