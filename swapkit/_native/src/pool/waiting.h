/* waiting.h - blocks that are not free yet, and streams to wait for: uses.c, pending.c, parked.c
 * and lane.c.
 *
 * Everything here is guarded by pool->lock. */
#ifndef SWAPKIT_POOL_WAITING_H
#define SWAPKIT_POOL_WAITING_H

#include "pool/pool.h"

/* uses.c */
/* Record the events of the other streams' work on a block that is given back. */
sk_status sk__uses_record(sk_pool *pool, const sk__block *block) SK_REQUIRES(pool->lock);
void sk__uses_free(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
bool sk__uses_are_done(const sk_pool *pool, const sk__block *block);
sk_status sk__uses_sync(const sk_pool *pool, const sk__block *block);

/* pending.c */
void sk__pending_add(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* Free the pending blocks whose events have completed, up to the first incomplete one, or `all`.
 * Never waits. */
void sk__pending_poll(sk_pool *pool, bool all) SK_REQUIRES(pool->lock);
/* Wait for the block that was given back first. SK_NOT_READY: none is pending. */
sk_status sk__pending_wait_first(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Wait for all blocks that are pending or in transit now. */
sk_status sk__pending_wait(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Release the lock while the caller holds a block that is in no list; and take it again. */
void sk__transit_enter(sk_pool *pool) SK_RELEASE(pool->lock);
void sk__transit_leave(sk_pool *pool) SK_ACQUIRE(pool->lock);
/* Wait until a thread has brought a block back. SK_NOT_READY: none is in transit. */
sk_status sk__transit_wait(sk_pool *pool) SK_REQUIRES(pool->lock);

/* parked.c: blocks whose last work may still be queued on the host. */
/* Whether a block that is being given back must wait for a settle. */
bool sk__must_park(const sk_pool *pool, const sk__block *block) SK_REQUIRES(pool->lock);
void sk__park(sk_pool *pool, sk__block *block) SK_REQUIRES(pool->lock);
/* Release the lock until all work queued so far is in its stream; then free the blocks that were
 * parked before. */
sk_status sk__settle(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Settle, and park all blocks that are given until this thread leaves. */
sk_status sk__settlers_enter(sk_pool *pool) SK_REQUIRES(pool->lock);
void sk__settlers_leave(sk_pool *pool) SK_REQUIRES(pool->lock);

/* lane.c */
sk_status sk__lane_of(sk_pool *pool, sk_stream *stream, sk__lane **out) SK_REQUIRES(pool->lock);
/* Wait for the work behind one lane's free blocks. SK_NOT_READY: no lane has such work.
 * not  a lane to skip, whose blocks may be used behind its work; or NULL. */
sk_status sk__lane_sync_next(sk_pool *pool, const sk__lane * not) SK_REQUIRES(pool->lock);
/* Wait for all work, whether or not free blocks are behind it. */
sk_status sk__lanes_idle(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Move all free blocks without outstanding work to `to`: free memory of several streams can be
 * joined, and given back, only in one lane. Only in the arenas below `arenas`: the places of a
 * layout would be lost for the stream that uses them. */
void sk__lanes_join(sk_pool *pool, sk__lane *to, int arenas) SK_REQUIRES(pool->lock);
/* Wait for all lanes' work behind free blocks. */
sk_status sk__lanes_sync(sk_pool *pool) SK_REQUIRES(pool->lock);
/* Wait as sk__lanes_sync, and join the lanes. */
sk_status sk__lanes_settle(sk_pool *pool, int arenas) SK_REQUIRES(pool->lock);
/* Move the best fit of another lane to the request's lane, behind an event. SK_NOT_READY: nothing
 * fits. */
sk_status sk__lane_adopt(sk_pool *pool, const sk__request *request) SK_REQUIRES(pool->lock);

#endif
