/* queue.c - requests, cut into pieces, and the threads that move them.
 *
 * Each direction has a queue. A thread takes the next piece of the request at the head of a queue,
 * the directions in turn, so neither starves the other and one large request occupies all threads.
 * A request leaves its queue when its last piece is taken, or when a piece has failed. The thread
 * that ends the last piece under way calls done(). Guarded by disk->lock, which is released while
 * bytes move and during done(). */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "disk/handle.h"

static void queue_append(sk__disk_queue *queue, sk__disk_request *request) {
    request->next = NULL;
    if (queue->last != NULL) {
        queue->last->next = request;
    } else {
        sk_assert(queue->first == NULL);
        queue->first = request;
    }
    queue->last = request;
}

static void queue_pop(sk__disk_queue *queue) {
    sk_assert(queue->first != NULL);
    queue->first = queue->first->next;
    if (queue->first == NULL) {
        queue->last = NULL;
    }
}

static bool is_idle(sk__disk *disk) SK_REQUIRES(disk->lock) {
    return disk->queues[SK_DISK_WRITE].first == NULL && disk->queues[SK_DISK_READ].first == NULL;
}

/* Take the next piece of a request; the caller knows that there is one. */
static sk__disk_request *piece_take(sk__disk *disk, sk__piece *out) SK_REQUIRES(disk->lock) {
    sk__disk_way way = disk->next_way;
    if (disk->queues[way].first == NULL) {
        way = way == SK_DISK_WRITE ? SK_DISK_READ : SK_DISK_WRITE;
    }
    disk->next_way = way == SK_DISK_WRITE ? SK_DISK_READ : SK_DISK_WRITE;
    sk__disk_request *request = disk->queues[way].first;
    sk_assert(request != NULL && request->way == way && request->status == SK_OK);
    size_t claimed = request->claimed_bytes;
    sk_assert(claimed < request->nbytes);
    *out = (sk__piece){.way = way,
                       .memory = (char *)request->memory + claimed,
                       .nbytes = sk__min(request->nbytes - claimed, SK_PIECE_BYTES),
                       .offset = request->extent.offset + claimed};
    sk_assert(out->nbytes > 0 &&
              (request->extent.source != NULL || out->offset % disk->file.block_bytes == 0));
    request->claimed_bytes += out->nbytes;
    request->pieces++;
    if (request->claimed_bytes == request->nbytes) {
        queue_pop(&disk->queues[way]);
    }
    return request;
}

static sk_status piece_move(sk__disk *disk, const sk__disk_request *request, const sk__piece *piece,
                            char *bounce, uint64_t *digest) {
    const sk__source *source = request->extent.source;
    return source == NULL ? sk__file_move(&disk->file, piece, bounce)
                          : sk__source_move(source, piece, piece->offset - request->extent.offset,
                                            bounce, digest);
}

/* Note or check the digest of a part of a file of others. */
static void digest_settle(sk__disk_request *request) {
    if (request->extent.source == NULL || request->status != SK_OK) {
        return;
    }
    if (request->way == SK_DISK_WRITE) {
        request->extent.digest = request->digest;
    } else if (request->digest != request->extent.digest) {
        request->status = SK_INVALID;
        (void)snprintf(request->text, sizeof request->text,
                       "disk: %.120s has been changed since it was loaded: the bytes are lost",
                       request->extent.source->path);
    }
}

/* End a piece. True if it was the request's last: the caller must call done(). */
static bool piece_settle(sk__disk *disk, sk__disk_request *request, const sk__piece *piece,
                         uint64_t digest, sk_status status) SK_REQUIRES(disk->lock) {
    sk_assert(request->pieces > 0 && request->claimed_bytes <= request->nbytes);
    request->pieces--;
    if (status == SK_OK) {
        request->moved_bytes += piece->nbytes;
        request->digest += digest;
        disk->moved_bytes[request->way] += piece->nbytes;
    } else if (request->status == SK_OK) {
        request->status = status;
        (void)snprintf(request->text, sizeof request->text, "%s", sk_error_text());
        if (request->claimed_bytes < request->nbytes) {
            sk_assert(disk->queues[request->way].first == request);
            queue_pop(&disk->queues[request->way]);
            request->claimed_bytes = request->nbytes;
        }
    }
    bool is_last = request->pieces == 0 && request->claimed_bytes == request->nbytes;
    sk_assert(!is_last || request->status != SK_OK || request->moved_bytes == request->nbytes);
    if (is_last) {
        digest_settle(request);
    }
    return is_last;
}

