/* ring.c - a bounded record of events, for timelines.
 *
 * Positions count all events ever added; event i lives in slot i mod capacity. Everything is
 * guarded by ring->lock. */
#include "base/ring.h"

#include <stdlib.h>

#include "base/thread.h"

struct sk_ring {
    sk__mutex lock;
    sk__fork_node fork_node;
    size_t capacity;
    uint64_t added SK_GUARDED_BY(lock); /* position after the newest event */
    uint64_t taken SK_GUARDED_BY(lock); /* position of the oldest event not yet read */
    uint64_t lost SK_GUARDED_BY(lock);
    sk_ring_event events[];
};

sk_status sk_ring_create(size_t capacity, sk_ring **out) {
    if (capacity == 0 || capacity > SK_MAX_BYTES / sizeof(sk_ring_event)) {
        return sk__fail(SK_INVALID, "ring: a capacity of %zu events is not possible", capacity);
    }
    sk_ring *ring = calloc(1, sizeof *ring + capacity * sizeof ring->events[0]);
    if (ring == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "ring: no host memory for %zu events", capacity);
    }
    ring->capacity = capacity;
    sk__mutex_init(&ring->lock, SK_RANK_RING);
    ring->fork_node = (sk__fork_node){.lock = &ring->lock};
    sk__fork_register(&ring->fork_node);
    *out = ring;
    return SK_OK;
}

void sk_ring_destroy(sk_ring *ring) {
    if (ring == NULL) {
        return;
    }
    sk__fork_unregister(&ring->fork_node);
    sk__mutex_destroy(&ring->lock);
    free(ring);
}

void sk__ring_add(sk_ring *ring, sk_ring_event event) {
    event.time_ns = event.time_ns != 0 ? event.time_ns : sk__now_ns();
    sk__lock(&ring->lock);
    ring->events[ring->added % ring->capacity] = event;
    ring->added++;
    if (ring->added - ring->taken > ring->capacity) {
        ring->taken++;
        ring->lost++;
    }
    sk__unlock(&ring->lock);
}

size_t sk__ring_peek(sk_ring *ring, sk_ring_event *out, size_t capacity, uint64_t *lost) {
    sk__lock(&ring->lock);
    size_t count = (size_t)(ring->added - ring->taken);
    for (size_t i = 0; i < count && i < capacity; i++) {
        out[i] = ring->events[(ring->taken + i) % ring->capacity];
    }
    *lost = ring->lost;
    sk__unlock(&ring->lock);
    return count;
}

size_t sk_ring_read(sk_ring *ring, sk_ring_event *out, size_t capacity, uint64_t *lost) {
    sk__lock(&ring->lock);
    size_t count = 0;
    while (count < capacity && ring->taken < ring->added) {
        out[count] = ring->events[ring->taken % ring->capacity];
        ring->taken++;
        count++;
    }
    if (lost != NULL) {
        *lost = ring->lost;
        ring->lost = 0;
    }
    sk__unlock(&ring->lock);
    return count;
}
