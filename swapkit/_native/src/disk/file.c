/* file.c - one file without a name.
 *
 * Direct I/O bypasses the page cache and needs aligned memory, offsets and sizes. Unaligned parts
 * go through the caller's bounce buffer, the last block padded (extents are whole blocks). If
 * direct I/O is refused, at the start or later, the file uses the page cache from then on, and each
 * piece is flushed and dropped from it at once: the cache must not grow at the expense of the
 * memory that swapkit is meant to save. */
#include "disk/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "disk/system.h"

enum { LEAST_BLOCK_BYTES = 4096, MOST_BLOCK_BYTES = 64 * 1024 };

/* ---- opening --------------------------------------------------------------------------------- */

/* For file systems without O_TMPFILE. A process killed between the two calls leaves an empty file.
 */
static int open_named(const char *folder) {
    static const char name[] = "/swapkit-XXXXXX";
    size_t nbytes = strlen(folder) + sizeof name;
    char *path = malloc(nbytes);
    if (path == NULL) {
        errno = ENOMEM;
        return -1;
    }
    (void)snprintf(path, nbytes, "%s%s", folder, name);
    int fd = sk__system->open_named(path);
    if (fd >= 0) {
        (void)unlink(path);
    }
    int error = errno;
    free(path);
    errno = error;
    return fd;
}

static int open_anonymous(const char *folder) {
    int fd = sk__system->open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL);
    bool no_such_flag = errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL;
    return fd < 0 && no_such_flag ? open_named(folder) : fd;
}

/* Switch to the page cache: direct I/O was refused, or stopped where it cannot go on. */
static void drop_direct(sk__file *file) {
    (void)sk__system->set_direct(file->fd, false);
    atomic_store(&file->is_direct, false);
}

/* Find the alignment of direct I/O here, or that there is none. */
static void find_alignment(sk__file *file) {
    file->block_bytes = file->memory_alignment = LEAST_BLOCK_BYTES;
    atomic_init(&file->is_direct, sk__system->set_direct(file->fd, true) == 0);
#ifdef STATX_DIOALIGN
    struct statx about = {0};
    if (statx(file->fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &about) != 0 ||
        (about.stx_mask & STATX_DIOALIGN) == 0) {
        return; /* unknown: the first request will show it */
    }
    size_t needed = sk__max(about.stx_dio_offset_align, about.stx_dio_mem_align);
    if (about.stx_dio_offset_align == 0 || needed > MOST_BLOCK_BYTES) {
        drop_direct(file);
        return;
    }
    file->block_bytes = sk__max(LEAST_BLOCK_BYTES, needed);
    file->memory_alignment = about.stx_dio_mem_align;
#endif
}

sk_status sk__file_open(sk__file *file, const char *folder) {
    if (folder == NULL) {
        *file = (sk__file){.fd = -1, .block_bytes = LEAST_BLOCK_BYTES};
        return SK_OK;
    }
    char *copy = strdup(folder);
    if (copy == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "disk: no host memory for a path");
    }
    int fd = open_anonymous(folder);
    if (fd < 0) {
        int error = errno;
        free(copy);
        return sk__fail(error == ENOMEM ? SK_OUT_OF_HOST_MEMORY : SK_DISK_FAILED,
                        "disk: cannot create a file in %.300s: %s; choose another folder", folder,
                        strerror(error));
    }
    *file = (sk__file){.fd = fd, .folder = copy};
    atomic_init(&file->can_allocate, true);
    find_alignment(file);
    sk_assert((file->block_bytes & (file->block_bytes - 1)) == 0);
    sk_assert(SK_BOUNCE_BYTES % file->block_bytes == 0);
    return SK_OK;
}

void sk__file_leave(sk__file *file) {
    if (file->fd >= 0) {
        (void)close(file->fd);
    }
    file->fd = -1;
}

void sk__file_close(sk__file *file) {
    sk__file_leave(file);
    free(file->folder);
    file->folder = NULL;
}

/* ---- space ----------------------------------------------------------------------------------- */

static bool is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

static sk_status fail(const sk__file *file, int error, const char *what, size_t nbytes,
                      uint64_t offset) {
    return sk__fail(is_full(error) ? SK_OUT_OF_DISK : SK_DISK_FAILED,
                    "disk: %s %zu bytes at %llu of a file in %.100s: %s", what, nbytes,
                    (unsigned long long)offset, file->folder, strerror(error));
}

size_t sk__file_free_bytes(const sk__file *file) {
    struct statvfs about;
    if (fstatvfs(file->fd, &about) != 0) {
        return SIZE_MAX;
    }
    return (size_t)about.f_bavail * about.f_frsize;
}

sk_status sk__file_allocate(sk__file *file, uint64_t offset, size_t nbytes) {
    sk_assert(offset % file->block_bytes == 0 && nbytes % file->block_bytes == 0);
    while (atomic_load(&file->can_allocate)) {
        if (sk__system->allocate(file->fd, offset, nbytes) == 0) {
            return SK_OK;
        }
        if (errno == EOPNOTSUPP || errno == ENOSYS) {
            atomic_store(&file->can_allocate, false);
        } else if (errno != EINTR) {
            return fail(file, errno, "allocating", nbytes, offset);
        }
    }
    /* Space cannot be set aside here: the best alternative is a check before writing. */
    return nbytes <= sk__file_free_bytes(file) ? SK_OK
                                               : fail(file, ENOSPC, "writing", nbytes, offset);
}

