/* alias.h - memory with several addresses: the interfaces of alias.c, lend.c, place.c and size.c.
 *
 * Everything here is guarded by pool->lock. */
#ifndef SWAPKIT_POOL_ALIAS_H
#define SWAPKIT_POOL_ALIAS_H

#include "pool/pool.h"

/* Physical memory of one granule. It may be mapped in several slots and lies in one of them: its
 * home, in whose block it counts. */
struct sk__granule {
    sk__slot *home;
    sk__slot *slots;   /* where it is mapped, home included */
    sk__granule *next; /* unused record */
    uint64_t seen;     /* by the search with this number */
};

/* One granule of addresses. */
struct sk__slot {
    sk__segment *segment;
    sk__granule *granule; /* mapped here; NULL: none is */
    sk__slot *next;       /* the granule's next slot */
    /* While the memory lies elsewhere: pool->departures when it left, else 0; and the neighbours in
     * the order of departures. */
    uint64_t left_at;
    sk__slot *earlier, *later;
};

typedef struct sk__places {
    uintptr_t *at;
    size_t room;
} sk__places;

/* The places where requests of one size were served. */
struct sk__size {
    size_t nbytes;
    uint64_t step;    /* pool->steps at the latest request */
    size_t turn;      /* requests in that step */
    sk__places turns; /* in the order of a step's requests */
    sk__places places;
    size_t nplaces;          /* ever noted */
    sk__size *same;          /* next with the same hash */
    sk__size *newer, *older; /* by their latest requests */
};

/* alias.c: memory that is mapped at several addresses, and lies at one of them at a time. */
sk_status sk__slots_open(const sk_pool *pool, sk__segment *segment);
void sk__slots_close(sk__segment *segment);
/* Return the index of the segment's slot that holds `address`. */
static inline size_t sk__slot_index(const sk_pool *pool, const sk__segment *segment,
                                    uintptr_t address) {
    sk_assert(address >= segment->address && address - segment->address < segment->nbytes);
    return (address - segment->address) / pool->granule_bytes;
}
static inline sk__slot *sk__slot_at(const sk_pool *pool, const sk__segment *segment,
                                    uintptr_t address) {
    return &segment->slots[sk__slot_index(pool, segment, address)];
}
uintptr_t sk__slot_address(const sk_pool *pool, const sk__slot *slot);
sk_status sk__granules_reserve(sk_pool *pool, size_t count) SK_REQUIRES(pool->lock);
/* Note that memory was committed (needs the granules reserved), or is being decommitted. */
void sk__slots_fill(sk_pool *pool, sk__segment *segment, uintptr_t address, size_t nbytes)
    SK_REQUIRES(pool->lock);
void sk__slots_empty(sk_pool *pool, sk__segment *segment, uintptr_t address, size_t nbytes)
    SK_REQUIRES(pool->lock);
/* Unmap every alias of free granules without outstanding work. */
sk_status sk__aliases_drop(sk_pool *pool, const sk__span *granules) SK_REQUIRES(pool->lock);
/* Move free granules to an address of an idle block, in `lane`: sk__span_map maps them there first,
 * and may then drop the oldest aliases, or notes that the backend failed. Needs
 * SK_RECORDS_PER_TAKE. */
sk_status sk__span_map(sk_pool *pool, const sk__span *gone, const sk__block *vacant, uintptr_t to,
                       sk__lane *lane) SK_REQUIRES(pool->lock);
void sk__span_settle(sk_pool *pool, const sk__span *gone, uintptr_t to, sk__lane *lane)
    SK_REQUIRES(pool->lock);
/* Before aliases are made for `nbytes`: if there will be too many, and work is outstanding behind
 * the oldest, wait for all streams. One wait covers all slots that have been left by then, so
 * thousands share it. Look everything up again afterwards; SK_NOT_READY: a tentative thread does
 * not wait. */
sk_status sk__aliases_settle(sk_pool *pool, size_t nbytes) SK_REQUIRES(pool->lock);
/* Wait for all streams, and unmap every alias: the device gets its mappings and addresses back. */
void sk__aliases_drop_all(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Whether aliases may be made now; and note that the backend failed to make or drop one. */
static inline bool sk__aliases_are_on(const sk_pool *pool) SK_REQUIRES(pool->lock) {
    return pool->has_aliases && !pool->refuses_aliases && pool->alias_pause == 0;
}
void sk__aliases_failed(sk_pool *pool, sk_status status) SK_REQUIRES(pool->lock);
/* Make `nbytes` at `address` one free block of the lane, if free memory is mapped there
 * throughout. */
bool sk__alias_open(sk_pool *pool, uintptr_t address, const sk__request *request)
    SK_REQUIRES(pool->lock);

/* The same with one granule for a small request, wherever one is mapped among the small. */
bool sk__alias_reopen(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock);
/* As sk__aliases_drop_all, unless aliases for so many bytes more would still be few. */
void sk__aliases_allow(sk_pool *pool, size_t nbytes) SK_REQUIRES(pool->lock);
/* Whether aliases are so few that more may be made before they are needed. */
bool sk__aliases_are_few(const sk_pool *pool) SK_REQUIRES(pool->lock);

/* lend.c: choosing free memory that moves. */
/* Return free granules that `request` can have at once, up to `nbytes`, and their total in
 * `*total`: from blocks whose memory its stream may use, except `spared`. */
sk__span sk__lender(const sk_pool *pool, const sk__request *request, const sk__block *spared,
                    size_t nbytes, size_t *total) SK_REQUIRES(pool->lock);
/* Map free memory for `request` at vacant addresses, from any segment but `kept`; NULL: from all.
 * SK_NOT_READY: there is too little, and a part may have moved. */
sk_status sk__lend_at(sk_pool *pool, const sk__request *request, sk__segment *segment,
                      uintptr_t start, size_t nbytes, const sk__segment *kept)
    SK_REQUIRES(pool->lock);
/* Map free memory for `request` at new addresses, even if some of it fits already; return the
 * place's address. 0: there is not enough, or the pool may still grow. */
uintptr_t sk__lend_anew(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock);

/* place.c: where requests were served before. */
/* Whether requests like this are remembered: the next two functions require it. */
static inline bool sk__has_place(const sk_pool *pool, const sk__request *request)
    SK_REQUIRES(pool->lock) {
    return pool->alias_count > 0 && request->arena == SK_LARGE;
}
/* Take the place of this request's turn in the last step, or another place of its size; the block
 * is in no list. NULL: there is no place, or it is not free. */
sk__block *sk__place_take(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock);
void sk__place_note(sk_pool *pool, const sk__request *request, uintptr_t address)
    SK_REQUIRES(pool->lock);
/* End a step: the next requests are expected to repeat those after the last mark. */
void sk__places_mark(sk_pool *pool) SK_REQUIRES(pool->lock);

/* size.c: places by request size. */
/* Find a size and make it the latest; its turn begins with the step. NULL: unknown. */
sk__size *sk__size_find(sk_pool *pool, size_t nbytes) SK_REQUIRES(pool->lock);
/* Add an unknown size. NULL: there is no host memory. */
sk__size *sk__size_add(sk_pool *pool, size_t nbytes) SK_REQUIRES(pool->lock);
void sk__sizes_free(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Make room for place `index`, filling new places with 0, up to `most`. False: there is none. */
bool sk__places_reserve(sk__places *places, size_t index, size_t most);

#endif
