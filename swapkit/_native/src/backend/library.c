/* library.c - see library.h. */
#include "backend/library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef enum presence { PRESENT, EXITING, FORKED } presence;

static SK_NO_ANALYSIS void library_after_fork(void *owner) {
    sk__library *library = owner;
    if (library->ready) { /* otherwise the child may open a library of its own */
        __atomic_store_n(&library->presence, FORKED, __ATOMIC_RELAXED);
    }
}

void sk__library_prepare(sk__library *library) {
    sk__mutex_init(&library->lock, SK_RANK_BACKEND);
    library->fork_node =
        (sk__fork_node){.lock = &library->lock, .child = library_after_fork, .owner = library};
    sk__fork_register(&library->fork_node);
}

const char *sk__library_gone(const sk__library *library) {
    switch (__atomic_load_n(&library->presence, __ATOMIC_RELAXED)) {
    case EXITING:
        return library->exiting;
    case FORKED:
        return library->forked;
    default:
        return NULL;
    }
}

void sk__library_end(sk__library *library) {
    __atomic_store_n(&library->presence, EXITING, __ATOMIC_RELAXED);
}

sk_status sk__library_get(sk__library *library) {
    (void)pthread_once(&library->once, library->prepare);
    const char *gone = sk__library_gone(library);
    if (gone != NULL) {
        return sk__fail(SK_BACKEND_FAILED, "%s backend: %s", library->backend, gone);
    }
    sk_status status = SK_OK;
    sk__lock(&library->lock);
    if (!library->ready) {
        status = library->start();
        library->ready = status == SK_OK;
        if (library->ready) {
            (void)atexit(library->at_exit); /* registered after the library's: runs before it */
        }
    }
    sk__unlock(&library->lock);
    return status;
}

const char *sk__library_path(const char *variable, const char *path) {
    const char *named = getenv(variable);
    return named == NULL || named[0] == '\0' ? path : named;
}

void *sk__library_open(const sk__library *library, const char *what, const char *path,
                       const char *variable) {
    /* A user who sets the environment chooses the process's libraries anyway. */
    /* NOLINTNEXTLINE(clang-analyzer-optin.taint.GenericTaint) */
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        const char *why = dlerror();
        (void)sk__fail(
            SK_UNSUPPORTED, "%s backend: no %s found: tried %s (%s); set %s to use another library",
            library->backend, what, path, why == NULL ? "no reason given" : why, variable);
    }
    return handle;
}

const char *sk__library_find(void *handle, const char *const *names, size_t count, void *table) {
    for (size_t i = 0; i < count; i++) {
        void *address = dlsym(handle, names[i]);
        if (address == NULL) {
            return names[i];
        }
        memcpy((char *)table + i * sizeof address, &address, sizeof address);
    }
    return NULL;
}
