/* source.c - see source.h. */
#include "disk/source.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "disk/system.h"

enum { LANES = 4, STRIDE_BYTES = LANES * sizeof(uint64_t) };

/* ---- files ----------------------------------------------------------------------------------- */

static sk_status fail(sk_status status, const char *path, const char *what) {
    return sk__fail(status, "disk: reading %.150s: %s", path, what);
}

/* Open a file, unless it is one of the sources. */
static sk_status source_open(sk__source **sources, const char *path, uint64_t end,
                             sk__source **out) {
    struct stat about;
    /* It may be anything by now: opening a pipe or a device may wait, or have effects. */
    if (stat(path, &about) != 0) {
        return fail(SK_DISK_FAILED, path, strerror(errno));
    }
    if (!S_ISREG(about.st_mode) || about.st_size < 0 || (uint64_t)about.st_size < end) {
        return sk__fail(SK_INVALID, "disk: %.150s is no file of %llu bytes", path,
                        (unsigned long long)end);
    }
    for (sk__source *each = *sources; each != NULL; each = each->next) {
        if (each->device == about.st_dev && each->inode == about.st_ino) {
            *out = each;
            return SK_OK;
        }
    }
    sk__source *made = calloc(1, sizeof *made);
    char *copy = strdup(path);
    int fd = made == NULL || copy == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        sk_status status = made == NULL || copy == NULL
                               ? sk__fail(SK_OUT_OF_HOST_MEMORY, "disk: no host memory for a file")
                               : fail(SK_DISK_FAILED, path, strerror(errno));
        free(made);
        free(copy);
        return status;
    }
    *made = (sk__source){
        .next = *sources, .fd = fd, .device = about.st_dev, .inode = about.st_ino, .path = copy};
    *sources = *out = made;
    return SK_OK;
}

sk_status sk__source_take(sk__source **sources, const char *path, uint64_t end, sk__source **out) {
    sk_status status = source_open(sources, path, end, out);
    if (status == SK_OK) {
        (*out)->extents++;
    }
    return status;
}

void sk__source_give(sk__source **sources, sk__source *source) {
    sk_assert(source->extents > 0);
    if (--source->extents > 0) {
        return;
    }
    while (*sources != source) {
        sources = &(*sources)->next;
    }
    *sources = source->next;
    (void)close(source->fd);
    free(source->path);
    free(source);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

/* A change of one word changes its lane: each step can be undone. */
static uint64_t mix(uint64_t lane, uint64_t word) {
    uint64_t mixed = (lane ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return mixed << 29 | mixed >> 35;
}

static uint64_t digest_of(const char *bytes, size_t nbytes, uint64_t at) {
    uint64_t lanes[LANES] = {at, at + 1, at + 2, at + 3};
    uint64_t words[LANES];
    for (size_t done = 0; done < nbytes; done += STRIDE_BYTES) {
        if (nbytes - done < STRIDE_BYTES) {
            memset(words, 0, sizeof words);
        }
        memcpy(words, bytes + done, sk__min(nbytes - done, STRIDE_BYTES));
        for (int i = 0; i < LANES; i++) {
            lanes[i] = mix(lanes[i], words[i]);
        }
    }
    uint64_t digest = nbytes;
    for (int i = 0; i < LANES; i++) {
        digest = mix(digest, lanes[i]);
    }
    return digest;
}

/* Read all of a range. */
static sk_status range_read(const sk__source *source, char *memory, size_t nbytes,
                            uint64_t offset) {
    for (size_t done = 0; done < nbytes;) {
        ssize_t n =
            sk__system->move(SK_DISK_READ, source->fd, memory + done, nbytes - done, offset + done);
        if (n > 0) {
            done += (size_t)n;
        } else if (n == 0) {
            return fail(SK_INVALID, source->path, "the file has become shorter");
        } else if (errno != EINTR) {
            return fail(SK_DISK_FAILED, source->path, strerror(errno));
        }
    }
    return SK_OK;
}

/* Compare memory with the file, through the bounce buffer. */
static sk_status range_compare(const sk__source *source, const sk__piece *piece, char *bounce) {
    sk_status status = SK_OK;
    for (size_t done = 0; status == SK_OK && done < piece->nbytes; done += SK_BOUNCE_BYTES) {
        size_t nbytes = sk__min(piece->nbytes - done, SK_BOUNCE_BYTES);
        status = range_read(source, bounce, nbytes, piece->offset + done);
        if (status == SK_OK && memcmp(bounce, piece->memory + done, nbytes) != 0) {
            status = fail(SK_INVALID, source->path, "it has other bytes");
        }
    }
    return status;
}

sk_status sk__source_move(const sk__source *source, const sk__piece *piece, uint64_t at,
                          char *bounce, uint64_t *digest) {
    sk_status status = piece->way == SK_DISK_WRITE
                           ? range_compare(source, piece, bounce)
                           : range_read(source, piece->memory, piece->nbytes, piece->offset);
    if (status == SK_OK) {
        *digest = digest_of(piece->memory, piece->nbytes, at);
    }
    return status;
}
