/* system.h - the system calls of this floor; each can be made to fail (disk.h). */
#ifndef SWAPKIT_DISK_SYSTEM_H
#define SWAPKIT_DISK_SYSTEM_H

#include <sys/types.h>

#include "disk/disk.h"

/* All return the result of the system call: -1 and errno on failure; the caller handles EINTR. */
int sk__system_open(const char *folder, int flags); /* mode 0600 */
int sk__system_open_named(char *template);          /* mkostemp */
int sk__system_set_direct(int fd, bool direct);
int sk__system_allocate(int fd, uint64_t offset, size_t nbytes);
int sk__system_give_back(int fd, uint64_t offset, size_t nbytes);
ssize_t sk__system_move(sk__disk_way way, int fd, void *memory, size_t nbytes, uint64_t offset);
int sk__system_flush(int fd, uint64_t offset, size_t nbytes);

#endif
