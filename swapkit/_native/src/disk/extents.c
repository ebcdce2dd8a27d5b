/* extents.c - tiles: best fit, cutting, merging. See extents.h. */
#include "disk/extents.h"

#include <stdlib.h>

static bool state_is_listed(sk__tile_state state) {
    return state == SK_TILE_VACANT || state == SK_TILE_KEPT;
}

static unsigned bin_of(size_t nbytes) {
    sk_assert(nbytes > 0);
    return SK_TILE_BINS - 1 - (unsigned)__builtin_clzll(nbytes);
}

static void list_add(sk__extents *extents, sk__tile *tile) {
    sk_assert(state_is_listed(tile->state));
    sk__tile_bins *listed = &extents->listed[tile->state];
    unsigned bin = bin_of(tile->nbytes);
    tile->prev = NULL;
    tile->next = listed->bins[bin];
    if (tile->next != NULL) {
        tile->next->prev = tile;
    }
    listed->bins[bin] = tile;
    listed->filled |= UINT64_C(1) << bin;
}

static void list_remove(sk__extents *extents, sk__tile *tile) {
    sk_assert(state_is_listed(tile->state));
    sk__tile_bins *listed = &extents->listed[tile->state];
    unsigned bin = bin_of(tile->nbytes);
    if (tile->next != NULL) {
        tile->next->prev = tile->prev;
    }
    if (tile->prev != NULL) {
        tile->prev->next = tile->next;
    } else {
        sk_assert(listed->bins[bin] == tile);
        listed->bins[bin] = tile->next;
    }
    if (listed->bins[bin] == NULL) {
        listed->filled &= ~(UINT64_C(1) << bin);
    }
    tile->prev = tile->next = NULL;
}

/* Return the smallest tile of a bin with at least `nbytes`. Sizes repeat: the walk mostly ends
 * early. */
static sk__tile *bin_best(sk__tile *head, size_t nbytes) {
    sk__tile *best = NULL;
    for (sk__tile *tile = head; tile != NULL; tile = tile->next) {
        if (tile->nbytes == nbytes) {
            return tile;
        }
        if (tile->nbytes > nbytes && (best == NULL || tile->nbytes < best->nbytes)) {
            best = tile;
        }
    }
    return best;
}

static sk__tile *list_best(const sk__tile_bins *listed, size_t nbytes) {
    unsigned bin = bin_of(nbytes);
    sk__tile *best = bin_best(listed->bins[bin], nbytes);
    /* Any tile in a higher bin is large enough. */
    uint64_t higher = listed->filled & ~((UINT64_C(2) << bin) - 1);
    if (best == NULL && higher != 0) {
        best = bin_best(listed->bins[__builtin_ctzll(higher)], nbytes);
        sk_assert(best != NULL);
    }
    return best;
}

static sk__tile *record_pop(sk__extents *extents) {
    sk__tile *record = extents->spare;
    sk_assert(record != NULL && record->state == SK_TILE_SPARE);
    extents->spare = record->next;
    sk_assert(record->nbytes == 0 && record->left == NULL && record->right == NULL);
    return record;
}

static void record_push(sk__extents *extents, sk__tile *record) {
    sk_assert(record->prev == NULL && record->next == NULL);
    *record = (sk__tile){.state = SK_TILE_SPARE, .next = extents->spare};
    extents->spare = record;
}

sk_status sk__extents_prepare(sk__extents *extents) {
    if (extents->spare != NULL) {
        return SK_OK;
    }
    sk__tile *record = malloc(sizeof *record);
    if (record == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "disk: no host memory to describe an extent");
    }
    *record = (sk__tile){.state = SK_TILE_SPARE};
    record_push(extents, record);
    return SK_OK;
}

sk_status sk__extents_init(sk__extents *extents) {
    sk__tile *whole = malloc(sizeof *whole);
    if (whole == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "disk: no host memory to describe the file");
    }
    *extents = (sk__extents){0};
    *whole = (sk__tile){.nbytes = SK_MAX_BYTES, .state = SK_TILE_VACANT};
    extents->first = whole;
    extents->bytes[SK_TILE_VACANT] = SK_MAX_BYTES;
    list_add(extents, whole);
    return SK_OK;
}

void sk__extents_free(sk__extents *extents) {
    for (sk__tile *tile = extents->first; tile != NULL;) {
        sk__tile *right = tile->right;
        free(tile);
        tile = right;
    }
    while (extents->spare != NULL) {
        free(record_pop(extents));
    }
    extents->first = NULL;
}

static void tile_set(sk__extents *extents, sk__tile *tile, sk__tile_state state) {
    sk_assert(tile->state < SK_TILE_STATES && state < SK_TILE_STATES);
    sk_assert(extents->bytes[tile->state] >= tile->nbytes);
    extents->bytes[tile->state] -= tile->nbytes;
    extents->bytes[state] += tile->nbytes;
    tile->state = state;
}

/* Cut a tile that is in no list after `nbytes`; the right part is listed. */
static void tile_split(sk__extents *extents, sk__tile *tile, size_t nbytes) {
    sk_assert(tile->nbytes > nbytes && nbytes > 0);
    sk__tile *rest = record_pop(extents);
    *rest = (sk__tile){.offset = tile->offset + nbytes,
                       .nbytes = tile->nbytes - nbytes,
                       .left = tile,
                       .right = tile->right,
                       .state = tile->state};
    if (rest->right != NULL) {
        rest->right->left = rest;
    }
    tile->right = rest;
    tile->nbytes = nbytes;
    list_add(extents, rest);
}

