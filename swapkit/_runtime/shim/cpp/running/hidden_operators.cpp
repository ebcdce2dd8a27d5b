// hidden_operators.cpp - a context manager that hides operators from the user's modes, subclasses
// and transforms. It runs no Python code: if a signal handler raised between two lines of a Python
// version, the traceback would keep torch's guards, and they would later restore an outdated state.
#include "python/links.hpp"
#include "python/types.hpp"
#include "recompute/recomputed.hpp"

#include <array>
#include <utility>

namespace swapkit {

namespace {

struct Hidden {
    PyObject ob_base;
    std::array<PyObject *, 3> guards; // owned and entered; null: not entered, or exited
    char is_deeper;                   // they are not captured, either
};

// Exit the guards, innermost first. False: an exception is set.
bool leave(Hidden *hidden) {
    bool is_done = true;
    Deeper::depth() -= std::exchange(hidden->is_deeper, 0);
    for (auto each = hidden->guards.rbegin(); each != hidden->guards.rend(); ++each) {
        Ref<> guard = Ref<>::steal(std::exchange(*each, nullptr));
        is_done =
            (!guard || call_method<"__exit__">(guard.get(), Py_None, Py_None, Py_None)) && is_done;
    }
    return is_done;
}

PyObject *hidden_enter(Hidden *hidden) {
    const std::array<PyObject *, 3> kinds = {links.no_function_modes, links.no_dispatch_modes,
                                             links.no_transforms};
    for (std::size_t at = 0; at < kinds.size(); at++) {
        Ref<> guard = call(kinds[at]);
        if (!guard || !call_method<"__enter__">(guard.get())) {
            PutAside failure;
            (void)leave(hidden);
            return nullptr;
        }
        hidden->guards[at] = guard.release();
    }
    Deeper::depth()++;
    hidden->is_deeper = 1;
    return Py_NewRef(as_object(hidden));
}

Type hidden_type(Life<Hidden, MadeBy<[](Hidden *) { return true; }>, Freed<leave>>(), "Hidden",
                 "A context manager that hides operators from all observers.",
                 method<"__enter__", hidden_enter>(),
                 method<"__exit__", [](Hidden *hidden, Unread) { return leave(hidden); }>());

} // namespace

} // namespace swapkit
