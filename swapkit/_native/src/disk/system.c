/* system.c - the system calls, counted, and failed on a test's request.
 *
 * There is one fault for the process, held in atomics: calls read them without a lock, so that a
 * fork at any moment leaves nothing locked. */
#include "disk/system.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { FILE_MODE = 0600 };

static struct {
    atomic_uint calls;
    atomic_uint_least64_t nth; /* 0: disarmed */
    atomic_bool forever;
    atomic_int error;
    atomic_size_t short_bytes;
    atomic_uint_least64_t count;
} armed;

void sk__disk_fault_arm(const sk__disk_fault *fault) {
    atomic_store(&armed.nth, 0);
    atomic_store(&armed.calls, fault->calls);
    atomic_store(&armed.forever, fault->forever);
    atomic_store(&armed.error, fault->error);
    atomic_store(&armed.short_bytes, fault->short_bytes);
    atomic_store(&armed.count, 0);
    atomic_store(&armed.nth, fault->nth);
}

uint64_t sk__disk_fault_calls(void) { return atomic_load(&armed.count); }

void sk_disk_fault_arm(uint32_t calls, uint64_t nth, bool forever, int error) {
    sk__disk_fault_arm(
        &(sk__disk_fault){.calls = calls, .nth = nth, .forever = forever, .error = error});
}

uint64_t sk_disk_fault_calls(void) { return sk__disk_fault_calls(); }

/* Count a call; return whether it must go wrong. */
static bool call_is_faulty(sk_disk_call call) {
    if ((atomic_load(&armed.calls) & (unsigned)call) == 0) {
        return false;
    }
    uint64_t nth = atomic_load(&armed.nth);
    uint64_t number = atomic_fetch_add(&armed.count, 1) + 1;
    return nth != 0 && (number == nth || (number > nth && atomic_load(&armed.forever)));
}

/* Return whether the call must fail; errno is then set. */
static bool call_fails(sk_disk_call call) {
    int error = call_is_faulty(call) ? atomic_load(&armed.error) : 0;
    if (error != 0) {
        errno = error;
    }
    return error != 0;
}

int sk__system_open(const char *folder, int flags) {
    return call_fails(SK_DISK_CALL_OPEN) ? -1 : open(folder, flags, FILE_MODE);
}

int sk__system_open_named(char *template) {
    return call_fails(SK_DISK_CALL_OPEN) ? -1 : mkostemp(template, O_CLOEXEC);
}

int sk__system_set_direct(int fd, bool direct) {
    if (direct && call_fails(SK_DISK_CALL_DIRECT)) {
        return -1;
    }
    return fcntl(fd, F_SETFL, direct ? O_DIRECT : 0);
}

int sk__system_allocate(int fd, uint64_t offset, size_t nbytes) {
    return call_fails(SK_DISK_CALL_ALLOCATE) ? -1 : fallocate(fd, 0, (off_t)offset, (off_t)nbytes);
}

int sk__system_give_back(int fd, uint64_t offset, size_t nbytes) {
    if (call_fails(SK_DISK_CALL_GIVE_BACK)) {
        return -1;
    }
    int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    return fallocate(fd, mode, (off_t)offset, (off_t)nbytes);
}

ssize_t sk__system_move(sk__disk_way way, int fd, void *memory, size_t nbytes, uint64_t offset) {
    if (call_is_faulty(way == SK_DISK_WRITE ? SK_DISK_CALL_WRITE : SK_DISK_CALL_READ)) {
        int error = atomic_load(&armed.error);
        if (error != 0) {
            errno = error;
            return -1;
        }
        nbytes = sk__min(nbytes, atomic_load(&armed.short_bytes));
    }
    if (nbytes == 0) {
        return 0;
    }
    return way == SK_DISK_WRITE ? pwrite(fd, memory, nbytes, (off_t)offset)
                                : pread(fd, memory, nbytes, (off_t)offset);
}

int sk__system_flush(int fd, uint64_t offset, size_t nbytes) {
    if (call_fails(SK_DISK_CALL_FLUSH)) {
        return -1;
    }
    unsigned how = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    return sync_file_range(fd, (off_t)offset, (off_t)nbytes, how);
}
