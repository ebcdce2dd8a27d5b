// lock.cpp - the runtime's lock.
#include "python/lock.hpp"

namespace swapkit {

namespace {

constexpr PY_TIMEOUT_T for_ever = -1;

bool is_owned(const Lock *lock) {
    return lock->depth > 0 && lock->owner == PyThread_get_thread_ident();
}

// Take the lock if that needs no waiting.
bool try_acquire(Lock *lock) {
    if (is_owned(lock)) {
        lock->depth++;
        return true;
    }
    if (lock->depth > 0) {
        return false;
    }
    lock->owner = PyThread_get_thread_ident();
    lock->depth = 1;
    return true;
}

// Wait until the owner releases the lock; another thread may then take it first. False: a signal
// handler raised.
bool wait_for_owner(Lock *lock) {
    PyLockStatus status = PY_LOCK_FAILURE;
    lock->waiting++;
    {
        WithoutPython others;
        status = PyThread_acquire_lock_timed(lock->gate, for_ever, 1);
    }
    lock->waiting--;
    return status == PY_LOCK_ACQUIRED || Py_MakePendingCalls() == 0;
}

} // namespace

bool lock_acquire(Lock *lock) {
    SWAPKIT_ASSERT(has_python());
    while (!try_acquire(lock)) {
        if (!wait_for_owner(lock)) {
            return false;
        }
    }
    return true;
}

void lock_release(Lock *lock) {
    SWAPKIT_ASSERT(has_python() && is_owned(lock));
    lock->depth--;
    if (lock->depth == 0 && lock->waiting > 0) {
        (void)PyThread_acquire_lock(lock->gate, NOWAIT_LOCK); // the gate may be open
        PyThread_release_lock(lock->gate);
    }
}

// ---- Python's type ------------------------------------------------------------------------------

namespace {

bool lock_make(Lock *lock) {
    lock->gate = PyThread_allocate_lock();
    if (lock->gate == nullptr) {
        PyErr_NoMemory();
        return false;
    }
    (void)PyThread_acquire_lock(lock->gate, NOWAIT_LOCK);
    return true;
}

void lock_free(Lock *lock) {
    if (lock->gate != nullptr) {
        PyThread_free_lock(lock->gate);
    }
}

PyObject *call_acquire(PyObject *self, PyObject *args, PyObject *keywords) {
    static const char *names[] = {"blocking", nullptr};
    int blocking = 1;
    if (PyArg_ParseTupleAndKeywords(args, keywords, "|p:acquire", const_cast<char **>(names),
                                    &blocking) == 0) {
        return nullptr;
    }
    auto *lock = reinterpret_cast<Lock *>(self);
    return give(blocking == 0 ? int{try_acquire(lock)} : lock_acquire(lock) ? 1 : -1);
}

bool call_release(Lock *lock) {
    if (!is_owned(lock)) {
        PyErr_SetString(PyExc_RuntimeError, "cannot release un-acquired lock");
        return false;
    }
    lock_release(lock);
    return true;
}

} // namespace

Type lock_type(Life<Lock, MadeBy<lock_make>, Freed<lock_free>>(), "Lock",
               "The runtime's reentrant lock.",
               PyMethodDef{
                   "acquire",
                   reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_acquire)),
                   METH_VARARGS | METH_KEYWORDS, nullptr},
               method<"release", call_release>(),
               method<"is_owned", [](Lock *lock) { return int{is_owned(lock)}; }>(),
               method<"__enter__", [](Lock *lock) { return lock_acquire(lock) ? 1 : -1; }>(),
               method<"__exit__", [](Lock *lock, Unread) { return call_release(lock); }>());

} // namespace swapkit
