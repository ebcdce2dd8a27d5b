/* alias.c - memory that is mapped at several addresses, and lies at one of them at a time.
 *
 * Mapping costs the host tens of microseconds a granule, so a repeated step must not map. When free
 * granules move, the old mapping stays: those addresses are *dormant*. A later request that finds
 * every granule behind some dormant addresses free, wherever the granules lie now, gets them back
 * there at no cost.
 *
 * A granule counts once, at its home; `reserved` ignores aliases. Work at one address is ordered
 * before work at another by the rule for any free block: on the same stream the later work is
 * queued behind it, on another the host has waited. Mapping unmapped addresses needs no wait;
 * before an unmap the host has waited for all work that was ever queued there. */
#include <stdlib.h>

#include "pool/alias.h"
#include "pool/waiting.h"

enum {
    SLAB_GRANULES = 512,
    /* Mappings for each granule on average. Each costs the driver some host memory and eight bytes
     * of page table; a step needs about as many as it has different orders of its memory. */
    MOST_ALIASES = 8,
    THIN_RATIO = 2,    /* most aliases dropped for each new one, when there are too many */
    MOST_PAUSE = 1023, /* reclaims */
};

/* ---- slots ----------------------------------------------------------------------------------- */

sk_status sk__slots_open(const sk_pool *pool, sk__segment *segment) {
    size_t count = segment->nbytes / pool->granule_bytes;
    segment->slots = calloc(count, sizeof *segment->slots);
    if (segment->slots == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "pool: no host memory for %zu slots", count);
    }
    return SK_OK;
}

void sk__slots_close(sk__segment *segment) {
    free(segment->slots);
    segment->slots = NULL;
}

uintptr_t sk__slot_address(const sk_pool *pool, const sk__slot *slot) {
    size_t index = (size_t)(slot - slot->segment->slots);
    return slot->segment->address + index * pool->granule_bytes;
}

/* ---- granules -------------------------------------------------------------------------------- */

sk_status sk__granules_reserve(sk_pool *pool, size_t count) {
    while (pool->spare_granule_count < count) {
        sk__granule *records = sk__slab_add(&pool->granule_slabs, SLAB_GRANULES * sizeof *records);
        if (records == NULL) {
            return sk__fail(SK_OUT_OF_HOST_MEMORY, "pool: no host memory for granule records");
        }
        for (size_t i = 0; i < SLAB_GRANULES; i++) {
            records[i].next = pool->spare_granules;
            pool->spare_granules = &records[i];
        }
        pool->spare_granule_count += SLAB_GRANULES;
    }
    return SK_OK;
}

void sk__slots_fill(sk_pool *pool, sk__segment *segment, uintptr_t address, size_t nbytes) {
    for (size_t done = 0; done < nbytes; done += pool->granule_bytes) {
        sk__slot *slot = sk__slot_at(pool, segment, address + done);
        sk__granule *granule = pool->spare_granules;
        sk_assert(slot->granule == NULL && granule != NULL && pool->spare_granule_count > 0);
        pool->spare_granules = granule->next;
        pool->spare_granule_count--;
        slot->segment = segment;
        slot->granule = granule;
        slot->next = NULL;
        sk_assert(slot->left_at == 0);
        *granule = (sk__granule){.home = slot, .slots = slot};
    }
}

void sk__slots_empty(sk_pool *pool, sk__segment *segment, uintptr_t address, size_t nbytes) {
    for (size_t done = 0; done < nbytes; done += pool->granule_bytes) {
        sk__slot *slot = sk__slot_at(pool, segment, address + done);
        sk__granule *granule = slot->granule;
        sk_assert(granule != NULL && granule->home == slot);
        sk_assert(granule->slots == slot && slot->next == NULL); /* its aliases were dropped */
        sk_assert(slot->left_at == 0);
        slot->granule = NULL;
        granule->next = pool->spare_granules;
        pool->spare_granules = granule;
        pool->spare_granule_count++;
    }
}

/* ---- the order of departures ----------------------------------------------------------------- */

static void slot_depart(sk_pool *pool, sk__slot *slot) SK_REQUIRES(pool->lock) {
    sk_assert(slot->left_at == 0);
    slot->left_at = ++pool->departures;
    slot->earlier = pool->departing;
    slot->later = NULL;
    *(slot->earlier != NULL ? &slot->earlier->later : &pool->departed) = slot;
    pool->departing = slot;
}

/* Remove a slot from the order; do nothing if its memory has not left. */
static void slot_return(sk_pool *pool, sk__slot *slot) SK_REQUIRES(pool->lock) {
    if (slot->left_at == 0) {
        return;
    }
    *(slot->earlier != NULL ? &slot->earlier->later : &pool->departed) = slot->later;
    *(slot->later != NULL ? &slot->later->earlier : &pool->departing) = slot->earlier;
    slot->earlier = slot->later = NULL;
    slot->left_at = 0;
}

