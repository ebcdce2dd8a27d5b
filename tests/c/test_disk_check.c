/* test_disk_check.c - sk__disk_check() finds whatever is not as it has to be. */
#include <string.h>

#include "disk/handle.h"
#include "disk_fixture.h"

/* Put something wrong into a field for one check. */
#define FINDS(field, wrong, text)                                                                  \
    do {                                                                                           \
        __typeof__(field) saved_ = (field);                                                        \
        (field) = (wrong);                                                                         \
        CHECK_STATUS(SK_CORRUPT, sk__disk_check(s.disk));                                          \
        CHECK_CONTAINS(sk_error_text(), text);                                                     \
        (field) = saved_;                                                                          \
        CHECK_OK(sk__disk_check(s.disk));                                                          \
    } while (0)

SK_TEST(disk, test_check_when_something_is_wrong_then_found) {
    disk_scene s = disk_scene_open(MIB);
    sk__extent first = disk_reserve(&s, 2 * BLOCK);
    sk__extent second = disk_reserve(&s, 2 * BLOCK);
    sk__extent third = disk_reserve(&s, 2 * BLOCK);
    sk__disk_release(s.disk, second);
    sk__extents *extents = &s.disk->extents;
    FINDS(first.tile->nbytes, BLOCK, "a gap after");
    FINDS(first.tile->nbytes, 100, "whole blocks");
    FINDS(first.tile->nbytes, 0, "whole blocks");
    FINDS(third.tile->left, NULL, "do not agree");
    FINDS(first.tile->state, SK_TILE_TRANSIT, "in state");
    FINDS(first.tile->state, SK_TILE_SPARE, "no state");
    FINDS(first.tile->state, SK_TILE_KEPT, "not merged");
    FINDS(third.tile->state, SK_TILE_VACANT, "not merged");
    FINDS(extents->first, NULL, "begin at 0");
    FINDS(extents->first->offset, BLOCK, "begin at 0");
    FINDS(extents->bytes[SK_TILE_USED], 0, "counted 0");
    FINDS(extents->listed[SK_TILE_KEPT].filled, 0, "the bitmap is wrong");
    FINDS(second.tile->prev, second.tile, "links of bin");
    FINDS(s.disk->limit_bytes, BLOCK, "limit is 4096");
    FINDS(s.disk->peak_bytes, BLOCK, "peak");
    FINDS(s.disk->queues[SK_DISK_READ].last, (sk__disk_request *)&s, "end of a queue");
    disk_scene_close(&s);
}

SK_TEST(disk, test_check_when_a_bin_is_wrong_then_found) {
    disk_scene s = disk_scene_open(MIB);
    sk__extent extents[4];
    for (int i = 0; i < 4; i++) {
        extents[i] = disk_reserve(&s, 2 * BLOCK);
    }
    sk__disk_release(s.disk, extents[0]);
    sk__disk_release(s.disk, extents[2]);
    sk__tile_bins *kept = &s.disk->extents.listed[SK_TILE_KEPT];
    sk__tile_bins *vacant = &s.disk->extents.listed[SK_TILE_VACANT];
    sk__tile *newest = extents[2].tile;
    CHECK(newest->next == extents[0].tile);
    unsigned bin = 0;
    while (kept->bins[bin] != newest) {
        bin++;
    }
    FINDS(newest->next, NULL, "2 tiles in state 1, listed 1");
    kept->bins[bin + 1] = newest;
    kept->bins[bin] = NULL;
    kept->filled <<= 1;
    CHECK_STATUS(SK_CORRUPT, sk__disk_check(s.disk));
    CHECK_CONTAINS(sk_error_text(), "in the wrong bin");
    kept->bins[bin + 1] = NULL;
    kept->bins[bin] = newest;
    kept->filled >>= 1;
    CHECK_OK(sk__disk_check(s.disk));
    CHECK(vacant->bins[bin] == NULL);
    vacant->filled |= UINT64_C(1) << bin;
    vacant->bins[bin] = newest;
    CHECK_STATUS(SK_CORRUPT, sk__disk_check(s.disk));
    CHECK_CONTAINS(sk_error_text(), "in the wrong bin");
    vacant->filled &= ~(UINT64_C(1) << bin);
    vacant->bins[bin] = NULL;
    CHECK_OK(sk__disk_check(s.disk));
    disk_scene_close(&s);
}

SK_TEST(disk, test_check_when_a_queue_is_wrong_then_found) {
    disk_scene s = disk_scene_open(MIB); /* its threads begin with the first request */
    char memory[8] = "queued";
    sk__disk_request requests[2];
    for (int i = 0; i < 2; i++) {
        requests[i] = (sk__disk_request){.way = SK_DISK_READ,
                                         .memory = memory,
                                         .nbytes = sizeof memory,
                                         .extent = disk_reserve(&s, BLOCK)};
    }
    sk__disk_queue *queue = &s.disk->queues[SK_DISK_READ];
    requests[0].next = &requests[1];
    *queue = (sk__disk_queue){.first = &requests[0], .last = &requests[1]};
    CHECK_OK(sk__disk_check(s.disk));
    requests[0].claimed_bytes = 1; /* a piece of the first one is under way */
    CHECK_OK(sk__disk_check(s.disk));
    FINDS(requests[1].claimed_bytes, 1, "a queued request is not in order");
    FINDS(requests[0].claimed_bytes, sizeof memory, "a queued request is not in order");
    FINDS(requests[1].way, SK_DISK_WRITE, "a queued request is not in order");
    FINDS(requests[1].status, SK_DISK_FAILED, "a queued request is not in order");
    FINDS(requests[1].extent.tile, NULL, "a queued request is not in order");
    FINDS(queue->last, &requests[0], "the end of a queue is lost");
    *queue = (sk__disk_queue){0};
    disk_scene_close(&s);
}
