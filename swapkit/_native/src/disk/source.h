/* source.h - parts of files of others, which are only read.
 *
 * A *source* is such a file, open as long as extents are parts of it: also if it is renamed or
 * deleted meanwhile. Somebody may change it, so nothing is trusted: a write to such an extent only
 * compares the bytes with the file's, and notes a digest of them; each read checks its bytes by
 * that digest. Caller: disk->lock, but for sk__source_move(). */
#ifndef SWAPKIT_DISK_SOURCE_H
#define SWAPKIT_DISK_SOURCE_H

#include <sys/types.h>

#include "disk/disk.h"
#include "disk/file.h"

typedef struct sk__source {
    struct sk__source *next; /* of the disk */
    int fd;
    dev_t device;
    ino_t inode;
    uint32_t extents;
    char *path; /* for texts */
} sk__source;

/* Return the file at `path`, of at least `end` bytes, with one more extent. SK_DISK_FAILED,
 * SK_INVALID, SK_OUT_OF_HOST_MEMORY. */
sk_status sk__source_take(sk__source **sources, const char *path, uint64_t end, sk__source **out);
/* Drop an extent; without any, the file is closed. */
void sk__source_give(sk__source **sources, sk__source *source);
/* Compare the memory of a piece with the file (SK_DISK_WRITE), or fill it. Return a digest of its
 * bytes and their place `at` in the extent, for a sum of those of all pieces. */
sk_status sk__source_move(const sk__source *source, const sk__piece *piece, uint64_t at,
                          char *bounce, uint64_t *digest);

#endif
