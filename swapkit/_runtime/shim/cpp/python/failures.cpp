// failures.cpp - exceptions that cannot be raised in any caller.
#include "python/failures.hpp"

#include "python/links.hpp"
#include "recompute/recipes.hpp"
#include "running/operator_clock.hpp"

#include <utility>
#include <vector>

namespace swapkit {

namespace {

void report(PyObject *where, const Ref<> &error) {
    PyErr_SetObject(as_object(Py_TYPE(error.get())), error.get());
    PyErr_WriteUnraisable(where);
}

// A pending call of Python: the main thread runs it when it runs signal handlers.
int raise_next(void *) { return raise_interruption() ? 0 : -1; }

// Raise an exception where Python continues: on the main thread if it `is_kept`, else here.
void raise_later(const Ref<> &error, bool is_kept) {
    if (is_kept) {
        (void)Py_AddPendingCall(&raise_next, nullptr); // if too many are pending: at the next hook
    } else {                                           // by its class, as the other thread set it
        (void)PyThreadState_SetAsyncExc(PyThread_get_thread_ident(),
                                        as_object(Py_TYPE(error.get())));
    }
}

// Handle the current exception without raising it. `is_foreign`: our code did not raise it.
void dispose(PyObject *where, bool is_foreign) {
    struct Left {
        Ref<> error;
        bool flag;
    };
    constexpr int most_tries = 16;
    if (PyErr_Occurred() == nullptr) {
        return;
    }
    std::vector<Left> left, later; // flags: is foreign; is kept for the main thread
    left.push_back({.error = take_exception(), .flag = is_foreign});
    std::vector<Ref<>> failures;
    for (int tries = 0; !left.empty() && tries < most_tries; tries++) {
        Ref<> is_kept = call(links.note_interruption, left.back().error.get(), left.back().flag);
        if (!is_kept) { // a signal handler raised in the call
            left.push_back({.error = take_exception(), .flag = true});
            continue;
        }
        if (is_kept.get() == Py_False) {
            failures.push_back(std::move(left.back().error));
        } else {
            later.push_back(
                {.error = std::move(left.back().error), .flag = is_kept.get() == Py_True});
        }
        left.pop_back();
    }
    for (const Left &each : left) {
        report(where, each.error);
    }
    for (const Ref<> &each : failures) {
        report(where, each);
    }
    for (const Left &each : later) { // last: they would interrupt the reports
        raise_later(each.error, each.flag);
    }
}

} // namespace

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

void swallow(const Named *named) { dispose(named->function, false); }

void swallow(PyObject *where) { dispose(where, false); }

void put_off(const Named *named) { dispose(named->function, true); }

} // namespace swapkit
