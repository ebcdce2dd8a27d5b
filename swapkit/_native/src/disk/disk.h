/* disk.h - space in one anonymous file, and threads that write and read it.
 *
 * The interface of this floor. A *disk* is one unlinked file in a folder; an *extent* is a part of
 * it that the caller has reserved. The reservation asks the file system for the space, so a full
 * disk shows before anything is copied. Released space stays in the file and is used again first;
 * it goes back to the file system by sk__disk_trim(), and automatically when the limit or a full
 * file system leaves no other way. Nothing of the file remains after the process, however it ends.
 *
 * Or an extent is a part of a file of others, whose bytes are already there: it takes no space.
 * Writing to it compares the bytes with the file's; reading from it fails if they are not those any
 * more.
 *
 * A *request* writes or reads one extent. Requests are cut into pieces that several threads of our
 * own take in turn, so a large one uses all of them. While both directions have requests they
 * alternate. Requests have no order: read written bytes only after done() of the write.
 *
 * Files: disk.c the handle; queue.c requests and threads; extents.c the parts of the file; file.c
 * the file; source.c files of others; system.c the system calls. One lock per disk guards all
 * mutable state. It is a leaf: nothing is called with it held.
 *
 * Forked children: the file is the parent's. Reserving, submitting and trimming are SK_UNSUPPORTED
 * there. Releasing and closing work. done() is not called for requests from before the fork. */
#ifndef SWAPKIT_DISK_DISK_H
#define SWAPKIT_DISK_DISK_H

#include "base/base.h"

enum { SK_DISK_TEXT_BYTES = 256 };

typedef struct sk__disk sk__disk;

/* Owned: sk__disk_release(). A value, but only the disk can make one: `tile` and `source` are its
 * own records. */
typedef struct sk__extent {
    uint64_t offset;
    size_t nbytes; /* the request, rounded up to whole blocks of the file */
    struct sk__tile *tile;
    struct sk__source *source; /* the file of others; NULL: the disk's own */
    uint64_t digest;           /* of the bytes there, by a write */
} sk__extent;

typedef enum sk__disk_way { SK_DISK_WRITE, SK_DISK_READ, SK_DISK_WAYS } sk__disk_way;

/* Owned by the caller, who must not touch it between sk__disk_submit() and done(). */
typedef struct sk__disk_request {
    /* Set by the caller. */
    sk__disk_way way;
    void *memory;      /* only read from by a write; best aligned to sk__disk_alignment() */
    size_t nbytes;     /* > 0, at most the extent's */
    sk__extent extent; /* transferred from its start on; a write notes the digest of a source */
    /* Called once, on a thread of the disk, with no lock held. SK_INVALID: a file of others has
     * other bytes. The request is the caller's again,
     * so done() may submit it again or free it. It may call anything but sk__disk_close(). */
    void (*done)(struct sk__disk_request *request, sk_status status);
    void *context;
    /* Set by the disk. */
    char text[SK_DISK_TEXT_BYTES]; /* why it failed; readable on any thread */
    struct sk__disk_request *next;
    size_t claimed_bytes; /* already cut into pieces */
    size_t moved_bytes;
    uint64_t digest; /* of the bytes moved so far, if there is a source */
    unsigned pieces; /* under way */
    sk_status status;
} sk__disk_request;

typedef struct sk__disk_stats {
    size_t in_use_bytes; /* of all extents */
    size_t peak_bytes;   /* most in use */
    size_t backed_bytes; /* taken from the file system: in use + kept for later reservations */
    uint64_t written_bytes, read_bytes; /* of pieces that succeeded */
    bool is_direct;                     /* past the page cache */
} sk__disk_stats;

/* folder       where the file is made; read once. NULL: no file, for files of others only.
 * limit_bytes  most bytes that the file takes, never exceeded (the file system's own bookkeeping
 *              for them is not counted); 0: none.
 * out          owned: sk__disk_close().
 * Returns      SK_INVALID, SK_OUT_OF_HOST_MEMORY, SK_DISK_FAILED (no file can be made there). */
SK_NODISCARD sk_status sk__disk_open(const char *folder, size_t limit_bytes, sk__disk **out);
/* Waits for every request submitted; extents need not be released. NULL is accepted. */
void sk__disk_close(sk__disk *disk);

/* Reserve space for `nbytes` > 0.
 * Returns  SK_OUT_OF_DISK with the bytes requested, in use and free; SK_OUT_OF_HOST_MEMORY,
 *          SK_DISK_FAILED, SK_UNSUPPORTED (forked child), SK_INVALID.
 * Threads  any. Asks the file system unless released space fits, which may wait for pieces under
 *          way; never calls back. */
SK_NODISCARD sk_status sk__disk_reserve(sk__disk *disk, size_t nbytes, sk__extent *out);
/* Make an extent of `nbytes` at `offset` of the file at `path`. SK_DISK_FAILED: it cannot be read;
 * SK_INVALID: it is too short, or no file; SK_OUT_OF_HOST_MEMORY. Threads: any. */
SK_NODISCARD sk_status sk__disk_borrow(sk__disk *disk, const char *path, uint64_t offset,
                                       size_t nbytes, sk__extent *out);
/* Release an extent; its space may be reserved again at once. No request for it may be under way.
 * Threads: any; allocates nothing. */
void sk__disk_release(sk__disk *disk, sk__extent extent);

/* Queue a request. On failure nothing is queued and done() is not called: SK_INVALID,
 * SK_UNSUPPORTED (forked child), SK_OUT_OF_HOST_MEMORY (no thread could be started). done() then
 * gets SK_OK, SK_OUT_OF_DISK, SK_DISK_FAILED; request->text says why. Threads: any; never waits for
 * I/O. */
SK_NODISCARD sk_status sk__disk_submit(sk__disk *disk, sk__disk_request *request);

/* A power of two. Memory and sizes that are multiples of it are read and written in place; the rest
 * also works, through a buffer of the thread. Extents are whole multiples. Threads: any. */
size_t sk__disk_alignment(const sk__disk *disk);
void sk__disk_stats_get(sk__disk *disk, sk__disk_stats *out);
/* Give space without an extent back to the file system. SK_UNSUPPORTED: it takes none back. */
SK_NODISCARD sk_status sk__disk_trim(sk__disk *disk);
/* Walk every structure. SK_CORRUPT: sk_error_text() names the broken invariant. */
SK_NODISCARD sk_status sk__disk_check(sk__disk *disk);

#endif
