/* swapkit_lives.h - the lives of a step's blocks, and addresses planned for them.
 *
 * A step of training repeats its requests. The pool counts them by call site: the phase of the
 * step, the tag of the thread, and the size. So an additional or missing request changes nothing
 * for other call sites, and nothing after the end of its phase. A phase ends where
 * SK_TAG_BACKWARD changes, and a step at SK_RING_MARK. Threads without a tag, which no session has
 * labelled, are asked for their phase (sk_pool_set_backward).
 *
 * Sizes that the steps before did not request, such as those of experts that get other tokens in
 * each step, share one call site for each phase and tag: its requests vary in size.
 *
 * The words and rules are those of swapkit_pool.h. */
#ifndef SWAPKIT_LIVES_H
#define SWAPKIT_LIVES_H

#include "swapkit_pool.h"

/* Bits of a tag: the thread runs a backward pass, or an optimizer's step. */
#ifdef SK_CDEF
static const uint32_t SK_TAG_BACKWARD, SK_TAG_OPTIMIZER;
#else
#define SK_TAG_BACKWARD UINT32_C(0x80000000)
#define SK_TAG_OPTIMIZER UINT32_C(0x40000000)
#endif

/* What a pool does with lives. */
typedef enum sk_lives_mode {
    SK_LIVES_OFF,
    SK_LIVES_NOTED,   /* note them; memory that lasts over steps has segments of its own */
    SK_LIVES_SEPARATE /* also activations, and what the next step frees */
} sk_lives_mode;

/* How long a block lived. */
typedef enum sk_life_class {
    SK_LIFE_UNKNOWN,
    SK_LIFE_TRANSIENT,  /* freed in the phase that took it */
    SK_LIFE_ACTIVATION, /* freed in a later phase of the step */
    SK_LIFE_CROSSING,   /* freed in the next step, before that step's request */
    SK_LIFE_LASTING     /* in use at the next step's request, or not requested again */
} sk_life_class;

#define SK_LIFE_WINDOW 8

/* The latest two lives of the blocks of one request: in the last step that made it, and in the one
 * before. Times count the pool's takes and frees. A block is free when it can be taken again. */
typedef struct sk_life {
    size_t nbytes;          /* of the latest */
    size_t former_bytes;    /* of the one before */
    size_t most_bytes;      /* of the latest SK_LIFE_WINDOW steps or more */
    size_t requested_bytes; /* of the latest */
    uint64_t step[2];       /* latest first; UINT64_MAX: there was none */
    uint64_t taken_at[2];
    uint64_t freed_at[2]; /* 0: not yet */
    uint64_t longest;     /* life of these steps, in takes and frees */
    uintptr_t stream;     /* of the latest */
    uint32_t phase, tag;
    uint32_t turn;      /* number among the requests of the call site in the step */
    uint32_t varies;    /* whether requests of any size belong to the call site */
    uint32_t predicted; /* sk_life_class of the latest when it was taken */
    uint32_t observed;  /* sk_life_class of the one before */
} sk_life;

/* When steps began. */
typedef struct sk_step_times {
    uint64_t step;        /* that runs now */
    uint64_t began_at[3]; /* this step, the last one, and the one before */
    uint64_t now;
} sk_step_times;

/* Addresses planned for one request of each step. Requests that vary in size may share them: each
 * is served in the first gap. */
typedef struct sk_place {
    size_t nbytes;     /* of the request; 0: it varies */
    size_t room_bytes; /* at least nbytes; a multiple of 512 */
    size_t offset;     /* a multiple of 512 */
    uint64_t begin;    /* of the time when they are needed, in takes and frees of the step, */
    uint64_t end;      /* and its end; 0: any time */
    uint32_t phase, tag, turn;
} sk_place;

/* Requests since the layout was set: as planned; in a hole of its memory that no other request
 * needs meanwhile; and the others, with and without a plan. */
typedef struct sk_layout_stats {
    uint64_t height_bytes; /* 0: there is no layout */
    uint64_t places;
    uint64_t hits, hit_bytes;
    uint64_t holes, hole_bytes;
    uint64_t misses, missed_bytes;
    uint64_t unplanned, unplanned_bytes;
} sk_layout_stats;

/* Threads: any, for all functions below. */

/* Note lives from now on, or forget them and the layout. Blocks in use stay where they are. A
 * second call forgets which lives were the longest, as before steps of another kind. */
SK_API void sk_pool_set_lives(sk_pool *pool, sk_lives_mode mode);
/* Ask `backward` whether the running thread is in a backward pass, when it takes a block with the
 * tag 0 and lives are on; its tag is SK_TAG_BACKWARD then. NULL: do not ask. Called with the pool's
 * lock held: it must neither wait nor call the pool. */
typedef bool (*sk_backward_fn)(void);
SK_API void sk_pool_set_backward(sk_pool *pool, sk_backward_fn backward);
/* Copy up to `capacity` lives, those of a call site together and in order; return how many there
 * are. times  may be NULL. */
SK_API size_t sk_pool_lives(sk_pool *pool, sk_life *out, size_t capacity, sk_step_times *times);
/* Serve requests at planned addresses where these are free, in a range of their own. The places of
 * a call site follow one another in the order of their turns. Cached memory should be given back
 * before (sk_pool_trim), or the pool holds both.
 *
 * count    0: no layout any more.
 * height   the end of the highest place.
 * Returns  SK_INVALID: lives are off, or a place lies outside; then nothing is changed. */
SK_API SK_NODISCARD sk_status sk_pool_set_layout(sk_pool *pool, const sk_place *places,
                                                 size_t count, size_t height_bytes);
/* As sk_pool_trim, but keep the memory of the layout. */
SK_API SK_NODISCARD sk_status sk_pool_trim_unplanned(sk_pool *pool);
SK_API void sk_pool_layout_stats(sk_pool *pool, sk_layout_stats *out);

#endif
