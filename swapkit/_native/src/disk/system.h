/* system.h - the system calls of this floor. */
#ifndef SWAPKIT_DISK_SYSTEM_H
#define SWAPKIT_DISK_SYSTEM_H

#include <sys/types.h>

#include "disk/disk.h"

/* All return the result of the system call: -1 and errno on failure; the caller handles EINTR. */
typedef struct sk__system_calls {
    int (*open)(const char *folder, int flags); /* mode 0600 */
    int (*open_named)(char *template);          /* mkostemp */
    int (*set_direct)(int fd, bool direct);
    int (*allocate)(int fd, uint64_t offset, size_t nbytes);
    int (*give_back)(int fd, uint64_t offset, size_t nbytes);
    ssize_t (*move)(sk__disk_way way, int fd, void *memory, size_t nbytes, uint64_t offset);
    int (*flush)(int fd, uint64_t offset, size_t nbytes);
} sk__system_calls;

/* The calls in force. A variable because tests put others in their place, which fail: a healthy
 * system refuses nothing on request. Replaced at any time, so every call reads it anew. */
extern SK_API const sk__system_calls *_Atomic sk__system;

#endif
