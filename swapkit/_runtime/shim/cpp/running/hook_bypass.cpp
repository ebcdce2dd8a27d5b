// hook_bypass.cpp - threads that bypass module hooks.
#include "running/hook_bypass.hpp"

#include "python/links.hpp"
#include "python/types.hpp"

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

Ref<Bypass> prepare_bypass(std::size_t root) {
    Ref<Bypass> made = allocate<Bypass>();
    if (made) {
        new (&made->state) std::shared_ptr<BypassState>(std::make_shared<BypassState>(
            BypassState{.period = period, .root = reinterpret_cast<const void *>(root)}));
    }
    return made;
}

void end_bypass() {
    if (latest_bypass) {
        latest_bypass->period = 0;
    }
}

const Functions bypass_functions{
    module_function<"prepare_bypass", prepare_bypass>(),
    module_function<"begin_bypass", [](Bypass *bypass) { latest_bypass = bypass->state; }>(),
    module_function<"end_bypass", end_bypass>(),
    module_function<"interrupt_bypasses", [] { period++; }>(),
    module_function<"is_bypassing", [] { return int{is_bypassing()}; }>()};

Type bypass_type(Life<Bypass, Freed<[](Bypass *bypass) { std::destroy_at(&bypass->state); }>>(),
                 "Bypass", "A bypass of torch's hooks on one thread.",
                 method<"end", [](Bypass *bypass) { bypass->state->period = 0; }>());

Type first_table_type(
    &PyODict_Type, &table_number<false>, "FirstTable",
    "Replaces torch's table of one kind of hook: holds swapkit's hooks and other hooks.");

Type last_table_type(&PyODict_Type, &table_number<true>, "LastTable",
                     "A FirstTable for the table that torch queries last.");

} // namespace

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

} // namespace swapkit
