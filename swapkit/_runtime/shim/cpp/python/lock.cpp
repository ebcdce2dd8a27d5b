// lock.cpp - the runtime's lock.
#include "python/lock.hpp"

namespace swapkit {

namespace {

constexpr PY_TIMEOUT_T for_ever = -1;

Lock *as_lock(PyObject *self) { return reinterpret_cast<Lock *>(self); }

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

PyObject *lock_make(PyTypeObject *type, PyObject *args, PyObject *) {
    if (PyArg_ParseTuple(args, ":Lock") == 0) {
        return nullptr;
    }
    Ref<> made = Ref<>::steal(type->tp_alloc(type, 0));
    if (!made) {
        return nullptr;
    }
    PyThread_type_lock gate = PyThread_allocate_lock();
    if (gate == nullptr) {
        return PyErr_NoMemory();
    }
    (void)PyThread_acquire_lock(gate, NOWAIT_LOCK);
    as_lock(made.get())->gate = gate;
    return made.release();
}

void lock_free(PyObject *self) {
    Lock *lock = as_lock(self);
    if (lock->gate != nullptr) {
        PyThread_free_lock(lock->gate);
    }
    Py_TYPE(self)->tp_free(self);
}

PyObject *call_acquire(PyObject *self, PyObject *args, PyObject *keywords) {
    static const char *names[] = {"blocking", nullptr};
    int blocking = 1;
    if (PyArg_ParseTupleAndKeywords(args, keywords, "|p:acquire", const_cast<char **>(names),
                                    &blocking) == 0) {
        return nullptr;
    }
    if (blocking == 0) {
        return PyBool_FromLong(try_acquire(as_lock(self)));
    }
    return lock_acquire(as_lock(self)) ? Py_NewRef(Py_True) : nullptr;
}

PyObject *call_release(PyObject *self, PyObject *) {
    if (!is_owned(as_lock(self))) {
        PyErr_SetString(PyExc_RuntimeError, "cannot release un-acquired lock");
        return nullptr;
    }
    lock_release(as_lock(self));
    Py_RETURN_NONE;
}

PyObject *call_enter(PyObject *self, PyObject *) {
    return lock_acquire(as_lock(self)) ? Py_NewRef(Py_True) : nullptr;
}

PyObject *call_is_owned(PyObject *self, PyObject *) {
    return PyBool_FromLong(is_owned(as_lock(self)));
}

PyMethodDef lock_methods[] = {
    {"acquire", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_acquire)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"release", call_release, METH_NOARGS, nullptr},
    {"is_owned", call_is_owned, METH_NOARGS, nullptr},
    {"__enter__", call_enter, METH_NOARGS, nullptr},
    {"__exit__", call_release, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

PyTypeObject lock_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.Lock",
    .tp_basicsize = sizeof(Lock),
    .tp_dealloc = lock_free,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The runtime's reentrant lock.",
    .tp_methods = lock_methods,
    .tp_new = lock_make,
};

} // namespace swapkit