/* ---- dropping aliases ------------------------------------------------------------------------ */

static void slot_unlink(sk__slot *slot) {
    sk__slot **link = &slot->granule->slots;
    while (*link != slot) {
        link = &(*link)->next;
    }
    *link = slot->next;
    slot->next = NULL;
    slot->granule = NULL;
}

static sk_status alias_drop(sk_pool *pool, sk__slot *slot) SK_REQUIRES(pool->lock) {
    sk_backend *backend = pool->backend;
    uintptr_t address = sk__slot_address(pool, slot);
    sk_assert(slot->granule->home != slot);
    sk_status status = sk__records_reserve(pool, SK_RECORDS_PER_TAKE);
    if (status == SK_OK) {
        status = backend->ops.range_decommit(backend->self, (void *)address, pool->granule_bytes);
    }
    if (status != SK_OK) {
        return status;
    }
    sk__block *dormant = sk__block_covering(slot->segment, address);
    sk_assert(dormant->state == SK_DORMANT && pool->alias_count > 0);
    sk__block_vacate(pool, sk__idle_cut(pool, dormant, address, pool->granule_bytes));
    slot_return(pool, slot);
    slot_unlink(slot);
    pool->alias_count--;
    pool->stats.unmaps++;
    return SK_OK;
}

sk_status sk__aliases_drop(sk_pool *pool, const sk__span *granules) {
    const sk__block *block = granules->block;
    sk_status status = SK_OK;
    sk_assert(block->state == SK_CACHED && block->given_at <= block->lane->synced);
    for (size_t done = 0; done < granules->nbytes && status == SK_OK; done += pool->granule_bytes) {
        sk__slot *home = sk__slot_at(pool, block->segment, granules->address + done);
        sk__granule *granule = home->granule;
        sk__slot *slot = granule->slots;
        while (slot != NULL && status == SK_OK) {
            sk__slot *next = slot->next;
            status = slot != home ? alias_drop(pool, slot) : SK_OK;
            slot = next;
        }
    }
    return status;
}

static size_t most_aliases(const sk_pool *pool) SK_REQUIRES(pool->lock) {
    return MOST_ALIASES * (pool->reserved_bytes / pool->granule_bytes);
}

bool sk__aliases_are_few(const sk_pool *pool) { return pool->alias_count < most_aliases(pool) / 2; }

/* Wait for all work behind the slots that have been left by now. */
static sk_status departures_settle(sk_pool *pool) SK_REQUIRES(pool->lock) {
    uint64_t departures = pool->departures;
    sk_status status = sk__lanes_idle(pool);
    if (status == SK_OK && pool->idle_departures < departures) {
        pool->idle_departures = departures;
    }
    return status;
}

sk_status sk__aliases_settle(sk_pool *pool, size_t nbytes) {
    bool many = pool->alias_count + nbytes / pool->granule_bytes > most_aliases(pool);
    if (!many || pool->departed == NULL || pool->departed->left_at <= pool->idle_departures) {
        return SK_OK;
    }
    return sk__is_tentative() ? SK_NOT_READY : departures_settle(pool);
}

void sk__aliases_drop_all(sk_pool *pool) {
    sk_status status = departures_settle(pool);
    while (status == SK_OK && pool->departed != NULL &&
           pool->departed->left_at <= pool->idle_departures) {
        status = alias_drop(pool, pool->departed);
    }
}

void sk__aliases_allow(sk_pool *pool, size_t nbytes) {
    size_t count = pool->alias_count; /* 0 without virtual memory, which has no granules */
    if (count > 0 && count + nbytes / pool->granule_bytes >= most_aliases(pool) / 2) {
        sk__aliases_drop_all(pool);
    }
}

/* Unmap the oldest aliases if there are too many, after `made` were added. One take must not pay
 * for the aliases of all others: it unmaps twice as many as it has mapped, until half of the limit
 * or no old ones are left. */
static void aliases_thin(sk_pool *pool, size_t made) SK_REQUIRES(pool->lock) {
    size_t most = most_aliases(pool);
    pool->is_thinning = pool->alias_count > (pool->is_thinning ? most / 2 : most);
    sk_status status = SK_OK;
    for (size_t n = 0; pool->is_thinning && n < THIN_RATIO * made && status == SK_OK; n++) {
        sk__slot *oldest = pool->departed;
        bool old = oldest->left_at + most / 2 <= pool->departures;
        if (oldest->left_at > pool->idle_departures || !(old || pool->alias_count > most)) {
            break;
        }
        status = alias_drop(pool, oldest);
        pool->is_thinning = pool->alias_count > most / 2;
    }
    if (status != SK_OK) {
        sk__aliases_failed(pool, status);
    }
}