sk_status sk__file_give_back(sk__file *file, uint64_t offset, size_t nbytes) {
    sk_assert(offset % file->block_bytes == 0 && nbytes % file->block_bytes == 0);
    while (sk__system->give_back(file->fd, offset, nbytes) != 0) {
        if (errno == EOPNOTSUPP || errno == ENOSYS) {
            return sk__fail(SK_UNSUPPORTED, "disk: the file system of %.200s cannot free space",
                            file->folder);
        }
        if (errno != EINTR) {
            return fail(file, errno, "freeing", nbytes, offset);
        }
    }
    return SK_OK;
}

/* ---- moving bytes ---------------------------------------------------------------------------- */

/* Write or read all of a range that is aligned for direct I/O, or need not be. */
static sk_status range_move(sk__file *file, const sk__piece *range) {
    const char *what = range->way == SK_DISK_WRITE ? "writing" : "reading";
    size_t moved = 0;
    while (moved < range->nbytes) {
        size_t rest = range->nbytes - moved;
        uint64_t offset = range->offset + moved;
        /* Read before the call: another thread may switch it off meanwhile. */
        bool was_direct = atomic_load(&file->is_direct);
        ssize_t n = sk__system->move(range->way, file->fd, range->memory + moved, rest, offset);
        if (n > 0) {
            sk_assert((size_t)n <= rest);
            moved += (size_t)n;
        } else if (n < 0 && errno == EINVAL && was_direct) {
            drop_direct(file); /* also after a short call that ended between two blocks */
        } else if (n == 0) {
            int error = range->way == SK_DISK_WRITE ? ENOSPC : ENODATA;
            return fail(file, error, what, rest, offset);
        } else if (errno != EINTR) {
            return fail(file, errno, what, rest, offset);
        }
    }
    return SK_OK;
}

/* Write or read a range through the bounce buffer, in whole blocks. */
static sk_status range_bounce(sk__file *file, const sk__piece *range, char *bounce) {
    sk_assert((uintptr_t)bounce % file->block_bytes == 0);
    size_t moved = 0;
    sk_status status = SK_OK;
    while (status == SK_OK && moved < range->nbytes) {
        size_t nbytes = sk__min(range->nbytes - moved, SK_BOUNCE_BYTES);
        sk__piece padded = {.way = range->way,
                            .memory = bounce,
                            .nbytes = sk__round_up(nbytes, file->block_bytes),
                            .offset = range->offset + moved};
        sk_assert(padded.offset % file->block_bytes == 0 && padded.nbytes <= SK_BOUNCE_BYTES);
        if (range->way == SK_DISK_WRITE) {
            memcpy(bounce, range->memory + moved, nbytes);
            memset(bounce + nbytes, 0, padded.nbytes - nbytes);
        }
        status = range_move(file, &padded);
        if (status == SK_OK && range->way == SK_DISK_READ) {
            memcpy(range->memory + moved, bounce, nbytes);
        }
        moved += nbytes;
    }
    return status;
}

/* Keep the page cache from growing. A write that only fails at the flush counts as failed. */
static sk_status cache_drop(sk__file *file, const sk__piece *piece) {
    sk_assert(!atomic_load(&file->is_direct));
    int flushed = 0;
    if (piece->way == SK_DISK_WRITE) {
        do {
            flushed = sk__system->flush(file->fd, piece->offset, piece->nbytes);
        } while (flushed != 0 && errno == EINTR);
    }
    if (flushed != 0 && errno != EINVAL && errno != ESPIPE && errno != ENOSYS) {
        return fail(file, errno, "writing", piece->nbytes, piece->offset);
    }
    (void)posix_fadvise(file->fd, (off_t)piece->offset, (off_t)piece->nbytes, POSIX_FADV_DONTNEED);
    return SK_OK;
}

sk_status sk__file_move(sk__file *file, const sk__piece *piece, char *bounce) {
    sk_assert(piece->nbytes > 0 && piece->offset % file->block_bytes == 0);
    sk__piece straight = *piece;
    if (atomic_load(&file->is_direct)) {
        bool aligned = (uintptr_t)piece->memory % file->memory_alignment == 0;
        straight.nbytes = aligned ? sk__round_down(piece->nbytes, file->block_bytes) : 0;
    }
    sk_status status = range_move(file, &straight);
    if (status == SK_OK && straight.nbytes < piece->nbytes) {
        sk__piece rest = {.way = piece->way,
                          .memory = piece->memory + straight.nbytes,
                          .nbytes = piece->nbytes - straight.nbytes,
                          .offset = piece->offset + straight.nbytes};
        status = range_bounce(file, &rest, bounce);
    }
    if (status == SK_OK && !atomic_load(&file->is_direct)) {
        status = cache_drop(file, piece);
    }
    return status;
}
