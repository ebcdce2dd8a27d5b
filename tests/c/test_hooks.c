/* test_hooks.c - operators that announce themselves: nesting, exceptions, threads, no listener. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "swapkit_hooks.h"

enum { NTHREADS = 8, NROUNDS = 2000, NLOG = 512, FAR_BYTES = 4096 };

/* A listener that keeps a log of what it hears, one letter per call: of the operator's name at its
 * begin, "+" and "=" for an operand and an output, the letter again, in capitals, at its end. */
typedef struct context {
    char letter;
    size_t nbytes;
} context;

static _Thread_local char heard[NLOG];
static _Thread_local size_t nheard;
static atomic_bool is_deaf;
static atomic_long nopen;
static _Thread_local context *latest;

static void hear(char letter) {
    if (nheard + 1 < sizeof heard) {
        heard[nheard++] = letter;
    }
}

static bool listener_wanted(void) { return !atomic_load(&is_deaf); }

static void *listener_begin(const char *name) {
    context *made = malloc(sizeof *made);
    CHECK(made != NULL);
    *made = (context){.letter = *name};
    hear(*name);
    (void)atomic_fetch_add(&nopen, 1);
    latest = made;
    return made;
}

static sk_op_result listener_memory(void *op, const sk_op_memory *memory, bool is_output,
                                    char *text, size_t capacity) {
    hear(is_output ? '=' : '+');
    if (memory->address == NULL) {
        (void)snprintf(text, capacity, "no memory for %c", ((context *)op)->letter);
        return SK_OP_OUT_OF_MEMORY;
    }
    ((context *)op)->nbytes += memory->nbytes;
    return SK_OP_OK;
}

static void listener_end(void *op) {
    hear((char)(((context *)op)->letter - 'a' + 'A'));
    (void)atomic_fetch_sub(&nopen, 1);
    free(op);
}

static const sk_op_listener listener = {.is_wanted = listener_wanted,
                                        .begin = listener_begin,
                                        .memory = listener_memory,
                                        .end = listener_end};

static void listen(void) {
    sk_op_sweep();
    atomic_store(&is_deaf, false);
    sk_op_connect(&listener);
    nheard = 0;
    memset(heard, 0, sizeof heard);
}

static void check_heard(const char *expected) {
    if (strcmp(heard, expected) != 0) {
        test_fail(__FILE__, __LINE__, "heard \"%s\", not \"%s\"", heard, expected);
    }
    nheard = 0;
    memset(heard, 0, sizeof heard);
}

static char block[64];
static const sk_op_memory memory = {.address = block, .nbytes = sizeof block};

/* Run `body` in a frame that is deeper than the caller's by far. */
__attribute__((noinline)) static void run_deeper(void (*body)(void)) {
    volatile char far[FAR_BYTES];
    far[0] = 0;
    body();
    far[FAR_BYTES - 1] = far[0];
}

/* A function that an exception leaves after it has begun an operator. */
static void leave_inner(void) {
    sk_op_begin("inner");
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(block, sizeof block, NULL));
}

SK_TEST(hooks, test_calls_when_nothing_listens_then_nothing_happens) {
    listen();
    sk_op_connect(NULL);
    sk_op_begin("a");
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(NULL, 1, NULL));
    sk_op_post();
    CHECK_EQUAL(0, sk_op_depth());
    sk_op_end();
    CHECK_EQUAL(0, sk_op_enter("a"));
    CHECK_EQUAL(SK_OP_OK, sk_op_operand(0, &memory));
    CHECK_EQUAL(SK_OP_OK, sk_op_output(7, &memory));
    sk_op_leave(0);
    sk_op_leave(7);
    check_heard("");
}

SK_TEST(hooks, test_calls_when_nothing_needs_them_then_nothing_is_kept) {
    listen();
    atomic_store(&is_deaf, true);
    sk_op_begin("a");
    CHECK_EQUAL(0, sk_op_depth());
    sk_op_end();
    CHECK_EQUAL(0, sk_op_enter("a"));
    check_heard("");
}