void sk__aliases_failed(sk_pool *pool, sk_status status) {
    sk_assert(status != SK_OK && status != SK_NOT_READY);
    pool->stats.alias_failures++;
    pool->refuses_aliases = pool->refuses_aliases || status == SK_UNSUPPORTED;
    uint32_t pause = 2 * pool->alias_backoff + 1;
    pool->alias_backoff = pause < MOST_PAUSE ? pause : MOST_PAUSE;
    pool->alias_pause = pool->alias_backoff;
}

/* ---- moving ---------------------------------------------------------------------------------- */

void sk__span_settle(sk_pool *pool, const sk__span *gone, uintptr_t to, sk__lane *lane) {
    sk__block *from = gone->block;
    sk__segment *segment = sk__segment_find(pool, to);
    sk_assert(from->lane == lane || from->given_at <= from->lane->synced);
    uint64_t given_at = from->lane == lane ? from->given_at : 0;
    sk__committed_change(pool, from->segment, gone->address, gone->nbytes, false);
    sk__committed_change(pool, segment, to, gone->nbytes, true);
    pool->stats.moved_bytes += (int64_t)gone->nbytes;
    sk__block_hold(pool, gone->block);
    for (size_t done = 0; done < gone->nbytes; done += pool->granule_bytes) {
        sk__slot *left = sk__slot_at(pool, from->segment, gone->address + done);
        sk__slot *home = sk__slot_at(pool, segment, to + done);
        sk_assert(left->granule == home->granule && left->granule->home == left);
        slot_depart(pool, left);
        slot_return(pool, home);
        home->granule->home = home;
    }
    sk__block *idle = sk__block_covering(segment, to);
    sk__block *block = sk__idle_cut(pool, idle, to, gone->nbytes);
    block->lane = lane;
    block->given_at = given_at;
    sk__block_cache(pool, block);
    sk__span_leave(pool, gone, SK_DORMANT);
}

sk_status sk__span_map(sk_pool *pool, const sk__span *gone, const sk__block *vacant, uintptr_t to,
                       sk__lane *lane) {
    sk_backend *backend = pool->backend;
    sk__segment *segment = vacant->segment;
    sk_assert(vacant->state == SK_VACANT && to >= vacant->address);
    sk_assert(to + gone->nbytes <= vacant->address + vacant->nbytes);
    sk_status status =
        backend->ops.range_alias(backend->self, (void *)gone->address, (void *)to, gone->nbytes);
    if (status != SK_OK) {
        sk__aliases_failed(pool, status);
        return status;
    }
    size_t count = gone->nbytes / pool->granule_bytes;
    for (size_t done = 0; done < gone->nbytes; done += pool->granule_bytes) {
        sk__slot *slot = sk__slot_at(pool, segment, to + done);
        sk__slot *home = sk__slot_at(pool, gone->block->segment, gone->address + done);
        sk_assert(slot->granule == NULL && home->granule->home == home);
        slot->segment = segment;
        slot->granule = home->granule;
        slot->next = home->granule->slots;
        home->granule->slots = slot;
    }
    pool->alias_count += count;
    pool->stats.maps += (int64_t)count;
    pool->alias_backoff = 0;
    sk__span_settle(pool, gone, to, lane);
    aliases_thin(pool, count);
    return SK_OK;
}

/* ---- memory back where it is mapped ---------------------------------------------------------- */

/* Return the free block that holds a granule, if the lane may use it now; else NULL. */
static sk__block *granule_block(const sk_pool *pool, const sk__granule *granule,
                                const sk__lane *lane) SK_REQUIRES(pool->lock) {
    uintptr_t address = sk__slot_address(pool, granule->home);
    sk__block *block = sk__block_covering(granule->home->segment, address);
    bool whole = address + pool->granule_bytes <= block->address + block->nbytes;
    bool usable = block->state == SK_CACHED && whole &&
                  (block->lane == lane || block->given_at <= block->lane->synced);
    return usable ? block : NULL;
}

/* A wanted range of addresses. */
typedef struct range {
    sk__segment *segment;
    uintptr_t address, end;
} range;

/* Whether every slot from `address` to `end` has a granule that this search has not yet seen in
 * another slot, and that is free if it lies elsewhere. */
static bool slots_are_ready(sk_pool *pool, const range *part, const sk__lane *lane, bool dormant)
    SK_REQUIRES(pool->lock) {
    uintptr_t address = sk__round_down(part->address, pool->granule_bytes);
    for (; address < part->end; address += pool->granule_bytes) {
        sk__granule *granule = sk__slot_at(pool, part->segment, address)->granule;
        sk_assert(granule != NULL);
        if (granule->seen == pool->searches ||
            (dormant && granule_block(pool, granule, lane) == NULL)) {
            return false;
        }
        granule->seen = pool->searches;
    }
    return true;
}

