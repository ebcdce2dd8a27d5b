/* pieces.h - locked pieces of host memory, and copies that must not cross from one into the next.
 */
#ifndef SWAPKIT_BACKEND_PIECES_H
#define SWAPKIT_BACKEND_PIECES_H

#include "base/thread.h"

enum { SK_HOST_LOCK_BYTES = 16 * 1024 * 1024 }; /* a copy this long hides the cost of its start */

typedef struct sk__pieces {
    sk__mutex lock;
    sk__fork_node fork_node;
    size_t locked_bytes SK_GUARDED_BY(lock); /* of host memory */
    size_t cut_bytes SK_GUARDED_BY(lock);    /* the smallest locked piece; 0: none is */
} sk__pieces;

void sk__pieces_open(sk__pieces *pieces);
void sk__pieces_close(sk__pieces *pieces);
/* Note that a piece of `nbytes` was locked, or unlocked. Threads: any. */
void sk__pieces_locked(sk__pieces *pieces, size_t nbytes);
void sk__pieces_unlocked(sk__pieces *pieces, size_t nbytes);

typedef struct sk__copy {
    char *to;
    const char *from;
    size_t nbytes;
    sk_copy_kind kind;
    sk_stream *stream;
    const char *what; /* the library's function that was called last; static */
} sk__copy;

/* How a device copies. Results are those of its library; 0 is success. */
typedef struct sk__copier {
    int (*start)(const void *self, sk__copy *piece);     /* sets `what` */
    void (*settle)(const void *self, sk_stream *stream); /* waits for the stream */
} sk__copier;

/* Start a copy, cut where a locked piece of host memory ends. If a piece is refused, the earlier
 * ones are done when this returns. Threads: any. */
int sk__pieces_copy(sk__pieces *pieces, const sk__copier *copier, const void *self, sk__copy *copy);

#endif
