// failures.cpp - exceptions that nobody can be handed.
#include "failures.hpp"

#include "links.hpp"
#include "operators.hpp"

#include <vector>

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

void report(const Named *named, const Ref<> &error) {
    PyErr_SetObject(as_object(Py_TYPE(error.get())), error.get());
    PyErr_WriteUnraisable(named->function);
}

// A pending call of Python, which the main thread makes, as it runs handlers.
int raise_next(void *) { return raise_interruption() ? 0 : -1; }

} // namespace

void swallow(const Named *named) {
    constexpr int most_tries = 16;
    if (PyErr_Occurred() == nullptr) {
        return;
    }
    std::vector<Ref<>> left;
    left.push_back(take_exception());
    for (int tries = 0; !left.empty() && tries < most_tries; tries++) {
        Ref<> is_kept =
            Ref<>::steal(PyObject_CallOneArg(links.note_interruption, left.back().get()));
        if (!is_kept) { // a signal handler has raised in there
            left.push_back(take_exception());
            continue;
        }
        if (is_kept.get() == Py_True) {
            (void)Py_AddPendingCall(&raise_next, nullptr); // if they are too many: at the next hook
        } else {
            report(named, left.back());
        }
        left.pop_back();
    }
    for (const Ref<> &each : left) {
        report(named, each);
    }
}

} // namespace swapkit