static bool range_is_ready(sk_pool *pool, const range *wanted, const sk__lane *lane)
    SK_REQUIRES(pool->lock) {
    const sk__block *block = sk__block_covering(wanted->segment, wanted->address);
    if (block->state == SK_CACHED && block->lane == lane &&
        block->address + block->nbytes >= wanted->end) {
        return true;
    }
    pool->searches++;
    bool ready = true;
    for (; ready && block != NULL && block->address < wanted->end; block = block->right) {
        bool dormant = block->state == SK_DORMANT;
        range part = {wanted->segment, sk__max(block->address, wanted->address),
                      sk__min(block->address + block->nbytes, wanted->end)};
        ready = (dormant || (block->state == SK_CACHED && block->lane == lane)) &&
                slots_are_ready(pool, &part, lane, dormant);
    }
    return ready;
}

/* Move the granules behind dormant slots at `address` back, as many as lie in one piece; return the
 * address behind them, or 0 if they are not free after all. */
static uintptr_t piece_open(sk_pool *pool, const range *wanted, uintptr_t address, sk__lane *lane)
    SK_REQUIRES(pool->lock) {
    const size_t granule = pool->granule_bytes;
    const sk__slot *slot = sk__slot_at(pool, wanted->segment, address);
    const sk__block *dormant = sk__block_covering(wanted->segment, address);
    uintptr_t end = sk__min(dormant->address + dormant->nbytes, sk__round_up(wanted->end, granule));
    uintptr_t from = sk__slot_address(pool, slot->granule->home);
    sk__block *lender = granule_block(pool, slot->granule, lane);
    sk_assert(dormant->state == SK_DORMANT && lender != NULL);
    if (lender == NULL) {
        return 0;
    }
    size_t nbytes = granule;
    while (address + nbytes < end && from + nbytes + granule <= lender->address + lender->nbytes &&
           slot[nbytes / granule].granule->home == slot->granule->home + nbytes / granule) {
        nbytes += granule;
    }
    sk__span_settle(pool, &(sk__span){lender, from, nbytes}, address, lane);
    return address + nbytes;
}

bool sk__alias_open(sk_pool *pool, uintptr_t address, const sk__request *request) {
    sk__segment *segment = sk__segment_find(pool, address);
    range wanted = {segment, address, address + request->nbytes};
    if (segment == NULL || segment->slots == NULL || segment->arena != request->arena ||
        !range_is_ready(pool, &wanted, request->lane)) {
        return false;
    }
    while (address != 0 && address < wanted.end) {
        const sk__block *block = sk__block_covering(segment, address);
        if (block->state == SK_CACHED) {
            address = block->address + block->nbytes;
            continue;
        }
        if (sk__records_reserve(pool, (size_t)2 * SK_RECORDS_PER_TAKE) != SK_OK) {
            return false; /* the opened part is free, and as good here as elsewhere */
        }
        address =
            piece_open(pool, &wanted, sk__round_down(address, pool->granule_bytes), request->lane);
    }
    return address != 0;
}

/* Return the free block that holds the first granule behind a dormant block that the lane may have
 * back, and its slot; NULL: there is none. */
static sk__block *dormant_lender(const sk_pool *pool, const sk__block *dormant,
                                 const sk__lane *lane, const sk__slot **out)
    SK_REQUIRES(pool->lock) {
    const sk__slot *slot = sk__slot_at(pool, dormant->segment, dormant->address);
    sk__block *lender = NULL;
    for (size_t done = 0; done < dormant->nbytes && lender == NULL; done += pool->granule_bytes) {
        *out = slot++;
        lender = granule_block(pool, (*out)->granule, lane);
    }
    return lender;
}

bool sk__alias_reopen(sk_pool *pool, const sk__request *request) {
    sk__block *lender = NULL;
    const sk__slot *slot = NULL;
    if (request->nbytes > pool->granule_bytes ||
        sk__records_reserve(pool, SK_RECORDS_PER_TAKE) != SK_OK) {
        return false;
    }
    for (const sk__block *block = pool->dormant[request->arena]; block != NULL && lender == NULL;
         block = block->next) {
        lender = dormant_lender(pool, block, request->lane, &slot);
    }
    if (lender == NULL) {
        return false;
    }
    sk__span lent = {lender, sk__slot_address(pool, slot->granule->home), pool->granule_bytes};
    sk__span_settle(pool, &lent, sk__slot_address(pool, slot), request->lane);
    return true;
}
