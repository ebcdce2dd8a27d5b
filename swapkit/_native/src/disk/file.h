/* file.h - the anonymous file: opening it, its space, moving bytes. */
#ifndef SWAPKIT_DISK_FILE_H
#define SWAPKIT_DISK_FILE_H

#include <stdatomic.h>

#include "disk/disk.h"

enum { SK_BOUNCE_BYTES = 256 * 1024 }; /* of each thread's buffer for unaligned parts */

typedef struct sk__file {
    int fd;                  /* -1: closed */
    char *folder;            /* for texts; NULL: there is no file */
    size_t block_bytes;      /* offsets and sizes of extents are multiples; a power of two */
    size_t memory_alignment; /* of memory for direct I/O */
    atomic_bool is_direct;   /* only ever switched off */
    atomic_bool can_allocate;
} sk__file;

/* folder  NULL: no file. */
sk_status sk__file_open(sk__file *file, const char *folder);
void sk__file_close(sk__file *file);
/* Close the file in a forked child, and do no more. */
void sk__file_leave(sk__file *file);
/* Set space aside in the file system. SK_OUT_OF_DISK, SK_DISK_FAILED; part of it may be taken. */
sk_status sk__file_allocate(sk__file *file, uint64_t offset, size_t nbytes);
/* Give space back to the file system. SK_UNSUPPORTED, SK_DISK_FAILED. */
sk_status sk__file_give_back(sk__file *file, uint64_t offset, size_t nbytes);
/* Return the bytes that the file system has left for us. */
size_t sk__file_free_bytes(const sk__file *file);

typedef struct sk__piece {
    sk__disk_way way;
    char *memory;
    size_t nbytes;
    uint64_t offset; /* a multiple of block_bytes */
} sk__piece;

/* Write or read all of a piece. bounce: SK_BOUNCE_BYTES, aligned. Threads: any. */
sk_status sk__file_move(sk__file *file, const sk__piece *piece, char *bounce);

#endif
