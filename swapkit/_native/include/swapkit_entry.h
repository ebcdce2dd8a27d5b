/* swapkit_entry.h - the functions of a pool that torch calls as its allocator.
 *
 * Any thread may call them, also while the interpreter shuts down. The rules are those of
 * swapkit.h. */
#ifndef SWAPKIT_ENTRY_H
#define SWAPKIT_ENTRY_H

#include "swapkit_pool.h"

typedef struct sk_entry sk_entry;

/* Write the text for a failed request of `nbytes` into `text`; return its length. */
typedef size_t (*sk_explain_fn)(void *context, size_t nbytes, char *text, size_t capacity);

/* pool  borrowed: must outlive the entry.   out  owned: sk_entry_destroy(). */
SK_API SK_NODISCARD sk_status sk_entry_create(sk_pool *pool, sk_entry **out);
SK_API void sk_entry_destroy(sk_entry *entry);
/* The pool, borrowed. Threads: any. */
SK_API sk_pool *sk_entry_pool(const sk_entry *entry);
/* Set the writer of that text; NULL: the plain text with the pool's figures. Threads: any. */
SK_API void sk_entry_set_explain(sk_entry *entry, sk_explain_fn explain, void *context);
/* Take memory that is safe to use on `stream`. NULL on failure: sk_entry_error() then has this
 * thread's text for the user. Threads: any. */
SK_API void *sk_entry_alloc(sk_entry *entry, size_t nbytes, sk_stream *stream);
SK_API void sk_entry_free(sk_entry *entry, void *address);
/* As sk_pool_use; does nothing where no block in use begins. Threads: any. */
SK_API SK_NODISCARD sk_status sk_entry_use(sk_entry *entry, void *address, sk_stream *stream);
/* As sk_pool_unuse. */
SK_API void sk_entry_unuse(sk_entry *entry, void *address, sk_stream *stream, sk_stream *current);
/* As sk_pool_trim. */
SK_API SK_NODISCARD sk_status sk_entry_trim(sk_entry *entry);
/* The segment that holds `address`, as sk_pool_segment_at. */
SK_API SK_NODISCARD sk_status sk_entry_segment_at(sk_entry *entry, const void *address,
                                                  sk_segment_info *out);
SK_API const char *sk_entry_error(void);
/* Whether this thread's latest failure was for lack of memory; if not, the device failed. */
SK_API bool sk_entry_is_out_of_memory(void);

#ifdef SK_CDEF
/* Python's side of the callback above (cffi API mode). */
extern "Python" size_t sk_python_explain(void *context, size_t nbytes, char *text, size_t capacity);
#endif

#endif
