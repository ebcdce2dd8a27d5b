/* entry.c - the functions below torch's allocator.
 *
 * Plain C without Python or torch: any thread may call them, also while the interpreter shuts down,
 * and they outlive it. The text of a failure is kept per thread until the caller, a C++ shim, has
 * turned it into torch's own exception. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "base/thread.h"
#include "pool/pool.h"
#include "swapkit_entry.h"

enum { TEXT_BYTES = 16 * 1024 };

struct sk_entry {
    sk_pool *pool;
    sk__mutex lock;
    sk__fork_node fork_node;
    sk_explain_fn explain SK_GUARDED_BY(lock);
    void *context SK_GUARDED_BY(lock);
};

static _Thread_local char failure_text[TEXT_BYTES];
static _Thread_local bool failure_is_memory;

sk_status sk_entry_create(sk_pool *pool, sk_entry **out) {
    if (pool == NULL || out == NULL) {
        return sk__fail(SK_INVALID, "entry: expected a pool and a pointer for the result");
    }
    sk_entry *entry = calloc(1, sizeof *entry);
    if (entry == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "entry: no host memory for its state");
    }
    entry->pool = pool;
    sk__mutex_init(&entry->lock, SK_RANK_POOL);
    entry->fork_node = (sk__fork_node){.lock = &entry->lock};
    sk__fork_register(&entry->fork_node);
    *out = entry;
    return SK_OK;
}

void sk_entry_destroy(sk_entry *entry) {
    if (entry != NULL) {
        sk__fork_unregister(&entry->fork_node);
        sk__mutex_destroy(&entry->lock);
        free(entry);
    }
}

sk_pool *sk_entry_pool(const sk_entry *entry) { return entry->pool; }

void sk_entry_set_explain(sk_entry *entry, sk_explain_fn explain, void *context) {
    sk__lock(&entry->lock);
    entry->explain = explain;
    entry->context = context;
    sk__unlock(&entry->lock);
}

static void failure_explain(sk_entry *entry, size_t nbytes) {
    /* The plain text first: an explanation that fails leaves it in place. */
    (void)snprintf(failure_text, sizeof failure_text, "swapkit: out of memory: %s",
                   sk_error_text());
    sk__lock(&entry->lock);
    sk_explain_fn explain = entry->explain;
    void *context = entry->context;
    sk__unlock(&entry->lock);
    if (explain != NULL) {
        size_t length = explain(context, nbytes, failure_text, sizeof failure_text - 1);
        if (length > 0) {
            failure_text[sk__min(length, sizeof failure_text - 1)] = '\0';
        }
    }
}

void *sk_entry_alloc(sk_entry *entry, size_t nbytes, sk_stream *stream) {
    void *address = NULL;
    sk_status status = sk_pool_take(entry->pool, nbytes, stream, &address);
    if (status == SK_OK) {
        return address;
    }
    failure_is_memory = sk__is_memory_failure(status);
    if (!failure_is_memory) {
        (void)snprintf(failure_text, sizeof failure_text, "swapkit: %s", sk_error_text());
    } else if (!sk__is_tentative()) {
        failure_explain(entry, nbytes);
    }
    return NULL;
}

void sk_entry_free(sk_entry *entry, void *address) {
    if (address != NULL) {
        sk_status status = sk_pool_give(entry->pool, address);
        sk_assert(status == SK_OK);
        sk__ignore(status);
    }
}

sk_status sk_entry_use(sk_entry *entry, void *address, sk_stream *stream) {
    sk_status status = sk_pool_use(entry->pool, address, stream);
    return status == SK_INVALID ? SK_OK : status; /* no block of the pool's begins there */
}

void sk_entry_unuse(sk_entry *entry, void *address, sk_stream *stream, sk_stream *current) {
    sk_pool_unuse(entry->pool, address, stream, current);
}

sk_status sk_entry_trim(sk_entry *entry) { return sk_pool_trim(entry->pool); }

sk_status sk_entry_segment_at(sk_entry *entry, const void *address, sk_segment_info *out) {
    return sk_pool_segment_at(entry->pool, address, out);
}

const char *sk_entry_error(void) { return failure_text; }

bool sk_entry_is_out_of_memory(void) { return failure_is_memory; }