sk__tile *sk__extents_take(sk__extents *extents, sk__tile_state state, size_t nbytes) {
    sk_assert(state_is_listed(state));
    sk__tile *tile = list_best(&extents->listed[state], nbytes);
    if (tile == NULL) {
        return NULL;
    }
    list_remove(extents, tile);
    if (tile->nbytes > nbytes) {
        tile_split(extents, tile, nbytes);
    }
    sk_assert(tile->nbytes == nbytes && tile->state == state);
    tile_set(extents, tile, SK_TILE_TRANSIT);
    return tile;
}

sk__tile *sk__extents_take_kept(sk__extents *extents) {
    const sk__tile_bins *kept = &extents->listed[SK_TILE_KEPT];
    if (kept->filled == 0) {
        return NULL;
    }
    sk__tile *tile = kept->bins[SK_TILE_BINS - 1 - (unsigned)__builtin_clzll(kept->filled)];
    sk_assert(tile != NULL);
    list_remove(extents, tile);
    tile_set(extents, tile, SK_TILE_TRANSIT);
    return tile;
}

/* Join `right` to its left neighbour; neither is in a list. */
static void tile_absorb(sk__extents *extents, sk__tile *left, sk__tile *right) {
    sk_assert(left->right == right && left->state == right->state);
    sk_assert(left->offset + left->nbytes == right->offset);
    left->nbytes += right->nbytes;
    left->right = right->right;
    if (left->right != NULL) {
        left->right->left = left;
    }
    record_push(extents, right);
}

void sk__extents_put(sk__extents *extents, sk__tile *tile, sk__tile_state state) {
    sk_assert(tile->state == SK_TILE_TRANSIT || tile->state == SK_TILE_USED);
    tile_set(extents, tile, state);
    if (!state_is_listed(state)) {
        return;
    }
    sk__tile *right = tile->right;
    if (right != NULL && right->state == state) {
        list_remove(extents, right);
        tile_absorb(extents, tile, right);
    }
    sk__tile *left = tile->left;
    if (left != NULL && left->state == state) {
        list_remove(extents, left);
        tile_absorb(extents, left, tile);
        tile = left;
    }
    list_add(extents, tile);
}

bool sk__extents_own(const sk__extents *extents, const sk__extent *extent) {
    const sk__tile *tile = extent->tile;
    (void)extents; /* whose lock guards the tile */
    return extent->source != NULL ||
           (tile != NULL && tile->state == SK_TILE_USED && tile->offset == extent->offset &&
            tile->nbytes == extent->nbytes);
}

/* ---- check ----------------------------------------------------------------------------------- */

#define ENSURE(condition, ...)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            return sk__fail(SK_CORRUPT, "disk: " __VA_ARGS__);                                     \
        }                                                                                          \
    } while (0)

static sk_status tile_check(const sk__tile *tile, size_t block_bytes) {
    const sk__tile *right = tile->right;
    unsigned long long offset = tile->offset;
    ENSURE(tile->state < SK_TILE_STATES, "the tile at %llu has no state", offset);
    ENSURE(tile->nbytes > 0 && tile->nbytes % block_bytes == 0,
           "the tile at %llu is not made of whole blocks", offset);
    uint64_t end = tile->offset + tile->nbytes;
    ENSURE(end == (right == NULL ? SK_MAX_BYTES : right->offset), "a gap after the tile at %llu",
           offset);
    ENSURE(right == NULL || right->left == tile, "neighbours at %llu do not agree", offset);
    ENSURE(right == NULL || right->state != tile->state || !state_is_listed(tile->state),
           "neighbours at %llu are not merged", offset);
    return SK_OK;
}

/* Count a state's listed tiles. */
static sk_status bins_check(const sk__extents *extents, sk__tile_state state, size_t *out) {
    const sk__tile_bins *listed = &extents->listed[state];
    size_t count = 0;
    for (unsigned bin = 0; bin < SK_TILE_BINS; bin++) {
        bool filled = ((listed->filled >> bin) & 1) != 0;
        ENSURE(filled == (listed->bins[bin] != NULL), "the bitmap is wrong at bin %u", bin);
        const sk__tile *prev = NULL;
        for (const sk__tile *tile = listed->bins[bin]; tile != NULL; tile = tile->next) {
            ENSURE(tile->prev == prev, "the links of bin %u do not agree", bin);
            ENSURE(tile->state == state && bin_of(tile->nbytes) == bin,
                   "the tile at %llu is in the wrong bin", (unsigned long long)tile->offset);
            prev = tile;
            count++;
        }
    }
    *out = count;
    return SK_OK;
}

sk_status sk__extents_check(const sk__extents *extents, size_t block_bytes) {
    size_t bytes[SK_TILE_STATES] = {0};
    size_t tiles[SK_TILE_STATES] = {0};
    ENSURE(extents->first != NULL && extents->first->offset == 0, "the file does not begin at 0");
    for (const sk__tile *tile = extents->first; tile != NULL; tile = tile->right) {
        sk_status status = tile_check(tile, block_bytes);
        if (status != SK_OK) {
            return status;
        }
        unsigned state = (unsigned)tile->state % SK_TILE_STATES;
        bytes[state] += tile->nbytes;
        tiles[state]++;
    }
    for (int state = 0; state < SK_TILE_STATES; state++) {
        ENSURE(bytes[state] == extents->bytes[state], "%zu bytes in state %d, counted %zu",
               bytes[state], state, extents->bytes[state]);
    }
    for (int state = 0; state < SK_TILE_LISTED; state++) {
        size_t listed = 0;
        sk_status status = bins_check(extents, (sk__tile_state)state, &listed);
        if (status != SK_OK) {
            return status;
        }
        ENSURE(listed == tiles[state], "%zu tiles in state %d, listed %zu", tiles[state], state,
               listed);
    }
    return SK_OK;
}
