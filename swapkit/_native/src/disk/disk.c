/* disk.c - the handle: space for extents within the limit, and the state after a fork.
 *
 * A reservation looks for released space first, which needs no system call. Otherwise the file
 * grows: one thread at a time, with the lock released, asks for space where there is none yet. If
 * that would exceed the limit, or the file system is full, released space that does not fit is
 * given back first. Offsets cost nothing, so only bytes count and nothing is lost to fragmentation.
 *
 * Invariants (sk__disk_check): those of extents.h; bytes backed by the file system never exceed the
 * limit; requests in a queue are for extents in use. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "disk/handle.h"

/* ---- opening and closing --------------------------------------------------------------------- */

SK_NO_ANALYSIS static void disk_after_fork(void *owner) {
    sk__disk *disk = owner;
    disk->is_copy = true;
    disk->growing = false;
    sk__disk_forget(disk);
    (void)pthread_cond_init(&disk->work, NULL);
    (void)pthread_cond_init(&disk->grown, NULL);
    sk__file_leave(&disk->file); /* or its space would stay taken until the child ends, too */
}

SK_NO_ANALYSIS sk_status sk__disk_open(const char *folder, size_t limit_bytes, sk__disk **out) {
    if (folder != NULL && folder[0] == '\0') {
        return sk__fail(SK_INVALID, "disk: expected a folder");
    }
    sk__disk *disk = calloc(1, sizeof *disk);
    if (disk == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "disk: no host memory for its state");
    }
    sk_status status = sk__extents_init(&disk->extents);
    if (status != SK_OK) {
        goto free_disk;
    }
    status = sk__file_open(&disk->file, folder);
    if (status != SK_OK) {
        goto free_extents;
    }
    disk->limit_bytes = limit_bytes == 0 ? SIZE_MAX : limit_bytes;
    sk__mutex_init(&disk->lock, SK_RANK_BACKEND); /* a leaf: any rank above its callers' works */
    (void)pthread_cond_init(&disk->work, NULL);
    (void)pthread_cond_init(&disk->grown, NULL);
    disk->fork_node = (sk__fork_node){.lock = &disk->lock, .child = disk_after_fork, .owner = disk};
    sk__fork_register(&disk->fork_node);
    *out = disk;
    return SK_OK;

free_extents:
    sk__extents_free(&disk->extents);
free_disk:
    free(disk);
    return status;
}

SK_NO_ANALYSIS void sk__disk_close(sk__disk *disk) {
    if (disk == NULL) {
        return;
    }
    sk__disk_stop(disk);
    sk__fork_unregister(&disk->fork_node);
    sk__file_close(&disk->file);
    while (disk->sources != NULL) {
        disk->sources->extents = 1;
        sk__source_give(&disk->sources, disk->sources);
    }
    sk__extents_free(&disk->extents);
    (void)pthread_cond_destroy(&disk->work);
    (void)pthread_cond_destroy(&disk->grown);
    sk__mutex_destroy(&disk->lock);
    free(disk);
}

/* ---- space ----------------------------------------------------------------------------------- */

static void growing_enter(sk__disk *disk) SK_REQUIRES(disk->lock) {
    while (disk->growing) {
        sk__wait(&disk->grown, &disk->lock);
    }
    disk->growing = true;
}

static void growing_leave(sk__disk *disk) SK_REQUIRES(disk->lock) {
    sk_assert(disk->growing);
    disk->growing = false;
    (void)pthread_cond_broadcast(&disk->grown);
}

/* Give kept space back until the file has at most `most_bytes`, or nothing is kept. */
static sk_status kept_give_back(sk__disk *disk, size_t most_bytes) SK_REQUIRES(disk->lock) {
    sk_assert(disk->growing);
    sk_status status = SK_OK;
    while (status == SK_OK && sk__extents_backed(&disk->extents) > most_bytes) {
        sk__tile *tile = sk__extents_take_kept(&disk->extents);
        if (tile == NULL) {
            break;
        }
        uint64_t offset = tile->offset;
        size_t nbytes = tile->nbytes;
        sk__unlock(&disk->lock);
        status = sk__file_give_back(&disk->file, offset, nbytes);
        sk__lock(&disk->lock);
        sk_assert(tile->state == SK_TILE_TRANSIT && tile->nbytes == nbytes);
        sk__extents_put(&disk->extents, tile, status == SK_OK ? SK_TILE_VACANT : SK_TILE_KEPT);
    }
    return status;
}

