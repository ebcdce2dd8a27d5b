/* ring.h - the pool's side of the event ring. */
#ifndef SWAPKIT_BASE_RING_H
#define SWAPKIT_BASE_RING_H

#include "base/base.h"
#include "swapkit_pool.h"

/* Append one event, stamped with the time; the oldest is overwritten when the ring is full.
 * Threads: any; may be called with a pool's lock held. */
void sk__ring_add(sk_ring *ring, sk_ring_event event);

#endif
