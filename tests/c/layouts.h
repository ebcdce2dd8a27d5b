/* layouts.h - steps for tests of lives and layouts. */
#ifndef SWAPKIT_TESTS_LAYOUTS_H
#define SWAPKIT_TESTS_LAYOUTS_H

#include "fixture.h"
#include "swapkit_lives.h"

static inline void step_end(fixture *f) { sk_pool_note(f->pool, SK_RING_MARK, 0); }

static inline void *take_at(fixture *f, uint32_t tag, size_t nbytes, sk_stream *stream) {
    uint32_t before = sk_tag_set(tag);
    void *address = take(f, nbytes, stream);
    (void)sk_tag_set(before);
    return address;
}

static inline sk_layout_stats layout_of(fixture *f) {
    sk_layout_stats stats;
    sk_pool_layout_stats(f->pool, &stats);
    return stats;
}

#endif
