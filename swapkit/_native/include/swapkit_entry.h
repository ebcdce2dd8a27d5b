/* swapkit_entry.h - a pool as torch's allocator sees it.
 *
 * Functions that may be called by any thread, also while the interpreter shuts down. The rules are
 * those of swapkit.h. */
#ifndef SWAPKIT_ENTRY_H
#define SWAPKIT_ENTRY_H

#include "swapkit.h"

typedef struct sk_entry sk_entry;

/* Writes into `text` what a failed request for `nbytes` should say; returns its length. */
typedef size_t (*sk_explain_fn)(void *context, size_t nbytes, char *text, size_t capacity);

/* pool  borrowed: must outlive the entry.   out  owned: sk_entry_destroy(). */
SK_API SK_NODISCARD sk_status sk_entry_create(sk_pool *pool, sk_entry **out);
SK_API void sk_entry_destroy(sk_entry *entry);
/* NULL: none; the plain text with the pool's figures is used. Threads: any. */
SK_API void sk_entry_set_explain(sk_entry *entry, sk_explain_fn explain, void *context);
/* Memory that is safe to use on `stream`. NULL on failure: sk_entry_error() then has this thread's
 * text for the user. Threads: any. */
SK_API void *sk_entry_alloc(sk_entry *entry, size_t nbytes, sk_stream *stream);
SK_API void sk_entry_free(sk_entry *entry, void *address);
/* As sk_pool_use; a place where no block in use begins is left alone. Threads: any. */
SK_API SK_NODISCARD sk_status sk_entry_use(sk_entry *entry, void *address, sk_stream *stream);
/* As sk_pool_trim; what cannot be given back stays for later. */
SK_API void sk_entry_trim(sk_entry *entry);
/* The segment that holds `address`, as sk_pool_segment_at. */
SK_API SK_NODISCARD sk_status sk_entry_segment_at(sk_entry *entry, const void *address,
                                                  sk_segment_info *out);
SK_API const char *sk_entry_error(void);
/* Whether this thread's latest failure was for want of memory; else the device is in trouble. */
SK_API bool sk_entry_is_out_of_memory(void);

#ifdef SK_CDEF
/* Python's side of the callback above (cffi API mode). */
extern "Python" size_t sk_python_explain(void *context, size_t nbytes, char *text, size_t capacity);
#endif

#endif
