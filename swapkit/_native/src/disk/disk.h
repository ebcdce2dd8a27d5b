/* disk.h - space in one anonymous file, and threads that write and read it.
 *
 * The face of this floor. A *disk* is one unlinked file in a folder; an *extent* a part of it that
 * the caller has reserved. The file system is asked for an extent's space when it is reserved, so
 * a full disk is met before anything is copied. Space that was released stays in the file and is
 * used again first; it goes back to the file system by sk__disk_trim(), and by itself when the
 * limit or a full file system leaves no other way. Nothing of the file remains after the process,
 * however it ends.
 *
 * A *request* writes or reads one extent. Requests are cut into pieces that several threads of our
 * own take in turn, so a large one uses all of them; while both directions have requests they
 * alternate. There is no order between requests: read what was written after its done() only.
 *
 * Files: disk.c the handle; queue.c requests and threads; extents.c which part of the file is
 * whose; file.c the file; system.c the system's calls, and faults on demand. One lock per disk
 * guards everything that changes. It is a leaf: nothing is called with it held.
 *
 * Forked children: the file is the parent's. Reserving, submitting and trimming are SK_UNSUPPORTED
 * there, releasing and closing work, and done() is not called for requests of before the fork. */
#ifndef SWAPKIT_DISK_DISK_H
#define SWAPKIT_DISK_DISK_H

#include "base/base.h"
#include "swapkit_testing.h"

enum { SK_DISK_TEXT_BYTES = 256 };

typedef struct sk__disk sk__disk;

/* Owned: sk__disk_release(). A value, but not one to make up: `tile` is what the disk knows it by.
 */
typedef struct sk__extent {
    uint64_t offset;
    size_t nbytes; /* what was asked for, rounded up to whole blocks of the file */
    struct sk__tile *tile;
} sk__extent;

typedef enum sk__disk_way { SK_DISK_WRITE, SK_DISK_READ, SK_DISK_WAYS } sk__disk_way;

/* Owned by the caller and not to be touched between sk__disk_submit() and done(). */
typedef struct sk__disk_request {
    /* Set by the caller. */
    sk__disk_way way;
    void *memory;      /* only read from by a write; best aligned to sk__disk_alignment() */
    size_t nbytes;     /* > 0, at most the extent's */
    sk__extent extent; /* transferred from its start on */
    /* Called once, on a thread of the disk, with no lock held. The request is the caller's again,
     * so it may be submitted anew or freed in here. May call anything but sk__disk_close(). */
    void (*done)(struct sk__disk_request *request, sk_status status);
    void *context;
    /* Set by the disk. */
    char text[SK_DISK_TEXT_BYTES]; /* why it failed; for whoever reads it on another thread */
    struct sk__disk_request *next;
    size_t claimed_bytes; /* that pieces have been made of */
    size_t moved_bytes;
    unsigned pieces; /* under way */
    sk_status status;
} sk__disk_request;

typedef struct sk__disk_stats {
    size_t in_use_bytes; /* of all extents */
    size_t peak_bytes;   /* most in use */
    size_t backed_bytes; /* that the file takes of the file system: in use + kept for reuse */
    uint64_t written_bytes, read_bytes; /* of pieces that succeeded */
    bool is_direct;                     /* past the page cache */
} sk__disk_stats;

/* folder       where the file is to be; read once.
 * limit_bytes  most bytes that the file takes, never passed (what the file system itself needs to
 *              keep track of them is not counted); 0: none.
 * out          owned: sk__disk_close().
 * Returns      SK_INVALID, SK_OUT_OF_HOST_MEMORY, SK_DISK_FAILED (no file can be made there). */
SK_NODISCARD sk_status sk__disk_open(const char *folder, size_t limit_bytes, sk__disk **out);
/* Waits for every request submitted; extents need not be released. NULL is accepted. */
void sk__disk_close(sk__disk *disk);

/* Reserve space for `nbytes` > 0.
 * Returns  SK_OUT_OF_DISK with what was asked, in use and free; SK_OUT_OF_HOST_MEMORY,
 *          SK_DISK_FAILED, SK_UNSUPPORTED (forked child), SK_INVALID.
 * Threads  any. Asks the file system unless released space fits, which may wait for pieces under
 *          way; never calls back. */
SK_NODISCARD sk_status sk__disk_reserve(sk__disk *disk, size_t nbytes, sk__extent *out);
/* The space may be reserved again at once; no request for it may be under way. Threads: any;
 * allocates nothing, asks nothing of the system. */
void sk__disk_release(sk__disk *disk, sk__extent extent);

/* Queue a request. On failure nothing is queued and done() is not called: SK_INVALID,
 * SK_UNSUPPORTED (forked child), SK_OUT_OF_HOST_MEMORY (no thread could be started). done() then
 * gets SK_OK, SK_OUT_OF_DISK, SK_DISK_FAILED; request->text says why. Threads: any; never waits for
 * I/O. */
SK_NODISCARD sk_status sk__disk_submit(sk__disk *disk, sk__disk_request *request);

/* A power of two. Memory and sizes that are multiples of it are read and written in place; the rest
 * works, too, through a buffer of the thread's. Extents are whole multiples. Threads: any. */
size_t sk__disk_alignment(const sk__disk *disk);
void sk__disk_stats_get(sk__disk *disk, sk__disk_stats *out);
/* Give the space of no extent back to the file system. SK_UNSUPPORTED: it takes none back. */
SK_NODISCARD sk_status sk__disk_trim(sk__disk *disk);
/* Walk every structure. SK_CORRUPT: sk_error_text() names the invariant that is broken. */
SK_NODISCARD sk_status sk__disk_check(sk__disk *disk);

/* ---- faults on demand, for tests ------------------------------------------------------------- */

/* As sk_disk_fault_arm(), with short calls, too. error 0: a write or read is short, and moves
 * `short_bytes` at most. */
typedef struct sk__disk_fault {
    uint32_t calls; /* of sk_disk_call */
    uint64_t nth;
    bool forever;
    int error;
    size_t short_bytes;
} sk__disk_fault;

void sk__disk_fault_arm(const sk__disk_fault *fault);
uint64_t sk__disk_fault_calls(void);

#endif
