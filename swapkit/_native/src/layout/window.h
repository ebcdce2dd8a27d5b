/* window.h - the placed items that live in some sections, by their offsets.
 *
 * Neighbours in address that live in the same of these sections are one entry. Most items live
 * longer than a few sections, so lists stay short. */
#ifndef SWAPKIT_LAYOUT_WINDOW_H
#define SWAPKIT_LAYOUT_WINDOW_H

#include <stdbool.h>
#include <stdint.h>

enum { SK__CHUNK = 128 };

typedef struct sk__entry {
    int64_t low;
    int64_t high;
    int32_t first; /* sections, no further than the window */
    int32_t end;
} sk__entry;

typedef struct sk__chunk {
    int32_t count; /* 1 or more, except in a window without entries */
    sk__entry entries[SK__CHUNK];
} sk__chunk;

/* A list of entries by `low`, in chunks, so that adding one moves few. */
typedef struct sk__window {
    sk__chunk **chunks;
    int32_t count;
    int32_t room;
} sk__window;

/* False: no host memory; the window is as before. */
bool sk__window_insert(sk__window *window, const sk__entry *entry);
void sk__window_free(const sk__window *window);

#endif
