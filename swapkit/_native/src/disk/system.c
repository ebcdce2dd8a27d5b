/* system.c - see system.h. */
#include "disk/system.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

enum { FILE_MODE = 0600 };

static int system_open(const char *folder, int flags) { return open(folder, flags, FILE_MODE); }

static int system_open_named(char *template) { return mkostemp(template, O_CLOEXEC); }

static int system_set_direct(int fd, bool direct) {
    return fcntl(fd, F_SETFL, direct ? O_DIRECT : 0);
}

static int system_allocate(int fd, uint64_t offset, size_t nbytes) {
    return fallocate(fd, 0, (off_t)offset, (off_t)nbytes);
}

static int system_give_back(int fd, uint64_t offset, size_t nbytes) {
    int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    return fallocate(fd, mode, (off_t)offset, (off_t)nbytes);
}

static ssize_t system_move(sk__disk_way way, int fd, void *memory, size_t nbytes, uint64_t offset) {
    return way == SK_DISK_WRITE ? pwrite(fd, memory, nbytes, (off_t)offset)
                                : pread(fd, memory, nbytes, (off_t)offset);
}

static int system_flush(int fd, uint64_t offset, size_t nbytes) {
    unsigned how = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    return sync_file_range(fd, (off_t)offset, (off_t)nbytes, how);
}

static const sk__system_calls calls = {
    .open = system_open,
    .open_named = system_open_named,
    .set_direct = system_set_direct,
    .allocate = system_allocate,
    .give_back = system_give_back,
    .move = system_move,
    .flush = system_flush,
};

const sk__system_calls *_Atomic sk__system = &calls;