SK_TEST(hooks, test_tensors_when_after_post_then_outputs) {
    listen();
    sk_op_begin("abc");
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(block, 1, NULL));
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(block, 1, NULL));
    sk_op_post();
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(block, 1, NULL));
    sk_op_end();
    check_heard("a++=A");
    CHECK_EQUAL(0, sk_op_depth());
}

SK_TEST(hooks,
        test_guarded_when_outputs_come_early_and_tokens_are_of_outer_ones_then_each_its_own) {
    listen();
    uint64_t outer = sk_op_enter("outer");
    uint64_t inner = sk_op_enter("inner");
    CHECK(outer != 0 && inner != 0 && outer != inner);
    CHECK_EQUAL(SK_OP_OK, sk_op_output(outer, &memory));
    CHECK_EQUAL(SK_OP_OK, sk_op_operand(inner, &memory));
    sk_op_leave(inner);
    CHECK_EQUAL(SK_OP_OK, sk_op_operand(inner, &memory));
    sk_op_leave(inner);
    sk_op_leave(outer);
    check_heard("oi=+IO");
}

SK_TEST(hooks, test_guarded_when_the_outer_ends_first_then_the_inner_goes_on) {
    listen();
    uint64_t outer = sk_op_enter("outer");
    uint64_t inner = sk_op_enter("inner");
    sk_op_leave(outer);
    CHECK_EQUAL(SK_OP_OK, sk_op_operand(inner, &memory));
    sk_op_leave(inner);
    check_heard("oiO+I");
}

SK_TEST(hooks, test_operators_when_nested_in_the_seeds_form_then_each_ends_at_its_end) {
    listen();
    sk_op_begin("a");
    sk_op_begin("b");
    CHECK_EQUAL(2, sk_op_depth());
    sk_op_end();
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(block, 1, NULL));
    sk_op_end();
    sk_op_end();
    check_heard("abB+A");
}

SK_TEST(hooks, test_operator_when_its_function_was_left_then_ends_at_the_next_call_further_out) {
    listen();
    sk_op_begin("a");
    run_deeper(leave_inner);
    check_heard("ai+");
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(block, 1, NULL));
    check_heard("I+");
    run_deeper(leave_inner);
    sk_op_end();
    check_heard("i+IA");
    run_deeper(leave_inner);
    sk_op_begin("b");
    sk_op_end();
    check_heard("i+IbB");
}

SK_TEST(hooks, test_operator_when_its_function_is_left_again_and_again_then_one_stays_open) {
    listen();
    for (int i = 0; i < 100; i++) {
        run_deeper(leave_inner);
        CHECK_EQUAL(1, sk_op_depth());
    }
    sk_op_sweep();
    CHECK_EQUAL(0, sk_op_depth());
}

SK_TEST(hooks, test_operator_when_left_inside_a_guarded_one_then_ends_with_it) {
    listen();
    sk_op_begin("z");
    uint64_t guard = sk_op_enter("g");
    run_deeper(leave_inner);
    sk_op_leave(guard);
    CHECK_EQUAL(1, sk_op_depth()); /* the one around it */
    check_heard("zgi+IG");
}

SK_TEST(hooks, test_guarded_when_swept_or_ended_by_the_seeds_form_then_stays) {
    listen();
    uint64_t guard = sk_op_enter("g");
    sk_op_end();
    sk_op_begin("a");
    sk_op_sweep();
    sk_op_end();
    CHECK_EQUAL(1, sk_op_depth());
    sk_op_leave(guard);
    check_heard("gaAG");
}

SK_TEST(hooks, test_operand_when_refused_then_text_and_the_operator_goes_on) {
    listen();
    sk_op_begin("a");
    CHECK_EQUAL(SK_OP_OUT_OF_MEMORY, sk_op_tensor(NULL, 1, NULL));
    CHECK_CONTAINS(sk_op_error(), "no memory for a");
    sk_op_end();
    check_heard("a+A");
}