static void *worker_main(void *argument) {
    sk__disk_worker *worker = argument;
    sk__disk *disk = worker->disk;
    sk__lock(&disk->lock);
    for (;;) {
        while (is_idle(disk) && !disk->stopping) {
            sk__wait(&disk->work, &disk->lock);
        }
        if (is_idle(disk)) {
            break;
        }
        sk__piece piece;
        sk__disk_request *request = piece_take(disk, &piece);
        sk__unlock(&disk->lock);
        uint64_t digest = 0;
        sk_status status = piece_move(disk, request, &piece, worker->bounce, &digest);
        sk__lock(&disk->lock);
        if (piece_settle(disk, request, &piece, digest, status)) {
            sk__unlock(&disk->lock);
            sk_assert(request->status == SK_OK || request->text[0] != '\0');
            request->done(request, request->status); /* the request is the caller's from here on */
            sk__lock(&disk->lock);
        }
    }
    sk__unlock(&disk->lock);
    return NULL;
}

/* Start a thread with all signals blocked: they are for the program's own threads. */
static int thread_start(sk__disk_worker *worker) {
    sigset_t every;
    sigset_t before;
    (void)sigfillset(&every);
    (void)pthread_sigmask(SIG_SETMASK, &every, &before);
    int error = sk__thread_start(&worker->thread, worker_main, worker);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* Start the missing threads. One thread is enough to go on. */
static sk_status workers_start(sk__disk *disk) SK_REQUIRES(disk->lock) {
    int error = 0;
    while (disk->nworkers < SK_DISK_THREADS && error == 0) {
        sk__disk_worker *worker = &disk->workers[disk->nworkers];
        worker->disk = disk;
        if (worker->bounce == NULL) {
            worker->bounce = aligned_alloc(disk->file.block_bytes, SK_BOUNCE_BYTES);
        }
        error = worker->bounce == NULL ? ENOMEM : thread_start(worker);
        disk->nworkers += error == 0;
    }
    if (disk->nworkers == 0) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "disk: no thread for reads and writes: %s",
                        strerror(error));
    }
    return SK_OK;
}

sk_status sk__disk_submit(sk__disk *disk, sk__disk_request *request) {
    if (request == NULL || request->memory == NULL || request->done == NULL ||
        (request->way != SK_DISK_WRITE && request->way != SK_DISK_READ)) {
        return sk__fail(SK_INVALID, "disk: a request needs memory, done() and a direction");
    }
    sk__lock(&disk->lock);
    sk_status status = SK_OK;
    if (disk->is_copy) {
        status = sk__fail(SK_UNSUPPORTED, "disk: a forked child cannot write or read the file");
    } else if (!sk__extents_own(&disk->extents, &request->extent) || request->nbytes == 0 ||
               request->nbytes > request->extent.nbytes) {
        status = sk__fail(SK_INVALID,
                          "disk: cannot transfer %zu bytes of an extent of %zu: expected 1 to "
                          "its size, of an extent in use",
                          request->nbytes, request->extent.nbytes);
    } else {
        status = workers_start(disk);
    }
    if (status == SK_OK) {
        request->text[0] = '\0';
        request->claimed_bytes = request->moved_bytes = 0;
        request->digest = 0;
        request->pieces = 0;
        request->status = SK_OK;
        queue_append(&disk->queues[request->way], request);
        (void)pthread_cond_broadcast(&disk->work);
    }
    sk__unlock(&disk->lock);
    return status;
}

void sk__disk_stop(sk__disk *disk) {
    sk__lock(&disk->lock);
    disk->stopping = true;
    (void)pthread_cond_broadcast(&disk->work);
    unsigned nworkers = disk->nworkers;
    sk_assert(nworkers > 0 || is_idle(disk));
    sk__unlock(&disk->lock);
    for (unsigned i = 0; i < nworkers; i++) {
        (void)pthread_join(disk->workers[i].thread, NULL);
    }
    for (unsigned i = 0; i < SK_DISK_THREADS; i++) {
        free(disk->workers[i].bounce);
        disk->workers[i].bounce = NULL;
    }
}

void sk__disk_forget(sk__disk *disk) {
    disk->nworkers = 0;
    for (int way = 0; way < SK_DISK_WAYS; way++) {
        disk->queues[way] = (sk__disk_queue){0};
    }
}

sk_status sk__disk_queues_check(sk__disk *disk) {
    for (int way = 0; way < SK_DISK_WAYS; way++) {
        const sk__disk_request *last = NULL;
        for (const sk__disk_request *request = disk->queues[way].first; request != NULL;
             request = request->next) {
            bool is_sound = (int)request->way == way && request->status == SK_OK &&
                            request->claimed_bytes < request->nbytes &&
                            (last == NULL || request->claimed_bytes == 0) &&
                            sk__extents_own(&disk->extents, &request->extent);
            if (!is_sound) {
                return sk__fail(SK_CORRUPT, "disk: a queued request is not in order");
            }
            last = request;
        }
        if (last != disk->queues[way].last) {
            return sk__fail(SK_CORRUPT, "disk: the end of a queue is lost");
        }
    }
    return SK_OK;
}
