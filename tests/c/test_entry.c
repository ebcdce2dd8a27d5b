/* test_entry.c - what torch calls: a pointer or NULL, and a text for the user. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "fixture.h"
#include "swapkit_entry.h"

static sk_entry *make_entry(fixture *f) {
    sk_entry *entry = NULL;
    CHECK_OK(sk_entry_create(f->pool, &entry));
    CHECK(entry != NULL);
    return entry;
}

SK_TEST(entry, test_alloc_when_it_fits_then_usable_block_of_the_pool) {
    fixture f = fixture_open(8 * MIB, false);
    sk_entry *entry = make_entry(&f);
    void *block = sk_entry_alloc(entry, 100 * KIB, NULL);
    CHECK(block != NULL);
    CHECK_EQUAL(1, sk_pool_owns(f.pool, block));
    CHECK_EQUAL(100 * KIB, stats_of(&f).requested_bytes[0].current);
    pattern_write(block, 100 * KIB, 1);
    sk_entry_free(entry, block);
    CHECK_EQUAL(0, stats_of(&f).requested_bytes[0].current);
    sk_entry_destroy(entry);
    fixture_close(&f);
}

SK_TEST(entry, test_free_when_null_then_nothing) {
    fixture f = fixture_open(0, false);
    sk_entry *entry = make_entry(&f);
    sk_entry_free(entry, NULL);
    sk_entry_destroy(entry);
    sk_entry_destroy(NULL);
    fixture_close(&f);
}

SK_TEST(entry, test_alloc_when_over_budget_then_null_and_text_has_the_figures) {
    fixture f = fixture_open(8 * MIB, false);
    sk_entry *entry = make_entry(&f);
    void *block = sk_entry_alloc(entry, 6 * MIB, NULL);
    CHECK(block != NULL);
    CHECK(sk_entry_alloc(entry, 5 * MIB, NULL) == NULL);
    const char *text = sk_entry_error();
    CHECK_CONTAINS(text, "5242880 bytes");
    CHECK_CONTAINS(text, "6291456");
    CHECK_CONTAINS(text, "8388608");
    CHECK_CONTAINS(text, "in use");
    CHECK_CONTAINS(text, "reserved");
    CHECK_CONTAINS(text, "budget");
    sk_entry_free(entry, block);
    sk_entry_destroy(entry);
    fixture_close(&f);
}

static size_t explain(void *context, size_t nbytes, char *text, size_t capacity) {
    (*(int *)context)++;
    return (size_t)snprintf(text, capacity, "no room for %zu, ask the owner", nbytes);
}

SK_TEST(entry, test_alloc_when_explained_then_the_owners_text_is_used) {
    fixture f = fixture_open(MIB, false);
    sk_entry *entry = make_entry(&f);
    int ncalls = 0;
    sk_entry_set_explain(entry, explain, &ncalls);
    CHECK(sk_entry_alloc(entry, 2 * MIB, NULL) == NULL);
    CHECK_EQUAL(1, ncalls);
    CHECK_CONTAINS(sk_entry_error(), "no room for 2097152, ask the owner");
    sk_entry_set_explain(entry, NULL, NULL);
    CHECK(sk_entry_alloc(entry, 2 * MIB, NULL) == NULL);
    CHECK_EQUAL(1, ncalls);
    CHECK_CONTAINS(sk_entry_error(), "budget");
    sk_entry_destroy(entry);
    fixture_close(&f);
}

/* Fills all there is and claims even more. */
static size_t explain_too_much(void *context, size_t nbytes, char *text, size_t capacity) {
    (void)context;
    (void)nbytes;
    memset(text, 'x', capacity);
    return capacity + KIB;
}

SK_TEST(entry, test_alloc_when_explained_at_length_then_text_is_cut_and_ended) {
    fixture f = fixture_open(MIB, false);
    sk_entry *entry = make_entry(&f);
    sk_entry_set_explain(entry, explain_too_much, NULL);
    CHECK(sk_entry_alloc(entry, 2 * MIB, NULL) == NULL);
    size_t length = strnlen(sk_entry_error(), MIB);
    CHECK(length > 0 && length < MIB);
    CHECK_EQUAL(length, strspn(sk_entry_error(), "x"));
    sk_entry_destroy(entry);
    fixture_close(&f);
}

static size_t explain_nothing(void *context, size_t nbytes, char *text, size_t capacity) {
    (void)context;
    (void)nbytes;
    (void)text;
    (void)capacity;
    return 0;
}

SK_TEST(entry, test_alloc_when_explain_has_nothing_to_say_then_plain_text) {
    fixture f = fixture_open(MIB, false);
    sk_entry *entry = make_entry(&f);
    sk_entry_set_explain(entry, explain_nothing, NULL);
    CHECK(sk_entry_alloc(entry, 2 * MIB, NULL) == NULL);
    CHECK_CONTAINS(sk_entry_error(), "budget");
    sk_entry_destroy(entry);
    fixture_close(&f);
}

static void *fail_here(void *argument) {
    CHECK(sk_entry_alloc(argument, 3 * MIB, NULL) == NULL);
    CHECK_CONTAINS(sk_entry_error(), "3145728");
    return NULL;
}

SK_TEST(entry, test_error_when_two_threads_fail_then_each_has_its_own_text) {
    fixture f = fixture_open(MIB, false);
    sk_entry *entry = make_entry(&f);
    CHECK(sk_entry_alloc(entry, 2 * MIB, NULL) == NULL);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fail_here, entry) == 0);
    (void)pthread_join(thread, NULL);
    CHECK_CONTAINS(sk_entry_error(), "2097152");
    sk_entry_destroy(entry);
    fixture_close(&f);
}

SK_TEST(entry, test_create_when_arguments_null_then_invalid) {
    sk_entry *entry = NULL;
    CHECK_STATUS(SK_INVALID, sk_entry_create(NULL, &entry));
    fixture f = fixture_open(0, false);
    CHECK_STATUS(SK_INVALID, sk_entry_create(f.pool, NULL));
    fixture_close(&f);
}
