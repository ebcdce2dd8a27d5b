/* window.c - a sorted list of entries, in chunks. */
#include <stdlib.h>
#include <string.h>

#include "layout/window.h"

/* gcc 12 loses track of pointers that are stored in an array, and takes them for leaks. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wanalyzer-malloc-leak"
#endif

/* Make an empty chunk the one at `place`. */
static bool add_chunk(sk__window *window, int32_t place) {
    if (window->count == window->room) {
        int32_t room = window->room == 0 ? 1 : 2 * window->room;
        sk__chunk **chunks = realloc(window->chunks, (size_t)room * sizeof *chunks);
        if (chunks == NULL) {
            return false;
        }
        window->chunks = chunks;
        window->room = room;
    }
    sk__chunk *chunk = malloc(sizeof *chunk);
    if (chunk == NULL) {
        return false;
    }
    memmove(window->chunks + place + 1, window->chunks + place,
            (size_t)(window->count - place) * sizeof(sk__chunk *));
    chunk->count = 0;
    window->chunks[place] = chunk;
    window->count++;
    return true;
}

/* Return the chunk for an entry at `low`: the last that begins at or below it, or the first. */
static int32_t chunk_of(const sk__window *window, int64_t low) {
    int32_t from = 1;
    int32_t to = window->count;
    while (from < to) {
        int32_t middle = (from + to) / 2;
        if (window->chunks[middle]->entries[0].low <= low) {
            from = middle + 1;
        } else {
            to = middle;
        }
    }
    return from - 1;
}

/* Return the place of the first entry above `low`. */
static int32_t place_of(const sk__chunk *chunk, int64_t low) {
    int32_t from = 0;
    int32_t to = chunk->count;
    while (from < to) {
        int32_t middle = (from + to) / 2;
        if (chunk->entries[middle].low <= low) {
            from = middle + 1;
        } else {
            to = middle;
        }
    }
    return from;
}

static bool is_alike(const sk__entry *entry, const sk__entry *other) {
    return entry->first == other->first && entry->end == other->end;
}

/* Merge the entry with its neighbours in the chunk; return whether one of them has become it. */
static bool merge(sk__chunk *chunk, int32_t place, const sk__entry *entry) {
    sk__entry *before = place > 0 ? &chunk->entries[place - 1] : NULL;
    sk__entry *after = place < chunk->count ? &chunk->entries[place] : NULL;
    bool is_below = before != NULL && before->high == entry->low && is_alike(before, entry);
    bool is_above = after != NULL && after->low == entry->high && is_alike(after, entry);
    if (is_below) {
        before->high = is_above ? after->high : entry->high;
        if (is_above) {
            chunk->count--;
            memmove(after, after + 1, (size_t)(chunk->count - place) * sizeof *after);
        }
    } else if (is_above) {
        after->low = entry->low;
    }
    return is_below || is_above;
}

/* Move the upper half of a full chunk to a new one after it. */
static bool split(sk__window *window, int32_t place) {
    if (!add_chunk(window, place + 1)) {
        return false;
    }
    sk__chunk *full = window->chunks[place];
    sk__chunk *half = window->chunks[place + 1];
    half->count = full->count / 2;
    full->count -= half->count;
    memcpy(half->entries, full->entries + full->count,
           (size_t)half->count * sizeof half->entries[0]);
    return true;
}

bool sk__window_insert(sk__window *window, const sk__entry *entry) {
    if (window->count == 0) {
        if (!add_chunk(window, 0)) {
            return false;
        }
        window->chunks[0]->entries[0] = *entry;
        window->chunks[0]->count = 1;
        return true;
    }
    int32_t number = chunk_of(window, entry->low);
    sk__chunk *chunk = window->chunks[number];
    int32_t place = place_of(chunk, entry->low);
    if (merge(chunk, place, entry)) {
        return true;
    }
    if (chunk->count == SK__CHUNK) {
        if (!split(window, number)) {
            return false;
        }
        if (place > chunk->count) {
            place -= chunk->count;
            chunk = window->chunks[number + 1];
        }
    }
    memmove(chunk->entries + place + 1, chunk->entries + place,
            (size_t)(chunk->count - place) * sizeof chunk->entries[0]);
    /* In range: a full chunk has been split.
     * NOLINTNEXTLINE(clang-analyzer-security.ArrayBound) */
    chunk->entries[place] = *entry;
    chunk->count++;
    return true;
}

void sk__window_free(const sk__window *window) {
    for (int32_t chunk = 0; chunk < window->count; chunk++) {
        free(window->chunks[chunk]);
    }
    free(window->chunks);
}
