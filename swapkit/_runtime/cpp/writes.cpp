// writes.cpp - what operators are about to change in place.
#include "writes.hpp"

#include "capturing.hpp"
#include "links.hpp"
#include "operators.hpp"
#include "tensors.hpp"

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace swapkit {

namespace {

// Owned, and for good: a thread that ends may not have the interpreter any more.
thread_local PyObject *watcher = nullptr;

// What the watcher runs itself is not told.
class Unwatched {
  public:
    Unwatched() : former_(std::exchange(watcher, nullptr)) {}
    ~Unwatched() { watcher = former_; }
    Unwatched(const Unwatched &) = delete;
    Unwatched &operator=(const Unwatched &) = delete;
    PyObject *get() const { return former_; }

  private:
    PyObject *former_;
};

bool append(PyObject *list, const at::Tensor &tensor) {
    if (!tensor.defined()) {
        return true;
    }
    Ref<> wrapped = Ref<>::steal(wrap(tensor.unsafeGetTensorImpl()));
    return wrapped && PyList_Append(list, wrapped.get()) == 0;
}

bool append_value(PyObject *list, const c10::IValue &value) {
    if (value.isTensor()) {
        return append(list, value.toTensor());
    }
    if (value.isTensorList()) {
        for (const at::Tensor &each : value.toTensorVector()) {
            if (!append(list, each)) {
                return false;
            }
        }
    }
    return true;
}

bool append_written(const Named *named, const c10::IValue *arguments, PyObject *list) {
    for (std::size_t at : named->declared) {
        if (!append_value(list, arguments[at])) {
            return false;
        }
    }
    if (!named->undeclared.empty() && named->is_training(arguments)) {
        for (std::size_t at : named->undeclared) {
            if (!append_value(list, arguments[at])) {
                return false;
            }
        }
    }
    return true;
}

bool tell(const Named *named, const c10::IValue *arguments, PyObject *whom) {
    Ref<> tensors = Ref<>::steal(PyList_New(0));
    if (!tensors || !append_written(named, arguments, tensors.get())) {
        return false;
    }
    PyObject *stack[] = {nullptr, named->function, tensors.get()};
    return bool(Ref<>::steal(
        PyObject_Vectorcall(whom, stack + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr)));
}

// watch_writes(watcher): let it be told on this thread from now on, as watcher(function, tensors);
// None: nobody is. Who was until now.
PyObject *watch_writes(PyObject *, PyObject *argument) {
    PyObject *next = argument == Py_None ? nullptr : Py_NewRef(argument);
    PyObject *former = std::exchange(watcher, next);
    return former == nullptr ? Py_NewRef(Py_None) : former;
}

} // namespace

bool is_watched() { return watcher != nullptr; }

void tell_writes(const Named *named, const c10::IValue *arguments) {
    WithPython python;
    Deeper ours;
    OwnOperators unseen;
    Unwatched meanwhile;
    if (tell(named, arguments, meanwhile.get())) {
        return;
    }
    bool is_out_of_memory = PyErr_ExceptionMatches(links.out_of_memory) != 0;
    swallow(named);
    TORCH_CHECK_WITH(OutOfMemoryError, !is_out_of_memory, "swapkit: no memory to keep what ",
                     named->op.schema().name(), " is about to change in a part that runs twice");
    TORCH_CHECK(false, "swapkit: what ", named->op.schema().name(),
                " is about to change in a part that runs twice could not be kept");
}

PyMethodDef writes_functions[] = {
    {"watch_writes", shielded<watch_writes>, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace swapkit
