// failures.cpp - exceptions that nobody can be handed.
#include "failures.hpp"

#include "links.hpp"
#include "operators.hpp"

#include <cstdint>
#include <optional>
#include <utility>
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

// What becomes of an exception from here on.
enum class Fate : std::uint8_t { reported, raised_on_main, raised_here };

// None: a signal handler has raised in there, which is set.
std::optional<Fate> note(const Ref<> &error, bool is_foreign) {
    Ref<> flag = Ref<>::steal(PyBool_FromLong(is_foreign));
    Ref<> is_kept = Ref<>::steal(
        PyObject_CallFunctionObjArgs(links.note_interruption, error.get(), flag.get(), nullptr));
    if (!is_kept) {
        return std::nullopt;
    }
    if (is_kept.get() == Py_None) {
        return Fate::raised_here;
    }
    return is_kept.get() == Py_True ? Fate::raised_on_main : Fate::reported;
}

void settle_fate(Fate fate, const Named *named, const Ref<> &error) {
    switch (fate) {
    case Fate::raised_on_main:
        (void)Py_AddPendingCall(&raise_next, nullptr); // if they are too many: at the next hook
        break;
    case Fate::raised_here: // by its class, as another thread has set it
        (void)PyThreadState_SetAsyncExc(PyThread_get_thread_ident(),
                                        as_object(Py_TYPE(error.get())));
        break;
    default:
        report(named, error);
    }
}

// Let the exception that is set be nobody's. `is_foreign`: no code of ours can have raised it.
void dispose(const Named *named, bool is_foreign) {
    struct Left {
        Ref<> error;
        bool is_foreign;
    };
    struct Settled {
        Ref<> error;
        Fate fate;
    };
    constexpr int most_tries = 16;
    if (PyErr_Occurred() == nullptr) {
        return;
    }
    std::vector<Left> left;
    std::vector<Settled> settled; // to be raised once no Python of ours runs any more
    left.push_back({.error = take_exception(), .is_foreign = is_foreign});
    for (int tries = 0; !left.empty() && tries < most_tries; tries++) {
        std::optional<Fate> fate = note(left.back().error, left.back().is_foreign);
        if (!fate) {
            left.push_back({.error = take_exception(), .is_foreign = true});
            continue;
        }
        settled.push_back({.error = std::move(left.back().error), .fate = *fate});
        left.pop_back();
    }
    for (const Left &each : left) {
        report(named, each.error);
    }
    for (const Settled &each : settled) {
        settle_fate(each.fate, named, each.error);
    }
}

} // namespace

void swallow(const Named *named) { dispose(named, false); }

void put_off(const Named *named) { dispose(named, true); }

} // namespace swapkit