/* Ask the file system for the space of a tile. On failure none of it is kept. */
static sk_status tile_allocate(sk__disk *disk, const sk__tile *tile) SK_REQUIRES(disk->lock) {
    sk_assert(disk->growing && tile->state == SK_TILE_TRANSIT);
    uint64_t offset = tile->offset;
    size_t nbytes = tile->nbytes;
    sk__unlock(&disk->lock);
    sk_status status = sk__file_allocate(&disk->file, offset, nbytes);
    if (status != SK_OK) {
        sk_status ignored = sk__file_give_back(&disk->file, offset, nbytes); /* the part it got */
        (void)ignored;
    }
    sk__lock(&disk->lock);
    return status;
}

static sk_status fail_full(sk__disk *disk, size_t nbytes) SK_REQUIRES(disk->lock) {
    size_t in_use = disk->extents.bytes[SK_TILE_USED];
    if (disk->limit_bytes - sk__min(in_use, disk->limit_bytes) < nbytes) {
        return sk__fail(SK_OUT_OF_DISK,
                        "disk: no room for %zu bytes: %zu are in use and the limit is %zu (folder "
                        "%.200s); raise the limit",
                        nbytes, in_use, disk->limit_bytes, disk->file.folder);
    }
    return sk__fail(SK_OUT_OF_DISK,
                    "disk: no room for %zu bytes: %zu are in use and the file system of %.200s has "
                    "%zu free; make room there or choose another folder",
                    nbytes, in_use, disk->file.folder, sk__file_free_bytes(&disk->file));
}

/* Take a tile for an extent from the list of a state. SK_NOT_READY: none is large enough. */
static sk_status tile_take(sk__disk *disk, sk__tile_state state, size_t nbytes, sk__tile **out)
    SK_REQUIRES(disk->lock) {
    sk_status status = sk__extents_prepare(&disk->extents);
    if (status != SK_OK) {
        return status;
    }
    sk__tile *tile = sk__extents_take(&disk->extents, state, nbytes);
    if (tile == NULL) {
        return SK_NOT_READY;
    }
    *out = tile;
    return SK_OK;
}

/* Extend the file by a tile of `nbytes`. */
static sk_status disk_grow(sk__disk *disk, size_t nbytes, sk__tile **out) SK_REQUIRES(disk->lock) {
    if (nbytes > disk->limit_bytes) {
        return fail_full(disk, nbytes);
    }
    sk_assert(disk->growing && nbytes % disk->file.block_bytes == 0);
    sk_status status = kept_give_back(disk, disk->limit_bytes - nbytes);
    if (status != SK_OK && status != SK_UNSUPPORTED) {
        return status;
    }
    if (sk__extents_backed(&disk->extents) > disk->limit_bytes - nbytes) {
        return fail_full(disk, nbytes);
    }
    sk__tile *tile = NULL;
    status = tile_take(disk, SK_TILE_VACANT, nbytes, &tile);
    if (status != SK_OK) {
        return status == SK_NOT_READY ? fail_full(disk, nbytes) : status;
    }
    status = tile_allocate(disk, tile);
    if (status == SK_OUT_OF_DISK && disk->extents.bytes[SK_TILE_KEPT] > 0 &&
        kept_give_back(disk, 0) == SK_OK) {
        status = tile_allocate(disk, tile);
    }
    if (status != SK_OK) {
        sk__extents_put(&disk->extents, tile, SK_TILE_VACANT);
        return status == SK_OUT_OF_DISK ? fail_full(disk, nbytes) : status;
    }
    *out = tile;
    return SK_OK;
}

/* Return a tile from released space, or else a new one. */
static sk_status disk_acquire(sk__disk *disk, size_t nbytes, sk__tile **out)
    SK_REQUIRES(disk->lock) {
    sk_assert(!disk->is_copy && nbytes > 0);
    sk_status status = tile_take(disk, SK_TILE_KEPT, nbytes, out);
    if (status != SK_NOT_READY) {
        return status;
    }
    growing_enter(disk);
    /* Space may have been released while another thread was growing the file. */
    status = tile_take(disk, SK_TILE_KEPT, nbytes, out);
    if (status == SK_NOT_READY) {
        status = disk_grow(disk, nbytes, out);
    }
    growing_leave(disk);
    return status;
}