SK_TEST(hooks, test_operand_when_refused_without_memory_for_the_text_then_says_so) {
    listen();
    sk_op_begin("a");
    host_memory_fail(1, false);
    CHECK_EQUAL(SK_OP_OUT_OF_MEMORY, sk_op_tensor(NULL, 1, NULL));
    host_memory_fail(0, false);
    CHECK_CONTAINS(sk_op_error(), "no memory for the reason");
    CHECK_EQUAL(SK_OP_OUT_OF_MEMORY, sk_op_tensor(NULL, 1, NULL));
    CHECK_CONTAINS(sk_op_error(), "no memory for a");
    sk_op_end();
    check_heard("a++A");
}

static void *refuse_on_thread(void *argument) {
    (void)argument;
    CHECK_EQUAL(0, strlen(sk_op_error()));
    sk_op_begin("b");
    CHECK_EQUAL(SK_OP_OUT_OF_MEMORY, sk_op_tensor(NULL, 1, NULL));
    CHECK_CONTAINS(sk_op_error(), "no memory for b");
    return NULL; /* the operator and the text end with the thread */
}

SK_TEST(hooks, test_text_when_another_thread_fails_then_each_thread_has_its_own) {
    listen();
    sk_op_begin("a");
    CHECK_EQUAL(SK_OP_OUT_OF_MEMORY, sk_op_tensor(NULL, 1, NULL));
    pthread_t thread;
    CHECK_EQUAL(0, pthread_create(&thread, NULL, refuse_on_thread, NULL));
    CHECK_EQUAL(0, pthread_join(thread, NULL));
    CHECK_CONTAINS(sk_op_error(), "no memory for a");
    sk_op_end();
}

SK_TEST(hooks, test_operator_when_the_listener_leaves_meanwhile_then_ends_unheard) {
    listen();
    sk_op_begin("a");
    sk_op_connect(NULL);
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(NULL, 1, NULL));
    sk_op_end();
    CHECK_EQUAL(0, sk_op_depth());
    check_heard("a");
    listener_end(latest);
}

SK_TEST(hooks, test_operator_when_no_memory_for_it_then_not_followed_and_counted) {
    listen();
    size_t before = sk_op_unannounced();
    host_memory_fail(1, false);
    uint64_t refused = sk_op_enter("a");
    host_memory_fail(0, false);
    CHECK_EQUAL(0, refused);
    CHECK_EQUAL(before + 1, sk_op_unannounced());
    CHECK_CONTAINS(sk_op_error(), "no memory to follow an operator: its kernel runs unannounced");
    check_heard("");
}

/* Begin an operator in the seed's form that there is no memory for. */
#define BEGIN_WITHOUT_MEMORY(name)                                                                 \
    do {                                                                                           \
        host_memory_fail(1, false);                                                                \
        sk_op_begin(name);                                                                         \
        host_memory_fail(0, false);                                                                \
    } while (false)

SK_TEST(hooks, test_operator_when_no_memory_for_it_then_its_calls_succeed_unannounced) {
    listen();
    size_t before = sk_op_unannounced();
    BEGIN_WITHOUT_MEMORY("a");
    CHECK_EQUAL(before + 1, sk_op_unannounced());
    CHECK_CONTAINS(sk_op_error(), "no memory to follow an operator");
    CHECK_EQUAL(0, sk_op_depth());
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(NULL, 1, NULL));
    sk_op_begin("b"); /* inside it */
    sk_op_end();
    sk_op_post();
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(NULL, 1, NULL));
    sk_op_end();
    check_heard("bB");
}

SK_TEST(hooks, test_operator_when_no_memory_for_one_inside_then_the_outer_goes_on) {
    listen();
    sk_op_begin("a");
    BEGIN_WITHOUT_MEMORY("b");
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(NULL, 1, NULL)); /* of b */
    uint64_t guard = sk_op_enter("g");
    BEGIN_WITHOUT_MEMORY("c");
    sk_op_post();
    sk_op_end(); /* of c */
    CHECK_EQUAL(SK_OP_OK, sk_op_operand(guard, &memory));
    sk_op_leave(guard);
    sk_op_post(); /* of b */
    sk_op_end();
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(block, 1, NULL)); /* of a, not after its sk_op_post */
    sk_op_end();
    check_heard("ag+G+A");
    CHECK_EQUAL(0, sk_op_depth());
}

