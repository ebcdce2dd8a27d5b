/* ring.h - the pool's side of the event ring. */
#ifndef SWAPKIT_BASE_RING_H
#define SWAPKIT_BASE_RING_H

#include "base/base.h"
#include "swapkit_pool.h"

/* Append one event, stamped with the time unless it has one; the oldest is overwritten when the
 * ring is full. Threads: any; may be called with a pool's or a scheduler's lock held. */
void sk__ring_add(sk_ring *ring, sk_ring_event event);
/* Copy up to `capacity` of the events that are kept, oldest first; return how many there are. */
size_t sk__ring_peek(sk_ring *ring, sk_ring_event *out, size_t capacity, uint64_t *lost);

#endif
