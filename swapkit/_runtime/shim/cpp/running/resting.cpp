// resting.cpp - threads that rest from module hooks.
#include "running/resting.hpp"

#include "python/links.hpp"

#include <frameobject.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace swapkit {

namespace {

// The GIL guards everything here.

struct RestState {
    std::uint64_t period; // in which the rest began; 0: the rest has ended
    const void *root;     // the module in whose call the thread rests
};

struct Rest {
    PyObject ob_base;
    std::shared_ptr<RestState> state; // shared with its thread, which may end first
};

std::uint64_t period = 1; // changes with every change of the module hooks' listeners
thread_local std::shared_ptr<RestState> latest_rest;

bool is_resting() { return latest_rest && latest_rest->period == period; }

// ---- torch's check ------------------------------------------------------------------------------

bool runs(PyFrameObject *frame, PyObject *code) {
    Ref<PyCodeObject> own = Ref<PyCodeObject>::steal(PyFrame_GetCode(frame));
    return as_object(own.get()) == code;
}

// Return whether a frame runs a call of the root, the module in whose call the thread rests: a
// nested call, or one after a call that was interrupted unnoticed. -1: an exception is set.
int is_of_root(Ref<PyFrameObject> frame) {
    // The caller's frame has fewer locals, and reading locals copies them.
    Ref<PyFrameObject> caller = Ref<PyFrameObject>::steal(PyFrame_GetBack(frame.get()));
    if (caller && runs(caller.get(), links.call_around)) {
        frame = std::move(caller);
    }
    Ref<> locals = attribute<"f_locals">(as_object(frame.get()));
    Ref<> module =
        Ref<>::steal(locals ? PyObject_GetItem(locals.get(), interned<"self">()) : nullptr);
    return module ? static_cast<int>(module.get() == latest_rest->root) : -1;
}

// Return whether torch checks the hooks of a table. -1: an exception is set.
template <bool is_last> int table_bool(PyObject *self) {
    Py_ssize_t count = PyDict_Size(self);
    if (!is_resting() || count != 1) {
        return count > 0 ? 1 : 0;
    }
    auto frame = Ref<PyFrameObject>::share(PyEval_GetFrame());
    if (!frame || !runs(frame.get(), links.call_of_module)) {
        return 1;
    }
    return is_last ? 0 : is_of_root(std::move(frame));
}

template <bool is_last> PyNumberMethods table_number = {.nb_bool = table_bool<is_last>};

// ---- rests --------------------------------------------------------------------------------------

Rest *as_rest(PyObject *self) { return reinterpret_cast<Rest *>(self); }

PyObject *prepare_rest(PyObject *, PyObject *argument) {
    void *root = PyLong_AsVoidPtr(argument);
    if (PyErr_Occurred() != nullptr) {
        return nullptr;
    }
    PyObject *made = rest_type.tp_alloc(&rest_type, 0);
    if (made != nullptr) {
        new (&as_rest(made)->state) std::shared_ptr<RestState>(
            std::make_shared<RestState>(RestState{.period = period, .root = root}));
    }
    return made;
}

PyObject *begin_rest(PyObject *, PyObject *rest) {
    if (Py_TYPE(rest) != &rest_type) {
        return PyErr_Format(PyExc_TypeError, "a Rest is needed, not %R", rest);
    }
    latest_rest = as_rest(rest)->state;
    Py_RETURN_NONE;
}

PyObject *end_rest(PyObject *, PyObject *) {
    if (latest_rest) {
        latest_rest->period = 0;
    }
    Py_RETURN_NONE;
}

PyObject *interrupt_rests(PyObject *, PyObject *) {
    period++;
    Py_RETURN_NONE;
}

PyObject *ask_resting(PyObject *, PyObject *) { return PyBool_FromLong(is_resting()); }

PyObject *rest_end(PyObject *self, PyObject *) {
    as_rest(self)->state->period = 0;
    Py_RETURN_NONE;
}

void rest_free(PyObject *self) {
    std::destroy_at(&as_rest(self)->state);
    Py_TYPE(self)->tp_free(self);
}

PyMethodDef rest_methods[] = {
    {"end", rest_end, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

PyTypeObject rest_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.Rest",
    .tp_basicsize = sizeof(Rest),
    .tp_dealloc = rest_free,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "One rest of a thread.",
    .tp_methods = rest_methods,
};

PyTypeObject first_table_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.FirstTable",
    .tp_as_number = &table_number<false>,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Torch's table of a kind of hooks, which holds ours, and those that others add.",
    .tp_base = &PyODict_Type,
};

PyTypeObject last_table_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.LastTable",
    .tp_as_number = &table_number<true>,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The same of the one that torch asks last.",
    .tp_base = &PyODict_Type,
};

PyMethodDef rest_functions[] = {
    {"prepare_rest", shielded<prepare_rest>, METH_O, nullptr},
    {"begin_rest", begin_rest, METH_O, nullptr},
    {"end_rest", end_rest, METH_NOARGS, nullptr},
    {"interrupt_rests", interrupt_rests, METH_NOARGS, nullptr},
    {"is_resting", ask_resting, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace swapkit
