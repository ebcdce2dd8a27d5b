/* handle.h - the structure of a disk, shared by disk.c and queue.c. */
#ifndef SWAPKIT_DISK_HANDLE_H
#define SWAPKIT_DISK_HANDLE_H

#include "base/thread.h"
#include "disk/disk.h"
#include "disk/extents.h"
#include "disk/file.h"
#include "disk/source.h"

enum { SK_DISK_THREADS = 4, SK_PIECE_BYTES = 4 * 1024 * 1024 };

typedef struct sk__disk_queue {
    sk__disk_request *first, *last;
} sk__disk_queue;

typedef struct sk__disk_worker {
    sk__disk *disk;
    pthread_t thread;
    char *bounce; /* owned */
} sk__disk_worker;

struct sk__disk {
    sk__mutex lock;
    pthread_cond_t work;  /* a request was queued, or the threads shall stop */
    pthread_cond_t grown; /* no thread is growing the file any more */
    sk__fork_node fork_node;
    sk__file file;
    size_t limit_bytes;                /* SIZE_MAX: none */
    bool is_copy SK_GUARDED_BY(lock);  /* in a forked child: the file is the parent's */
    bool growing SK_GUARDED_BY(lock);  /* one thread at a time asks for space or gives it back */
    bool stopping SK_GUARDED_BY(lock); /* threads end when nothing is queued */
    sk__extents extents SK_GUARDED_BY(lock);
    sk__source *sources SK_GUARDED_BY(lock);
    size_t peak_bytes SK_GUARDED_BY(lock);
    uint64_t moved_bytes[SK_DISK_WAYS] SK_GUARDED_BY(lock);
    sk__disk_queue queues[SK_DISK_WAYS] SK_GUARDED_BY(lock);
    sk__disk_way next_way SK_GUARDED_BY(lock); /* the direction whose turn is next */
    sk__disk_worker workers[SK_DISK_THREADS];
    unsigned nworkers SK_GUARDED_BY(lock);
};

/* queue.c */
/* Let the threads finish all queued requests, and end. */
void sk__disk_stop(sk__disk *disk);
/* Drop requests and threads in a forked child: they are the parent's. */
void sk__disk_forget(sk__disk *disk) SK_REQUIRES(disk->lock);
sk_status sk__disk_queues_check(sk__disk *disk) SK_REQUIRES(disk->lock);

#endif
