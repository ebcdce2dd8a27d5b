// hook_bypass.cpp - threads that bypass module hooks.
#include "running/hook_bypass.hpp"

#include "python/links.hpp"

#include <frameobject.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace swapkit {

namespace {

// The GIL guards everything here.

struct BypassState {
    std::uint64_t period; // in which the bypass began; 0: the bypass has ended
    const void *root;     // the module in whose call the thread bypasses the hooks
};

struct Bypass {
    PyObject ob_base;
    std::shared_ptr<BypassState> state; // shared with its thread, which may end first
};

std::uint64_t period = 1; // changes with every change of the module hooks' listeners
thread_local std::shared_ptr<BypassState> latest_bypass;

bool is_bypassing() { return latest_bypass && latest_bypass->period == period; }

// ---- torch's check ------------------------------------------------------------------------------

bool runs(PyFrameObject *frame, PyObject *code) {
    Ref<PyCodeObject> own = Ref<PyCodeObject>::steal(PyFrame_GetCode(frame));
    return as_object(own.get()) == code;
}

// Return whether a frame runs a call of the root, the module in whose call the thread bypasses the
// hooks: a nested call, or one after a call that was interrupted unnoticed. -1: an exception is
// set.
int is_of_root(Ref<PyFrameObject> frame) {
    // The caller's frame has fewer locals, and reading locals copies them.
    Ref<PyFrameObject> caller = Ref<PyFrameObject>::steal(PyFrame_GetBack(frame.get()));
    if (caller && runs(caller.get(), links.call_around)) {
        frame = std::move(caller);
    }
    Ref<> locals = attribute<"f_locals">(as_object(frame.get()));
    Ref<> module =
        Ref<>::steal(locals ? PyObject_GetItem(locals.get(), interned<"self">()) : nullptr);
    return module ? static_cast<int>(module.get() == latest_bypass->root) : -1;
}

// Return whether torch checks the hooks of a table. -1: an exception is set.
template <bool is_last> int table_bool(PyObject *self) {
    Py_ssize_t count = PyDict_Size(self);
    if (!is_bypassing() || count != 1) {
        return count > 0 ? 1 : 0;
    }
    auto frame = Ref<PyFrameObject>::share(PyEval_GetFrame());
    if (!frame || !runs(frame.get(), links.call_of_module)) {
        return 1;
    }
    return is_last ? 0 : is_of_root(std::move(frame));
}

template <bool is_last> PyNumberMethods table_number = {.nb_bool = table_bool<is_last>};

// ---- bypasses
// --------------------------------------------------------------------------------------

Bypass *as_bypass(PyObject *self) { return reinterpret_cast<Bypass *>(self); }

PyObject *prepare_bypass(PyObject *, PyObject *argument) {
    void *root = PyLong_AsVoidPtr(argument);
    if (PyErr_Occurred() != nullptr) {
        return nullptr;
    }
    PyObject *made = bypass_type.tp_alloc(&bypass_type, 0);
    if (made != nullptr) {
        new (&as_bypass(made)->state) std::shared_ptr<BypassState>(
            std::make_shared<BypassState>(BypassState{.period = period, .root = root}));
    }
    return made;
}

PyObject *begin_bypass(PyObject *, PyObject *bypass) {
    if (Py_TYPE(bypass) != &bypass_type) {
        return PyErr_Format(PyExc_TypeError, "expected a Bypass, not %R", bypass);
    }
    latest_bypass = as_bypass(bypass)->state;
    Py_RETURN_NONE;
}

PyObject *end_bypass(PyObject *, PyObject *) {
    if (latest_bypass) {
        latest_bypass->period = 0;
    }
    Py_RETURN_NONE;
}

PyObject *interrupt_bypasses(PyObject *, PyObject *) {
    period++;
    Py_RETURN_NONE;
}

PyObject *ask_bypassing(PyObject *, PyObject *) { return PyBool_FromLong(is_bypassing()); }

PyObject *rest_end(PyObject *self, PyObject *) {
    as_bypass(self)->state->period = 0;
    Py_RETURN_NONE;
}

void rest_free(PyObject *self) {
    std::destroy_at(&as_bypass(self)->state);
    Py_TYPE(self)->tp_free(self);
}

PyMethodDef rest_methods[] = {
    {"end", rest_end, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

PyTypeObject bypass_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.Bypass",
    .tp_basicsize = sizeof(Bypass),
    .tp_dealloc = rest_free,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "A bypass of torch's hooks on one thread.",
    .tp_methods = rest_methods,
};

PyTypeObject first_table_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.FirstTable",
    .tp_as_number = &table_number<false>,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Replaces torch's table of one kind of hook: holds swapkit's hooks and other hooks.",
    .tp_base = &PyODict_Type,
};

PyTypeObject last_table_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "swapkit._runtime._shim.LastTable",
    .tp_as_number = &table_number<true>,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "A FirstTable for the table that torch queries last.",
    .tp_base = &PyODict_Type,
};

bool hide_table_checks() {
    for (PyTypeObject *type : {&first_table_type, &last_table_type}) {
        if (PyDict_GetItemString(type->tp_dict, "__bool__") != nullptr &&
            PyDict_DelItemString(type->tp_dict, "__bool__") != 0) {
            return false;
        }
        PyType_Modified(type);
    }
    return true;
}

PyMethodDef bypass_functions[] = {
    {"prepare_bypass", shielded<prepare_bypass>, METH_O, nullptr},
    {"begin_bypass", begin_bypass, METH_O, nullptr},
    {"end_bypass", end_bypass, METH_NOARGS, nullptr},
    {"interrupt_bypasses", interrupt_bypasses, METH_NOARGS, nullptr},
    {"is_bypassing", ask_bypassing, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace swapkit
