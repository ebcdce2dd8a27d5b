/* swapkit_hooks.h - how a kernel that torch does not run announces itself to swapkit.
 *
 * From its announcement until its end, an *operator* has operands that swapkit neither moves nor
 * frees, and a name that reports and traces give to its memory. Link with libswapkit.so, which
 * needs neither Python nor torch. Where swapkit does not run, or no session or choice needs the
 * announcements, each call returns after a few loads. C++ programs include swapkit.hpp instead.
 *
 * Threads: any. Each thread has its own operators, which nest. A call may wait for Python's global
 * interpreter lock and for swapkit's lock: hold no lock that Python code may wait for. No lock of
 * ours is held between two calls.
 *
 * There are two forms. The *guarded* form gives a token to the operator, and is exact. In the
 * *seed's* form (sk_op_begin to sk_op_end) one function makes all calls of an operator, directly or
 * through small functions of its own. If an exception leaves that function before sk_op_end, the
 * operator ends at the thread's next call from a frame further out, at the next sk_op_begin of the
 * same name from the same place, at the end of a guarded operator around it, when the thread ends a
 * session's step, or with the thread, whichever comes first. A step that another thread ends leaves
 * it open, with its operands held: its kernel may be running. */
#ifndef SWAPKIT_HOOKS_H
#define SWAPKIT_HOOKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef SK_API
#define SK_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum sk_op_result {
    SK_OP_OK,
    SK_OP_FAILED, /* sk_op_error() has this thread's text */
    SK_OP_OUT_OF_MEMORY
} sk_op_result;

/* Memory that an operator uses. */
typedef struct sk_op_memory {
    const void *address; /* any byte of it; it has to be there: see `storage` */
    size_t nbytes;
    /* The c10::StorageImpl, or NULL if the caller has only the address: swapkit then searches the
     * tensors saved for backward, one by one. Whoever has only an address of memory that nothing
     * but backward keeps has to announce it as soon as it is known: once moved, the bytes have
     * another address. */
    void *storage;
    bool is_only_read; /* the operator does not write to it: what was made of the bytes stays */
} sk_op_memory;

/* ---- guarded form ---------------------------------------------------------------------------- */

/* Begin an operator; return its token. 0: nothing needs it, and the other calls ignore it. */
SK_API uint64_t sk_op_enter(const char *name);
/* Announce an operand, before the kernel runs. Unless `is_only_read`, the kernel may overwrite it:
 * results that would be recomputed from it are kept, and copies made of it are renewed. */
SK_API sk_op_result sk_op_operand(uint64_t token, const sk_op_memory *memory);
/* Announce an output, after the kernel has run. Announce outputs that exist before also as
 * operands. */
SK_API sk_op_result sk_op_output(uint64_t token, const sk_op_memory *memory);
/* End an operator and what the seed's form has left open inside it. Threads: the one that began it.
 */
SK_API void sk_op_leave(uint64_t token);

/* ---- the seed's form ------------------------------------------------------------------------- */

SK_API void sk_op_begin(const char *name);
/* An operand; after sk_op_post an output. */
SK_API sk_op_result sk_op_tensor(const void *address, size_t nbytes, void *storage);
SK_API void sk_op_post(void);
SK_API void sk_op_end(void);

/* Describe this thread's latest failure. Borrowed until its next one. */
SK_API const char *sk_op_error(void);
/* Return how many operators have run unannounced in this process because there was no memory to
 * follow them; all their calls succeed, and do nothing. */
SK_API size_t sk_op_unannounced(void);

/* ---- for swapkit's runtime ------------------------------------------------------------------- */

/* What the calls above lead to. Called with no lock held; they may make such calls themselves. */
typedef struct sk_op_listener {
    bool (*is_wanted)(void);          /* whether anything needs operators that begin now; quick */
    void *(*begin)(const char *name); /* NULL: the operator is not followed */
    /* On failure: writes `text`, of `capacity` bytes. */
    sk_op_result (*memory)(void *op, const sk_op_memory *memory, bool is_output, char *text,
                           size_t capacity);
    void (*end)(void *op); /* on the thread that began it, perhaps while that thread ends */
} sk_op_listener;

/* listener  static; NULL: none, and operators that are open end without a call. */
SK_API void sk_op_connect(const sk_op_listener *listener);
/* End what the seed's form has left open on this thread, which is between two steps. Operators of
 * other threads go on: they may be running. */
SK_API void sk_op_sweep(void);
/* Return how many operators are open on this thread. */
SK_API size_t sk_op_depth(void);

#ifdef __cplusplus
}
#endif

#endif