/* A function that an exception leaves after it has begun an operator without memory. */
static void leave_unannounced(void) { BEGIN_WITHOUT_MEMORY("inner"); }

SK_TEST(hooks, test_operator_when_one_inside_without_memory_was_left_then_the_outer_goes_on) {
    listen();
    sk_op_begin("a");
    run_deeper(leave_unannounced);
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(block, 1, NULL));
    run_deeper(leave_unannounced);
    sk_op_end();
    check_heard("a+A");
}

SK_TEST(hooks, test_error_when_no_memory_for_an_operator_then_a_later_text_takes_its_place) {
    listen();
    BEGIN_WITHOUT_MEMORY("b");
    sk_op_begin("a");
    CHECK_EQUAL(SK_OP_OUT_OF_MEMORY, sk_op_tensor(NULL, 1, NULL));
    CHECK_CONTAINS(sk_op_error(), "no memory for a");
    BEGIN_WITHOUT_MEMORY("b");
    CHECK_CONTAINS(sk_op_error(), "its kernel runs unannounced");
    sk_op_end();
    sk_op_end();
    check_heard("a+A");
}

/* ---- the end of a step ----------------------------------------------------------------------- */

static atomic_int stage; /* of the test below */

static void await_stage(int wanted) {
    while (atomic_load(&stage) < wanted) {
        (void)sched_yield();
    }
}

static void *run_over_a_sweep(void *argument) {
    (void)argument;
    sk_op_begin("a");
    atomic_store(&stage, 1);
    await_stage(2);
    CHECK_EQUAL(1, sk_op_depth());
    CHECK_EQUAL(SK_OP_OK, sk_op_tensor(block, 1, NULL));
    sk_op_begin("b");
    sk_op_end();
    check_heard("a+bB");
    sk_op_end();
    check_heard("A");
    return NULL;
}

SK_TEST(hooks, test_operator_when_another_thread_sweeps_then_its_kernel_still_runs) {
    listen();
    atomic_store(&stage, 0);
    pthread_t thread;
    CHECK_EQUAL(0, pthread_create(&thread, NULL, run_over_a_sweep, NULL));
    await_stage(1);
    sk_op_sweep();
    atomic_store(&stage, 2);
    CHECK_EQUAL(0, pthread_join(thread, NULL));
    CHECK_EQUAL(0, atomic_load(&nopen));
}

static void *run_thread(void *argument) {
    (void)argument;
    for (int i = 0; i < NROUNDS; i++) {
        sk_op_begin("a");
        CHECK_EQUAL(SK_OP_OK, sk_op_tensor(block, 1, NULL));
        uint64_t guard = sk_op_enter("g");
        CHECK_EQUAL(SK_OP_OK, sk_op_operand(guard, &memory));
        if (i % 3 == 0) {
            run_deeper(leave_inner);
        }
        sk_op_leave(guard);
        sk_op_end();
    }
    run_deeper(leave_inner); /* ends with the thread */
    sk_op_begin("z");
    return NULL;
}

SK_TEST(hooks, test_threads_when_many_then_each_has_its_own_and_ends_them) {
    listen();
    pthread_t threads[NTHREADS];
    for (int i = 0; i < NTHREADS; i++) {
        CHECK_EQUAL(0, pthread_create(&threads[i], NULL, run_thread, NULL));
    }
    for (int i = 0; i < NROUNDS; i++) { /* sessions come and go meanwhile */
        atomic_store(&is_deaf, i % 2 == 0);
    }
    for (int i = 0; i < NTHREADS; i++) {
        CHECK_EQUAL(0, pthread_join(threads[i], NULL));
    }
    atomic_store(&is_deaf, false);
    CHECK_EQUAL(0, atomic_load(&nopen));
    CHECK_EQUAL(0, sk_op_depth());
    sk_op_connect(NULL);
}
