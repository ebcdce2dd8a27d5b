// failures.cpp - exceptions that nobody can be handed.
#include "failures.hpp"

#include "links.hpp"
#include "operators.hpp"

namespace swapkit {

namespace {

// The exception that is set, which is not any more.
Ref<> take_exception() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != nullptr) {
        PyException_SetTraceback(value, trace);
    }
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return Ref<>::steal(value);
}

// Whether a signal handler raised it: then it waits for its turn. Another handler may interrupt
// that, so often.
bool keep_interruption(PyObject *error, int tries) {
    for (; tries > 0; tries--) {
        Ref<> is_kept = Ref<>::steal(PyObject_CallOneArg(links.note_interruption, error));
        if (is_kept) {
            return is_kept.get() == Py_True;
        }
        Ref<> other = take_exception();
        (void)keep_interruption(other.get(), tries - 1);
    }
    return false;
}

// A pending call of Python, which the main thread makes, as it runs handlers.
int raise_next(void *) { return raise_interruption() ? 0 : -1; }

} // namespace

void swallow(const Named *named) {
    constexpr int most_tries = 8;
    if (PyErr_Occurred() == nullptr) {
        return;
    }
    Ref<> error = take_exception();
    if (keep_interruption(error.get(), most_tries)) {
        (void)Py_AddPendingCall(&raise_next, nullptr); // if there are too many: at the next hook
    } else {
        PyErr_SetObject(as_object(Py_TYPE(error.get())), error.get());
        PyErr_WriteUnraisable(named->function);
    }
}

} // namespace swapkit
