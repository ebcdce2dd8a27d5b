/* extents.h - the parts of the file and their states. No locks, no files: numbers only.
 *
 * The file's offsets from 0 to SK_MAX_BYTES are covered by *tiles*, in order, without gaps:
 *   VACANT   no space of the file system behind it
 *   KEPT     released; its space is kept for the next reservation
 *   TRANSIT  a thread is asking the file system about it, with the lock released; in no list
 *   USED     an extent
 * Invariants (sk__extents_check): neighbours that are both vacant, or both kept, are merged; every
 * vacant or kept tile is in the bin of its size; bytes[] are the sums. Offsets cost nothing, so
 * any bytes within the limit are available, however scattered the tiles are.
 *
 * A tile in use has its record, so releasing allocates nothing. Records are kept until the end:
 * there are never more than about twice as many as extents at once. Caller: disk->lock. */
#ifndef SWAPKIT_DISK_EXTENTS_H
#define SWAPKIT_DISK_EXTENTS_H

#include "disk/disk.h"

typedef enum sk__tile_state {
    SK_TILE_VACANT,
    SK_TILE_KEPT,
    SK_TILE_TRANSIT,
    SK_TILE_USED,
    SK_TILE_STATES,
    SK_TILE_SPARE /* an unused record */
} sk__tile_state;

typedef struct sk__tile {
    uint64_t offset;
    size_t nbytes;
    struct sk__tile *left, *right; /* neighbours in the file */
    struct sk__tile *prev, *next;  /* in the bin, or among the spare records */
    sk__tile_state state;
} sk__tile;

enum { SK_TILE_BINS = 64, SK_TILE_LISTED = SK_TILE_KEPT + 1 };

/* The tiles of one state by the binary logarithm of their size. Bit i: bin i is not empty. */
typedef struct sk__tile_bins {
    uint64_t filled;
    sk__tile *bins[SK_TILE_BINS];
} sk__tile_bins;

typedef struct sk__extents {
    sk__tile *first;
    sk__tile *spare;
    sk__tile_bins listed[SK_TILE_LISTED]; /* by state: VACANT, KEPT */
    size_t bytes[SK_TILE_STATES];
} sk__extents;

sk_status sk__extents_init(sk__extents *extents);
void sk__extents_free(sk__extents *extents);
/* Ensure that the next take can cut a tile in two. */
sk_status sk__extents_prepare(sk__extents *extents);
/* Return the smallest tile of `state` (VACANT, KEPT) with `nbytes`, cut to size; TRANSIT. NULL:
 * none. */
sk__tile *sk__extents_take(sk__extents *extents, sk__tile_state state, size_t nbytes);
/* Return one of the largest kept tiles, whole; TRANSIT. NULL: none. */
sk__tile *sk__extents_take_kept(sk__extents *extents);
/* Give a tile that is in no list its new state. It may be merged away if that is VACANT or KEPT. */
void sk__extents_put(sk__extents *extents, sk__tile *tile, sk__tile_state state);
/* Whether `extent` exists now. */
bool sk__extents_own(const sk__extents *extents, const sk__extent *extent);
sk_status sk__extents_check(const sk__extents *extents, size_t block_bytes);

/* Return the bytes that the file takes from the file system, or is about to take. */
static inline size_t sk__extents_backed(const sk__extents *extents) {
    return extents->bytes[SK_TILE_KEPT] + extents->bytes[SK_TILE_TRANSIT] +
           extents->bytes[SK_TILE_USED];
}

#endif
