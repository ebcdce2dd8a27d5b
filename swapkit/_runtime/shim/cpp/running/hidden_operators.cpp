// hidden_operators.cpp - a context manager that hides operators from the user's modes, subclasses
// and transforms. It runs no Python code: if a signal handler raised between two lines of a Python
// version, the traceback would keep torch's guards, and they would later restore an outdated state.
#include "running/hidden_operators.hpp"

#include "python/links.hpp"
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

Hidden *as_hidden(PyObject *self) { return reinterpret_cast<Hidden *>(self); }

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

PyObject *hidden_enter(PyObject *self, PyObject *) {
    const std::array<PyObject *, 3> kinds = {links.no_function_modes, links.no_dispatch_modes,
                                             links.no_transforms};
    for (std::size_t at = 0; at < kinds.size(); at++) {
        Ref<> guard = Ref<>::steal(PyObject_CallNoArgs(kinds[at]));
        if (!guard || !call_method<"__enter__">(guard.get())) {
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            (void)leave(as_hidden(self));
            PyErr_Restore(type, value, trace);
            return nullptr;
        }
        as_hidden(self)->guards[at] = guard.release();
    }
    Deeper::depth()++;
    as_hidden(self)->is_deeper = 1;
    return Py_NewRef(self);
}

PyObject *hidden_exit(PyObject *self, PyObject *) {
    return leave(as_hidden(self)) ? Py_NewRef(Py_None) : nullptr;
}

void hidden_free(PyObject *self) {
    (void)leave(as_hidden(self));
    Py_TYPE(self)->tp_free(self);
}

PyMethodDef hidden_methods[] = {
    {"__enter__", shielded<hidden_enter>, METH_NOARGS, nullptr},
    {"__exit__", shielded<hidden_exit>, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

PyTypeObject hidden_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.Hidden",
    .tp_basicsize = sizeof(Hidden),
    .tp_dealloc = hidden_free,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "A context manager that hides operators from all observers.",
    .tp_methods = hidden_methods,
    .tp_new = PyType_GenericNew,
};

} // namespace swapkit
