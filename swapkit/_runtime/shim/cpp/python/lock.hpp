// lock.hpp - the runtime's lock, a leaner `threading.RLock`: hooks take it for every saved tensor.
#ifndef SWAPKIT_LOCK_HPP
#define SWAPKIT_LOCK_HPP

#include "python/types.hpp"

namespace swapkit {

// Reentrant. Needs the GIL, which guards the fields: taking a free lock only sets them.
struct Lock {
    PyObject ob_base;
    unsigned long owner;     // a thread's id
    unsigned long depth;     // how often the owner has taken it; 0: it is free
    unsigned long waiting;   // threads that wait for it
    PyThread_type_lock gate; // waiting threads pass it one by one, and try again
};

extern Type lock_type;

// Take a lock; release the GIL while waiting for it. False: a signal handler raised.
bool lock_acquire(Lock *lock);
// Undo one `lock_acquire`, on the same thread. The current exception stays set.
void lock_release(Lock *lock);

} // namespace swapkit

#endif
