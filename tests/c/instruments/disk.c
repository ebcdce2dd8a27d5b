/* disk.c - the system calls of the disk's file, counted, and failed on request.
 *
 * There is one fault for the process, held in atomics: calls read them without a lock, so that a
 * fork at any moment leaves nothing locked. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "disk/system.h"
#include "instruments/instruments.h"

static struct {
    atomic_uint calls;
    atomic_uint_least64_t nth; /* 0: disarmed */
    atomic_bool forever;
    atomic_int error;
    atomic_size_t short_bytes;
    atomic_uint_least64_t count;
} armed;

static const sk__system_calls *true_calls;

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

static int faulty_open(const char *folder, int flags) {
    return call_fails(SK_DISK_CALL_OPEN) ? -1 : true_calls->open(folder, flags);
}

static int faulty_open_named(char *template) {
    return call_fails(SK_DISK_CALL_OPEN) ? -1 : true_calls->open_named(template);
}

static int faulty_set_direct(int fd, bool direct) {
    return direct && call_fails(SK_DISK_CALL_DIRECT) ? -1 : true_calls->set_direct(fd, direct);
}

static int faulty_allocate(int fd, uint64_t offset, size_t nbytes) {
    return call_fails(SK_DISK_CALL_ALLOCATE) ? -1 : true_calls->allocate(fd, offset, nbytes);
}

static int faulty_give_back(int fd, uint64_t offset, size_t nbytes) {
    return call_fails(SK_DISK_CALL_GIVE_BACK) ? -1 : true_calls->give_back(fd, offset, nbytes);
}

static ssize_t faulty_move(sk__disk_way way, int fd, void *memory, size_t nbytes, uint64_t offset) {
    if (call_is_faulty(way == SK_DISK_WRITE ? SK_DISK_CALL_WRITE : SK_DISK_CALL_READ)) {
        int error = atomic_load(&armed.error);
        if (error != 0) {
            errno = error;
            return -1;
        }
        nbytes = sk__min(nbytes, atomic_load(&armed.short_bytes));
    }
    return nbytes == 0 ? 0 : true_calls->move(way, fd, memory, nbytes, offset);
}

static int faulty_flush(int fd, uint64_t offset, size_t nbytes) {
    return call_fails(SK_DISK_CALL_FLUSH) ? -1 : true_calls->flush(fd, offset, nbytes);
}

static const sk__system_calls faulty_calls = {
    .open = faulty_open,
    .open_named = faulty_open_named,
    .set_direct = faulty_set_direct,
    .allocate = faulty_allocate,
    .give_back = faulty_give_back,
    .move = faulty_move,
    .flush = faulty_flush,
};

static void calls_replace(void) {
    true_calls = sk__system;
    sk__system = &faulty_calls;
}

void sk_disk_fault_arm(uint32_t calls, uint64_t nth, bool forever, int error, size_t short_bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, calls_replace);
    atomic_store(&armed.nth, 0);
    atomic_store(&armed.calls, calls);
    atomic_store(&armed.forever, forever);
    atomic_store(&armed.error, error);
    atomic_store(&armed.short_bytes, short_bytes);
    atomic_store(&armed.count, 0);
    atomic_store(&armed.nth, nth);
}

uint64_t sk_disk_fault_calls(void) { return atomic_load(&armed.count); }