sk_status sk__disk_reserve(sk__disk *disk, size_t nbytes, sk__extent *out) {
    if (nbytes == 0 || nbytes > SK_MAX_BYTES / 2) {
        return sk__fail(SK_INVALID, "disk: an extent of %zu bytes is not possible", nbytes);
    }
    nbytes = sk__round_up(nbytes, disk->file.block_bytes);
    sk__tile *tile = NULL;
    sk__lock(&disk->lock);
    sk_status status = SK_OK;
    if (disk->is_copy) {
        status = sk__fail(SK_UNSUPPORTED, "disk: a forked child cannot use the parent's file");
    } else if (disk->file.folder == NULL) {
        status = sk__fail(SK_OUT_OF_DISK, "disk: there is no folder for a file");
    } else {
        status = disk_acquire(disk, nbytes, &tile);
    }
    if (tile != NULL) {
        sk_assert(status == SK_OK && tile->nbytes == nbytes);
        sk__extents_put(&disk->extents, tile, SK_TILE_USED);
        sk_assert(sk__extents_backed(&disk->extents) <= disk->limit_bytes);
        disk->peak_bytes = sk__max(disk->peak_bytes, disk->extents.bytes[SK_TILE_USED]);
        *out = (sk__extent){.offset = tile->offset, .nbytes = tile->nbytes, .tile = tile};
    }
    sk__unlock(&disk->lock);
    return status;
}

sk_status sk__disk_borrow(sk__disk *disk, const char *path, uint64_t offset, size_t nbytes,
                          sk__extent *out) {
    sk__source *source = NULL;
    sk__lock(&disk->lock);
    sk_status status = sk__source_take(&disk->sources, path, offset + nbytes, &source);
    sk__unlock(&disk->lock);
    if (status == SK_OK) {
        *out = (sk__extent){.offset = offset, .nbytes = nbytes, .source = source};
    }
    return status;
}

void sk__disk_release(sk__disk *disk, sk__extent extent) {
    sk__lock(&disk->lock);
    bool is_ours = sk__extents_own(&disk->extents, &extent);
    sk_assert(is_ours);
    if (extent.source != NULL) {
        sk__source_give(&disk->sources, extent.source);
    } else if (is_ours) {
        sk__extents_put(&disk->extents, extent.tile, SK_TILE_KEPT);
    }
    sk__unlock(&disk->lock);
}

sk_status sk__disk_trim(sk__disk *disk) {
    sk__lock(&disk->lock);
    sk_status status = SK_OK;
    if (disk->is_copy) {
        status = sk__fail(SK_UNSUPPORTED, "disk: a forked child cannot trim the parent's file");
    } else {
        growing_enter(disk);
        status = kept_give_back(disk, 0);
        growing_leave(disk);
    }
    sk__unlock(&disk->lock);
    return status;
}

/* ---- alignment, statistics, checks ----------------------------------------------------------- */

size_t sk__disk_alignment(const sk__disk *disk) { return disk->file.block_bytes; }

void sk__disk_stats_get(sk__disk *disk, sk__disk_stats *out) {
    sk__lock(&disk->lock);
    *out = (sk__disk_stats){.in_use_bytes = disk->extents.bytes[SK_TILE_USED],
                            .peak_bytes = disk->peak_bytes,
                            .backed_bytes = sk__extents_backed(&disk->extents),
                            .written_bytes = disk->moved_bytes[SK_DISK_WRITE],
                            .read_bytes = disk->moved_bytes[SK_DISK_READ],
                            .is_direct = atomic_load(&disk->file.is_direct)};
    sk__unlock(&disk->lock);
}

sk_status sk__disk_check(sk__disk *disk) {
    sk__lock(&disk->lock);
    sk_status status = sk__extents_check(&disk->extents, disk->file.block_bytes);
    size_t backed = sk__extents_backed(&disk->extents);
    if (status == SK_OK && backed > disk->limit_bytes) {
        status = sk__fail(SK_CORRUPT, "disk: %zu bytes are backed, the limit is %zu", backed,
                          disk->limit_bytes);
    }
    if (status == SK_OK && disk->extents.bytes[SK_TILE_USED] > disk->peak_bytes) {
        status = sk__fail(SK_CORRUPT, "disk: more is in use than the peak of %zu bytes",
                          disk->peak_bytes);
    }
    if (status == SK_OK) {
        status = sk__disk_queues_check(disk);
    }
    sk__unlock(&disk->lock);
    return status;
}
