// lock.hpp - the runtime's lock, which a hook takes for every saved tensor: `threading.RLock` with
// less ado.
#ifndef SWAPKIT_LOCK_HPP
#define SWAPKIT_LOCK_HPP

#include "python/python.hpp"

namespace swapkit {

// Reentrant. All of it needs the interpreter, which guards the fields: a lock that is free is taken
// by saying so.
struct Lock {
    PyObject ob_base;
    unsigned long owner;     // a thread's number
    unsigned long depth;     // how often the owner has taken it; 0: nobody has
    unsigned long waiting;   // threads that want it
    PyThread_type_lock gate; // which these pass one by one, to look again
};

extern PyTypeObject lock_type;

// Take a lock, letting others run Python while that takes long. False: a signal handler raised.
bool lock_acquire(Lock *lock);
// Undo one `lock_acquire`, on the same thread; an exception that is set stays.
void lock_release(Lock *lock);

} // namespace swapkit

#endif
