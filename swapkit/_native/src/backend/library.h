/* library.h - a device's library: opened once per process, and no longer called once it is gone.
 *
 * It shuts down at some point of the process's exit, and does not work in a forked child. A handler
 * for each case, registered after the library's own, notes it; from then on no code here calls the
 * library. */
#ifndef SWAPKIT_BACKEND_LIBRARY_H
#define SWAPKIT_BACKEND_LIBRARY_H

#include "base/thread.h"

typedef struct sk__library {
    const char *backend;          /* its name */
    const char *exiting, *forked; /* why the library cannot be called then */
    sk_status (*start)(void);     /* open the library and initialise it, once that succeeds */
    void (*prepare)(void);        /* calls sk__library_prepare() with this object */
    void (*at_exit)(void);        /* calls sk__library_end() with this object */
    pthread_once_t once;
    sk__mutex lock;
    sk__fork_node fork_node;
    bool ready SK_GUARDED_BY(lock);
    int presence; /* atomic */
} sk__library;

void sk__library_prepare(sk__library *library);
/* Start the library, if no earlier call did. SK_BACKEND_FAILED: it is gone. Threads: any. */
sk_status sk__library_get(sk__library *library);
/* Return why the library can no longer be called: the process exits, or is a fork of the one that
 * called it. NULL: it can be called. Threads: any. */
const char *sk__library_gone(const sk__library *library);
/* Note that the library shut down, or is about to: no more calls. */
void sk__library_end(sk__library *library);

/* Open the library that the environment variable `variable` names, else `path`; NULL: the error
 * text says that there is no `what`, and what was looked for. */
const char *sk__library_path(const char *variable, const char *path);
void *sk__library_open(const sk__library *library, const char *what, const char *path,
                       const char *variable);
/* Put the addresses of all the names into `table`, an array or a structure of function pointers.
 * Return the first name that the library lacks, or NULL. */
const char *sk__library_find(void *handle, const char *const *names, size_t count, void *table);

#endif
